"""PreparedModel: the user's module, run by its engine with autocast; names, attributes and state are the module's."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial, update_wrapper
from typing import Any

import torch
from torch import nn

from unisono.batches.deliveries import Batch
from unisono.report.timeline import FORWARD
from unisono.torch_private import APPLY, BUFFERS, MODULES, PARAMETERS, overrides
from unisono.training.compilation import keep_out_of_graphs
from unisono.training.passes import Passes
from unisono.training.prepared.step_checks import alive, steppers
from unisono.training.steps import Steps
from unisono.training.strategies.engine import Engine
from unisono.training.strategies.sharded import MIXED, units_in
from unisono.tree import tree_map

_REDUCED = (torch.float16, torch.bfloat16)
_ONE_VALUE = "Expected more than 1 value per channel"  # torch's error
_MET_PARTS = (
    "the forward pass of the {} met a part of a parameter that was taken outside of it, and strategy='fsdp' gathers "
    "parameters only while the model is called; make tensors from the inputs (inputs.new_zeros(...)), and use "
    "parameters within forward() alone"
)


class _OfModule(dict[str, Any]):
    """The tensors that the module has by itself, under their names, where torch.func.functional_call puts others. To
    those who list it, it is empty: they list the module, too."""

    def __init__(self, held: dict[str, Any]) -> None:
        super().__init__()
        self._held = held

    def __contains__(self, name: object) -> bool:
        return name in self._held

    def __getitem__(self, name: str) -> Any:
        return self._held[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._held[name] = value

    def __delitem__(self, name: str) -> None:
        del self._held[name]


class PreparedModel(nn.Module):
    """Behaves like the engine's `module`, with its attributes, parameter names and state. Only calling it differs: it
    runs under autocast, and its outputs are returned as float32."""

    def __init__(
        self, engine: Engine, passes: Passes, autocast: Callable[[], AbstractContextManager[Any]] | None
    ) -> None:
        super().__init__()
        keep_out_of_graphs()
        self._engine = (engine,)  # in a tuple, so that the wrapped module is not registered as a second child
        self._passes = passes
        self._autocast = autocast
        self._syncs = True
        self._forward_methods: set[str] = set()
        self.training = engine.module.training
        passes.register_engine(engine)
        for kind in (PARAMETERS, BUFFERS):
            vars(self)[kind] = _OfModule(getattr(engine.module, kind))
        self.module = engine.module  # last: from here on, attributes are set on the module

    @property
    def engine(self) -> Engine:
        """The engine, which runs the module."""
        return self._engine[0]

    def mark_forward_method(self, method: str | Callable[..., Any]) -> None:
        """Let a method of the module run as the module itself does when called.

        That is, with autocast, bound to its batch, and with the parameters gathered, which strategy="fsdp" needs. Of
        methods that call one another, mark those that the loop calls.

        Args:
            method: its name, or the method.

        Raises:
            ValueError: the module has no such method of its own.
        """
        name = method if isinstance(method, str) else getattr(method, "__name__", repr(method))
        if not _is_own_method(getattr(self.module, name, None), name):
            raise ValueError(
                f"the {self.engine.name} has no method {name!r} of its own; pass the name of one that computes outputs "
                "from inputs, besides forward, such as 'encode'"
            )
        self._forward_methods.add(name)

    @property
    def forward(self) -> Callable[..., Any]:  # type: ignore[override]
        """Runs the module. Not a method: torch.compile frames one that it leaves out, and the graph breaks there."""
        return partial(self._run, None)

    def _run(self, method: str | None, *args: Any, **kwargs: Any) -> Any:
        inputs = (*args, kwargs) if kwargs else args
        engine, passes = self._engine[0], self._passes
        origin = None
        if torch.is_grad_enabled():
            engine.refresh()
            origin = passes.find_origin(engine, inputs, self._syncs)
        timeline = passes.steps.world.timeline
        track = timeline.loop() if timeline.is_recorded and origin is not None else None
        before = track.switch(FORWARD) if track is not None else None
        try:
            if self._autocast is None:
                result = engine.run(args, kwargs, method)
            else:
                with self._autocast():
                    result = tree_map(_in_full, engine.run(args, kwargs, method))
        except RuntimeError as error:
            if MIXED in str(error):
                raise RuntimeError(_MET_PARTS.format(engine.name)) from error
            raise
        except ValueError as error:
            if _ONE_VALUE in str(error):
                error.add_note(_way_to_more_samples(origin.batch if origin is not None else None, passes.steps))
            raise
        finally:
            if track is not None:
                track.switch(before)
        if origin is not None:
            passes.hook_outputs(engine, result, origin)
        else:
            passes.steps.world.state.deliveries.know_computed(inputs, result)
        return result

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep the backward passes of forward passes within the block from reducing."""
        before, self._syncs = self._syncs, False
        try:
            yield
        finally:
            self._syncs = before

    @contextmanager
    def local_steps(self) -> Iterator[None]:
        """A block in whose steps each rank follows its own gradients, weighted by its samples. The ranks' parameters
        differ until the script averages them. ValueError for a sharded model, or one that steps locally already."""
        engine = self.engine
        if units_in(self.module):
            raise ValueError(
                f"the {engine.name} is sharded by strategy='fsdp', and no rank has a whole one to step with; use "
                "strategy='ddp'"
            )
        if engine.is_local:
            raise ValueError(
                f"the {engine.name} steps locally already, in a LocalSGD block or under its strategy; leave this "
                "block out"
            )
        engine.is_local = True
        try:
            yield
        finally:
            engine.is_local = False

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Raises RuntimeError: it would compile what runs the module, too."""
        raise RuntimeError(
            f"the prepared {self.engine.name} cannot be compiled in place; pass Accelerator(compile=True), or what "
            "torch.compile(model) returns to prepare()"
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """`module.zero_grad`, which does nothing between microbatches of one step."""
        own = [each for each in alive(steppers) if each.trains(self.engine)]
        if all(each.may_zero() for each in own):
            self.module.zero_grad(set_to_none)
            self.engine.note_zeros()
            for each in own:
                each.note_zeros()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module: Any = super().__getattr__("module")
        value = getattr(module, name)
        is_own_method = _is_own_method(value, name)
        if name in self._forward_methods:
            return update_wrapper(partial(self._run, name), value)
        if is_own_method or isinstance(value, nn.Module):
            self.engine.passes.may_bypass = True
        if not (self.engine.gathers and is_own_method):
            return value
        return _explaining_parts(
            f"{name}() was called on the {self.engine.name} by itself, and strategy='fsdp' gathers parameters only "
            f"while the model is called; after prepare(), say model.mark_forward_method({name!r})"
        )(value)

    def __getitem__(self, key: Any) -> Any:
        """A part of the module, such as a layer of a Sequential."""
        self.engine.passes.may_bypass = True
        return self.module[key]  # type: ignore[index]

    def __len__(self) -> int:
        return len(self.module)  # type: ignore[arg-type]

    def __bool__(self) -> bool:
        return True

    @overrides(APPLY)
    def _apply(self, *args: Any, **kwargs: Any) -> nn.Module:
        """`to`, `cuda`, `half` and the like, of the module."""
        dtypes = [each.dtype for each in self.module.parameters()]
        try:
            super()._apply(*args, **kwargs)
            if dtypes != [each.dtype for each in self.module.parameters()]:
                self.engine.note_conversion()
            return self
        except Exception as error:
            placed = next((str(each.device) for each in self.module.parameters()), "its device")
            error.add_note(
                f"the prepared {self.engine.name} is on {placed}, where prepare() has put it, as the batches of "
                "prepared loaders: leave .cuda() and .to() out, or use accelerator.device; convert a model before "
                "prepare(); accelerator.unwrap_model(model) is your module, as it is without prepare()"
            )
            raise

    def __setattr__(self, name: str, value: Any) -> None:
        """Set the attribute on the module, so that its forward pass sees it."""
        if "module" not in self.__dict__.get(MODULES, ()) or name in self.__dict__ or name == "module":
            super().__setattr__(name, value)
        else:
            setattr(self.module, name, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """A copy of the module itself, which is not prepared."""
        return copy.deepcopy(self.module, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"the prepared {self.engine.name} is connected to the other ranks, and cannot be copied or pickled; save "
            "accelerator.state_dict(model), which every rank calls, or pickle accelerator.unwrap_model(model)"
        )

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        self.engine.equalize_ranks()
        self.engine.note_load()
        return self.module.load_state_dict(*args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        return self.module.named_buffers(*args, **kwargs)


@contextmanager
def _explaining_parts(way_out: str) -> Iterator[None]:
    """Where torch raises its error for tensors that met parts of sharded parameters, say what to do."""
    try:
        yield
    except RuntimeError as error:
        if MIXED in str(error):
            raise RuntimeError(way_out) from error
        raise


def _way_to_more_samples(batch: Batch | None, steps: Steps) -> str:
    """What helps where a BatchNorm got a single sample: from a last, smaller batch, or from each batch."""
    kind = "virtual " if steps.virtual is not None else ""
    first = next(iter(batch.loop.kinds.values())) if batch is not None else None
    needed = 2 * -(-steps.parts // first.dealt) if first is not None else 0
    if first is None or first.rows is None or first.total is None or first.total >= needed * first.dealt:
        text = "BatchNorm has no variance over one sample; pass DataLoader(drop_last=True)"
    else:
        few, more = divmod(first.total, steps.parts)
        who = f"each of the {steps.parts} {kind}ranks" if steps.parts > 1 else "the model"
        text = (
            f"BatchNorm has no variance over one sample, and {who} gets {few}{f' or {few + 1}' if more else ''} of "
            f"{first.total} samples; use a batch_size of at least {needed}"
        )
    return text if kind else f"{text}, or on several ranks Accelerator(sync_batchnorm=True), which uses those of all"


def _is_own_method(value: Any, name: str) -> bool:
    """Whether this attribute of a module is a method that its class adds to those of `nn.Module`."""
    return inspect.ismethod(value) and not hasattr(nn.Module, name)


def _in_full(leaf: Any) -> Any:
    return leaf.float() if isinstance(leaf, torch.Tensor) and leaf.dtype in _REDUCED else leaf
