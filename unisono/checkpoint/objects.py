"""What a checkpoint stores of each object, and how that is restored: models, optimizers, loaders, anything with a
state.

A model's state, and an optimizer's, is in torch's plain form under every strategy (`parallel/strategies/states.py`).
Rank zero's is saved, except for loaders and random generators, of which each rank has its own.

*Threads:* the rank's own. All ranks must call, with the same objects in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from unisono.checkpoint.plain_data import as_plain
from unisono.errors import CheckpointMismatchError
from unisono.loaders.device_iterator import DeviceIterator
from unisono.loaders.parallel_loader import DeviceLoader, ParallelLoader
from unisono.loaders.sources import is_stateful
from unisono.parallel.prepared.metrics import is_metric
from unisono.parallel.prepared.model import PreparedModel
from unisono.parallel.strategies.states import (
    groups_of,
    load_model_state,
    load_optimizer_state,
    model_parts,
    model_state,
    optimizer_parts,
    optimizer_state,
    plain_name,
)
from unisono.world import World

Objects = Mapping[str, Any]
Copy = Callable[[torch.Tensor], torch.Tensor]

DIVIDED = ("model", "optimizer")
OF_EACH_RANK = ("loader", "generator")
_SHOWN = 3
_OF_ZERO1 = "ZeroRedundancyOptimizer"  # the class in checkpoints that earlier versions wrote under "zero1"


def kind_of(name: str, each: Any) -> str:
    """How an object is handled: "model", "optimizer", "loader", "generator" or "state"; TypeError if it cannot be
    saved."""
    if isinstance(each, DeviceLoader | DeviceIterator | ParallelLoader):
        return "loader"
    if isinstance(each, Optimizer):
        return "optimizer"
    if is_metric(each) and not each.state_dict():
        raise TypeError(f"{name} is a metric whose state_dict is empty; call {name}.persistent(True) before saving it")
    if isinstance(each, nn.Module) and not is_metric(each):
        return "model"
    if isinstance(each, torch.Generator):
        return "generator"
    if is_stateful(each):
        return "state"
    raise TypeError(
        f"{name} is of type {type(each).__name__}, which has no state_dict() and load_state_dict(); a checkpoint takes "
        "models, optimizers, schedulers, loaders, torch.Generators and objects with these two methods"
    )


def kinds_of(objects: Objects) -> dict[str, list[str]]:
    """The kind of each object, and its class; TypeError as for `kind_of`."""
    return {name: [kind_of(name, each), _class_of(each)] for name, each in objects.items()}


def _class_of(each: Any) -> str:
    """The name of the user's class; under "zero1" torch's optimizer holds the user's as `optim`."""
    held = getattr(each, "optim", None) if isinstance(each, Optimizer) else None
    return type(held if isinstance(held, Optimizer) else user_module(each)).__name__


def user_module(each: nn.Module) -> nn.Module:
    """The module that was given to `prepare`."""
    return each.module if isinstance(each, PreparedModel) else each


def modules_of(objects: Objects) -> list[nn.Module]:
    """The models among the objects."""
    return [user_module(each) for name, each in objects.items() if kind_of(name, each) == "model"]


# Saving.


def own_states(objects: Objects) -> dict[str, Any]:
    """The states that only this rank has: those of its loaders and generators."""
    return {
        name: each.get_state() if kind == "generator" else each.state_dict()
        for name, each in objects.items()
        if (kind := kind_of(name, each)) in OF_EACH_RANK
    }


def whole_states(objects: Objects, world: World, copy: Copy) -> dict[str, Any]:
    """On rank zero, copies of all other states; {} on others. A collective. TypeError if a state is not plain data."""
    own_copy = copy if world.rank == 0 else None
    states: dict[str, Any] = {}
    for name, each in objects.items():
        kind = kind_of(name, each)
        if kind == "model":
            states[name] = model_state(user_module(each), world, own_copy)
        elif kind == "optimizer":
            states[name] = optimizer_state(each, world, own_copy)
        elif kind == "state":
            states[name] = each.state_dict()  # on every rank: it may be a collective
    # Only after the loop, in which the states are gathered by collectives, which copies those of models and optimizers.
    copies = {name: copy if kind_of(name, objects[name]) == "state" else _as_it_is for name in states}
    if world.rank != 0:
        return {}
    return {name: as_plain(state, f"{name}.state_dict()", copies[name]) for name, state in states.items()}


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def divided_states(
    objects: Objects, world: World, copy: Copy
) -> tuple[dict[str, Any], dict[str, torch.Tensor], dict[str, dict[Any, Any]]]:
    """Like `whole_states`, if all ranks write concurrently.

    Returns:
        The states on rank zero, without tensors of models and optimizers; this rank's parts of these, by names such as
        "model/0.weight" and "optimizer/3/exp_avg"; and the values among them that are not tensors.
    """
    states: dict[str, Any] = {}
    parts: dict[str, torch.Tensor] = {}
    values: dict[str, dict[Any, Any]] = {}
    for name, each in objects.items():
        kind, found = kind_of(name, each), dict[Any, Any]()
        if kind == "model":
            found = model_parts(user_module(each), world)
            states[name] = list(found)
        elif kind == "optimizer":
            found = optimizer_parts(each, world)
            states[name] = {"param_groups": as_plain(groups_of(each), f"{name}.param_groups", copy)}
        elif kind == "state":
            states[name] = as_plain(each.state_dict(), f"{name}.state_dict()", copy)
        tensors = {key: value for key, value in found.items() if isinstance(value, torch.Tensor)}
        parts.update((part_name(name, key), copy(value)) for key, value in tensors.items())
        others = {key: value for key, value in found.items() if key not in tensors}
        if kind in DIVIDED:
            values[name] = as_plain(others, f"{name}.state_dict()", copy)
    return states if world.rank == 0 else {}, parts, values


