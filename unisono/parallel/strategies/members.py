"""The parameters and buffers of a module, without a Python call for each of its parts: each step asks for them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, repeat
from typing import Any

import torch
from torch import nn

from unisono.torch_private import BUFFERS, MODULES, PARAMETERS


class Members:
    """What a module, and the modules in it, consist of at the moment.

    Args:
        module: which may change.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        # Of each module: its children, its parameters, its buffers.
        self._tables: tuple[list[dict[str, Any]], list[dict[str, Any]], list[dict[str, Any]]] = [], [], []
        self._children = [-1]  # their ids; this equals no list of them
        self._seen: Any = None

    def parameters(self) -> list[nn.Parameter]:
        """Each once, without the tensors that `torch.func.functional_call` puts in their places."""
        self._look()
        found = [each for each in _values(self._tables[1]) if isinstance(each, nn.Parameter)]
        return list(dict(zip(map(id, found), found, strict=True)).values())  # hashing a tensor costs a Python call

    def trained(self) -> list[torch.Tensor]:
        """The parameters that require gradients."""
        return [each for each in self.parameters() if each.requires_grad]

    def with_gradients(self) -> list[torch.Tensor]:
        """The parameters that require gradients, and those that were frozen with a gradient."""
        return [each for each in self.parameters() if each.requires_grad or each.grad is not None]

    def buffers(self) -> list[torch.Tensor]:
        """The buffers; a shared one several times."""
        self._look()
        return [each for each in _values(self._tables[2]) if each is not None]

    def has_buffers(self) -> bool:
        """Whether it had buffers when its parts were looked at last."""
        return any(self._tables[2])

    def is_replaced(self) -> bool:
        """Whether `torch.func.functional_call` has put other tensors in the place of parameters."""
        return any(each is not None and not isinstance(each, nn.Parameter) for each in _values(self._tables[1]))

    def has_changed(self) -> bool:
        """Whether its parts, its parameters, or what is frozen of them, are others than at the last call."""
        children = list(chain.from_iterable(map(dict.values, self._tables[0])))
        parameters = list(chain.from_iterable(map(dict.values, self._tables[1])))
        flags = list(map(getattr, parameters, repeat("requires_grad"), repeat(None)))
        seen = list(map(id, children)), list(map(id, parameters)), flags
        before, self._seen = self._seen, seen
        return bool(seen != before)

    def _look(self) -> None:
        """Traverse the tree of modules again, after it has changed."""
        if list(map(id, _values(self._tables[0]))) != self._children:
            tree = list(self._module.modules())
            self._tables = (
                [getattr(each, MODULES) for each in tree],
                [getattr(each, PARAMETERS) for each in tree],
                [getattr(each, BUFFERS) for each in tree],
            )
            self._children = list(map(id, _values(self._tables[0])))


def _values(tables: list[dict[str, Any]]) -> Iterator[Any]:
    return chain.from_iterable(map(dict.values, tables))
