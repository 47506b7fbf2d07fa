"""`torch_xla.debug.metrics_compare_utils`: reports of `metrics_report` as numbers."""

from __future__ import annotations

import re

from unisono.compat.left_out import left_out

__getattr__ = left_out(__name__)


def parse_metrics_report(report: str) -> dict[str, float]:
    """A report's numbers: `NAME__TotalSamples`, `NAME__Accumulator_sec` of metrics, `NAME__Value` of counters."""
    numbers: dict[str, float] = {}
    for name, count, milliseconds in re.findall(
        r"Metric: (\S+)\s+TotalSamples: (\d+)\s+Accumulator: ([\d.]+)ms", report
    ):
        numbers |= {f"{name}__TotalSamples": int(count), f"{name}__Accumulator_sec": float(milliseconds) / 1000}
    return numbers | {
        f"{name}__Value": int(value) for name, value in re.findall(r"Counter: (.+?)\s+Value: (\d+)", report)
    }
