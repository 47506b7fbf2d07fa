"""What a prepared optimizer refuses when it is asked to step; each error names the way out.

*Threads:* any.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NoReturn

from torch.optim import Optimizer

from unisono.training.parameter_names import parameters_of
from unisono.training.steps import Steps
from unisono.training.strategies.engine import Engine


def check_added(optimizer: Optimizer, engines: Iterable[Engine], steps: Steps) -> None:
    """Refuse parameters that are trained on each rank alone, in a group that was added after `prepare`."""
    known = {id(each) for engine in engines for each in engine.module.parameters()}
    added = [each for each in parameters_of(optimizer) if id(each) not in known]
    if added and (steps.world.comm.size > 1 or steps.policy.is_mean):
        raise ValueError(
            f"a group was added to the {type(optimizer).__name__} with a parameter of shape {list(added[0].shape)} "
            "that belongs to no prepared model; before add_param_group(), call accelerator.prepare(model) with its "
            "model, or accelerator.prepare(parameter) if it has none"
        )


def check_closure(steps: Steps, has_scaler: bool) -> None:
    """Refuse a closure where it would compute the gradients of a part of the step."""
    if has_scaler:
        raise RuntimeError("mixed_precision='fp16' and a closure cannot be combined; use mixed_precision='bf16'")
    if (virtual := steps.virtual) is not None:
        raise RuntimeError(
            f"virtual_ranks={virtual.count} and a closure cannot be combined: it would compute the gradients of the "
            "last batch of a round; pass no closure"
        )
    if steps.step.policy.is_mean:
        raise RuntimeError(
            f"gradient_accumulation_steps={steps.step.policy.every} and a closure cannot be combined: it would compute "
            "only the last microbatch's gradients; pass gradient_accumulation_steps=1, and loop over the microbatches "
            "in the closure"
        )


def refuse_inside_backward(optimizer: Optimizer) -> NoReturn:
    """Refuse a step in a hook, where gradients are still those of one rank, or of a part of the step."""
    raise RuntimeError(
        f"the {type(optimizer).__name__} was asked to step during a backward pass, as in a hook of a parameter, where "
        "gradients are this rank's alone; step after the backward pass"
    )


def refuse_assigned(optimizer: Optimizer, steps: Steps) -> NoReturn:
    """Refuse gradients that no backward pass has left, where backward passes are counted."""
    if (virtual := steps.virtual) is not None:
        raise RuntimeError(
            f"virtual_ranks={virtual.count} add what backward passes leave, and the gradients that the "
            f"{type(optimizer).__name__} finds were assigned or changed by hand before it was asked to step; clip by "
            "accelerator.clip_grad_norm_ or clip_grad_value_, and change gradients in a hook of the parameter "
            "(register_hook)"
        )
    raise RuntimeError(
        f"gradient_accumulation_steps={steps.step.policy.every} counts backward passes, and the gradients that the "
        f"{type(optimizer).__name__} finds were assigned or changed by hand, for example to those of "
        "torch.autograd.grad; let accelerator.backward(loss) leave them in .grad, and accelerator.clip_grad_norm_ clip "
        "them, or pass gradient_accumulation_steps=1 and step on each batch"
    )
