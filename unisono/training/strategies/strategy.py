"""Strategy: determines how gradients are reduced, and what each rank keeps of prepared models and optimizers.

tests/contract/test_strategy.py runs the same tests for each of them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ClassVar
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from unisono.devices import CPU
from unisono.protocols import Backend
from unisono.strategies import FSDP, ZeRO1
from unisono.training.agreement import broadcast_parameters
from unisono.training.meta_modules import check_fillable
from unisono.training.steps import Steps
from unisono.training.strategies.bare_parameter import BareParameter, ParameterEngine
from unisono.training.strategies.engine import Engine
from unisono.training.strategies.sharded import check_shardable, loaded_class
from unisono.world import World

given_up: WeakSet[Optimizer] = WeakSet()
"""Optimizers of users whose state zero1 has divided among the ranks: they have none themselves."""


class Strategy:
    """Wraps models and optimizers so that all ranks train the same model.

    This one reduces gradients in flat buckets after the backward pass: in a world of one, among threads, and on devices
    that process groups do not support. The others are derived from it. One of another package may override:

    - `check_world`, `check` and `check_divisible`: what it refuses. They change nothing, and name a way out.
    - `engine_of(module)`, which returns an `Engine` of its own. The module has the parameters of rank zero already.
    - `wrap_optimizer` and `step_of`: an optimizer in place of the user's, or another function that steps for it.

    It is created once per Accelerator and rank, with that rank's world. tests/contract/test_strategy.py says what each
    has to keep: the weights of one device after each epoch, final gradients after a step's last backward pass, a
    resumed run with the same bits.

    Attributes:
        world, steps, options: what it was made with.
        is_of_torch: whether it uses one of torch's engines, which need several processes; elsewhere the plain strategy
            is used.
        is_needed: whether no other strategy may replace it in a world of processes.
        fills: whether `wrap_model` accepts a model on the device "meta".
        takes_parameters: whether it trains parameters that `prepare` gets by themselves.
        shares_state: whether all ranks are in one state after each step, and have the gradients of all before it. If
            not, there are no snapshots.
    """

    is_of_torch: ClassVar[bool] = False
    is_needed: ClassVar[bool] = False
    fills: ClassVar[bool] = False
    takes_parameters: ClassVar[bool] = True
    shares_state: ClassVar[bool] = True

    def __init__(self, world: World, steps: Steps, options: Any) -> None:
        self.world, self.steps, self.options = world, steps, options

    @classmethod
    def check_world(cls, world: World) -> None:
        """Refuse a world in which it cannot run. Raises ValueError."""

    @classmethod
    def enter(cls, backend: Backend, device: torch.device) -> None:
        """Prepare a world of one, before the first work on the device. Raises ValueError if that is not supported."""

    def check(self, each: nn.Module | Optimizer) -> None:
        """Check that a model or an optimizer is supported, before anything is changed; else TypeError, ValueError."""
        if isinstance(each, nn.Module):
            if isinstance(each, BareParameter) and not self.takes_parameters:
                raise TypeError(
                    f"strategy={self.options.name!r} trains the parameters of modules, and a parameter was given to "
                    "prepare() by itself; make it one of a module, or use strategy='ddp'"
                )
            _check_plain(each)
            check_fillable(each)
            if self.steps.parts > 1:
                _check_norms(each)
                if self.steps.virtual is None and (self.world.device.type == CPU or not self.is_of_torch):
                    _check_batch_norms(each, self.world)
        elif each in given_up and not each.state:
            raise ValueError(
                f"strategy='zero1' has divided the state of this {type(each).__name__} among the ranks, so that "
                "training would begin again without it; make a new optimizer, and load into it, after prepare(), what "
                "accelerator.state_dict(optimizer) returned before free_memory()"
            )
        self.check_divisible(each)

    def check_divisible(self, each: nn.Module | Optimizer) -> None:
        """Check that it can be divided among several ranks, as this strategy does; else TypeError, ValueError."""

    def wrap_model(self, module: nn.Module) -> Engine:
        """Create the engine of the module; all ranks get rank zero's parameters. A collective."""
        if self.world.world_size > 1:
            broadcast_parameters(module, world=self.world)
        return self.engine_of(module)

    def engine_of(self, module: nn.Module) -> Engine:
        """The engine of a module that is the same on all ranks."""
        return Engine(module, self.world, self.steps, getattr(self.options, "broadcast_buffers", True))

    def wrap_parameter(self, module: BareParameter) -> Engine:
        """Create the engine of a bare parameter, which is whole on each rank, with rank zero's values. A collective."""
        if self.world.world_size > 1:
            broadcast_parameters(module, world=self.world)
        return ParameterEngine(module, self.world, self.steps)

    def wrap_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """The optimizer that replaces this one, usually itself."""
        return optimizer

    def step_of(self, optimizer: Optimizer) -> Callable[..., Any]:
        """What steps for this optimizer, usually its own method."""
        return optimizer.step


