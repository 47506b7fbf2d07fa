"""What only CUDA does: staging, the side stream, and that copies overlap computing."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType
from torch.nn.utils.rnn import pack_sequence
from torch.profiler import ProfilerActivity, profile

from unisono import DeviceLoader
from unisono.cli.checks import check_devices
from unisono.devices import cuda
from unisono.devices.accelerator import dense_parts, pin_leaf


def needs_cuda(test: Callable[[], None]) -> Callable[[], None]:
    return pytest.mark.cuda(pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")(test))


class Graph:
    """A leaf of the user's own, with the methods that such classes have."""

    def __init__(self, nodes: torch.Tensor) -> None:
        self.nodes = nodes
        self.told: list[str] = []

    def pin_memory(self) -> Graph:
        return self._with("pinned", self.nodes)

    def to(self, device: torch.device) -> Graph:
        return self._with("moved", self.nodes.to(device))

    def record_stream(self, stream: Any) -> None:
        self.told.append("recorded")
        self.nodes.record_stream(stream)

    def _with(self, word: str, nodes: torch.Tensor) -> Graph:
        twin = Graph(nodes)
        twin.told = [*self.told, word]
        return twin


# Anywhere.


@pytest.mark.parametrize("leaf", [None, "text", 3, object(), torch.ones(2, device="meta")])
def test_what_cannot_be_pinned_is_left_as_it_is(leaf):
    assert pin_leaf(leaf) is leaf


def test_a_pinning_error_states_the_requested_size_and_what_limits_it():
    class Locked(torch.Tensor):
        def pin_memory(self) -> torch.Tensor:
            raise RuntimeError("CUDA error: out of memory")

    with pytest.raises(RuntimeError, match="out of memory") as caught:
        pin_leaf(torch.zeros(1000).as_subclass(Locked))
    (note,) = caught.value.__notes__
    assert note.startswith("while 4,000 bytes were put into page-locked memory")
    assert "a smaller `prefetch`" in note


def test_a_stream_is_recorded_on_every_tensor_of_a_leaf_or_on_none():
    dense, square = torch.ones(2), torch.eye(3)
    packed = pack_sequence([torch.ones(1), torch.ones(2)], enforce_sorted=False)
    jagged = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)
    assert dense_parts(dense) == [dense]
    assert len(dense_parts(packed)) == 4
    assert not any(map(dense_parts, [square.to_sparse(), square.to_sparse_csr(), jagged, Graph(dense), "text"]))


@pytest.mark.parametrize(
    ("count", "chosen", "local_rank", "index"),
    [
        pytest.param(8, None, 3, 3, id="one of all"),
        pytest.param(1, None, 3, 0, id="each rank sees its own alone"),
        pytest.param(2, None, 3, 1, id="each rank sees two"),
        pytest.param(8, None, 9, 1, id="nobody has said how many are on a machine"),
        pytest.param(8, 5, 3, 5, id="set_device was called"),
        pytest.param(8, 0, 3, 3, id="cuda is in use, and no device chosen"),
    ],
)
def test_a_rank_takes_the_gpu_that_it_has_chosen_or_else_one_that_it_sees(
    monkeypatch, count, chosen, local_rank, index
):
    activated: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: chosen is not None)
    monkeypatch.setattr(cuda.CudaBackend, "device_count", lambda self: count)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: chosen)
    monkeypatch.setattr(torch.accelerator, "set_device_index", activated.append)
    device = cuda.CudaBackend().enter_worker(local_rank, 16)
    assert activated == [device] == [torch.device("cuda", index)]


@pytest.mark.parametrize(
    ("hip", "library", "prefix"), [(None, "libcuda.so.1", "cu"), ("7.2.1", "libamdhip64.so.7", "hip")]
)
def test_a_side_thread_leaves_graph_captures_by_others_alone(monkeypatch, hip, library, prefix):
    modes: list[int] = []
    function = f"{prefix}ThreadExchangeStreamCaptureMode"

    def load(name: str, mode: int) -> Any:
        if name != library:
            raise OSError(name)
        assert bool(mode & os.RTLD_NOLOAD) is (hip is not None)
        return SimpleNamespace(**{function: lambda mode: modes.append(mode._obj.value)})

    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(ctypes, "CDLL", load)
    cuda._exchange_capture_mode.cache_clear()
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda device: None)
    activate = partial(cuda.CudaBackend().activate, torch.device("cuda", 0))
    activate()
    assert modes == []  # the main thread's rules are its own
    thread = threading.Thread(target=activate)
    thread.start()
    thread.join()
    assert modes == [1]
    cuda._exchange_capture_mode.cache_clear()


