"""Ranks as processes: torch.distributed moves the data, this file enforces the rules.

It adds to the process group: the same checks on every rank, "mean" in every backend, dtypes that gloo lacks (data that
is only moved is sent as bytes), and the *reason* when a world breaks. gloo wakes the peers of a dead rank with a bare
`RuntimeError` about a socket, so a rank that fails or leaves first writes the reason to the store, and a rank that is
woken looks there. NCCL wakes no rank: there a thread checks the store while the device is busy (`device_watch`).

A group's part for main memory ("cpu:gloo,cuda:nccl") is used for what is small: flags, counts, objects and barriers. So
no rank waits for its device. Without it, tensors in main memory are sent by way of the rank's device.

That all ranks make the same call is verified before any data is used: on one machine by notes in shared memory, once
per collective (`shared_memory/notes.py`). Elsewhere by a reduction of two numbers, whose minimum and maximum show
whether all ranks do the same; only if they do not, they exchange their actions. Where the device's data has a transport
of its own, an announcement only begins that reduction, and its result is read before this rank's next call: no step
waits for it. A group without main memory, whose host would wait for its device, compares announcements only.

*Threads:* the rank's own thread; for `abort`, `current`, `num_calls` and `progress` any thread.
"""

from __future__ import annotations

import contextlib
import pickle
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from unisono.comm.comparison import Comparison
from unisono.comm.device_watch import DeviceWatch, wake
from unisono.comm.group_counts import count_group, forget_group, num_begun, types_in
from unisono.comm.operations import (
    END,
    HOST,
    Call,
    action_of,
    broken,
    check_reduction,
    check_root,
    check_scatter,
    check_tensor,
    departure,
    left,
    mismatch_error,
    name_ranks,
)
from unisono.comm.pickling import dumps
from unisono.comm.reasons import Reasons, is_of_own_device
from unisono.comm.sealing import seal, tensor_of, unseal
from unisono.comm.shared_memory.meeting_point import MeetingPoint
from unisono.comm.shared_memory.process_group import SharedMemoryGroup
from unisono.comm.shutdown import end_group
from unisono.comm.stacks import describe_call, frames_of_error, own_frames
from unisono.comm.tensor_forms import TORCH_OPS, as_bytes, wire, write_back
from unisono.errors import BrokenWorldError, CollectiveMismatchError, UnisonoError
from unisono.protocols import Backend, ReduceOp

T = TypeVar("T")
R = TypeVar("R")

_ADVICE = (
    "if none has failed, the ranks called different collectives of torch itself, or share a GPU, which NCCL refuses "
    "(process_group='gloo' does not)"
)


