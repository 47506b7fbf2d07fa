"""What one device computes with the whole global batch, and the data and the model for it, in float64.

`plain_run` is the oracle of all that weighs gradients. The order of additions is all that differs between it and a run
on several ranks: a relative 1e-11 leaves room for that and for nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from modes import HOST, Mode, in_main_memory
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from unisono import Accelerator, backward, current_world, optimizer_step
from unisono.loading.device_loader import DeviceLoader

CLOSE = {"rtol": 1e-11, "atol": 1e-13}

State = dict[str, torch.Tensor]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class Case(NamedTuple):
    """How a model is trained.

    Attributes:
        samples, batch: of the data, and of a rank's batch.
        accumulate: batches in a step.
        way: "accelerator" (its `backward`), "plain" (`loss.backward()` of prepared objects), "bare" (the wings).
        tokens: weigh samples by their tokens.
        leave_at: leave the first epoch's loop behind so many batches; None goes to the end.
    """

    samples: int
    batch: int
    accumulate: int = 1
    way: str = "accelerator"
    tokens: bool = False
    leave_at: int | None = None
    epochs: int = 2


def data(samples: int) -> TensorDataset:
    """Inputs, targets, and tokens: whole numbers, of which some are 0."""
    numbers = torch.Generator().manual_seed(1)
    inputs, targets = torch.randn(samples, 7, generator=numbers, dtype=torch.float64, device=HOST).split([5, 2], 1)
    return TensorDataset(inputs, targets, torch.randint(0, 3, (samples,), generator=numbers, device=HOST).double())


def seeded(network: nn.Module, seed: int = 0) -> nn.Module:
    """Fill the parameters from a generator of their own: replica threads would race for the global one."""
    numbers = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in network.parameters():
            drawn = torch.randn(parameter.shape, generator=numbers, dtype=torch.float64, device=HOST)
            parameter.copy_(drawn / 3)
    return network


def model(seed: int = 0) -> nn.Module:
    """In main memory, as scripts make it that leave its moves to an Accelerator."""
    with HOST:
        return seeded(nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2)).double(), seed)


def adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.05)


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)


def mean_loss(network: nn.Module, batch: Sequence[torch.Tensor], tokens: bool = False) -> torch.Tensor:
    """The mean over samples, or over tokens, which is 0 where there are none."""
    inputs, targets, counts = batch
    errors = F.mse_loss(network(inputs), targets, reduction="none").mean(1)
    return (errors * counts).sum() / counts.sum().clamp(min=1) if tokens else errors.mean()


def windows(case: Case, ranks: int) -> list[list[int]]:
    """Which samples make each step: so many batches, or the rest of a loop; a loop that is left leaves its rest to the
    next one."""
    steps, window, count = [], [], 0
    size = ranks * case.batch
    for epoch in range(case.epochs):
        for number, start in enumerate(range(0, case.samples, size), 1):
            window, count = window + list(range(start, min(start + size, case.samples))), count + 1
            if count == case.accumulate or start + size >= case.samples:
                steps, window, count = [*steps, window], [], 0
            if epoch == 0 and number == case.leave_at:
                break
    return steps


def plain_run(case: Case, ranks: int, make_optimizer: MakeOptimizer = adam) -> State:
    """The oracle: one device, the whole global batch, no package."""
    tensors = data(case.samples).tensors
    network = model()
    optimizer = make_optimizer(network.parameters())
    for window in windows(case, ranks):
        batch = [each[window] for each in tensors]
        optimizer.zero_grad()
        mean_loss(network, batch, case.tokens).backward()
        optimizer.step()
    return network.state_dict()


def run(case: Case, make_optimizer: MakeOptimizer = adam, **options: Any) -> State:
    """The same on this rank, with its peers."""
    network = model().to(current_world().device) if case.way == "bare" else model()
    optimizer = make_optimizer(network.parameters())
    loader: Any = DataLoader(data(case.samples), batch_size=case.batch)
    if case.way == "bare":
        return bare_run(case, network, optimizer, DeviceLoader(loader))
    accelerator = Accelerator(gradient_accumulation_steps=case.accumulate, **options)
    network, optimizer, loader = accelerator.prepare(network, optimizer, loader)
    for epoch in range(case.epochs):
        for number, batch in enumerate(loader, 1):
            optimizer.zero_grad()
            loss = mean_loss(network, batch, case.tokens)
            if case.way == "plain":
                loss.backward()
            else:
                accelerator.backward(loss, weight=batch[2].sum() * (loader.valid_samples > 0) if case.tokens else None)
            optimizer.step()
            if epoch == 0 and number == case.leave_at:
                break
    return network.state_dict()


def bare_run(case: Case, network: nn.Module, optimizer: torch.optim.Optimizer, loader: DeviceLoader) -> State:
    optimizer.zero_grad()
    count = 0
    for epoch in range(case.epochs):
        iterator = iter(loader)
        for number, batch in enumerate(iterator, 1):
            weight = batch[2].sum() * (loader.valid_samples > 0) if case.tokens else None
            backward(mean_loss(network, batch, case.tokens), weight)
            count += 1
            if count == case.accumulate or iterator.is_last():
                optimizer_step(optimizer)
                optimizer.zero_grad()
                count = 0
            if epoch == 0 and number == case.leave_at:
                break
    return network.state_dict()


def assert_same_bits(ranks: Sequence[Any]) -> None:
    for others in ranks[1:]:
        torch.testing.assert_close(others, ranks[0], rtol=0, atol=0)


def assert_all_are(states: Sequence[State], expected: State) -> None:
    """All ranks have the same bits, and they are close to the twin's."""
    states, expected = in_main_memory((list(states), expected))
    for state in states:
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[name], states[0][name]) for name in state)
    torch.testing.assert_close(states[0], expected, **CLOSE)


