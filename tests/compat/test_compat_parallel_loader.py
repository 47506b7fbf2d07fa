"""`ParallelLoader`, `MpDeviceLoader`, `optimizer_step`: what goes where, what ends a step, that nothing is lost."""

from __future__ import annotations

from collections import OrderedDict, namedtuple

import pytest
import torch
from families import FAMILY, PROCESSES, RANKS, mine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import unisono.compat.torch_xla.core.xla_model as xm
import unisono.compat.torch_xla.debug.metrics as met
import unisono.compat.torch_xla.distributed.parallel_loader as pl
import unisono.compat.torch_xla.utils.utils as xu

Pair = namedtuple("Pair", "data target")
TWO = [f"{FAMILY}:0", f"{FAMILY}:1"]
needs_two = pytest.mark.skipif(RANKS < 2, reason="there is one device")


def numbered(count, batch_size=2):
    return [torch.full((batch_size,), float(number)) for number in range(count)]


def firsts(batches):
    return [int(batch[0]) for batch in batches]


def one_after_another(loader, devices):
    return [firsts(loader.per_device_loader(device)) for device in devices]


@needs_two
@pytest.mark.parametrize(
    ("count", "each"), [(10, [[0, 2, 4, 6, 8], [1, 3, 5, 7, 9]]), (5, [[0, 2], [1, 3]]), (1, [[], []]), (0, [[], []])]
)
def test_batch_i_goes_to_device_i_modulo_n_and_an_incomplete_group_to_none(count, each):
    with pl.ParallelLoader(numbered(count), TWO) as loader:
        assert one_after_another(loader, TWO) == each
        assert len(loader) == loader.per_device_samples() == len(each[0])


def test_batches_are_plain_and_keep_the_types_of_their_containers():
    tensor = torch.ones(2)
    batch = OrderedDict(
        pair=Pair(tensor, "name"), deep=[(tensor, None, 3)], parameter=torch.nn.Parameter(torch.ones(1))
    )
    (found,) = pl.MpDeviceLoader([batch], xm.xla_device())
    assert type(found) is OrderedDict
    assert type(found["pair"]) is Pair
    assert type(found["deep"][0]) is tuple
    assert found["pair"].data is found["deep"][0][0], "what is shared stays shared"
    assert found["pair"].data.device.type == found["parameter"].device.type == FAMILY
    assert found["pair"].target == "name"
    assert list(pl.MpDeviceLoader([None, 1, None], xm.xla_device())) == [None, 1, None]
    ((data, target),) = pl.MpDeviceLoader([(torch.zeros(2), torch.ones(2))], xm.xla_device())
    assert (data.sum().item(), target.sum().item()) == (0.0, 2.0), "two samples are no pair"


def test_a_wrapper_names_the_tensors_that_move():
    class Wrapped(xu.DataWrapper):
        def __init__(self, moving, staying):
            self.moving, self.staying = moving, staying

        def get_tensors(self):
            return [self.moving]

        def from_tensors(self, tensors):
            return Wrapped(tensors[0], self.staying)

    wrapped = Wrapped(torch.ones(2), torch.zeros(2))
    (found,) = pl.MpDeviceLoader([[wrapped]], xm.xla_device())
    assert found[0].moving.device.type == FAMILY
    assert found[0].staying.is_cpu
    assert wrapped.moving.is_cpu


def test_step_closures_run_before_the_next_batch_and_behind_the_last():
    heard = []
    met.clear_all()
    for batch in pl.MpDeviceLoader(numbered(3), xm.xla_device()):
        assert len(heard) == int(batch[0])
        xm.add_step_closure(lambda loss: heard.append(loss.item()), args=(batch.sum(),))
    assert heard == [0.0, 2.0, 4.0]
    assert met.counter_value("MarkStep") == 4


def test_a_loader_without_a_length_is_taken_and_only_len_says_so():
    loader = pl.MpDeviceLoader(iter(numbered(3)), xm.xla_device())
    with pytest.raises(TypeError):
        len(loader)
    assert firsts(loader) == [0, 1, 2]
    with pytest.raises(RuntimeError, match="was looped over before, and its source, a list_iterator, yields its batch"):
        list(loader)
    with pytest.raises(TypeError, match="no argument 'batchdims'; is it batchdim"):
        pl.MpDeviceLoader([], xm.xla_device(), batchdims=1)


