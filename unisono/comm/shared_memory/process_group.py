"""A torch process group whose collectives use the shared memory of one machine: `init_process_group("shm")`.

DistributedDataParallel, FSDP2, torch.distributed.checkpoint and the user's own torch.distributed calls use it like any
other group. All ranks compare their calls before any data is moved. gloo carries out what is rarely needed: messages
between two ranks, reductions to one, gather, scatter, all-to-all of unequal parts, sparse tensors, lists of tensors
that are reduced to one; and everything if ranks share no memory, as on several machines. Results, futures and kinds of
errors are gloo's.

A call that gloo does not carry out is complete when it returns, with `async_op` too: its work then waits for nothing.

*Threads:* any, one call at a time; `shutdown` and `abort` at any time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import (  # type: ignore[attr-defined] # torch re-exports some silently
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    BarrierOptions,
    BroadcastOptions,
    PrefixStore,
    ReduceScatterOptions,
    Store,
)

from unisono.comm.folding import fold_into
from unisono.comm.operations import HOST, Call, action_of
from unisono.comm.shared_memory.blocks import Blocks, bytes_of_blocks
from unisono.comm.shared_memory.calls import by_gloo_together, done, in_any_form, let_monitored_barrier_take
from unisono.comm.shared_memory.mapping import Mapping, map_together
from unisono.comm.shared_memory.meeting_point import MeetingPoint
from unisono.comm.tensor_forms import flat_of, plain, writable
from unisono.torch_private import DEVICE_TYPES, GET_BACKEND, GLOO_DEVICES, GLOO_TIMEOUT, GlooOptions, overrides

NAME = "shm"

_POLL_S = 0.001
_LOOPBACK = "127.0.0.1"  # the ranks share a machine

# torch's annotations are incomplete, and list some calls only as overloads.
_ProcessGroup: Any = dist.ProcessGroup
_Gloo: Any = dist.ProcessGroupGloo
_ReduceOp: Any = dist.ReduceOp.RedOpType

_OPS = {
    _ReduceOp.SUM: "sum",
    _ReduceOp.AVG: "mean",
    _ReduceOp.PRODUCT: "product",
    _ReduceOp.MIN: "min",
    _ReduceOp.MAX: "max",
    _ReduceOp.BAND: "and",
    _ReduceOp.BOR: "or",
    _ReduceOp.BXOR: "xor",
}


def register() -> None:
    """Register the group with torch, under its name."""
    if not hasattr(dist.Backend, NAME.upper()):
        dist.Backend.register_backend(NAME, _create, devices=[HOST.type])
        let_monitored_barrier_take(SharedMemoryGroup)


def _create(store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    # The memory is mapped on all ranks or on none, so all take the same branch.
    mapping = map_together(store, rank, size, bytes_of_blocks(size), timeout)
    if mapping is None:
        return _Gloo(store, rank, size, timeout=timeout)
    return SharedMemoryGroup(mapping, store, timeout)


class SharedMemoryGroup(_ProcessGroup):  # type: ignore[misc]
    """The group of ranks that map the same memory, and meet at `here`."""

    def __init__(self, mapping: Mapping, store: Store, timeout: timedelta) -> None:
        super().__init__(mapping.rank, mapping.size)
        self._store, self._timeout = store, timeout
        self.here = MeetingPoint(mapping, timeout)
        self._blocks = Blocks(mapping, self.here)
        self._gloo: Any = None
        self._creating_gloo = threading.Lock()
        self._name = self._description = ""

    @in_any_form(AllreduceOptions)
    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> Any:
        if len(tensors) != 1 or tensors[0].is_sparse:  # gloo reduces a list to one
            return self._allreduce_by_gloo(tensors, opts)
        op = _op_of(opts, tensors[0].dtype)
        return self._in_place("all_reduce", tensors, op, self._blocks.all_reduce, op)

    @in_any_form(AllreduceCoalescedOptions)
    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any) -> Any:
        if len({(each.dtype, each.layout) for each in tensors}) != 1 or tensors[0].is_sparse:
            return self._allreduce_coalesced_by_gloo(tensors, opts)  # it has an error for these
        op = _op_of(opts, tensors[0].dtype)
        together = torch.cat(list(map(flat_of, tensors)))  # a tensor that comes twice is reduced once
        self._in_place("all_reduce_coalesced", [together], op, self._blocks.all_reduce, op)
        for tensor, flat in zip(tensors, together.split([each.numel() for each in tensors]), strict=True):
            tensor.detach().copy_(flat.view(tensor.shape))
        return done(tensors)

    @in_any_form(BroadcastOptions)
    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> Any:
        root = opts.rootRank
        if len(tensors) != 1 or opts.rootTensor or not 0 <= root < self.size():
            return self._broadcast_by_gloo(tensors, opts)
        return self._in_place("broadcast", tensors, root, self._blocks.broadcast, root)

    @in_any_form(AllgatherOptions)
    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any) -> Any:
        if len(outputs) != 1 or len(inputs) != 1:
            return self._allgather_by_gloo(outputs, inputs, opts)
        parts, own = outputs[0], inputs[0]
        if len(parts) == self.size() and len({each.shape for each in parts}) > 1:
            return self._gather_unequal(parts, own)
        self._check_parts("all_gather", parts, own)
        self._gather("all_gather", outputs, inputs)
        return done(parts)

    def _gather_unequal(self, parts: Sequence[torch.Tensor], own: torch.Tensor) -> Any:
        """Gather parts of several shapes, as NCCL does, which some optimizers of matrices rely on."""
        place = parts[self.rank()]
        fits = torch.tensor([(place.shape, place.dtype) == (own.shape, own.dtype)], device=HOST)
        all_fit = torch.empty(self.size(), dtype=torch.bool, device=HOST)
        self.all_gather_single(all_fit, fits)  # or those that fit would wait for the rank that gets the error
        if not all_fit.all():
            raise RuntimeError(
                f"all_gather sends {list(own.shape)} of {own.dtype}, and this rank's part of the output is "
                f"{list(place.shape)} of {place.dtype}; the two differ on ranks "
                f"{[rank for rank, each in enumerate(all_fit.tolist()) if not each]}"
            )
        place.copy_(own)
        for root, part in enumerate(parts):
            self._in_place("all_gather", [part], root, self._blocks.broadcast, root)
        return done(parts)

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Any:
        return self.all_gather_single_coalesced([output], [tensor])

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Any:
        pieces = [self._pieces("all_gather_single", *each) for each in zip(outputs, inputs, strict=True)]
        self._gather("all_gather_single", pieces, inputs)
        return done([piece for each in pieces for piece in each])

    @in_any_form(ReduceScatterOptions)
    def reduce_scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any) -> Any:
        if len(outputs) != 1 or len(inputs) != 1:
            return self._reduce_scatter_by_gloo(outputs, inputs, opts)
        self._check_parts("reduce_scatter", inputs[0], outputs[0])
        return self._reduce_scatter(outputs, inputs, opts)

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Any:
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Any:
        parts = [
            self._pieces("reduce_scatter_single", plain(each), output)
            for each, output in zip(inputs, outputs, strict=True)
        ]
        return self._reduce_scatter(outputs, parts, opts)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_sizes: Sequence[int] = (),
        sizes: Sequence[int] = (),
        *opts: Any,
    ) -> Any:
        is_like = output.shape == tensor.shape and output.dtype == tensor.dtype
        if output_sizes or sizes or not is_like or not tensor.ndim or len(tensor) % self.size():
            return self._all_to_all_by_gloo(output, tensor, [*output_sizes], [*sizes], *opts)
        flat = flat_of(tensor)
        parts = flat.view(self.size(), len(flat) // self.size()).unbind()
        return self._in_place("all_to_all_single", [output], None, self._blocks.all_to_all, parts=[parts])

    @in_any_form(BarrierOptions)
    def barrier(self, opts: Any) -> Any:
        with self.here.lock:
            self._blocks.barrier("called barrier()")
        return done([])

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        limit = self.here.timeout if timeout is None else timeout
        try:
            with self.here.lock:
                self._blocks.barrier("called monitored_barrier()", limit.total_seconds())
        except dist.DistNetworkError as error:
            if not (missing := self.here.missing()):
                raise
            words = f"Ranks {', '.join(map(str, missing))}" if wait_all_ranks and missing[1:] else f"Rank {missing[0]}"
            raise RuntimeError(f"{words} failed to pass monitoredBarrier in {limit}") from error  # in gloo's words

    # Names of these methods in torch before 2.11.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # What gloo carries out.

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        return self._to_peer(rank).send(tensors, rank, tag)

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        return self._to_peer(rank).recv(tensors, rank, tag)

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int) -> Any:
        return self._by_gloo().recv_anysource(tensors, tag)

    reduce = by_gloo_together("reduce")
    gather = by_gloo_together("gather")
    scatter = by_gloo_together("scatter")
    alltoall = by_gloo_together("alltoall")
    allgather_coalesced = by_gloo_together("allgather_coalesced")
    _all_to_all_by_gloo = by_gloo_together("alltoall_base")
    _allreduce_by_gloo = by_gloo_together("allreduce")
    _allreduce_coalesced_by_gloo = by_gloo_together("allreduce_coalesced")
    _broadcast_by_gloo = by_gloo_together("broadcast")
    _allgather_by_gloo = by_gloo_together("allgather")
    _reduce_scatter_by_gloo = by_gloo_together("reduce_scatter")

    @property
    @overrides(DEVICE_TYPES)
    def _device_types(self) -> list[torch.device]:
        return [HOST]

    @overrides(GET_BACKEND)
    def _get_backend(self, device: torch.device) -> Any:
        if device.type != HOST.type:
            raise RuntimeError(f"No backend type associated with device type {device.type}")
        return self._by_gloo()

    def set_timeout(self, timeout: timedelta) -> None:
        """Limit how long a call waits for a rank, from now on."""
        self._timeout = self.here.timeout = timeout
        if self._gloo is not None:
            self._gloo.set_timeout(timeout)

    def shutdown(self) -> None:
        self.here.close()
        self._close_gloo()

    def abort(self) -> None:
        self.here.close(is_broken=True)
        self._close_gloo()

    # The base class asks its backends for these; this group has none.
    def getBackendName(self) -> str:  # noqa: N802
        return NAME

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def setGroupDesc(self, text: str) -> None:  # noqa: N802
        self._description = text

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._description

    def _gather(self, name: str, outputs: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor]) -> None:
        flats = list(map(flat_of, inputs))
        wanted = [list(map(writable, pieces)) for pieces in outputs]
        with self.here.lock:
            try:
                for sent, pieces, flat, tensors in zip(inputs, wanted, flats, outputs, strict=True):
                    self._blocks.all_gather(_describe_call(name, sent.shape, sent.dtype, None), pieces, flat)
                    for tensor, piece in zip(tensors, pieces, strict=True):
                        if piece.data_ptr() != tensor.data_ptr():
                            tensor.detach().copy_(piece.view(tensor.shape))
            except BaseException:  # the ranks are out of step
                self.here.close(is_broken=True)
                raise

    def _reduce_scatter(
        self, outputs: Sequence[torch.Tensor], parts: Sequence[Sequence[torch.Tensor]], opts: Any
    ) -> Any:
        op = _op_of(opts, outputs[0].dtype)
        flats = [list(map(flat_of, each)) for each in parts]
        return self._in_place("reduce_scatter", outputs, op, self._blocks.reduce_scatter, op, parts=flats)

    def _in_place(
        self,
        name: str,
        tensors: Sequence[torch.Tensor],
        argument: str | int | None,
        operation: Callable[..., None],
        *arguments: Any,
        parts: Sequence[Sequence[torch.Tensor]] = (),
    ) -> Any:
        """Change the tensors in place, by an operation on a one-dimensional view of each, with its parts."""
        flats = list(map(writable, tensors))  # all are checked before anything is sent
        with self.here.lock:
            try:
                for number, (tensor, flat) in enumerate(zip(tensors, flats, strict=True)):
                    action = _describe_call(name, tensor.shape, tensor.dtype, argument)
                    operation(action, flat, *parts[number : number + 1], *arguments)
                    if flat.data_ptr() != tensor.data_ptr():
                        tensor.detach().copy_(flat.view(tensor.shape))
            except BaseException:  # the ranks are out of step
                self.here.close(is_broken=True)
                raise
        return done(tensors)

    def _pieces(self, name: str, whole: torch.Tensor, piece: torch.Tensor) -> Sequence[torch.Tensor]:
        """The parts of a tensor, one per rank, each with that shape."""
        if whole.dtype != piece.dtype or whole.numel() != self.size() * piece.numel():
            raise RuntimeError(
                f"{name} between {self.size()} ranks needs {self.size()} times {piece.numel()} elements of "
                f"{piece.dtype}, got {whole.numel()} of {whole.dtype}"
            )
        return whole.detach().view(self.size(), *piece.shape).unbind()

    def _check_parts(self, name: str, parts: Sequence[torch.Tensor], whole: torch.Tensor) -> None:
        """Before anything is sent, check that there is one part per rank, each of the shape and type that a rank sends
        or receives."""
        if [(part.shape, part.dtype) for part in parts] != [(whole.shape, whole.dtype)] * self.size():
            given = ", ".join(f"{list(part.shape)} of {part.dtype}" for part in parts)
            raise RuntimeError(
                f"{name} between {self.size()} ranks needs as many parts of shape {list(whole.shape)} and "
                f"{whole.dtype}, got {given or 'none'}"
            )

    def _to_peer(self, rank: int) -> Any:
        """gloo's group, once that peer has created its own: gloo would wait for a peer that has already left."""
        gloo = self._by_gloo()
        deadline = time.monotonic() + self._timeout.total_seconds()
        while 0 <= rank < self.size() and not self.here.is_connected(rank):
            self.here.check_presence(rank)
            if time.monotonic() > deadline:
                raise dist.DistNetworkError(f"waited {self._timeout} for rank {rank} to connect")
            time.sleep(_POLL_S)
        return gloo

    def _by_gloo(self) -> Any:
        """gloo's group, which connects on first use."""
        with self._creating_gloo:
            if self._gloo is None:
                options = GlooOptions()
                setattr(options, GLOO_TIMEOUT, self._timeout)
                setattr(options, GLOO_DEVICES, [_Gloo.create_device(hostname=_LOOPBACK, lazy_init=True)])
                self._gloo = _Gloo(PrefixStore("gloo", self._store), self.rank(), self.size(), options)
                self.here.note_connected()
        return self._gloo

    def _close_gloo(self) -> None:
        if self._gloo is not None:
            self._gloo.shutdown()


@lru_cache(4096)
def _describe_call(name: str, shape: tuple[int, ...], dtype: torch.dtype, argument: str | int | None) -> str:
    return action_of(Call(name, tuple(shape), dtype, argument))


def _op_of(opts: Any, dtype: torch.dtype) -> str:
    op = _ReduceOp.SUM if opts is None else opts.reduceOp.op
    if op not in _OPS:
        raise RuntimeError(f"the process group {NAME!r} has no {op}; it has {', '.join(_OPS.values())}")
    _try_reduction(_OPS[op], dtype)
    return _OPS[op]


@lru_cache(512)
def _try_reduction(op: str, dtype: torch.dtype) -> None:
    """Raise what torch raises if it cannot reduce this type so, before anything is sent."""
    one = torch.ones(1, dtype=dtype, device=HOST)
    fold_into(one, [one, one], op)
