"""Runs a module sharded by torch's FSDP2: each rank keeps its shard of parameters and gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import compress
from operator import attrgetter, or_
from typing import Any, NoReturn

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.optim import Optimizer

from unisono.comm.operations import HOST
from unisono.comm.selection import raise_translated
from unisono.strategies import FSDP
from unisono.torch_private import (
    FSDP_CONTEXT,
    FSDP_STATE,
    PARAMETERS,
    VERSION,
    current_graph_task_id,
    disable_dynamo,
    is_view,
    queue_callback,
    will_engine_execute_node,
)
from unisono.training.parameter_names import listed
from unisono.training.steps import Steps
from unisono.training.strategies.ddp import failed_before
from unisono.training.strategies.engine import Engine
from unisono.training.strategies.held import is_left_at
from unisono.training.strategies.sharded import (
    Rebinding,
    any_whole_gradient,
    drop_whole_gradients,
    is_distributed,
    named_whole_parameters,
    scale_sums,
    shard,
    units_in,
    whole_parameters,
)
from unisono.training.strategies.weak import weak_method
from unisono.tree import tensors, tree_map
from unisono.world import World


class FSDPEngine(Engine):
    """Runs the module sharded by FSDP2.

    The gradients of a loss arrive at the whole parameters, which exist while the model runs. Only those of a penalty on
    the parameters arrive at the module's own, sharded ones.
    """

    gathers = True

    def __init__(self, module: nn.Module, world: World, steps: Steps, options: FSDP) -> None:
        from unisono.training.strategies import parts  # which takes a second to import

        name = type(module).__name__  # before `fully_shard` replaces its class
        hooks = {name: parts.hooks_of(each) for name, each in module.named_parameters()}
        sharded: Any = shard(module, world, options)
        super().__init__(sharded, world, steps, options.broadcast_buffers)
        self._sharded, self.name = sharded, name
        self._units, self._keeps = units_in(sharded), options.reshard_after_forward
        self._whole = whole_parameters(sharded)
        self._parts = [each.sharded for each in self._whole]
        self._known.update(dict.fromkeys(self._whole))  # these replace the module's own while it runs
        own = {id(part): {id(part), id(whole)} for part, whole in zip(self._parts, self._whole, strict=True)}
        self._places = [
            (module, name, own[id(each)])
            for module in sharded.modules()
            for name, each in module.named_parameters(recurse=False)
        ]
        self._memory, self._gradients = Rebinding(self._parts), Rebinding(())
        self._versions = list(map(_version, self._whole))
        self._names = {part: name for name, part in sharded.named_parameters()}
        for whole, part in zip(self._whole, self._parts, strict=True):
            parts.guard(part)
            parts.carry_hooks(hooks[self._names[part]], part, whole)
            if part.requires_grad:
                torch.Tensor.register_hook(part, weak_method(self._arrive_at_part))
        self._guard, self._post_hooked = parts.guard, partial(parts.post_hooked, self._parts)
        # With `find_unused_parameters`, the places of parameters that have got gradients since a reduction.
        self._used: set[int] | None = set() if options.find_unused_parameters else None
        self._noting: dict[int, Any] = {}
        self._had_gradient: list[bool] = []
        self._flags = [each.requires_grad for each in self._parts]
        self._trained = list(compress(self._parts, self._flags))
        # Of the trained parameters: autograd's nodes, and whether passes have reached them that have not reduced.
        self._nodes: tuple[Any, list[Any]] = None, []
        self._reached: list[bool] = []
        self._returned = ""  # the type of the last outputs
        self._backward_pass = -1  # the last one that was announced
        self._is_running = False  # in a forward pass of the prepared model
        self._is_reducing = False  # during a reducing backward pass, and after one that failed
        unit: Any
        for unit in self._units:
            unit.register_forward_pre_hook(weak_method(self._announce_unit), prepend=True)
        sharded.register_forward_hook(weak_method(self._watch), prepend=True)
        from torch.distributed.fsdp import register_fsdp_forward_method

        # FSDP2 gathers parameters in calls of the module and of this function, which runs its other methods.
        sharded.__deepcopy__ = partial(_refuse_copy, name)
        sharded._run_gathered = weak_method(self._run_gathered)
        register_fsdp_forward_method(sharded, "_run_gathered")

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], method: str | None = None) -> Any:
        call = self.module if method is None else partial(self._sharded._run_gathered, getattr(self.module, method))
        self._memory.check("fsdp")
        if not torch.is_grad_enabled():  # else `refresh` has done so
            self._take_flags()
        self._refuse_replaced()
        self._refuse_written()
        self._announce_forward(self._sharded, method)
        outer, self._is_running = self._is_running, True
        try:
            result = call(*args, **kwargs)
        except BaseException as error:
            self._abandon_forward()
            raise_translated(error, self.world.comm)
            raise
        finally:
            self._is_running = outer
        if not torch.is_grad_enabled():
            self._reshard()  # FSDP2 keeps parameters gathered for the backward pass, which does not come
        return result

    def _announce_forward(self, module: nn.Module, method: str | None = None) -> None:
        """Compare what ranks do before they gather parameters: so none that evaluates alone meets one that trains."""
        name = self.name if module is self._sharded else type(module).__name__.removeprefix("FSDP")
        text = f"{f'{method}()' if method else 'a forward pass'} of the {name}"
        if not torch.is_grad_enabled():
            text += " without gradients (strategy='fsdp' gathers its parameters from all ranks)"
        self.world.comm.announce(text)

    @disable_dynamo
    def _announce_unit(self, unit: nn.Module, _: Any) -> None:
        """Announce a unit that runs outside of a pass of the prepared model, or of a recomputation in backward."""
        if not self._is_running and current_graph_task_id() == -1:
            self._announce_forward(unit)

    def _run_gathered(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self._watch(self._sharded, args, method(*args, **kwargs))

    def _reshard(self) -> None:
        for unit in self._units:
            unit.reshard()

    def _abandon_forward(self) -> None:
        """End a forward pass that has failed: FSDP2 would continue it in the next one, with what it has gathered."""
        kept = self._keeps
        for unit in self._units:
            unit.set_reshard_after_forward(True, recurse=False)  # else those in a forward pass stay gathered
            unit.reshard()
            unit.set_reshard_after_forward(unit is not self._sharded if kept is None else bool(kept), recurse=False)
            getattr(getattr(unit, FSDP_STATE)(), FSDP_CONTEXT).iter_forward_root = None

    def _take_flags(self) -> None:
        """Freeze sharded parameters, whose flags FSDP2 uses, as the user has frozen gathered ones, and vice versa."""
        for whole, part, before in zip(self._whole, self._parts, self._flags, strict=True):
            if part.requires_grad != before:
                whole.requires_grad_(part.requires_grad)
            elif whole.requires_grad != before:
                part.requires_grad_(whole.requires_grad)
        self._flags = [each.requires_grad for each in self._parts]

    def _refuse_written(self) -> None:
        """Refuse to go on after a write to what stands in the place of the parameters until the backward pass."""
        for place, (whole, before) in enumerate(zip(map(_version, self._whole), self._versions, strict=True)):
            if whole != before:
                self._versions[place] = whole
                raise RuntimeError(
                    f"{self._names[self._parts[place]]!r} of the {self.name} was changed between a forward pass and "
                    "its backward pass, where strategy='fsdp' uses a gathered copy, so that the change is lost; change "
                    "it before the forward pass or after optimizer.step(), or use strategy='ddp'"
                )

    def _refuse_replaced(self) -> None:
        """Refuse a pass with other parameters, in whose place FSDP2 would put its own."""
        for module, name, own in self._places:
            if id(getattr(module, PARAMETERS).get(name)) not in own:
                raise RuntimeError(
                    f"the {self.name} is called with another {name!r} of its {type(module).__name__} than the one that "
                    "was prepared (by torch.func.functional_call, or an assignment), and strategy='fsdp' would compute "
                    "with the prepared one; use strategy='ddp'"
                )

    def note_other_pass(self) -> None:
        """Refuse a pass that computes the gradients of parameters."""
        if any(is_left_at(each) is not False for each in [*self._whole, *self._parts] if each.requires_grad):
            raise RuntimeError(
                f"gradients of the {self.name} were requested by torch.autograd.grad(loss, parameters), or "
                "backward(inputs=parameters), and under strategy='fsdp' no rank has them as a whole; let "
                "loss.backward() leave them in .grad, or use strategy='ddp'"
            )

    def _arrive_at_part(self, gradient: torch.Tensor) -> None:
        """Refuse a penalty on the parameters, complete on every rank, which would count in each microbatch."""
        policy = self.steps.step.policy
        if policy.is_mean and is_distributed(gradient):  # else of the whole parameter
            raise RuntimeError(
                f"a penalty on the parameters of the {self.name} has a backward pass of its own, and under "
                f"strategy='fsdp' it would count in each of the gradient_accumulation_steps={policy.every} "
                "microbatches of a step; let the optimizer add it (weight_decay=), or use strategy='ddp'"
            )

    def refresh(self) -> None:
        """Check that no parameters were added; nor frozen or unfrozen in the middle of a step."""
        self._take_flags()
        trained: list[torch.Tensor] = list(compress(self._parts, self._flags))
        if list(map(id, trained)) != list(map(id, self._trained)) and self.gradients.is_own:
            raise RuntimeError(
                f"parameters of the {self.name} were frozen or unfrozen while microbatches accumulate, and "
                "strategy='fsdp' cannot reduce what they hold; do so after optimizer.step(), or use strategy='ddp'"
            )
        self._trained = trained
        if new := [each for each in self.members.trained() if each not in self._known]:
            self._refuse_added(new)

    def reduced(self) -> list[torch.Tensor]:
        return [each for each in self._parts if each.grad is not None]  # the module has whole ones in their place

    def leaves(self) -> list[torch.Tensor]:
        return [each for each in self._whole if each.requires_grad]

    def named_leaves(self) -> dict[str, torch.Tensor]:
        self.world.comm.announce(f"the gradients that the {self.name} holds")
        found = named_whole_parameters(self._sharded)
        return {name: each for name, each in found.items() if each.requires_grad}

    def _watch(self, module: nn.Module, args: Any, outputs: Any) -> Any:
        """Make the outputs announce their backward pass, before FSDP2's own hooks on them gather parameters. Views are
        copied: one that is changed in place would lose the hooks."""
        self._returned = type(outputs).__name__
        if any(map(is_view, _with_gradients(outputs))):
            outputs = tree_map(_without_base, outputs)
        for leaf in _with_gradients(outputs):
            leaf.register_hook(weak_method(self._announce))
        return outputs

    def _announce(self, _: torch.Tensor) -> None:
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"a backward pass with create_graph=True through the {self.name}: strategy='fsdp' cannot know when its "
                "parameters are to be gathered for the second backward pass; use strategy='ddp'"
            )
        backward_pass = current_graph_task_id()
        # Each output calls this, and the pass is announced once.
        if backward_pass != self._backward_pass:
            self._backward_pass = backward_pass
            self.world.comm.announce(f"a backward pass of the {self.name}")

    def prepare_reduction(self, reduces: bool) -> None:
        if self._is_reducing:
            raise RuntimeError(failed_before(self.name))
        if not reduces and (hooked := self._post_hooked()) is not None:
            raise RuntimeError(
                f"{self._names[hooked]!r} of the {self.name} has a hook by register_post_accumulate_grad_hook, which "
                "strategy='fsdp' calls where a pass reduces, not in each microbatch and not under no_sync(); change "
                "the gradient before optimizer.step(), use register_hook, or strategy='ddp'"
            )
        self._is_reducing = reduces
        self._take_flags()
        self._refuse_written()
        self.world.comm.announce(f"the backward pass of {self.agreement.place()}{self._lacks(reduces)}")
        self._sharded.set_requires_gradient_sync(reduces)
        if reduces:
            scale_sums(self._units, self.steps.factor())
            self._had_gradient = [each.grad is not None for each in self._parts]
        if self._used is not None:
            for place, whole in enumerate(self._whole):
                if whole.requires_grad and place not in self._noting:
                    self._noting[place] = whole.register_hook(partial(_note, self._used, place))

    def _lacks(self, reduces: bool) -> str:
        """What to announce of the parameters that a reducing pass leaves without a gradient. Each rank reduces what it
        has, unit by unit, and ranks with others would mix gradients of one size."""
        if self._used is not None:
            return ""
        if self._nodes[0] is not self._trained:  # in a pass: these nodes exist
            trained = [each for each in self._whole if each.requires_grad]
            self._nodes = self._trained, [get_gradient_edge(each).node for each in trained]
        reached = list(map(will_engine_execute_node, self._nodes[1]))
        if self._reached:
            reached = list(map(or_, reached, self._reached))
        self._reached = [] if reduces else reached
        if not reduces or all(reached):
            return ""
        lacking = [self._names[each] for each, is_reached in zip(self._trained, reached, strict=True) if not is_reached]
        return (
            f", without gradients for {listed(lacking)} (where ranks use different parameters, pass "
            "Accelerator(strategy=unisono.strategies.FSDP(find_unused_parameters=True)))"
        )

    def complete_reduction(self) -> None:
        """Queue the check of the reduction, since torch's final callback, which may reduce, may still follow."""
        queue_callback(weak_method(self._check_reduced))

    def _check_reduced(self) -> None:
        """Refuse a backward pass that has not reached an output, where torch's reduction begins."""
        self._is_reducing = False
        # What has arrived at the whole parameters FSDP2 removes when it reduces.
        if any_whole_gradient(self._whole):
            for whole in self._whole:  # or it would be added to the next pass's
                whole.grad = None
            self._refuse_unseen()
        if self._used is not None:
            self._drop_unused(self._used)
        found = [each.grad for each in self._parts if each.grad is not None]
        for each in found:
            self._guard(each)
        self._gradients = Rebinding(found)

    def _refuse_unseen(self) -> NoReturn:
        raise RuntimeError(
            f"the loss depends on parameters of the {self.name} and on no tensor that is seen in what it returned (a "
            f"{self._returned}), and strategy='fsdp' reduces nothing then; return tensors, also in a tuple, a dict or "
            "a dataclass, and add 0 * outputs.sum() to the loss if it does not depend on them"
        )

    def _drop_unused(self, used: set[int]) -> None:
        """Leave parameters that no rank has used without a gradient, as on one device: FSDP2 gives them zeros, by which
        momentum and weight decay would change them. A collective."""
        flags = torch.tensor([place in used for place in range(len(self._whole))], device=HOST, dtype=torch.float32)
        flags = self.world.comm.all_reduce(flags, "max")
        used.clear()
        for part, had, is_used in zip(self._parts, self._had_gradient, flags.tolist(), strict=True):
            if not had and not is_used:
                part.grad = None

    def note_zeros(self, optimizer: torch.optim.Optimizer | None = None) -> bool:
        is_zero = super().note_zeros(optimizer)
        if self.gradients.step is None:  # zero_grad(set_to_none=False) does not reach what microbatches have left
            drop_whole_gradients(self._whole)
            self._reached = []
            if self._used is not None:
                self._used.clear()
        return is_zero

    def reduce_assigned(self, part: float) -> None:
        raise RuntimeError(
            f"the gradients of the {self.name} were assigned by hand, and strategy='fsdp' reduces only what backward "
            "passes leave; let loss.backward() leave them in .grad, or use strategy='ddp'"
        )

    def reduce(self, optimizer: Optimizer | None = None) -> None:
        if self.gradients.has_bypassed():
            self._refuse_unseen()
        raise RuntimeError(
            "strategy='fsdp' reduces in the backward pass that ends a step, and no pass of these gradients has ended "
            "one: they ran under no_sync(model), or their loop was left; let the last backward pass of a step run "
            "outside of it, or zero_grad() after a loop that was left"
        )

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        super().after_step(optimizer)
        self._memory.check("fsdp")
        self._gradients.check("fsdp", "grad.data")
        self._refuse_written()
        self._reshard()  # gathered parameters that no backward pass has released are outdated


_version = attrgetter(VERSION)


def _note(used: set[int], place: int, gradient: torch.Tensor | None) -> None:
    if gradient is not None:
        used.add(place)


def _refuse_copy(name: str, _: Any) -> NoReturn:
    raise TypeError(
        f"a copy of the prepared {name} was asked for, and strategy='fsdp' has sharded it, which torch does not copy; "
        "copy the model before prepare(), as AveragedModel(model) does, and prepare both: model, average = "
        "accelerator.prepare(model, average); or use accelerator.state_dict(model)"
    )


def _without_base(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) and leaf.requires_grad and is_view(leaf) else leaf


def _with_gradients(values: Any) -> list[torch.Tensor]:
    return [each for each in tensors(values) if each.requires_grad]
