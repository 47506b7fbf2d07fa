"""`torch_xla.debug.metrics`: what this replica has done, from its timeline and from its devices' runtime.

Metrics are the phases of its loops ("fetch", "compute", "reduce", "step", "move"), in nanoseconds. Counters are
"samples", "batches", "steps", "bytes", "MarkStep" and others; on a compiling runtime also "CachedCompile" and
"UncachedCompile", which count for the whole process.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

from unisono.compat.absent import refuse
from unisono.timeline import PHASES
from unisono.world import World, current_world

_RUNTIME_NAMES = {"graphs compiled": "UncachedCompile", "graphs found compiled": "CachedCompile"}


class _Seen(NamedTuple):
    """What was counted up to a point in time: counters, the total nanoseconds of each phase, and the end of the last
    span."""

    counts: Counter[str]
    totals: Counter[str]
    stop: int


class _Cleared:
    """What a replica had counted when it cleared its metrics."""

    seen = _Seen(Counter(), Counter(), 0)


def __getattr__(name: str) -> Any:
    refuse(__name__, name, {"executed_fallback_ops": "nothing falls back here: an operation runs, or raises an error"})


def counter_names() -> list[str]:
    """The counters with a nonzero value."""
    return sorted(name for name, value in _counts().items() if value)


def counter_value(counter_name: str) -> int | None:
    """The value of a counter; None if it is zero."""
    return _counts()[counter_name] or None


def metric_names() -> list[str]:
    """The phases that have taken any time."""
    return [phase for phase in PHASES if metric_data(phase) is not None]


def metric_data(metric_name: str) -> tuple[int, float, list[tuple[float, float]]] | None:
    """How often a phase was entered, its total nanoseconds, and `(end in seconds, nanoseconds)` of the latest spans.

    None if the phase has taken no time.
    """
    world, before = current_world(), _before()
    tracks = world.timeline.tracks()
    total = sum(track.totals.get(metric_name, 0) for track in tracks) - before.totals[metric_name]
    spans = [span for track in tracks for span in track.spans.copy()]
    samples = [
        (span.stop / 1e9, float(span.stop - span.start))
        for span in sorted(spans, key=lambda span: span.stop)
        if span.phase == metric_name and span.stop > before.stop
    ]
    return (len(samples), float(total), samples) if total > 0 else None


def metrics_report() -> str:
    """All metrics and counters, as text."""
    parts = []
    for name in metric_names():
        count, total, _ = metric_data(name) or (0, 0.0, [])
        parts.append(f"Metric: {name}\n  TotalSamples: {count}\n  Accumulator: {total / 1e6:.3f}ms\n")
    counts = _counts()
    parts += [f"Counter: {name}\n  Value: {counts[name]}\n" for name in counter_names()]
    return "".join(parts)


def short_metrics_report(counter_names: list[str] | None = None, metric_names: list[str] | None = None) -> str:
    """One line for each of the given counters and metrics; by default for all of them."""
    names = counter_names if counter_names is not None else sorted(_counts())
    phases = metric_names if metric_names is not None else list(PHASES)
    lines = [f"Counter: {name} Value: {value}\n" for name in names if (value := counter_value(name))]
    lines += [f"Metric: {name} Accumulator: {data[1] / 1e6:.3f}ms\n" for name in phases if (data := metric_data(name))]
    return "".join(lines)


def clear_all() -> None:
    """Restart counting. Reports of this framework (`unisono.gather_report`) are not affected."""
    world = current_world()
    tracks = world.timeline.tracks()
    totals: Counter[str] = Counter()
    for track in tracks:
        totals.update(track.totals.copy())
    stop = max((track.spans[-1].stop for track in tracks if track.spans), default=0)
    world.state.part(_Cleared).seen = _Seen(_counted(world), totals, stop)


clear_counters = clear_metrics = clear_all


def _before() -> _Seen:
    return current_world().state.part(_Cleared).seen


def _counts() -> Counter[str]:
    counts = _counted(current_world())
    counts.subtract(_before().counts)
    return counts


def _counted(world: World) -> Counter[str]:
    counts: Counter[str] = Counter()
    for track in world.timeline.tracks():
        counts.update(track.counts.copy())
    for name, value in world.backend.counters().items():
        counts[_RUNTIME_NAMES.get(name, name)] += value
    return counts