# On a device.


@needs_cuda
def test_the_copy_of_the_next_batch_overlaps_the_kernels_of_this_step():
    batches = [torch.full((16 << 20,), float(number)) for number in range(8)]  # 64 MiB each
    weight = torch.rand(4096, 4096, device="cuda")
    sums = []
    for _ in DeviceLoader(batches[:2], "cuda"):
        weight @ weight
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        for batch in DeviceLoader(batches, "cuda", prefetch=2):
            for _ in range(40):  # longer than staging takes, or the next copy would begin when the step has ended
                weight @ weight
            sums.append(batch.sum())
            torch.cuda.current_stream().synchronize()  # or all steps would be submitted before the first copy ends
        torch.cuda.synchronize()
    on_device = [each for each in trace.events() if each.device_type == DeviceType.CUDA]
    copies = [each for each in on_device if "HtoD" in each.name and each.time_range.elapsed_us() > 100]
    kernels = [each.time_range for each in on_device if "mem" not in each.name.lower()]
    assert len(copies) == len(batches)
    assert all("Pinned" in each.name for each in copies)
    spans = [each.time_range for each in copies]
    overlapping = [span for span in spans if any(span.start < each.end and each.start < span.end for each in kernels)]
    assert len(overlapping) >= len(batches) - 2  # before the first step there is nothing to overlap
    assert [total.item() for total in sums] == [number * float(16 << 20) for number in range(8)]


@needs_cuda
def test_memory_a_kernel_still_reads_is_not_overwritten_by_later_copies():
    weight = torch.rand(4096, 4096, device="cuda")
    sums = []
    for batch in DeviceLoader([torch.full((1 << 20,), float(number)) for number in range(100)], "cuda"):
        for _ in range(4):
            weight @ weight  # the sum comes long after its batch is dropped here
        sums.append(batch.sum())
        del batch
    assert [total.item() for total in sums] == [number * float(1 << 20) for number in range(100)]


@needs_cuda
def test_an_object_of_an_own_class_is_pinned_moved_and_told_of_the_stream():
    (found,) = DeviceLoader([[Graph(torch.ones(4))]], "cuda")
    assert found[0].told == ["pinned", "moved", "recorded"]
    assert found[0].nodes.is_cuda


@needs_cuda
def test_what_a_dataset_puts_on_a_gpu_by_itself_goes_to_the_loop_s():
    last = torch.cuda.device_count() - 1
    (batch,) = DeviceLoader((torch.ones(1).cuda() for _ in range(1)), f"cuda:{last}")
    assert batch.device.index == last


@needs_cuda
def test_a_graph_is_captured_while_batches_are_moved():
    weight = torch.rand(64, 64, device="cuda")
    weight @ weight
    loader = iter(DeviceLoader([torch.zeros(1 << 16, dtype=torch.uint8).repeat(1 + n % 7) for n in range(200)], "cuda"))
    next(loader)
    for _ in range(20):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            product = weight @ weight
        next(loader)
        graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(product, weight @ weight)


LISTED = """GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-5c89852c)
  MIG 3g.20gb     Device  0: (UUID: MIG-c6d4f1ef)
  MIG 3g.20gb     Device  1: (UUID: MIG-cba663e8)
"""


@pytest.mark.parametrize("listed", [LISTED, LISTED.splitlines()[0], None], ids=["MIG", "whole", "no nvidia-smi"])
def test_a_device_that_mig_hides_is_named_with_the_way_out(monkeypatch, tmp_path, listed):
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    if listed is not None:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n[ $1 = -L ] && cat <<END\n{listed}\nEND\n")
        (tmp_path / "nvidia-smi").chmod(0o755)

    def refuse(device: torch.device) -> None:
        raise RuntimeError("CUDA error: invalid device ordinal")

    monkeypatch.setattr(torch.accelerator, "set_device_index", refuse)
    monkeypatch.setattr(cuda.CudaBackend, "device_count", lambda self: 1)
    with pytest.raises(RuntimeError, match="invalid device ordinal") as caught:
        cuda.CudaBackend().activate(torch.device("cuda", 1))
    notes = getattr(caught.value, "__notes__", [])
    findings = [finding for finding in check_devices() if "MIG" in finding.text]
    assert len(notes) == len(findings) == (listed is LISTED)
    for said in (*notes, *(f"{finding.text}: {finding.advice}" for finding in findings)):
        assert said.startswith("MIG divides the GPUs here into 2 instances")
        assert "CUDA_VISIBLE_DEVICES=MIG-..." in said
