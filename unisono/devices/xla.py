"""The XLA family, through torch_xla: TPUs, and virtual devices on the CPU. Devices record work, and compile whole
graphs.

A thread's operations on its device are recorded until `mark_step` cuts the graph, compiles it if it is new, and runs
it. Threads cut one after the other, so all but the first find the same graph compiled. No graph contains a collective
(the communicator runs each in a separate graph), so cutting waits for no peer.

On the CPU there are `CPU_NUM_DEVICES` devices, or as many as were asked for before the first use. `xla_runtime.py`
starts the runtime, with its settings.

*Threads:* each device belongs to one computing thread at a time; others may move batches to it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import psutil
import torch
from torch.nn.utils.rnn import PackedSequence

from unisono.devices.movement import send
from unisono.devices.randomness import seed_of
from unisono.devices.xla_runtime import (
    CPU,
    TPU,
    check_chips,
    choose_chip,
    hardware,
    load_torch_xla,
    missing_reason,
    prepare_environment,
    runtime_module,
    virtual_count,
)
from unisono.errors import UnisonoError
from unisono.protocols import Backend, Feature, Transport
from unisono.torch_private import all_schemas
from unisono.tree import leaves, map_objects

_UNFIT = {
    torch.complex128: "take complex64",
    **dict.fromkeys((torch.uint16, torch.uint32, torch.uint64), "take a signed type"),
}
"""Dtypes that change silently when they are uploaded."""

_LACKS: dict[Feature, str] = {
    "virtual_ranks": "it is not known how its graphs give the same bits again; pass cpu=True",
    "compile": "XLA compiles every step itself; leave compile out",
    "fp16": "XLA devices compute in bfloat16, which needs no loss scaler; use mixed_precision='bf16'",
    "process_group": "process groups do not support XLA tensors: gloo leaves them unchanged, without an error; use "
    "strategy='ddp' without comm_hook, where the optimizer's step reduces the gradients",
}


class XlaBackend(Backend):
    name = "xla"
    is_lazy = True

    def __init__(self) -> None:
        self._compiling = threading.Lock()
        self._loading = threading.Lock()
        self._xla: Any = None
        self._sharding: Callable[[torch.Tensor], None] | None = None  # lays out batches, if one program has all devices
        self._asked = 0  # the number of virtual devices, if it is not set elsewhere

    def hardware(self) -> str:
        return hardware()

    def unavailable_reason(self) -> str:
        has_none = f"PJRT_DEVICE={hardware()}, and there is no chip here; PJRT_DEVICE=CPU has virtual devices"
        return missing_reason() or ("" if self.is_available() else has_none)

    def is_accelerated(self) -> bool:
        return hardware() != CPU

    def device_count(self) -> int:
        """Does not start the runtime."""
        if missing_reason():
            return 0
        if (started := runtime_module()) is not None:
            return len(started._xla_get_devices())
        if hardware() == CPU:
            return virtual_count() or 1
        from torch_xla._internal import tpu  # counts chips on the bus, and queries Google's metadata for their type

        return int(tpu.num_available_devices()) if tpu.num_available_chips() else 0

    def device(self, index: int) -> torch.device:
        """As in every family; before the first use, virtual devices are created on request."""
        if self._sharding is not None and index > 0:
            raise ValueError(
                f"device xla:{index} does not exist: this process computes by strategy='spmd', where xla:0 stands "
                "for all of them"
            )
        is_open = hardware() == CPU and not missing_reason() and runtime_module() is None
        # A number that the user has set is final; one that was set here grows with the devices asked for.
        if is_open and index >= self.device_count() and virtual_count() in (0, self._asked):
            self._asked = index + 1
            os.environ["CPU_NUM_DEVICES"] = str(self._asked)
        try:
            device = super().device(index)
        except ValueError as error:
            if missing_reason() or hardware() != CPU or index < 0:
                raise
            raise ValueError(
                f"{error}; set CPU_NUM_DEVICES={index + 1} in the environment before the first use of a device"
            ) from None
        self.runtime()  # the device is about to be used, and torch supports XLA tensors only from here on
        return device

    def activate(self, device: torch.device) -> None:
        self.runtime()._XLAC._xla_set_default_device(str(device))

    def start(self, device: torch.device) -> None:
        self.runtime()
        if runtime_module() is None:
            self.activate(device)
            _try_backward(device)

    def preload(self) -> None:
        self.runtime()

    def check_workers(self, count: int) -> None:
        if hardware() == TPU and not missing_reason():
            check_chips(count)

    def enter_worker(self, local_rank: int, local_world_size: int) -> torch.device:
        if hardware() == TPU:
            check_chips(local_world_size)
            choose_chip(local_rank, local_world_size)
        self.runtime()
        if hardware() == CPU:
            os.environ["CPU_NUM_DEVICES"] = "1"
        prepare_environment()  # again: torch_xla may have been imported in the process that this one was forked from
        device = torch.device("xla", 0)
        self.start(device)
        self.activate(device)
        _guard_process_groups()
        state = self.seeded_state(seed_of("rank", torch.initial_seed(), local_rank), device)
        self.set_rng_state(state, device)  # otherwise all processes would begin with the same seed
        return device

    def thread_transport(self, devices: Sequence[torch.device]) -> Transport:
        if self._sharding is not None:
            raise UnisonoError("this process computes by strategy='spmd', with one thread for all devices, for good")
        spans = [device.index for device in devices] == list(range(len(self.runtime()._XLAC._xla_get_devices())))
        # CPU devices can reduce only with the settings below, which the user may have changed.
        threads = os.environ.get("XLA_THREAD_POOL_SIZE", "")
        has_room = threads.isdecimal() and int(threads) >= len(devices)
        may = hardware() != CPU or (has_room and os.environ.get("PJRT_CPU_ASYNC_CLIENT") == "0")
        return "runtime" if spans and may and len(devices) > 1 else "host"

    def process_transport(self) -> Transport:
        return "host" if hardware() == CPU else "runtime"

    def to_device(self, batch: Any, device: torch.device) -> tuple[Any, Any]:
        self.runtime()
        moved = map_objects(lambda leaf: self._upload_leaf(_check_fit(leaf), device), batch)
        return moved, None if self._sharding is None else moved

    def _upload_leaf(self, leaf: Any, device: torch.device) -> Any:
        """The leaf on the device, from any thread.

        `tensor.to(device)` is for the computing thread only: until the next cut it refers to main memory, and a cut in
        the middle of it silently reads wrong numbers.
        """
        if isinstance(leaf, PackedSequence) and leaf.data.is_cpu:
            data, sizes, *order = leaf  # the order is None, or two tensors
            moved = [self._upload_leaf(each, device) for each in (data, *order)]
            return PackedSequence(moved[0], sizes, *moved[1:])
        if isinstance(leaf, torch.Tensor) and leaf.is_cpu:
            plain = leaf.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg()
            (moved,) = self.runtime()._XLAC._xla_tensors_from_aten([plain], [str(device)], None)
            if isinstance(leaf, torch.nn.Parameter):
                return torch.nn.Parameter(moved, leaf.requires_grad)
            return moved.as_subclass(type(leaf)).requires_grad_(leaf.requires_grad)
        # Excludes `mark_step`, whose cut in the middle of a copy would read wrong numbers.
        with self._compiling:
            return send(leaf, device)

    def spread(self) -> None:
        """Process-wide and permanent, as in torch_xla."""
        if self._sharding is not None:
            return
        self.runtime()
        if runtime_module() is not None:  # with earlier tensors, the first step would end in a segmentation fault
            raise UnisonoError(
                "strategy='spmd' comes too late: an XLA device of this process is in use already; make the Accelerator "
                "first, in a process of its own"
            )
        import torch_xla.distributed.spmd as spmd
        import torch_xla.runtime as runtime

        runtime.use_spmd()
        count = runtime.global_runtime_device_count()
        mesh = spmd.Mesh(list(range(count)), (count,), ("data",))

        def shard(tensor: torch.Tensor) -> None:
            spmd.mark_sharding(tensor, mesh, ("data", *[None] * (tensor.ndim - 1)))

        self._sharding = shard

    def wait_ready(self, token: Any) -> None:
        """Lay a batch over all devices, if one program has them: on the loop's thread, like all recording."""
        if self._sharding is None:
            return
        for leaf in leaves(token):
            if isinstance(leaf, torch.Tensor) and leaf.ndim:
                self._sharding(leaf)

    def synchronize(self, device: torch.device) -> None:
        self.mark_step(device)
        inner = self.runtime()._XLAC
        inner._xla_wait_device_ops(inner._xla_real_devices([str(device)]))

    def mark_step(self, device: torch.device) -> None:
        inner = self.runtime()._XLAC
        with self._compiling:
            inner._xla_step_marker(str(device), [], wait=False, reset_scope=True)

    def rng_state(self, device: torch.device) -> torch.Tensor:
        seed = self.runtime()._XLAC._xla_get_rng_seed(str(device))
        # As bytes, like the generator states of other families.
        return torch.tensor([seed], dtype=torch.uint64, device="cpu").view(torch.uint8)

    def set_rng_state(self, state: torch.Tensor, device: torch.device) -> None:
        self.runtime()._XLAC._xla_set_rng_seed(int(state.view(torch.uint64).item()), str(device))

    def seeded_state(self, seed: int, device: torch.device) -> torch.Tensor:
        return torch.tensor([seed], dtype=torch.uint64, device="cpu").view(torch.uint8)

    def memory(self, device: torch.device) -> int:
        if hardware() == CPU:
            # All virtual devices of a process share its memory.
            return int(psutil.Process().memory_info().rss)
        return int(self.runtime()._XLAC._xla_memory_info(str(device))["bytes_used"])

    def matmul_precision(self) -> str:
        return str(self.runtime()._XLAC._xla_get_mat_mul_precision())

    def set_matmul_precision(self, precision: str) -> None:
        if precision not in ("default", "highest", "high"):
            raise ValueError(f"precision={precision!r} does not exist; choose default, highest or high")
        self.runtime()._XLAC._xla_set_mat_mul_precision(precision)

    def counters(self) -> dict[str, int]:
        if self._xla is None:
            return {}
        inner = self._xla._XLAC
        compiling = inner._xla_metric_data("CompileTime") or (0, 0)  # samples, and their total in nanoseconds
        return {
            "graphs compiled": inner._xla_counter_value("UncachedCompile") or 0,
            "ms of compiling": int(compiling[1] / 1e6),
            "graphs found compiled": inner._xla_counter_value("CachedCompile") or 0,
        }

    def unsupported_reason(self, feature: Feature) -> str | None:
        return _LACKS.get(feature)

    def runtime(self) -> Any:
        """The module torch_xla, with its runtime set up for the requested devices; UnisonoError if that fails."""
        if self._xla is None:
            with self._loading:
                self._xla = self._xla or load_torch_xla()
        return self._xla


