"""Predictions are held against what others have measured: each error is the one that docs/simulate.md states."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from unisono.simulation.description import Fleet, Model
from unisono.simulation.prediction import predict

STUDIES: dict[str, Any] = tomllib.loads((Path(__file__).parent / "published.toml").read_text())
PAGE = Path(__file__).parent.parent.parent / "docs" / "simulate.md"
RANGES = {"jitter": (0.0, 0.5), "between_bytes_per_s": (1e8, 1e12), "within_bytes_per_s": (1e8, 1e12)}
LARGEST_ERROR = {"horovod": 0.025, "goyal": 0.01, "dlperf_ddp": 0.02, "dlperf_horovod": 0.1, "tensorflow": 0.115}

Fitted = dict[str, float]
Point = dict[str, Any]


def predicted(study: dict[str, Any], point: Point, fitted: Fitted) -> float:
    """The throughput, or the efficiency, whichever the point has."""
    given = dict(study["models"][point["model"]])
    step_s = given["batch"] / given.pop("samples_per_s")
    model = Model(forward_s=step_s / 3, backward_s=step_s * 2 / 3, **given, jitter=fitted.get("jitter", 0.0))
    links = {name: value for name, value in fitted.items() if name != "jitter"}
    fleet = replace(Fleet(**study["fleet"]), **links)
    rate, base = predict(model, fleet, point["devices"]).samples_per_s, point.get("base", 1)
    alone = predict(model, fleet, base).samples_per_s
    return rate if "throughput" in point else rate / alone * base / point["devices"]


def measured(point: Point) -> float:
    return point.get("throughput") or point["efficiency"]


def bisected(error: Callable[[float], float], low: float, high: float) -> float:
    """Where a monotonic error is zero."""
    rises = error(high) > error(low)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if (error(middle) > 0) == rises else (middle, high)
    return (low + high) / 2


@cache
def fit(name: str) -> Fitted:
    """The fields that some points of a study fit, adjusted in turn."""
    study, fitted = STUDIES[name], Fitted()
    for point in [point for point in study["points"] if "fits" in point] * 5:
        field = point["fits"]

        def error(value: float, point: Point = point, field: str = field) -> float:
            return predicted(study, point, fitted | {field: value}) - measured(point)

        fitted[field] = bisected(error, *RANGES[field])
    return fitted


def errors(name: str) -> Iterator[tuple[Point, float, float]]:
    """Each point, what is predicted of it, and the relative error."""
    for point in STUDIES[name]["points"]:
        found = predicted(STUDIES[name], point, fit(name))
        yield point, found, found / measured(point) - 1


def row(name: str, point: Point, found: float, error: float) -> str:
    """The line of the table in the document."""
    form = "{:,.0f}/s" if "throughput" in point else "{:.1%}"
    numbers = [form.format(each) for each in (measured(point), found)]
    last = f"fits {point['fits']}" if "fits" in point else f"{error:+.1%}"
    return f"| {name} | {point['model']} | {point['devices']} | {numbers[0]} | {numbers[1]} | {last} |"


@pytest.mark.parametrize("name", STUDIES)
def test_what_is_predicted_is_near_to_what_was_measured_and_the_page_states_the_error(name):
    found = list(errors(name))
    assert [point for point, _, error in found if abs(error) > (1e-3 if "fits" in point else LARGEST_ERROR[name])] == []
    page = PAGE.read_text()
    assert [line for each in found if (line := row(name, *each)) not in page] == []


def test_the_fitted_numbers_are_possible_ones_and_fewer_than_those_predicted():
    points = [point for study in STUDIES.values() for point in study["points"]]
    assert sum("fits" in point for point in points) * 2 < len(points)
    jitters = {name: fit(name)["jitter"] for name in STUDIES if "jitter" in fit(name)}
    assert {name for name, each in jitters.items() if not 0 < each < 0.06} == set()
    line_rate = STUDIES["horovod"]["fleet"]["between_bytes_per_s"]
    assert 0.5 < fit("horovod")["between_bytes_per_s"] / line_rate < 1.1


def test_each_study_says_where_its_numbers_are_from_and_how_they_were_read():
    assert all(len(study["source"]) > 5 and len(study["read"]) > 50 for study in STUDIES.values())
