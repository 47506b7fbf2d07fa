"""The interfaces of the package on one page: what a device family and an execution mode must be able to do.

`Backend` is one family of devices (cpu, cuda, xla). `Communicator` is one way for ranks to meet (alone, as
threads, as processes). They are never combined in one class: a `World` joins one of each, and everything above works on
the two. `tests/contract/` checks each sentence here against every implementation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import torch

ReduceOp = Literal["sum", "mean", "min", "max", "product"]

Transport = Literal["torch", "host", "runtime"]
"""How tensors of a family come together: by torch's own operations on them; as copies in main memory; or by the
collectives of the family's runtime."""

Feature = Literal["compile", "fp16", "process_group", "spmd", "virtual_ranks"]
"""What a family may lack: `torch.compile`; float16 with a loss scaler; process groups that take its tensors, and with
them DistributedDataParallel, FSDP2 and sharded optimizers; one program whose tensors lie over all devices; kernels that
give the same bits again."""


class DeviceClock(Protocol):
    """Measures when a device reaches a place in the work that was submitted to it."""

    def stamp(self) -> Any:
        """Record a stamp after what the calling thread has submitted; None if that is not possible now."""

    def elapsed_ns(self, first: Any, second: Any) -> int | None:
        """Return the nanoseconds between two stamps; None if the device has not reached both. Does not wait."""


