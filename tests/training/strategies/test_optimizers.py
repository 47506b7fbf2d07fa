"""Each optimizer of torch is exact under each strategy, or refused at prepare; so is one that assigns `p.data`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from modes import PROCESSES_2
from torch.utils.data import DataLoader
from twin import Plain, State, assert_all_are, loader_of, mean_loss, model, sgd

from unisono import Accelerator
from unisono.strategies import DDP, FSDP, ZeRO1

STRATEGIES = pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp"])

REFUSED = {"ddp": set(), "zero1": {"LBFGS"}, "fsdp": {"LBFGS", "SparseAdam"}}
SPARSE_OR_OVER_ALL = {"SparseAdam", "LBFGS"}  # test_sparse.py trains by the one, test_closures.py by the other

OPTIONS: dict[str, list[dict[str, Any]]] = {
    "Adam": [{"amsgrad": True, "weight_decay": 0.1}, {"fused": True}, {"foreach": True}],
    "Adagrad": [{"lr_decay": 0.1}, {"fused": True}],
    "RMSprop": [{"centered": True, "momentum": 0.5}],
    "SGD": [{"momentum": 0.9, "nesterov": True}, {"maximize": True}, {"foreach": True}, {"fused": True}],
}

KINDS = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
}

Make = Callable[[Any], torch.optim.Optimizer]


def makers(name: str) -> list[Make]:
    """The optimizer as it is, and with options."""

    def make(options: dict[str, Any], parameters: Any) -> torch.optim.Optimizer:
        chosen = [each for each in parameters if name != "Muon" or each.ndim == 2]
        made: torch.optim.Optimizer = getattr(torch.optim, name)(chosen, lr=0.05, **options)
        return made

    return [lambda parameters, each=each: make(each, parameters) for each in [{}, *OPTIONS.get(name, [])]]


def steps(make: Make, lines: Callable[[Any, Any], None] = lambda network, optimizer: optimizer.step()) -> Any:
    def loop(accelerator: Any, loader: DataLoader[Any]) -> State:
        network = model()
        network, optimizer, loader = accelerator.prepare(network, make(network.parameters()), loader)
        for batch in loader:
            optimizer.zero_grad()
            accelerator.backward(mean_loss(network, batch))
            lines(network, optimizer)
        with torch.no_grad():
            network(batch[0])
        return {name: getattr(each, "full_tensor", each.clone)() for name, each in network.state_dict().items()}

    return loop


@STRATEGIES
def test_each_of_torchs_optimizers_is_exact_or_refused_at_prepare(strategy: str) -> None:
    loops = {
        f"{name} {place}": steps(make)
        for name in KINDS
        if name not in REFUSED[strategy] | SPARSE_OR_OVER_ALL
        for place, make in enumerate(makers(name))
    }

    def body() -> tuple[dict[str, State], dict[str, str]]:
        told = {}
        for name in REFUSED[strategy]:
            network = model()
            with pytest.raises(TypeError) as error:
                Accelerator(strategy=strategy).prepare(network, makers(name)[0](network.parameters()))
            told[name] = str(error.value)
        return {name: loop(Accelerator(strategy=strategy), loader_of(23, 3)) for name, loop in loops.items()}, told

    ranks = PROCESSES_2.run(body)
    for name, loop in loops.items():
        print(name)
        assert_all_are([states[name] for states, _ in ranks], loop(Plain(), loader_of(23, 6)))
    for _, told in ranks:
        for name in REFUSED[strategy]:
            assert f"strategy={strategy!r}" in told[name]
            assert name in told[name]
            assert "strategy='ddp'" in told[name] or "'zero1' or 'ddp'" in told[name]


class Assigning(torch.optim.Optimizer):
    """As some research code has it."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for each in group["params"]:
                each.data = each.data - group["lr"] * each.grad.data


def assigns_parameters(network: Any, optimizer: Any) -> None:
    optimizer.step()
    for each in network.parameters():
        each.data = each.data * 0.9


def assigns_gradients(network: Any, optimizer: Any) -> None:
    for each in network.parameters():
        each.grad.data = each.grad.data * 0.9
    optimizer.step()


def changes_in_place(network: Any, optimizer: Any) -> None:
    for each in network.parameters():
        each.grad.data.copy_(each.grad.data * 0.9)
    optimizer.step()
    for each in network.parameters():
        each.data.copy_(each.data * 0.9)


def swaps_weights(network: Any, optimizer: Any) -> None:
    """As averages of weights are evaluated."""
    optimizer.step()
    kept = [each.data for each in network.parameters()]
    for each in network.parameters():
        each.data = torch.zeros_like(each.data)
    with torch.no_grad():
        assert not network(torch.ones(1, 5).double()).any()
    for each, data in zip(network.parameters(), kept, strict=True):
        each.data = data


ASSIGNING = {
    "by the optimizer": steps(Assigning),
    "behind it": steps(sgd, assigns_parameters),
    "before it": steps(sgd, assigns_gradients),
    "and back": steps(sgd, swaps_weights),
    "in place": steps(sgd, changes_in_place),
}
NOT_SEEN = {
    "ddp": set(),
    "zero1": {"by the optimizer", "behind it"},
    "fsdp": {"by the optimizer", "behind it", "before it", "and back"},
}


@STRATEGIES
def test_assigned_memory_is_stepped_on_or_refused(strategy: str) -> None:
    kinds = {"ddp": DDP(), "zero1": ZeRO1(elementwise_optimizer=True), "fsdp": FSDP(elementwise_optimizer=True)}

    def run(loop: Any) -> State | str:
        try:
            return loop(Accelerator(strategy=kinds[strategy]), loader_of(23, 3))
        except RuntimeError as error:
            return str(error)

    ranks = PROCESSES_2.run(lambda: {name: run(loop) for name, loop in ASSIGNING.items()})
    for name, loop in ASSIGNING.items():
        print(name)
        if name not in NOT_SEEN[strategy]:
            assert_all_are([each[name] for each in ranks], loop(Plain(), loader_of(23, 6)))
            continue
        for each in ranks:
            attribute = "grad.data" if name == "before it" else "data"
            assert f"has assigned `parameter.{attribute} = ...`, of " in each[name]
            assert f"change it in place, `parameter.{attribute}.copy_(...)`" in each[name]