def test_a_workers_loader_is_not_cut_and_its_own_sampler_decides():
    def loop():
        data = TensorDataset(torch.arange(8.0))
        device = xm.xla_device()
        whole = pl.MpDeviceLoader(DataLoader(data, batch_size=4), device)
        sampler = DistributedSampler(data, xm.xrt_world_size(), xm.get_ordinal(), shuffle=False)
        part = pl.ParallelLoader(DataLoader(data, batch_size=2, sampler=sampler), [device]).per_device_loader(device)
        fake = pl.MpDeviceLoader(xu.SampleGenerator(torch.zeros(1), 3), device)
        return [[value for (batch,) in each for value in batch.tolist()] for each in (whole, part)], len(list(fake))

    everything = [float(number) for number in range(8)]
    assert PROCESSES.run(loop) == [([everything, everything[rank::RANKS]], 3) for rank in range(RANKS)]


@pytest.mark.parametrize("make", [pl.MpDeviceLoader, lambda *args: pl.ParallelLoader(args[0], [args[1]])])
def test_a_loader_remade_each_epoch_takes_the_epoch_set_in_its_sampler(make):
    data = TensorDataset(torch.arange(32.0))
    device = xm.xla_device()
    sampler = DistributedSampler(data, 1, 0, seed=3)
    loader = DataLoader(data, batch_size=32, sampler=sampler)
    for epoch in (5, 2, 2):
        sampler.set_epoch(epoch)
        made = make(loader, device)
        batches = made if isinstance(made, pl.MpDeviceLoader) else made.per_device_loader(device)
        ((values,),) = list(batches)
        assert values.tolist() == list(sampler)
        assert sampler.epoch == epoch


# Steps: the mean over the replicas, and equal weights on all.


def linear():
    torch.manual_seed(0)
    return nn.Linear(2, 1, bias=False).to(xm.xla_device())


def own_step(step):
    """One step of SGD with rate 1 on the replica's own sample (rank + 1, 1): how far the weight moved."""
    model = linear()
    before = model.weight.detach().cpu().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(mine([[xm.get_ordinal() + 1.0, 1.0]])).sum().backward()
    step(optimizer)
    return (before - model.weight.detach().cpu()).round(decimals=4).tolist()


def mean_of(ranks):
    return round(sum(rank + 1.0 for rank in ranks) / len(ranks), 4)


def test_a_step_takes_the_mean_and_may_clip_and_a_barrier_ends_it(way):
    def clip(optimizer):
        xm.reduce_gradients(optimizer)
        torch.nn.utils.clip_grad_value_(optimizer.param_groups[0]["params"], 0.5)
        optimizer.step()

    def step_twice(optimizer):
        heard = []
        xm.add_step_closure(heard.append, args=("closure",))
        xm.optimizer_step(optimizer)
        assert heard == []
        xm.optimizer_step(optimizer, barrier=True)
        assert heard == ["closure"]

    def body():
        own_step(step_twice)
        return own_step(xm.optimizer_step), own_step(clip)

    assert way.run(body) == [([[mean_of(range(way.ranks)), 1.0]], [[0.5, 0.5]])] * way.ranks


def test_a_closure_added_by_a_closure_waits_for_the_next_step():
    heard = []

    def first():
        heard.append("first")
        xm.add_step_closure(heard.append, args=("second",))

    xm.add_step_closure(first)
    xm.mark_step()
    assert heard == ["first"]
    xm.mark_step()
    xm.mark_step()
    assert heard == ["first", "second"]


def test_groups_of_gradients_are_refused():
    optimizer = torch.optim.SGD(linear().parameters(), lr=1.0)
    for step in (xm.optimizer_step, xm.reduce_gradients):
        with pytest.raises(ValueError, match=r"groups=\[\[0\]\]: gradients are those of all replicas"):
            step(optimizer, groups=[[0]])
