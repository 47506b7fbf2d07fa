"""The law of strategies: each of them, in each mode, trains the weights of one device with the whole batch.

Those of other installed packages are among them, with the options of `Options.exact()`; `-k foo` picks the one of that
name. The last tests hold the suite itself to account: strategies that forget something must not pass it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from modes import FAMILY, PROCESSES_2, SOLO, THREADS_2, THREADS_3, Mode
from torch import nn
from twin import (
    Case,
    MakeOptimizer,
    Plain,
    State,
    assert_all_are,
    loader_of,
    mean_loss,
    model,
    plain_run,
    seeded,
    sgd,
    straight,
    train,
)

from unisono import Accelerator, rank
from unisono import accelerator as facade
from unisono.errors import CollectiveMismatchError
from unisono.training.strategies import ddp
from unisono.training.strategies.engine import Engine
from unisono.training.strategies.lookup import OWN, foreign, options_of, strategy_class
from unisono.training.strategies.strategy import Strategy

STRATEGIES = [*OWN, *foreign()]
AMONG_PROCESSES = [name for name in STRATEGIES if name != "spmd"]  # which is one process with all devices
PLACES = [
    (SOLO, "ddp"),
    (THREADS_2, "ddp"),
    (THREADS_3, "fsdp"),
    *((mode, name) for name in foreign() for mode in (SOLO, THREADS_3)),
    *((PROCESSES_2, name) for name in AMONG_PROCESSES),
]
everywhere = pytest.mark.parametrize(("mode", "strategy"), PLACES, ids=[f"{mode}-{name}" for mode, name in PLACES])

pytestmark = [
    pytest.mark.skipif(FAMILY == "xla", reason="the strategies of XLA are held to account in tests/xla"),
    pytest.mark.every_mode,
]

CASE = Case(samples=23, batch=3, accumulate=2)  # the last batch is uneven, and its step has one microbatch


class Training:
    """Ranks other than zero begin with other parameters, which are to count for nothing."""

    def __init__(
        self,
        strategy: str,
        accumulate: int = 1,
        network: Callable[[int], nn.Module] = model,
        optimizer: MakeOptimizer = sgd,
        **options: Any,
    ) -> None:
        chosen = options_of(strategy).exact()
        chosen = replace(chosen, **{name: each for name, each in options.items() if hasattr(chosen, name)})
        self.accelerator = Accelerator(strategy=chosen, gradient_accumulation_steps=accumulate)
        made = network(rank())
        self.network, self.optimizer, self.loader = self.accelerator.prepare(
            made, optimizer(made.parameters()), loader_of(CASE.samples, CASE.batch)
        )

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> State:
        """On rank zero whole, on the others nothing."""
        return self.accelerator.state_dict(self.network)

    def gradients(self) -> list[torch.Tensor]:
        found = [each.grad for each in self.network.parameters()]
        return [getattr(each, "full_tensor", lambda each=each: each)().clone() for each in found]


# The laws: what each rank does, and what rank zero is to have then.


def train_exactly(strategy: str) -> State:
    training = Training(strategy, CASE.accumulate)
    for _ in range(CASE.epochs):
        for batch in training.loader:
            training.accelerator.backward(mean_loss(training.network, batch))
            training.step()
    return training.state()


def trained_by_one(mode: Mode) -> State:
    return plain_run(CASE, mode.ranks, sgd)


def leave_final_gradients(strategy: str) -> State:
    training = Training(strategy, CASE.accumulate)
    found = []
    for batch in training.loader:
        mean_loss(training.network, batch).backward()
        if training.accelerator.sync_gradients:
            found.append(training.gradients())
        training.step()
    return {f"{step}.{place}": each for step, step_s in enumerate(found) for place, each in enumerate(step_s)}


def gradients_of_one(mode: Mode) -> State:
    found: State = {}

    def keep(network: nn.Module) -> None:
        step = len(found) // 4
        found.update({f"{step}.{place}": each.grad.clone() for place, each in enumerate(network.parameters())})

    one_epoch_of_one(mode.ranks * CASE.batch * CASE.accumulate, model(), sgd, keep)
    return found


def one_epoch_of_one(
    size: int, network: nn.Module, make_optimizer: MakeOptimizer, before: Callable[[nn.Module], Any] = lambda _: None
) -> State:
    """Plainly, with a function before each step."""

    def learn(plain: Plain, network: nn.Module, batch: Any) -> None:
        straight(plain, network, batch)
        before(network)

    return train(Plain(), loader_of(CASE.samples, size), learn, network, make_optimizer)


def clip_by_the_norm_of_all(strategy: str) -> State:
    training = Training(strategy)
    for batch in training.loader:
        training.accelerator.backward(mean_loss(training.network, batch))
        training.accelerator.clip_grad_norm_(training.network, 0.05)
        training.step()
    return training.state()


def clipped_by_one(mode: Mode) -> State:
    def clip(network: nn.Module) -> None:
        nn.utils.clip_grad_norm_(network.parameters(), 0.05)

    return one_epoch_of_one(mode.ranks * CASE.batch, model(), sgd, clip)


class Fork(nn.Module):
    """Each sample goes one way; few go right, so that some ranks leave those parameters out."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(5, 2), nn.Linear(5, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        goes_right = inputs[:, :1] > 1.0
        outputs = self.left(inputs)
        return torch.where(goes_right, self.right(inputs), outputs) if goes_right.any() else outputs


