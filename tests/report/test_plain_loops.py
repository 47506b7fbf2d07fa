"""Loops that do not use this package: their phases, steps and samples are recorded, and their results are the same."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import warm_scripts
from modes import HOST, by_value
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from unisono import Accelerator, DeviceLoader, Output, current_world, optimizer_step, spawn
from unisono.cli.main import main
from unisono.report.gathering import summarise
from unisono.report.live import describe
from unisono.report.run import read_run
from unisono.report.timeline import BACKWARD, COMPUTE, EVALUATE, FETCH, FORWARD, REDUCE, STEP

STEPS = 12
SLOW_S = 0.05  # of what is to take most of a step's time

SCRIPT = """
import sys, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group(*sys.argv[1:])
torch.manual_seed(0)
data = TensorDataset(torch.randn(96, 4), torch.randn(96, 1))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=8, sampler=sampler)
layers = [torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1)]
model = DistributedDataParallel(torch.nn.Sequential(*layers))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
took = 0.0
for epoch in range(2):
    sampler.set_epoch(epoch)
    began = time.perf_counter()
    for x, y in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        for x, y in DataLoader(data, batch_size=32):
            model(x)
    model.train()
    took += time.perf_counter() - began
    total = loss.detach()
    dist.all_reduce(total)
print("took", dist.get_rank(), took)
print("weights", dist.get_rank(), [each.tolist() for each in model.parameters()])
"""


def launch(directory: Path, *arguments: str, script: str = SCRIPT) -> str:
    (directory / "train.py").write_text(script)
    options = ("-n", "2", "--backend", "cpu", "--no-prefix")
    code, output, errors = warm_scripts.launch(directory, "run", *options, *arguments)
    assert code == 0, errors
    return output


def told(output: str, word: str) -> dict[int, str]:
    lines = [line.split(maxsplit=2) for line in output.splitlines() if line.startswith(word)]
    return {int(rank): text for _, rank, text in lines}


@pytest.mark.parametrize("group", ["shm", "gloo"])
def test_a_script_for_torchrun_has_the_phases_of_a_loop_of_this_package(tmp_path: Path, group: str, capsys) -> None:
    options = ("--process-group", "gloo") if group == "gloo" else ()
    output = launch(tmp_path, *options, "--log-dir", "logs", "train.py", group)
    found = read_run(tmp_path / "logs")
    assert found.missing == []
    for each in found.ranks:
        assert (each.summary.steps, each.summary.samples) == (STEPS, 2 * (48 + 96))
        assert len(each.steps()) == STEPS
        spans = next(spans for name, spans in each.spans().items() if name.startswith("loop"))
        phases = [span.phase for span in spans]
        assert phases.count(STEP) == STEPS
        assert phases.count(FORWARD) == STEPS or group == "shm"  # where reducing interrupts it
        expected = {FETCH, COMPUTE, FORWARD, BACKWARD, STEP, EVALUATE}
        assert set(phases) == (expected | {REDUCE} if group == "shm" else expected)
        # Four loops, each with a call of iter() before it; within them, no time is left out.
        assert sum(first.stop < second.start - 5_000 for first, second in itertools.pairwise(spans)) <= 8
        took = float(told(output, "took")[each.rank])
        assert 0.6 * took < each.summary.loop_seconds <= took
    assert main(["report", str(tmp_path / "logs")]) == main(["top", "--once", str(tmp_path / "logs")]) == 0
    assert "forward" in capsys.readouterr().out
    assert f"  {STEPS}  " in "\n".join(describe(found))
    if group == "gloo":
        plain = told(launch(tmp_path, "train.py", group), "weights")
        assert plain.keys() == {0, 1}
        assert told(output, "weights") == plain, "the record changes no result"


class Passed(NamedTuple):
    """What a rank has recorded while a program ran."""

    seconds: dict[str, float]
    steps: int
    samples: int

    def share(self, *phases: str) -> float:
        return sum(self.seconds.get(phase, 0.0) for phase in phases) / (sum(self.seconds.values()) or 1.0)


def measure(program: Callable[[], Any]) -> Passed:
    before = summarise(is_own_thread=False)
    program()
    after = summarise(is_own_thread=False)
    seconds = {phase: value - before.seconds.get(phase, 0.0) for phase, value in after.seconds.items()}
    return Passed(seconds, after.steps - before.steps, after.samples - before.samples)


def run(tmp_path: Path, program: Callable[[], Any], nprocs: int = 1) -> list[Any]:
    with by_value(measure):
        return spawn(lambda _: program(), nprocs=nprocs, backend="cpu", output=Output(tmp_path))


class Slow(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(SLOW_S)
        return torch.ones(4)


class SlowModel(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(SLOW_S)
        return super().forward(x)


def parts(kind: type[torch.nn.Linear] = torch.nn.Linear) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = kind(4, 1)
    return model, torch.optim.SGD(model.parameters(), 0.01)


def batches(count: int = STEPS) -> DataLoader[Any]:
    return DataLoader(torch.ones(4 * count, 4, device=HOST), batch_size=4)  # type: ignore[arg-type]


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader[Any]) -> None:
    for x in loader:
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_slow_dataset_is_waiting_for_data(tmp_path: Path, workers: int) -> None:
    (found,) = run(tmp_path, lambda: measure(lambda: train(*parts(), DataLoader(Slow(), 2, num_workers=workers))))
    assert found.share(FETCH) > 0.8
    assert (found.steps, found.samples) == (4, 8)
    assert "input-bound" in read_run(tmp_path).report.verdict


def test_a_slow_model_is_the_forward_pass_of_ddp_and_else_the_loops_body(tmp_path: Path) -> None:
    def program() -> tuple[Passed, Passed]:
        model, optimizer = parts(SlowModel)
        plain = measure(lambda: train(model, optimizer, batches(4)))
        return plain, measure(lambda: train(DistributedDataParallel(model), optimizer, batches(4)))

    for plain, by_ddp in run(tmp_path, program, 2):
        assert plain.share(COMPUTE) > 0.8
        assert by_ddp.share(FORWARD) > 0.8
        assert plain.steps == by_ddp.steps == 4


@pytest.mark.parametrize("group", ["shm", "gloo"])
def test_waiting_for_a_slow_rank_in_a_collective_is_reducing(tmp_path: Path, group: str) -> None:
    def program() -> Passed:
        dist.init_process_group(group)
        model, optimizer = parts()

        def by_hand() -> None:
            for x in batches(4):
                model(x).mean().backward()
                if current_world().rank == 1:
                    time.sleep(SLOW_S)
                for each in model.parameters():
                    dist.all_reduce(each.grad)
                optimizer.step()

        dist.barrier()
        return measure(by_hand)

    first, second = run(tmp_path, program, 2)
    assert first.share(REDUCE) > 0.6
    assert second.share(REDUCE) < 0.4
    assert first.steps == second.steps == 4


def test_in_shared_memory_waiting_in_ddps_backward_is_reducing(tmp_path: Path) -> None:
    def program() -> Passed:
        model, optimizer = parts(SlowModel if current_world().rank else torch.nn.Linear)
        parallel = DistributedDataParallel(model)
        return measure(lambda: train(parallel, optimizer, batches(4)))

    first, second = run(tmp_path, program, 2)
    assert first.share(REDUCE) > 0.6
    assert second.share(FORWARD) > 0.6


def test_a_loop_without_a_loader_counts_steps_and_knows_no_waiting(tmp_path: Path) -> None:
    def program() -> Passed:
        model, optimizer = parts()

        def accumulate() -> None:
            for _ in range(STEPS):
                for _ in range(3):
                    model(torch.ones(2, 4)).mean().backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                time.sleep(SLOW_S / 10)

        return measure(accumulate)

    (found,) = run(tmp_path, program)
    assert (found.steps, found.samples) == (STEPS, 0)
    assert found.share(COMPUTE) > 0.5
    assert found.seconds[BACKWARD] > 0
    assert found.seconds[STEP] > 0
    assert found.seconds[FETCH] == found.seconds[REDUCE] == 0


def test_of_optimizers_that_step_in_turn_one_counts(tmp_path: Path) -> None:
    def program() -> list[int]:
        (one, first), (two, second) = parts(), parts()

        def alternate(loader: Iterator[Any] | Any, repeated: int = 1) -> None:
            for x in loader:
                for model, optimizer in [(one, first)] * repeated + [(two, second)]:
                    model(x).mean().backward()
                    optimizer.step()

        def one_after_the_other() -> None:
            train(one, first, batches())
            train(two, second, batches())

        found = [measure(lambda: alternate([torch.ones(2, 4)] * STEPS))]
        found += [measure(lambda: alternate(batches())), measure(lambda: alternate(batches(), 2))]
        return [each.steps for each in [*found, measure(one_after_the_other)]]

    assert run(tmp_path, program) == [[STEPS, STEPS, 2 * STEPS, 2 * STEPS]]


def test_optimizers_that_step_in_the_backward_pass_are_counted_once_a_pass(tmp_path: Path) -> None:
    def program() -> int:
        model, _ = parts()
        own = {each: torch.optim.SGD([each], 0.01) for each in model.parameters()}

        def step(parameter: torch.Tensor) -> None:
            own[parameter].step()
            own[parameter].zero_grad()

        def loop() -> None:
            for x in batches():
                model(x).mean().backward()

        for each in own:
            each.register_post_accumulate_grad_hook(step)
        return measure(loop).steps

    assert run(tmp_path, program) == [STEPS]


def test_a_closure_is_not_the_optimizers_time(tmp_path: Path) -> None:
    def program() -> tuple[Passed, Passed]:
        model, _ = parts()
        found = []
        for optimizer in (torch.optim.SGD(model.parameters(), 0.01), torch.optim.LBFGS(model.parameters(), max_iter=3)):

            def closure(x: torch.Tensor, optimizer: torch.optim.Optimizer = optimizer) -> torch.Tensor:
                optimizer.zero_grad()
                time.sleep(SLOW_S)
                loss = (model(x) - 1).square().mean()
                loss.backward()
                return loss

            def steps(optimizer: Any = optimizer, closure: Any = closure) -> None:
                for x in batches(3):
                    optimizer.step(lambda x=x: closure(x))

            found.append(measure(steps))
        return found[0], found[1]

    ((once, several),) = run(tmp_path, program)
    assert once.steps == several.steps == 3
    assert once.share(COMPUTE) > 0.8
    (record,) = read_run(tmp_path).ranks
    assert len(record.steps()) == 6


def test_a_loop_that_is_left_has_ended_and_one_within_it_returns_to_it(tmp_path: Path) -> None:
    def program() -> list[str | None]:
        model, optimizer = parts()
        track = current_world().timeline.loop()
        seen = [track.current]
        for number, x in enumerate(batches()):
            seen.append(track.current)
            if number == 1:
                break
            with torch.no_grad():
                for inner in batches(2):
                    seen.append(track.current)
                    model(inner)
            seen.append(track.current)
            model(x).mean().backward()
            optimizer.step()
        return [*seen, track.current]

    expected = [None, COMPUTE, EVALUATE, EVALUATE, COMPUTE, COMPUTE, None]
    assert run(tmp_path, program) == [expected]


def test_a_loop_without_gradients_counts_as_evaluating_from_batch_two(tmp_path: Path) -> None:
    def program() -> list[str | None]:
        model, optimizer = parts()
        track = current_world().timeline.loop()
        train(model, optimizer, batches(3))
        seen = []
        for x in batches(3):
            seen.append(track.current)
            with torch.no_grad():
                model(x)
        for x in batches(3):
            seen.append(track.current)
            model(x).mean().backward()
            optimizer.step(None)
        return seen

    assert run(tmp_path, program) == [[COMPUTE, EVALUATE, EVALUATE, COMPUTE, COMPUTE, COMPUTE]]
    assert len(read_run(tmp_path).ranks[0].steps()) == 6


class Failing(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        if not self.state:
            self.state["failed"] = True
            raise ValueError("once")
        super().step(closure)


def test_after_a_step_or_a_batch_that_has_failed_the_others_count(tmp_path: Path) -> None:
    def program() -> tuple[int, str | None]:
        model = torch.nn.Linear(4, 1)
        optimizer = Failing(model.parameters(), 0.1)

        def steps() -> None:
            for _ in range(STEPS + 1):
                model(torch.ones(2, 4)).mean().backward()
                try:
                    optimizer.step()
                except ValueError:
                    continue

        found = measure(steps)
        bad = DataLoader([torch.ones(1), "text"], batch_size=2)  # type: ignore[arg-type]
        try:
            next(iter(bad))
        except TypeError:
            return found.steps, current_world().timeline.loop().current
        return 0, None

    ((steps, phase),) = run(tmp_path, program)
    assert steps == STEPS
    assert phase == COMPUTE


def test_what_other_threads_do_is_not_the_loops(tmp_path: Path) -> None:
    def program() -> tuple[Passed, int]:
        def in_a_thread() -> None:
            thread = threading.Thread(target=lambda: train(*parts(), batches()))
            thread.start()
            thread.join()

        found = measure(in_a_thread)
        return found, len(current_world().timeline.tracks())

    ((found, tracks),) = run(tmp_path, program)
    assert (found.steps, found.samples, sum(found.seconds.values()), tracks) == (0, 0, 0.0, 0)


@pytest.mark.parametrize("has_loader", [True, False])
def test_what_an_accelerator_does_counts_once(tmp_path: Path, has_loader: bool) -> None:
    def program() -> tuple[Passed, list[str]]:
        accelerator = Accelerator(seed=0)
        other, plain = parts()
        model, optimizer = accelerator.prepare(*parts())
        loader = accelerator.prepare(batches()) if has_loader else batches()

        def mixed() -> None:
            for x in loader:
                other(x).mean().backward()
                plain.step()
                accelerator.backward(model(x).mean())
                optimizer.step()
                optimizer.zero_grad()

        found = measure(mixed)
        return found, [span.phase for span in current_world().timeline.loop().spans]

    ((found, phases),) = run(tmp_path, program)
    assert (found.steps, found.samples) == (STEPS, 4 * STEPS)
    assert phases.count(FORWARD) == STEPS
    if has_loader:
        assert (phases.count(BACKWARD), phases.count(STEP)) == (2 * STEPS, STEPS)  # and the script's own pass
        assert phases.count(FETCH) == STEPS + 1


def by_accelerator() -> None:
    accelerator = Accelerator(seed=0)
    model, optimizer, loader, test = accelerator.prepare(*parts(), batches(), batches(4))
    for _ in range(2):
        for x in loader:
            with accelerator.accumulate(model):
                model(x).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        with torch.no_grad():
            for x in test:
                accelerator.gather_for_metrics(model(x))


def by_hand() -> None:
    model, optimizer = parts()
    for x in DeviceLoader(batches()):
        model(x).mean().backward()
        optimizer_step(optimizer)
        optimizer.zero_grad()
    for x in batches():  # not of this package, beside one that is
        model(x)


@pytest.mark.parametrize("loop", [by_accelerator, by_hand])
def test_a_loop_of_this_package_has_the_scripts_backward_passes_too(tmp_path: Path, loop: Callable[[], None]) -> None:
    def program() -> tuple[list[str], dict[str, int], int]:
        timeline = current_world().timeline
        timeline.is_recorded = True
        loop()
        track = timeline.loop()
        counts = {
            name: count for name, count in track.counts.items() if name in ("steps", "samples", "batches", "bytes")
        }
        phases = [span.phase for span in track.spans]
        merged = (COMPUTE if phase == BACKWARD else phase for phase in phases)
        return [phase for phase, _ in itertools.groupby(merged)], counts, phases.count(BACKWARD)

    wrapped = run(tmp_path, program, 2)
    with by_value(measure):
        plain = spawn(lambda _: program(), nprocs=2, backend="cpu")
    assert [each[:2] for each in wrapped] == [each[:2] for each in plain]
    for (_, counts, backward), (_, _, unseen) in zip(wrapped, plain, strict=True):
        assert backward >= counts["batches" if loop is by_hand else "steps"] > 0 == unseen


def test_an_error_of_the_observer_ends_no_run(tmp_path: Path) -> None:
    def program() -> tuple[int, bool]:
        world = current_world()
        failed = []

        def at_step(number: int, done: int | None) -> None:
            failed.append(number)
            raise RuntimeError("of the observer")

        world.timeline.at_step = at_step
        model, optimizer = parts()
        before = model.weight.tolist()
        train(model, optimizer, batches())
        return len(failed), model.weight.tolist() != before

    assert run(tmp_path, program) == [(1, True)]
