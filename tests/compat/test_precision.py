"""Full and reduced precision of tensors, modules, optimizers and structures of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from modes import PROCESSES_2, devices
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils.rnn import pack_padded_sequence

from unisono.compat.precision import is_reduced_precision, to_full_precision, to_reduced_precision
from unisono.tree import leaves

REDUCED = (torch.bfloat16, torch.float16)


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass
class Record:
    value: Any


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2))


def train(network: nn.Module, optimizer: torch.optim.Optimizer, dtype: torch.dtype, steps: int = 1) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        optimizer.zero_grad()
        batch = torch.randn(8, 1, 4, 4, generator=generator).to(dtype)

        def closure(batch: torch.Tensor = batch) -> torch.Tensor:
            optimizer.zero_grad()
            loss = network(batch).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)


# Tensors.


@pytest.mark.parametrize("dtype", REDUCED)
@given(values=st.lists(st.floats(width=32, allow_nan=False), max_size=20))
def test_there_and_back_is_one_rounding(dtype, values):
    x = torch.tensor(values, dtype=torch.float32)
    reduced = to_reduced_precision(x, dtype=dtype)
    assert reduced.dtype is dtype
    assert is_reduced_precision(reduced)
    back = to_full_precision(reduced)
    assert not is_reduced_precision(back)
    assert torch.equal(back, x.to(dtype).float())
    assert torch.equal(to_full_precision(to_reduced_precision(back, dtype=dtype)), back)


def test_gradients_flow_back_in_the_precision_of_the_other_side():
    x = torch.ones(3, requires_grad=True)
    reduced = to_reduced_precision(x)
    reduced.retain_grad()
    (reduced * 3).sum().backward()
    assert (x.grad.dtype, reduced.grad.dtype) == (torch.float32, torch.bfloat16)
    assert x.grad.tolist() == [3, 3, 3]
    y = torch.ones(2, dtype=torch.float16, requires_grad=True)
    to_full_precision(y).sum().backward()
    assert y.grad.dtype is torch.float16


MISTAKES = [
    (to_reduced_precision, torch.ones(2).bfloat16(), r"^x is bfloat16: it is in reduced precision already"),
    (to_reduced_precision, torch.ones(2).half(), r"^x is float16: it is in reduced precision already"),
    (to_full_precision, torch.ones(2), r"^x is float32: it is in full precision already"),
    *(
        (convert, torch.ones(2, dtype=dtype), r"^x is \w+, and precision applies to float32, bfloat16 and float16")
        for dtype in (torch.float64, torch.int64, torch.bool, torch.complex64)
        for convert in (to_reduced_precision, to_full_precision)
    ),
]


@pytest.mark.parametrize(("convert", "x", "words"), MISTAKES)
def test_what_is_converted_already_or_of_another_type_is_an_error(convert, x, words):
    with pytest.raises(ValueError, match=words):
        convert(x)


def test_what_has_no_precision_is_refused():
    for convert in (to_reduced_precision, to_full_precision, is_reduced_precision):
        with pytest.raises(TypeError, match=r"^x='text' is of type str; pass a tensor, module, optimizer, or a struc"):
            convert("text")
    with pytest.raises(ValueError, match=r"^dtype=torch.float32 is not a reduced precision; choose torch.bfloat16 or"):
        to_reduced_precision(torch.ones(1), dtype=torch.float32)
    assert not is_reduced_precision([torch.ones(2, dtype=torch.int64), nn.BatchNorm1d(3)])


# Structures.


@pytest.mark.parametrize("form", [list, lambda items: {"a": items, "b": None}, lambda items: Pair("x", Record(items))])
def test_a_structure_keeps_its_form_and_converts_its_float32_tensors_only(form):
    kinds = [torch.float32, torch.int64, torch.float64]
    tree = form([torch.ones(2, dtype=kind) for kind in kinds])
    reduced = to_reduced_precision(tree)
    assert type(reduced) is type(tree)
    found = [leaf.dtype for leaf in leaves(reduced) if isinstance(leaf, torch.Tensor)]
    assert found == [torch.bfloat16, *kinds[1:]]
    assert is_reduced_precision(reduced)
    assert [leaf.dtype for leaf in leaves(to_full_precision(reduced)) if isinstance(leaf, torch.Tensor)] == kinds


def test_a_shared_tensor_stays_shared_and_a_packed_sequence_converts():
    x = torch.ones(2)
    packed = pack_padded_sequence(torch.ones(3, 2, 1), torch.tensor([3, 1]))
    reduced = to_reduced_precision({"a": x, "b": [x], "c": packed})
    assert reduced["a"] is reduced["b"][0]
    assert reduced["c"].data.dtype is torch.bfloat16
    assert reduced["c"].batch_sizes.dtype is torch.int64
    assert is_reduced_precision(reduced["c"])


def test_an_error_says_where_and_leaves_all_as_it_was():
    network = nn.Linear(2, 2)
    mixed = {"net": network, "rest": [torch.ones(1), Pair(torch.ones(1), torch.ones(1).bfloat16())]}
    with pytest.raises(ValueError, match=r"^a tensor of shape \(1,\) is bfloat16: it is in reduced precision already"):
        to_reduced_precision(mixed)
    assert network.weight.dtype is torch.float32
    with pytest.raises(ValueError, match=r"precision: a tensor of shape \(1,\) is bfloat16, but weight is float32"):
        is_reduced_precision(mixed)
    network = model()
    network[4].bfloat16()
    with pytest.raises(ValueError, match=r"^0\.weight is float32: it is in full precision already"):
        to_full_precision(network)


# Modules.


@pytest.mark.parametrize(("dtype", "is_training"), [*zip(REDUCED, (True, False), strict=True)])
def test_batch_norm_stays_full_and_takes_reduced_inputs(dtype, is_training):
    network, twin = model().train(is_training), model().train(is_training)
    assert to_reduced_precision(network, dtype=dtype) is network
    assert is_reduced_precision(network)
    assert {each.dtype for each in [network[0].weight, network[4].bias]} == {dtype}
    assert {each.dtype for each in network[1].state_dict().values()} == {torch.float32, torch.int64}
    x = torch.randn(8, 1, 4, 4).to(dtype).requires_grad_()
    y = network(x)
    y.float().sum().backward()
    assert (y.dtype, x.grad.dtype, network[0].weight.grad.dtype) == (dtype, dtype, dtype)
    assert network[1].weight.grad.dtype is torch.float32
    twin(x.detach().float())
    assert torch.allclose(network[1].running_mean, twin[1].running_mean, atol=1e-3)


def test_sharded_parameters_convert_with_their_shards():
    def body() -> torch.dtype:
        network = nn.Linear(4, 4)
        fully_shard(network, mesh=init_device_mesh("cpu", (2,)))
        return to_reduced_precision(network)(torch.ones(2, 4, dtype=torch.bfloat16)).dtype

    assert PROCESSES_2.run(body) == [torch.bfloat16] * 2


def test_a_module_keeps_its_parameters_ties_gradients_and_other_types():
    network = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3), "d": nn.Linear(3, 3).double()})
    network["b"].weight = network["a"].weight
    network["a"].register_buffer("mask", torch.ones(3, dtype=torch.bool))
    network["a"].register_buffer("scale", torch.ones(3))
    before = dict(network.named_parameters())
    network["a"].weight.grad = torch.ones(3, 3)
    to_reduced_precision(network)
    assert {name: id(each) for name, each in network.named_parameters()} == {n: id(p) for n, p in before.items()}
    assert network["b"].weight is network["a"].weight
    assert network["a"].weight.dtype is network["a"].weight.grad.dtype is network["a"].scale.dtype is torch.bfloat16
    assert (network["a"].mask.dtype, network["d"].weight.dtype) == (torch.bool, torch.float64)
    to_full_precision(network)
    assert network["a"].weight.dtype is network["a"].weight.grad.dtype is network["a"].scale.dtype is torch.float32


# Optimizers.

OPTIMIZERS = ["Adam", "AdamW", "NAdam", "RAdam", "Adagrad", "Adadelta", "ASGD", "RMSprop", "Rprop", "Adamax"]


@pytest.mark.parametrize("name", ["SGD", *OPTIMIZERS, "Adafactor", "LBFGS"])
def test_an_optimizer_follows_its_modules_precision_there_and_back(name):
    lr = 0.01 if name == "SGD" else torch.tensor(0.01)
    options: dict[str, Any] = {"SGD": {"momentum": 0.9}, "LBFGS": {"max_iter": 2}}
    network = model()
    if name == "LBFGS":  # its one vector for all parameters has one precision
        network[1] = nn.Identity()
    optimizer = getattr(torch.optim, name)(network.parameters(), lr=lr, **options.get(name, {}))
    train(network, optimizer, torch.float32, steps=2)
    assert to_reduced_precision([optimizer, network])[0] is optimizer
    train(network, optimizer, torch.bfloat16)
    assert is_reduced_precision(network)
    to_full_precision((network, optimizer))
    train(network, optimizer, torch.float32)
    assert not is_reduced_precision((network, optimizer))
    assert optimizer.param_groups[0]["lr"] is lr


def test_state_tensors_convert_with_their_parameters_and_steps_do_not():
    network = model()
    optimizer = torch.optim.Adam(network.parameters(), amsgrad=True)
    train(network, optimizer, torch.float32, steps=2)
    assert to_reduced_precision(optimizer) is optimizer  # it does not leave the precision of its parameters
    train(network, optimizer, torch.float32)
    to_reduced_precision(network)
    assert not is_reduced_precision(optimizer)
    to_reduced_precision(optimizer)
    assert is_reduced_precision(optimizer)
    for parameter, state in optimizer.state.items():
        step = state.pop("step")
        assert (step.dtype, step.item()) == (torch.float32, 3)
        assert {each.dtype for each in state.values()} == {parameter.dtype}
    assert optimizer.state[network[1].weight]["exp_avg"].dtype is torch.float32


@pytest.mark.any_family
def test_a_module_on_a_device_computes_in_reduced_precision_and_returns():
    device = devices(1)[0]
    network = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(device)
    inputs = torch.linspace(-1, 1, 15, device=device).view(5, 3)
    full = network(inputs).detach().cpu()
    network = to_reduced_precision(network)
    reduced = network(to_reduced_precision(inputs))
    reduced.sum().backward()
    assert (reduced.dtype, network[0].weight.grad.dtype) == (torch.bfloat16,) * 2
    torch.testing.assert_close(reduced.detach().cpu().float(), full, rtol=0.05, atol=0.02)
    network = to_full_precision(network)
    torch.testing.assert_close(network(inputs).detach().cpu(), full, rtol=0.05, atol=0.02)
