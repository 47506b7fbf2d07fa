"""torch.compile of a model that several threads run as replicas: each graph is compiled once, by the first to need it.

The replicas of a model share compiled code: torch stores it with the code of `forward`, with the weights as inputs. But
a thread that finds nothing compiled waits for torch's lock, and then compiles again what another thread has just
compiled. So a call that may have to compile passes a gate, one at a time, and later calls find the result.

The signature determines which calls may compile: the shapes and types of the inputs, and the modes that torch checks. A
signature is known once a call with it has returned; calls with known ones bypass the gate. The signature is coarser
than torch's own guards in a few respects (a flag that a module reads, a global), for which each replica may compile
separately. The result is never wrong: torch decides what runs.

Compiled code is looked up outside the gate, by several threads concurrently, which torch does not expect: see
`_keep_order`. Older versions of torch, such as 2.9, do not support it: there each call passes the gate, so forward
passes run one at a time.

The backward graph is compiled with the forward one, inside the gate, not at the first backward pass.

*Threads:* any number, concurrently.

Invariants:
1. No thread waits for a peer inside the gate (`comm/gate.py`): its collectives leave the gate.
2. A call that raises leaves its signature unknown, so the next one encounters the cause itself.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import CodeType, FunctionType, ModuleType
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import nn

from unisono.comm.gate import compiling
from unisono.torch_private import (
    CALL,
    COMPILED_CALL,
    GRAPH_RULES,
    compile_session_context,
    set_lru_cache,
)
from unisono.world import World

_BACKWARD_AT_ONCE = "force_non_lazy_backward_lowering"
_MANY = 2  # torch specialises on the sizes and integers 0 and 1, and compiles larger ones together if necessary


class _Family:
    """Modules that are replicas of one another: their known signatures, and the code of their common frame."""

    def __init__(self) -> None:
        self.known: set[object] = set()
        # `replace` makes a copy: the functions of `_frame` share one code object, and families must not.
        self.code: CodeType = _FRAME.replace()


known_families: WeakKeyDictionary[type[nn.Module], dict[object, _Family]] = WeakKeyDictionary()
"""Keyed by the root's class, and everything else that makes modules replicas of one another."""


def compile_module(module: nn.Module, world: World, **options: Any) -> nn.Module:
    """Compile a module in place with `torch.compile`, each graph once for all threads that run its replicas.

    It remains the same module, with its class and the names of its parameters. A copy of it is not compiled.

    Args:
        world: that of the rank that calls the module, on its device.
        options: those of `torch.compile`.

    Returns:
        The module.

    Raises:
        TypeError: it is not a module, or is one that `torch.compile` has wrapped; or an option does not exist.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module={module!r} is of type {type(module).__name__}; pass a torch.nn.Module")
    from unisono.torch_private import ORIGINAL

    if isinstance(original := getattr(module, ORIGINAL, None), nn.Module):
        raise TypeError(
            f"module is the result of torch.compile for a {type(original).__name__}, and cannot be compiled "
            "again; pass the module itself"
        )
    _keep_order()
    families = known_families.setdefault(type(module), {})
    # `setdefault` is atomic: replicas that are compiled at the same time get the same family.
    family = families.setdefault((_structure(module), repr(sorted(options.items()))), _Family())
    if _is_of_torch(module):
        # Torch stores compiled code with the frame's code object, which is therefore the same for all replicas, and
        # another one for other modules.
        compiled = torch.compile(_with_a_frame(getattr(module, CALL), family.code), **options)
    else:
        module.compile(**options)
        compiled = getattr(module, COMPILED_CALL)
    # `nn.Module.__call__` calls this attribute if it is set.
    setattr(module, COMPILED_CALL, _put_in_gate(module, compiled, family.known, world.device.type))
    return module


def compilable(module: nn.Module) -> Callable[..., Any]:
    """What runs the module, so that a torch.compile around it compiles that."""
    return _with_a_frame(module, _FRAME) if _is_of_torch(module) else module


def _is_of_torch(module: nn.Module) -> bool:
    """Whether the module is of one of torch's own classes, whose frames torch does not compile."""
    return type(module).forward.__module__.startswith("torch.")


def _with_a_frame(run: Callable[..., Any], code: CodeType) -> Callable[..., Any]:
    """The same call in a frame of that code, which torch compiles."""
    call = _frame(run)
    call.__code__ = code
    return call


def _frame(run: Callable[..., Any]) -> FunctionType:
    def call(*args: Any, **kwargs: Any) -> Any:
        return run(*args, **kwargs)

    return cast(FunctionType, call)


_FRAME = _frame(nn.Identity()).__code__.replace(co_filename="<model>")  # see `keep_out_of_graphs`


def _keep_order() -> None:
    """Make torch keep its compiled graphs in a fixed order, which it otherwise changes at each use; process-wide.

    A thread that searches for its graph while another thread moves that graph to the front misses it, and compiles it
    again; after some repetitions torch gives up and runs the model uncompiled.
    """
    if set_lru_cache is not None:
        set_lru_cache(False)


def _is_open() -> bool:
    """Whether torch can run compiled code while another thread compiles.

    Torch 2.9 cannot: it treats such a call as a part of its trace, and raises; nor can it keep the order.
    """
    return compile_session_context is not None and set_lru_cache is not None