def fork(seed: int = 0) -> nn.Module:
    return seeded(Fork().double(), seed)


def plain_sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """For which a gradient of zero and none are the same."""
    return torch.optim.SGD(parameters, lr=0.1)


def leave_parameters_unused(strategy: str) -> State:
    training = Training(strategy, network=fork, optimizer=plain_sgd, find_unused_parameters=True)
    for batch in training.loader:
        mean_loss(training.network, batch).backward()
        training.step()
    return training.state()


def forked_by_one(mode: Mode) -> State:
    return one_epoch_of_one(mode.ranks * CASE.batch, fork(), plain_sgd)


def skip_what_nothing_counts_in(strategy: str) -> State:
    training = Training(strategy)
    for batch in training.loader:
        training.accelerator.backward(mean_loss(training.network, batch) * torch.nan, weight=0)
        training.step()
    return training.state()


def begun_by_one(mode: Mode) -> State:
    return model().state_dict()


def begin_anew_after_a_failure(strategy: str) -> State:
    failed = Training(strategy, CASE.accumulate)
    mean_loss(failed.network, next(iter(failed.loader))).backward()
    failed.accelerator.free_memory()
    return train_exactly(strategy)


LAWS: dict[Callable[[str], State], Callable[[Mode], State]] = {
    train_exactly: trained_by_one,
    leave_final_gradients: gradients_of_one,
    clip_by_the_norm_of_all: clipped_by_one,
    leave_parameters_unused: forked_by_one,
    skip_what_nothing_counts_in: begun_by_one,
    begin_anew_after_a_failure: trained_by_one,
}
OF_ALL_GRADIENTS = (leave_final_gradients, clip_by_the_norm_of_all)


@everywhere
def test_it_does_what_one_device_does(mode: Mode, strategy: str) -> None:
    shares = strategy_class(options_of(strategy)).shares_state  # else gradients are each rank's own
    laws = {act.__name__: act for act in LAWS if shares or act not in OF_ALL_GRADIENTS}
    first, *_ = mode.run(lambda: {name: act(strategy) for name, act in laws.items()})
    for name, act in laws.items():
        try:
            assert_all_are([first[name]], LAWS[act](mode))
        except AssertionError as error:
            error.add_note(f"of the law {name}")
            raise


