"""What the process communicator adds to a process group, on a group of one in this very process.

Several processes meet in `tests/contract`.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # makes the backend "fake" known
from modes import default_group

from unisono import spawn
from unisono.comm import sealing
from unisono.comm.outcome import Outcome
from unisono.comm.processes import ProcessCommunicator
from unisono.comm.reasons import is_of_transport
from unisono.errors import BrokenWorldError, CollectiveMismatchError

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[dist.Store]:
    with default_group(tmp_path / "store") as made:
        yield made


def test_leaving_and_aborting_leave_another_s_group_alone(store):
    for end in (ProcessCommunicator.leave, lambda comm: comm.abort(LookupError())):
        comm = ProcessCommunicator(CPU, owns_group=False)
        end(comm)
        assert dist.is_initialized()
        with pytest.raises(BrokenWorldError):
            comm.barrier()


def test_an_end_destroys_a_group_of_its_own_and_tells_the_store_why(tmp_path):
    with default_group(tmp_path / "left") as store:
        ProcessCommunicator(CPU, store).leave()
        assert not dist.is_initialized()
        assert store.check(["unisono/departed/0"])
    with default_group(tmp_path / "aborted") as store:
        ProcessCommunicator(CPU, store).abort(LookupError("no such digit"))
        assert not dist.is_initialized()
        left = Outcome.from_bytes(store.get("unisono/failure"))
        assert (repr(left.error), left.where) == ("LookupError('no such digit')", "rank 0")


@pytest.fixture(params=["", "one" * 10], ids=["no secret", "a secret"])
def secret(request: pytest.FixtureRequest) -> Iterator[str]:
    sealing.use_secret(request.param)
    yield request.param
    sealing.use_secret("")


@pytest.mark.parametrize(
    "junk",
    [b"", b"junk", pickle.dumps("a stranger's"), b"unisono signed " + bytes(40)],
    ids=["empty", "junk", "a pickle", "a forged signature"],
)
def test_an_abort_replaces_what_a_stranger_has_left_in_the_reason_s_place(store, secret, junk):
    store.set("unisono/failure", junk)
    sealed = sealing.sealed_store(store)
    ProcessCommunicator(CPU, sealed).abort(LookupError("no such digit"))
    assert not dist.is_initialized()
    assert repr(Outcome.from_bytes(sealed.get("unisono/failure")).error) == "LookupError('no such digit')"


@pytest.fixture(scope="module")
def warm_store() -> None:
    """The first store of a process opens a pipe that its library keeps for signals."""
    dist.TCPStore("127.0.0.1", 0, is_master=True)


@pytest.mark.parametrize("end", [ProcessCommunicator.leave, lambda comm: comm.abort(LookupError())])
def test_an_end_destroys_the_group_though_the_store_is_gone(store, warm_store, end):
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
    del server
    end(ProcessCommunicator(CPU, client))
    assert not dist.is_initialized()


DEPARTED = {"unisono/departed/0": b"1"}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({}, "a peer is gone or did not answer (Connection reset); if none has failed, the ranks called different "),
        (DEPARTED, "rank 0 has left this world"),
        (
            {**DEPARTED, "unisono/failure": Outcome.failure(LookupError("no such digit"), "rank 3").to_bytes()},
            "rank 3 failed with LookupError: no such digit",
        ),
    ],
    ids=["nothing known", "departed", "failed"],
)
def test_who_is_woken_by_the_transport_looks_up_why(store, monkeypatch, keys, message):
    for key, value in keys.items():
        store.set(key, value)
    comm, transport = ProcessCommunicator(CPU, store), RuntimeError("Connection reset")
    monkeypatch.setattr(dist, "all_reduce", Mock(side_effect=transport))
    for _ in range(2):  # once broken, always broken, and with the same reason
        with pytest.raises(BrokenWorldError) as broken:
            comm.barrier()
        assert str(broken.value).startswith(f"rank 0 cannot complete barrier(): {message}")
        cause = broken.value.__cause__
        assert cause is transport or repr(cause) == "LookupError('no such digit')"


class Vanishing(dist.HashStore):
    """A stranger deletes each key between two looks."""

    def check(self, keys):
        found = super().check(keys)
        for key in keys:
            self.delete_key(key)
        return found


def test_a_reason_that_is_junk_gone_or_foreign_delays_no_other(store, secret, monkeypatch):
    transport = RuntimeError("Connection reset")
    monkeypatch.setattr(dist, "all_reduce", Mock(side_effect=transport))
    departed, unknown = "rank 0 has left", "a peer is gone"
    for plain, message in (store, unknown if secret else departed), (Vanishing(), unknown):
        for key, value in {**DEPARTED, "unisono/failure": b"junk"}.items():
            plain.set(key, value)
        comm = ProcessCommunicator(CPU, sealing.sealed_store(plain))
        with pytest.raises(BrokenWorldError, match=rf"rank 0 cannot complete barrier\(\): {message}"):
            comm.barrier()


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (torch.OutOfMemoryError, "CUDA out of memory"),
        (torch.AcceleratorError, "CUDA error: device-side assert triggered"),
        (dist.DistBackendError, "NCCL error: unhandled cuda error\nCuda failure 710 'device-side assert triggered'"),
    ],
)
def test_what_fails_on_the_rank_s_own_device_is_no_peer_s_fault(store, monkeypatch, kind, text):
    comm = ProcessCommunicator(CPU, store)
    with monkeypatch.context() as patched, pytest.raises(kind, match=text.partition("\n")[0]) as failed:
        patched.setattr(dist, "all_reduce", Mock(side_effect=kind(text)))
        comm.barrier()
    assert not is_of_transport(failed.value)
    comm.barrier()


# Main memory and devices.


def test_what_is_small_goes_by_main_memory_and_waits_for_no_device(tmp_path):
    """The device's part of the group would need a device, of which there is none here."""
    with default_group(tmp_path / "store", "cpu:gloo,cuda:fake") as store:
        comm = ProcessCommunicator(GPU, store)
        comm.barrier()
        comm.announce("the end of step 3")
        assert comm.all_gather_object({"rank": 0}) == [{"rank": 0}]
        assert comm.broadcast_object("plan") == "plan"
        assert comm.all_reduce(torch.tensor(2)).item() == 2
        assert comm.all_gather(torch.ones(2))[0].device == CPU


