"""torch.compile of models. On threads each replica compiles for itself, unless torch finds what another replica has
compiled: it stores compiled code with the code of `forward`, and takes the weights as inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import nn

from unisono.devices.graphs import keep_package_out_of_graphs
from unisono.torch_private import CALL, COMPILED_CALL, set_lru_cache


def compile_module(module: nn.Module, options: Mapping[str, Any]) -> None:
    """Compile a module in place by `torch.compile` with these options; copies of it are not compiled."""
    keep_out_of_graphs()
    if _is_of_torch(module):
        # `nn.Module.__call__` calls this attribute if it is set.
        setattr(module, COMPILED_CALL, torch.compile(_with_a_frame(getattr(module, CALL)), **options))
    else:
        module.compile(**options)


def compilable(module: nn.Module) -> Callable[..., Any]:
    """What runs the module, so that a torch.compile around it compiles that."""
    return _with_a_frame(module) if _is_of_torch(module) else module


def uncompiled(module: nn.Module) -> nn.Module:
    """The module that torch.compile has wrapped; the module itself, if it is not what that returned."""
    from unisono.torch_private import ORIGINAL  # here: it may import the compiler

    found: nn.Module = getattr(module, ORIGINAL, module)
    return found


def _is_of_torch(module: nn.Module) -> bool:
    """Whether the module's class is one of torch's own, whose frames torch does not compile."""
    return type(module).forward.__module__.startswith("torch.")


def _with_a_frame(run: Callable[..., Any]) -> Callable[..., Any]:
    """The same call in a frame of user code, which torch compiles."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return run(*args, **kwargs)

    # Each has its own code object, where torch stores what it compiles; see also `keep_out_of_graphs`.
    call.__code__ = call.__code__.replace(co_filename="<model>")
    return call


@cache
def keep_out_of_graphs() -> None:
    """Have torch.compile leave this package's functions out of its graphs: it compiles what a prepared model runs, the
    user's module, as if that were compiled itself. Graphs keep a fixed order, process-wide."""
    # A thread that searches for its graph while another thread moves it to the front misses it, and compiles it again;
    # after a few repetitions torch gives up and runs the model uncompiled.
    if set_lru_cache is not None:
        set_lru_cache(False)
    keep_package_out_of_graphs()
