"""Exports a checkpoint's model, or another of its objects, as one file for plain torch or for safetensors."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

import torch

from unisono.checkpoint.contents import Contents, read_contents
from unisono.checkpoint.files import sync, write_file, write_tensors
from unisono.checkpoint.folders import Folder, Location
from unisono.errors import CheckpointError

Format = Literal["torch", "safetensors"]


def export(folder: Folder, out: Path, name: str | None = None, file_format: Format = "torch") -> tuple[Location, str]:
    """Write the complete state of one object, on the CPU, as `torch.save(object.state_dict(), out)` does; return the
    checkpoint, and the object's name.

    Args:
        folder: a checkpoint, or a directory of numbered ones, of which the latest is used.
        name: None uses the only model.
        file_format: "safetensors" supports tensors only.

    Raises:
        CheckpointError: as for loading; or there is no such object, or it contains more than tensors.
        ImportError: safetensors is not installed.
        OSError: the file cannot be written.
    """
    contents = read_contents(folder)
    name = _choose_object(contents, name)
    write_state(contents.states[name], out, file_format, name)
    return contents.path, name


def write_state(state: Any, out: Path, file_format: Format, name: str) -> None:
    """Write a state on the CPU as one file, complete or not at all; `name` is for errors, which are those of
    `export`."""
    # Under another name first, so that a failure leaves an existing file as it is.
    new = out.with_name(f".{out.name}-{uuid4().hex[:12]}")
    try:
        if file_format == "torch":
            write_tensors(new, state)
        else:
            write_file(new, _as_safetensors(state, name))
        os.replace(new, out)
    finally:
        new.unlink(missing_ok=True)
    sync(out.absolute().parent)


def _choose_object(contents: Contents, name: str | None) -> str:
    if name is None:
        models = [each for each, (kind, _) in contents.kinds.items() if kind == "model"]
        if len(models) != 1:
            raise CheckpointError(
                f"{contents.path} holds {len(models)} models; name the object that you mean: {_join_names(contents)}"
            )
        return models[0]
    if name not in contents.states:
        raise CheckpointError(f"{contents.path} has no {name!r} with one state; it holds {_join_names(contents)}")
    return name


def _join_names(contents: Contents) -> str:
    return ", ".join(contents.states)


def _as_safetensors(state: Any, name: str) -> bytes:
    try:
        save = import_module("safetensors.torch").save
    except ImportError as error:
        raise ImportError("safetensors is not installed; pip install 'unisono[export]'") from error
    wrong = [key for key, each in state.items() if not isinstance(each, torch.Tensor)] if _is_flat(state) else [name]
    if wrong:
        raise CheckpointError(
            f"{wrong[0]} is not a tensor, and safetensors files hold tensors only; use --format torch"
        )
    seen: set[int] = set()
    apart = {}
    for key, each in state.items():  # safetensors refuses tensors that share memory
        apart[key] = each.contiguous().clone() if each.untyped_storage().data_ptr() in seen else each.contiguous()
        seen.add(each.untyped_storage().data_ptr())
    data: bytes = save(apart, metadata={"format": "pt"})
    return data


def _is_flat(state: Any) -> bool:
    return isinstance(state, Mapping) and all(isinstance(key, str) for key in state)