def _put_in_gate(
    module: nn.Module, compiled: Callable[..., Any], known: set[object], device: str
) -> Callable[..., Any]:
    beside = nullcontext if _is_open() else compiling.inside

    def call(*args: Any, **kwargs: Any) -> Any:
        # A compiled part of a model that is being compiled: its thread holds the gate, whose lock is not reentrant.
        if compiling.is_inside or torch.compiler.is_dynamo_compiling():
            return compiled(*args, **kwargs)
        modes, inputs = _modes(module, device), [*_leaves(args), *_leaves(kwargs)]
        exact = (modes, tuple(map(_exact, inputs)))
        if exact not in known and (general := (modes, tuple(map(_general, inputs)))) not in known:
            with compiling.inside():
                # Another replica may have compiled it while this one waited.
                if exact not in known and general not in known:
                    result, has_compiled = _first_call(compiled, args, kwargs)
                    # If nothing had to be compiled, torch has a graph for all sizes of this kind; otherwise only this
                    # size is certain.
                    known.add(exact if has_compiled else general)
                    return result
        with beside():
            return compiled(*args, **kwargs)

    return call


def _first_call(compiled: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, bool]:
    """The result of the call, and whether anything was compiled meanwhile, for this model or another."""
    from unisono.torch_private import compile_counters

    # The counter belongs to the process, but others compile only inside the gate, which this thread holds.
    before = compile_counters["frames"]["total"]
    with _backward_at_once():
        result = compiled(*args, **kwargs)
    return result, compile_counters["frames"]["total"] != before


def _backward_at_once() -> AbstractContextManager[None]:
    """Make torch compile the backward graph with the forward one. For calls inside the gate."""
    from unisono.torch_private import functorch_config

    if hasattr(functorch_config, _BACKWARD_AT_ONCE):
        patched: AbstractContextManager[None] = functorch_config.patch({_BACKWARD_AT_ONCE: True})
        return patched
    _ask_the_gate()
    return nullcontext()


@cache
def _ask_the_gate() -> None:
    """Do the same in torch 2.9, where this is not a setting but an argument of a function that each backend calls."""
    from unisono.torch_private import aot_autograd

    plain = aot_autograd.prepare_aot_module_simplified

    def prepare(*args: Any, **kwargs: Any) -> Any:
        return plain(*args, **{_BACKWARD_AT_ONCE: compiling.is_inside, **kwargs})

    aot_autograd.prepare_aot_module_simplified = prepare


def _structure(module: nn.Module) -> object:
    """The key that replicas share: the modules' classes, and the names, shapes and types of their tensors."""
    tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return (
        tuple((name, f"{type(each).__module__}.{type(each).__qualname__}") for name, each in module.named_modules()),
        tuple((name, tuple(each.shape), each.dtype, each.requires_grad) for name, each in tensors),
    )


def _modes(module: nn.Module, device: str) -> object:
    """The modes that torch checks, in addition to the inputs."""
    return (
        module.training,
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_num_threads(),
        torch.is_autocast_enabled(device),
        torch.get_autocast_dtype(device),
    )


def _leaves(tree: Any) -> Iterator[Any]:
    """The keys and leaves of a call's inputs; `unisono.tree.leaves` supports more kinds, and is slower."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield key
            yield from _leaves(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from _leaves(value)
    else:
        yield tree


def _exact(leaf: Any) -> object:
    if isinstance(leaf, torch.Tensor):
        layout = leaf.stride() if leaf.layout is torch.strided else leaf.layout
        return type(leaf), leaf.dtype, leaf.device, leaf.requires_grad, tuple(leaf.shape), layout
    # With its class, since 1 == True == 1.0. Other objects by their class alone: they may have no hash, and `known`
    # would keep them alive.
    return (type(leaf), leaf) if leaf is None or isinstance(leaf, bool | int | float | str) else type(leaf)


def _general(leaf: Any) -> object:
    """Equal for sizes and numbers that torch may compile into one graph."""
    if isinstance(leaf, torch.Tensor):
        sizes = tuple(min(size, _MANY) for size in leaf.shape)
        return type(leaf), leaf.dtype, leaf.device, leaf.requires_grad, sizes
    if isinstance(leaf, int) and not isinstance(leaf, bool):
        return min(leaf, _MANY)
    return type(leaf) if isinstance(leaf, float) else _exact(leaf)


@cache
def keep_out_of_graphs() -> None:
    """Have torch.compile leave this package's functions out of its graphs: it compiles what a prepared model runs, the
    user's module, as if that were compiled itself."""
    _keep_order()
    if GRAPH_RULES in sys.modules:
        _leave_out()
    else:
        sys.meta_path.insert(0, _Compiler())


def _leave_out() -> None:
    from unisono.torch_private import leave_out_of_graphs

    leave_out_of_graphs(__package__.partition(".")[0])


class _Compiler(MetaPathFinder):
    """Waits for torch's compiler, whose import takes seconds that most scripts need not spend."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name != GRAPH_RULES:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        assert spec is not None, "the import would fail"
        assert spec.loader is not None, "it is a file"
        execute = spec.loader.exec_module

        def execute_and_add(module: ModuleType) -> None:
            execute(module)
            _leave_out()

        spec.loader.exec_module = execute_and_add  # type: ignore[method-assign]
        return spec