class ProcessCommunicator:
    """A rank of the default process group."""

    def __init__(
        self,
        device: torch.device,  # the rank's own
        # Where ranks leave the reason of a failure; None if the group was created elsewhere.
        store: dist.distributed_c10d.Store | None = None,
        owns_group: bool = True,  # whether `leave` destroys the process group
        backend: Backend | None = None,  # the device's family, if its tensors are sent without a copy in main memory
        here: MeetingPoint | None = None,  # where ranks that share memory meet before each call, if not in the group
    ) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self._device = device
        self._reasons = Reasons(store, self.rank, self.size)
        self._owns_group = owns_group
        self._broken: tuple[str, BaseException] | None = None
        self._has_left = False
        self._last = Call("", purpose="its first collective")
        self._is_inside = False
        self.name = ""  # of this world, once all ranks have agreed on one, where messages are signed
        self._num_sent = 0
        self._comparison = Comparison(self.gather_bytes)
        self.num_calls = 0  # collectives that this rank has entered
        self._own_here = here
        self._thread = threading.get_ident()  # which `wake` interrupts when the watch ends the device's wait
        self._watch: DeviceWatch | None = None
        if store is not None and backend is not None and backend.mark(device) is not None:
            count_group(dist.group.WORLD)
            self._watch = DeviceWatch(backend, device, partial(num_begun, device.type), self._end_wait)

    @property
    def current(self) -> str | None:
        """What this rank waits for: a collective, as `all_reduce(float32[10], 'sum')`, or its device, or None."""
        if self._is_inside and self._last.name:
            return str(self._last)
        watch = self._watch
        return f"the device's work since {self._last}" if watch is not None and watch.is_behind else None

    def num_begun(self) -> int:
        """A number that grows with each collective begun in this process, by any caller."""
        return self.num_calls + num_begun()

    @property
    def progress(self) -> int:
        """`num_begun`, and the number of those that devices have finished."""
        watch = self._watch
        return self.num_begun() + (0 if watch is None else watch.num_done)

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> torch.Tensor:
        check_reduction(tensor, op)

        def reduce() -> torch.Tensor:
            sent = self._on_host(wire(tensor))
            dist.all_reduce(sent, TORCH_OPS[op])
            return write_back(tensor, sent.div_(self.size) if op == "mean" else sent)

        return self._run(self._call_on("all_reduce", tensor, op), reduce)

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        check_tensor(tensor, "all_gather")

        def gather() -> list[torch.Tensor]:
            sent = self._on_host(as_bytes(tensor))
            parts = [torch.empty_like(sent) for _ in range(self.size)]
            dist.all_gather(parts, sent)
            return [part.to(tensor.device).view(tensor.dtype).view(tensor.shape) for part in parts]

        return self._run(self._call_on("all_gather", tensor), gather)

    def reduce_scatter(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> torch.Tensor:
        check_reduction(tensor, op, "reduce_scatter")
        check_scatter(tensor, self.size)

        def scatter() -> torch.Tensor:
            sent = self._on_host(wire(tensor))
            part = torch.empty_like(sent[: len(sent) // self.size])
            dist.reduce_scatter(part, [piece.contiguous() for piece in sent.chunk(self.size)], TORCH_OPS[op])
            return (part.div_(self.size) if op == "mean" else part).to(tensor.device, tensor.dtype)

        return self._run(self._call_on("reduce_scatter", tensor, op), scatter)

    def all_to_all(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        check_tensor(tensor, "all_to_all")
        check_scatter(tensor, self.size, "all_to_all")

        def exchange() -> list[torch.Tensor]:
            sent = self._on_host(as_bytes(tensor))
            received = torch.empty_like(sent)
            dist.all_to_all_single(received, sent)
            return list(received.to(tensor.device).view(tensor.dtype).view(tensor.shape).chunk(self.size))

        return self._run(self._call_on("all_to_all", tensor), exchange)

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> torch.Tensor:
        check_tensor(tensor, "broadcast")
        check_root(root, self.size)

        def send() -> torch.Tensor:
            sent = self._on_host(as_bytes(tensor))
            dist.broadcast(sent, root)
            return write_back(tensor, sent.view(tensor.dtype).view(tensor.shape))

        return self._run(self._call_on("broadcast", tensor, root), send)

    def all_gather_object(self, value: Any) -> list[Any]:
        # Pickled before ranks meet: an object that cannot be pickled is an error on this rank alone.
        data = dumps(value)
        return [pickle.loads(each) for each in self._run(Call("all_gather_object"), lambda: self.gather_bytes(data))]

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        check_root(root, self.size)
        data = dumps(value) if self.rank == root else b""
        return pickle.loads(
            self._run(Call("broadcast_object", argument=root), lambda: self._broadcast_bytes(data, root))
        )

    def barrier(self) -> None:
        self._run(Call("barrier"), self._meet_by_reduction)

    def meet(self, call: Call, value: T, combine: Callable[[list[T]], R]) -> R:
        """Wait until all ranks have arrived at `call`; return `combine([value])`, where another transport carries it
        out. Raises what that collective raises."""
        self._run(call, self._meet_by_reduction)
        return combine([value])

    def announce(self, purpose: str) -> None:
        try:
            self._run(Call("", purpose=purpose))
        except ValueError:  # torch's, without a group: a script may have ended it, and evaluate on one rank
            if dist.is_initialized():
                raise

    def compare_ends(self) -> None:
        """Raise CollectiveMismatchError if this rank, which ends, or another has begun a loop alone since the last
        collective. On one machine only, where it waits for nobody."""
        if self._here is not None:
            with contextlib.suppress(BrokenWorldError):
                self.announce(END)

    def explain(self, error: BaseException) -> BrokenWorldError:
        """Translate an error of the transport, raised outside this communicator, into a BrokenWorldError with the
        reason."""
        message, cause = self._broken or self._reason(error)
        explained = broken(self.rank, describe_call(frames_of_error(error)) or self._last, message)
        explained.__cause__ = None if cause is error else cause  # the same frames again
        return explained.with_traceback(error.__traceback__)

    def abort(self, cause: BaseException) -> None:
        if self._broken is None:
            self._broken = (f"rank {self.rank} failed with {type(cause).__name__}: {cause}", cause)
            self._reasons.leave_failure(cause)
            self._end(is_broken=True)

    def leave(self) -> None:
        if not self._has_left:
            self._has_left = True
            self._reasons.leave_departure()
            self._end()

    def _run(self, call: Call, operation: Callable[[], R] | None = None) -> R:
        if self._has_left:
            raise left(self.rank, call)
        if self._broken is None:
            try:
                self._enter(call)
                if operation is None:  # an announcement
                    return None  # type: ignore[return-value]
                with torch.no_grad():
                    if 0 in (call.shape or ()):
                        self._meet_by_reduction()  # a transport with nothing to send does not wait for peers
                    return operation()
            except RuntimeError as error:
                self._note_failure(error)
            finally:
                self._is_inside = False
                if call.name and (here := self._here) is not None:
                    here.name_next("")  # the call may have failed before the group was called
        assert self._broken is not None, "a call that has failed notes the reason"
        raise self._error(call, *self._broken)

    def _note_failure(self, error: RuntimeError) -> None:
        """Note why a call has failed; raise errors that already give the reason."""
        if isinstance(error, CollectiveMismatchError):
            # Every rank has found it, and none waits in the transport, so no peer has to learn it.
            self._broken = self._broken or (f"{type(error).__name__}: {error}", error)
            raise error
        # A device-side assert of this rank is not the fault of a peer.
        if isinstance(error, UnisonoError) or is_of_own_device(error):
            raise error
        # `abort` or the watch, on another thread, sets the reason before it ends the group.
        if self._broken is None:
            self._broken = self._reason(error)

    def _error(self, call: Call, message: str, cause: BaseException) -> BrokenWorldError:
        error = broken(self.rank, call, message, describe_call(own_frames()))
        error.__cause__ = cause
        return error

    def _call_on(self, name: str, tensor: torch.Tensor, argument: str | int | None = None) -> Call:
        """Describe the call, which must be on a tensor that the group can send; TypeError, before anything is sent."""
        own, its = self._device, tensor.device
        is_foreign = its.type == own.type and not tensor.is_cpu and its != own
        if is_foreign or not (tensor.is_cpu or its.type in self._types):
            raise TypeError(
                f"{name} got a tensor on {its}, and rank {self.rank} sends tensors on {own} or in main memory; pass "
                f"tensor.to({str(own)!r})"
            )
        return Call.on(name, tensor, argument, "" if its.type == own.type else its.type)

    @property
    def _types(self) -> frozenset[str]:
        """The device types whose tensors the default group accepts; not constant, since a script may replace the
        group. Without a group, the call fails for another reason."""
        return types_in(dist.get_backend_config()) if dist.is_initialized() else frozenset([self._device.type])

    @property
    def _host(self) -> torch.device:
        """Where small data is sent from: main memory, if the group accepts it from there."""
        return HOST if HOST.type in self._types else self._device

    def _on_host(self, plain: torch.Tensor) -> torch.Tensor:
        return plain.to(self._host) if plain.is_cpu else plain

    def _meet_by_reduction(self) -> None:
        # A reduction rather than dist.barrier: there gloo may not report a dead peer until the timeout.
        met = torch.zeros(1, device=self._host)
        dist.all_reduce(met)
        met.item()  # on a device, the call has only been submitted so far

    def _enter(self, call: Call) -> None:
        self._last, self._is_inside = call, True
        self.num_calls += 1
        action = action_of(call)
        here = self._here
        if here is not None and not call.name:
            if difference := here.announce(action):
                mismatch = mismatch_error(difference, {self.rank: here.place_of(difference[self.rank])})
                self.abort(mismatch)  # peers that arrived before are waiting in their next call
                raise mismatch
        elif here is None:
            self._comparison.finish()
            # For a group without main memory, the host would wait for its device in each call.
            if not call.name or HOST.type in self._types:
                # Flags and the device's data have transports of their own: a rank that does something else gets no flag
                # as its data, and an announcement need not wait.
                is_apart = self._device.type != HOST.type and HOST.type in self._types
                self._comparison.begin(action, describe_call(own_frames()) if is_apart else "", self._host)
                if call.name or not is_apart:
                    self._comparison.finish()
        else:
            here.name_next(action)
            if here is self._own_here:  # otherwise the group does this in the first collective of the call
                here.enter(action)

    @property
    def _here(self) -> MeetingPoint | None:
        """Where ranks that share memory meet; not constant, since a script may replace the group."""
        group: Any = dist.group.WORLD if dist.is_initialized() else None
        return group.here if isinstance(group, SharedMemoryGroup) else self._own_here

    def _reason(self, error: BaseException) -> tuple[str, BaseException]:
        """Why the transport failed: the reason that a peer left in the store, or which ranks are missing and the error
        message."""
        # A failure comes first: its victims leave, too, and note their departure.
        if (failure := self._reasons.failure()) is not None:
            return failure
        missing = here.missing() if (here := self._here) is not None else []
        if gone := self._reasons.departed():
            # The others arrived, and left as victims.
            return departure([rank for rank in gone if rank in missing] or gone), error
        if missing:
            return f"{name_ranks(missing)} did not arrive: {error}", error
        return f"a peer is gone or did not answer ({error}); {_ADVICE}", error

    def _end_wait(self) -> bool:
        """End the device's wait if a peer has failed; return whether one has. Runs in the watch's thread."""
        if (failure := self._reasons.failure()) is None:
            return False
        self._broken = self._broken or failure  # the rank's own thread may have aborted first
        # First: once its wait has ended, the thread must not continue.
        wake(self._thread, self._error(self._last, *failure))
        self._end(is_broken=True)
        return True

    # Not by torch's functions for objects, which load what they have received.

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """The bytes of all ranks, whose signatures are checked. A collective that is not announced."""
        place = self._next_place()
        own = self._on_host(tensor_of(seal(data, place.format(self.rank))))
        sizes = [torch.empty(1, dtype=torch.int64, device=own.device) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(own)], device=own.device))
        counts = [int(each) for each in sizes]
        received = [own.new_empty(max(counts)) for _ in range(self.size)]
        dist.all_gather(received, torch.nn.functional.pad(own, (0, max(counts) - len(own))))
        found = enumerate(zip(received, counts, strict=True))
        return [unseal(each[:count].cpu().numpy().tobytes(), place.format(rank)) for rank, (each, count) in found]

    def _broadcast_bytes(self, data: bytes, root: int) -> bytes:
        empty = torch.empty(0, dtype=torch.uint8, device=HOST)
        place = self._next_place().format(root)
        own = self._on_host(tensor_of(seal(data, place)) if self.rank == root else empty)
        size = torch.tensor([len(own)], device=own.device)
        dist.broadcast(size, root)
        sent = own if self.rank == root else own.new_empty(int(size))
        dist.broadcast(sent, root)
        return unseal(sent.cpu().numpy().tobytes(), place)

    def _next_place(self) -> str:
        """The place of a message, except for its rank; all ranks send the same number of them."""
        self._num_sent += 1
        return f"message {self._num_sent} of rank {{}} in world {self.name}"

    def _end(self, is_broken: bool = False) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()
        if self._own_here is not None:
            self._own_here.close(is_broken=is_broken)
        if self._owns_group and dist.is_initialized():
            forget_group()
            end_group(is_broken, waits_for_device=watch is not None)
