"""A fleet is predicted from a description, by formulas that are held against what they stand for, done step by step."""

from __future__ import annotations

import json
import random
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matplotlib import image
from torch.utils.data import DataLoader

from unisono import DeviceLoader, optimizer_step
from unisono.report.gathering import summarise
from unisono.report.record import Recorder
from unisono.report.summary import RankSummary
from unisono.report.timeline import FETCH
from unisono.world import solo_world, use_world
from unisono_simulate.command import main
from unisono_simulate.description import Fleet, Model, measure, read
from unisono_simulate.prediction import half_s, memory_bytes, predict, slowdown

MODEL = Model(parameters=1e6, batch=32, forward_s=0.1, backward_s=0.2, optimizer_s=0.01)
FLEET = Fleet(per_machine=4, within_bytes_per_s=1e10, between_bytes_per_s=1e9)
TEXT = """
[model]
parameters = 1_000_000
batch = 32
forward_s = 0.1
backward_s = 0.2
[fleet]
per_machine = 4
within_bytes_per_s = 1e10
between_bytes_per_s = 1e9
"""


@pytest.fixture
def description(tmp_path: Path) -> Callable[..., Path]:
    """Write a description: the usual one, with one text in place of another."""

    def write(old: str = "", new: str = "") -> Path:
        path = tmp_path / "fleet.toml"
        assert old in TEXT
        path.write_text(TEXT.replace(old, new) if old else TEXT)
        return path

    return write


# The formulas.


@pytest.mark.parametrize("devices", [2, 4, 8, 12, 64])
def test_a_ring_takes_as_long_as_its_messages_one_after_the_other(devices):
    fleet, nbytes = replace(FLEET, algorithm="ring"), 1e8
    bytes_per_s, latency_s = (1e10, 5e-6) if devices <= 4 else (1e9, 1e-5)
    messages = [latency_s + nbytes / devices / bytes_per_s for _ in range(devices - 1)]
    assert half_s(nbytes, devices, fleet) == pytest.approx(sum(messages))


@pytest.mark.parametrize("machines", [1, 2, 4, 16])
def test_between_machines_recursive_halving_sends_half_the_rest_per_level(machines):
    left, between_s = 1e8, 0.0
    for _ in range(machines.bit_length() - 1):
        left /= 2
        between_s += 1e-5 + left / 1e9
    within_s = 3 * (5e-6 + 1e8 / 4 / 1e10)
    hierarchical = half_s(1e8, 4 * machines, replace(FLEET, algorithm="hierarchical"))
    assert hierarchical == pytest.approx(within_s + between_s)


def test_the_faster_of_ring_and_tree_is_used_and_for_many_devices_the_tree():
    def times(devices: int) -> list[float]:
        return [half_s(1e8, devices, replace(FLEET, algorithm=each)) for each in ("auto", "ring", "tree")]

    auto, ring, tree = times(8)
    assert auto == ring < tree
    auto, ring, tree = times(100_000)
    assert auto == tree < ring


@given(st.integers(1, 40), st.floats(1e-3, 1), st.floats(1e-6, 1), st.booleans())
def test_a_bucket_is_reduced_once_it_is_full_and_its_predecessor_is_done(buckets, backward_s, each_s, overlaps):
    nbytes = 25 * 2**20
    bytes_per_s = nbytes / each_s  # of two devices, each sends one half, and gets the other
    fleet = Fleet(2, bytes_per_s, within_latency_s=0.0, algorithm="ring", overlaps=overlaps)
    model = Model(buckets * nbytes / 4, 1, 0.0, backward_s)
    free_s = 0.0 if overlaps else backward_s
    for bucket in range(buckets):
        free_s = max(free_s, (bucket + 1) / buckets * backward_s) + nbytes / bytes_per_s
    assert predict(model, fleet, 2).step_s == pytest.approx(max(free_s, backward_s), rel=1e-6)


@pytest.mark.parametrize("devices", [2, 16, 300])
@pytest.mark.parametrize("kind", ["lognormal", "steps of a run"])
def test_a_step_waits_for_the_slowest_of_as_many_devices_as_there_are(kind, devices):
    draw = random.Random(devices)
    if kind == "lognormal":
        model = replace(MODEL, jitter=0.1)
        times = [draw.lognormvariate(-0.00498, 0.09975) for _ in range(20_000)]
    else:
        times = [draw.expovariate(1) + 1 for _ in range(500)]
        model = replace(MODEL, steps_s=tuple(times))
    slowest = [max(draw.choice(times) for _ in range(devices)) for _ in range(2000)]
    expected = sum(slowest) / len(slowest) / (sum(times) / len(times))
    assert slowdown(model, devices) == pytest.approx(expected, rel=0.02)


def test_parts_may_be_nothing_and_seconds_may_be_integers():
    model = replace(MODEL, gradient_bytes=0.0)
    step_s = {predict(replace(model, steps_s=steps), FLEET, 4).step_s for steps in ((1, 2), (1.0, 2.0))}
    assert len(step_s) == 1


