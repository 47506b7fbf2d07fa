"""ZeRO-1: each rank keeps the optimizer state for its part of the parameters, steps these, and broadcasts them.

torch's `ZeroRedundancyOptimizer` does the work. This module converts an existing optimizer, with its groups and its
state, and extracts from a plain state the part that a rank keeps.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count
from types import MethodType
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar
from weakref import ref

from torch import nn
from torch.optim import Optimizer

from unisono.torch_private import STEP_POST_HOOKS, STEP_PRE_HOOKS
from unisono.training.parameter_names import parameters_of
from unisono.training.strategies.ddp import DDPStrategy
from unisono.training.strategies.sharded import Rebinding, loaded_class
from unisono.training.strategies.strategy import check_divisible, given_up

if TYPE_CHECKING:
    from torch.distributed.optim import ZeroRedundancyOptimizer

T = TypeVar("T")


class ZeRO1Strategy(DDPStrategy):
    """Like "ddp", except for the optimizers."""

    is_needed = True

    def check_divisible(self, each: nn.Module | Optimizer) -> None:
        if isinstance(each, Optimizer):
            check_divisible(each, self.options)
            _check_remade(each)

    def wrap_optimizer(self, optimizer: Optimizer) -> Optimizer:
        sharded = shard_optimizer(optimizer)
        _share_groups(ref(optimizer), sharded)
        sharded.register_step_pre_hook(partial(self._announce, ref(sharded)))
        sharded.register_load_state_dict_post_hook(partial(_share_groups, ref(optimizer)))  # which makes new groups
        setattr(sharded, "state_dict", MethodType(_state_dict, sharded))  # noqa: B010 - a method, to a type checker
        given_up.add(optimizer)
        return sharded

    def _announce(self, prepared: Callable[[], Optimizer | None], optimizer: Optimizer, *_: Any) -> None:
        if optimizer is prepared():  # the hooks are shared with the user's optimizer, which may be prepared again
            _refuse_frozen(optimizer)
            # At the end of the step, each rank broadcasts the parameters that it has stepped.
            self.world.comm.announce(f"the end of {self.steps.step.place()}")


def _state_dict(optimizer: ZeroRedundancyOptimizer) -> dict[str, Any]:
    """Its `state_dict`, which needs a call of `consolidate_state_dict` before, and then is on one rank only."""
    try:
        return type(optimizer).state_dict(optimizer)
    except RuntimeError as error:
        raise RuntimeError(
            f"strategy='zero1' has divided the state of the {type(optimizer.optim).__name__} among the ranks, and this "
            "one does not have all of it; accelerator.save_state() saves it, and accelerator.state_dict(optimizer), "
            "called on every rank, returns it on rank zero"
        ) from error


def _refuse_frozen(optimizer: Optimizer) -> None:
    """Refuse to step while a frozen parameter has a gradient: on one device it would be stepped on, too."""
    for place, each in enumerate(parameters_of(optimizer)):
        if not each.requires_grad and each.grad is not None:
            raise RuntimeError(
                f"parameter {place} of the {type(optimizer).__name__} was frozen and still has a gradient, which "
                "strategy='zero1' leaves out of its steps; call zero_grad(set_to_none=True) after freezing, or use "
                "strategy='ddp'"
            )


def _share_groups(replaced: Callable[[], Optimizer | None], optimizer: Optimizer) -> None:
    """Let the user's optimizer have the groups of the one in its place."""
    # A scheduler that is not prepared keeps the user's optimizer, and changes the learning rates there.
    if (before := replaced()) is not None:
        before.param_groups = optimizer.param_groups


