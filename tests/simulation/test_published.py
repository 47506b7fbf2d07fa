"""Predictions, held against what others have measured: the errors are those that docs/simulate.md names."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from unisono.simulation.description import Fleet, Model
from unisono.simulation.prediction import predict

STUDIES: dict[str, Any] = tomllib.loads((Path(__file__).parent / "published.toml").read_text())
RANGES = {"jitter": (0.0, 0.5), "between_bytes_per_s": (1e8, 1e12), "within_bytes_per_s": (1e8, 1e12)}


def described(study: dict[str, Any], name: str, fitted: dict[str, float]) -> tuple[Model, Fleet]:
    given = dict(study["models"][name])
    step_s = given["batch"] / given.pop("samples_per_s")
    model, fleet = Model(forward_s=step_s / 3, backward_s=step_s * 2 / 3, **given), Fleet(**study["fleet"])
    made = [
        replace(each, **{n: v for n, v in fitted.items() if n in {f.name for f in fields(each)}})
        for each in (model, fleet)
    ]
    return made[0], made[1]


def predicted(study: dict[str, Any], point: dict[str, Any], fitted: dict[str, float]) -> float:
    """The throughput, or the efficiency, whichever the point has."""
    model, fleet = described(study, point["model"], fitted)
    rate = predict(model, fleet, point["devices"]).samples_per_s
    base = point.get("base", 1)
    alone = predict(model, fleet, base).samples_per_s
    return rate if "throughput" in point else rate / alone * base / point["devices"]


def measured(point: dict[str, Any]) -> float:
    return point.get("throughput") or point["efficiency"]


def bisected(error: Callable[[float], float], low: float, high: float) -> float:
    """Where the error, which is monotonic, is zero; or the end of the range that is next to it."""
    rises = error(high) > error(low)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if (error(middle) > 0) == rises else (middle, high)
    return (low + high) / 2


def fit(study: dict[str, Any]) -> dict[str, float]:
    """The fields that points of a study fit, adjusted in turn."""
    points = [point for point in study["points"] if "fits" in point]
    fitted: dict[str, float] = {}
    for _ in range(5):
        for point in points:

            def error(value: float, point: dict[str, Any] = point) -> float:
                return predicted(study, point, fitted | {point["fits"]: value}) - measured(point)

            fitted[point["fits"]] = bisected(error, *RANGES[point["fits"]])
    return fitted


def errors(name: str) -> Iterator[tuple[dict[str, Any], float, float]]:
    study = STUDIES[name]
    fitted = fit(study)
    for point in study["points"]:
        found = predicted(study, point, fitted)
        yield point, found, found / measured(point) - 1


if __name__ == "__main__":
    for name, study in STUDIES.items():
        print(name, fit(study))
        for point, found, error in errors(name):
            print(point, found, f"{error:+.1%}")
