"""Where the time went: counted exactly, tiling the loop, shown in words and as a picture."""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from epochs import is_awaiting_batch, is_awaiting_room
from faults import until
from matplotlib import image
from modes import FAMILY, HOST, PROCESSES_2, SOLO, THREADS_2, THREADS_3, Mode, scaling
from torch.utils.data import DataLoader

from unisono import (
    Accelerator,
    DeviceLoader,
    Mean,
    ParallelLoader,
    Report,
    barrier,
    current_world,
    gather_report,
    optimizer_step,
    phase,
)
from unisono.comm.threads import ThreadCommunicator
from unisono.devices import get_backend
from unisono.errors import ClosedError
from unisono.loading.pipeline import Lane
from unisono.report.gathering import summarise
from unisono.report.summary import CAUSES, LOOP_PHASES, PEERS, SOURCE, RankSummary, label
from unisono.report.timeline import (
    BACKWARD,
    COMPUTE,
    EVALUATE,
    FETCH,
    FORWARD,
    LOG,
    MOVE,
    PHASES,
    REDUCE,
    SAVE,
    STEP,
    Waits,
)
from unisono.world import solo_world, thread_worlds, use_world


def train_and_report() -> tuple[Report | None, float]:
    """Two epochs over 33 samples, and the wall time around them in seconds."""
    model = torch.nn.Linear(1, 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DeviceLoader(DataLoader(torch.arange(33.0, device=HOST).unsqueeze(1), batch_size=4))
    start = time.perf_counter()  # before any rank may begin
    barrier()
    for _ in range(2):
        for batch in loader:
            model(batch).mean().backward()
            optimizer_step(optimizer)
    return gather_report(), time.perf_counter() - start


@pytest.mark.any_family
@pytest.mark.parametrize("mode", scaling(SOLO, THREADS_3, PROCESSES_2), ids=str)
def test_rank_zero_gets_every_ranks_numbers_and_each_sample_counts_once(mode: Mode) -> None:
    with use_world(solo_world()):
        results = mode.run(train_and_report)
    report, wall = results[0]
    assert [each for each, _ in results[1:]] == [None] * (mode.ranks - 1)
    assert report is not None
    assert [each.rank for each in report.ranks] == list(range(mode.ranks))
    assert report.samples == 2 * 33
    rounds = -(-33 // (4 * mode.ranks))
    family = get_backend(FAMILY)
    lanes = {"loop"} | ({"transfer"} if family.moves_in_background else set())
    lanes |= {"device"} if family.clock(family.device(0)) is not None else set()
    for each in report.ranks:
        assert each.steps == each.batches == 2 * rounds
        assert each.device == f"{FAMILY}:{each.rank}"
        assert each.memory > 0
        assert 0 < each.loop_seconds <= wall * 1.5 + 1
        assert sum(each.share(phase) for phase in LOOP_PHASES) == pytest.approx(1)
        assert {name for name, _ in each.spans} == lanes
        assert sum(each.waits.values()) == pytest.approx(each.seconds[FETCH])
        assert each.nbytes == sum(samples * 4 for samples in (each.samples, each.repeated))
        assert 0 <= each.mean_queue <= 8 + 4 + 1
    assert report.samples_per_second == pytest.approx(66 / max(each.loop_seconds for each in report.ranks))


def test_the_phases_tile_the_time_of_a_loop_without_gaps_or_overlaps() -> None:
    with use_world(solo_world()):
        train_and_report()
        (spans,) = [spans for name, spans in summarise().spans if name == "loop"]
    first = next(place for place, span in enumerate(spans) if span.phase == FETCH)
    step = [FETCH, COMPUTE, REDUCE, COMPUTE, STEP, COMPUTE, FETCH]
    assert [span.phase for span in spans[first : first + 7]] == step
    gaps = [later.start - earlier.stop for earlier, later in pairwise(spans[first:])]
    assert all(gap >= 0 for gap in gaps)
    assert sum(gap > 0 for gap in gaps) <= 3, "only between the loops, and before what follows them"


@pytest.mark.parametrize("is_recorded", [False, True])
def test_all_that_ranks_exchange_for_a_step_and_a_mean_is_reducing(
    is_recorded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    phases: list[str | None] = []
    reduce = ThreadCommunicator.all_reduce

    def noted(comm: ThreadCommunicator, *args: Any) -> torch.Tensor:
        phases.append(current_world().timeline.loop().current)
        return reduce(comm, *args)

    def train() -> None:
        current_world().timeline.is_recorded = is_recorded
        accelerator, network = Accelerator(), torch.nn.Linear(1, 1)
        # The size of a batch that a function of the user's has made is known once it is there.
        data = DataLoader(torch.arange(7.0, device=HOST).unsqueeze(1), batch_size=2, collate_fn=torch.stack)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        network, optimizer, loader, mean = accelerator.prepare(network, optimizer, data, Mean())
        phases.clear()
        for number, batch in enumerate(loader):
            loss = network(batch).mean()
            accelerator.backward(loss, weight=len(batch)) if number else loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            mean.update(loss, batch)
            mean.compute()

    monkeypatch.setattr(ThreadCommunicator, "all_reduce", noted)
    THREADS_2.run(train)
    assert len(phases) > 4
    assert set(phases) == {REDUCE}


def test_named_blocks_evaluation_logging_and_saving_are_not_the_loops_body(tmp_path: Path) -> None:
    with use_world(solo_world()):
        accelerator = Accelerator(project_dir=tmp_path)
        accelerator.init_trackers("run")
        data = DataLoader(torch.arange(12.0, device=HOST).unsqueeze(1), batch_size=4)
        model = torch.nn.Linear(1, 1)
        network, optimizer, loader, other = accelerator.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.1), data, DataLoader(torch.ones(4, 1, device=HOST))
        )
        for batch in loader:
            with phase("augmentation"):
                barrier()
                with phase("blurring"):
                    pass
            accelerator.backward(network(batch).mean())
            optimizer.step()
            accelerator.log({"loss": 1.0})
            with torch.no_grad():
                for _ in other:
                    pass
        with phase("testing"):
            for _ in loader:
                pass
        accelerator.save_state()
        accelerator.end_training()
        own = summarise()
        (spans,) = [spans for name, spans in own.spans if name == "loop"]
        report = gather_report()
    step = ["fetch", "compute", "augmentation", "blurring", "augmentation", "compute", "step"]
    labels = [each for each, _ in itertools.groupby(span.phase for span in spans)]
    begin = labels.index("fetch")
    assert labels[begin : begin + len(step)] == step
    assert {"evaluate", "log", "save", "testing"} <= set(labels)
    after = labels[labels.index("testing") :]
    assert "fetch" not in after, "a loop in a named block is the block's"
    assert sum(own.seconds[each] for each in own.seconds if each != MOVE) == pytest.approx(own.loop_seconds)
    assert sum(own.waits.values()) == pytest.approx(own.seconds[FETCH])
    assert report is not None
    assert {"augmentation", "blurring", "evaluate", "log", "save", "testing"} == set(report.named_phases)


def test_the_verdict_names_the_longest_phase_and_representations_are_short() -> None:
    long, short = {"augmentation": 1.0, "save": 0.1}, {"save": 0.2}
    ranks = [a_rank(rank, (0, 0, 0)) for rank in range(2)]
    ranks = [replace(each, seconds=each.seconds | named) for each, named in zip(ranks, (long, short), strict=True)]
    report = Report(ranks)
    assert report.verdict.endswith("0% for other ranks; 30% goes to augmentation")
    assert repr(report) == f"<report of 2 rank(s): 800 samples, 381 samples/s; {report.verdict}>"
    assert repr(ranks[1]) == "<rank 1 on cpu:1: 400 samples, 10 steps in 1.20 s; loop body 83%, saving 17%>"


@pytest.mark.parametrize(
    ("seconds", "waits", "begin", "end"),
    [
        ({SAVE: 33, FORWARD: 5, BACKWARD: 10, STEP: 9}, (5, 0, 28), "saving-bound: 33%", "save_state(is_async=True)"),
        ({LOG: 33, FORWARD: 20, BACKWARD: 7}, (30, 0, 0), "logging-bound: 33% of the time", "; log less often"),
        ({EVALUATE: 60, SAVE: 30}, (0, 0, 0), "evaluation-bound: 60% of the time", "on fewer samples"),
        ({SAVE: 20, FORWARD: 15, BACKWARD: 20}, (0, 0, 35), "peer-bound: 35%", "accumulation, would help"),
        ({SAVE: 20}, (40, 0, 0), "input-bound: 40%", "more loader workers would help"),
        ({SAVE: 33, FORWARD: 20, BACKWARD: 25}, (12, 0, 0), "compute-bound", "; 33% goes to saving"),
        ({SAVE: 30, "augmentation": 40}, (20, 0, 0), "compute-bound", "; 40% goes to augmentation"),
        ({STEP: 50, FORWARD: 20, BACKWARD: 20}, (0, 0, 0), "compute-bound", "; 50% goes to stepping"),
    ],
)
def test_the_largest_part_of_the_time_is_the_verdict(
    seconds: dict[str, float], waits: tuple[float, float, float], begin: str, end: str
) -> None:
    computing = 100 - sum(seconds.values()) - sum(waits)
    ranks = [a_rank(rank, waits, computing=computing) for rank in range(2)]
    report = Report([replace(each, seconds=each.seconds | seconds) for each in ranks])
    assert report.verdict.startswith(begin)
    assert report.verdict.endswith(end)
    on_lazy = Report([replace(each, counters={"graphs": 1}) for each in report.ranks])
    assert (on_lazy.verdict == report.verdict) is not begin.startswith(("compute", "peer"))


@pytest.mark.parametrize(("name", "error"), [("", ValueError), ("fetch", ValueError), (3, TypeError)])
def test_a_name_that_a_phase_cannot_have_is_refused(name: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"phase\("), phase(name):
        pass


# What the run waited for.


def a_rank(rank: int, waits: tuple[float, float, float], reducing: float = 0.0, computing: float = 1.0) -> RankSummary:
    """One that waited so many seconds for its source, its transfers and its peers, besides."""
    seconds = {FETCH: sum(waits), COMPUTE: computing, REDUCE: reducing, STEP: 0.0, MOVE: 0.0}
    by_cause = dict(zip(CAUSES, waits, strict=True))
    return RankSummary(rank, f"cpu:{rank}", 1, seconds, 400, 10, 10, 2**20, [], waits=by_cause)


@pytest.mark.parametrize(
    ("ranks", "verdict"),
    [
        (
            [a_rank(0, (0.82, 0, 0), computing=1.18), a_rank(1, (0.82, 0, 0), computing=1.18)],
            "input-bound: 41% of the step waits for the dataset; more loader workers would help",
        ),
        (
            [a_rank(0, (0.1, 0.5, 0), computing=0.4)],
            "transfer-bound: 50% of the step waits for batches to be moved; samples of a smaller type would help",
        ),
        (
            [a_rank(0, (0, 0, 0.36), reducing=0.1, computing=0.54), a_rank(1, (0, 0, 0), computing=1.0)],
            "peer-bound: 23% of the step goes to reducing and to waiting for other ranks; rank 1 is the slowest: "
            "look at its data, and at what else its machine does",
        ),
        (
            [a_rank(rank, (0, 0, 0), reducing=0.13, computing=0.87) for rank in range(2)],
            "compute-bound: 0% of the step waits for data, 13% for other ranks; mixed precision, "
            "compile=True or more devices would help, if the model takes the time: unisono.phase(...) "
            "around its lines shows whether it does",
        ),
        (
            # The record of the first was cut off early.
            [a_rank(0, (0, 0, 0), reducing=0.04, computing=0.06), a_rank(1, (0, 0, 0), reducing=0.4, computing=0.6)],
            "peer-bound: 40% of the step goes to reducing and to waiting for other ranks; larger batches, or "
            "accumulation, would help",
        ),
    ],
    ids=["input", "transfer", "peers, in the loader and in reducing", "some reducing", "much reducing"],
)
def test_one_sentence_tells_what_a_run_waited_for(ranks: list[RankSummary], verdict: str) -> None:
    assert Report(ranks).verdict == verdict


def spend(seconds: float) -> None:
    """Be at work for so long."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


WORK_S = 0.02


def test_a_run_whose_source_works_while_its_loop_waits_is_input_bound() -> None:
    found: list[Lane] = []

    def source() -> Iterator[torch.Tensor]:
        for number in range(5):
            # The loop reads the first batch itself, and leaves the rest to the reader, since it takes long.
            if number:
                until(lambda number=number: found[0].progress.rounds == number and is_awaiting_batch(found[0]))
            spend(WORK_S)
            yield torch.zeros(4)

    world = solo_world()
    with ParallelLoader(source(), ["cpu"], world=world) as parallel:
        found.extend(parallel._pipeline.lanes)
        batches = list(parallel.per_device_loader("cpu"))
    report = gather_report(world)
    assert report is not None
    (each,) = report.ranks
    assert each.waits[SOURCE] >= len(batches) * WORK_S
    assert each.waits[PEERS] == 0
    assert sum(each.waits.values()) == pytest.approx(each.seconds[FETCH])
    assert report.verdict.startswith("input-bound: ")


def test_a_loop_that_waits_because_anothers_lane_is_full_is_peer_bound() -> None:
    worlds = thread_worlds([torch.device("cpu", rank) for rank in range(2)])
    with ParallelLoader(range(60), ["cpu:0", "cpu:1"], world=solo_world(), loops=worlds, prefetch=1) as parallel:
        slow, fast = parallel._pipeline.lanes
        has_ended = threading.Event()

        def is_held_up() -> bool:
            return is_awaiting_room(slow.entry) and is_awaiting_batch(fast)

        def hurry() -> None:
            with contextlib.suppress(ClosedError):
                list(parallel.per_device_loader("cpu:1"))
            has_ended.set()

        slowly = parallel.per_device_loader("cpu:0")  # first: the reader does not wait for a lane without an iterator
        with ThreadPoolExecutor(1) as pool:
            hurrying = pool.submit(hurry)
            for _ in slowly:
                until(lambda: has_ended.is_set() or is_held_up() or slow.sent == 30)
                spend(WORK_S)
            hurrying.result(20)
    ranks = [summarise(world) for world in worlds]
    report = Report(ranks)
    assert ranks[1].waits[PEERS] > 20 * WORK_S
    assert ranks[1].waits[PEERS] > 0.8 * ranks[1].seconds[FETCH]
    assert ranks[0].waits[PEERS] < 0.1 * ranks[1].waits[PEERS]
    assert report.slowest == 0
    assert report.verdict.startswith("peer-bound: ")
    assert "; rank 0 is the slowest" in report.verdict


# Shown.


SECONDS = {FETCH: 1.0, COMPUTE: 2.0, REDUCE: 0.5, STEP: 0.5, MOVE: 0.25}
REPORT = Report([RankSummary(rank, f"cpu:{rank}", 1, SECONDS, 400, 10, 10, 2**20, []) for rank in range(2)])


def test_the_table_names_every_phase_and_the_rate(capsys: pytest.CaptureFixture[str]) -> None:
    REPORT.print()
    output = capsys.readouterr().out
    words = output.split()
    for each in PHASES:
        assert set(label(each).split()) <= set(words)
    assert "50.0%" in words
    assert "200 samples/s over 2 rank(s)" in output
    assert "compute-bound: 0% of the step waits for data, 12% for other ranks" in " ".join(words)
    assert "repeated" not in output
    table = output[: output.index("200 samples/s")]
    assert max(map(len, table.splitlines())) <= 80


def test_steps_that_nothing_was_learned_from_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    def body() -> Report | None:
        accelerator = Accelerator()
        network = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        network, optimizer, loader = accelerator.prepare(network, optimizer, DeviceLoader([torch.ones(2, 2)] * 6))
        for number, batch in enumerate(loader):
            accelerator.backward(network(batch).mean(), weight=float(number == 1))
            optimizer.step()
            optimizer.zero_grad()
        return gather_report()

    for mode, skipped in ((SOLO, 5), (THREADS_2, 2)):
        report = mode.run(body)[0]
        assert report is not None
        assert [(each.steps, each.skipped_steps) for each in report.ranks] == [(1, skipped)] * mode.ranks
        report.print()
        assert f"{skipped} steps were skipped: none of their samples, or tokens, counted" in capsys.readouterr().out


def test_repeated_samples_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = REPORT.ranks
    Report([replace(first, repeated=1300), second]).print()
    assert "1,300 samples were repeated to pad" in capsys.readouterr().out.splitlines()


@pytest.mark.usefixtures("fonts")
def test_the_picture_is_a_nonempty_png_under_the_returned_name(tmp_path: Path) -> None:
    path = REPORT.save_picture([2.0, 1.0, 0.5], str(tmp_path / "new" / "picture.jpg"))
    assert path == tmp_path / "new" / "picture.jpg"
    assert path.read_bytes().startswith(b"\x89PNG")
    pixels = image.imread(path, "png")
    assert pixels.shape[0] > 300
    assert pixels.std() > 0.05
    for losses in ([], [0.0], [float("nan"), 1.0]):  # of which no curve shows
        assert REPORT.save_picture(losses, path).stat().st_size > 1000


def test_a_report_of_a_run_without_loops_divides_nothing_by_zero() -> None:
    with use_world(solo_world()):
        report = gather_report()
    assert report is not None
    assert report.samples_per_second == 0
    assert report.ranks[0].share(COMPUTE) == 0
    assert report.ranks[0].bytes_per_second == report.waited(SOURCE) == 0
    assert report.verdict.startswith("it is unknown")


def test_a_missing_extra_is_told_with_the_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'unisono\[report\]'"):
        Report([]).save_picture([1.0], "x.png")


class Lagging:
    """A device that goes through what it gets one time unit per stamp, so that each phase takes 1 s of it."""

    def __init__(self) -> None:
        self.left = 0

    def stamp(self) -> int:
        self.left += 1
        return self.left

    def elapsed_ns(self, first: int, second: int) -> int:
        return 10**9 * (second - first)


def test_the_report_has_a_devices_phases_and_waits_and_its_memory(monkeypatch, capsys):
    backend = get_backend("cpu")
    monkeypatch.setattr(backend, "clock", lambda device: Lagging(), raising=False)
    monkeypatch.setattr(backend, "peak_memory", lambda device: 3_000_000, raising=False)
    with use_world(solo_world(backend)) as world:
        track = world.timeline.loop()
        for phase in (FETCH, COMPUTE, REDUCE, STEP, None):
            track.switch(phase)
        track.count_wait(Waits(track.totals[FETCH], 0, 0))
        report = gather_report()
    (found,) = report.ranks
    assert [found.seconds[phase] for phase in LOOP_PHASES] == [1, 1, 1, 1]
    assert found.waits[SOURCE] == pytest.approx(1)
    report.print()
    assert "memory of the devices, at most: cpu:0 3 MB" in capsys.readouterr().out
