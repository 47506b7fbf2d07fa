"""What a script may do by itself with the parts that ranks keep of parameters and gradients.

DTensor does some of it wrongly, and in silence. A view of rows that other ranks have is a copy, so that a write to it
is lost; and each rank draws the same random numbers for its own rows. A `Part` refuses such writes, and draws as one
device does.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from typing import Any
from weakref import ref

import torch
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from unisono.torch_private import (
    BACKWARD_HOOKS,
    OPERATOR_SCHEMA,
    POST_GRADIENT_HOOKS,
    STEP_POST_HOOKS,
    STEP_PRE_HOOKS,
    STORAGE_ADDRESS,
)
from unisono.training.strategies.sharded import MIXED, WholeParameter
from unisono.tree import objects, tree_map

Hooks = tuple[Any, Any]
"""The dictionaries of a tensor's hooks of both kinds; None where it has none."""

# Of parameters, what stands in their place while the model runs.
_wholes = WeakTensorKeyDictionary()


class Part(DTensor):
    """A sharded parameter or gradient, or what was computed from one."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, operation: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        parts = [each for each in objects((args, kwargs)) if isinstance(each, Part)]
        places, names = _written(operation)
        written = objects([[args[each] for each in places if each < len(args)], [kwargs.get(each) for each in names]])
        if any(isinstance(each, _Copied) for each in written):
            raise RuntimeError(_LOST)
        memories = {_memory(each) for each in parts if not isinstance(each, _Copied)}
        target = next((each for each in written if isinstance(each, Part)), None)
        with as_plain(parts):
            try:
                is_whole = _depends(operation) or (target is not None and not _is_of_elements(operation))
                if target is not None and not is_whole:  # a whole tensor is written: rank zero's, in all parts
                    args, kwargs = tree_map(partial(_share_whole, target), (args, dict(kwargs)))
                run = _run_on_whole if is_whole else _run
                result = run(operation, args, kwargs, parts, written)
            except RuntimeError as error:
                if MIXED in str(error):
                    raise RuntimeError(f"{operation} got {MIXED}: {_MET}") from error
                raise
        for each in objects(result):
            if type(each) is DTensor:
                each.__class__ = _Copied if operation.is_view and _memory(each) not in memories else Part
        return result

    def register_hook(self, hook: Callable[[torch.Tensor], torch.Tensor | None]) -> RemovableHandle:
        """As torch's; the gradient of a loss is whole, this rank's alone, and not yet reduced."""
        handle: RemovableHandle = super().register_hook(hook)  # for the gradient of a penalty
        _relay(self)
        return handle

    def register_post_accumulate_grad_hook(self, hook: Callable[[torch.Tensor], None]) -> RemovableHandle:
        """As torch's; FSDP2 calls it after the reduction."""
        found: RemovableHandle = super().register_post_accumulate_grad_hook(partial(_call_guarded, hook))
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        with as_plain([self]):  # what is saved is torch's
            return self.__reduce_ex__(protocol)


class _Copied(Part):
    """A view of rows that other ranks have, which is a copy: a write to it would be lost."""


_LOST = (
    "a view of a parameter, or of a gradient, is written to, and under strategy='fsdp' the view has rows of several "
    "ranks, so that it is a copy, and the write would be lost; write to the whole, on every rank: by a list of rows, "
    "weight[[0]] = 0, or by a tensor of its shape, weight.masked_fill_(mask, 0) or weight.copy_(values)"
)
_MET = (
    "under strategy='fsdp' a parameter of a prepared model has the rows of its rank, and met a tensor that has all of "
    "them; take the other one from the prepared model, too, as parameter.detach().clone() for an average, or the whole "
    "parameter on every rank, parameter.full_tensor(); a part of the model is not called by itself: a method of the "
    "model calls it, after model.mark_forward_method(name)"
)


@contextmanager
def as_plain(parts: Iterable[Any]) -> Iterator[None]:
    """A block in which these are torch's own DTensors, whose operations run in C++."""
    changed: list[tuple[Any, type[Part]]] = []
    for each in parts:
        if isinstance(each, Part):
            changed.append((each, type(each)))
            each.__class__ = DTensor  # type: ignore[assignment]
    try:
        yield
    finally:
        for each, kind in changed:
            each.__class__ = kind


def guard(tensor: torch.Tensor | None) -> None:
    """Make a DTensor of FSDP2's a part."""
    if type(tensor) is DTensor:
        tensor.__class__ = Part


def stepping_plain(optimizer: Optimizer) -> Callable[..., Any]:
    """The `step` of an optimizer of torch's, during which parts are torch's own DTensors: it writes to no view."""
    step, held = optimizer.step, ref(optimizer)

    def plain_step(closure: Callable[[], Any] | None = None, **arguments: Any) -> Any:
        of = held()
        if closure is not None:
            arguments["closure"] = closure
        # The script's own code, which runs within the step.
        if closure is not None or of is None or getattr(of, STEP_PRE_HOOKS) or getattr(of, STEP_POST_HOOKS):
            return step(**arguments)
        found = [each for group in of.param_groups for each in group["params"]]
        with as_plain([*found, *(each.grad for each in found)]):
            return step(**arguments)

    return plain_step


