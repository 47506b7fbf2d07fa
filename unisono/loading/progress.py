"""tqdm for any number of ranks, wherever its output is shown."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib import import_module
from typing import Any

from unisono.loading.device_loader import DeviceLoader
from unisono.report.live_figures import LiveFigures
from unisono.report.terminal import columns_behind_pipe
from unisono.world import World, current_world


def tqdm(
    iterable: Iterable[Any] | None = None,
    *args: Any,
    world: World | None = None,
    live: bool | None = None,
    **options: Any,
) -> Any:
    """Return a tqdm progress bar that only rank zero draws; on the other ranks, the same object draws nothing.

        for batch in unisono.tqdm(loader, desc="train"):

    On a terminal and in a notebook it is `tqdm.auto.tqdm`. In a worker it is a one-line bar, which is updated in place
    if the caller has a terminal; of nested bars, the line shows the one that was updated last. Elsewhere, for example
    in a log, it prints a line every 30 seconds (`mininterval=`), and one at the end. Over a loader that resumes in the
    middle of an epoch it begins at its position (`initial=`), and is called "epoch 3" unless it has a name (`desc=`).

    With `live`, the bar also shows what the run is doing, since about a second ago, in a log since the line before: the
    loss, if `accelerator.log` has got one, after `init_trackers`; the step; samples per second of all ranks; the share
    of the time that the loop waits, and for what; and, if the run has a log directory that all ranks share, the slowest
    rank. The line of a bar that has ended shows that of the whole loop.

    Args:
        iterable, args, options: as for tqdm.
        world: None uses the current one.
        live: whether to show these; None: over a loader of this package.
    """
    bars = import_module("unisono.loading.progress_bars")  # here: tqdm may be missing
    world = world or current_world()
    if world.rank != 0:
        return bars.LineBar(iterable, *args, **{**options, "disable": True})
    if isinstance(iterable, DeviceLoader):
        options.setdefault("initial", iterable.num_skipped())
        if not args:
            options.setdefault("desc", f"epoch {iterable.epoch}")
    if isinstance(iterable, DeviceLoader) if live is None else live:
        options["figures"] = LiveFigures(world)
    file = options.get("file") or sys.stderr
    is_notebook = bars.auto.tqdm is not bars.tqdm_asyncio
    if is_notebook or (hasattr(file, "isatty") and file.isatty()):
        return bars.Bar(iterable, *args, **options)
    columns = columns_behind_pipe() if file is sys.stderr else 0
    return bars.LineBar(iterable, *args, columns=columns, **options)
