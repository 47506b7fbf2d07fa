"""Checkpoints in torch's plain form, from any strategy into any other one: whole tensors by the names of the user's
module, and what `state_dict()` of the plain optimizer returns, with parameters numbered in its order.

Every rank calls these functions. When saving, each rank gets the state in host memory, if it has all of it; what is
sharded is gathered on rank zero, and `Elsewhere` on the others. When loading, rank zero's state is broadcast one tensor
at a time, and each tensor is sharded on arrival; the states passed by other ranks are ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from unisono.comm.pickling import BETWEEN_RANKS
from unisono.errors import CheckpointError, CheckpointMismatchError
from unisono.torch_private import MODULES
from unisono.training.gradients import is_sparse, parts_of
from unisono.training.parameter_names import parameters_of
from unisono.training.strategies.sharded import cut_like, is_distributed
from unisono.training.strategies.zero1 import is_divided, load_local, numbered
from unisono.world import World

K = TypeVar("K", bound=Hashable)
Copy = Callable[[torch.Tensor], torch.Tensor]
"""A function that copies a tensor to main memory."""


_plain_names: WeakKeyDictionary[nn.Module, dict[str, str]] = WeakKeyDictionary()


class Elsewhere(dict[str, Any]):
    """Stands for a state that is on rank zero: without entries, so that `if state:` means that it is here. If every
    rank saved what it has to one file, the last one would leave {} there: so whatever reads it or pickles it for a file
    is a CheckpointError."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self._what = what

    def _refuse(self, *_: Any) -> Any:
        raise CheckpointError(
            f"this rank does not have the state of the {self._what}: each rank has a part, and rank zero gets the "
            "whole; call state_dict on every rank, and read or save what it returns on rank zero: "
            "if accelerator.is_main_process: torch.save(...)"
        )

    __reduce_ex__ = __getitem__ = __contains__ = __iter__ = __or__ = _refuse
    get = keys = values = items = _refuse

    def __repr__(self) -> str:
        return f"<the state of the {self._what}, on rank zero>"

    def copy(self, *_: Any) -> Elsewhere:
        return self

    __copy__ = __deepcopy__ = copy


BETWEEN_RANKS[Elsewhere] = lambda state: (Elsewhere, (state._what,))


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in new main memory."""
    host = tensor.detach().cpu()
    return host.clone() if host.data_ptr() == tensor.data_ptr() else host  # `cpu` does not copy what is there already


def model_state(model: nn.Module, world: World, copy: Copy | None = on_host) -> dict[str, Any]:
    """The model's plain `state_dict`: whole tensors on the host, names without the prefixes of wrappers.

    Tied parameters share one tensor in it. Buffers are the rank's own.

    Args:
        model: plain, wrapped, compiled or sharded. If it is sharded, this is a collective.
        copy: creates the copies; None on a rank that keeps none, which gets `Elsewhere`, as all but rank zero do if the
            model is sharded.
    """
    if any(is_distributed(each) for each in model.parameters()):
        world.comm.announce("state_dict(model)")
        copy = copy if world.rank == 0 else None
    named: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    plain: dict[int, Any] = {}
    state = {}
    for name, value in model.state_dict().items():
        # `model.state_dict` makes a new tensor for each name, so only the parameters show which names are tied.
        key = id(named.get(name, value))
        if key not in plain:
            # On every rank: gathering a sharded tensor is a collective.
            plain[key] = _whole(value, copy)
        state[plain_name(model, name)] = plain[key]
    return Elsewhere("model") if copy is None else state


def load_model_state(model: nn.Module, state: Mapping[str, Any], world: World) -> None:
    """Load rank zero's plain state on every rank; RuntimeError on each if names or shapes differ from the model's."""
    world.comm.announce("load_state_dict(model)")
    own = model.state_dict()
    names = {plain_name(model, name): name for name in own}
    loaded = {}
    for name, value in broadcast_entries(state, world):
        # Names that the model lacks are passed on, for `load_state_dict` to refuse on every rank.
        known = names.get(name, name)
        loaded[known] = _cut_like(own[known], value) if is_distributed(own.get(known)) else value
    model.load_state_dict(loaded)


def optimizer_state(optimizer: Optimizer, world: World, copy: Copy | None = on_host) -> dict[str, Any]:
    """The state of a plain optimizer for the same parameters, in the same groups.

    A collective for a sharded model, or a ZeroRedundancyOptimizer; all but rank zero get `Elsewhere` then. `copy` is as
    for `model_state`.
    """
    if is_divided(optimizer) or any(is_distributed(each) for each in parameters_of(optimizer)):
        world.comm.announce("state_dict(optimizer)")
        copy = copy if world.rank == 0 else None
    if is_divided(optimizer):
        # Not `consolidate_state_dict`, which sends every whole state to every rank, and keeps a copy on rank zero.
        own = _entries_of(optimizer.optim, optimizer)
        roots = range(world.comm.size)
        entries = {key: _whole(value, copy) for root in roots for key, value in broadcast_entries(own, world, root)}
    else:
        entries = {key: _whole(value, copy) for key, value in _entries_of(optimizer, optimizer).items()}
    if copy is None:
        return Elsewhere("optimizer")
    # Sorted by parameter, as in a plain state: the entries of a divided optimizer have come rank by rank.
    return {"state": by_parameter(dict(sorted(entries.items()))), "param_groups": groups_of(optimizer)}


def groups_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Copies of the optimizer's parameter groups, in the form of a plain state."""
    return deepcopy(numbered(optimizer.param_groups))


