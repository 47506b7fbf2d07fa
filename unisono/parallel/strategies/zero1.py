"""ZeRO-1: each rank keeps the optimizer's state of its part of the parameters, steps for these, and sends them out.

torch's `ZeroRedundancyOptimizer` does the work. What is added is the way in from an optimizer that exists, with its
groups and its state, and the way of a plain state into the part of it that a rank keeps.

*Threads:* the rank's own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar
from weakref import ref

import torch
from torch import nn
from torch.optim import Optimizer

from unisono.parallel.parameter_names import parameters_of
from unisono.parallel.strategies.ddp import DDPStrategy, own_steps_contradict
from unisono.parallel.strategies.elementwise import check_elementwise
from unisono.parallel.strategies.hooks import POST_LOCAL_SGD
from unisono.parallel.strategies.rebinding import Rebinding
from unisono.parallel.strategies.sharded import is_distributed, loaded_class
from unisono.strategies import DDP

if TYPE_CHECKING:
    from torch.distributed.optim import ZeroRedundancyOptimizer

T = TypeVar("T")


class ZeRO1Strategy(DDPStrategy):
    """As "ddp", but for the optimizers."""

    name = "zero1"
    is_needed = True

    @classmethod
    def check_options(cls, options: DDP, precision: str, max_grad_norm: float | None) -> None:
        super().check_options(options, precision, max_grad_norm)
        if options.comm_hook == POST_LOCAL_SGD:
            raise ValueError(own_steps_contradict("strategy='zero1'"))

    def check(self, each: nn.Module | Optimizer) -> None:
        super().check(each)
        if isinstance(each, Optimizer):
            check_elementwise(each, "zero1", self.options.elementwise_optimizer, takes_whole=True)
            check_divisible(each)

    def wrap_optimizer(self, optimizer: Optimizer) -> Optimizer:
        sharded = shard_optimizer(optimizer)
        sharded.register_step_pre_hook(partial(self._announce, ref(sharded)))
        return sharded

    def _announce(self, prepared: Callable[[], Optimizer | None], optimizer: Optimizer, *_: Any) -> None:
        if optimizer is prepared():  # hooks are those of the user's optimizer, which may be prepared again
            self.world.comm.announce(f"the end of {self.ledger.place()}")  # the ranks send out what they have stepped


def shard_optimizer(optimizer: Optimizer) -> ZeroRedundancyOptimizer:
    """An optimizer of the same class, groups and state over the same parameters, whose state is divided by ranks.

    It takes the other one's place, and its steps the other one's hooks; schedulers must be given this one.

    Args:
        optimizer: that has passed `check_divisible`; the same on each rank. Its state is moved, and gone here.

    Raises:
        TypeError: its class cannot be made from its groups.
    """
    parameters = parameters_of(optimizer)
    # Where they may lie end to end, each rank's are sent in one piece; other memory formats would not survive it.
    shares_memory = all(parameter.is_contiguous() for parameter in parameters)
    sharded = _made_like(optimizer, shares_memory)
    load_local(sharded, optimizer.state_dict())
    optimizer.state.clear()
    for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        setattr(sharded, hooks, getattr(optimizer, hooks))  # the same ones: whoever has a handle may remove its hook
    if shares_memory:
        sharded.register_step_post_hook(_MemoryCheck(sharded))
    return sharded


class _MemoryCheck:
    """Behind each step: what the ranks have sent to one another is what the parameters have."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = ref(optimizer)  # hooks are those of the user's, which may be prepared again
        self._layout = _layout_of(optimizer)
        self._memory = Rebinding(parameters_of(optimizer))

    def __call__(self, optimizer: Optimizer, *_: Any) -> None:
        if optimizer is not self._optimizer():
            return
        if (
            _layout_of(optimizer) != self._layout
        ):  # a further group, a layer unfrozen: torch has laid out all of them again
            self._layout, self._memory = _layout_of(optimizer), Rebinding(parameters_of(optimizer))
        self._memory.check("zero1")


def _layout_of(optimizer: Optimizer) -> list[bool]:
    return [each.requires_grad for each in parameters_of(optimizer)]


