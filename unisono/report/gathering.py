"""The figures of this rank, and of all ranks on rank zero.

*Threads:* the loop's, unless a function says otherwise.
"""

from __future__ import annotations

import os
import platform
from collections import Counter
from collections.abc import Sequence

from unisono.report.summary import CAUSES, LOOP_PHASES, RankSummary, Report
from unisono.report.timeline import DEVICE, FETCH, MOVE, NOT_FINITE, PHASES, Track, wait_counter
from unisono.world import World, current_world


def summarise(world: World | None = None, is_own_thread: bool = True) -> RankSummary:
    """Summarise this rank's run so far; from another thread than its loop's, without spans."""
    world = world or current_world()
    on_device = world.timeline.loop().on_device if is_own_thread else None
    if on_device is not None:
        on_device.read()
    tracks = world.timeline.tracks()
    counts: Counter[str] = Counter()
    for track in tracks:
        # Copied at once: helper threads add keys during the iteration.
        counts.update(track.counts.copy())
    seconds, waited = _seconds(tracks)
    return RankSummary(
        rank=world.rank,
        device=str(world.device),
        pid=os.getpid(),
        seconds=seconds,
        memory=world.backend.memory(world.device),
        peak_memory=world.backend.peak_memory(world.device),
        spans=[(track.name, list(track.spans.copy())) for track in tracks] if is_own_thread else [],
        samples=counts["samples"],
        batches=counts["batches"],
        steps=counts["steps"],
        repeated=counts["repeated"],
        skipped_steps=counts["skipped steps"],
        not_finite=counts[NOT_FINITE],
        waits={cause: waited * counts[wait_counter(cause)] / 1e9 for cause in CAUSES},
        nbytes=counts["bytes"],
        mean_queue=counts["queued"] / counts["batches"] if counts["batches"] else 0.0,
        host=platform.node(),
        counters=world.backend.counters(),
        workers=[describe() for describe in [*world.timeline.tuned.values()]],
    )


def _seconds(tracks: Sequence[Track]) -> tuple[dict[str, float], float]:
    """Seconds by phase, and the fraction of the loops' waiting for data during which their devices were idle."""
    on_device = [each for each in tracks if each.name == DEVICE and each.totals]
    on_host = [each for each in tracks if each.name != DEVICE]
    seconds = {}
    named = dict.fromkeys(phase for each in on_host for phase in each.totals.copy() if phase not in PHASES)
    for phase in (*LOOP_PHASES, MOVE, *named):
        chosen = on_device if on_device and phase != MOVE else on_host
        seconds[phase] = sum(each.totals.get(phase, 0) for each in chosen) / 1e9
    waiting = sum(each.totals.get(FETCH, 0) for each in on_host) / 1e9
    return seconds, seconds[FETCH] / waiting if on_device and waiting else 1.0


def gather_report(world: World | None = None) -> Report | None:
    """Gather every rank's summary. A collective: all ranks must call it.

    Returns:
        The report on rank zero; None on the others.

    Raises:
        BrokenWorldError: a peer failed or departed.
    """
    world = world or current_world()
    ranks = world.comm.all_gather_object(summarise(world))
    return Report(ranks) if world.rank == 0 else None
