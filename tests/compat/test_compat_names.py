"""What scripts import beside their loops: reports, profiles, process groups."""

from __future__ import annotations

import json
import threading

import pytest
import torch
import torch.distributed as dist
from families import ALONE, PROCESSES, THREADS, mine
from torch import nn

import unisono.compat.torch_xla as torch_xla
import unisono.compat.torch_xla.core.functions as xf
import unisono.compat.torch_xla.core.xla_model as xm
import unisono.compat.torch_xla.debug.metrics as met
import unisono.compat.torch_xla.debug.metrics_compare_utils as mcu
import unisono.compat.torch_xla.debug.profiler as xp
import unisono.compat.torch_xla.distributed.parallel_loader as pl
import unisono.compat.torch_xla.runtime as xr
import unisono.compat.torch_xla.test.test_utils as test_utils
from unisono.compat.torch_xla.amp import syncfree


@pytest.mark.parametrize("way", [ALONE, THREADS], ids=str)
def test_updates_are_printed_with_the_replica_and_written_for_tensorboard(way, capfd, tmp_path):
    def report():
        folder = str(tmp_path / str(xm.get_ordinal()))
        writer = test_utils.get_summary_writer(folder)
        xm.mark_step()
        test_utils.print_training_update(xm.xla_device(), 3, 0.5, 10.0, 20.0, epoch=1, summary_writer=writer)
        test_utils.print_test_update(xm.xla_device(), 98.765, epoch=1)
        test_utils.write_to_summary(writer, 3, {"Accuracy/test": 98.5}, write_xla_metrics=True)
        test_utils.close_summary_writer(writer)

    way.run(report)
    told = capfd.readouterr().out
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for rank in range(way.ranks):
        spec = "" if way.ranks == 1 else f"/{rank} "
        assert f"{spec}Epoch=1 Step=3 Loss=0.50000 Rate=10.00 GlobalRate=20.00 Time=" in told.replace("Device=", "")
        read = EventAccumulator(str(tmp_path / str(rank))).Reload()
        assert [(each.step, each.value) for each in read.Scalars("Accuracy/test")] == [(3, 98.5)]
        assert read.Scalars("MarkStep__Value")[0].value >= 1
    assert "| Test Device=" in told
    assert "Epoch=1 Accuracy=98.77 Time=" in told


def test_reports_are_read_as_numbers():
    report = "Metric: step\n  TotalSamples: 3\n  Accumulator: 1500.000ms\nCounter: ms of compiling\n  Value: 7\n"
    numbers = {"step__TotalSamples": 3, "step__Accumulator_sec": 1.5, "ms of compiling__Value": 7}
    assert mcu.parse_metrics_report(report) == numbers
    met.clear_all()
    xm.mark_step()
    assert mcu.parse_metrics_report(torch_xla._XLAC._xla_metrics_report())["MarkStep__Value"] == 1


def test_closures_beside_the_loop_run_in_order_while_it_goes_on(several):
    def loop():
        may_run, heard, done = threading.Event(), [], threading.Event()

        def waits(value):
            may_run.wait()
            heard.append((value.item(), xm.get_ordinal()))

        for number in range(3):
            xm.add_step_closure(waits, args=(mine(number * 1.0) * 2,), run_async=True)
        xm.mark_step()
        assert heard == []
        may_run.set()
        xm.add_step_closure(done.set, run_async=True)
        xm.mark_step()  # waits for those of the step before
        assert len(heard) == 3
        done.wait()
        return heard

    assert several.run(loop) == [[(0.0, rank), (2.0, rank), (4.0, rank)] for rank in range(several.ranks)]


def test_an_error_in_an_async_closure_is_raised_once_at_the_next_step_end():
    def fails():
        raise FileNotFoundError("the log")

    heard = []
    xm.add_step_closure(fails, run_async=True)
    xm.add_step_closure(heard.append, args=(1,), run_async=True)
    xm.mark_step()
    xm.add_step_closure(heard.append, args=(2,), run_async=True)
    with pytest.raises(FileNotFoundError, match="the log"):
        xm.mark_step()
    assert heard == []
    xm.mark_step()


