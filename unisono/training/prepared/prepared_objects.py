"""Prepares objects: engines run models, optimizers step for all ranks, and schedulers follow the optimizers.

Prepared objects are remembered, so that an optimizer may be prepared after its model, and no object twice.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from unisono.torch_private import SCHEDULERS, STEP_WRAPPED
from unisono.training.means import Mean
from unisono.training.optimizer import prepared
from unisono.training.parameter_names import parameters_of, remember_names, trained_parameters
from unisono.training.prepared.builder import Builder
from unisono.training.prepared.metrics import is_metric
from unisono.training.prepared.model import PreparedModel
from unisono.training.prepared.scheduler import PreparedScheduler, Unit
from unisono.training.prepared.step_checks import release_engines_of, watch
from unisono.training.prepared.stepper import Stepper
from unisono.training.strategies.bare_parameter import BareParameter
from unisono.training.strategies.engine import Engine
from unisono.training.strategies.sharded import is_distributed, sharded_like
from unisono.training.strategies.weak import WeakList, weak_method
from unisono.tree import tree_map


class PreparedObjects:
    """The objects that one Accelerator has prepared, referenced weakly.

    A model is known as long as its module lives, which the optimizer of its parameters keeps: a script may use
    `unwrap_model(model)`, or drop what `prepare` has returned. `has_models`: whether one was prepared, alive or not.
    """

    def __init__(self, builder: Builder, make_loader: Callable[[Any], Any], schedule_unit: Unit | None = None) -> None:
        # In the order of preparation, the same on each rank.
        self.modules, self.engines, self.steppers = WeakList[nn.Module](), WeakList[Engine](), WeakList[Stepper]()
        self._models, self.has_models = WeakList[PreparedModel](), False
        self.loaders, self.schedulers, self.means = WeakList[Any](), WeakList[PreparedScheduler](), WeakList[Mean]()
        self._builder = builder
        self._bare: list[PreparedModel] = []  # of bare parameters: the user holds only the tensor
        self._make_loader, self._schedule_unit = make_loader, schedule_unit

    def prepare(self, objects: Sequence[Any]) -> list[Any]:
        """Prepare each object, and return the results in the same order. If one cannot be prepared, none is changed;
        raises as `Accelerator.prepare`."""
        given = [(where, each) for place, each in enumerate(objects) for where, each in _flat_pairs(str(place), each)]
        bare = {id(each): BareParameter(each) for _, each in given if isinstance(each, torch.Tensor)}
        flat = [(where, bare.get(id(each), each)) for where, each in given]
        modules = [each for _, each in flat if isinstance(each, nn.Module) and not is_metric(each)]
        known = self.modules()  # none may be collected meanwhile
        places = Places([*known, *modules])
        for place, (where, each) in enumerate(flat):
            self._check(where, each, [other for _, other in flat[:place]], [other for _, other in flat], places)
        # Models first: a move may replace the parameters that optimizers hold. Schedulers last: they follow optimizers,
        # which strategy "zero1" replaces.
        made: dict[int, Any] = {id(each): self._add_model(each) for each in modules}
        moved = [*known, *(made[id(each)].module for each in modules)]
        made.update((key, each.value) for key, each in bare.items())
        for _, each in flat:
            if isinstance(each, Optimizer):
                places.follow(each, moved)
                made[id(each)] = self._add_optimizer(each)
        for _, each in flat:
            if is_metric(each):
                made[id(each)] = self._builder.metric(each)
                if isinstance(each, Mean):
                    self.means.add(each)
            elif isinstance(each, LRScheduler | ReduceLROnPlateau):
                made[id(each)] = self._add_scheduler(each, made)
            elif each is not None and id(each) not in made:
                made[id(each)] = loader = self._make_loader(each)
                _remember_made(loader, each)
                self.loaders.add(loader)
        return [_rebuild(each, made) for each in objects]

    def collect(self) -> None:
        """Collect what the script has dropped: an optimizer is in a cycle, which ranks collect at different times."""
        if len(self.steppers()) > 1 or len(self._models()) < len(self.modules()):
            with _collecting:
                gc.collect()

    def models(self) -> list[nn.Module]:
        """For each model, what `prepare` has returned, or its module, where only that is left."""
        made = {id(model.module): model for model in self._models()}
        return [made.get(id(module), module) for module in self.modules()]

    @contextmanager
    def reduced(
        self, parameters: nn.Module | Iterable[torch.Tensor], called: str
    ) -> Iterator[list[torch.Tensor] | None]:
        """A block that changes these gradients, reduced and unscaled; it gets None while microbatches accumulate."""
        found = [parameters] if isinstance(parameters, torch.Tensor) else parameters
        found = list(found.parameters() if isinstance(found, nn.Module) else found)
        known = {id(each) for module in self.modules() for each in module.parameters()}
        wanted = {id(parameter) for parameter in found}
        if known and not known & wanted:
            raise ValueError(
                f"{called} got {len(found)} parameters of no prepared model; prepare() may put others in their place, "
                "so take them from the model that it returned"
            )
        if not self._builder.passes.steps.is_boundary():
            yield None
            return
        steppers = [
            each for each in self.steppers() if any(id(one) in wanted for one in trained_parameters(each.optimizer))
        ]
        for stepper in steppers:
            stepper.reduce()
        yield found
        for stepper in steppers:
            stepper.look_again()

    def release(self) -> None:
        """Release everything. Models and optimizers can be prepared again."""
        for stepper in self.steppers():
            stepper.release()
        for engine in self.engines():
            engine.hooks.remove()
        self.has_models = False
        models: list[WeakList[Any]] = [self.modules, self.engines, self._models]
        for known in (*models, self.steppers, self.loaders, self.schedulers, self.means):
            known.clear()
        self._bare.clear()
        self._builder.passes.steps.drop_step()

    def _check(self, where: str, each: Any, before: list[Any], together: list[Any], places: Places) -> None:
        """Refuse an object that cannot be prepared, before any object is changed."""
        name = type(each).__name__
        is_ours = isinstance(each, PreparedModel | PreparedScheduler)
        known = [*before, *self.means()]
        if is_ours or _is_prepared(each) or (each is not None and any(each is other for other in known)):
            raise ValueError(
                f"the {name} at position {where} is already prepared; prepare each object once, and continue with what "
                "prepare() returned"
            )
        if is_metric(each):
            return
        if isinstance(each, nn.Module):
            _check_devices(where, each)
            if isinstance(each, BareParameter):
                _check_bare(where, each.value)
            self._check_shared(where, each, [*self._models(), *before])
            self._builder.strategy.check(each)
        elif isinstance(each, Optimizer):
            places.check(each, where)
            self._builder.strategy.check(each)
        elif isinstance(each, LRScheduler | ReduceLROnPlateau):
            optimizer = each.optimizer
            if self.stepper_of(optimizer) is None and not any(optimizer is other for other in together):
                raise ValueError(
                    f"the {name} at position {where} schedules a {type(optimizer).__name__} that is not prepared; "
                    "prepare the optimizer together with it, or before it"
                )
        elif each is not None and (not isinstance(each, Iterable) or isinstance(each, str | bytes | Mapping)):
            raise TypeError(
                f"the object at position {where} is of type {name}, which cannot be prepared; pass models, parameters, "
                "optimizers, schedulers, metrics, DataLoaders, lists of them, or None; a list of batches as "
                "DeviceLoader(list)"
            )

    def _check_shared(self, where: str, module: nn.Module, others: Sequence[Any]) -> None:
        """Refuse a model that trains parameters of another one: each would reduce their gradients."""
        own = {each for each in module.parameters() if each.requires_grad}
        for other in [each for each in others if isinstance(each, nn.Module) and not is_metric(each)]:
            if any(each in own for each in other.parameters()):
                other = other.module if isinstance(other, PreparedModel) else other
                raise ValueError(
                    f"the {type(module).__name__} at position {where} shares parameters with the "
                    f"{type(other).__name__}, and each of two prepared models would reduce their gradients; make them "
                    "parts of one module, and prepare that"
                )

    def _add_model(self, module: nn.Module) -> PreparedModel:
        release_engines_of(module)  # of an earlier Accelerator that may not be collected yet
        before = list(module.parameters())
        if isinstance(module, BareParameter):
            model = self._builder.parameter(module)
            self._bare.append(model)
        else:
            model = self._builder.model(module)
        now = set(model.module.parameters())
        model.engine.replaced.update((each, True) for each in before if each not in now)
        remember_names(model.module)
        watch(model.engine, self._builder.done_in_steps())
        own = {id(each) for each in model.engine.members.trained()}
        for known in self.modules():
            if known is model.module or any(id(each) in own for each in known.parameters()):
                self.modules.remove(ref(known))  # it is prepared again, perhaps as a part of another one
        self.modules.add(model.module)
        self.engines.add(model.engine)
        self._models.add(model)
        self.has_models = True
        for stepper in self.steppers():
            self._join_optimizer(model.engine, stepper)
        _remember_made(model, module, model.module)
        return model

    def _add_optimizer(self, optimizer: Optimizer) -> Optimizer:
        made = self._builder.strategy.wrap_optimizer(optimizer)
        stepper = self._builder.stepper(made)
        self.steppers.add(stepper)
        stepper.find_engines = weak_method(self._join_all)
        self._join_all(stepper)
        _remember_made(made, optimizer)
        return made

    def _join_all(self, stepper: Stepper) -> None:
        for engine in self.engines():
            if not stepper.trains(engine) and not engine.hooks.is_removed:
                self._join_optimizer(engine, stepper)

    def _join_optimizer(self, engine: Engine, stepper: Stepper) -> None:
        """Connect a model with the optimizer of some of its parameters."""
        own = {id(each) for each in parameters_of(stepper.optimizer)}
        if any(id(each) in own for each in engine.module.parameters()):
            stepper.train(engine)

    def stepper_of(self, optimizer: Optimizer) -> Stepper | None:
        """The stepper of a prepared optimizer; None for another one."""
        return next((each for each in self.steppers() if each.optimizer is optimizer), None)

    def _add_scheduler(self, scheduler: Any, made: dict[int, Any]) -> PreparedScheduler:
        _redirect_scheduler(scheduler, made)
        optimizer = scheduler.optimizer
        # Without this mark torch warns, when a scheduler steps, that the optimizer's steps are not counted.
        if not hasattr(optimizer.step, STEP_WRAPPED):
            setattr(optimizer.step.__func__, STEP_WRAPPED, True)
        stepper = self.stepper_of(optimizer)
        assert stepper is not None  # ensured by `_check`
        follower = PreparedScheduler(scheduler, stepper, self._schedule_unit)
        _remember_made(follower, scheduler)
        self.schedulers.add(follower)
        return follower


class Places:
    """The place of each parameter of some models, before they are moved: the position of its model, and its name there.
    So tied parameters stay tied, and equal names in two models do not collide."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._place_of = {
            parameter: (position, name)
            for position, model in enumerate(models)
            for name, parameter in model.named_parameters(remove_duplicate=False)
        }

    def check(self, optimizer: Optimizer, where: str) -> None:
        """Check that each parameter of the optimizer, the object at that position, belongs to one of the models."""
        for number, group in enumerate(optimizer.param_groups):
            for place, parameter in enumerate(group["params"]):
                if parameter not in self._place_of:
                    raise ValueError(
                        f"parameter {place} of group {number} of the {type(optimizer).__name__} at position {where}, "
                        f"shape {list(parameter.shape)}, belongs to no prepared model; prepare its model with the "
                        "optimizer, model, optimizer = accelerator.prepare(model, optimizer), or, if it has "
                        "no model, itself: parameter, optimizer = accelerator.prepare(parameter, optimizer)"
                    )

    def follow(self, optimizer: Optimizer, models: Sequence[nn.Module]) -> None:
        """Replace the parameters in a checked optimizer's groups and state by those now at their places."""
        now = [dict(model.named_parameters(remove_duplicate=False)) for model in models]
        moved: dict[torch.Tensor, nn.Parameter] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                model, name = self._place_of[parameter]
                moved[parameter] = now[model][name]
            # In place: LBFGS, for example, keeps a reference to the list.
            group["params"][:] = [moved[parameter] for parameter in group["params"]]
        state = {moved.get(key, key): _beside(value, moved.get(key, key)) for key, value in optimizer.state.items()}
        optimizer.state.clear()
        optimizer.state.update(state)


