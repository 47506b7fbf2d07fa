"""`accelerate.utils.other`, `environment` and `tqdm`: saving, unwrapping, waiting, environment variables, a bar."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from torch import nn

from unisono.compat.accelerate.state import PartialState
from unisono.parallel.prepared.model import PreparedModel
from unisono.progress import tqdm as bar_of_rank_zero


def wait_for_everyone() -> None:
    """Return when every rank has called it."""
    PartialState().wait_for_everyone()


def save(obj: Any, f: Any, save_on_each_node: bool = False, safe_serialization: bool = False) -> None:
    """`torch.save` on rank zero; on the first rank of each machine with `save_on_each_node`.

    Args:
        safe_serialization: save a mapping of tensors by safetensors.
    """
    state = PartialState()
    if state.is_main_process or (save_on_each_node and state.is_local_main_process):
        if safe_serialization:
            import_module("safetensors.torch").save_file(
                {name: each.contiguous() for name, each in obj.items()}, f, metadata={"format": "pt"}
            )
        else:
            torch.save(obj, f)


load = torch.load


def extract_model_from_parallel(
    model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True, recursive: bool = False
) -> nn.Module:
    """The user's module. Other arguments have no effect, except `keep_torch_compile=False`, which returns the
    uncompiled module."""
    from unisono.torch_private import ORIGINAL  # here: it may import the compiler

    module = model.module if isinstance(model, PreparedModel) else model
    plain: nn.Module = module if keep_torch_compile else getattr(module, ORIGINAL, module)
    return plain


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """`unisono.tqdm`; with `main_process_only=False` tqdm's own bar, on every rank."""
    return bar_of_rank_zero(*args, **kwargs) if main_process_only else import_module("tqdm.auto").tqdm(*args, **kwargs)


@contextmanager
def patch_environment(**variables: Any) -> Iterator[None]:
    """Set environment variables during the block; their names are converted to upper case."""
    own = {name.upper(): str(value) for name, value in variables.items()}
    before = {name: os.environ[name] for name in own if name in os.environ}
    os.environ.update(own)
    try:
        yield
    finally:
        for name in own:
            os.environ.pop(name, None)
        os.environ.update(before)


def str_to_bool(value: str) -> int:
    """1 for y, yes, t, true, on, 1; 0 for their opposites; otherwise a ValueError."""
    answers = dict.fromkeys(("y", "yes", "t", "true", "on", "1"), 1)
    answers |= dict.fromkeys(("n", "no", "f", "false", "off", "0"), 0)
    if value.lower() not in answers:
        raise ValueError(f"{value!r} is neither yes nor no; pass one of {', '.join(answers)}")
    return answers[value.lower()]


def parse_flag_from_env(key: str, default: bool = False) -> bool:
    """The environment variable as a flag."""
    return bool(str_to_bool(os.environ.get(key, str(default))))
