"""The law of `protocols.Backend` against every family; one without a device here is skipped."""

from __future__ import annotations

import copy
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy
import pytest
import torch
from batches import CONTAINERS, ones, same
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from unisono.comm.threads import ThreadCommunicator
from unisono.devices import available_devices, family_names, get_backend
from unisono.protocols import Backend, Communicator

FAMILIES = family_names()
HERE = [name for name in FAMILIES if get_backend(name).is_available()]


@pytest.fixture(params=HERE)
def backend(request: pytest.FixtureRequest) -> Backend:
    return get_backend(request.param)


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Backend:
    """Every family, whether or not it has a device here."""
    return get_backend(request.param)


@pytest.fixture
def device(backend: Backend) -> torch.device:
    return backend.device(0)


def move(backend: Backend, batch: Any, device: torch.device) -> Any:
    moved, token = backend.to_device(batch, device)
    backend.wait_ready(token)
    backend.synchronize(device)
    return moved


@pytest.mark.parametrize("name", FAMILIES)
def test_the_law_is_checked_on_a_device_of_the_family(name):
    if name not in HERE:
        pytest.skip(f"no {name} device on this machine: the tests that need one are left out")


# Identity and discovery.


def test_a_class_lacking_required_members_is_refused_by_their_names():
    class Incomplete(Backend):
        """Without what each family has to say of itself."""

    with pytest.raises(TypeError) as refusal:
        Incomplete()
    asked = ["device_count", "memory", "rng_state", "set_rng_state", "synchronize", "to_device", "wait_ready"]
    assert re.findall(r"\w+_\w+|memory|synchronize", str(refusal.value)) == asked


def test_it_is_a_backend_under_its_own_name(family):
    assert isinstance(family, Backend)
    assert isinstance(family.name, str)
    assert isinstance(family.process_group_backend, str)
    assert get_backend(family.name) is family


def test_a_backend_is_no_communicator_and_the_other_way_round(family):
    assert not isinstance(family, Communicator)
    assert not isinstance(ThreadCommunicator.group(1)[0], Backend)


def test_it_is_available_exactly_where_it_has_devices(family):
    assert family.is_available() == (family.device_count() > 0)


def test_every_index_below_the_count_is_a_device_of_the_family(backend):
    for index in range(backend.device_count()):
        assert backend.device(index) == torch.device(backend.name, index)


def test_a_negative_index_is_refused(family):
    with pytest.raises(ValueError, match=f"device {family.name}:-1 does not exist"):
        family.device(-1)


def test_an_index_beyond_the_last_device_is_refused_with_their_number(family):
    if family.name == "cpu":
        pytest.skip("logical devices: who names more outright gets them")
    count = family.device_count()
    with pytest.raises(ValueError, match=f"device {family.name}:{count} does not exist: {count} .* here"):
        family.device(count)


def test_asking_about_devices_initialises_no_accelerator(family):
    if torch.cuda.is_initialized():
        pytest.skip("an earlier test has used the accelerator")
    family.is_available()
    family.device_count()
    available_devices()
    assert not torch.cuda.is_initialized()


# Movement.


@pytest.mark.parametrize("kind", CONTAINERS)
def test_a_batch_keeps_its_containers_and_its_source_is_never_modified(backend, device, kind):
    make, look = CONTAINERS[kind]
    batch = make()
    before = look(batch)
    moved = move(backend, batch, device)
    after = look(batch)
    assert type(moved) is type(batch)
    assert same(look(moved), look(make()))
    assert all(leaf.device.type == device.type for leaf in look(moved) if isinstance(leaf, torch.Tensor))
    assert all(one is other for one, other in zip(before, after, strict=True) if isinstance(one, torch.Tensor))
    assert same(before, after)
    assert all(leaf.device.type == "cpu" for leaf in after if isinstance(leaf, torch.Tensor))
    if device.type == "cpu":
        assert moved is batch
    if not backend.moves_in_background:
        moved, token = backend.to_device(batch, device)
        assert moved is batch
        assert token is None


def test_what_holds_no_tensor_and_a_module_pass_through_untouched(backend, device):
    module = torch.nn.Linear(2, 2)
    plain = [None, "text", b"bytes", 7, 1.5, True, 2 + 1j, range(3), object(), torch.float32, module]
    for leaf in (*plain, numpy.arange(3), numpy.float32(2)):
        assert move(backend, {"leaf": leaf, "image": ones()}, device)["leaf"] is leaf
    assert module.weight.device.type == "cpu"


def test_what_is_shared_stays_shared(backend, device):
    image, pair = ones(), [ones()]
    moved = move(backend, {"image": image, "again": image, "pair": pair, "pairs": (pair, pair)}, device)
    assert moved["image"] is moved["again"]
    assert moved["pair"] is moved["pairs"][0] is moved["pairs"][1]
    assert moved["image"] is not moved["pair"][0]


