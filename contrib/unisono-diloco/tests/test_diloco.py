"""strategy="diloco": between meetings each rank trains alone, and at meetings all take the step of the paper."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from modes import PROCESSES_2, SOLO, THREADS_2, THREADS_3, Mode, hearing
from torch import nn
from twin import CLOSE, State, assert_same_bits, data, loader_of, mean_loss, model, seeded

from unisono import Accelerator, rank
from unisono.compat.accelerate.local_sgd import LocalSGD
from unisono_diloco import DiLoCo

SAMPLES, BATCH, EVERY = 23, 3, 3  # the last batch is uneven, and the end of a loop is between meetings
Optimizers = Callable[[nn.Module], list[torch.optim.Optimizer]]


def adamw(network: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(network.parameters(), lr=0.05)]


def without_state(network: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(network.parameters(), lr=0.1)]


def two(network: nn.Module) -> list[torch.optim.Optimizer]:
    first, *rest = network.parameters()
    return [torch.optim.SGD(rest, lr=0.1, momentum=0.9), torch.optim.AdamW([first], lr=0.05)]


class Training:
    def __init__(self, strategy: Any, make: Optimizers = adamw, network: nn.Module | None = None, **options: Any):
        self.accelerator = Accelerator(strategy=strategy, **options)
        made = network or model(rank())  # rank zero's counts
        objects = made, make(made), loader_of(SAMPLES, BATCH)
        self.network, self.optimizers, self.loader = self.accelerator.prepare(*objects)

    def state(self) -> State:
        return {name: each.detach().clone() for name, each in self.network.state_dict().items()}

    def epoch(self, loss: Callable[..., torch.Tensor] = mean_loss, leave_at: int | None = None) -> list[State]:
        """The states after its steps."""
        found = []
        for number, batch in enumerate(self.loader, 1):
            self.accelerator.backward(loss(self.network, batch))
            is_step = self.accelerator.sync_gradients
            for each in self.optimizers:
                each.step()
                each.zero_grad()
            found += [self.state()] if is_step else []
            if number == leave_at:
                break
        return found


def plain_replicas(ranks: int, make: Optimizers, k: int, options: DiLoCo, epochs: int) -> list[list[State]]:
    """The oracle: of each replica, its states after its steps; all in one thread, with Nesterov's step by hand."""
    networks = [model() for _ in range(ranks)]
    optimizers = [make(each) for each in networks]
    starts = [each.detach().clone() for each in networks[0].parameters()]
    momenta = [torch.zeros_like(each) for each in starts]
    found: list[list[State]] = [[] for _ in networks]
    tensors, size, since = data(SAMPLES).tensors, ranks * BATCH, 0
    for begin in [*range(0, SAMPLES, size * k)] * epochs:
        window = range(begin, min(begin + size * k, SAMPLES))
        rounds = [window[at : at + size] for at in range(0, len(window), size)]
        for place, network in enumerate(networks):
            own = [one for each in rounds for one in torch.tensor_split(torch.tensor(each), ranks)[place].tolist()]
            loss = mean_loss(network, [each[own] for each in tensors]) * len(own) * ranks / len(window)
            for each in optimizers[place]:
                each.zero_grad()
            loss.backward()
            for each in optimizers[place]:
                each.step()
        since += 1
        if since == options.every or window[-1] == SAMPLES - 1:
            since = 0
            with torch.no_grad():
                for start, momentum, *replicas in zip(
                    starts, momenta, *(each.parameters() for each in networks), strict=True
                ):
                    gradient = start - sum(replicas) / ranks
                    momentum.mul_(options.outer_momentum).add_(gradient)
                    start -= options.outer_lr * (gradient + options.outer_momentum * momentum)
                    for each in replicas:
                        each.copy_(start)
        for place, network in enumerate(networks):
            found[place].append({name: each.clone() for name, each in network.state_dict().items()})
    return found


@pytest.mark.every_mode
@pytest.mark.parametrize("mode", [SOLO, THREADS_2, PROCESSES_2], ids=str)
@pytest.mark.parametrize(
    ("make", "k", "options"),
    [
        (adamw, 1, DiLoCo(EVERY)),
        (adamw, 2, DiLoCo(EVERY, 0.5, 0)),
        (without_state, 1, DiLoCo(EVERY)),
        (two, 1, DiLoCo(EVERY, 1, 0.5)),
    ],
    ids=["adamw", "accumulating", "without state", "two optimizers"],
)
def test_each_step_is_that_of_replicas_in_plain_code(mode: Mode, make: Optimizers, k: int, options: DiLoCo) -> None:
    def body() -> list[State]:
        training = Training(options, make, gradient_accumulation_steps=k)
        return [state for _ in range(3) for state in training.epoch()]

    torch.testing.assert_close(mode.run(body), plain_replicas(mode.ranks, make, k, options, 3), **CLOSE)