def _check_plain(model: nn.Module) -> None:
    """Refuse a model whose gradients or parameters another engine reduces or shards, that torch has compiled to a
    program with parameters and hooks of its own, or whose parameters have no shape yet."""
    for name, each in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(each):
            raise ValueError(
                f"the {type(model).__name__} cannot be prepared: {name!r} of a lazy layer has no shape before a first "
                "forward pass; call the model on a batch before prepare() and before the optimizer is made"
            )
    fsdp = "torch.distributed.fsdp"
    engines = loaded_class(fsdp, "FSDPModule"), loaded_class(fsdp, "FullyShardedDataParallel")
    for name, part in model.named_modules():
        if isinstance(part, (DistributedDataParallel, nn.DataParallel, engines)):
            where = f"its part {name!r}" if name else "it"
            raise ValueError(
                f"the {type(model).__name__} cannot be prepared: {where} is wrapped or sharded already "
                f"({type(part).__name__}), and so reduces gradients by itself, without the weights of the ranks; pass "
                "the model inside it (its .module), or as it was before sharding, and prepare() does what that is for"
            )
        if isinstance(part, torch.jit.ScriptModule):
            where = f"its part {name!r}" if name else "it"
            raise TypeError(
                f"the {type(model).__name__} cannot be prepared: {where} is a ScriptModule, which torch runs without "
                "the hooks that training needs; prepare the module that it was made from, and script or trace "
                "accelerator.unwrap_model(model) when it is trained (Accelerator(compile=True) compiles it before); "
                "leave a model that is not trained out of prepare()"
            )


def _check_norms(model: nn.Module) -> None:
    """Refuse layers that change their parameters in a forward pass, in which each rank has other samples."""
    for name, part in model.named_modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.max_norm is not None and part.weight.requires_grad:
            raise ValueError(
                f"the {type(model).__name__} cannot be prepared for several ranks: its layer {name!r} has "
                f"max_norm={part.max_norm}, so a forward pass shortens the rows that it looks up, and these differ by "
                "rank; make it without max_norm, and shorten all rows after optimizer.step(): with torch.no_grad(): "
                f"weight.mul_(({part.max_norm} / weight.norm({part.norm_type:g}, 1, True)).clamp(max=1))"
            )


def _check_batch_norms(model: nn.Module, world: World) -> None:
    """Refuse torch's layers over all ranks where torch has no process group, or no kernel, for them."""
    is_trained = any(each.requires_grad for each in model.parameters())
    for name, part in model.named_modules() if is_trained else ():
        if isinstance(part, nn.SyncBatchNorm):
            raise ValueError(
                f"the {type(model).__name__} cannot be prepared for several ranks on {world.device}: its layer "
                f"{name!r} is a torch.nn.SyncBatchNorm, which needs processes with GPUs; use BatchNorm there (1d, 2d "
                "or 3d, before any conversion), and Accelerator(sync_batchnorm=True)"
            )


# Optimizers of torch.optim that combine all parameters, or the elements of each; those that use operations which torch
# lacks for DTensors; and those whose fused steps support DTensors.
_OVER_ALL = {torch.optim.LBFGS}
_OVER_EACH = {torch.optim.Adafactor, torch.optim.Muon}
_NOT_DISTRIBUTED = {torch.optim.Rprop}
_FUSED = {torch.optim.Adam, torch.optim.AdamW}


