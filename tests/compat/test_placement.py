"""Copies on another device, and barriers. Type "meta" stands for a device where moved parameters are new objects."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from modes import devices, in_main_memory
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from unisono.compat.placement import compiled, copy_to, lazy_barrier, scalar_like
from unisono.devices import get_backend
from unisono.devices.device import Device
from unisono.tree import leaves
from unisono.world import solo_world, use_world

DEVICES = ["cpu", "meta"]
OPTIMIZERS = ["SGD", "Adam", "NAdam", "RAdam", "Adagrad", "ASGD", "RMSprop", "Rprop", "Adafactor", "LBFGS"]


def memory(obj: Any) -> set[int]:
    """The memory of every tensor in a structure, its gradients and its optimizers' state."""
    found: set[int] = set()
    for leaf in leaves(obj):
        parts = [leaf]
        if isinstance(leaf, nn.Module):
            parts = [*leaf.parameters(), *leaf.buffers()]
        elif isinstance(leaf, torch.optim.Optimizer):
            parts = [*leaves([leaf.param_groups, leaf.state])]
        parts += [each.grad for each in parts if isinstance(each, torch.Tensor) and each.grad is not None]
        found |= {each.untyped_storage()._cdata for each in parts if isinstance(each, torch.Tensor)}
    return found


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1) -> list[float]:
    generator, losses = torch.Generator().manual_seed(2), []
    for _ in range(steps):
        x = torch.randn(6, 3, generator=generator)

        def closure(x: torch.Tensor = x) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        losses.append(optimizer.step(closure).item())
    return losses


# Tensors.


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("requires_grad", [True, False])
def test_a_copy_lies_there_and_keeps_its_gradient_and_attributes(device, requires_grad):
    x = torch.arange(3.0, requires_grad=requires_grad)
    x.is_bias = True
    if requires_grad:
        x.grad = torch.ones(3)
    twin = copy_to(x, device)
    assert (twin.device.type, twin.requires_grad, twin.is_leaf, twin.is_bias) == (device, requires_grad, True, True)
    assert not memory(x) & memory(twin)
    if requires_grad:
        assert twin.grad.device.type == device
    if device == "cpu":
        assert torch.equal(x, twin)
        with torch.no_grad():
            twin += 1
        assert x.tolist() == [0, 1, 2]


def test_a_result_of_others_stays_in_their_graph():
    x = torch.ones(2, requires_grad=True)
    (copy_to([x * 2], "cpu")[0] * 3).sum().backward()
    assert x.grad.tolist() == [6, 6]


@pytest.mark.parametrize(
    "x",
    [
        torch.ones(2, 3).t(),
        torch.ones(1, 3).expand(4, 3),
        torch.eye(2).to_sparse(),
        torch.ones(2, dtype=torch.complex64).conj(),
        torch.empty(0),
        torch.ones(()),
    ],
)
def test_tensors_of_every_form_are_copied(x):
    twin = copy_to(x, "cpu")
    assert (twin.shape, twin.dtype, twin.layout) == (x.shape, x.dtype, x.layout)
    assert torch.equal(twin.to_dense(), x.to_dense())
    if x.layout is torch.strided:
        assert x.numel() == 0 or not memory(twin) & memory(x)


def test_a_packed_sequence_keeps_its_sizes_in_main_memory():
    packed = pack_padded_sequence(torch.ones(3, 2, 1), torch.tensor([1, 3]), enforce_sorted=False)
    twin = copy_to({"x": packed}, "meta")["x"]
    assert (twin.data.device.type, twin.sorted_indices.device.type, twin.batch_sizes.device.type) == (
        "meta",
        "meta",
        "cpu",
    )
    assert nn.LSTM(1, 2).to("meta")(twin)[0].data.shape == (4, 2)


# Modules.


@pytest.mark.parametrize("device", DEVICES)
def test_a_module_is_copied_whole_and_its_ties_are_kept(device):
    model = network()
    model[2].weight = nn.Parameter(torch.ones(4, 4))
    model.append(nn.Linear(4, 4))
    model[3].weight = model[2].weight
    model[0].weight.requires_grad_(False)
    model[2].bias.no_decay = True
    model.table = [torch.ones(2), {"alias": model[2].weight}]
    model.inner = SimpleNamespace(scale=torch.ones(1))
    twin = copy_to(model, device)
    found = [*twin.parameters(), *twin.buffers(), *leaves(twin.table), twin.inner.scale]
    assert {each.device.type for each in found} == {device}
    assert twin[3].weight is twin[2].weight is twin.table[1]["alias"]
    assert isinstance(twin[2].weight, nn.Parameter)
    assert not twin[0].weight.requires_grad
    assert twin[2].bias.no_decay
    assert not memory([model, model.table, model.inner.scale]) & memory([twin, twin.table, twin.inner.scale])
    assert model[0].weight.device.type == "cpu"
    if device == "cpu":
        assert all(map(torch.equal, model.state_dict().values(), twin.state_dict().values()))


