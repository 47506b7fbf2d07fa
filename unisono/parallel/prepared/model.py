"""PreparedModel: the user's module, run by its engine with autocast; names, attributes and state are the module's."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from unisono.parallel.passes import Passes
from unisono.parallel.prepared.stepper import Stepper
from unisono.parallel.strategies.engine import Engine
from unisono.parallel.strategies.sharded import is_sharded
from unisono.tree import tree_map

_REDUCED = (torch.float16, torch.bfloat16)


class PreparedModel(nn.Module):
    """Behaves like `module`, with its attributes, parameter names and state. Only calling it differs.

    Args:
        engine: runs the module.
        passes: records the passes of the Accelerator's models.
        autocast: creates the context for each forward pass, whose outputs are then returned as float32; or None.
    """

    def __init__(
        self, engine: Engine, passes: Passes, autocast: Callable[[], AbstractContextManager[Any]] | None
    ) -> None:
        super().__init__()
        self._engine = (engine,)  # in a tuple, so that the wrapped module is not registered as a second child
        self._passes = passes
        self._autocast = autocast
        self._syncs = True
        self._steppers: list[Stepper] = []
        self.training = engine.module.training
        passes.watch_parameters(engine)
        self.module = engine.module  # last: from here on, attributes are set on the module

    @property
    def engine(self) -> Engine:
        """The engine, which runs the module."""
        return self._engine[0]

    def train_by(self, stepper: Stepper) -> None:
        """Record that an optimizer of this model's parameters is prepared."""
        self._steppers.append(stepper)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        inputs = (*args, kwargs) if kwargs else args
        bound = None
        if torch.is_grad_enabled():
            self.engine.refresh()
            bound = self._passes.bind(inputs, self._syncs)
        with nullcontext() if self._autocast is None else self._autocast():
            result = self.engine.run(args, kwargs)
        if self._autocast is not None:
            result = tree_map(_in_full, result)
        if bound is not None:
            self._passes.watch(self.engine, result, bound)
        else:
            self._passes.know(inputs, result)
        return result

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep the backward passes of forward passes that run within the block from reducing."""
        before, self._syncs = self._syncs, False
        try:
            yield
        finally:
            self._syncs = before

    def zero_grad(self, set_to_none: bool = True) -> None:
        """`module.zero_grad`, which does nothing between microbatches of one step."""
        if all(stepper.may_zero() for stepper in self._steppers):
            self.engine.zero_grad(set_to_none)
            for stepper in self._steppers:
                stepper.forget()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set the attribute on the module, so that its forward pass sees it."""
        if "module" not in self.__dict__.get("_modules", ()) or name in self.__dict__ or name == "module":
            super().__setattr__(name, value)
        else:
            setattr(self.module, name, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """A copy of the module itself, which is not prepared.

        Raises:
            TypeError: the module is sharded.
        """
        if is_sharded(self.module):
            raise TypeError(
                f"a copy of the prepared {self.engine.name} was asked for, and strategy='fsdp' has sharded it, which "
                "torch does not copy; copy the model before prepare(), as AveragedModel(model) does, and prepare both: "
                "model, average = accelerator.prepare(model, average); or use accelerator.state_dict(model)"
            )
        return copy.deepcopy(self.module, memo)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.load_state_dict(*args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        return self.module.named_buffers(*args, **kwargs)


def _in_full(leaf: Any) -> Any:
    return leaf.float() if isinstance(leaf, torch.Tensor) and leaf.dtype in _REDUCED else leaf
