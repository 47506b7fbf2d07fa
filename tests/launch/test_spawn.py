"""`spawn`: what reaches the workers, what comes back, and what the caller keeps as it was."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import torch
import torch.distributed as dist
from faults import survivors, until, zygote_pid
from modes import preload

from unisono.devices.cpu import CpuBackend
from unisono.errors import ClosedError
from unisono.launch.spawn import ProcessContext, spawn
from unisono.launch.starting import zygote_client
from unisono.world import current_world


def test_results_come_by_rank_and_args_arrive():
    results = spawn(lambda index, *args: (index, args), args=("a", {"b": 2}), nprocs=3)
    assert results == [(rank, ("a", {"b": 2})) for rank in range(3)]


def test_a_module_that_only_the_caller_can_find_is_found(tmp_path, monkeypatch):
    (tmp_path / "found_by_path_alone.py").write_text("def double(index):\n    return 2 * index\n")
    monkeypatch.syspath_prepend(tmp_path)
    import found_by_path_alone

    assert spawn(found_by_path_alone.double, nprocs=2) == [0, 2]


def test_a_worker_is_the_callers_equal(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SAID_BY_THE_CALLER", "yes")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(sys, "argv", ["train.py", "--epochs", "3"])
    monkeypatch.setattr(CpuBackend, "worker_environment", lambda family, count: {"OF_THE_FAMILY": f"for {count}"})

    def look(index):
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "SAID_BY_THE_CALLER", "OF_THE_FAMILY", "HOME")
        return [os.environ.get(name) for name in names], os.getcwd(), sys.argv, os.getpid()

    seen = spawn(look, nprocs=2, backend="cpu")
    assert "OF_THE_FAMILY" not in os.environ
    assert [each[0] for each in seen] == [[rank, rank, "2", "2", "yes", "for 2", None] for rank in ("0", "1")]
    assert all(each[1:3] == (str(tmp_path), ["train.py", "--epochs", "3"]) for each in seen)
    assert len({os.getpid(), *(each[3] for each in seen)}) == 3


def test_the_world_is_ready_in_every_thread_when_fn_begins():
    def look(index):
        worlds = []
        thread = threading.Thread(target=lambda: worlds.append(current_world()))
        thread.start()
        thread.join()
        world = current_world()
        total = world.comm.all_reduce(torch.tensor([index + 1]))
        facts = (world.rank, world.world_size, world.local_rank, world.local_world_size, str(world.device))
        return worlds == [world], facts, total.item()

    assert spawn(look, nprocs=2) == [(True, (rank, 2, rank, 2, f"cpu:{rank}"), 3) for rank in range(2)]


def test_the_caller_keeps_its_environment_directory_handlers_and_threads():
    def state():
        handlers = {signum: signal.getsignal(signum) for signum in signal.valid_signals()}
        return dict(os.environ), os.getcwd(), handlers, torch.get_num_threads(), list(sys.path), dist.is_initialized()

    before = state()
    spawn(lambda index: current_world().comm.barrier(), nprocs=2)
    assert state() == before


def test_without_nprocs_there_is_a_worker_for_every_logical_cpu(monkeypatch):
    monkeypatch.setenv("CPU_NUM_DEVICES", "3")
    assert spawn(lambda index: current_world().world_size, backend="cpu") == [3, 3, 3]


def test_a_world_of_one_runs_in_the_calling_process():
    outer = current_world()

    def look(index, held):
        held.append("seen by the caller")
        world = current_world()
        return os.getpid(), world is not outer, world.rank, world.world_size, index

    held: list[str] = []
    assert spawn(look, args=(held,), nprocs=1) == [(os.getpid(), True, 0, 1, 0)]
    assert held == ["seen by the caller"]
    assert current_world() is outer


@pytest.mark.slow
def test_workers_can_spawn_and_their_zygote_goes_with_them():
    def inner(index, outer_rank):
        total = current_world().comm.all_reduce(torch.tensor([index + 1]))
        return outer_rank, current_world().rank, total.item()

    def outer(index):
        found = spawn(inner, args=(index,), nprocs=2) if index == 1 else spawn(inner, args=(index,), nprocs=1)
        # The outer world still works.
        return found, current_world().comm.all_reduce(torch.tensor([1])).item(), zygote_pid()

    (first, first_sum, no_zygote), (second, second_sum, zygote) = spawn(outer, nprocs=2)
    assert first == [(0, 0, 1)]
    assert second == [(1, 0, 3), (1, 1, 3)]
    assert (first_sum, second_sum, no_zygote) == (2, 2, None)
    assert zygote not in (None, zygote_pid())
    assert survivors([zygote]) == []


def test_groups_run_side_by_side_from_several_threads(line, ear, gate, let_pass):
    def meet(index, name):
        comm = current_world().comm
        total = comm.all_reduce(torch.tensor([index + 10 * name]))
        line.say(name, index)
        gate.wait()
        comm.barrier()
        return name, index, total.item()

    with ThreadPoolExecutor(3) as pool:
        found = pool.map(lambda name: spawn(meet, args=(name,), nprocs=2), range(3))
        assert ear.hear_all(6) == [[str(name), str(index)] for name in range(3) for index in range(2)]
        let_pass(6)  # all six were running at once
    assert list(found) == [[(name, index, 1 + 20 * name) for index in range(2)] for name in range(3)]


def test_a_context_gives_pids_at_once_and_results_at_the_end(gate, let_pass):
    def wait(index):
        gate.wait()
        return os.getpid()

    context = spawn(wait, nprocs=2, join=False)
    assert isinstance(context, ProcessContext)
    pids = context.pids()
    assert len({os.getpid(), *pids}) == 3
    assert all(psutil.pid_exists(pid) for pid in pids)
    assert context.join(timeout=0.05) is None
    let_pass(2)
    assert context.join(timeout=60) == pids
    assert context.join() == pids  # again
    assert context.pids() == pids
    assert survivors(pids) == []


def test_stop_ends_the_workers_and_join_tells_it(line, ear):
    def stand(index):
        line.say(index)
        threading.Event().wait()

    context = spawn(stand, nprocs=2, join=False)
    ear.hear_all(2)
    context.stop()
    with pytest.raises(ClosedError, match=r"ranks \[0, 1\] were stopped, as the calling process asked") as caught:
        context.join()
    assert [error.exit_code for error in caught.value.failures.values()] == [-signal.SIGTERM] * 2
    with pytest.raises(ClosedError):  # again
        context.join()
    context.stop()  # of a group that has ended, is nothing
    assert survivors(context.pids()) == []


def test_stop_right_after_the_start_stops(soon):
    context = spawn(lambda index: threading.Event().wait(), nprocs=2, join=False, grace_s=60.0)
    context.stop()
    with pytest.raises(ClosedError):
        context.join()


@pytest.mark.slow
def test_a_forked_child_of_the_caller_spawns_from_a_zygote_of_its_own(line, ear):
    context = spawn(lambda index: threading.Event().wait(), nprocs=2, join=False)
    child = os.fork()
    if child == 0:
        try:
            line.say(spawn(lambda index: index, nprocs=2), zygote_pid())
        finally:
            zygote_client.close_all()
            os._exit(0)
    assert ear.hear()[:2] == ["[0,", "1]"]
    os.waitpid(child, 0)
    assert context.join(0) is None  # the caller's own group was not touched
    context.stop()
    with pytest.raises(ClosedError):
        context.join()


def test_the_zygote_has_one_thread_and_torch_is_warm_in_its_workers():
    preload()
    assert all(spawn(lambda index: "torch._dynamo" in sys.modules, nprocs=2))
    until(lambda: psutil.Process(zygote_pid()).num_threads() == 1)  # when it is idle for the first time, it has another


def test_what_fn_leaves_to_be_done_is_done(tmp_path):
    def work(index):
        def save():
            threading.main_thread().join()  # it ends first, as in any program
            (tmp_path / f"saved-{index}").touch()

        threading.Thread(target=save).start()
        atexit.register((tmp_path / f"told-{index}").touch)
        return index

    assert spawn(work, nprocs=2, grace_s=0) == [0, 1]  # the grace is for who is asked to stop
    assert sorted(path.name for path in tmp_path.iterdir()) == ["saved-0", "saved-1", "told-0", "told-1"]