def is_divided(optimizer: Optimizer) -> TypeGuard[ZeroRedundancyOptimizer]:
    """Whether the optimizer is one whose state is divided by ranks."""
    return isinstance(optimizer, loaded_class("torch.distributed.optim", "ZeroRedundancyOptimizer"))


def load_local(optimizer: ZeroRedundancyOptimizer, state: Mapping[str, Any]) -> None:
    """Load what concerns this rank of a whole state in torch's plain form; that of other parameters may be missing.

    Its tensors may become the optimizer's own. `optimizer.load_state_dict` would strike out the others in `state`.
    """
    numbers = {parameter: number for number, parameter in enumerate(parameters_of(optimizer))}
    local = [numbers[parameter] for parameter in parameters_of(optimizer.optim)]
    pairs = zip(state["param_groups"], optimizer.optim.param_groups, strict=True)
    groups = numbered([{**group, "params": own["params"]} for group, own in pairs])
    states = {place: state["state"][number] for place, number in enumerate(local) if number in state["state"]}
    optimizer.optim.load_state_dict({"state": states, "param_groups": groups})
    for group, whole in zip(state["param_groups"], optimizer.param_groups, strict=True):
        whole.update({name: value for name, value in group.items() if name != "params"})


def numbered(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The groups as a plain state has them: numbers in the place of parameters."""
    numbers = count()
    return [{**group, "params": [next(numbers) for _ in group["params"]]} for group in groups]


def check_divisible(optimizer: Optimizer) -> None:
    """Whether `shard_optimizer` can take it; nothing is changed.

    Raises:
        TypeError: it is divided already, or its class cannot be made from its groups.
        ValueError: parameters differ in type, or one is sharded or sparse.
    """
    name = type(optimizer).__name__
    if is_divided(optimizer):
        raise TypeError("the optimizer is already a ZeroRedundancyOptimizer; pass the plain one, such as AdamW")
    parameters = parameters_of(optimizer)
    for place, parameter in enumerate(parameters):
        if parameter.dtype != parameters[0].dtype:
            raise ValueError(
                f"strategy='zero1' divides parameters of one type by ranks, and parameter 0 of the {name} is "
                f"{parameters[0].dtype}, parameter {place} is {parameter.dtype}; give them one type (mixed_precision= "
                "computes in another one), or use strategy='ddp'"
            )
        if is_distributed(parameter) or parameter.layout is not torch.strided:
            kind = "a DTensor" if is_distributed(parameter) else parameter.layout
            raise ValueError(
                f"strategy='zero1' divides whole, dense parameters by ranks, and parameter {place} of the {name} is "
                f"{kind}; let strategy='fsdp' shard a plain model, and the optimizer's state is sharded with it"
            )
    _make(optimizer, type(optimizer))


def _made_like(optimizer: Optimizer, shares_memory: bool) -> ZeroRedundancyOptimizer:
    """The same class by the same arguments, which the groups carry; without state."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    def make(groups: list[dict[str, Any]], **defaults: Any) -> ZeroRedundancyOptimizer:
        return ZeroRedundancyOptimizer(groups, type(optimizer), parameters_as_bucket_view=shares_memory, **defaults)

    return _make(optimizer, make)


def _make(optimizer: Optimizer, make: Callable[..., T]) -> T:
    """What `make` makes of copies of the optimizer's groups, and of those of its defaults that its class takes."""
    kind = type(optimizer)
    accepted = inspect.signature(kind).parameters
    takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in accepted.values())
    defaults = {name: value for name, value in optimizer.defaults.items() if takes_any or name in accepted}
    try:
        return make([dict(group) for group in optimizer.param_groups], **defaults)
    except (TypeError, AttributeError, KeyError) as error:
        raise TypeError(
            f"strategy='zero1' makes a {kind.__name__} on each rank from its groups and their defaults "
            f"({', '.join(defaults)}), and that failed: {error}; let its constructor take these, or make a "
            "ZeroRedundancyOptimizer yourself"
        ) from error


strategy_class = ZeRO1Strategy
