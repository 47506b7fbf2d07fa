"""What is simulated: a model and a fleet, as numbers of a file, and of the report of a run."""

from __future__ import annotations

import inspect
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

import numpy

from unisono.report.run import read_run
from unisono.strategies import DDP, FSDP, ZeRO1

T = TypeVar("T")
ALGORITHMS = ("auto", "ring", "tree", "hierarchical")
STRATEGIES = (DDP.name, ZeRO1.name, FSDP.name)
_NO_WORK = ("fetch", "move", "reduce", "evaluate", "log", "save")  # phases that are no part of a step's computing
_INPUT_BOUND = 0.1  # the share of waiting for the dataset from which a run shows how fast it is


class DescriptionError(ValueError):
    """A description that cannot be simulated: the message names the field, the value and the rule."""


@dataclass(frozen=True)
class Model:
    """A model, and a device that trains it. Times are those of one step on one device, in seconds, without waiting.

    Attributes:
        parameters: their number.
        batch: samples per device and step.
        forward_s, backward_s, optimizer_s: the parts of a step.
        parameter_bytes, gradient_bytes, state_bytes: of each parameter: itself, its gradient, the optimizer's state.
        activation_bytes: per device, what the forward pass keeps for the backward pass.
        sample_bytes: what a sample takes in storage.
        units: the number of modules that "fsdp" gathers one by one.
        bucket_bytes: the size of the buckets in which "ddp" and "zero1" reduce.
        jitter: how much a device's step time varies: its standard deviation by its mean.
        steps_s: the times of single steps of a run, whose variation is taken in place of `jitter`.
    """

    parameters: float
    batch: float
    forward_s: float
    backward_s: float
    optimizer_s: float = 0.0
    parameter_bytes: float = 4.0
    gradient_bytes: float = 4.0
    state_bytes: float = 8.0
    activation_bytes: float = 0.0
    sample_bytes: float = 0.0
    units: int = 1
    bucket_bytes: float = 25 * 2**20
    jitter: float = 0.0
    steps_s: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        _check(self, "parameters", "batch", "units", "bucket_bytes")
        if self.bucket_bytes < 1:
            raise DescriptionError(f"[model] bucket_bytes={self.bucket_bytes!r} is less than a byte")
        if self.forward_s + self.backward_s == 0:
            raise DescriptionError("[model] forward_s + backward_s is 0; measure a step, or pass --report")
        if not isinstance(self.steps_s, list | tuple) or not all(
            type(each) in (int, float) and 0 < each < math.inf for each in self.steps_s
        ):
            raise DescriptionError(f"[model] steps_s={self.steps_s!r:.80} has to be a list of seconds above 0")


@dataclass(frozen=True)
class Fleet:
    """The machines, and how they are used. In seconds, and bytes per second and direction.

    Attributes:
        per_machine: devices of each machine.
        within_bytes_per_s, within_latency_s: the link of each device to the others of its machine.
        between_bytes_per_s, between_latency_s: the link of each machine to the others; 0 bytes: there are no others.
        algorithm: of the collectives: "ring", "tree", "hierarchical", or "auto".
        strategy: "ddp", "zero1" or "fsdp".
        overlaps: whether gradients are reduced during the backward pass.
        loader_samples_per_s: what the loader of one device can deliver; 0: it never waits.
        storage_bytes_per_s: what the storage can deliver to all of them; 0: any number.
        mtbf_s: the mean time between failures of one device; 0: none fails.
        save_s, restart_s: the time that a checkpoint stops the training for; that from a failure to the first step.
    """

    per_machine: int
    within_bytes_per_s: float
    within_latency_s: float = 5e-6
    between_bytes_per_s: float = 0.0
    between_latency_s: float = 1e-5
    algorithm: str = "auto"
    strategy: str = DDP.name
    overlaps: bool = True
    loader_samples_per_s: float = 0.0
    storage_bytes_per_s: float = 0.0
    mtbf_s: float = 0.0
    save_s: float = 0.0
    restart_s: float = 0.0

    def __post_init__(self) -> None:
        _check(self, "per_machine", "within_bytes_per_s")
        for name, value, choices in (
            ("algorithm", self.algorithm, ALGORITHMS),
            ("strategy", self.strategy, STRATEGIES),
        ):
            if value not in choices:
                raise DescriptionError(f"[fleet] {name}={value!r} does not exist; choose one of {', '.join(choices)}")
        if self.mtbf_s and not self.save_s:
            raise DescriptionError(f"[fleet] mtbf_s={self.mtbf_s:g} needs save_s, the time of a checkpoint, above 0")

    def link(self, is_between: bool) -> tuple[float, float]:
        """Bytes per second, and latency in seconds, of the slowest link of devices on one or several machines."""
        if not is_between:
            return self.within_bytes_per_s, self.within_latency_s
        if not self.between_bytes_per_s:
            hint = "pass between_bytes_per_s, of the link of a machine: 12.5e9 is 100 Gbit/s"
            raise DescriptionError(f"[fleet] more than {self.per_machine} devices are on several machines; {hint}")
        return self.between_bytes_per_s, self.between_latency_s


