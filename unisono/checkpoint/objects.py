"""What a checkpoint stores of each object, and how that is restored: models, optimizers, loaders, anything with a
state.

A model's state, and an optimizer's, is in torch's plain form under every strategy (`training/strategies/states.py`).
Rank zero's is saved, except for loaders and random generators: each rank has its own.

*Threads:* the rank's own. All ranks must call, with the same objects in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from unisono.checkpoint.serialization import as_plain
from unisono.errors import CheckpointMismatchError
from unisono.loading.device_iterator import DeviceIterator
from unisono.loading.loader_options import Dealt
from unisono.loading.sources import is_stateful
from unisono.training.prepared.metrics import is_metric
from unisono.training.prepared.model import PreparedModel
from unisono.training.prepared.step_checks import engines_of
from unisono.training.strategies.sharded import cut_of, is_distributed, is_first, is_within, units_in
from unisono.training.strategies.states import (
    by_parameter,
    load_model_state,
    load_optimizer_state,
    model_parts,
    model_state,
    on_host,
    optimizer_parts,
    optimizer_state,
    plain_name,
)
from unisono.training.strategies.zero1 import is_divided, numbered
from unisono.world import World

Objects = Mapping[str, Any]
Copy = Callable[[torch.Tensor], torch.Tensor]

DIVIDED = ("model", "optimizer")
OF_EACH_RANK = ("loader", "generator")


def kind_of(name: str, each: Any) -> str:
    """How an object is saved: "model", "optimizer", "loader", "generator" or "state"; TypeError if it cannot be."""
    if isinstance(each, Dealt | DeviceIterator):
        return "loader"
    if isinstance(each, Optimizer):
        return "optimizer"
    if isinstance(each, nn.Module):
        if not is_metric(each):
            return "model"
        if not each.state_dict():
            raise TypeError(f"{name} is a metric without a state; call {name}.persistent(True) before saving it")
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


def meet(each: Any, saves: bool = False) -> None:
    """Bring ranks that step alone to one state of this object, if it is a prepared model: `Engine.meet`."""
    for engine in engines_of(user_module(each)):
        engine.equalize_ranks(saves)


def are_divided(objects: Objects) -> bool:
    """Whether a model, or an optimizer's state, is divided among the ranks. The same on all ranks."""
    modules = [user_module(each) for name, each in objects.items() if kind_of(name, each) == "model"]
    return any(map(units_in, modules)) or any(map(is_divided, objects.values()))


# Saving.


def own_states(objects: Objects) -> dict[str, Any]:
    """The states that only this rank has: those of its loaders and generators."""
    return {
        name: each.get_state() if kind == "generator" else each.state_dict()
        for name, each in objects.items()
        if (kind := kind_of(name, each)) in OF_EACH_RANK
    }


def kept_states(objects: Objects) -> dict[str, list[Any]]:
    """Copies of what this rank's models keep from step to step besides their parameters: for each, what its engines
    keep. The same names on all ranks."""
    models = {name: each for name, each in objects.items() if kind_of(name, each) == "model"}
    kept = {name: [each.state() for each in engines_of(user_module(model))] for name, model in models.items()}
    kept = {name: states for name, states in kept.items() if any(each is not None for each in states)}
    try:
        return {name: as_plain(states, f"comm_hook of {name}", on_host) for name, states in kept.items()}
    except TypeError as error:
        error.add_note("or give the comm_hook, or its first argument, state_dict() and load_state_dict()")
        raise


def load_kept(objects: Objects, kept: Mapping[str, Sequence[Any]]) -> None:
    """Load `kept_states` of the same rank."""
    for name in kept.keys() & objects.keys():
        for engine, state in zip(engines_of(user_module(objects[name])), kept[name], strict=False):
            if state is not None:
                engine.load_state(state)


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
    if world.rank != 0:
        return {}
    # Only after the loop, where collectives gather the states, which copies those of models and optimizers.
    for name, state in states.items():
        is_copied = kind_of(name, objects[name]) in DIVIDED
        states[name] = as_plain(state, f"{name}.state_dict()", (lambda each: each) if is_copied else copy)
    return states


def is_spread(objects: Objects, ranks: Container[int]) -> bool:
    """Whether some of the state of models and optimizers, as far as this rank has it, is not among these ranks."""
    modules = [user_module(each) for name, each in objects.items() if kind_of(name, each) == "model"]
    cut = [each for module in modules for each in module.parameters() if is_distributed(each)]
    return any(map(is_divided, objects.values())) or not all(is_within(each, ranks) for each in cut)