@everywhere
def test_what_was_saved_under_it_trains_on_one_device(mode: Mode, strategy: str) -> None:
    def body() -> Any:
        training = Training(strategy)
        for batch in training.loader:
            training.accelerator.backward(mean_loss(training.network, batch))
            training.step()
        return training.state(), training.accelerator.state_dict(training.optimizer)

    state, steps = mode.run(body)[0]
    network = model(5)
    optimizer = sgd(network.parameters())
    network.load_state_dict(state)
    optimizer.load_state_dict(steps)
    assert_all_are([network.state_dict()], plain_run(CASE._replace(accumulate=1, epochs=1), mode.ranks, sgd))
    assert all("momentum_buffer" in each for each in optimizer.state.values())


class ErrorFeedback:
    """A hook that sends rounded gradients, and adds what the rounding has left out to the next ones."""

    def __init__(self) -> None:
        self.errors: dict[int, torch.Tensor] = {}

    def __call__(self, bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
        whole = bucket.buffer() + self.errors.get(bucket.index(), 0)
        rounded = whole.bfloat16().to(whole.dtype)
        self.errors[bucket.index()] = whole - rounded
        return self.mean(rounded)

    def mean(self, rounded: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        torch.distributed.all_reduce(rounded)
        found: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        found.set_result(rounded / torch.distributed.get_world_size())
        return found


class Stateful(ErrorFeedback):
    """Whose attributes are no plain data."""

    def __init__(self) -> None:
        super().__init__()
        self.own = object()

    def state_dict(self) -> dict[str, Any]:
        return {"errors": self.errors}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.errors = state["errors"]


def sends(state: ErrorFeedback, bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return state(bucket)


HOOKS: dict[str, Callable[[], Any]] = {
    "no hook": lambda: None,
    "attributes": ErrorFeedback,
    "state_dict": Stateful,
    "partial": lambda: partial(sends, ErrorFeedback()),
    "method": lambda: ErrorFeedback().__call__,
    "PowerSGD": lambda: ddp.power_sgd(
        matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=0.1, warm_start=False
    ),
}
SAVED = [
    *((*place, ["no hook"]) for place in PLACES),
    (PROCESSES_2, "ddp", [hook for hook in HOOKS if hook != "no hook"]),
    (PROCESSES_2, "zero1", ["PowerSGD"]),
]


def end_after(strategy: str, hook: str, path: Path, interrupted: bool) -> State:
    training = Training(strategy, comm_hook=HOOKS[hook]())
    for number, batch in enumerate(training.loader):
        if interrupted and number == 3:
            break
        training.accelerator.backward(mean_loss(training.network, batch))
        training.step()
        if number == 2:
            training.accelerator.save_state(path)
    return training.state()


@pytest.mark.parametrize(("mode", "strategy", "hooks"), SAVED, ids=str)
def test_a_resumed_run_ends_with_the_bits_of_an_undisturbed_one(
    mode: Mode, strategy: str, hooks: list[str], tmp_path: Path
) -> None:
    def body(hook: str) -> tuple[State, State]:
        undisturbed = end_after(strategy, hook, tmp_path / hook / "undisturbed", interrupted=False)
        end_after(strategy, hook, tmp_path / hook / "saved", interrupted=True)
        training = Training(strategy, network=lambda rank: model(rank + 7), comm_hook=HOOKS[hook]())
        training.accelerator.load_state(tmp_path / hook / "saved")
        for batch in training.loader:
            training.accelerator.backward(mean_loss(training.network, batch))
            training.step()
        return undisturbed, training.state()

    for hook, (undisturbed, resumed) in mode.run(lambda: {each: body(each) for each in hooks})[0].items():
        assert undisturbed
        assert all(torch.equal(each, resumed[name]) for name, each in undisturbed.items()), hook


def test_what_hooks_keep_is_not_taken_over_by_other_numbers_of_ranks(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def load() -> int:
        training = Training("ddp", comm_hook=(hook := ErrorFeedback()))
        training.accelerator.load_state(tmp_path)
        return len(hook.errors)

    PROCESSES_2.run(lambda: end_after("ddp", "attributes", tmp_path, interrupted=True))
    assert PROCESSES_2.run(load) == [1, 1]
    capfd.readouterr()
    assert Mode("processes", 3).run(load) == [0, 0, 0]
    assert "saved by 2 ranks, loaded by 3: what the comm_hook has kept" in capfd.readouterr().err
    assert SOLO.run(load) == [0]


def test_a_hook_whose_state_is_no_plain_data_is_told_to_have_a_state_dict(tmp_path: Path) -> None:
    def body() -> str:
        hook = ErrorFeedback()
        hook.own = object()  # type: ignore[attr-defined]
        training = Training("ddp", comm_hook=hook)
        with pytest.raises(TypeError, match=r"comm_hook.*\['own'\].*plain data") as refused:
            training.accelerator.save_state(tmp_path)
        return "\n".join([str(refused.value), *refused.value.__notes__])

    assert all("state_dict() and load_state_dict()" in told for told in PROCESSES_2.run(body))


@everywhere
def test_what_is_refused_is_refused_before_anything_has_changed(mode: Mode, strategy: str) -> None:
    def prepare_what_is_not_known() -> None:
        accelerator, network = Accelerator(strategy=strategy), model()
        before = {name: each.clone() for name, each in network.state_dict().items()}
        optimizer = sgd(network.parameters())
        with pytest.raises(TypeError, match="cannot be prepared"):
            accelerator.prepare(network, optimizer, object())
        assert type(optimizer.step).__name__ == "method"
        assert all(torch.equal(each, before[name]) for name, each in network.state_dict().items())
        network, optimizer = accelerator.prepare(network, optimizer)  # they can be prepared still

    def step_on_gradients_of_one_rank() -> str:
        training = Training(strategy, accumulate=2)
        batches = iter(training.loader)  # what ends a loop ends its last step
        mean_loss(training.network, next(batches)).backward()
        before = [each.detach().clone() for each in training.network.parameters()]
        with pytest.raises(RuntimeError, match="this rank's alone") as refused:
            sgd(training.network.parameters()).step()
        for each, was in zip(training.network.parameters(), before, strict=True):
            torch.testing.assert_close(each.detach(), was, rtol=0, atol=0)
        return str(refused.value)

    told = mode.run(lambda: (prepare_what_is_not_known(), step_on_gradients_of_one_rank())[1])
    assert all("sync_gradients" in each for each in told)


# Strategies that forget something.


class ZeroesEverything(Engine):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        for each in self.members.trained():
            each.register_hook(torch.zeros_like)


class ForgetsToReduce(Engine):
    def complete_reduction(self) -> None:
        """Nothing."""


class ReducesTheMean(Engine):
    def complete_reduction(self) -> None:
        for each in self.members.trained():
            self.world.comm.all_reduce(each.grad, "mean")


class ReducesTwice(Engine):
    def complete_reduction(self) -> None:
        super().complete_reduction()
        super().complete_reduction()


def with_engine(kind: type[Engine], broadcasts: bool = True) -> type[Strategy]:
    class Forgetful(Strategy):
        def wrap_model(self, module: nn.Module) -> Engine:
            if broadcasts:
                super().wrap_model(module)
            return kind(module, self.world, self.steps)

    return Forgetful


@pytest.mark.parametrize(
    "forgetful",
    [
        with_engine(ZeroesEverything),
        with_engine(ForgetsToReduce),
        with_engine(ReducesTheMean),
        with_engine(ReducesTwice),
        with_engine(Engine, broadcasts=False),
    ],
    ids=["zeroes", "reduces not", "reduces the mean", "reduces twice", "broadcasts not"],
)
def test_a_strategy_that_forgets_something_breaks_a_law(monkeypatch: pytest.MonkeyPatch, forgetful: Any) -> None:
    monkeypatch.setattr(facade, "strategy_class", lambda name: forgetful)
    with pytest.raises((AssertionError, CollectiveMismatchError)):
        first, *_ = THREADS_2.run(lambda: train_exactly("ddp"))
        assert_all_are([first], trained_by_one(THREADS_2))
