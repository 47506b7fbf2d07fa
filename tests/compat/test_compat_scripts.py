"""Whole scripts in the style of PyTorch/XLA's examples, in each of their forms, against plain torch on one device."""

from __future__ import annotations

import pytest
import torch
from families import DEVICES, RANKS, on_processes
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import unisono.compat.torch_xla.core.xla_model as xm
import unisono.compat.torch_xla.debug.metrics as met
import unisono.compat.torch_xla.distributed.data_parallel as dp
import unisono.compat.torch_xla.distributed.parallel_loader as pl
import unisono.compat.torch_xla.distributed.xla_multiprocessing as xmp

SAMPLES, BATCH, EPOCHS, RATE = 16 * RANKS, 4, 2, 0.05


def data():
    torch.manual_seed(1)
    return TensorDataset(torch.randn(SAMPLES, 1, 6, 6), torch.randint(3, (SAMPLES,)))


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))


def optimizer_of(model):
    return torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)


def plain_losses():
    """Plain torch on one device, over the global batches: the mean loss of each step."""
    model, rows = network(), data()
    optimizer, losses = optimizer_of(model), []
    for _ in range(EPOCHS):
        for start in range(0, SAMPLES, BATCH * RANKS):
            x, y = rows[start : start + BATCH * RANKS]
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses, (model(rows[:][0]).argmax(1) == rows[:][1]).sum().item()


def accuracy_of(model, loader):
    model.eval()
    correct = total = 0
    for x, y in loader:
        correct += (model(x).argmax(1) == y).sum()
        total += len(y)
    return int(correct), total


def mp_fn(index, path):
    device = xm.xla_device()
    model = WRAPPED.to(device)
    rows = data()
    sampler = DistributedSampler(rows, xm.xrt_world_size(), xm.get_ordinal(), shuffle=False)
    loader = pl.MpDeviceLoader(DataLoader(rows, BATCH, sampler=sampler), device)
    optimizer, tracker, losses = optimizer_of(model), xm.RateTracker(), []
    for _ in range(EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            xm.optimizer_step(optimizer)
            tracker.add(BATCH)
            xm.add_step_closure(lambda loss: losses.append(loss.item()), args=(loss,))
    with torch.no_grad():
        right = accuracy_of(model, loader)
    xm.save(model.state_dict(), path)
    met.metrics_report()
    return xm.mesh_reduce("losses", losses, mean_of_each), xm.mesh_reduce("right", right, sums), tracker.global_rate()


def mean_of_each(lists):
    return [sum(step) / len(step) for step in zip(*lists, strict=True)]


def sums(pairs):
    return [sum(each) for each in zip(*pairs, strict=True)]


WRAPPED = xmp.MpModelWrapper(network())


def test_the_script_of_processes_trains_as_one_device_does(tmp_path):
    losses, right = plain_losses()
    for found, accuracy, rate in on_processes(mp_fn, str(tmp_path / "model.pt")):
        assert found == pytest.approx(losses, abs=1e-4)
        assert accuracy == [right, SAMPLES]
        assert rate > 0
    model = network()
    model.load_state_dict(torch.load(tmp_path / "model.pt"))
    assert accuracy_of(model, [data()[:]]) == (right, SAMPLES)


@pytest.mark.parametrize("devices", [DEVICES, DEVICES[:1], []], ids=["all", "one", "native"])
def test_the_script_of_threads_trains_as_one_device_does(devices):
    losses, right = plain_losses()
    count = max(1, len(devices))
    loader = DataLoader(data(), BATCH * RANKS // count)
    replicas = dp.DataParallel(network, devices) if devices else dp.DataParallel(network(), [])

    def train(model, loader, device, context):
        optimizer = context.getattr_or("optimizer", lambda: optimizer_of(model))
        heard = []
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            xm.optimizer_step(optimizer)
            xm.add_step_closure(lambda loss: heard.append(loss.item()), args=(loss,))
        return heard

    def test(model, loader, device, context):
        with torch.no_grad():
            return accuracy_of(model, loader)

    found = [loss for _ in range(EPOCHS) for loss in mean_of_each(replicas(train, loader))]
    assert found == pytest.approx(losses, abs=1e-4)
    assert sums(replicas(test, loader)) == [right, SAMPLES]