@pytest.mark.parametrize("mode", [PROCESSES_2, THREADS_2], ids=str)
def test_ranks_go_on_from_a_state_that_is_loaded_between_meetings(mode: Mode) -> None:
    def run(loads: bool) -> list[State]:
        training = Training(DiLoCo(every=EVERY, outer_lr=1.0, outer_momentum=0.0), without_state)  # without a memory
        if loads:
            training.epoch(leave_at=1)
            training.network.load_state_dict(model().state_dict())
        return training.epoch()

    for loaded, fresh in zip(mode.run(lambda: run(True)), mode.run(lambda: run(False)), strict=True):
        torch.testing.assert_close(loaded, fresh, **CLOSE)


class Fork(nn.Module):
    """Only ranks that are `users` use the right part."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.left, self.right, self.last = (
            *(nn.BatchNorm1d(5), nn.Linear(5, 2), nn.Linear(5, 2)),
            nn.Linear(2, 2).requires_grad_(False),
        )
        self.phase, self.users = nn.Parameter(torch.ones(2, dtype=torch.complex128)), {0}

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        inputs = self.norm(inputs)
        outputs = self.left(inputs) + (self.right(inputs) if rank() in self.users else 0)
        return self.last(outputs * (1 + self.phase.prod().imag))


@pytest.mark.parametrize("mode", [THREADS_2, PROCESSES_2], ids=str)
def test_ranks_agree_after_meetings_whatever_was_used_or_frozen_between(mode: Mode) -> None:
    def body() -> list[Any]:
        network = seeded(Fork().double())
        training = Training(DiLoCo(every=100, sent_as="bf16"), network=network)
        before = network.last.weight.clone()
        found: list[Any] = training.epoch()[-1:]
        assert found[0]["phase"].imag.all()
        network.users = {1}
        found += training.epoch()[-1:]
        assert torch.equal(network.last.weight, before)
        training.epoch(leave_at=1)
        network.last.requires_grad_(True)
        network.left.requires_grad_(False)
        found += training.epoch()[-1:]
        assert not torch.equal(network.last.weight, before)
        return [*found, [each["outer_momentum"] for each in training.optimizers[0].state.values()]]

    assert_same_bits(mode.run(body))


@pytest.mark.parametrize("mode", [THREADS_2, PROCESSES_2], ids=str)
@pytest.mark.parametrize("make", [adamw, without_state, two])
def test_a_run_that_is_resumed_ends_as_the_one_that_was_saved(mode: Mode, make: Optimizers, tmp_path: Path) -> None:
    def saved() -> State:
        training = Training(DiLoCo(EVERY), make)
        training.epoch()
        for number, batch in enumerate(training.loader, 1):
            training.accelerator.backward(mean_loss(training.network, batch))
            for each in training.optimizers:
                each.step()
                each.zero_grad()
            if number == 2:  # in the middle between meetings
                training.accelerator.save_state(tmp_path / "saved")
        return training.state()

    def resumed() -> State:
        training = Training(DiLoCo(EVERY), make)
        training.accelerator.load_state(tmp_path / "saved")
        return training.epoch()[-1]

    assert_same_bits([*mode.run(saved), *mode.run(resumed)])


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((THREADS_2, "diloco"), (THREADS_3, "diloco")),
        ((PROCESSES_2, "diloco"), (SOLO, "diloco")),
        ((PROCESSES_2, "diloco"), (PROCESSES_2, "zero1")),
        ((PROCESSES_2, "diloco"), (PROCESSES_2, "fsdp")),
        ((PROCESSES_2, "ddp"), (PROCESSES_2, "diloco")),
    ],
    ids=str,
)
def test_checkpoints_load_on_other_ranks_and_under_other_strategies(
    before: tuple[Mode, str], after: tuple[Mode, str], tmp_path: Path
) -> None:
    def saved() -> State:
        training = Training(before[1])
        training.epoch(leave_at=2)
        training.accelerator.save_state(tmp_path / "saved")
        return training.accelerator.state_dict(training.network)

    def resumed() -> tuple[Any, list[State]]:
        training = Training(after[1])
        training.epoch(leave_at=1)  # which counts for nothing
        training.accelerator.load_state(tmp_path / "saved")
        found = training.accelerator.state_dict(training.network)
        training.epoch()
        return found, training.accelerator.state_dict(training.network)

    expected, *_ = before[0].run(saved)
    (found, trained), *_ = after[0].run(resumed)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert all(each.isfinite().all() and not torch.equal(each, found[name]) for name, each in trained.items())


@pytest.mark.parametrize("mode", [THREADS_3, PROCESSES_2], ids=str)
def test_what_is_sent_with_fewer_bits_is_off_by_no_more_than_is_promised(mode: Mode) -> None:
    def after_a_step(options: DiLoCo) -> torch.Tensor:
        network = seeded(nn.Sequential(nn.Linear(5, 300), nn.Tanh(), nn.Linear(300, 2)).double())
        training = Training(options, without_state, network)
        training.epoch(leave_at=1)
        return torch.cat([each.detach().flatten() for each in network.parameters()])

    exact, *_ = mode.run(lambda: after_a_step(DiLoCo(1, 1, 0)))
    start = sum(each for each in mode.run(lambda: after_a_step(DiLoCo(1, 1e-300, 0)))) / mode.ranks
    moved = torch.stack(mode.run(lambda: after_a_step(DiLoCo(2)))) - start
    largest = torch.stack([each.abs().max() for each in moved.split(256, dim=1)]).repeat_interleave(256)[: len(start)]
    for sent_as, part in (("bf16", 2**-7), ("int8", 1 / (2 * (127 // mode.ranks)))):
        per_rank = mode.run(lambda sent_as=sent_as: after_a_step(DiLoCo(1, 1, 0, sent_as)))
        assert_same_bits(per_rank)
        errors = (per_rank[0] - exact).abs()
        assert errors.max() > 0
        assert (errors <= largest * part * (1 + 1e-6)).all()


def test_nonfinite_numbers_on_one_rank_spoil_the_mean_even_in_int8() -> None:
    def body() -> State:
        training = Training(DiLoCo(1, sent_as="int8"), without_state)
        return training.epoch(lambda *args: mean_loss(*args) * (torch.nan if rank() == 1 else 1), leave_at=1)[0]

    assert all(each.isnan().all() for state in THREADS_2.run(body) for each in state.values())


@pytest.mark.parametrize("mode", [THREADS_2, PROCESSES_2], ids=str)
def test_with_fp16_all_ranks_skip_a_step_that_overflows_on_one(mode: Mode) -> None:
    def body() -> Any:
        training = Training(
            DiLoCo(EVERY), network=model().float(), mixed_precision="fp16", scaler_options={"init_scale": 16.0}
        )
        skipped, number = [], 0

        def loss(network: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
            nonlocal number
            skipped.append(training.accelerator.optimizer_step_was_skipped)
            number += 1
            own = mean_loss(network, [each.float() for each in batch])
            return own * torch.inf if (rank(), number) == (1, 2) else own

        training.epoch(loss)
        assert training.accelerator.scaler is not None
        return skipped, training.accelerator.scaler.get_scale(), training.state()

    assert_same_bits(per_rank := mode.run(body))
    assert per_rank[0][0] == [False, False, True, False]


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"every": 0}, ValueError, "every=0 is too small"),
    ({"every": 2.0}, TypeError, "every=2.0 is of type float; pass a number"),
    ({"outer_lr": 0}, ValueError, "outer_lr=0 is no learning rate"),
    ({"outer_lr": float("nan")}, ValueError, "outer_lr=nan"),
    ({"outer_momentum": 1}, ValueError, r"outer_momentum=1 is not in \[0, 1\)"),
    ({"outer_momentum": "0.9"}, TypeError, "pass a number"),
    ({"sent_as": "fp8"}, ValueError, "sent_as='fp8' does not exist; choose one of None, 'bf16', 'int8'"),
]


@pytest.mark.parametrize(("options", "error", "message"), BAD, ids=[str(options) for options, *_ in BAD])
def test_options_that_mean_nothing_are_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        DiLoCo(**options)


def test_what_it_cannot_do_is_refused_with_a_way_out() -> None:
    def body() -> None:
        training = Training("diloco")
        mean_loss(training.network, next(iter(training.loader))).backward()
        with pytest.raises(RuntimeError, match=r"which was not prepared.*prepare\(optimizer\)"):
            adamw(training.network)[0].step()
        with (
            pytest.raises(ValueError, match="or under its strategy; leave this block out"),
            LocalSGD(training.accelerator, training.network, 2),
        ):
            pass
        with pytest.raises(TypeError, match="LBFGS; use strategy='ddp'"):
            Training("diloco", lambda network: [torch.optim.LBFGS(network.parameters())])
        with pytest.raises(TypeError, match="make it one of a module, or use strategy='ddp'"):
            Accelerator(strategy="diloco").prepare(nn.Parameter(torch.ones(())))

    THREADS_2.run(body)
    with pytest.raises(ValueError, match=r"too few levels for the sum of 32 ranks.*pass sent_as='bf16'"):
        Mode("threads", 32).run(lambda: Accelerator(strategy=DiLoCo(sent_as="int8")))
    told = PROCESSES_2.told(lambda: Accelerator(snapshot_every=1, strategy="diloco"), ValueError)
    assert all("no common state" in each for each in told)


def test_the_ranks_meet_also_where_only_the_module_is_kept(tmp_path: Path) -> None:
    def body() -> list[float]:
        accelerator, model = Accelerator(strategy=DiLoCo(every=5, outer_lr=1, outer_momentum=0)), nn.Linear(1, 1)
        made, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        made(torch.full((1, 1), 1.0 + rank())).sum().backward()
        optimizer.step()
        own = model.weight.item()
        del made
        model = accelerator.unwrap_model(model)
        accelerator.save_state(tmp_path / "saved")
        return [own, model.weight.item()]

    (first, mean), (second, other) = PROCESSES_2.run(body)
    assert first != second
    assert mean == other == pytest.approx((first + second) / 2)


@pytest.mark.parametrize("mode", [THREADS_2, PROCESSES_2], ids=str)
def test_nothing_is_said_of_ranks_that_step_alone(mode: Mode) -> None:
    def body() -> list[str]:
        with hearing("unisono") as said:
            Training("diloco").epoch()
        return [each for each in said if "step" in each]

    assert mode.run(body) == [[], []]
