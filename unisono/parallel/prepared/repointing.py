"""Makes optimizers refer to the parameters with which a move or a strategy has replaced their own.

A parameter is identified by its place: the position of its model, and its name in the model. So tied parameters stay
tied, and equal names in two models do not collide.
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
    """The place of each parameter of some models.

    Args:
        models: the models before they are moved.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._place_of = {
            parameter: (position, name)
            for position, model in enumerate(models)
            for name, parameter in model.named_parameters(remove_duplicate=False)
        }

    def check(self, optimizer: Optimizer, where: str) -> None:
        """Check that each parameter of the optimizer belongs to one of the models.

        Args:
            where: the position of the optimizer among the prepared objects, for the message.

        Raises:
            ValueError: a parameter belongs to none.
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
        """Replace the parameters in the optimizer's groups and state by those that are now at the same places.

        Args:
            optimizer: has passed `check`.
            models: the same models in the same order, after the move.
        """
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
