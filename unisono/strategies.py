"""The options of an Accelerator's strategies: `strategy="ddp"` is `strategy=DDP()`, and so for the others.

    from unisono.strategies import FSDP

    accelerator = Accelerator(strategy=FSDP(units=(Block,), reduce_dtype=torch.float32))

They apply to processes whose devices torch's process groups support. In a world of one, and on threads, gradients are
reduced in flat buckets, whichever of these is chosen; `broadcast_buffers` applies there, too.

Another package adds a strategy by an entry point (CONTRIBUTING.md, "A strategy"): subclasses of `Options`, and of
`Strategy` and `Engine`, whose docstrings say what to override. `buckets` groups tensors that are sent together. These
three are imported when they are first used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import NoneType
from typing import TYPE_CHECKING, Any, ClassVar, Self

from unisono.arguments import check_integer, check_type

if TYPE_CHECKING:
    import torch
    from torch import nn

    from unisono.training.gradients import buckets as buckets
    from unisono.training.strategies.engine import Engine as Engine
    from unisono.training.strategies.strategy import Strategy as Strategy


@dataclass(frozen=True)
class Options:
    """The base class of all options: a frozen dataclass, which checks its fields, each with a default.

    Attributes:
        name: what `Accelerator(strategy=)` takes in place of the options; the name of the entry point.
        strategy: the subclass of `Strategy`; or "package.module:Class", which only an Accelerator imports.
    """

    name: ClassVar[str]
    strategy: ClassVar[str | type[Strategy]]

    @classmethod
    def exact(cls) -> Self:
        """The options with which it trains what one device trains: those that the contract tests."""
        return cls()


@dataclass(frozen=True)
class DDP(Options):
    """torch's DistributedDataParallel: each rank has the whole model; gradients are reduced during the backward pass.

    Attributes:
        find_unused_parameters: whether some parameters are not used in some forward passes.
        bucket_cap_mb: the size of the buckets in which gradients are reduced, in MiB.
        gradient_as_bucket_view: whether gradients are views of the buckets instead of copies, which saves memory of
            their size. (`grad.detach_()` fails then.)
        broadcast_buffers: whether running statistics are rank zero's on all ranks; False keeps each rank's own.
        comm_hook: how gradients are sent: "fp16", "bf16"; or a function that takes a bucket (`GradBucket`) and returns
            the future of its mean over the ranks, such as a hook of torch with its state, `partial(powerSGD_hook,
            PowerSGDState(None))`; None sends them unchanged. Checkpoints hold what it keeps: its `state_dict()`, or its
            attributes, or those of the first argument of a partial.

    Raises:
        ValueError: the size is not positive, or the hook does not exist.
    """

    name = "ddp"
    strategy = "unisono.training.strategies.ddp:DDPStrategy"
    find_unused_parameters: bool = False
    bucket_cap_mb: float = 25
    gradient_as_bucket_view: bool = False
    broadcast_buffers: bool = True
    comm_hook: str | Callable[[Any], Any] | None = None

    def __post_init__(self) -> None:
        if not self.bucket_cap_mb > 0:
            raise ValueError(f"bucket_cap_mb={self.bucket_cap_mb} is not a size; pass a positive number of MiB")
        if self.comm_hook not in (None, "fp16", "bf16") and not callable(self.comm_hook):
            raise ValueError(f"comm_hook={self.comm_hook!r} does not exist; pass None, 'fp16', 'bf16', or a function")


@dataclass(frozen=True)
class ZeRO1(DDP):
    """As DDP, but each rank keeps only a shard of the optimizer's state.

    Attributes:
        elementwise_optimizer: asserts that an optimizer from outside torch.optim treats each element independently of
            all others.
        per_parameter_optimizer: asserts that it treats each parameter independently of all others, as Muon does.
    """

    name = "zero1"
    strategy = "unisono.training.strategies.zero1:ZeRO1Strategy"
    elementwise_optimizer: bool = False
    per_parameter_optimizer: bool = False


@dataclass(frozen=True)
class FSDP(Options):
    """torch's FSDP2: each rank keeps a shard of the parameters, the gradients and the optimizer's state.

    Attributes:
        units: the classes of the modules that are gathered one by one; () gathers the model in one piece. None uses
            the large elements of Sequential and ModuleList.
        find_unused_parameters: whether ranks use different parameters.
        param_dtype: the dtype of the gathered parameters, in which forward and backward passes compute; None keeps
            their own.
        reduce_dtype: the dtype of gradients while they are reduced; None keeps the parameters'.
        output_dtype: the dtype of the floating-point outputs of the model; None keeps theirs.
        cast_forward_inputs: whether the floating-point inputs of each unit are cast to `param_dtype`.
        reshard_after_forward: whether a unit is resharded after its forward pass, and gathered again for its backward
            pass; False keeps it gathered between the two: more memory, less communication. An integer, a divisor of
            the number of ranks that share parameters, reshards to that many ranks. None reshards all but the root.
        prefetch: the number of units that are gathered ahead of the one that runs, in the order in which the modules
            were defined; None leaves it to torch: one in backward passes. More hides slow communication, and costs
            memory.
        replicas: the number of groups of ranks that each hold all parameters: within a group parameters are gathered
            and gradients reduced; between groups, only the shards of gradients are reduced. The ranks of a group are
            consecutive: with one group per machine, parameters stay on the machine.
        offload: keep parameters, gradients and the optimizer's state in main memory between uses.
        broadcast_buffers: as for `DDP`.
        elementwise_optimizer: as for `ZeRO1`; each rank steps for its rows of each parameter.
        per_parameter_optimizer: as for `ZeRO1`; each rank steps for some of the parameters as a whole, whose rows it
            gets from the others for the time of the step.

    Raises:
        TypeError, ValueError: an option has the wrong type, or is too small.
    """

    name = "fsdp"
    strategy = "unisono.training.strategies.strategy:FSDPStrategy"
    units: Sequence[type[nn.Module]] | None = None
    find_unused_parameters: bool = False
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    reshard_after_forward: bool | int | None = None
    prefetch: int | None = None
    replicas: int = 1
    offload: bool = False
    broadcast_buffers: bool = True
    elementwise_optimizer: bool = False
    per_parameter_optimizer: bool = False

    def __post_init__(self) -> None:
        advice = "pass True, False, a number of ranks, or None"
        check_type(self.reshard_after_forward, "reshard_after_forward", advice, bool, int, NoneType)
        if self.prefetch is not None:
            check_integer(self.prefetch, "prefetch", 1, "pass a number of units, or None")
        check_integer(self.replicas, "replicas", 1, "pass a number of groups; 1 shares parameters among all ranks")


@dataclass(frozen=True)
class SPMD(Options):
    """For XLA in a plain script: one program, whose batches are spread over all devices of the process."""

    name = "spmd"
    strategy = "unisono.training.strategies.strategy:SPMDStrategy"


if not TYPE_CHECKING:  # what is above this module
    _HOMES = {"Engine": "strategies.engine", "Strategy": "strategies.strategy", "buckets": "gradients"}

    def __getattr__(name: str) -> Any:
        if name in _HOMES:
            return getattr(import_module(f"unisono.training.{_HOMES[name]}"), name)
        raise AttributeError(f"module 'unisono.strategies' has no attribute {name!r}")
