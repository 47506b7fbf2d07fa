"""Detects assignments `p.data = ...`, which silently replace memory that a strategy continues to use."""

from __future__ import annotations

from collections.abc import Iterable
from weakref import ref

import torch

from unisono.parallel.parameter_names import name_of
from unisono.torch_private import STORAGE_ADDRESS


class Rebinding:
    """A record of the memory that some tensors have now.

    Args:
        tensors: parameters or gradients; of a sharded one, the memory of the tensor that contains the shard counts.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        # The storages are kept alive, so that no new one gets the same address.
        self._known = [(ref(each), each.untyped_storage()) for each in tensors]

    def check(self, strategy: str, attribute: str = "data") -> None:
        """Check that the tensors still have the recorded memory.

        Args:
            attribute: the attribute of a parameter that was assigned, for the message.

        Raises:
            RuntimeError: a tensor has different memory.
        """
        for place, (held, storage) in enumerate(self._known):
            tensor = held()
            if tensor is None:
                continue
            if getattr(tensor.untyped_storage(), STORAGE_ADDRESS) != getattr(storage, STORAGE_ADDRESS):
                name = name_of(tensor, [tensor]) if attribute == "data" else f"gradient {place}"
                raise RuntimeError(
                    f"something, such as an optimizer's step, has assigned `parameter.{attribute} = ...`, of {name}, "
                    f"and strategy={strategy!r} continues with the previous memory; change it in place, "
                    f"`parameter.{attribute}.copy_(...)`, or use strategy='ddp'"
                )
