"""Data that is made up, structures, files, timers, rates and metrics by the names of PyTorch/XLA."""

from __future__ import annotations

import io
from collections import OrderedDict, namedtuple

import pytest
import torch
from families import FAMILY, RANKS, mine
from torch import nn

import unisono.compat.torch_xla as torch_xla
import unisono.compat.torch_xla.core.xla_model as xm
import unisono.compat.torch_xla.debug.metrics as met
import unisono.compat.torch_xla.distributed.parallel_loader as pl
import unisono.compat.torch_xla.runtime as xr
import unisono.compat.torch_xla.utils.serialization as xser
import unisono.compat.torch_xla.utils.utils as xu
from unisono.compat.torch_xla.amp import autocast

Pair = namedtuple("Pair", "a b")


def test_a_sample_generator_gives_the_very_object_again_and_again():
    generator = xu.SampleGenerator(data := object(), 3)
    assert list(generator) == [data] * len(generator) == [data] * 3
    assert generator.next() is next(generator) is data


def test_a_function_generator_yields_tensors_and_the_functions_results():
    generator = xu.FnDataGenerator(lambda x: x * 2, 4, torch.ones, dims=[3], count=2)
    assert len(generator) == 2
    for _ in range(2):
        found = list(generator)
        assert [(tuple(x.shape), torch.equal(y, 2 * x)) for x, y in found] == [((4, 3), True)] * 2
    assert generator.next()[0].shape == (4, 3)
    assert xu.FnDataGenerator(len, 4, torch.zeros).next()[0].shape == (4, 1)
    next(generator)
    with pytest.raises(StopIteration):
        next(generator)


def test_rates_are_smoothed_by_the_rate_before(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(xm.time, "monotonic", lambda: now[0])
    tracker = xm.RateTracker()
    assert tracker.rate() == tracker.global_rate() == 0.0
    tracker.add(10)
    now[0] = 1.0
    assert tracker.rate() == 10.0, "the first one as it is"
    tracker.add(20)
    now[0] = 2.0
    assert tracker.rate() == pytest.approx(0.6 * 20 + 0.4 * 10)
    assert tracker.rate() == 0.0, "no time has passed"
    assert tracker.global_rate() == 15.0


def test_metrics_tell_what_was_done_since_they_were_cleared():
    met.clear_all()
    assert met.counter_value("batches") is None
    assert met.metric_data("fetch") is None
    assert len(list(pl.MpDeviceLoader([torch.zeros(4)] * 3, xm.xla_device()))) == 3
    assert met.counter_value("batches") == 3
    assert met.counter_value("samples") == 12
    assert {"batches", "samples", "MarkStep"} <= set(met.counter_names())
    count, total, samples = met.metric_data("fetch")
    assert count == len(samples) > 0
    assert total == pytest.approx(sum(value for _, value in samples))
    assert {"fetch", "compute"} <= set(met.metric_names())
    report = met.metrics_report()
    assert "Metric: fetch\n  TotalSamples: " in report
    assert "Counter: batches\n  Value: 3\n" in report
    met.clear_all()
    assert (met.counter_value("batches"), met.metric_data("fetch"), met.metrics_report()) == (None, None, "")


def test_the_top_module_has_what_todays_scripts_take_from_it(monkeypatch):
    if FAMILY == "cpu":
        monkeypatch.setenv("CPU_NUM_DEVICES", str(RANKS))
    assert xr.global_runtime_device_count() == xr.addressable_device_count() == RANKS
    met.clear_all()
    with torch_xla.step():
        x = mine([1.0, 2.0])
    torch_xla.sync()
    torch_xla.sync(wait=True)

    @torch_xla.compile
    def double(x):
        return 2 * x

    assert double(x).tolist() == [2.0, 4.0]
    with torch_xla.compile():
        x = x + 1
    assert x.tolist() == [2.0, 3.0]
    assert met.counter_value("MarkStep") == 8
    assert torch_xla.core.xla_model is xm


def test_autocast_takes_bfloat16_on_any_device():
    layer = torch.nn.Linear(2, 2).to(xm.xla_device())
    with autocast(xm.xla_device()):
        assert layer(mine([[1.0, 2.0]])).dtype == torch.bfloat16
    assert layer(mine([[1.0, 2.0]])).dtype == torch.float32


@pytest.mark.parametrize(
    ("module", "name", "words"),
    [
        (torch_xla._XLAC, "_xla_nonsense", "C extension"),
        (torch_xla, "stablehlo", "torch.export writes"),
        (torch_xla.experimental, "scan", "experimental parts of the original"),
        (xm, "nonsense", "has no attribute 'nonsense'"),
    ],
)
def test_names_that_are_left_out_say_what_to_do_instead(module, name, words):
    assert not hasattr(module, name)
    with pytest.raises(AttributeError, match=words):
        getattr(module, name)


def tied():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module = module.to(xm.xla_device())
    module[1].weight = module[0].weight
    return module


def test_all_call_the_master_writes_and_the_file_is_there_when_they_return(way, tmp_path):
    path = tmp_path / "state.pt"

    def save():
        shared = mine([xm.get_ordinal() + 1.0])
        xser.save({"value": shared, "deep": [(shared, "name")]}, str(path))
        xm.save(shared, tmp_path / f"{xm.get_ordinal()}.pt", master_only=False)
        return xser.load(str(path))

    for rank, found in enumerate(way.run(save)):
        assert found["value"].tolist() == [1.0]
        assert found["value"].is_cpu
        assert found["deep"] == [(found["value"], "name")]
        assert found["deep"][0][0] is found["value"]
        assert torch.load(tmp_path / f"{rank}.pt").tolist() == [rank + 1.0]


def test_a_state_dict_keeps_its_type_its_order_and_its_ties():
    module, file = tied(), io.BytesIO()
    state = {"model": module.state_dict(), "pair": Pair(nn.Parameter(mine([1.0])), None), "step": 3, "whole": module}
    xm.save(state, file)
    file.seek(0)
    found = torch.load(file, weights_only=False)
    assert type(found["model"]) is OrderedDict
    assert list(found["model"]) == list(module.state_dict())
    assert found["model"]._metadata == module.state_dict()._metadata
    assert type(found["pair"]) is Pair
    assert isinstance(found["pair"].a, nn.Parameter)
    assert all(value.is_cpu for value in [*found["model"].values(), found["pair"].a, found["whole"][0].weight])
    twin = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    twin.load_state_dict(found["model"])
    assert torch.equal(twin[1].weight, module[0].weight.cpu())