def model_parts(model: nn.Module) -> dict[str, Any]:
    """What this rank has of a plain state, whole tensors and shards."""
    known = _plain_names.setdefault(model, {})
    return {
        known.get(name) or known.setdefault(name, plain_name(model, name)): value
        for name, value in model.state_dict().items()
    }


def optimizer_parts(optimizer: Optimizer) -> dict[tuple[int, str], Any]:
    """What this rank has of an optimizer's plain state, by the parameter's number and the name of the value."""
    return _entries_of(optimizer.optim if is_divided(optimizer) else optimizer, optimizer)


def load_optimizer_state(optimizer: Optimizer, state: Mapping[str, Any], world: World) -> None:
    """Load rank zero's plain state on every rank. It is that of an optimizer of the same class, for the same parameters
    in the same groups; else ValueError on every rank: CheckpointMismatchError, if the groups show another class."""
    world.comm.announce("load_state_dict(optimizer)")
    is_given = world.rank == 0 and "param_groups" in state
    # What is no state is broadcast as None, so that all ranks raise.
    groups = world.comm.broadcast_object(numbered(state["param_groups"]) if is_given else None)
    _check_groups(groups, optimizer)
    plain = optimizer.optim if is_divided(optimizer) else optimizer
    if other := _other_class(groups, plain):
        raise CheckpointMismatchError(
            f"the state belongs to an optimizer of another class than {type(plain).__name__}: {other}; load it into "
            "the class that was saved, or begin without a state"
        )
    parameters, kept = parameters_of(optimizer), set(parameters_of(plain))
    entries: dict[tuple[int, str], Any] = {}
    for (number, name), value in broadcast_entries(_flat(state) if world.rank == 0 else {}, world):
        # Every rank receives each value; with ZeRO-1 only the rank that steps the parameter keeps it.
        if parameters[number] in kept:
            entries[number, name] = _cut_like(parameters[number], value)
    loaded = {"state": by_parameter(entries), "param_groups": groups}
    if is_divided(optimizer):
        load_local(optimizer, loaded)
    else:
        optimizer.load_state_dict(loaded)


def plain_name(model: nn.Module, name: str) -> str:
    """A name in `model.state_dict()` without the prefixes of DistributedDataParallel and torch.compile."""
    from unisono.torch_private import ORIGINAL

    module: Any = model
    words, kept = name.split("."), []
    for word in words:
        is_wrapper = (isinstance(module, DistributedDataParallel) and word == "module") or word == ORIGINAL
        if not is_wrapper:
            kept.append(word)
        module = getattr(module, MODULES, {}).get(word)
    return ".".join(kept)


def _whole(value: Any, copy: Copy | None) -> Any:
    """A copy of a value; None on a rank that keeps none. A collective for a sharded tensor."""
    if is_distributed(value):
        value = value.full_tensor()
    if copy is None:
        return None
    return copy(value) if isinstance(value, torch.Tensor) else deepcopy(value)


def _cut_like(like: torch.Tensor, value: Any) -> Any:
    """This rank's shard of a whole tensor, if `like` is sharded; scalars, such as step counts, stay whole."""
    if not is_distributed(like) or not isinstance(value, torch.Tensor) or value.ndim == 0:
        return value
    return cut_like(like, value)