def check_divisible(optimizer: Optimizer, options: ZeRO1 | FSDP) -> None:
    """Check that ranks can each step for some of the parameters: TypeError if its steps may depend on parameters of
    other ranks, or cannot update what a rank has."""
    kind, name, strategy = kind_of(optimizer), type(optimizer).__name__, options.name
    if kind in _OVER_ALL:
        raise TypeError(
            f"strategy={strategy!r} divides parameters by ranks, and {name} takes all of them as one vector; use "
            "strategy='ddp', or an optimizer that treats each parameter separately"
        )
    if kind is torch.optim.SparseAdam and options.name == "fsdp":
        raise TypeError(
            "strategy='fsdp' reduces dense gradients only, and SparseAdam takes sparse ones; use torch.optim.Adam, or "
            "strategy='zero1' or 'ddp'"
        )
    if kind is None and not (options.elementwise_optimizer or options.per_parameter_optimizer):
        advice = f"strategy=unisono.strategies.{type(options).__name__}"
        raise TypeError(
            f"strategy={strategy!r} divides parameters by ranks, and {name} is not one of torch.optim's, so it is "
            "unknown what its steps combine; if it treats each parameter separately, as Muon does, pass "
            f"{advice}(per_parameter_optimizer=True); if each element, {advice}(elementwise_optimizer=True); "
            "otherwise, as for a norm over all of them, use strategy='ddp'"
        )


def takes_whole_parameters(optimizer: Optimizer, options: FSDP) -> bool:
    """Whether it can step for whole parameters only, not for the rows that a rank has of each."""
    kind = kind_of(optimizer)
    if kind is None:
        return options.per_parameter_optimizer
    is_fused = kind not in _FUSED and any(group.get("fused") for group in optimizer.param_groups)
    return is_fused or kind in _OVER_EACH | _NOT_DISTRIBUTED


def kind_of(optimizer: Optimizer) -> type[Optimizer] | None:
    """The class of torch.optim that defines the optimizer's `step`; None if it is defined elsewhere."""
    # torch wraps the `step` of a class when its first optimizer is created.
    step = inspect.unwrap(type(optimizer).step)
    for kind in vars(torch.optim).values():
        if inspect.isclass(kind) and issubclass(kind, Optimizer) and inspect.unwrap(kind.step) is step:
            return kind
    return None


class FSDPStrategy(Strategy):
    """FSDP2, in a world of processes: each rank keeps its shard of parameters, gradients and optimizer state."""

    is_of_torch = is_needed = fills = True

    def check(self, each: nn.Module | Optimizer) -> None:
        super().check(each)
        family = self.world.backend
        if family.process_group_backend != "gloo" and f"{family.name}:gloo" in dist.get_backend_config().split(","):
            raise ValueError(
                f"strategy='fsdp' on {self.world.device} cannot use a gloo group: torch crashes when it gathers "
                "shards there; give each rank a device of its own and a group of "
                f"{family.process_group_backend}, or use strategy='zero1' or 'ddp'"
            )

    def check_divisible(self, each: nn.Module | Optimizer) -> None:
        if isinstance(each, Optimizer):
            check_divisible(each, self.options)
        elif not isinstance(each, BareParameter):  # which stays whole
            check_shardable(each, self.options.units)

    def engine_of(self, module: nn.Module) -> Engine:
        from unisono.training.strategies.fsdp import FSDPEngine  # which imports this module

        return FSDPEngine(module, self.world, self.steps, self.options)

    def step_of(self, optimizer: Optimizer) -> Callable[..., Any]:
        if takes_whole_parameters(optimizer, self.options):
            from unisono.training.strategies.whole_steps import stepping_whole

            return stepping_whole(optimizer, self.world)
        from unisono.training.strategies.parts import stepping_plain

        return optimizer.step if kind_of(optimizer) is None else stepping_plain(optimizer)


class SPMDStrategy(Strategy):
    """One program, with batches spread over all devices of the process: XLA's compiler inserts the reductions, so that
    this package runs it as a world of one."""

    shares_state = False  # there is one rank

    @classmethod
    def check_world(cls, world: World) -> None:
        if world.world_size > 1:
            raise ValueError(
                f"strategy='spmd' is one program that has all devices, and this is rank {world.rank} of "
                f"{world.world_size}; call it in a plain script, or use strategy='ddp' here"
            )

    @classmethod
    def enter(cls, backend: Backend, device: torch.device) -> None:
        if reason := backend.unsupported_reason("spmd"):
            raise ValueError(f"strategy='spmd' does not work with {device}: {reason}")
        backend.spread()
