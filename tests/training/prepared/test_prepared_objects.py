"""What `prepare` takes, gives and refuses."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import NamedTuple

import pytest
import torch
from modes import PROCESSES_2, SOLO, THREADS_2, in_main_memory
from torch import nn
from torch.optim.lr_scheduler import ChainedScheduler, ExponentialLR, LambdaLR, LinearLR, SequentialLR
from torch.utils.data import DataLoader
from twin import CLOSE, adam, assert_same_bits, data, loader_of, model, sgd

from unisono import Accelerator, DeviceLoader, barrier, current_world, optimizer_step, world_size
from unisono.training.prepared.model import PreparedModel
from unisono.training.prepared.scheduler import PreparedScheduler


class Pair(NamedTuple):
    network: nn.Module
    optimizer: torch.optim.Optimizer


@pytest.mark.any_family
def test_objects_come_back_in_their_order_in_any_order_and_one_as_itself():
    network, other = model(), model(1)
    optimizer = adam([*network.parameters(), *other.parameters()])
    scheduler = LambdaLR(optimizer, lambda _: 1.0)
    given = (scheduler, [optimizer, None], loader_of(4, 2), (network, [other]), None)
    made = Accelerator().prepare(*given)
    assert isinstance(made, tuple)
    kinds = [type(made[0]), type(made[1]), type(made[2]), type(made[3]), type(made[3][1])]
    assert kinds == [PreparedScheduler, list, DeviceLoader, tuple, list]
    assert made[1] == [optimizer, None]
    assert made[4] is None
    assert (made[3][0].module, made[3][1][0].module) == (network, other)


def test_one_object_gives_one_object_and_named_tuples_stay():
    accelerator = Accelerator()
    assert isinstance(accelerator.prepare(model()), PreparedModel)
    assert accelerator.prepare(None) is None
    assert accelerator.prepare() == ()
    network = model()
    pair = accelerator.prepare(Pair(network, sgd(network.parameters())))
    assert isinstance(pair, Pair)
    assert pair.network.module is network


@pytest.mark.parametrize("odd", [3, "text", torch.ones(2), {"a": 1}, object()], ids=lambda odd: type(odd).__name__)
def test_an_unknown_object_is_named_by_class_and_position_without_a_change(odd):
    accelerator, network = Accelerator(), model()
    with pytest.raises(TypeError, match=rf"object at position 1\[1\] is of type {type(odd).__name__}, which cannot"):
        accelerator.prepare(network, [None, odd])
    accelerator.prepare(network)


def test_nothing_is_prepared_twice():
    accelerator, network, loader = Accelerator(), model(), loader_of(4, 2)
    with pytest.raises(ValueError, match="Sequential at position 1 is already prepared"):
        accelerator.prepare(network, network)
    optimizer = sgd(network.parameters())
    scheduler = LambdaLR(optimizer, lambda _: 1.0)
    made = accelerator.prepare(network, optimizer, scheduler, loader)
    for each in (network, optimizer, scheduler, loader, *made):
        for other in (accelerator, Accelerator()):
            with pytest.raises(ValueError, match=r"at position 0 is already prepared; .* what prepare\(\) returned"):
                other.prepare(each)


@pytest.mark.any_family
def test_a_parameter_of_no_prepared_model_is_an_error_that_says_where():
    accelerator, network, other = Accelerator(), model(), model(1)
    optimizer = sgd(network.parameters())
    optimizer.add_param_group({"params": other[2].bias})
    with pytest.raises(
        ValueError, match=r"parameter 0 of group 1 of the SGD at position 1, shape \[2\], belongs"
    ) as caught:
        accelerator.prepare(network, optimizer)
    assert "model, optimizer = accelerator.prepare(model, optimizer)" in str(caught.value)
    assert "parameter, optimizer = accelerator.prepare(parameter, optimizer)" in str(caught.value)
    accelerator.prepare(other, network, optimizer)
    parameter = nn.Parameter(torch.zeros(1))
    parameter, optimizer = accelerator.prepare(parameter, sgd([parameter]))


def test_a_scheduler_whose_optimizer_is_not_prepared_is_an_error():
    network = model()
    scheduler = LambdaLR(sgd(network.parameters()), lambda _: 1.0)
    with pytest.raises(ValueError, match="LambdaLR at position 1 schedules a SGD that is not prepared"):
        Accelerator().prepare(network, scheduler)


def test_chained_and_sequential_schedulers_steer_the_prepared_optimizer():
    def rates(strategy, kind):
        accelerator, network = Accelerator(strategy=strategy), model()
        optimizer = sgd(network.parameters())
        parts = [LinearLR(optimizer, 0.5, total_iters=2), ExponentialLR(optimizer, 0.5)]
        scheduler = ChainedScheduler(parts) if kind == "chained" else SequentialLR(optimizer, parts, [2])
        network, optimizer, scheduler = accelerator.prepare(network, optimizer, scheduler)
        found = []
        for _ in range(4):
            network(torch.ones(2, 5).double()).sum().backward()
            optimizer.step()
            scheduler.step()
            found.append(optimizer.param_groups[0]["lr"])
        return found

    cases = [("zero1", "chained"), ("zero1", "sequential"), ("ddp", "chained")]
    expected = {"chained": [0.0375, 0.025, 0.0125, 0.00625], "sequential": [0.075, 0.1, 0.05, 0.025]}
    for found in PROCESSES_2.run(lambda: [rates(*case) for case in cases]):
        for (_, kind), own in zip(cases, found, strict=True):
            assert own == pytest.approx(expected[kind])


def test_a_model_on_two_devices_is_an_error_that_names_a_parameter_on_each():
    network = model()
    network[2].to("meta")
    with pytest.raises(ValueError, match=r"position 0 is on 2 devices \('0.weight' on cpu, '2.weight' on meta\)"):
        Accelerator().prepare(network)


@pytest.mark.any_family
def test_state_of_a_used_optimizer_goes_on():
    network, twin_network = model(), model()
    optimizer, twin_optimizer = adam(network.parameters()), adam(twin_network.parameters())
    inputs = torch.ones(3, 5).double()
    for _ in range(2):
        network(inputs).sum().backward()
        optimizer.step()
    accelerator = Accelerator()
    network, optimizer = accelerator.prepare(network, optimizer)
    network(inputs.to(accelerator.device)).sum().backward()
    optimizer.step()
    for _ in range(3):
        twin_network(inputs).sum().backward()
        twin_optimizer.step()
    torch.testing.assert_close(in_main_memory(network.state_dict()), twin_network.state_dict(), **CLOSE)


def test_ranks_begin_with_rank_zeros_parameters_and_buffers_trained_or_not():
    def body():
        accelerator = Accelerator()
        rank = accelerator.world.rank
        networks = [model(rank), model(rank).requires_grad_(False), nn.BatchNorm1d(3)]
        networks[2].running_mean += rank
        return [each.state_dict() for each in accelerator.prepare(*networks)]

    for mode in (THREADS_2, PROCESSES_2):
        first, second = mode.run(body)
        torch.testing.assert_close(first, second, rtol=0, atol=0)
        torch.testing.assert_close(first[0], model(0).state_dict(), rtol=0, atol=0)
        assert not first[2]["running_mean"].any()


def test_what_the_user_drops_is_garbage_while_the_accelerator_lives():
    def body(strategy="ddp"):
        accelerator, held = Accelerator(strategy=strategy), []
        for fold in range(3):
            network = model(fold)
            network, optimizer = accelerator.prepare(network, sgd(network.parameters()))
            network(torch.ones(1, 5).double()).sum().backward()
            optimizer.step()
            held += [weakref.ref(network), weakref.ref(network.module), weakref.ref(optimizer)]
        del network, optimizer
        for turn in range(world_size()):  # beside another thread's collection, a collection does nothing
            barrier()
            if turn == current_world().rank:
                gc.collect()
        barrier()
        return [each() is None for each in held]

    for mode in (SOLO, THREADS_2):
        assert mode.run(body) == [[True] * 9] * mode.ranks
    assert PROCESSES_2.run(lambda: [body(each) for each in ("ddp", "zero1", "fsdp")]) == [[[True] * 9] * 3] * 2


@pytest.mark.parametrize("mode", [SOLO, THREADS_2], ids=str)
def test_what_was_freed_steps_by_itself_and_can_be_prepared_anew(mode):
    def body():
        accelerator, plain = Accelerator(gradient_accumulation_steps=2), model()
        optimizer = sgd(plain.parameters())
        for _ in range(2):
            network, optimizer = accelerator.prepare(plain, optimizer)
            network(torch.ones(1, 5).double()).sum().backward()  # half a step
            accelerator.free_memory()
            before = plain[0].weight.clone()
            optimizer.step()
            assert not torch.equal(plain[0].weight, before)
            optimizer.zero_grad()
            assert plain[0].weight.grad is None
        return plain.state_dict()

    assert_same_bits(mode.run(body))


@pytest.mark.any_family
def test_states_have_no_foreign_keys_and_copies_train_by_themselves(tmp_path):
    accelerator, network = Accelerator(gradient_accumulation_steps=3), model()
    optimizer = adam(network.parameters())
    scheduler = LambdaLR(optimizer, lambda step: 0.5**step)
    keys = (set(optimizer.state_dict()), set(scheduler.state_dict()))
    network, optimizer, scheduler = accelerator.prepare(network, optimizer, scheduler)
    network(torch.ones(1, 5, device=accelerator.device).double()).sum().backward()
    assert (set(optimizer.state_dict()), set(scheduler.state_dict())) == keys
    torch.save((network.state_dict(), optimizer.state_dict(), scheduler.state_dict()), tmp_path / "saved")
    of_network, of_optimizer, of_scheduler = torch.load(tmp_path / "saved", weights_only=True)
    network.load_state_dict(of_network)
    optimizer.load_state_dict(of_optimizer)
    scheduler.load_state_dict(of_scheduler)
    twin_optimizer = copy.deepcopy(optimizer)
    before = copy.deepcopy(network).state_dict()
    for parameter in twin_optimizer.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    twin_optimizer.step()  # not a microbatch of anything
    assert not torch.equal(twin_optimizer.param_groups[0]["params"][0], network.get_parameter("0.weight"))
    torch.testing.assert_close(network.state_dict(), before, rtol=0, atol=0)


@pytest.mark.any_family
def test_the_bare_step_of_a_prepared_optimizer_is_its_own():
    accelerator, network = Accelerator(gradient_accumulation_steps=2), model()
    network, optimizer, loader = accelerator.prepare(network, sgd(network.parameters()), loader_of(4, 2))
    before = [copy.deepcopy(network.state_dict())]
    for inputs, _, _ in loader:
        accelerator.backward(network(inputs).sum())
        optimizer_step(optimizer)
        before.append(copy.deepcopy(network.state_dict()))
    assert torch.equal(before[0]["0.weight"], before[1]["0.weight"])
    assert not torch.equal(before[1]["0.weight"], before[2]["0.weight"])


@pytest.mark.any_family
def test_an_iterable_of_batches_is_a_loader_and_a_prepared_one_stays():
    made = Accelerator().prepare(range(3), DeviceLoader(DataLoader(data(4), batch_size=2)))
    assert list(made[0]) == [0, 1, 2]
    assert len(list(made[1])) == 2


def test_without_device_placement_nothing_moves():
    network = model().to("meta")
    network, _, loader = Accelerator(device_placement=False).prepare(
        network, sgd(network.parameters()), loader_of(2, 2)
    )
    assert next(network.parameters()).device.type == "meta"
    assert [each.device.type for each in next(iter(loader))] == ["cpu"] * 3
    assert SOLO.run(lambda: 1) == [1]