def test_a_group_for_a_device_alone_takes_main_memory_by_way_of_the_device(store, monkeypatch):
    monkeypatch.setattr("unisono.comm.processes.types_in", lambda config: frozenset(["cuda"]))
    comm, sent = ProcessCommunicator(torch.device("cpu", 1), store), []  # another device, for torch's copies
    reduce = dist.all_reduce
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, *more: (sent.append(tensor), reduce(tensor.mul_(3), *more)))
    tensor = torch.ones(2)
    assert comm.all_reduce(tensor) is tensor
    assert sent[0].data_ptr() != tensor.data_ptr()
    assert tensor.tolist() == [3, 3]


@pytest.mark.parametrize("name", ["all_reduce", "all_gather", "reduce_scatter", "broadcast"])
def test_a_tensor_on_a_foreign_device_is_refused_before_anything_is_sent(store, name):
    comm = ProcessCommunicator(CPU, store)
    with pytest.raises(TypeError, match=f"{name} got a tensor on meta, .* on cpu or in main memory; pass tensor.to"):
        getattr(comm, name)(torch.ones(2, device="meta"))
    assert comm.num_calls == 0
    comm.barrier()


@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo,meta:gloo"])
def test_an_announcement_waits_for_nobody_where_data_has_another_transport(tmp_path, backend):
    """Between machines, for example with gloo for flags and NCCL for data: the next call reports what differs."""

    def work(index: int) -> tuple[int, str]:
        dist.destroy_process_group()  # the workers' own, in shared memory
        store = dist.FileStore(str(tmp_path / "store"), 2)
        dist.init_process_group(backend, store=store, rank=index, world_size=2)
        comm = ProcessCommunicator(torch.device("meta") if "meta" in backend else CPU, store)
        announced = 0
        with pytest.raises(CollectiveMismatchError) as lost:
            for step in range(6):
                comm.announce(f"the gradients of step {step + (index and step == 3)}")
                announced += 1
        return announced, str(lost.value)

    for announced, text in spawn(work, nprocs=2, process_group="gloo"):
        assert announced == (4 if "meta" in backend else 3)  # the fourth differs
        assert re.search(r"rank 0 came to the gradients of step 3 .* while rank 1 .* step 4", text)