class Backend(ABC):
    """One family of devices. Stateless except for caches; queries never initialise an accelerator.

    A family has a name and the abstract members. The others have defaults, for devices that compute immediately;
    `unisono.devices.accelerator` has all of them for an accelerator that torch knows.
    """

    name: str
    """The family's name, which is also the `type` of its `torch.device`s."""

    moves_in_background = True
    """Whether moving a batch is worth a separate thread. If not, `to_device` is called on the thread that loads, needs
    no `activate`, and returns a batch in main memory unchanged, with None as its token."""

    moves_in_loop = False
    """Whether only the thread that computes may use its devices. Then no other thread calls a member that takes a
    device or a token, and a batch is moved when its loop asks for it."""

    is_lazy = False
    """Whether it records work until `mark_step`, and then runs all of it. Reading a value in between costs a graph."""

    # What a family must have.

    @abstractmethod
    def device_count(self) -> int:
        """The number of devices that "all of them" means; 0 where there is none."""

    @abstractmethod
    def to_device(self, batch: Any, device: torch.device) -> tuple[Any, Any]:
        """Start moving a batch: the batch on the device, and a token to wait for. The source is never modified.

        Container types, order and sharing stay; what holds no tensor passes through. Called on a transfer thread,
        perhaps on several at once.
        """

    @abstractmethod
    def wait_ready(self, token: Any) -> None:
        """Return when the moved batch may be used by work that the calling thread submits from now on."""

    @abstractmethod
    def synchronize(self, device: torch.device) -> None:
        """Block until all work submitted to the device has ended."""

    @abstractmethod
    def rng_state(self, device: torch.device) -> torch.Tensor:
        """The state of the device's random generator, a uint8 tensor on the CPU."""

    @abstractmethod
    def set_rng_state(self, state: torch.Tensor, device: torch.device) -> None:
        """Restore what `rng_state` gave."""

    @abstractmethod
    def memory(self, device: torch.device) -> int:
        """Bytes in use: allocated on an accelerator, 0 if it does not count them; resident in this process on a CPU."""

    # Which devices there are.

    def is_available(self) -> bool:
        """Whether at least one device of the family can be used here."""
        return self.device_count() > 0

    def unavailable_reason(self) -> str:
        """Why none can, and the way out, in words; "" where there simply is none."""
        return ""

    def unused_hardware(self) -> str:
        """The family's hardware here that cannot be used, and the way out, in words; "" if there is none."""
        return ""

    def hardware(self) -> str:
        """What its devices here are made of: "CPU", "CUDA", "MPS" or "TPU". Starts no runtime."""
        return self.name.upper()

    def device_name(self, device: torch.device) -> str:
        """The model of a device, which its kernels, and the bits that they compute, may depend on."""
        return self.hardware()

    def is_accelerated(self) -> bool:
        """Whether its devices here are faster than the CPU that every machine has."""
        return True

    def device(self, index: int) -> torch.device:
        """The device with that index; ValueError, with how many there are, if there is none."""
        count = self.device_count()
        if not 0 <= index < count:
            raise ValueError(f"device {self.name}:{index} does not exist: {count} {self.name} device(s) here")
        return torch.device(self.name, index)

    # How processes and threads begin.

    def start(self, device: torch.device) -> None:
        """Start the family's own runtime, if it has one and that is not up, on a thread that computes.

        Before other threads use the device. UnisonoError where it comes too late for torch's autograd.
        """

    def activate(self, device: torch.device) -> None:
        """Make it the calling thread's device, before that thread's first work on it.

        From then on, a thread other than the main one does not disturb graphs that others capture.
        """

    def preload(self) -> None:
        """Import what the family needs, into a process that its workers will be forked from; start no runtime."""

    def check_workers(self, count: int) -> None:
        """Refuse more workers on this machine, each a process, than there are devices for. ValueError."""
        self.device(count - 1)

    def worker_environment(self, count: int) -> dict[str, str]:
        """Variables that `count` workers on this machine need besides those of their caller, the same for each."""
        return {}

    def enter_worker(self, local_rank: int, local_world_size: int) -> torch.device:
        """In a process that belongs to one rank, before its first work: activate and return its device."""
        device = self.device(local_rank)
        self.activate(device)
        return device

    # How tensors of several ranks come together.

    @property
    def process_group_backend(self) -> str:
        """The torch.distributed backend that reduces this family's tensors; "gloo", for main memory, if none does."""
        return "gloo"

    def thread_transport(self, devices: Sequence[torch.device]) -> Transport:
        """How threads of this process, each on one of these devices, bring their tensors together."""
        return "torch"

    def process_transport(self) -> Transport:
        """How processes do, each on a device of the family."""
        return "host" if self.process_group_backend == "gloo" else "torch"

    def spread(self) -> None:
        """From now on, in this process, lay each batch that is moved over all devices, along dim 0 ("spmd")."""
        raise NotImplementedError(self.unsupported_reason("spmd"))

    def repeat_kernels(self) -> None:
        """From now on, in this process, have kernels give the same bits for the same inputs ("virtual_ranks")."""
        torch.set_num_threads(1)  # those of the CPU add in an order that depends on it

    # When work ends: all that is submitted is done, unless a family says otherwise.

    def mark(self, device: torch.device, tensors: Any = ()) -> Any:
        """A token for what the calling thread has submitted to the device, which uses or makes these tensors.

        For `wait_ready` in another thread, whose work follows it, and for `is_reached`. None where submitted work is
        already done.
        """

    def is_reached(self, mark: Any) -> bool:
        """Whether the device has reached that mark; asks, and does not wait."""
        return True

    def mark_step(self, device: torch.device) -> None:
        """A step ends here. Lazy devices execute what they recorded; eager ones have nothing to do."""

    def clock(self, device: torch.device) -> DeviceClock | None:
        """The clock of a device that works apart from the thread that submits to it; None without one."""
        return None

    # State.

    def seeded_state(self, seed: int, device: torch.device) -> torch.Tensor | None:
        """What `rng_state` gives after that seed; None where the device draws from the CPU's generator."""
        return torch.Generator(device).manual_seed(seed).get_state()

    @property
    def pins_memory(self) -> bool:
        """Whether it copies faster from page-locked memory, which torch has for it. May start the runtime."""
        return False

    def matmul_precision(self) -> str:
        """How exact products of float32 matrices are in this process: "highest", "high", "medium" or "default"."""
        return torch.get_float32_matmul_precision()

    def set_matmul_precision(self, precision: str) -> None:
        """Set it; "default" is what it was at first. ValueError if there is no such precision."""
        if precision not in ("default", "highest", "high", "medium"):
            raise ValueError(f"precision={precision!r} does not exist; choose default, highest, high or medium")
        torch.set_float32_matmul_precision("highest" if precision == "default" else precision)

    def peak_memory(self, device: torch.device) -> int:
        """The most bytes that were allocated on the device at once; 0 where the family does not count them."""
        return 0

    def counters(self) -> dict[str, int]:
        """What the family's runtime has counted in this process, by names such as "graphs compiled"; often nothing."""
        return {}

    def unsupported_reason(self, feature: Feature) -> str | None:
        """Why the family lacks the feature, and what to do instead, in words; None where it has it."""
        if feature == "process_group" and self.process_group_backend == "gloo":
            return (
                f"process groups do not support {self.name.upper()} tensors; use strategy='ddp' without comm_hook, "
                "where the backward pass reduces the gradients through main memory"
            )
        if feature == "spmd":
            return "XLA's devices have it (device='xla:0', or UNISONO_BACKEND=xla); here take strategy='ddp'"
        if feature == "virtual_ranks":
            return "it is not known how its kernels give the same bits again; pass cpu=True"
        return None