def part_name(name: str, key: Any) -> str:
    """The name of a tensor among those that all ranks write."""
    return f"{name}/{key}" if isinstance(key, str) else f"{name}/{key[0]}/{key[1]}"


# Loading.


def describe(states: Mapping[str, Any], kinds: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """What must match: the shapes of each model, the sizes of each optimizer's groups."""
    found: dict[str, Any] = {}
    for name, state in states.items():
        if kinds[name][0] == "model":
            found[name] = {key: _shape_of(value) for key, value in state.items()}
        elif kinds[name][0] == "optimizer":
            found[name] = [len(group["params"]) for group in state["param_groups"]]
    return found


def check_fit(
    objects: Objects,
    saved: Mapping[str, Sequence[str]],
    described: Mapping[str, Any],
    where: str,
    allow_other_optimizer: bool = False,
) -> None:
    """Check that a checkpoint holds these objects, before anything is changed. A CheckpointMismatchError has the first
    names that are missing, unexpected or of another shape, or both classes of an optimizer."""
    for name, (kind, own_class) in kinds_of(objects).items():
        if name not in saved:
            raise CheckpointMismatchError(
                f"{where} has no {name}: it holds {', '.join(saved)}; load the objects that were saved, under the same "
                "names and in the same order"
            )
        if saved[name][0] != kind:
            raise CheckpointMismatchError(f"{name} is a {kind}, and in {where} it is a {saved[name][0]}")
        if kind == "model":
            _check_model(name, user_module(objects[name]), described[name], saved[name][1], where)
        elif kind == "optimizer":
            if not allow_other_optimizer and saved[name][1] not in (own_class, _OF_ZERO1):
                raise CheckpointMismatchError(
                    f"{name} in {where} is the state of {saved[name][1]}, and this is {own_class}, which reads other "
                    f"numbers in it, or misses some; make {saved[name][1]}, or load what fits: "
                    "allow_other_optimizer=True"
                )
            own = [len(group["params"]) for group in objects[name].param_groups]
            if own != described[name]:
                raise CheckpointMismatchError(
                    f"{name} in {where} has groups of {described[name]} parameters, and the "
                    f"{type(objects[name]).__name__} has groups of {own}; make it for the same parameters, in the same "
                    "groups and order"
                )


def _check_model(name: str, model: nn.Module, saved: Mapping[str, Any], kind: str, where: str) -> None:
    own = {plain_name(model, key): _shape_of(value) for key, value in model.state_dict().items()}
    wrong = {
        "missing in the checkpoint": [key for key in own if key not in saved],
        "unexpected in the checkpoint": [key for key in saved if key not in own],
        "of another shape": [
            f"{key} (saved {saved[key]}, here {own[key]})" for key in own if key in saved and saved[key] != own[key]
        ],
    }
    if any(wrong.values()):
        shown = [f"{what}: {', '.join(found[:_SHOWN])}{_count_rest(found)}" for what, found in wrong.items() if found]
        raise CheckpointMismatchError(
            f"{name} in {where} is of another model, a {kind}, than this {type(model).__name__}: {'; '.join(shown)}; "
            "build the model that was saved, or load the tensors that fit from `unisono checkpoint export`"
        )


def _count_rest(found: Sequence[str]) -> str:
    return f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""


def _shape_of(value: Any) -> list[int] | None:
    return list(value.shape) if isinstance(value, torch.Tensor) else None


def restore(
    objects: Objects, states: Mapping[str, Any], others: Mapping[str, Any], own: Mapping[str, Any], world: World
) -> None:
    """Load the states: on rank zero those of models and optimizers, on all ranks `others`, and of each its `own`: those
    of its loaders and generators. A collective."""
    for name, each in objects.items():
        kind = kind_of(name, each)
        if kind == "model":
            load_model_state(user_module(each), states.get(name, {}), world)
        elif kind == "optimizer":
            load_optimizer_state(each, states.get(name, {}), world)
        elif kind == "generator":
            each.set_state(own[name])
        else:
            each.load_state_dict(own[name] if kind == "loader" else others[name])
