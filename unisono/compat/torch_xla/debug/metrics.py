"""`torch_xla.debug.metrics`: what this replica has done, from its timeline and from its devices' runtime.

Metrics are the phases of its loops ("fetch", "compute", "reduce", "step", "move"), in nanoseconds. Counters are
"samples", "batches", "steps", "bytes", "MarkStep" and others; on a compiling runtime also "CachedCompile" and
"UncachedCompile", which count for the whole process.
"""

from __future__ import annotations

import time
from collections import Counter

from unisono import current_world
from unisono.compat.left_out import left_out

__getattr__ = left_out(__name__)

_RUNTIME_NAMES = {"graphs compiled": "UncachedCompile", "graphs found compiled": "CachedCompile"}
_TIME = "ns of "  # a phase


class _Cleared:
    """What a replica had counted when it cleared its metrics: counters, with the nanoseconds of each phase; and when
    that was."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.at_ns = 0


def _count_all() -> Counter[str]:
    world, counts = current_world(), Counter[str]()
    for track in world.timeline.tracks():
        counts.update(
            {**track.counts.copy(), **{f"{_TIME}{phase}": took for phase, took in track.totals.copy().items()}}
        )
    counts.update({_RUNTIME_NAMES.get(name, name): value for name, value in world.backend.counters().items()})
    counts.subtract(current_world().state.part(_Cleared).counts)
    return counts


def counter_names() -> list[str]:
    """The counters with a nonzero value."""
    return sorted(name for name, value in _count_all().items() if value and not name.startswith(_TIME))


def counter_value(counter_name: str) -> int | None:
    """The value of a counter; None if it is zero."""
    return _count_all()[counter_name] or None


def metric_names() -> list[str]:
    """The phases that have taken any time."""
    took = {name.removeprefix(_TIME): ns for name, ns in _count_all().items() if name.startswith(_TIME)}
    return sorted(name for name, ns in took.items() if ns > 0)


def metric_data(metric_name: str) -> tuple[int, float, list[tuple[float, float]]] | None:
    """How often a phase was entered, its total nanoseconds, and `(end in seconds, nanoseconds)` of the latest spans.

    None if the phase has taken no time.
    """
    world = current_world()
    spans = [span for track in world.timeline.tracks() for span in track.spans.copy()]
    samples = [
        (span.stop / 1e9, float(span.stop - span.start))
        for span in sorted(spans, key=lambda span: span.stop)
        if span.phase == metric_name and span.stop > world.state.part(_Cleared).at_ns
    ]
    total = _count_all()[f"{_TIME}{metric_name}"]
    return (len(samples), float(total), samples) if total > 0 else None


def metrics_report() -> str:
    """All metrics and counters, as text."""
    parts = []
    for name in metric_names():
        count, total, _ = metric_data(name) or (0, 0.0, [])
        parts.append(f"Metric: {name}\n  TotalSamples: {count}\n  Accumulator: {total / 1e6:.3f}ms\n")
    parts += [f"Counter: {name}\n  Value: {counter_value(name)}\n" for name in counter_names()]
    return "".join(parts)


def clear_all() -> None:
    """Restart counting. Reports of this framework (`unisono.gather_report`) are not affected."""
    cleared = current_world().state.part(_Cleared)
    cleared.counts.update(_count_all())
    cleared.at_ns = time.perf_counter_ns()


clear_counters = clear_metrics = clear_all