class _Sent(NamedTuple):
    """What a tensor is like that is sent.

    Attributes:
        parts: those of `parts_of`, without their values.
        is_coalesced: of a sparse one; None for others.
    """

    parts: list[torch.Tensor]
    shape: torch.Size
    is_coalesced: bool | None


def broadcast_entries(entries: Mapping[K, Any], world: World, root: int = 0) -> Iterator[tuple[K, Any]]:
    """Broadcast the entries of rank `root`, one by one. Tensors arrive on the receiving rank's device; scalars, such as
    step counts, keep their device."""

    def form(value: Any) -> Any:
        if not (isinstance(value, torch.Tensor) and value.ndim):
            return value
        parts = [torch.empty(each.shape, dtype=each.dtype, device="meta") for each in parts_of(value)]
        return _Sent(parts, value.shape, value.is_coalesced() if is_sparse(value) else None)

    own = {key: form(value) for key, value in entries.items()} if world.rank == root else {}
    for key, held in world.comm.broadcast_object(own, root).items():
        if not isinstance(held, _Sent):
            yield key, held
            continue
        parts = [torch.empty_like(each, device=world.device) for each in held.parts]
        for part, value in zip(parts, parts_of(entries[key]) if world.rank == root else parts, strict=True):
            world.comm.broadcast(part.copy_(value), root)
        found = parts[0]
        if held.is_coalesced is not None:
            flags: dict[str, Any] = {"is_coalesced": held.is_coalesced, "check_invariants": True}
            found = torch.sparse_coo_tensor(parts[0], parts[1], held.shape, device=world.device, **flags)
        yield key, found


def _entries_of(optimizer: Optimizer, whole: Optimizer) -> dict[tuple[int, str], Any]:
    """The optimizer's values, by the parameter's number in `whole` and the name of the value."""
    numbers = {parameter: number for number, parameter in enumerate(parameters_of(whole))}
    kept = [numbers[parameter] for parameter in parameters_of(optimizer)]
    return {(kept[place], name): value for (place, name), value in _flat(optimizer.state_dict()).items()}


def _flat(state: Mapping[str, Any]) -> dict[tuple[int, str], Any]:
    """The values of a plain state, by the parameter's position and the name of the value."""
    order = [number for group in state["param_groups"] for number in group["params"]]
    # The numbers of a state are only names: its entries belong to the parameters in the order of its groups.
    places = {number: place for place, number in enumerate(order)}
    return {
        (places[number], name): value for number, values in state["state"].items() for name, value in values.items()
    }


def by_parameter(entries: Mapping[tuple[int, str], Any]) -> dict[int, dict[str, Any]]:
    """Group an optimizer's values by parameter, as in a plain state."""
    state: dict[int, dict[str, Any]] = {}
    for (number, name), value in entries.items():
        state.setdefault(number, {})[name] = value
    return state


_DECOUPLED = "decoupled_weight_decay"  # of AdamW, in the place of Adam's
# What torch adds to the groups of states that were saved before it had these.
_LATER = {"amsgrad", "capturable", "differentiable", "foreach", "fused", "maximize", "nesterov", _DECOUPLED}


def _other_class(groups: Sequence[Mapping[str, Any]], optimizer: Optimizer) -> str:
    """What shows that groups are of an optimizer of another class; empty if nothing does."""
    for group in groups:
        if lacking := [name for name in optimizer.defaults if name not in group and name not in _LATER]:
            return f"its groups have no {lacking[0]!r}"
        if group.get(_DECOUPLED, False) != optimizer.defaults.get(_DECOUPLED, group.get(_DECOUPLED, False)):
            return "it has the other kind of weight decay"
    return ""


def _check_groups(groups: Sequence[Mapping[str, Any]] | None, optimizer: Optimizer) -> None:
    if groups is None:
        raise ValueError("rank zero has passed no optimizer state; pass what optimizer_state returned, or state_dict()")
    saved = [len(group["params"]) for group in groups]
    own = [len(group["params"]) for group in optimizer.param_groups]
    if saved != own:
        raise ValueError(
            f"the state has groups of {saved} parameters, and the {type(optimizer).__name__} has groups of {own}; "
            "make the optimizer for the same parameters, in the same groups and order, as the one that was saved"
        )