def shard_optimizer(optimizer: Optimizer) -> ZeroRedundancyOptimizer:
    """Create an optimizer of the same class and groups, to which the state of this one moves, divided among the ranks.
    Its steps call the hooks of this one."""
    parameters = parameters_of(optimizer)
    # Contiguous parameters are sent in one piece for each rank, which would lose other memory formats.
    shares_memory = all(parameter.is_contiguous() for parameter in parameters)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # that module's use of torch.jit, before torch 2.14
        from torch.distributed.optim import ZeroRedundancyOptimizer

    kept: dict[str, Any] = {"optimizer_class": type(optimizer), "parameters_as_bucket_view": shares_memory}
    sharded = _make(optimizer, partial(ZeroRedundancyOptimizer, **kept))
    load_local(sharded, optimizer.state_dict())
    # The whole state, if the user's optimizer kept it, would occupy the memory that is saved.
    optimizer.state.clear()
    for hooks in (STEP_PRE_HOOKS, STEP_POST_HOOKS):
        # The same dictionaries, so that handles can still remove their hooks.
        setattr(sharded, hooks, getattr(optimizer, hooks))
    if shares_memory:
        sharded.register_step_post_hook(_MemoryCheck(sharded))
    return sharded


class _MemoryCheck:
    """A hook that checks after each step that the parameters still have the memory that the ranks exchange."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = ref(optimizer)  # the hooks are shared with the user's optimizer, which may be prepared again
        self._layout = _layout_of(optimizer)
        self._memory = Rebinding(parameters_of(optimizer))

    def __call__(self, optimizer: Optimizer, *_: Any) -> None:
        if optimizer is not self._optimizer():
            return
        if _layout_of(optimizer) != self._layout:
            # A group was added, or a layer unfrozen: torch has rebuilt the memory of all parameters.
            self._layout, self._memory = _layout_of(optimizer), Rebinding(parameters_of(optimizer))
        self._memory.check("zero1")


def _layout_of(optimizer: Optimizer) -> list[bool]:
    return [each.requires_grad for each in parameters_of(optimizer)]


def is_divided(optimizer: Optimizer) -> TypeGuard[ZeroRedundancyOptimizer]:
    """Whether the optimizer's state is divided among the ranks."""
    return isinstance(optimizer, loaded_class("torch.distributed.optim", "ZeroRedundancyOptimizer"))


def load_local(optimizer: ZeroRedundancyOptimizer, state: Mapping[str, Any]) -> None:
    """Load this rank's part of a whole state in torch's plain form; the parts of other ranks may be missing.

    The tensors of `state` may become the optimizer's own. `optimizer.load_state_dict` is not used, since it would clear
    the entries of other ranks in `state`.
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
    """The groups in the form of a plain state, with numbers in place of parameters."""
    numbers = count()
    return [{**group, "params": [next(numbers) for _ in group["params"]]} for group in groups]


def _check_remade(optimizer: Optimizer) -> None:
    """Check that `shard_optimizer` can handle it, before anything is changed."""
    name = type(optimizer).__name__
    parameters = parameters_of(optimizer)
    for place, parameter in enumerate(parameters):
        if parameter.dtype != parameters[0].dtype:
            raise ValueError(
                f"strategy='zero1' divides parameters of one type by ranks, and parameter 0 of the {name} is "
                f"{parameters[0].dtype}, parameter {place} is {parameter.dtype}; give them one type (mixed_precision= "
                "computes in another one), or use strategy='ddp'"
            )
    # A trial: only the constructor shows what it accepts.
    _make(optimizer, type(optimizer))


def _make(optimizer: Optimizer, make: Callable[..., T]) -> T:
    """Call `make` with copies of the optimizer's groups, and with those of its defaults that its class accepts."""
    kind = type(optimizer)
    accepted = inspect.signature(kind).parameters
    takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in accepted.values())
    defaults = {name: value for name, value in optimizer.defaults.items() if takes_any or name in accepted}
    try:
        return make([dict(group) for group in optimizer.param_groups], **defaults)
    except Exception as error:
        raise TypeError(
            f"strategy='zero1' makes a {kind.__name__} on each rank from its groups and their defaults "
            f"({', '.join(defaults)}), and that failed: {error!r}; let its constructor take these, or make a "
            "ZeroRedundancyOptimizer yourself"
        ) from error
