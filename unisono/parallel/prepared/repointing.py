"""Optimizers follow their models: parameters that a move or a strategy has replaced are found again by their place.

A parameter is known by the model's position and its name there, so that ties survive and equal names of two models do
not meet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from unisono.parallel.strategies.sharded import sharded_like
from unisono.tree import tree_map


class Places:
    """Where each parameter of some models is.

    Args:
        models: before they are moved.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._place_of = {
            parameter: (position, name)
            for position, model in enumerate(models)
            for name, parameter in model.named_parameters(remove_duplicate=False)
        }

    def check(self, optimizer: Optimizer, where: str) -> None:
        """Is each parameter of the optimizer of one of the models?

        Args:
            where: the place of the optimizer among the prepared objects, for the message.

        Raises:
            ValueError: it is not.
        """
        for number, group in enumerate(optimizer.param_groups):
            for place, parameter in enumerate(group["params"]):
                if parameter not in self._place_of:
                    raise ValueError(
                        f"parameter {place} of group {number} of the {type(optimizer).__name__} at position {where}, "
                        f"shape {list(parameter.shape)}, belongs to no prepared model; prepare its model together with "
                        "the optimizer, or before it"
                    )

    def follow(self, optimizer: Optimizer, models: Sequence[nn.Module]) -> None:
        """Point the optimizer's groups and its state to what stands at its parameters' places now.

        Args:
            optimizer: has passed `check`.
            models: the same ones in the same order, after the move.
        """
        now = [dict(model.named_parameters(remove_duplicate=False)) for model in models]
        moved: dict[torch.Tensor, nn.Parameter] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                model, name = self._place_of[parameter]
                moved[parameter] = now[model][name]
            # In place: LBFGS, for one, holds the list, too.
            group["params"][:] = [moved[parameter] for parameter in group["params"]]
        state = {moved.get(key, key): _beside(value, moved.get(key, key)) for key, value in optimizer.state.items()}
        optimizer.state.clear()
        optimizer.state.update(state)


def _beside(state: Mapping[str, Any], parameter: Any) -> Any:
    """The state of a parameter on its device, cut as the parameter is. Step counts stay where torch keeps them."""

    def move(leaf: Any) -> Any:
        is_moved = isinstance(leaf, torch.Tensor) and leaf.ndim and isinstance(parameter, torch.Tensor)
        return sharded_like(leaf, parameter) if is_moved else leaf

    return tree_map(move, state)
