"""The process group of one machine: torch's collectives by shared memory, under faults; what they compute is compared
in `test_random_collectives.py`."""

from __future__ import annotations

import gc
import os
import re
import resource
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from hypothesis import given
from hypothesis import strategies as st
from modes import by_value

from unisono import spawn
from unisono.comm.shared_memory import futex, meeting_point
from unisono.comm.shared_memory.mapping import Mapping, map_together
from unisono.comm.shared_memory.notes import Notes
from unisono.comm.threads import ThreadCommunicator
from unisono.errors import BrokenWorldError, CollectiveMismatchError, WorkerDiedError
from unisono.world import current_world

pytestmark = pytest.mark.skipif(not futex.SUPPORTED, reason="ranks share no memory here")


def what_the_group_does_not_serve_goes_by_gloo(index: int) -> None:
    other = 1 - index
    received = torch.zeros(2)
    sent = dist.isend(torch.full((2,), float(index)), other)
    dist.recv(received, other)
    sent.wait()
    assert received.tolist() == [other, other]
    sparse = torch.sparse_coo_tensor([[index]], [1.0], (3,))
    dist.all_reduce(sparse)
    assert sparse.to_dense().tolist() == [1.0, 1.0, 0.0]


def what_gloo_carries_out_takes_views_and_leaves_what_it_only_reads(index: int) -> None:
    shared = torch.full((1,), index + 1.0).expand(3)  # could not be written
    every = [torch.zeros(6)[::2] for _ in range(2)]
    dist.gather(shared, every if index == 0 else None, 0)
    assert index or [each.tolist() for each in every] == [[1.0] * 3, [2.0] * 3]
    turned = torch.tensor([1 + 2j]).conj() * 1
    turned = turned.conj()
    dist.reduce(turned, 0)
    assert index or turned.tolist() == [2 + 4j]
    waiting = torch.zeros(3)
    begun = dist.reduce(waiting, 0, async_op=True)  # on its way: nothing of it is copied
    begun.wait()
    assert waiting.tolist() == [0.0] * 3


def asynchronous_collectives_are_complete_at_once(index: int) -> None:
    tensors = [torch.full((3,), float(each)) for each in range(5)]
    begun = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    assert [tensor[0].item() for tensor in tensors] == [0, 2, 4, 6, 8]
    assert all(each.is_completed() and each.wait() for each in begun)
    assert begun[1].get_future().then(lambda done: done.value()[0] * 10).wait().tolist() == [20, 20, 20]


def wrong_arguments_are_refused_on_that_rank_before_anything_is_sent(index: int) -> None:
    with pytest.raises(RuntimeError, match=r"all_gather between 2 ranks needs as many parts of shape \[3\]"):
        dist.group.WORLD.allgather([[torch.empty(3)]], [torch.empty(3)])
    with pytest.raises(RuntimeError, match=r"takes dense tensors in main memory, got .* on meta"):
        dist.all_reduce(torch.empty(3, device="meta"))
    with pytest.raises(RuntimeError, match=r"has no .*PREMUL_SUM"):
        dist.all_reduce(torch.ones(3), dist._make_nccl_premul_sum(2.0))
    with pytest.raises(RuntimeError, match="result type Float can't be cast"):
        dist.all_reduce(torch.ones(3, dtype=torch.int64), dist.ReduceOp.AVG)
    shared = torch.ones(1).expand(3)
    with pytest.raises(RuntimeError, match=r"of shape \[3\] whose elements share memory .* pass tensor.clone\(\)"):
        dist.all_reduce(shared)
    copied = shared.clone()
    dist.all_reduce(copied)
    assert copied.tolist() == [2.0] * 3
    tensor = torch.ones(1)
    dist.all_reduce(tensor)  # the group is as good as before
    assert tensor.item() == 2


def threads_of_a_rank_call_one_after_another(index: int) -> None:
    def reduce(tensor: torch.Tensor) -> float:
        dist.all_reduce(tensor, dist.ReduceOp.AVG)
        return tensor.mean().item()

    tensors = [torch.ones(400_000) for _ in range(20)]  # all alike: threads take turns in any order
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(reduce, tensors)) == [1.0] * 20