# Optimizers.


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_copied_run_goes_on_as_the_original_does_without_touching_it(name):
    model = network()
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.05)
    train(model, optimizer, 3)
    twins = copy_to({"optimizer": optimizer, "model": model}, "cpu")
    assert not memory([model, optimizer]) & memory(twins)
    before = copy.deepcopy(model.state_dict())
    ahead = train(twins["model"], twins["optimizer"], 3)
    assert all(map(torch.equal, before.values(), model.state_dict().values()))
    assert train(model, optimizer, 3) == ahead


@pytest.mark.parametrize("capturable", [False, True])
def test_state_moves_and_step_counts_stay_where_torch_wants_them(capturable):
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1))
    train(model, optimizer)
    optimizer.param_groups[0]["capturable"] = capturable
    twin_model, twin = copy_to((model, optimizer), "meta")
    assert [id(each) for each in twin.param_groups[0]["params"]] == [id(each) for each in twin_model.parameters()]
    assert twin.state.keys() == set(twin_model.parameters())
    numbers = "meta" if capturable else "cpu"
    assert twin.param_groups[0]["lr"].device.type == numbers
    for state in twin.state.values():
        assert {key: each.device.type for key, each in state.items()} == {
            "step": numbers,
            "exp_avg": "meta",
            "exp_avg_sq": "meta",
        }
    assert {each.device.type for state in optimizer.state.values() for each in state.values()} == {"cpu"}


@pytest.mark.any_family
def test_a_run_copied_to_a_device_and_back_continues_alike():
    model = nn.Linear(3, 2)
    runs = [(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))]
    for device in (devices(1)[0], devices(1)[0], "cpu"):
        runs.append(copy_to(runs[-1], device))
        for network, optimizer in runs:
            optimizer.zero_grad()
            network(torch.ones(5, 3, device=network.weight.device)).square().mean().backward()
            optimizer.step()
    states = [in_main_memory(network.state_dict()) for network, _ in runs]
    assert {each.device.type for each in runs[-1][0].parameters()} == {"cpu"}
    torch.testing.assert_close(states[1:], [states[0]] * 3)


def test_an_optimizer_needs_its_parameters():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"steps parameters that are not in the structure.*copy_to\(\(model"):
        copy_to([optimizer, model[0]], "cpu")
    parameters, twin = copy_to((list(model.parameters()), optimizer), "cpu")
    assert twin.param_groups[0]["params"][0] is parameters[0]


def test_a_copied_optimizer_keeps_its_module_and_scheduler_but_no_hooks():
    model, seen = network(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer.register_step_pre_hook(lambda *_: seen.append("stepped"))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    train(model, optimizer)
    scheduler.step()
    before = copy.deepcopy(model.state_dict())
    twin = copy_to(SimpleNamespace(model=model, optimizer=optimizer, scheduler=scheduler), "cpu")
    assert twin.optimizer.param_groups[0]["params"][0] is twin.model[0].weight
    train(twin.model, twin.optimizer)
    twin.scheduler.step()
    assert seen == ["stepped"]
    assert (twin.optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["lr"]) == (0.25, 0.5)
    assert all(map(torch.equal, before.values(), model.state_dict().values()))
    assert not torch.equal(twin.model[0].weight, model[0].weight)
    twin.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    assert len(optimizer.param_groups) == 1


# Where to.


def test_what_is_no_device_here_is_refused_by_a_copy_and_by_a_barrier():
    for call in (lambda: copy_to(torch.ones(1), "mps:7"), lambda: lazy_barrier(["mps:7"])):
        with pytest.raises(ValueError, match="cpu:0"):
            call()


def test_a_scalar_takes_device_and_precision_of_a_tensor():
    scalar = scalar_like(0.1, torch.ones(2, dtype=torch.bfloat16, device="meta"))
    assert (scalar.shape, scalar.dtype, scalar.device.type) == ((), torch.bfloat16, "meta")
    assert scalar_like(3, torch.ones(2, dtype=torch.int32)).item() == 3


# Barriers.


def test_a_barrier_ends_the_step_on_all_devices_before_it_waits(monkeypatch):
    calls: list[str] = []
    for name in ("mark_step", "synchronize"):
        monkeypatch.setattr(get_backend("cpu"), name, lambda device, name=name: calls.append(f"{name} {device}"))
    with use_world(solo_world(get_backend("cpu"), torch.device("cpu", 2))):
        lazy_barrier(wait=True)
    lazy_barrier(["cpu:0", Device("cpu", 1)], wait=True)
    assert calls[:2] == ["mark_step cpu:2", "synchronize cpu:2"]
    assert calls[2:] == ["mark_step cpu:0", "mark_step cpu:1", "synchronize cpu:0", "synchronize cpu:1"]


def test_a_compiled_function_is_the_function_on_eager_devices():
    def double(x, by=2):
        return x * by

    assert compiled(double)(torch.ones(2), by=3).tolist() == [3.0, 3.0]
    assert compiled(double).__name__ == "double"
