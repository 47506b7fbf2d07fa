"""A prepared model behaves as the module that was given."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from modes import PROCESSES_2, SOLO, THREADS_2, told
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader
from twin import (
    Plain,
    State,
    assert_all_are,
    assert_same_bits,
    compare,
    loader_of,
    mean_loss,
    model,
    seeded,
    sgd,
    whole,
)

from unisono import Accelerator, rank


class Scaled(nn.Module):
    """Has attributes and methods of its own, a buffer, and hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 2).double()
        self.register_buffer("offset", torch.zeros(1).double())
        self.scale = 1.0

    def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"outputs": self.linear(inputs) * self.scale + self.offset}

    def double_scale(self) -> float:
        self.scale *= 2
        return self.scale


@pytest.fixture
def prepared():
    return Accelerator().prepare(Scaled())


def test_names_states_and_attributes_are_the_modules(prepared):
    module = prepared.module
    assert [name for name, _ in prepared.named_parameters()] == ["linear.weight", "linear.bias"]
    assert [name for name, _ in prepared.named_buffers()] == ["offset"]
    assert list(prepared.state_dict()) == list(module.state_dict()) == ["offset", "linear.weight", "linear.bias"]
    assert list(prepared.parameters()) == list(module.parameters())
    assert prepared.get_submodule("linear") is module.linear is prepared.linear
    assert prepared.double_scale() == module.scale == prepared.scale == 2.0
    with pytest.raises(AttributeError, match="nothing"):
        _ = prepared.nothing
    prepared.load_state_dict({**module.state_dict(), "offset": torch.ones(1)})
    assert module.offset == 1


def test_what_is_set_on_it_reaches_the_module(prepared):
    prepared.scale = 3.0
    prepared.linear = nn.Linear(5, 2).double()
    prepared.offset = torch.ones(1).double()
    prepared.further = "note"
    module, inputs = prepared.module, torch.ones(1, 5).double()
    assert (module.scale, module.further) == (3.0, "note")
    assert list(prepared.state_dict()) == ["offset", "linear.weight", "linear.bias"]
    assert torch.equal(prepared(inputs)["outputs"], module.linear(inputs) * 3 + 1)


def test_train_and_eval_and_requires_grad_reach_every_part(prepared):
    prepared.eval()
    assert [each.training for each in (prepared, prepared.module, prepared.linear)] == [False] * 3
    assert prepared.train() is prepared
    assert prepared.module.linear.training
    prepared.requires_grad_(False)
    assert not any(each.requires_grad for each in prepared.module.parameters())
    stays = Accelerator().prepare(Scaled().eval())
    assert [stays.training, stays.module.training] == [False] * 2


def test_hooks_of_the_module_and_of_the_prepared_model_are_called(prepared):
    called = []
    prepared.module.register_forward_hook(lambda *_: called.append("module"))
    prepared.register_forward_hook(lambda *_: called.append("prepared"))
    prepared(torch.ones(1, 5).double())
    assert called == ["module", "prepared"]


