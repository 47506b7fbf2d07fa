"""Models that change while they train: layers frozen and unfrozen, heads put in; buffers; losses that are sums."""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict
from collections.abc import Callable
from threading import Lock
from typing import Any

import pytest
import torch
from modes import FAMILY, PROCESSES_2, SOLO, THREADS_2, THREADS_3, Mode, told
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from twin import Plain, State, assert_all_are, assert_same_bits, loader_of, seeded, sgd, straight, train, whole

from unisono import Accelerator, all_gather_object, rank
from unisono.errors import CollectiveMismatchError
from unisono.strategies import DDP

ALL = [
    (SOLO, "ddp"),
    (THREADS_2, "ddp"),
    (THREADS_3, "ddp"),
    *((PROCESSES_2, each) for each in ("ddp", "zero1", "fsdp")),
]
EVERYWHERE = pytest.mark.parametrize(("mode", "strategy"), ALL, ids=[f"{mode}-{name}" for mode, name in ALL])
pytestmark = pytest.mark.skipif(FAMILY != "cpu", reason="these are of processes whose tensors torch's groups take")


def with_another_head(accelerator: Any, loader: DataLoader[Any]) -> State:
    """A new head on each rank, with values of its own."""
    network = nn.Sequential(seeded(nn.Linear(5, 4).double()), nn.Tanh(), seeded(nn.Linear(4, 2).double(), 1))
    rank = getattr(accelerator, "process_index", 0)
    network, optimizer, loader = accelerator.prepare(network, sgd(network.parameters()), loader)
    for epoch in range(2):
        if epoch:
            head = seeded(nn.Linear(4, 2).double(), 2 + rank)
            getattr(network, "module", network)[2] = head
            optimizer.add_param_group({"params": list(head.parameters())})
        for inputs, targets, _ in loader:
            accelerator.backward(F.mse_loss(network(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
    return whole(network)


@EVERYWHERE
def test_several_ranks_refuse_parameters_that_are_put_in(mode: Mode, strategy: str) -> None:
    if mode is SOLO:
        (state,) = mode.run(lambda: with_another_head(Accelerator(), loader_of(23, 3)))
        assert_all_are([state], with_another_head(Plain(), loader_of(23, 3)))
        return
    body = lambda: with_another_head(Accelerator(strategy=strategy), loader_of(23, 3))  # noqa: E731
    for said in mode.told(body, RuntimeError):
        assert "parameters of shapes [2, 4], [2] were put into the Sequential" in said
        assert "add them before" in said


@pytest.mark.parametrize("mode", [THREADS_3, PROCESSES_2], ids=str)
def test_a_layer_that_one_rank_alone_freezes_is_named(mode: Mode) -> None:
    def freeze(accelerator: Any, network: Any, batch: Any) -> None:
        straight(accelerator, network, batch)
        if accelerator.process_index == 1:
            next(network.parameters()).requires_grad_(False)

    with pytest.raises(Exception, match=r"rank 1 .*new buckets for 3 trained parameters of the Sequential"):
        mode.run(lambda: train(Accelerator(), loader_of(24, 2), freeze))


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()


@EVERYWHERE
def test_running_statistics_are_rank_zeros_on_all_ranks(mode: Mode, strategy: str) -> None:
    states = mode.run(lambda: train(Accelerator(strategy=strategy), loader_of(24, 2), straight, normalised()))
    assert states[0]["1.num_batches_tracked"] == 12 / mode.ranks
    assert states[0]["1.running_mean"].abs().sum() > 0
    assert_same_bits(states)


@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_one_rank_alone_may_evaluate_before_any_step(strategy: str) -> None:
    numbers = [0]

    def evaluate_first(accelerator: Any, network: Any, batch: Any) -> None:
        if accelerator.is_main_process:
            numbers[0] += 1
            with torch.set_grad_enabled(numbers[0] % 2 == 1):
                network.eval()(batch[0])
            network.train()
        straight(accelerator, network, batch)

    body = lambda: train(Accelerator(strategy=strategy), loader_of(24, 2), evaluate_first, normalised())  # noqa: E731
    assert_same_bits(PROCESSES_2.run(body))


@EVERYWHERE
def test_rows_that_a_forward_pass_shortens_are_refused_on_several_ranks(mode: Mode, strategy: str) -> None:
    def body() -> str:
        accelerator = Accelerator(strategy=strategy)
        accelerator.prepare(nn.Sequential(nn.Embedding(9, 2, max_norm=1.0).requires_grad_(False), nn.Linear(2, 2)))
        return told(lambda: accelerator.prepare(nn.Sequential(nn.Embedding(9, 2, max_norm=0.5))), ValueError)

    for said in mode.run(body):
        assert ("has max_norm=0.5, so a forward pass shortens the rows" in said) == (mode.ranks > 1)
        assert ("weight.mul_((0.5 / weight.norm(2, 1, True)).clamp(max=1))" in said) == (mode.ranks > 1)


@EVERYWHERE
def test_torchs_sync_batch_norm_is_refused_where_it_does_not_work(mode: Mode, strategy: str) -> None:
    """On threads it would take the rank's own samples, silently; in processes torch's error does not say what to do."""

    def body() -> tuple[str, int]:
        convert = nn.SyncBatchNorm.convert_sync_batchnorm
        plain = nn.Sequential(nn.Linear(5, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
        Accelerator(strategy=strategy).prepare(convert(copy.deepcopy(plain)).requires_grad_(False).eval())
        said = told(lambda: Accelerator(strategy=strategy).prepare(convert(copy.deepcopy(plain))), ValueError)
        advised = Accelerator(strategy=strategy, sync_batchnorm=True).prepare(plain)
        return said, len(advised(torch.randn(3, 5)))

    for said, rows in mode.run(body):
        assert ("'1' is a torch.nn.SyncBatchNorm, which needs processes with GPUs; use BatchNorm" in said) == (
            mode.ranks > 1
        )
        assert rows == 3


SCRIPTING = Lock()  # torch.jit is not for several threads


def script(model: nn.Module) -> Any:
    with SCRIPTING:
        return torch.jit.script(model)


@pytest.mark.parametrize("mode", [SOLO, THREADS_2], ids=str)
def test_a_scripted_model_is_refused_and_scripted_when_trained(mode: Mode) -> None:
    def body() -> tuple[list[str], bool]:
        plain = nn.Sequential(nn.Linear(5, 2), nn.Tanh())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch deprecates it
            scripted = script(plain)
            parts = scripted, nn.Sequential(scripted, nn.Linear(2, 1))
            said = [told(lambda each=each: Accelerator().prepare(each), TypeError) for each in parts]
            accelerator = Accelerator()
            model = accelerator.prepare(plain)
            inputs = torch.ones(1, 5)
            exported = script(accelerator.unwrap_model(model))
        return said, torch.allclose(exported(inputs), model(inputs), atol=1e-3)  # scripted, tanh is rounded otherwise

    for (whole_one, part), is_equal in mode.run(body):
        assert "cannot be prepared: it is a ScriptModule" in whole_one
        assert "its part '0' is a ScriptModule" in part
        assert is_equal


# What is made on a rank from a number of its own, and how the error names the first difference.
STRUCTURES: list[tuple[Callable[[int], nn.Module], str]] = [
    (lambda size: nn.Embedding(size, 2), "the parameter 'weight' of the Embedding is float32[3, 2] on rank 0 and"),
    (lambda size: nn.Sequential(*map(nn.Linear, [2] * size, [2] * size)), "'3.weight' of the Sequential is missing on"),
    (lambda size: nn.Sequential(OrderedDict({f"a{size}": nn.Linear(2, 2)})), "and the parameter 'a4.weight', float32"),
    (lambda size: nn.Linear(2, 2, dtype=torch.float64 if size == 4 else None), "and float64[2, 2] on rank 1"),
    (lambda size: nn.Linear(2, 2).requires_grad_(size == 4), "is float32[2, 2], frozen on rank 0 and float32[2, 2] on"),
    (lambda size: nn.BatchNorm1d(size, affine=False), "the buffer 'running_mean' of the BatchNorm1d is float32[3]"),
]


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp"])
def test_models_of_another_structure_on_a_rank_are_refused_by_name(strategy: str) -> None:
    def body() -> list[str]:
        accelerator, size = Accelerator(strategy=strategy), 3 + rank()
        models = [make(size) for make, _ in STRUCTURES]
        said = [told(lambda each=each: accelerator.prepare(each), CollectiveMismatchError) for each in models]
        advised = all_gather_object(size)[0]
        accelerator.prepare(nn.Sequential(nn.Embedding(advised, 2)))
        return said

    for said in PROCESSES_2.run(lambda: body()):
        for words, (_, expected) in zip(said, STRUCTURES, strict=True):
            assert "the ranks' models differ: " in words
            assert expected in words


@pytest.mark.parametrize("mode", [SOLO, THREADS_2], ids=str)
def test_a_lazy_layer_is_refused_until_it_has_seen_a_batch(mode: Mode) -> None:
    def body() -> str:
        model = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())
        said = told(lambda: Accelerator().prepare(model), ValueError)
        model(torch.ones(2, 5))
        Accelerator().prepare(model)
        return said

    for said in mode.run(body):
        assert "'0.weight' of a lazy layer has no shape before a first forward pass" in said


def converted(accelerator: Any, loader: DataLoader[Any]) -> State:
    """In an epoch of its own, as where a run ends in higher precision."""
    network = seeded(nn.Linear(5, 2).double()).float()
    network, optimizer, loader = accelerator.prepare(network, sgd(network.parameters()), loader)
    for epoch in range(2):
        if epoch:
            network.double()
        for inputs, targets, _ in loader:
            kind = network.weight.dtype
            accelerator.backward(F.mse_loss(network(inputs.to(kind)), targets.to(kind)))
            optimizer.step()
            optimizer.zero_grad()
    return {name: each.float() for name, each in network.state_dict().items()}


@pytest.mark.parametrize("mode", [THREADS_2, PROCESSES_2], ids=str)
@pytest.mark.parametrize("strategy", [DDP(), DDP(find_unused_parameters=True)], ids=["all used", "some unused"])
def test_a_model_is_converted_to_another_precision_while_it_trains(mode: Mode, strategy: DDP) -> None:
    plain = converted(Plain(), loader_of(24, mode.ranks * 3))
    for state in mode.run(lambda: converted(Accelerator(strategy=strategy), loader_of(24, 3))):
        torch.testing.assert_close(state, plain, rtol=1e-5, atol=1e-6)