def divided_states(
    objects: Objects,
    keep: Callable[[Any, Mapping[Any, Any]], Mapping[Any, Any]],
    ranks: Container[int] | None = None,
) -> dict[str, dict[str, Any]]:
    """This rank's part of the states of models and optimizers, not copied: for each its "names", or its "groups";
    "values" that are whole; and "cuts" of sharded tensors: the shape of the whole, where the cut begins, and the cut.

    Args:
        keep: which of a model's or an optimizer's whole values are in this rank's part, if others have them, too.
        ranks: those whose parts together are the whole; None: all.
    """
    parts: dict[str, dict[str, Any]] = {}
    for name, each in objects.items():
        kind = kind_of(name, each)
        if kind == "model":
            module = user_module(each)
            found: dict[Any, Any] = model_parts(module)
            part: dict[str, Any] = {"names": list(found)}
        elif kind == "optimizer":
            found, part = optimizer_parts(each), {"groups": numbered(each.param_groups)}
        else:
            continue
        whole = {key: value for key, value in found.items() if not is_distributed(value)}
        part["values"] = whole if is_divided(each) else keep(each, whole)
        cuts = {key: value for key, value in found.items() if key not in whole and is_first(value, ranks)}
        part["cuts"] = {key: cut_of(value) for key, value in cuts.items()}
        parts[name] = part
    return parts


def joined_state(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The whole state; each rank has a part of it."""
    found: dict[Any, Any] = {}
    for part in parts:
        found.update(part["values"])
        for key, (shape, offsets, cut) in part["cuts"].items():
            whole = found[key] if key in found else torch.empty(shape, dtype=cut.dtype, device=cut.device)
            whole[tuple(slice(start, start + size) for start, size in zip(offsets, cut.shape, strict=True))] = cut
            found[key] = whole
    if "names" in parts[0]:
        return {key: found[key] for key in parts[0]["names"]}
    return {"state": by_parameter(dict(sorted(found.items()))), "param_groups": parts[0]["groups"]}


# Loading.


def check_fit(objects: Objects, states: Mapping[str, Any], saved: Mapping[str, Sequence[str]], where: str) -> None:
    """Check that a checkpoint holds these objects, before anything is changed; a CheckpointMismatchError says where
    they differ."""
    for name, (kind, own_class) in kinds_of(objects).items():
        if name not in saved:
            raise CheckpointMismatchError(f"{where} has no {name}: it holds {', '.join(saved)}; load what was saved")
        saved_kind, saved_class = saved[name]
        if saved_kind != kind:
            raise CheckpointMismatchError(f"{name} is a {kind}, and in {where} it is a {saved_kind}")
        if kind == "model":
            _check_model(f"{name} in {where}", user_module(objects[name]), states[name])
        elif kind == "optimizer":
            if saved_class != own_class:
                raise CheckpointMismatchError(
                    f"{name} in {where} is the state of {saved_class}, and this is {own_class}; make {saved_class}, or "
                    f"load what `unisono checkpoint export --object {name}` writes into the plain optimizer"
                )
            own = [len(group["params"]) for group in objects[name].param_groups]
            there = [len(group["params"]) for group in states[name]["param_groups"]]
            if own != there:
                raise CheckpointMismatchError(
                    f"{name} in {where} has groups of {there} parameters, and the {own_class} has groups of {own}"
                )


def _check_model(what: str, model: nn.Module, saved: Mapping[str, Any]) -> None:
    own = {plain_name(model, key): _form_of(value) for key, value in model.state_dict().items()}
    there = {key: _form_of(value) for key, value in saved.items()}
    names = [key for key in {**own, **there} if own.get(key) != there.get(key)]
    shown = [f"{key} (saved: {there.get(key, 'missing')}, here: {own.get(key, 'missing')})" for key in names[:5]]
    if names:
        raise CheckpointMismatchError(
            f"{what} belongs to another model than this {type(model).__name__}: {len(names)} names differ, "
            f"{', '.join(shown)}; build that model, or load the tensors that fit from `unisono checkpoint export`"
        )


def _form_of(value: Any) -> str:
    return f"shape {list(value.shape)}" if isinstance(value, torch.Tensor) else "a value"


def restore(
    objects: Objects, states: Mapping[str, Any], others: Mapping[str, Any], own: Mapping[str, Any], world: World
) -> None:
    """Load the states: on rank zero those of models and optimizers, on all ranks `others`, and on each its `own`: those
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
