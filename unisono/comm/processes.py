"""Ranks as processes: torch.distributed does the work, this file keeps the law.

What is added to the process group: the same checks on every rank, "mean" in every backend, types that gloo lacks (what
is only moved travels as bytes, what is reduced in a wider type), and the *reason* when a world breaks. gloo wakes the
peers of a dead rank with a bare `RuntimeError` about a socket, so a rank that fails or leaves first writes why into the
store, and whoever is woken looks there. Where a rank has waited in vain, it looks up who has not come (`arrivals`).

That all ranks do the same is known before the transport is touched: on one machine by notes in shared memory
(`arrivals`). Elsewhere announcements are compared, and with `is_checked` all calls: by a reduction of two numbers,
whose least and greatest tell whether all ranks do the same; only where they do not are their deeds exchanged.

*Threads:* the rank's own thread; for `abort`, `current` and `num_calls` any thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from unisono.comm.arrivals import SharedArrivals, arrivals_in
from unisono.comm.operations import (
    Announcement,
    Call,
    Entry,
    broken,
    check_reduction,
    check_root,
    check_scatter,
    check_tensor,
    deed_of,
    departure,
    digest_of,
    left,
    mismatch_error,
    name_ranks,
    pack,
    unpack,
)
from unisono.errors import BrokenWorldError, UnisonoError
from unisono.outcome import Outcome
from unisono.protocols import ReduceOp

R = TypeVar("R")

_TORCH_OPS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,
    "product": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
}
_WIDER = {torch.int16: torch.int32}  # gloo has no 16 bit integers
_ADVICE = "if none has failed, the ranks called different collectives, and join_world(checked=True) names the calls"
_ADVICE_SHARED = "if none has failed, the ranks called different collectives of torch's own, which nobody compares"
_FAILURE, _DEPARTED = "unisono/failure", "unisono/departed/{}"


class ProcessCommunicator:
    """A rank of the default process group.

    Args:
        store: where ranks leave the reason of a failure; None when the group was made by somebody else.
        device: where barriers and objects travel, the rank's own device.
        is_checked: compare every call before it runs where ranks share no memory, at the price of one more small
            collective each. Announcements are compared in any case.
        owns_group: whether `leave` destroys the process group.

    Attributes:
        num_calls: how many collectives this rank has entered.
    """

    def __init__(
        self,
        device: torch.device,
        store: dist.distributed_c10d.Store | None = None,
        is_checked: bool = False,
        owns_group: bool = True,
    ) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self._device = device
        self._store = store
        self._is_checked = is_checked
        self._owns_group = owns_group
        self._broken: tuple[str, BaseException | None] | None = None
        self._has_left = False
        self._call: Call | None = None
        self._last: Entry = Announcement("its first collective")
        self.num_calls = 0
        self._arrivals = arrivals_in(store, self.rank, self.size, is_checked)

    @property
    def current(self) -> str | None:
        """The collective that this rank is in, as `all_reduce(float32[10], 'sum')`; None outside of any."""
        return None if (call := self._call) is None else str(call)

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> torch.Tensor:
        check_reduction(tensor, op)
        return self._run(Call.on("all_reduce", tensor, op), lambda: self._reduce(tensor, op))

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        check_tensor(tensor, "all_gather")

        def gather() -> list[torch.Tensor]:
            sent = _as_bytes(tensor)
            parts = [torch.empty_like(sent) for _ in range(self.size)]
            dist.all_gather(parts, sent)
            return [part.view(tensor.dtype).view(tensor.shape) for part in parts]

        return self._run(Call.on("all_gather", tensor), gather)

    def reduce_scatter(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> torch.Tensor:
        check_reduction(tensor, op, "reduce_scatter")
        check_scatter(tensor, self.size)

        def scatter() -> torch.Tensor:
            sent = _wire(tensor)
            part = torch.empty_like(sent[: len(sent) // self.size])
            dist.reduce_scatter(part, [piece.contiguous() for piece in sent.chunk(self.size)], _TORCH_OPS[op])
            return (part.div_(self.size) if op == "mean" else part).to(tensor.dtype)

        return self._run(Call.on("reduce_scatter", tensor, op), scatter)

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> torch.Tensor:
        check_tensor(tensor, "broadcast")
        check_root(root, self.size)

        def send() -> torch.Tensor:
            sent = _as_bytes(tensor)
            dist.broadcast(sent, root)
            return _write_back(tensor, sent.view(tensor.dtype).view(tensor.shape))

        return self._run(Call.on("broadcast", tensor, root), send)

    def all_gather_object(self, value: Any) -> list[Any]:
        data = pack(value)
        return [unpack(each) for each in self._run(Call("all_gather_object"), lambda: self._gather_bytes(data))]

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        check_root(root, self.size)
        slot = [pack(value) if self.rank == root else None]
        self._run(
            Call("broadcast_object", argument=root),
            lambda: dist.broadcast_object_list(slot, root, device=self._device),
        )
        data = slot[0]
        assert data is not None
        return unpack(data)

    def barrier(self) -> None:
        self._run(Call("barrier"), self._meet)

    def meet(self, call: Call) -> None:
        """Return when all ranks have come to `call`, which somebody else's transport is to serve.

        Raises:
            BrokenWorldError, CollectiveMismatchError: as for that collective.
        """
        self._run(call, self._meet)

    def announce(self, purpose: str) -> None:
        if self._has_left or self._broken is not None or not isinstance(self._arrivals, SharedArrivals):
            self._run(Announcement(purpose), lambda: None)
        else:  # nothing is sent
            self._enter(Announcement(purpose))

    def explain(self, error: BaseException) -> BrokenWorldError:
        """What an error of the transport, raised past this communicator, is in our words."""
        message, cause = self._broken or self._reason(error)
        explained = broken(self.rank, self._last, message).with_traceback(error.__traceback__)
        explained.__cause__ = cause or error
        return explained

    def abort(self, cause: BaseException) -> None:
        if self._broken is None:
            self._broken = (f"rank {self.rank} failed with {type(cause).__name__}: {cause}", cause)
            if self._store is not None and not self._store.check([_FAILURE]):
                reason = Outcome.failure(cause, f"rank {self.rank}").to_bytes()
                self._store.set(_FAILURE, reason)  # type: ignore[arg-type]  # annotated as str, takes bytes
            self._destroy()

    def leave(self) -> None:
        if not self._has_left:
            self._has_left = True
            if self._store is not None:
                self._store.set(_DEPARTED.format(self.rank), "1")
            self._destroy()

    def _run(self, call: Entry, operation: Callable[[], R]) -> R:
        if self._has_left:
            raise left(self.rank, call)
        if self._broken is None:
            try:
                self._enter(call)
                with torch.no_grad():
                    if isinstance(call, Call) and 0 in (call.shape or ()):
                        self._meet()  # a transport that has nothing to send waits for nobody
                    return operation()
            except (UnisonoError, torch.OutOfMemoryError):
                raise
            except RuntimeError as error:
                if self._broken is None:
                    self._broken = self._reason(error)
            finally:
                self._call = None
        message, cause = self._broken
        raise broken(self.rank, call, message) from cause

    def _meet(self) -> None:
        # A reduction and not dist.barrier, which on gloo leaves a rank up to the time-out in doubt about a dead peer.
        dist.all_reduce(torch.zeros(1, device=self._device))

    def _enter(self, call: Entry) -> None:
        self._call, self._last = call if isinstance(call, Call) else None, call
        self.num_calls += 1
        deed = deed_of(call)
        others = self._arrivals.note(self.num_calls, deed) if self._arrivals is not None else {}
        if others:
            mismatch = mismatch_error({**others, self.rank: deed})
            self.abort(mismatch)  # who has come before waits in the transport
            raise mismatch
        if not isinstance(self._arrivals, SharedArrivals) and (self._is_checked or isinstance(call, Announcement)):
            self._compare(deed)

    def _compare(self, deed: str) -> None:
        digest = digest_of(deed)
        bounds = torch.tensor([digest, -digest], device=self._device)
        dist.all_reduce(bounds, dist.ReduceOp.MIN)
        least, negated_greatest = bounds.tolist()
        if least != -negated_greatest:
            deeds = [unpack(data) for data in self._gather_bytes(pack(deed))]
            mismatch = mismatch_error(dict(enumerate(deeds)))
            self._broken = (f"{type(mismatch).__name__}: {mismatch}", mismatch)
            raise mismatch

    def _reason(self, error: BaseException) -> tuple[str, BaseException]:
        """Why the transport failed: what a peer left in the store, else who is missing, and the transport's words."""
        with contextlib.suppress(RuntimeError):  # the store's own server may be gone with the peer
            if self._store is not None and self._store.check([_FAILURE]):
                peer = Outcome.from_bytes(self._store.get(_FAILURE))
                if peer.error is not None:
                    return f"{peer.where} failed with {type(peer.error).__name__}: {peer.error}", peer.error
            if self._store is not None and (gone := self._departed(self._store)):
                known = self._arrivals
                missing = known.missing(self.num_calls) if known else []
                first = [rank for rank in gone if rank in missing] or gone  # others came, and left as victims
                return departure({rank: known.last_deed(rank) if known else "" for rank in first}), error
            if self._arrivals is not None and (missing := self._arrivals.missing(self.num_calls)):
                return f"{name_ranks(missing)} did not come to it and may be gone, stuck or late ({error})", error
        advice = _ADVICE_SHARED if isinstance(self._arrivals, SharedArrivals) else _ADVICE
        return f"a peer is gone or did not answer ({error}); {advice}", error

    def _departed(self, store: dist.distributed_c10d.Store) -> list[int]:
        return [rank for rank in range(self.size) if store.check([_DEPARTED.format(rank)])]

    def _reduce(self, tensor: torch.Tensor, op: ReduceOp) -> torch.Tensor:
        sent = _wire(tensor)
        dist.all_reduce(sent, _TORCH_OPS[op])
        if op == "mean":
            sent.div_(self.size)
        return _write_back(tensor, sent)

    def _gather_bytes(self, data: bytes) -> list[bytes]:
        received: list[Any] = [None] * self.size
        dist.all_gather_object(received, data)
        return received

    def _destroy(self) -> None:
        if self._owns_group and dist.is_initialized():
            dist.destroy_process_group()


def is_of_transport(error: BaseException) -> bool:
    """Whether torch's process groups have raised it: for the user's own torch.distributed calls, or for DDP's."""
    if isinstance(error, dist.DistError):
        return True
    # A future tells the error in words alone.
    return isinstance(error, RuntimeError) and any(name in str(error) for name in ("/gloo/", "DistNetworkError: "))


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in plain memory, itself where it is that already: contiguous, with no conjugation left to apply."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def _wire(tensor: torch.Tensor) -> torch.Tensor:
    """What is reduced: the plain tensor, of a type that every process group has."""
    return _plain(tensor).to(_WIDER.get(tensor.dtype, tensor.dtype))


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """What is moved: the memory of the plain tensor, so that every type travels and every bit stays."""
    return _plain(tensor).reshape(-1).view(torch.uint8)


def _write_back(tensor: torch.Tensor, sent: torch.Tensor) -> torch.Tensor:
    return tensor if sent.data_ptr() == tensor.data_ptr() else tensor.copy_(sent)
