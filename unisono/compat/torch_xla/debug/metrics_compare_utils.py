"""`torch_xla.debug.metrics_compare_utils`: reports of `metrics_report` as numbers."""

from __future__ import annotations

import re
from typing import Any

from unisono.compat.absent import refuse

_METRIC = re.compile(r"Metric: (\S+)\s+TotalSamples: (\d+)\s+Accumulator: ([\d.]+)ms")
_COUNTER = re.compile(r"Counter: (.+?)\s+Value: (\d+)")


def __getattr__(name: str) -> Any:
    own = "compare the numbers that parse_metrics_report returns, by your own rule"
    refuse(__name__, name, dict.fromkeys(["compare_metrics", "get_data_points_from_metrics_reports"], own))


def parse_metrics_report(report: str) -> dict[str, float]:
    """A report's numbers: `NAME__TotalSamples`, `NAME__Accumulator_sec` of metrics, `NAME__Value` of counters."""
    numbers: dict[str, float] = {}
    for name, count, milliseconds in _METRIC.findall(report):
        numbers[f"{name}__TotalSamples"] = int(count)
        numbers[f"{name}__Accumulator_sec"] = float(milliseconds) / 1000
    return numbers | {f"{name}__Value": int(value) for name, value in _COUNTER.findall(report)}
