"""Optimizers that take each parameter as a whole step under fsdp as on one device, and the ranks divide their work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from modes import PROCESSES_2, on
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from unisono import Accelerator, current_world
from unisono.strategies import DDP, FSDP, Options, ZeRO1


class Orthogonal(torch.optim.Optimizer):
    """In the form of Keller Jordan's SingleDeviceMuonWithAuxAdam: matrices by Newton-Schulz, the rest by sign; counts
    its steps in a number, and notes what it has stepped on."""

    def __init__(self, parameters: Any, lr: float = 0.05) -> None:
        super().__init__(parameters, {"lr": lr})
        self.stepped: list[tuple[int, ...]] = []

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is None:
                    continue
                self.stepped.append(tuple(each.shape))
                state = self.state[each]
                state["count"] = state.get("count", 0) + 1
                mean = state.setdefault("mean", torch.zeros_like(each.grad))
                mean.lerp_(each.grad, 0.1)
                update = mean.sign()
                if each.ndim == 2:
                    update = mean / (mean.norm() + 1e-7)
                    for _ in range(5):
                        update = 1.5 * update - 0.5 * update @ update.T @ update
                each.sub_(update, alpha=group["lr"] / state["count"])
        return loss


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(9, 7), nn.Tanh(), nn.Linear(7, 5, bias=False), nn.Tanh(), nn.Linear(5, 1))
        self.unused = nn.Parameter(torch.ones(4, 4))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layers(inputs)
        return found


SHARDED: list[Options] = [
    FSDP(per_parameter_optimizer=True, units=[nn.Linear], find_unused_parameters=True),
    ZeRO1(per_parameter_optimizer=True),
]


def begin(strategy: Any, make: Any = Orthogonal, virtual_ranks: int | None = 4) -> Any:
    accelerator = Accelerator(seed=0, strategy=strategy, virtual_ranks=virtual_ranks)
    model = Layers()
    rows = TensorDataset(torch.randn(24, 9), torch.randn(24, 1))
    optimizer = make(model.parameters())
    return (accelerator, *accelerator.prepare(model, optimizer, DataLoader(rows, 2)))


def train(accelerator: Any, model: Any, optimizer: Any, loader: Any) -> None:
    for inputs, targets in loader:
        accelerator.backward((model(inputs) - targets).square().mean())
        optimizer.step()
        optimizer.zero_grad()


def test_a_step_has_the_bits_of_one_device() -> None:
    def body() -> dict[str, str]:
        found = {}
        for strategy, make in ((SHARDED[0], Orthogonal), (SHARDED[0], torch.optim.Adafactor), (SHARDED[1], Orthogonal)):
            held = begin(strategy, make)
            for _ in range(2):
                train(*held)
            found[f"{strategy.name}, {make.__name__}"] = str(held[0].digest())
        return found

    assert on(1, body) == on(3, body)


def test_training_continues_on_other_rank_counts_and_from_other_strategies(tmp_path: Any) -> None:
    def first() -> None:
        held = begin(SHARDED[0])
        train(*held)
        held[0].save_state(tmp_path / "state")

    def then(strategy: Any, loads: bool = True) -> str:
        held = begin(strategy)
        if loads:
            held[0].load_state(tmp_path / "state")
        else:
            train(*held)
        train(*held)
        return str(held[0].digest())

    on(2, first)
    assert on(3, lambda: then(SHARDED[0])) == then("ddp") == then("ddp", loads=False)


def test_each_parameter_is_stepped_on_once_and_the_ranks_divide_the_work() -> None:
    def body() -> list[tuple[int, ...]]:
        held = begin(SHARDED[0])
        stepped = held[2].unwrapped.stepped if hasattr(held[2], "unwrapped") else held[2].stepped
        train(*held)
        return list(stepped)

    found = PROCESSES_2.run(body)
    assert sorted(found[0] + found[1]) == sorted([(7, 9), (7,), (5, 7), (1, 5), (1,)] * 3)
    assert (7, 9) in found[0]
    assert (5, 7) in found[1]


def test_replicas_of_all_parameters_share_the_work() -> None:
    def body(strategy: Any) -> list[Any]:
        held = begin(strategy, virtual_ranks=None)
        train(*held)
        state = held[0].state_dict(held[1])
        return [each.double() for each in state.values()] if current_world().rank == 0 else []

    parts = FSDP(replicas=2, per_parameter_optimizer=True, find_unused_parameters=True)
    one, other = on(4, lambda: [body(each) for each in (parts, DDP(find_unused_parameters=True))])
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_hooks_and_closures_of_the_script_see_divided_parameters() -> None:
    def body() -> list[str]:
        seen: list[str] = []
        accelerator, model, optimizer, loader = begin(SHARDED[0], virtual_ranks=None)

        def look(name: str) -> Callable[..., None]:
            return lambda *_: seen.append(f"{name} {len(optimizer.param_groups[0]['params'])}")

        optimizer.register_step_pre_hook(look("before"))
        optimizer.register_step_post_hook(look("after"))
        for inputs, targets in loader:

            def closure(inputs: Any = inputs, targets: Any = targets) -> Any:
                optimizer.zero_grad()
                look("closure")()
                loss = (model(inputs) - targets).square().mean()
                accelerator.backward(loss)
                return loss

            loss = optimizer.step(closure)
            assert loss.ndim == 0
            break
        return seen

    assert PROCESSES_2.run(body) == [["before 6", "closure 6", "after 6"]] * 2


class Failing(Orthogonal):
    def step(self, closure: Any = None) -> Any:
        if self.param_groups[0]["lr"] == 13:
            raise ArithmeticError("of the optimizer")
        return super().step(closure)


def test_a_step_that_fails_leaves_the_parameters_where_they_are() -> None:
    def body() -> list[bool]:
        accelerator, model, optimizer, loader = begin(SHARDED[0], Failing, virtual_ranks=None)
        before = [each.full_tensor().clone() for each in model.parameters()]
        is_as_before = []
        for inputs, targets in loader:
            accelerator.backward((model(inputs) - targets).square().mean())
            optimizer.param_groups[0]["lr"] = 0.1 if is_as_before else 13
            try:
                optimizer.step()
            except ArithmeticError:
                optimizer.zero_grad()
            held = optimizer.param_groups[0]["params"]
            assert list(map(id, held)) == list(map(id, model.parameters()))
            is_as_before.append(torch.equal(held[1].full_tensor(), before[1]))
        return is_as_before

    assert PROCESSES_2.run(body) == [[True, *[False] * 5]] * 2
