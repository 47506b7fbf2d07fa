"""`accelerate.launchers`: worker processes from a notebook or a script."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from unisono.compat.accelerate.utils.other import patch_environment
from unisono.launch.spawn import spawn


def notebook_launcher(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    num_processes: int | None = None,
    mixed_precision: str = "no",
    max_restarts: int = 0,
    **options: Any,
) -> list[Any]:
    """What `function(*args)` returns in that many worker processes, by default one for each device: `unisono.spawn`.

    `mixed_precision` is that of the Accelerators that the function creates. Options for several machines have no
    effect.
    """

    def work(_: int) -> Any:
        with patch_environment(accelerate_mixed_precision=mixed_precision):
            return function(*args)

    return spawn(work, nprocs=num_processes, max_restarts=max_restarts)