def test_batches_may_make_a_step_together():
    batches = [torch.ones(1)] * 5
    met.clear_all()
    loader = pl.MpDeviceLoader(
        batches, xm.xla_device(), batches_per_execution=2, host_to_device_transfer_threads=4, input_sharding=None
    )
    assert len(list(loader)) == 5
    assert met.counter_value("MarkStep") == 4  # before the batches 0, 2 and 4, and after the last
    with pytest.raises(ValueError, match="input_sharding is for one program over all devices"):
        pl.MpDeviceLoader(batches, xm.xla_device(), input_sharding="any")
    with pytest.raises(ValueError, match="batches_per_execution=0"):
        pl.ParallelLoader(batches, [xm.xla_device()], batches_per_execution=0)


def test_normalisation_over_all_replicas_is_that_of_one_device(several):
    torch.manual_seed(0)
    rows, plain = torch.randn(several.ranks * 6, 3), nn.BatchNorm1d(3)
    expected = plain(rows).detach()

    def normalize():
        layer = xf.SyncBatchNorm(3).to(xm.xla_device())
        found = layer(rows.chunk(several.ranks)[xm.get_ordinal()].to(xm.xla_device()))
        return found.detach().cpu(), layer.running_var.cpu()

    results = several.run(normalize)
    torch.testing.assert_close(torch.cat([found for found, _ in results]), expected, rtol=1e-4, atol=1e-5)
    for _, variance in results:
        torch.testing.assert_close(variance, plain.running_var, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="an input of 1 dimensions; pass one of 2 to 5"):
        xf.SyncBatchNorm(3)(torch.ones(3))


@pytest.mark.parametrize("make", [syncfree.SGD, syncfree.Adam, syncfree.AdamW])
def test_a_step_is_left_out_where_a_number_was_infinite(make):
    weight = nn.Parameter(mine([1.0]))
    optimizer = make([weight], lr=0.5)
    weight.grad = mine([1.0])
    xm.optimizer_step(optimizer, optimizer_args={"found_inf": mine(1.0)})
    assert weight.tolist() == [1.0]
    assert optimizer.step(lambda: 3, found_inf=mine(1.0)) == 3
    optimizer.step(found_inf=mine(0.0))
    assert weight.item() < 1.0


def test_a_trace_names_the_parts_of_a_step(tmp_path):
    xp.start_server(9012)
    xp.start_trace(tmp_path / "new")
    with pytest.raises(RuntimeError, match="a trace is already being recorded in this process"):
        xp.start_trace(tmp_path)
    with xp.StepTrace("train", step_num=7), xp.Trace("forward"):
        xp.Trace("inner")(lambda: mine([1.0]) + 1)()
    xp.stop_trace()
    names = {each.get("name") for each in json.loads((tmp_path / "new" / "trace-0.json").read_text())["traceEvents"]}
    assert {"train#7", "forward", "inner"} <= names
    with pytest.raises(RuntimeError, match="no trace is being recorded"):
        xp.stop_trace()
    with pytest.raises(AttributeError, match="a replica traces itself"):
        xp.trace_detached("localhost:9012", str(tmp_path))


def _meets():
    dist.init_process_group("xla", init_method="xla://")
    dist.init_process_group("xla", init_method="xla://")  # it is there
    own = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(own)
    assert dist.get_world_size() == xr.world_size()
    dist.destroy_process_group()
    dist.init_process_group("xla", init_method="xla://")
    return own.item(), xm.all_reduce("sum", mine([1.0])).item()


def test_a_process_group_by_a_familys_name_is_our_world():
    count = PROCESSES.ranks
    assert PROCESSES.run(_meets) == [(count * (count + 1) / 2, float(count))] * count


def test_small_things_that_scripts_take():
    xr.initialize_cache("/nowhere", readonly=True)
    torch_xla.experimental.eager_mode(True)
    weight = nn.Parameter(mine([1.0]))
    optimizer = torch.optim.SGD([weight, nn.Parameter(mine([1.0]))], 1.0)
    weight.grad = mine([2.0])
    assert [each is weight.grad for each in xm._fetch_gradients(optimizer)] == [True]


def test_precision_of_products_is_set_and_told():
    before = torch_xla._XLAC._xla_get_mat_mul_precision()
    try:
        torch_xla._XLAC._xla_set_mat_mul_precision("high")
        assert torch_xla._XLAC._xla_get_mat_mul_precision() == "high"
        with pytest.raises(ValueError, match="precision='low' does not exist"):
            torch_xla._XLAC._xla_set_mat_mul_precision("low")
    finally:
        torch_xla._XLAC._xla_set_mat_mul_precision(before)