def a_destroyed_group_gives_its_memory_back(index: int) -> None:
    counts = []
    for _ in range(3):
        group = dist.new_group()
        dist.barrier(group)
        dist.destroy_process_group(group)
        del group
        gc.collect()
        links = [os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.exists()]
        maps = Path("/proc/self/maps").read_text().splitlines()
        counts.append(sum("unisono-blocks" in each for each in [*links, *maps]))
    assert len(set(counts)) == 1


OF_TWO_RANKS = (
    what_the_group_does_not_serve_goes_by_gloo,
    what_gloo_carries_out_takes_views_and_leaves_what_it_only_reads,
    asynchronous_collectives_are_complete_at_once,
    wrong_arguments_are_refused_on_that_rank_before_anything_is_sent,
    threads_of_a_rank_call_one_after_another,
    a_destroyed_group_gives_its_memory_back,
)


def test_one_group_of_two_ranks_does_all_that_torchs_groups_do():
    def work(index: int) -> None:
        for each in OF_TWO_RANKS:
            each(index)

    with by_value(work):
        spawn(work, nprocs=2)


def test_all_ranks_have_the_same_bits_and_those_of_threads():
    nprocs = 3
    tensors = [torch.randn(1_000_000, generator=torch.Generator().manual_seed(each)) for each in range(nprocs)]

    def work(index: int) -> torch.Tensor:
        dist.all_reduce(tensors[index])
        return tensors[index]

    by_processes = spawn(work, nprocs=nprocs)
    small = [tensor[:100].clone() for tensor in tensors]
    meetings = ThreadCommunicator.group(nprocs)
    with ThreadPoolExecutor(nprocs) as pool:
        by_threads = list(pool.map(lambda seat, tensor: seat.all_reduce(tensor.clone()), meetings, tensors))
        by_threads_small = list(pool.map(lambda seat, tensor: seat.all_reduce(tensor), meetings, small))
    for tensor in by_processes:
        assert torch.equal(tensor, by_threads[0])
        assert torch.equal(tensor[:100], by_threads_small[0])


def test_parts_of_several_shapes_are_gathered_as_by_nccl():
    """Optimizers of matrices gather a parameter of each rank so; gloo refuses."""

    def work(index: int) -> list[list[float]]:
        parts = [torch.empty(2, 1), torch.empty(3), torch.empty(0)]
        dist.all_gather(parts, parts[index].clone().fill_(index))
        with pytest.raises(RuntimeError, match=r"sends \[4\] of torch.float32, and this rank's part of the output is"):
            dist.all_gather(parts, torch.ones(4))
        return [each.flatten().tolist() for each in parts]

    assert spawn(work, nprocs=3) == [[[0, 0], [1, 1, 1], []]] * 3


def test_ranks_without_memory_in_common_say_why_once_and_send_messages(capfd):
    def work(index: int) -> float:
        if index == 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))  # of memory that has no name, too
        groups = [dist.new_group(backend="shm") for _ in range(2)]
        tensor = torch.ones(1)
        for group in groups:
            dist.all_reduce(tensor, group=group)
        return tensor.item()

    assert spawn(work, nprocs=2) == [4.0, 4.0]
    assert capfd.readouterr().err.count("have no memory in common, and send messages, which is slower ([Errno 27]") == 1


@pytest.mark.parametrize("length", [1, 20_000_000])
def test_who_waits_for_a_rank_that_is_killed_gets_an_error_soon(length):
    def work(index: int) -> None:
        tensor = torch.ones(length)
        dist.all_reduce(tensor)
        if index == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(dist.DistNetworkError, match=r"rank 1 has ended|rank [02] has broken off"):
            while True:
                dist.all_reduce(tensor)

    began = time.monotonic()
    with pytest.raises(WorkerDiedError, match=r"rank 1 .*SIGKILL"):
        spawn(work, nprocs=3)
    assert time.monotonic() - began < 30