def hooks_of(parameter: torch.Tensor) -> Hooks:
    """The hooks that a script has registered."""
    return getattr(parameter, BACKWARD_HOOKS), getattr(parameter, POST_GRADIENT_HOOKS)


def carry_hooks(hooks: Hooks, part: torch.Tensor, whole: WholeParameter) -> None:
    """Let a parameter that is sharded now have the hooks that it had as a whole. Their handles remove them still."""
    _wholes[part] = ref(whole)
    gradient_hooks, post_hooks = hooks
    if gradient_hooks:
        setattr(part, BACKWARD_HOOKS, gradient_hooks)
        _relay(part)
    if post_hooks:
        post_hooks.update({key: partial(_call_guarded, hook) for key, hook in post_hooks.items()})
        setattr(part, POST_GRADIENT_HOOKS, post_hooks)


def post_hooked(parts: Iterable[torch.Tensor]) -> torch.Tensor | None:
    """The first part with a hook that waits for its accumulated gradient."""
    return next((each for each in parts if getattr(each, POST_GRADIENT_HOOKS)), None)


def _relay(part: torch.Tensor) -> None:
    """Have the hooks of a parameter called with the gradients of its whole one, too."""
    held = _wholes.pop(part, None)
    if held is None or (whole := held()) is None:
        return
    if getattr(whole, BACKWARD_HOOKS) is None:
        setattr(whole, BACKWARD_HOOKS, OrderedDict())  # `register_hook` refuses a frozen one
    getattr(whole, BACKWARD_HOOKS)["of its part"] = partial(_call_hooks, ref(part))


def _call_hooks(held: Callable[[], torch.Tensor | None], gradient: Any) -> Any:
    hooks = None if (part := held()) is None else getattr(part, BACKWARD_HOOKS)
    for hook in list((hooks or {}).values()):
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    return gradient


def _call_guarded(hook: Callable[[torch.Tensor], None], part: torch.Tensor) -> None:
    guard(part.grad)  # which the reduction has just made
    hook(part)


@cache
def _written(operation: Any) -> tuple[list[int], list[str]]:
    """The arguments that an operation writes to: their positions, and their names."""
    arguments = enumerate(getattr(operation, OPERATOR_SCHEMA).arguments)
    found = [(place, each.name) for place, each in arguments if each.alias_info and each.alias_info.is_write]
    return [place for place, _ in found], [name for _, name in found]


@cache
def _is_of_elements(operation: Any) -> bool:
    """Whether a write of this operation to one element depends on none of the others, so that each rank may write its
    own; others are rare."""
    name = operation.name().removeprefix("aten::").partition(".")[0]
    return torch.Tag.pointwise in operation.tags or name in _OF_ELEMENTS or name.startswith(_MANY)


_OF_ELEMENTS = {"copy_", "zero_", "fill_"}
_MANY = ("_foreach_", "_fused_", "_amp_")


@cache
def _depends(operation: Any) -> bool:
    """Whether it draws, or returns a number or a shape that depends on the elements: DTensor takes the rank's own."""
    return not _DEPENDENT.isdisjoint(operation.tags)


_DEPENDENT = {torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


def _memory(part: Any) -> Any:
    with torch.no_grad():
        return getattr(part.to_local().untyped_storage(), STORAGE_ADDRESS)


def _run(operation: Any, args: Any, kwargs: Any, *_: Any) -> Any:
    return operation(*args, **kwargs)


@torch.no_grad()
def _run_on_whole(operation: Any, args: Any, kwargs: Any, parts: list[Any], written: list[Any]) -> Any:
    """Run it as one device does, on whole tensors, of which each rank keeps its part. A collective."""
    wholes = {id(each): each.full_tensor() for each in parts}
    owners = {id(wholes[id(each)]): each for each in parts}
    whole_args, whole_kwargs = tree_map(lambda leaf: wholes.get(id(leaf), leaf), (args, dict(kwargs)))
    result = operation(*whole_args, **whole_kwargs)
    for each in written:
        each.to_local().copy_(_share(wholes[id(each)], each).to_local())
    return tree_map(lambda leaf: owners[id(leaf)] if id(leaf) in owners else _share(leaf, parts[0]), result)


def _share_whole(like: Any, leaf: Any) -> Any:
    is_whole = isinstance(leaf, torch.Tensor) and leaf.ndim and not isinstance(leaf, DTensor)
    return _share(leaf, like) if is_whole else leaf


@torch.no_grad()
def _share(whole: Any, like: DTensor) -> Any:
    """The tensor that rank zero has, whose draws count, sharded like a part of its shape."""
    if not isinstance(whole, torch.Tensor):
        return whole
    placements = like.placements if whole.shape == like.shape else [Replicate()] * like.device_mesh.ndim
    return distribute_tensor(whole, like.device_mesh, placements)