def _check(described: Any, *positive: str) -> None:
    """Numbers have their type; they are finite, not negative, and not 0 where they have to be positive."""
    kinds = {"bool": (bool,), "int": (int,), "float": (int, float)}
    for each in fields(described):
        value, kind, is_positive = getattr(described, each.name), str(each.type), each.name in positive
        if kind in kinds and (
            type(value) not in kinds[kind] or not math.isfinite(value) or value < 0 or (is_positive and not value)
        ):
            rule = "true or false" if kind == "bool" else f"a finite {kind} {'above' if is_positive else 'from'} 0"
            table = type(described).__name__.lower()
            raise DescriptionError(f"[{table}] {each.name}={value!r} cannot be simulated; pass {rule}")


def read(path: Path, report: Path | None = None) -> tuple[Model, Fleet]:
    """Read a description: TOML with the tables `model` and `fleet`, whose keys are the attributes of these classes.

    Args:
        report: the directory of a recorded run of this model, for what the tables do not say.

    Raises:
        ValueError: a file is not what it should be, or says what cannot be; an OSError if there is none.
    """
    try:
        tables = tomllib.loads(path.read_text())
    except ValueError as error:
        raise DescriptionError(f"{path} is no TOML file: {error}") from error
    if tables.keys() != {"model", "fleet"} or not all(isinstance(each, dict) for each in tables.values()):
        raise DescriptionError(f"{path} has {', '.join(tables) or 'nothing'}; it needs the tables [model] and [fleet]")
    found = {} if report is None else measure(report)
    if "jitter" in tables["model"]:
        found.pop("steps_s", None)  # which would be taken in its place
    return _made(Model, found, tables["model"]), _made(Fleet, found, tables["fleet"])


def _made(cls: type[T], found: dict[str, Any], given: dict[str, Any]) -> T:
    table, known = cls.__name__.lower(), inspect.signature(cls).parameters
    for name in given:
        if name not in known:
            close = get_close_matches(name, known, 1)
            hint = f"is it {close[0]}?" if close else f"there are {', '.join(known)}"
            raise DescriptionError(f"[{table}] has no field {name!r}; {hint}")
    values = {name: value for name, value in found.items() if name in known} | given
    if missing := [name for name, each in known.items() if each.default is each.empty and name not in values]:
        advice = "; a report says all but the parameters (--report)" if cls is Model else ""
        raise DescriptionError(f"[{table}] does not say {', '.join(missing)}{advice}")
    return cls(**values)


def measure(path: Path) -> dict[str, Any]:
    """What the record of a run shows of its model and loader: attributes of `Model` and `Fleet`.

    Steps are taken from the spans, the device's where it has a clock; the first of each rank, which warms up, is left
    out. Where the forward pass has no span, a third of the computing is its: the backward pass has twice the work (a
    product for the gradients of the inputs, and one for those of the weights). Under DDP, a run on several ranks counts
    what the backward pass waits for as its own time: measure on one device.

    Raises:
        ValueError: no rank has two steps.
        FileNotFoundError: there is no record.
    """
    run = read_run(path)
    report = run.report
    steps = numpy.array([each for rank in run.ranks for each in _steps(rank.spans())[1:]])
    if not len(steps):
        advice = "train for some over a loader of this package, by optimizer_step or a prepared optimizer"
        raise DescriptionError(f"{path} holds no steps after the first; {advice}")
    forward_s, compute_s, optimizer_s = (float(each) for each in steps.mean(0))
    samples, loops_s = (sum(getattr(rank, name) for rank in report.ranks) for name in ("samples", "loop_seconds"))
    return {
        "batch": samples / sum(rank.steps for rank in report.ranks),
        "forward_s": forward_s or compute_s / 3,
        "backward_s": compute_s - (forward_s or compute_s / 3),
        "optimizer_s": optimizer_s,
        "sample_bytes": sum(rank.nbytes for rank in report.ranks) / max(samples, 1),
        "steps_s": tuple(steps[:, 1:].sum(1).tolist()),
        "loader_samples_per_s": samples / loops_s if report.waited("source") >= _INPUT_BOUND else 0.0,
    }


def _steps(tracks: Mapping[str, Sequence[tuple[str, int, int]]]) -> list[tuple[float, float, float]]:
    """Seconds of the forward pass, of all computing, and of the optimizer, in each step."""
    found, forward_ns, compute_ns = [], 0, 0
    by_kind = {name.split()[0]: spans for name, spans in tracks.items() if spans}
    for phase, start, stop in by_kind.get("device") or by_kind.get("loop", []):
        if phase == "step":
            found.append((forward_ns / 1e9, compute_ns / 1e9, (stop - start) / 1e9))
            forward_ns = compute_ns = 0
        elif phase not in _NO_WORK:
            compute_ns += stop - start
            forward_ns += (stop - start) * (phase == "forward")
    return found