def test_a_rank_that_was_stopped_goes_on_where_it_was():
    def work(index: int) -> float:
        tensor = torch.ones(1)
        if index == 1:
            pid, stopped = os.getpid(), os.fork()
            if stopped == 0:  # a child stops it, waits until it stands, and lets it continue
                os.kill(pid, signal.SIGSTOP)
                while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
                    pass
                os.kill(pid, signal.SIGCONT)
                os._exit(0)
            os.waitpid(stopped, 0)
        for _ in range(20):
            dist.all_reduce(tensor, dist.ReduceOp.AVG)
        return tensor.item()

    assert spawn(work, nprocs=2) == [1.0, 1.0]


def test_who_waits_longer_than_the_time_out_says_for_whom():
    def work(index: int) -> None:
        dist.barrier()  # the time-out limits how long the group waits for a rank that creates it later, too
        group = dist.new_group(timeout=timedelta(seconds=2), backend="shm")
        if index == 0:
            with pytest.raises(dist.DistNetworkError, match=r"waited 0:00:02 for rank 1"):
                dist.barrier(group)
        dist.barrier()

    spawn(work, nprocs=2)


def test_who_waits_uses_no_cpu():
    def work(index: int) -> float:
        dist.barrier()
        used = time.process_time()
        if index == 0:
            while time.process_time() - used < 1.0:  # a rank that computes
                pass
        dist.barrier()
        return time.process_time() - used

    busy, waiting = spawn(work, nprocs=2)
    assert waiting < 0.5 * busy


def test_subgroups_have_memory_of_their_own_and_nothing_stays_behind():
    def work(index: int) -> tuple[str, list[float]]:
        groups = [dist.new_group([0, 1]), dist.new_group([1, 2]), dist.new_group([0, 1, 2])]
        found = []
        for group in groups:
            if dist.get_rank(group) >= 0:
                tensor = torch.tensor([float(index)])
                dist.all_reduce(tensor, group=group)
                found.append(tensor.item())
        return str(os.getpid()), found

    results = dict(spawn(work, nprocs=3))
    assert [*results.values()] == [[1, 3], [1, 3, 3], [3, 3]]
    # torch names a segment torch_<process>_<random>_<count>; those of tests that run beside this one do not count.
    assert not [name for name in os.listdir("/dev/shm") if results.keys() & set(name.split("_")[1:2])]