def test_failures_cost_what_a_simulated_run_loses_at_the_best_interval():
    fleet = replace(FLEET, mtbf_s=64 * 3600.0, save_s=30.0, restart_s=60.0)
    found = predict(MODEL, fleet, 64)

    def useful(interval_s: float) -> float:
        """Of a run of 4,000 intervals: a failure in one, or while restarting, lets it begin again."""
        draw, spent_s, done = random.Random(0), 0.0, 0
        while done < 4000:
            fails_s = draw.expovariate(1 / 3600)
            spent_s += min(fails_s, interval_s)
            if fails_s >= interval_s:
                done += 1
                continue
            while (fails_s := draw.expovariate(1 / 3600)) < 60:
                spent_s += fails_s
            spent_s += 60
        return done * (interval_s - 30) / spent_s

    assert found.checkpoint_s is not None
    assert found.useful == pytest.approx(useful(found.checkpoint_s), rel=0.02)
    assert useful(found.checkpoint_s) >= max(useful(found.checkpoint_s * each) for each in (0.4, 2.5))


def test_slow_data_sets_the_step_time_per_device_or_for_all():
    assert predict(MODEL, replace(FLEET, loader_samples_per_s=32), 8).step_s == 1.0
    sized = replace(MODEL, sample_bytes=1e5)
    fleet = replace(FLEET, storage_bytes_per_s=1e9)
    assert predict(sized, fleet, 8).efficiency > 0.9
    assert predict(sized, fleet, 100_000).samples_per_s == pytest.approx(1e4)


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp"])
def test_memory_is_what_torch_keeps_of_a_model_with_adam(strategy):
    """The tensors of a plain run give the parts, and the strategies divide them."""
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(8)))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    parameters = sum(each.nbytes for each in model.parameters())
    gradients = sum(each.grad.nbytes for each in model.parameters() if each.grad is not None)
    states = sum(each.nbytes for state in optimizer.state.values() for each in state.values() if each.numel() > 1)
    expected = {
        "ddp": parameters + 2 * gradients + states,
        "zero1": parameters + 2 * gradients + states / 4,
        "fsdp": (parameters + gradients + states) / 4 + (2 * parameters + gradients) / 8,
    }
    described = replace(MODEL, parameters=8 * 64 * 64, units=8, activation_bytes=1000)
    assert memory_bytes(described, strategy, 4) == expected[strategy] + 1000
    assert memory_bytes(described, strategy, 1) == parameters + gradients + states + 1000


def test_fsdp_and_zero1_send_half_as_much_again_as_ddp():
    slow = Fleet(8, 1e6, within_latency_s=0.0, overlaps=False, algorithm="ring")

    def waited_s(strategy: str) -> float:
        found = predict(replace(MODEL, units=4), replace(slow, strategy=strategy), 8)
        return found.step_s - found.compute_s

    half = 4e6 / 1e6 * 7 / 8
    assert waited_s("ddp") == pytest.approx(2 * half)
    assert waited_s("zero1") == pytest.approx(3 * half)
    assert waited_s("fsdp") == pytest.approx(3 * half, rel=0.05)


# What it is told.


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("batch = 32", "batch = -1", "[model] batch=-1 cannot be simulated; pass a finite float above 0"),
        ("batch = 32", "batch = nan", "batch=nan"),
        ("batch = 32", "batch = 32\nunits = 1.5", "units=1.5 cannot be simulated; pass a finite int above 0"),
        ("batch = 32", "batch = 32\nsteps_s = [0.1, 0]", "steps_s=[0.1, 0] has to be a list of seconds above 0"),
        ("batch = 32", "batch = 32\nbucket_bytes = 1e-308", "bucket_bytes=1e-308 is less than a byte"),
        ("batch = 32", "batch = 32\nsteps_s = 5", "steps_s=5 has to be a list of seconds above 0"),
        ("between_bytes_per_s = 1e9", "between_bytes_per_s = 1e-308", "on 8 devices a step takes inf s"),
        ("batch = 32", "", "[model] does not say batch; a report says all but the parameters (--report)"),
        ("batch = 32", "bach = 32", "[model] has no field 'bach'; is it batch?"),
        ("forward_s = 0.1\nbackward_s = 0.2", "forward_s = 0\nbackward_s = 0", "forward_s + backward_s is 0"),
        ("between_bytes_per_s = 1e9", "", "more than 4 devices are on several machines"),
        ("between_bytes_per_s = 1e9", "strategy = 'zero3'", "strategy='zero3' does not exist; choose one of ddp,"),
        ("between_bytes_per_s = 1e9", "overlaps = 1", "overlaps=1 cannot be simulated; pass true or false"),
        ("between_bytes_per_s = 1e9", "mtbf_s = 1e6", "mtbf_s=1e+06 needs save_s"),
        ("[fleet]", "[fleets]", "has model, fleets; it needs the tables [model] and [fleet]"),
        ("[model]", "model]", "is no TOML file"),
    ],
)
def test_an_impossible_description_is_refused_with_the_field_and_the_rule(description, capsys, old, new, said):
    assert main([str(description(old, new))]) == 1
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("devices", ["0", "many", "10000000000"])
def test_numbers_of_devices_are_positive_and_possible(description, devices, capsys):
    with pytest.raises(SystemExit, match="2"):
        main([str(description()), "--devices", devices])
    assert "--devices" in capsys.readouterr().err


