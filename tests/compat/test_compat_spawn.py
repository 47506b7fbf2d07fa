"""`xmp.spawn` and what workers share, by the names of PyTorch/XLA."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
from families import PROCESSES, RANKS, on_processes
from torch import nn

import unisono.compat.torch_xla as torch_xla
import unisono.compat.torch_xla.core.xla_model as xm
import unisono.compat.torch_xla.distributed.xla_multiprocessing as xmp


def test_the_function_gets_its_ordinal_and_the_arguments():
    found = on_processes(lambda index, *args: (index, xm.get_ordinal(), args), "a", [1])
    assert found == [(rank, rank, ("a", [1])) for rank in range(RANKS)]


def test_one_process_is_this_one_and_its_errors_are_unchanged():
    assert xmp.spawn(lambda index: (index, os.getpid()), nprocs=1) == [(0, os.getpid())]
    with pytest.raises(LookupError, match="sample 3"):
        xmp.spawn(lambda index: [].index(3) if index else _raise(LookupError("sample 3")), nprocs=1)


def _raise(error):
    raise error


def test_a_failing_worker_is_told_by_its_own_error_and_not_by_its_victims():
    def fail():
        if xm.get_ordinal() == RANKS - 1:
            raise FileNotFoundError(f"file of {xm.get_ordinal()}")
        xm.rendezvous("never")

    with pytest.raises(FileNotFoundError, match=f"file of {RANKS - 1}") as caught:
        PROCESSES.run(fail)
    assert any(f"rank {RANKS - 1} of {RANKS}" in note for note in caught.value.__notes__)


def test_without_join_there_is_a_context():
    with xmp.spawn(abs, nprocs=1, join=False) as context:
        assert context.join() == [0]


@pytest.mark.parametrize("start_method", ["fork", "spawn", "forkserver"])
def test_every_start_method_of_the_original_is_taken(start_method):
    assert xmp.spawn(abs, nprocs=1, start_method=start_method) == [0]


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"nprocs": 0}, ValueError, "nprocs=0 is too small"),
        ({"nprocs": -1}, ValueError, "nprocs=-1 is too small"),
        ({"nprocs": True}, TypeError, "nprocs=True is of type bool"),
        ({"nprocs": 2.0}, TypeError, "nprocs=2.0 is of type float"),
        ({"nprocs": 1, "start_method": "thread"}, ValueError, "start_method='thread' does not exist; choose one of"),
        ({"nprocs": 1, "args": "text"}, TypeError, "args='text' is of type str; pass a tuple"),
    ],
)
def test_bad_arguments_are_told_before_anything_starts(given, error, words):
    with pytest.raises(error, match=words):
        xmp.spawn(abs, **given)


def test_the_environment_stays_as_it_was():
    before = dict(os.environ)
    xmp.spawn(abs, nprocs=1)
    assert dict(os.environ) == before


def test_launch_calls_the_function_once_in_this_process_for_debugging():
    assert torch_xla.launch(
        lambda index, pid: (index, os.getpid() == pid), (os.getpid(),), debug_single_process=True
    ) == [(0, True)]


def test_a_wrapped_model_is_moved_itself():
    model = nn.Linear(2, 2)
    wrapper = xmp.MpModelWrapper(model)
    assert wrapper.to(xm.xla_device()) is model
    assert model.weight.device.type == xm.xla_device().type


def test_a_wrapped_model_reaches_all_workers_with_one_set_of_weights():
    wrapper = xmp.MpModelWrapper(nn.Linear(2, 2))
    expected = wrapper._model.weight.tolist()

    def look():
        return wrapper.to(xm.xla_device()).weight.tolist()

    assert PROCESSES.run(look) == [expected] * RANKS


def test_a_serial_executor_lets_one_run_at_a_time_and_all_run(several, tmp_path):
    serial = xmp.MpSerialExecutor()

    def work():
        inside = tmp_path / "inside"
        inside.mkdir()  # fails where another one is inside
        inside.rmdir()
        return xm.get_ordinal()

    def run():
        xm.rendezvous("all at once")
        return [serial.run(work) for _ in range(20)]

    assert several.run(run) == [[rank] * 20 for rank in range(RANKS)]


def test_a_serial_executor_goes_on_behind_an_error_and_leaves_no_file():
    serial = xmp.MpSerialExecutor()
    with pytest.raises(LookupError):
        serial.run(lambda: _raise(LookupError()))
    assert serial.run(lambda: 3) == 3
    path = Path(serial._path)
    assert path.exists()
    del serial
    gc.collect()
    assert not path.exists()