def _try_backward(device: torch.device) -> None:
    """Record a backward pass, which costs nothing, to check whether torch's autograd knows the device."""
    with torch.enable_grad():
        loss = torch.zeros((), device=device, requires_grad=True) * 2
        try:
            loss.backward()
        except RuntimeError as error:
            raise UnisonoError(
                f"torch's autograd does not know {device}: the first backward pass of this process came before the XLA "
                "runtime; call unisono.compat.placement.Device.default_xla() at the beginning of the program"
            ) from error


@cache
def _guard_process_groups() -> torch.library.Library:
    """Make process groups refuse XLA tensors, once: gloo would silently reduce a copy. Active as long as its result
    exists."""
    guard = torch.library.Library("c10d", "IMPL")
    for schema in all_schemas():
        if schema.name.startswith("c10d::"):
            name = schema.name.removeprefix("c10d::")
            guard.impl(name, partial(_refuse_group, name.strip("_")), "XLA")
    return guard


def _refuse_group(name: str, *args: Any, **kwargs: Any) -> Any:
    raise TypeError(
        f"torch.distributed's {name} got an XLA tensor, which process groups do not reduce: it would stay as it is, "
        "without an error; call unisono.all_reduce and its relatives, or pass a copy in main memory (tensor.cpu())"
    )


def _check_fit(leaf: Any) -> Any:
    """Return the leaf if XLA supports it; TypeError if not."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if leaf.layout is not torch.strided or leaf.is_nested or leaf.is_quantized or leaf.is_meta:
        raise TypeError(
            f"a batch holds a tensor of layout {leaf.layout} (nested: {leaf.is_nested}, quantized: "
            f"{leaf.is_quantized}, meta: {leaf.is_meta}), and XLA supports plain dense ones only; convert it"
        )
    if leaf.dtype in _UNFIT:
        raise TypeError(
            f"a batch holds a tensor of {leaf.dtype}, which XLA would take for another; {_UNFIT[leaf.dtype]}"
        )
    return leaf


backend_class = XlaBackend