# What a run says.


def train(directory: Path, steps: int) -> RankSummary:
    with use_world(solo_world()) as world:
        recorder = Recorder(world, directory)
        model = torch.nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x in DeviceLoader(DataLoader(torch.randn(4 * steps, 8), batch_size=4)):
            model(x).sum().backward()
            optimizer_step(optimizer)
        recorder.end(None)
        return summarise()


def test_a_run_gives_the_times_of_its_steps_and_the_table_overrides_them(tmp_path, description):
    rank = train(tmp_path, 20)
    found = measure(tmp_path)
    assert (found["batch"], found["sample_bytes"]) == (4, 32)
    assert len(found["steps_s"]) == 19, "the first step warms up"
    whole_s = found["forward_s"] + found["backward_s"] + found["optimizer_s"]
    assert whole_s == pytest.approx(sum(found["steps_s"]) / 19)
    assert 19 * whole_s < rank.loop_seconds
    model, _ = read(description("forward_s = 0.1\nbackward_s = 0.2", "forward_s = 0.5"), tmp_path)
    assert (model.forward_s, model.backward_s, model.batch) == (0.5, found["backward_s"], 32)


def test_the_rate_of_a_loader_is_known_from_a_run_that_waited_for_it(tmp_path):
    train(tmp_path, 5)
    file = tmp_path / "rank-0.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    last = [line for line in lines if "seconds" in line][-1]
    last["seconds"][FETCH], last["waits"]["source"] = 10.0, 10.0
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    seconds = sum(last["seconds"].values()) - last["seconds"]["move"]
    assert measure(tmp_path)["loader_samples_per_s"] == pytest.approx(20 / seconds)


@pytest.mark.parametrize("steps", [0, 1])
def test_a_run_without_steps_is_refused(tmp_path, steps, description, capsys):
    train(tmp_path, steps)
    assert main([str(description()), "--report", str(tmp_path)]) == 1
    assert "holds no steps after the first" in capsys.readouterr().err


# What it prints.


def test_the_table_and_the_json_have_the_same_numbers_up_to_100000_devices(description, capsys):
    assert main([str(description())]) == 0
    headings, *lines = capsys.readouterr().out.splitlines()
    assert main([str(description()), "--json"]) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    assert headings.split()[:2] == ["devices", "step"]
    assert [int(line.split()[0].replace(",", "")) for line in lines] == [each["devices"] for each in found]
    assert found[-1]["devices"] == 100_000
    assert [line.split()[1] for line in lines] == [f"{1e3 * each['step_s']:,.1f}" for each in found]
    efficiencies = [each["efficiency"] for each in found]
    assert efficiencies == sorted(efficiencies, reverse=True)
    assert efficiencies[0] == 1


@pytest.mark.usefixtures("fonts")
def test_the_picture_is_one_and_without_matplotlib_it_says_how_to_get_it(description, tmp_path, monkeypatch, capsys):
    picture = tmp_path / "there" / "fleet.png"
    arguments = [str(description()), "--devices", "8", "--picture", str(picture)]
    assert main(arguments) == 0
    assert image.imread(picture).std() > 0.1
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(arguments) == 1
    assert "pip install matplotlib" in capsys.readouterr().err


# Predictions are held against what others have measured: each error is the one that README.md states.


STUDIES: dict[str, Any] = tomllib.loads((Path(__file__).parent / "published.toml").read_text())
PAGE = Path(__file__).parent.parent / "README.md"
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
def test_predictions_are_near_measurements_and_the_page_states_the_error(name):
    found = list(errors(name))
    assert [point for point, _, error in found if abs(error) > (1e-3 if "fits" in point else LARGEST_ERROR[name])] == []
    page = PAGE.read_text()
    assert [line for each in found if (line := row(name, *each)) not in page] == []


def test_the_fitted_numbers_are_plausible_and_fewer_than_the_predicted():
    points = [point for study in STUDIES.values() for point in study["points"]]
    assert sum("fits" in point for point in points) * 2 < len(points)
    jitters = {name: fit(name)["jitter"] for name in STUDIES if "jitter" in fit(name)}
    assert {name for name, each in jitters.items() if not 0 < each < 0.06} == set()
    line_rate = STUDIES["horovod"]["fleet"]["between_bytes_per_s"]
    assert 0.5 < fit("horovod")["between_bytes_per_s"] / line_rate < 1.1


def test_each_study_says_where_its_numbers_are_from_and_how_they_were_read():
    assert all(len(study["source"]) > 5 and len(study["read"]) > 50 for study in STUDIES.values())