def test_no_slot_is_reused_while_a_peer_may_read_it_even_at_wraparound():
    def work(index: int) -> list[int]:
        group = dist.new_group()
        blocks = group._blocks
        here = blocks._here
        here.turn = 2**32 - 4
        here._words[here._count_at[index] // 4] = here.turn
        dist.barrier()  # in another group: both have set their count
        for length in range(1, 9):
            tensor = torch.full((length,), float(index))
            dist.all_reduce(tensor, group=group)
            assert tensor.tolist() == [1.0] * length
        return [which for _, _, which in blocks._views]

    for sets in spawn(work, nprocs=2):
        assert len(sets) == 8
        assert all(len({*sets[start : start + 3]}) == 3 for start in range(6)), sets


def test_a_monitored_barrier_names_the_ranks_that_do_not_come_in_time():
    def work(index: int) -> None:
        group = dist.new_group()
        dist.monitored_barrier(group, timedelta(seconds=60))
        if index == 0:
            with pytest.raises(RuntimeError, match=r"Ranks 1, 2 failed to pass monitoredBarrier in 0:00:01"):
                dist.monitored_barrier(group, timedelta(seconds=1), wait_all_ranks=True)
        dist.barrier()

    spawn(work, nprocs=3)


def test_a_checkpoint_is_saved_beside_training(tmp_path):
    def work(index: int) -> float:
        saved = torch.full((3,), float(index))
        group = dist.new_group()
        saving = checkpoint.async_save({f"of {index}": saved}, checkpoint_id=tmp_path, process_group=group)
        tensor = torch.ones(1)
        for _ in range(50):
            dist.all_reduce(tensor, dist.ReduceOp.AVG)
        saving.result()
        loaded = {f"of {index}": torch.zeros(3)}
        checkpoint.load(loaded, checkpoint_id=tmp_path)
        return loaded[f"of {index}"][0].item()

    assert spawn(work, nprocs=2) == [0.0, 1.0]


def test_a_peer_that_leaves_is_named_to_who_waits_for_its_message():
    def work(index: int) -> None:
        if index == 1:
            dist.recv(torch.ones(1), 0)

    words = (
        r'rank 1 cannot complete recv\(\) in work \(".*test_shared_memory.py", line \d+\): rank 0 has left this world'
    )
    with pytest.raises(BrokenWorldError, match=words) as caught:
        spawn(work, nprocs=2)
    assert "ranks [0] had returned without an error" in caught.value.__notes__


def test_any_number_of_announcements_is_compared_without_a_collective():
    def work(index: int) -> str:
        meeting_point._GRACE_S = 60.0  # for both to name their places, however slow the other one is
        comm = current_world().comm
        for step in range(200):
            comm.announce(f"step {step}")
        assert comm.all_reduce(torch.ones(1)).item() == 2
        with pytest.raises((CollectiveMismatchError, BrokenWorldError)) as lost:
            for step in range(100):
                comm.announce(f"step {step if step < 50 or index == 0 else step + 1}")
            comm.barrier()
        return str(lost.value)

    for text in spawn(work, nprocs=2):
        assert re.search(r"rank 0 came to step 50 by announce\(\) in work .* while rank 1 came to step 51", text)


# What ranks note of what they do.


def notes_of(size: int) -> list[Notes]:
    """The notes of ranks that are all in this process, and so need no lock to be alive."""
    mapping = map_together(dist.HashStore(), 0, 1, 4096 * size, timedelta(seconds=10))
    assert mapping is not None

    def seat(rank: int) -> Mapping:
        other = object.__new__(Mapping)
        other.memory, other.rank, other.size = mapping.memory, rank, size
        return other

    return [Notes(seat(rank)) for rank in range(size)]


@given(st.lists(st.lists(st.sampled_from("ab"), max_size=4), min_size=2, max_size=3))
def test_the_first_differing_line_is_found_and_nothing_else(actions):
    notes = notes_of(len(actions))
    for number in range(4):
        for each, its in zip(notes, actions, strict=True):
            if number < len(its):
                each.add(its[number])
    for each, own in zip(notes, actions, strict=True):
        found = each.find_difference()
        differs = any(one != other for its in actions for one, other in zip(own, its, strict=False))
        assert bool(found) == differs
        if differs:
            assert len(set(found.values())) > 1


def test_long_texts_differing_past_the_cut_are_told_apart():
    first, second = notes_of(2)
    while not first.is_full:
        for each in (first, second):
            each.add("called " + "x" * 5000 + "1")
        assert first.find_difference() == {}
    first.add("called " + "x" * 5000 + "1")
    second.add("called " + "x" * 5000 + "2")
    found = first.find_difference()
    assert found[0] != found[1]
    assert found[0].startswith("called xxx")


def test_waiting_for_the_first_ranks_memory_ends_at_the_timeout() -> None:
    with pytest.raises(dist.DistStoreError, match="rank 1 has waited in vain for rank 0 to share its memory"):
        map_together(dist.HashStore(), 1, 2, 4096, timedelta(seconds=0.1))


@pytest.mark.parametrize("kind", ["a path", "a file", "another name", "another size", "a pipe"])
def test_whatever_the_store_says_only_a_ranks_memory_is_opened(kind: str, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(before := b"\0" * 16 + b"of another program")
    read, write = os.pipe()
    files = {"a file": os.open(victim, os.O_RDWR), "a pipe": read}
    for name, memory in (("another name", "theirs"), ("another size", "unisono-blocks")):
        files[name] = os.memfd_create(memory)
        os.ftruncate(files[name], 4096)
    place = f"../../../../..{victim}" if kind == "a path" else str(files[kind])
    store = dist.HashStore()
    store.set("place", f"{os.getpid()} {place} {'00' * 16} {os.readlink('/proc/self/ns/net')}")
    assert map_together(store, 1, 2, 4096, timedelta(seconds=10)) is None
    assert store.get("refused") == b"1"
    assert victim.read_bytes() == before
    for each in {*files.values(), write}:
        os.close(each)