@runtime_checkable
class Communicator(Protocol):
    """How the ranks of one world meet. This page is the law; every implementation keeps each line of it.

    1. All ranks call the same operations, in the same order, with the same shapes, types and arguments. Otherwise each
       gets a `CollectiveMismatchError` that names the ranks by their calls. (Processes: the rank that comes later gets
       it, and breaks the world for those that wait. Not compared: calls in a group that was created elsewhere.)
    2. `all_reduce` works in place and returns its tensor. "mean" is the sum divided by the size, for size 1 too, and
       is refused for integers. Operations that a dtype does not support are a `TypeError`, the same in every mode.
    3. Within a mode all ranks end with the same bits, and a repeated run agrees. Across modes, the results are close.
    4. A failed or departed rank breaks the world permanently: ranks that wait, now or later, get a `BrokenWorldError`
       whose `__cause__` is the first cause if it is known.
    5. No time-out as control flow: it is a last resort, and its message says what was awaited and who was missing.

    Tensors are on the rank's device or in main memory, and so are the results computed from them. One thread per rank
    uses a communicator; it is not meant to be shared.
    """

    rank: int
    size: int

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> torch.Tensor:
        """Reduce over the ranks, in place."""

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors of all ranks, in rank order, on the caller's device; copies, its own included."""

    def reduce_scatter(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> torch.Tensor:
        """Reduce over the ranks and return this rank's part along dim 0, whose size must be a multiple of `size`."""

    def all_to_all(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return what all ranks have for this one, in rank order: from each, the part with this rank's number along dim
        0, whose size must be a multiple of `size`; copies, as in `all_gather`."""

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> torch.Tensor:
        """Overwrite the tensor with the root's, in place, and return it."""

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return the objects of all ranks, in rank order; each a copy made by pickling, in every mode."""

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        """Return a copy of the root's object; the others' argument is ignored."""

    def barrier(self) -> None:
        """Wait until every rank has called it."""

    def announce(self, purpose: str) -> None:
        """Announce what this rank does next together with its peers, through this communicator or without it.

        If another rank announces, or does, something else, it is a `CollectiveMismatchError` here or in the next call.
        """

    def abort(self, cause: BaseException) -> None:
        """Break the world because of `cause`, from any thread. The waiters wake at once; the first abort counts.

        (Processes: a rank that waits inside the transport is woken by the end of a peer, not by its own abort.)
        """

    def leave(self) -> None:
        """Record that this rank no longer takes part; ranks that wait for it, now or later, fail at once.
        Idempotent.

        (Threads: `CollectiveMismatchError` in the last rank, if one has begun a loop that the others have not.)
        """


class Run(Protocol):
    """The machines of a run that an `Engine` has started."""

    def outcomes(self, timeout_s: float) -> Iterator[tuple[int, bytes]]:
        """The outcomes that have arrived, as `run_machine` returns them, with the number of the machine; waits
        `timeout_s` seconds at most for one. A machine that ends without one has an error as its outcome."""

    def ask_to_stop(self) -> None:
        """Ask the workers to stop early (`should_stop`)."""

    def kill(self) -> None:
        """End what still runs, and return when it has ended. Idempotent."""


class Engine(Protocol):
    """Lends machines to `spawn(..., engine=)`, and runs `unisono.engines.machine.run_machine` on each.

    Attributes:
        variables: the names of the caller's environment variables that are sent.
    """

    variables: Sequence[str]

    def machines_for(self, nprocs: int) -> int:
        """The number of machines for that many workers."""

    def start(self, bundle: bytes, machines: int, per_machine: int) -> Run:
        """Start the agents. Raises UnisonoError, and leaves nothing, if one cannot be started."""
