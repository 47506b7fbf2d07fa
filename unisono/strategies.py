"""The options of an Accelerator's strategies: `strategy="ddp"` is `strategy=DDP()`, and so for the others.

    from unisono.strategies import FSDP

    accelerator = Accelerator(strategy=FSDP(units=(Block,), reduce_dtype=torch.float32))

They serve processes whose devices torch's process groups take. In a world of one, and on threads, gradients are reduced
in flat buckets, whatever is chosen; `broadcast_buffers` holds there, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(frozen=True)
class DDP:
    """torch's DistributedDataParallel: each rank has the whole model, and gradients travel during the backward pass.

    Attributes:
        find_unused_parameters: some parameters take no part in some forward passes.
        bucket_cap_mb: the size of the pieces, in MiB, in which gradients travel.
        gradient_as_bucket_view: gradients lie in the pieces that travel, and are not copied, which saves memory of
            their size. (`grad.detach_()` fails then.)
        broadcast_buffers: running statistics are rank zero's on all ranks; False leaves each rank its own.
        comm_hook: how gradients travel: "fp16", "bf16", "powersgd", "post_local_sgd"; None as they are.
        comm_options: of the hook.

    Raises:
        ValueError: the size is not positive.
    """

    name: ClassVar[str] = "ddp"
    find_unused_parameters: bool = False
    bucket_cap_mb: float = 25
    gradient_as_bucket_view: bool = False
    broadcast_buffers: bool = True
    comm_hook: str | None = None
    comm_options: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if not self.bucket_cap_mb > 0:
            raise ValueError(f"bucket_cap_mb={self.bucket_cap_mb} is no size; pass a positive number of MiB")


@dataclass(frozen=True)
class ZeRO1(DDP):
    """As DDP, and each rank keeps a part of the optimizer's state.

    Attributes:
        elementwise_optimizer: an optimizer that is none of torch.optim's treats each element for itself, and looks at
            no others.
    """

    name: ClassVar[str] = "zero1"
    elementwise_optimizer: bool = False


@dataclass(frozen=True)
class FSDP:
    """torch's FSDP2: each rank keeps a part of the parameters, the gradients and the optimizer's state.

    Attributes:
        units: the classes of the modules that are gathered one by one; () gathers the model in one piece. None takes
            the large elements of Sequential and ModuleList.
        find_unused_parameters: ranks use different parameters. Those that none has used get gradients of zero.
        param_dtype: of the gathered parameters, in which forward and backward passes compute; None is their own.
        reduce_dtype: of gradients while they are reduced; None is the parameters'.
        reshard_after_forward: a unit gives its parameters back after its forward pass, and gathers them again for its
            backward pass; False keeps them between the two: more memory, less traffic. A number, which divides the
            ranks that share parameters, keeps a part of so many ranks' size. None gives back but in the model itself.
        replicas: groups of ranks that have all parameters each, so many: within a group parameters are gathered, and
            gradients reduced, and only what a rank keeps of these travels between groups. The ranks of a group follow
            one another: with one group for each machine, parameters stay on it.
        offload: parameters, gradients and the optimizer's state stay in main memory between their uses.
        elementwise_optimizer: as for `ZeRO1`.

    Raises:
        TypeError, ValueError: a number is none, or too small.
    """

    name: ClassVar[str] = "fsdp"
    units: Sequence[type[nn.Module]] | None = None
    find_unused_parameters: bool = False
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    reshard_after_forward: bool | int | None = None
    replicas: int = 1
    offload: bool = False
    elementwise_optimizer: bool = False

    def __post_init__(self) -> None:
        kept = self.reshard_after_forward
        if kept is not None and not isinstance(kept, int):
            raise TypeError(
                f"reshard_after_forward={kept!r} is a {type(kept).__name__}; pass True, False, a number of ranks, or "
                "None"
            )
        if isinstance(self.replicas, bool) or not isinstance(self.replicas, int):
            raise TypeError(f"replicas={self.replicas!r} is a {type(self.replicas).__name__}; pass a number of groups")
        if self.replicas < 1:
            raise ValueError(f"replicas={self.replicas} are no groups of ranks; pass 1 to share parameters among all")


@dataclass(frozen=True)
class SPMD:
    """For XLA in a plain script: one program, whose batches lie over all devices of the process."""

    name: ClassVar[str] = "spmd"


Choice = DDP | FSDP | SPMD