def _beside(state: Mapping[str, Any], parameter: Any) -> Any:
    """Place a parameter's state on its device, sharded like the parameter. Step counts stay where torch keeps them."""

    def move(leaf: Any) -> Any:
        is_moved = isinstance(leaf, torch.Tensor) and leaf.ndim and isinstance(parameter, torch.Tensor)
        return sharded_like(leaf, parameter) if is_moved else leaf

    return tree_map(move, state)


def _redirect_scheduler(scheduler: Any, made: Mapping[int, Any]) -> None:
    """Make the scheduler, and its parts, use the new optimizer in place of the old one."""
    scheduler.optimizer = made.get(id(scheduler.optimizer), scheduler.optimizer)
    for part in getattr(scheduler, SCHEDULERS, ()):
        _redirect_scheduler(part, made)


_collecting = threading.Lock()  # during another thread's collection, a collection does nothing

# Of what any Accelerator has prepared: the results. An object may be prepared again when its result is gone.
_made: WeakKeyDictionary[Any, ref[Any]] = WeakKeyDictionary()


def _remember_made(made: Any, *objects: Any) -> None:
    for each in (made, *objects):
        with suppress(TypeError):  # it supports no weak references, or has no hash
            _made[each] = ref(made)


def _is_prepared(each: Any) -> bool:
    try:
        made = found() if (found := _made.get(each)) is not None else None
    except TypeError:
        return False
    if isinstance(made, PreparedModel):
        return not made.engine.hooks.is_removed
    return made in prepared if isinstance(made, Optimizer) else made is not None


