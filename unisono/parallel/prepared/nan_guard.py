"""NanGuard: finds the first parameter whose gradient is not finite, and its rank."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from unisono.comm.operations import HOST, name_ranks
from unisono.errors import NonFiniteGradientError
from unisono.parallel.parameter_names import name_of
from unisono.parallel.sparse import values_of
from unisono.parallel.strategies.sharded import is_distributed
from unisono.world import World


class NanGuard:
    """Checks each gradient when the backward pass produces it, before the reduction: one pass over each gradient.

    No sync precedes `check`, so the device is not interrupted.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._found: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # for each parameter: its name, and a flag

    def watch(self, module: nn.Module) -> None:
        """Check the gradients of that module's parameters from now on."""
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                parameter.register_hook(partial(self._look, name, weakref.ref(parameter)))

    def forget(self, parameters: Sequence[torch.Tensor]) -> None:
        """Record that the gradients of these parameters are zero."""
        for each in parameters:
            self._found.pop(each, None)

    def _look(self, name: str, watched: Callable[[], torch.Tensor | None], gradient: torch.Tensor | None) -> None:
        parameter = watched()
        if parameter is not None and gradient is not None:  # None if an autograd Function returned it
            is_bad = ~torch.isfinite(values_of(gradient)).all()
            self._found[parameter] = name, self._found[parameter][1] | is_bad if parameter in self._found else is_bad

    def check(self, parameters: Sequence[torch.Tensor]) -> None:
        """Raise on every rank if a gradient is not finite on one. A collective.

        Args:
            parameters: the parameters, with reduced gradients; a sum of finite gradients may be non-finite.

        Raises:
            NonFiniteGradientError: a gradient is not finite.
        """
        wanted = {id(each) for each in parameters}
        found = [one for each, one in self._found.items() if id(each) in wanted]  # in the order of the backward pass
        self.forget(parameters)
        held = [(each, each.grad) for each in parameters if each.grad is not None]
        sums = [
            ~torch.isfinite(values_of(gradient.to_local() if is_distributed(gradient) else gradient)).all()
            for _, gradient in held
        ]
        names = [repr(name) for name, _ in found]
        bad = _true([*(flag for _, flag in found), *sums], self._world.device)
        own = [names[place] for place in bad if place < len(found)]
        summed = [  # the sum alone may overflow
            name_of(held[place - len(found)][0], parameters) for place in bad if place >= len(found)
        ]
        if not self._world.comm.all_reduce(torch.tensor(int(bool(bad)), device=HOST), "max"):
            return
        seen = self._world.comm.all_gather_object((own[:1], summed[:1]))
        ranks = [rank for rank, (name, _) in enumerate(seen) if name]
        name = next((name for _, names in seen for name in names), "")
        if ranks:
            where = f"{seen[ranks[0]][0][0]} is not finite on {name_ranks(ranks)}; no step was taken; look at its batch"
        elif found:
            where = f"{name} is finite on each rank, and not in the sum over them; no step was taken; look at the loss"
        else:
            # fsdp replaces the parameters, and reduces their gradients within the backward pass.
            where = f"{name} is not finite in the sum over the ranks; no step was taken; look at the batch of each rank"
        raise NonFiniteGradientError(
            f"the gradient of {where} and at the learning rate, or find the operation with "
            "torch.autograd.detect_anomaly()"
        )


def _true(flags: list[torch.Tensor], device: torch.device) -> list[int]:
    """The indices of the flags that are set; waits for the device once.

    Args:
        device: where the flags are collected; flags on other devices, of an offloaded gradient, are moved there.
    """
    if not flags:
        return []
    read = torch.stack([flag.to(device, non_blocking=True) for flag in flags]).tolist()
    return [place for place, flag in enumerate(read) if flag]