def test_a_batch_that_contains_itself_is_refused(backend, device):
    batch: list[Any] = [ones()]
    batch.append(batch)
    with pytest.raises(RecursionError):
        backend.to_device(batch, device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
def test_a_tensor_keeps_its_type_shape_and_values(backend, device, dtype):
    tensor = torch.arange(6).reshape(2, 3).to(dtype)
    moved = move(backend, tensor, device)
    assert (moved.dtype, moved.shape) == (dtype, (2, 3))
    assert torch.equal(moved.cpu(), tensor)


@pytest.mark.parametrize(
    "make", [lambda: torch.empty(0, 3), lambda: torch.tensor(1.0), lambda: ones().t(), lambda: ones()[::2]]
)
def test_empty_dimensionless_and_strided_tensors_move(backend, device, make):
    assert torch.equal(move(backend, make(), device).cpu(), make())


def test_a_sparse_tensor_moves(backend, device):
    if backend.name in ("mps", "toy"):
        pytest.skip(f"{backend.name} has no sparse tensors")
    sparse = torch.eye(3).to_sparse()
    if backend.name == "xla":
        with pytest.raises(TypeError, match=r"layout torch\.sparse_coo .*, and XLA supports plain dense ones only"):
            backend.to_device([sparse], device)
        return
    moved = move(backend, [sparse], device)[0]
    assert moved.layout is torch.sparse_coo
    assert torch.equal(moved.to_dense().cpu(), torch.eye(3))


def test_requires_grad_is_kept(backend, device):
    wanted, frozen = move(backend, (ones().requires_grad_(), ones()), device)
    assert wanted.requires_grad
    assert not frozen.requires_grad


def test_a_packed_sequence_stays_one(backend, device):
    packed = pack_sequence([torch.arange(3.0), torch.arange(2.0)])
    moved = move(backend, {"words": packed}, device)["words"]
    assert isinstance(moved, PackedSequence)
    assert moved.data.device.type == device.type
    assert torch.equal(moved.data.cpu(), packed.data)
    assert torch.equal(moved.batch_sizes, packed.batch_sizes)


def test_batches_are_moved_by_several_threads_at_once(backend, device):
    if backend.moves_in_loop:
        pytest.skip(f"{backend.name} moves its batches on the loop's thread")
    together = threading.Barrier(4, timeout=20)

    def move_all(number: int) -> bool:
        backend.activate(device)
        together.wait()
        sources = [torch.full((1000,), float(number * 100 + place)) for place in range(50)]
        moved = [backend.to_device([source], device) for source in sources]
        for _, token in moved:
            backend.wait_ready(token)
        return all(torch.equal(batch[0].cpu(), source) for (batch, _), source in zip(moved, sources, strict=True))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(move_all, range(4)))


def test_a_large_batch_arrives_whole_while_the_source_is_reused(backend, device):
    source = torch.full((1 << 20,), 1.0)
    kept = source.clone()
    moved, token = backend.to_device([kept], device)
    del kept
    backend.wait_ready(token)
    assert moved[0].sum().item() == source.sum().item()


# Binding, time, state.


def test_a_device_can_be_activated_synchronised_and_marked(backend, device):
    backend.activate(device)
    result = ones().to(device).sum()
    backend.mark_step(device)
    backend.synchronize(device)
    assert result.item() == 6


def test_a_mark_is_reached_after_its_work_and_another_thread_can_await_it(backend, device):
    tensor = torch.ones(4, device=device).add_(1)
    mark = backend.mark(device, tensor)

    def read() -> list[float]:
        backend.activate(device)
        if mark is not None:
            backend.wait_ready(mark)
        return tensor.tolist()

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(read).result() == [2] * 4
    backend.synchronize(device)
    assert backend.is_reached(mark)


def test_the_random_state_comes_back(backend, device):
    before = backend.rng_state(device)
    first = torch.rand(8, device=device)
    backend.set_rng_state(before, device)
    again = torch.rand(8, device=device)
    later = torch.rand(8, device=device)
    assert torch.equal(first, again)
    assert not torch.equal(first, later)


def test_the_random_state_is_bytes_on_the_cpu_and_a_copy(backend, device):
    state = backend.rng_state(device)
    kept = copy.deepcopy(state)
    torch.rand(8, device=device)
    assert (state.dtype, state.device.type) == (torch.uint8, "cpu")
    assert torch.equal(state, kept)


def test_memory_in_use_is_positive_and_grows_with_a_tensor(backend, device):
    before, held = backend.memory(device), []
    while backend.memory(device) - before < 1 << 25 and len(held) < 40:  # the first may take what was freed before
        held.append(torch.ones(1 << 24, device=device))  # 64 MiB, written, so that they are resident
        backend.synchronize(device)
    assert isinstance(before, int)
    assert backend.memory(device) - before >= 1 << 25
    assert backend.memory(device) > 0