def _check_devices(where: str, module: nn.Module) -> None:
    found: dict[torch.device, str] = {}
    for name, parameter in module.named_parameters():
        found.setdefault(parameter.device, name)
    if len(found) > 1:
        places = ", ".join(f"{name!r} on {device}" for device, name in found.items())
        raise ValueError(
            f"the {type(module).__name__} at position {where} is on {len(found)} devices ({places}); data-parallel "
            "training keeps a whole replica on each device, so move it to one, or to the CPU, before prepare()"
        )


def _check_bare(where: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor that is not a parameter, or not a whole one."""
    if not (tensor.is_leaf and tensor.requires_grad) or is_distributed(tensor):
        raise TypeError(
            f"the object at position {where} is of type {type(tensor).__name__}, which cannot be prepared unless it is "
            "a parameter, such as torch.zeros(1, requires_grad=True): this one was computed, is sharded, or does not "
            "require gradients; for a list of batches, unisono.DeviceLoader(batches)"
        )


def _flat_pairs(where: str, each: Any) -> list[tuple[str, Any]]:
    """The object with its position as text; for a list or tuple, the same for each element."""
    if isinstance(each, list | tuple):
        return [pair for place, part in enumerate(each) for pair in _flat_pairs(f"{where}[{place}]", part)]
    return [(where, each)]


def _rebuild(each: Any, made: dict[int, Any]) -> Any:
    if isinstance(each, list | tuple):
        parts = [_rebuild(part, made) for part in each]
        return parts if isinstance(each, list) else type(each)(*parts) if hasattr(each, "_fields") else tuple(parts)
    return made.get(id(each))
