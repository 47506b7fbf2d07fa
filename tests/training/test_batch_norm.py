"""Batch normalisation over all ranks, against one torch layer that sees the whole global batch in float64."""

from __future__ import annotations

import copy
import inspect
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from modes import FAMILY, HOST, PROCESSES_2, SOLO, THREADS_2, THREADS_4, Mode, each_of, fitting, scaling
from torch import nn
from torch.optim.swa_utils import AveragedModel, update_bn
from torch.utils.data import DataLoader, TensorDataset
from twin import compare, data, mean_loss, seeded, sgd, steps, whole

from unisono import Accelerator, current_world
from unisono.training.batch_norm import SyncBatchNorm2d, synchronize_batch_norm
from unisono.world import solo_world

TIGHT = {"rtol": 1e-10, "atol": 1e-10}


@pytest.fixture(params=scaling(SOLO, THREADS_4, PROCESSES_2), ids=str)
def mode(request: pytest.FixtureRequest) -> Mode:
    if FAMILY == "xla" and request.param.ranks == 1:
        pytest.skip("torch_xla's own BatchNorm divides the running variance by all values, and torch's by one less")
    return request.param


peers = each_of(fitting(THREADS_2, PROCESSES_2))


def samples(shape: tuple[int, ...], number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs, far from a mean of zero and a variance of one, and what the loss weighs the outputs with."""
    generator = torch.Generator().manual_seed(number)
    inputs, targets = torch.randn(2, number, *shape, dtype=torch.float64, generator=generator, device=HOST)
    device = torch.get_default_device()
    return (inputs * 3 + 7).to(device), targets.to(device)


def layer(kind: type[nn.Module] = nn.BatchNorm2d, **options: Any) -> nn.Module:
    made = kind(3, dtype=torch.float64, **options)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(3, dtype=torch.float64, generator=generator, device=HOST))
    return made


@pytest.mark.any_family
def test_a_rank_without_weight_cannot_spoil_the_others():
    def body() -> torch.Tensor:
        rank = current_world().rank
        module = synchronize_batch_norm(layer(), current_world(), lambda: float(rank == 0))
        inputs = samples((3, 2, 4), 3)[0] if rank == 0 else torch.full((1, 3, 2, 4), torch.nan, dtype=torch.float64)
        own = inputs.requires_grad_()
        module(own).square().sum().backward()
        return torch.cat([own.grad.flatten(), module.running_var])

    for found in THREADS_2.run(body):
        assert found.isfinite().all()


def test_a_large_mean_costs_no_digits_of_the_variance():
    def body() -> torch.Tensor:
        module = synchronize_batch_norm(nn.BatchNorm1d(3, momentum=1.0), current_world(), lambda: 0.5)
        with torch.no_grad():
            module((samples((3,), 400)[0] + 1e4).float().chunk(2)[current_world().rank])
        return module.running_var

    rounded = (samples((3,), 400)[0] + 1e4).float().double()
    torch.testing.assert_close(THREADS_2.run(body)[1].double(), rounded.var(0), rtol=1e-6, atol=0)


@pytest.mark.any_family
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_narrower_types_come_back_as_they_were_and_statistics_stay_full(dtype):
    def body() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        module = synchronize_batch_norm(layer().float(), current_world(), lambda: 0.5)
        own = samples((3, 2, 4), 8)[0].chunk(2)[current_world().rank].to(dtype).requires_grad_()
        output = module(own)
        output.square().sum().backward()
        return output.detach(), own.grad, module.running_var

    outputs, gradients, variances = zip(*THREADS_2.run(body), strict=True)
    assert {each.dtype for each in (*outputs, *gradients)} == {dtype}
    assert variances[0].dtype == torch.float32
    expected = layer()(samples((3, 2, 4), 8)[0].to(dtype).double())
    torch.testing.assert_close(torch.cat(outputs).double(), expected, rtol=3e-2, atol=3e-2)


@pytest.mark.any_family
def test_evaluation_meets_nobody(peers):
    def body() -> torch.Tensor | None:
        module = synchronize_batch_norm(layer(), current_world(), lambda: 0.5).eval()
        return module(samples((3, 2, 4), 3)[0]).detach() if current_world().rank == 1 else None

    torch.testing.assert_close(peers.run(body)[1], layer().eval()(samples((3, 2, 4), 3)[0]), **TIGHT)


def test_the_conversion_keeps_the_layers_their_tensors_names_and_hooks():
    shared = nn.BatchNorm2d(3)
    module = nn.Sequential(shared, nn.Sequential(shared, nn.BatchNorm1d(4, momentum=None, eps=0.1)), nn.GroupNorm(1, 3))
    module[1][1].weight = nn.Parameter(torch.ones(4))
    module[1][1].eval()
    calls: list[str] = []
    shared.register_forward_hook(lambda *_: calls.append("hook"))
    before = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    layers, keys = list(module.modules()), list(module.state_dict())

    assert synchronize_batch_norm(module, solo_world(), lambda: 1.0) is module
    after = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    assert before.keys() == after.keys()
    assert all(after[name] is each for name, each in before.items())
    assert all(one is other for one, other in zip(layers, module.modules(), strict=True))
    assert list(module.state_dict()) == keys
    assert (module[1][1].momentum, module[1][1].eps, module[1][1].training) == (None, 0.1, False)
    assert isinstance(shared, SyncBatchNorm2d)
    assert type(module[2]) is nn.GroupNorm
    assert repr(shared).startswith("SyncBatchNorm2d(3, eps=1e-05")
    shared(torch.randn(2, 3, 2, 2))
    assert calls == ["hook"]


def test_a_converted_module_can_be_copied_and_pickled():
    def body() -> list[torch.Tensor]:
        module = synchronize_batch_norm(layer(), current_world(), lambda: 0.5)
        own = samples((3, 2, 4), 6)[0].chunk(2)[current_world().rank]
        copies = copy.deepcopy(module), pickle.loads(pickle.dumps(module))
        return [module(own).detach(), *(each(own).detach() for each in copies)]

    for together, *alone in THREADS_2.run(body):
        assert all(not torch.equal(together, each) for each in alone), "it belongs to no rank"


class Own(nn.BatchNorm2d):
    """Normalises in a way of its own, perhaps."""


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        (nn.LazyBatchNorm2d(), "'1' is a torch.nn.modules.batchnorm.LazyBatchNorm2d; use a plain one there"),
        (nn.SyncBatchNorm(3), "'1' is a torch.nn.modules.batchnorm.SyncBatchNorm; use a plain one there"),
        (Own(3), r"'1' is a .*\.Own; use a plain one there"),
    ],
)
def test_a_layer_that_cannot_be_converted_is_refused_and_none_is_touched(odd, words):
    module = nn.Sequential(nn.BatchNorm2d(3), odd)
    with pytest.raises(TypeError, match=words):
        synchronize_batch_norm(module, solo_world(), lambda: 1.0)
    assert type(module[0]) is nn.BatchNorm2d


@pytest.mark.parametrize("weights", [[1.0, 0.0], [0.0, 0.0]], ids=str)
def test_too_few_values_on_all_ranks_fail_everywhere_and_the_world_goes_on(peers, weights):
    def body() -> tuple[str, float]:
        world = current_world()
        module = synchronize_batch_norm(nn.BatchNorm1d(3), world, lambda: weights[world.rank])
        message = ""
        try:
            module(torch.randn(1, 3))
        except ValueError as error:
            message = str(error)
        return message, world.comm.all_reduce(torch.ones(1)).item()

    for rank, (message, total) in enumerate(peers.run(body)):
        number = int(sum(weights))
        assert message.startswith(f"Expected more than 1 value per channel when training, got {number} on all 2 ranks")
        assert f"input size [1, 3] on rank {rank}" in message
        assert total == 2


def test_a_gradient_with_a_graph_of_its_own_is_refused():
    def body() -> None:
        module = synchronize_batch_norm(layer(), current_world(), lambda: 0.5)
        own = samples((3, 2, 4), 3)[0].requires_grad_()
        with pytest.raises(NotImplementedError, match=r"create_graph=True.*use GroupNorm"):
            torch.autograd.grad(module(own).square().sum(), own, create_graph=True)

    THREADS_2.run(body)


@pytest.mark.parametrize("mode", [SOLO, THREADS_2], ids=str)
def test_update_bn_takes_all_samples_if_synchronized_or_on_a_plain_loader(mode: Mode) -> None:
    data = TensorDataset(torch.randn(22, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64))

    def averaged() -> AveragedModel:
        return AveragedModel(nn.BatchNorm1d(3).double())

    def body() -> list[torch.Tensor]:
        accelerator = Accelerator(sync_batchnorm=True)
        prepared, loader = accelerator.prepare(averaged(), DataLoader(data, 8 // mode.ranks))
        update_bn(loader, prepared)
        plain = averaged()
        update_bn(DataLoader(data, 8), plain)
        return [each.state_dict()["module.running_var"] for each in (prepared, plain)]

    expected = averaged()
    update_bn(DataLoader(data, 8), expected)
    for found in mode.run(body):
        for variance in found:
            torch.testing.assert_close(variance, expected.module.running_var)


def around(norm: nn.Module, *shape: int) -> nn.Module:
    """A model with this layer over values of three channels; past it, too."""
    width = math.prod(shape)
    made = nn.Sequential(
        nn.Linear(5, width, bias=False), nn.Unflatten(1, shape), norm, nn.Tanh(), nn.Flatten(), nn.Linear(width, 2)
    )
    made[3].register_forward_hook(lambda module, args, output: output + args[0])
    return seeded(made.double())


def normalised() -> nn.Module:
    return around(nn.BatchNorm1d(7), 7)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "1d": normalised,
    "2d": lambda: around(nn.BatchNorm2d(3), 3, 2, 2),
    "3d": lambda: around(nn.BatchNorm3d(3), 3, 2, 1, 3),
    "a cumulative mean": lambda: around(nn.BatchNorm1d(3, momentum=None), 3),
    "momentum and eps": lambda: around(nn.BatchNorm2d(3, momentum=0.7, eps=0.3), 3, 2, 2),
    "not affine": lambda: around(nn.BatchNorm1d(3, affine=False), 3),
    "no running statistics": lambda: around(nn.BatchNorm1d(3, track_running_stats=False), 3),
}
if "bias" in inspect.signature(nn.BatchNorm1d).parameters:  # not in torch 2.9
    MODELS["no bias"] = lambda: around(nn.BatchNorm1d(3, bias=False), 3)


def weighed(accelerator: Any, loader: DataLoader[Any]) -> Any:
    """Each second batch of three samples has no token, and the loss a penalty on the parameters."""
    inputs, targets, _ = data(24).tensors
    tokens = torch.arange(24, dtype=torch.float64) % 3 + 1
    tokens[(torch.arange(24) // 3) % 4 == 1] = 0
    network = normalised()
    network, optimizer, loader = accelerator.prepare(
        network, sgd(network.parameters()), DataLoader(TensorDataset(inputs, targets, tokens), loader.batch_size)
    )
    for inputs, targets, tokens in loader:
        errors = (network(inputs) - targets).square().mean(1)
        penalty = sum(each.square().sum() for each in network.parameters())
        # The mean over no token is NaN.
        accelerator.backward((errors * tokens).sum() / tokens.sum() + 0.1 * penalty, weight=tokens.sum())
        optimizer.step()
        optimizer.zero_grad()
    return whole(network)


def assigned(accelerator: Any, network: Any, batch: Any) -> None:
    own = list(network.parameters())
    for each, gradient in zip(own, torch.autograd.grad(mean_loss(network, batch), own), strict=True):
        each.grad = gradient


@pytest.mark.parametrize("samples", [23, 26])  # of four ranks, two have none of the last two
def test_all_ranks_train_what_one_device_would_however_samples_fall(mode: Mode, samples: int) -> None:
    lines = {name: steps(make=make) for name, make in MODELS.items()}
    compare(mode, {**lines, "requested gradients": steps(assigned, normalised)}, samples, sync_batchnorm=True)


@pytest.mark.any_family
def test_weightless_rows_pass_on_gradients_through_the_shared_statistics(peers):
    compare(peers, {"weighed": weighed}, sync_batchnorm=True)


def test_what_float16_cannot_hold_is_refused_and_each_way_out_is_one():
    def body(**options: Any) -> None:
        accelerator, network = Accelerator(**options), normalised().float()
        network, _ = accelerator.prepare(network, sgd(network.parameters()))
        loss = network(torch.randn(3, 5)).mean()
        accelerator.backward(loss, weight=accelerator.process_index)

    with pytest.raises(ValueError, match=r"this rank's loss has weight=0.* mixed_precision='bf16', or leave out"):
        THREADS_2.run(lambda: body(mixed_precision="fp16", sync_batchnorm=True))
    THREADS_2.run(lambda: body(mixed_precision="bf16", sync_batchnorm=True))
    THREADS_2.run(lambda: body(mixed_precision="fp16"))