def test_an_average_prepared_beside_the_model_matches_one_device():
    def lines(accelerator, loader):
        network = model()
        average = AveragedModel(network, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        network, average, optimizer, loader = accelerator.prepare(network, average, sgd(network.parameters()), loader)
        for batch in loader:
            optimizer.zero_grad()
            accelerator.backward(mean_loss(network, batch))
            optimizer.step()
            average.update_parameters(network)
            with torch.no_grad():
                average(batch[0])
        return whole(average)

    strategies = ("ddp", "zero1", "fsdp")
    ranks = PROCESSES_2.run(lambda: [lines(Accelerator(strategy=each), loader_of(23, 3)) for each in strategies])
    for states in zip(*ranks, strict=True):
        assert_all_are(states, lines(Plain(), loader_of(23, 6)))


@pytest.mark.parametrize("mode", [SOLO, THREADS_2], ids=str)
def test_an_average_of_a_prepared_model_is_plain_and_that_of_one_device(mode):
    def lines(accelerator, loader):
        network = model()
        network, optimizer, loader = accelerator.prepare(network, sgd(network.parameters()), loader)
        average = AveragedModel(network)
        for batch in loader:
            optimizer.zero_grad()
            accelerator.backward(mean_loss(network, batch))
            optimizer.step()
            average.update_parameters(network)
        assert type(average.module) is nn.Sequential
        return average.state_dict()

    compare(mode, lines)


def test_a_prepared_model_that_is_pickled_says_how_to_save_it():
    with pytest.raises(TypeError, match=r"save accelerator\.state_dict\(model\)"):
        torch.save(Accelerator().prepare(Scaled()), io.BytesIO())


def test_under_fsdp_a_whole_state_loads_and_a_stray_part_says_what_to_do():
    def body():
        network = Accelerator(strategy="fsdp").prepare(Scaled())
        state = {name: torch.full_like(each, place) for place, (name, each) in enumerate(Scaled().state_dict().items())}
        network.load_state_dict(state)
        torch.testing.assert_close(whole(network), state)
        network.module.scale = network.linear.bias * 0
        with pytest.raises(RuntimeError, match=r"make tensors from the inputs \(inputs\.new_zeros"):
            network(torch.ones(2, 5).double())

    PROCESSES_2.run(body)


def test_under_fsdp_a_copy_and_an_unmarked_method_say_what_to_do():
    def body() -> list[str]:
        make, inputs = Accelerator(strategy="fsdp").prepare, torch.ones(1, 5, dtype=torch.float64)
        return [told(lambda: copy.deepcopy(make(model())), TypeError), told(lambda: make(Coder()).encode(inputs))]

    for copied, called in PROCESSES_2.run(body):
        assert "a copy of the prepared Sequential was asked for" in copied
        assert "model, average = accelerator.prepare(model, average)" in copied
        assert "encode() was called on the Coder by itself, and strategy='fsdp' gathers parameters only " in called
        assert "say model.mark_forward_method('encode')" in called


class Coder(nn.Module):
    """Whose loop calls its two halves, as many autoencoders' do."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = model(), nn.Linear(2, 5).double()
        self.seen: list[torch.dtype] = []

    def encode(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.encoder(inputs))

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        decoded: torch.Tensor = self.decoder(codes)
        self.seen.append(decoded.dtype)
        return decoded

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.decode(self.encode(inputs))


def by_halves(accelerator: Any, loader: DataLoader[Any]) -> State:
    coder: Any = seeded(Coder())
    coder, optimizer, loader = accelerator.prepare(coder, sgd(coder.parameters()), loader)
    if isinstance(accelerator, Accelerator):
        coder.mark_forward_method("encode")
        coder.mark_forward_method(coder.decode)
    for inputs, *_ in loader:
        accelerator.backward(F.mse_loss(coder.decode(coder.encode(inputs)), inputs))
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        codes = coder.encode(torch.ones(1, 5, dtype=torch.float64))
        assert torch.equal(coder.decode(codes), coder(torch.ones(1, 5, dtype=torch.float64)))
    return whole(coder)


@pytest.mark.parametrize(
    ("mode", "strategy", "accumulate"),
    [(SOLO, "ddp", 1), (THREADS_2, "ddp", 2), *((PROCESSES_2, each, 2) for each in ("ddp", "zero1", "fsdp"))],
    ids=str,
)
def test_methods_that_are_marked_train_as_calls_of_the_model_do(mode, strategy, accumulate):
    def body() -> State:
        return by_halves(Accelerator(strategy=strategy, gradient_accumulation_steps=accumulate), loader_of(23, 3))

    expected = by_halves(Plain(), loader_of(23, 3 * accumulate * mode.ranks))
    assert_all_are(mode.run(body), expected)


def test_a_method_that_is_marked_runs_with_autocast_and_keeps_its_name():
    coder = Accelerator(mixed_precision="bf16").prepare(Coder().float())
    assert coder.decode(torch.ones(1, 2)).dtype == torch.float32
    coder.mark_forward_method("decode")
    assert coder.decode(codes=torch.ones(1, 2)).dtype == torch.float32
    assert coder.seen == [torch.float32, torch.bfloat16]
    assert coder.decode.__name__ == "decode"


@pytest.mark.parametrize("name", ["forward", "parameters", "seen", "nothing", len])
def test_what_is_no_method_of_the_module_is_not_marked(name):
    coder = Accelerator().prepare(Coder())
    with pytest.raises(ValueError, match=r"the Coder has no method '\w+' of its own; pass the name of one"):
        coder.mark_forward_method(name)


def test_unwrap_gives_the_module_and_leaves_others():
    accelerator, network = Accelerator(), Scaled()
    assert accelerator.unwrap_model(accelerator.prepare(network)) is network
    assert accelerator.unwrap_model(network) is network


def test_outputs_under_autocast_come_back_in_full_in_any_container():
    prepared = Accelerator(mixed_precision="bf16").prepare(Scaled().float())
    seen = []
    prepared.module.linear.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    assert prepared(torch.ones(1, 5))["outputs"].dtype is torch.float32
    assert seen == [torch.bfloat16]


@pytest.mark.parametrize("mode", [SOLO, THREADS_2], ids=str)
def test_its_parts_are_those_of_a_container_and_train_with_it(mode):
    def body() -> torch.Tensor:
        accelerator = Accelerator()
        layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        network, optimizer = accelerator.prepare(layers, torch.optim.SGD(layers.parameters(), lr=0.1))
        assert network[0] is layers[0]
        assert list(network) == list(layers)
        assert len(network[:1]) == 1
        assert len(network) == 2
        network[1](network[0](torch.ones(1, 2) + rank())).sum().backward()
        optimizer.step()
        return layers[0].weight.detach().clone()

    assert_same_bits(mode.run(body))
    accelerator = Accelerator()
    assert accelerator.prepare(nn.ModuleDict({"a": nn.Linear(1, 1)}))["a"].in_features == 1
    linear = accelerator.prepare(nn.Linear(1, 1))
    assert linear  # whose module has no length
    with pytest.raises(TypeError, match="'Linear' object is not subscriptable"):
        linear[0]
    with pytest.raises(TypeError, match=r"'Linear' has no len\(\)"):
        len(linear)


def test_a_prepared_model_that_cannot_be_moved_says_where_it_is():
    prepared = Accelerator(cpu=True).prepare(nn.Linear(1, 1))
    assert prepared.to("cpu") is prepared
    absent = "cuda" if not torch.cuda.is_available() else "mps"
    with pytest.raises((RuntimeError, AssertionError)) as raised:
        prepared.to(absent)
    (note,) = raised.value.__notes__
    assert "the prepared Linear is on cpu, where prepare() has put it" in note
    assert "leave .cuda() and .to() out, or use accelerator.device" in note
    assert prepared.half().weight.dtype == torch.float16
