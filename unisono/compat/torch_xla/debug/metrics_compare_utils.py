"""`torch_xla.debug.metrics_compare_utils`: reports of `metrics_report` as numbers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from unisono.compat.absent import refuse

_METRIC = re.compile(r"Metric: (\S+)\s+TotalSamples: (\d+)\s+Accumulator: ([\d.]+)ms")
_COUNTER = re.compile(r"Counter: (.+?)\s+Value: (\d+)")


def __getattr__(name: str) -> Any:
    refuse(
        __name__, name, {"compare_metrics": "compare the numbers that parse_metrics_report returns, by your own rule"}
    )


def parse_metrics_report(report: str) -> dict[str, float]:
    """A report's numbers: `NAME__TotalSamples`, `NAME__Accumulator_sec` of metrics, `NAME__Value` of counters."""
    numbers: dict[str, float] = {}
    for name, count, milliseconds in _METRIC.findall(report):
        numbers[f"{name}__TotalSamples"] = int(count)
        numbers[f"{name}__Accumulator_sec"] = float(milliseconds) / 1000
    return numbers | {f"{name}__Value": int(value) for name, value in _COUNTER.findall(report)}


def get_data_points_from_metrics_reports(metrics_reports: Sequence[str]) -> dict[str, list[float | None]]:
    """The numbers of several reports, by name, in the reports' order; None if a report has no such number."""
    parsed = [parse_metrics_report(report) for report in metrics_reports]
    return {
        name: [each.get(name) for each in parsed] for name in dict.fromkeys(name for each in parsed for name in each)
    }