class Plain:
    """An Accelerator that does nothing: the same lines, on one device, with batches that are whole steps."""

    def prepare(self, *objects: Any) -> Any:
        return objects

    def backward(self, loss: torch.Tensor, weight: Any = None) -> None:
        loss.backward()

    def accumulate(self) -> AbstractContextManager[None]:
        return nullcontext()

    def no_sync(self, network: nn.Module) -> AbstractContextManager[None]:
        return nullcontext()

    def clip_grad_norm_(self, parameters: Iterable[torch.Tensor], max_norm: float, kind: float = 2.0) -> torch.Tensor:
        return nn.utils.clip_grad_norm_(parameters, max_norm, kind)


Lines = Callable[[Any, DataLoader[Any]], State]
Learn = Callable[[Any, Any, Any], Any]


def loader_of(samples: int, batch: int) -> DataLoader[Any]:
    return DataLoader(data(samples), batch_size=batch)


def straight(accelerator: Any, network: Any, batch: Any) -> None:
    accelerator.backward(mean_loss(network, batch))


def train(
    accelerator: Any,
    loader: DataLoader[Any],
    learn: Learn = straight,
    network: nn.Module | None = None,
    make_optimizer: MakeOptimizer = sgd,
    begin: Callable[[Any], Any] = lambda network: None,
    after: Callable[[int, Any], Any] = lambda place, network: None,
) -> State:
    """Prepare all, and step after what `learn(accelerator, network, batch)` does with each batch.

    Args:
        begin: gets the prepared model before the loop.
        after: gets the number of each step, from 0 on, and the model.
    """
    network = network or model()
    network, optimizer, loader = accelerator.prepare(network, make_optimizer(network.parameters()), loader)
    begin(network)
    for place, batch in enumerate(loader):
        learn(accelerator, network, batch)
        optimizer.step()
        optimizer.zero_grad()
        after(place, network)
    return whole(network)


def steps(learn: Learn = straight, make: Callable[[], nn.Module] = model, make_optimizer: MakeOptimizer = sgd) -> Lines:
    """The same as the lines of a loop."""
    return lambda accelerator, loader: train(accelerator, loader, learn, make(), make_optimizer)


def whole(*networks: nn.Module) -> State:
    """Their states, of several with their places before the names; collective where they are sharded."""
    return {
        f"{place}/{name}" if place else name: getattr(each, "full_tensor", each.clone)()
        for place, network in enumerate(networks)
        for name, each in network.state_dict().items()
    }


def compare(mode: Mode, lines: Mapping[str, Lines] | Lines, samples: int = 23, batch: int = 3, **options: Any) -> None:
    """Run training loops, of one text, with an Accelerator on a mode's ranks and plainly on one device."""
    lines = lines if isinstance(lines, Mapping) else {"lines": lines}
    per_rank = mode.run(
        lambda: {name: loop(Accelerator(**options), loader_of(samples, batch)) for name, loop in lines.items()}
    )
    step = mode.ranks * batch * options.get("gradient_accumulation_steps", 1)
    for name, loop in lines.items():
        print(name)
        assert_all_are([states[name] for states in per_rank], loop(Plain(), loader_of(samples, step)))
