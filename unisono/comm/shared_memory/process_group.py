"""A torch process group whose collectives use the shared memory of one machine: `init_process_group("shm")`.

DistributedDataParallel, FSDP2, torch.distributed.checkpoint and the user's own torch.distributed calls use it like any
other group. All ranks compare their calls before any data is moved. gloo carries out what is needed rarely: messages
between two ranks, reductions to one, gather, scatter, all-to-all, sparse tensors; and everything if ranks share no
memory, as on several machines.

A call is complete when it returns, with `async_op` too: its work then waits for nothing.

*Threads:* the rank's own thread, or torch's thread for the backward pass; `shutdown` and `abort` in any.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from unisono.comm.operations import Call, action_of
from unisono.comm.shared_memory.blocks import Blocks, bytes_of_blocks
from unisono.comm.shared_memory.mapping import Mapping, map_together
from unisono.comm.shared_memory.meeting_point import MeetingPoint
from unisono.torch_private import GLOO_DEVICES, GLOO_TIMEOUT, GlooOptions, create_work_from_future
from unisono.tree import tensors, tree_map

NAME = "shm"

_CAME = "gloo/came/{}"
_POLL_S = 0.001
_LOOPBACK = "127.0.0.1"  # the ranks share a machine

# torch's annotations are incomplete, and list some calls only as overloads.
_ProcessGroup: Any = dist.ProcessGroup
_Gloo: Any = dist.ProcessGroupGloo
_ReduceOp: Any = dist.ReduceOp.RedOpType

_HOST = torch.default_generator.device.type
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
        dist.Backend.register_backend(NAME, _create, devices=[_HOST])


def _create(store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    # The memory is mapped on all ranks or on none, so all take the same branch.
    mapping = map_together(store, rank, size, bytes_of_blocks(size), timeout)
    if mapping is None:
        return _Gloo(store, rank, size, timeout=timeout)
    return SharedMemoryGroup(mapping, store, timeout)


def _done(tensors: Any) -> Any:
    """Work that was completed before it is returned."""
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(tensors)
    return create_work_from_future(future)


def _by_gloo_together(name: str) -> Callable[..., Any]:
    """A collective that gloo carries out, after all ranks have compared their calls."""

    def call(self: SharedMemoryGroup, *arguments: Any) -> Any:
        self._blocks.barrier(f"called {name}()")
        # gloo reads and writes memory without regard to strides.
        copies = [
            (each, each.contiguous()) for each in tensors(arguments) if not (each.is_sparse or each.is_contiguous())
        ]
        dense = {id(each): copy for each, copy in copies}
        work = getattr(self._by_gloo(), name)(*tree_map(lambda leaf: dense.get(id(leaf), leaf), list(arguments)))
        if copies:
            work.wait()
            for each, copy in copies:
                each.copy_(copy)
        return work

    return call


class SharedMemoryGroup(_ProcessGroup):  # type: ignore[misc]
    """The group of ranks that map the same memory, and meet at `here`."""

    def __init__(self, mapping: Mapping, store: Store, timeout: timedelta) -> None:
        super().__init__(mapping.rank, mapping.size)
        self._store, self._timeout = store, timeout
        self.here = MeetingPoint(mapping, timeout)
        self._blocks = Blocks(mapping, self.here)
        self._gloo: Any = None
        self._name = self._description = ""

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        if tensors[0].is_sparse:
            return self._sparse_allreduce(tensors, opts)
        op = _op_of(opts)
        return self._in_place("all_reduce", tensors, op, self._blocks.all_reduce, op)

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> Any:
        return self._in_place("broadcast", tensors, opts.rootRank, self._blocks.broadcast, opts.rootRank)

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> Any:
        return self._gather("all_gather", outputs, inputs)

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Any:
        return self.all_gather_single_coalesced([output], [tensor])

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Any:
        pieces = [output.view(self.size(), -1).unbind() for output in outputs]
        return self._gather("all_gather_single", pieces, inputs)

    def reduce_scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any = None) -> Any:
        op = _op_of(opts)
        parts = [list(map(_flat, each)) for each in inputs]
        for output, each in zip(outputs, parts, strict=True):
            self._check_parts("reduce_scatter", each, output)
        return self._in_place("reduce_scatter", outputs, op, self._blocks.reduce_scatter, op, parts=parts)

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Any:
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Any:
        return self.reduce_scatter(outputs, [[*_flat(each).view(self.size(), -1).unbind()] for each in inputs], opts)

    def barrier(self, opts: Any = None) -> Any:
        self._blocks.barrier("called barrier()")
        return _done([])

    # Names of these methods in torch before 2.11.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # What gloo carries out.

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        return self._to_peer(rank).send(tensors, rank, tag)

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        return self._to_peer(rank).recv(tensors, rank, tag)

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int) -> Any:
        return self._by_gloo().recv_anysource(tensors, tag)

    reduce = _by_gloo_together("reduce")
    gather = _by_gloo_together("gather")
    scatter = _by_gloo_together("scatter")
    alltoall = _by_gloo_together("alltoall")
    alltoall_base = all_to_all_single = _by_gloo_together("alltoall_base")
    _sparse_allreduce = _by_gloo_together("allreduce")

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

    def _gather(self, name: str, outputs: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor]) -> Any:
        flats = list(map(_flat, inputs))
        wanted = [list(map(_flat, pieces)) for pieces in outputs]
        for pieces, flat in zip(wanted, flats, strict=True):
            self._check_parts(name, pieces, flat)
        try:
            for sent, pieces, flat, tensors in zip(inputs, wanted, flats, outputs, strict=True):
                self._blocks.all_gather(_describe_call(name, sent.shape, sent.dtype, None), pieces, flat)
                for tensor, piece in zip(tensors, pieces, strict=True):
                    if piece.data_ptr() != tensor.data_ptr():
                        _write_back(tensor, piece)
        except BaseException:  # the ranks are out of step
            self.here.close(is_broken=True)
            raise
        return _done(outputs)

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
        flats = list(map(_flat, tensors))  # all are checked before anything is sent
        try:
            for number, (tensor, flat) in enumerate(zip(tensors, flats, strict=True)):
                action = _describe_call(name, tensor.shape, tensor.dtype, argument)
                operation(action, flat, *parts[number : number + 1], *arguments)
                if flat.data_ptr() != tensor.data_ptr():
                    _write_back(tensor, flat)
        except BaseException:  # the ranks are out of step
            self.here.close(is_broken=True)
            raise
        return _done(tensors)

    def _check_parts(self, name: str, parts: Sequence[torch.Tensor], whole: torch.Tensor) -> None:
        """Before anything is sent, check that there is one part per rank, each of the size that a rank sends or
        receives."""
        if [part.numel() for part in parts] != [whole.numel()] * self.size():
            sizes = ", ".join(str(part.numel()) for part in parts)
            raise ValueError(
                f"{name} between {self.size()} ranks needs as many parts of {whole.numel()} elements each, got {sizes}"
            )

    def _to_peer(self, rank: int) -> Any:
        """gloo's group, once that peer has created its own: gloo would wait for one that has already left."""
        gloo = self._by_gloo()
        while not self._store.check([_CAME.format(rank)]):
            self.here.check_presence(rank)
            time.sleep(_POLL_S)
        return gloo

    def _by_gloo(self) -> Any:
        """gloo's group, which connects on first use."""
        if self._gloo is None:
            options = GlooOptions()
            setattr(options, GLOO_TIMEOUT, self._timeout)
            setattr(options, GLOO_DEVICES, [_Gloo.create_device(hostname=_LOOPBACK, lazy_init=True)])
            self._gloo = _Gloo(PrefixStore("gloo", self._store), self.rank(), self.size(), options)
            self._store.set(_CAME.format(self.rank()), "1")
        return self._gloo

    def _close_gloo(self) -> None:
        if self._gloo is not None:
            self._gloo.shutdown()


@lru_cache(4096)
def _describe_call(name: str, shape: tuple[int, ...], dtype: torch.dtype, argument: str | int | None) -> str:
    return action_of(Call(name, tuple(shape), dtype, argument))


def _op_of(opts: Any) -> str:
    op = _ReduceOp.SUM if opts is None else opts.reduceOp.op
    if op not in _OPS:
        raise TypeError(f"the process group {NAME!r} has no {op}; it has {', '.join(_OPS.values())}")
    return _OPS[op]


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's memory as one dimension; a copy if it has gaps or another order."""
    if not tensor.is_cpu or tensor.layout is not torch.strided:
        raise TypeError(
            f"the process group {NAME!r} takes dense tensors in main memory, got {tensor.layout} on {tensor.device}; "
            "unisono.all_reduce and its relatives copy tensors of the rank's device there"
        )
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)


def _write_back(tensor: torch.Tensor, flat: torch.Tensor) -> None:
    tensor.detach().copy_(flat.view(tensor.shape))
