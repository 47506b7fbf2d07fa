"""`torch_xla.utils.serialization`: files of large structures, with one tensor at a time in main memory.

A structure is saved as a file with a number, itself a tensor, in place of each of its tensors, and a folder next to it,
`PATH.tensors`, with a file for each of these. So both can be read with `weights_only=True`.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch

from unisono.compat.torch_xla.core.host import to_host
from unisono.compat.torch_xla.core.meeting import rendezvous
from unisono.compat.torch_xla.core.ordinals import is_master_ordinal
from unisono.compat.torch_xla.core.steps import cut
from unisono.tree import tree_map


def save(data: Any, path: str | os.PathLike[str], master_only: bool = True, global_master: bool = False) -> None:
    """Write the data, as `xla_model.save` does; all replicas must call it, and it returns once written."""
    cut()
    if not master_only or is_master_ordinal(local=not global_master):
        _write(data, Path(path))
    rendezvous("torch_xla.utils.serialization.save")


def load(path: str | os.PathLike[str], weights_only: bool = True) -> Any:
    """Load what `save` has written, into main memory.

    Args:
        path: as for `save`.
        weights_only: as for `torch.load`: refuse files with objects other than tensors, containers and plain values.
    """
    folder = _folder(Path(path))

    def tensor_of(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return torch.load(_file(folder, int(leaf)), weights_only=weights_only)

    return tree_map(tensor_of, torch.load(path, weights_only=weights_only))


def _write(data: Any, path: Path) -> None:
    folder = _folder(path)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    count = 0

    def number_of(leaf: Any) -> Any:
        nonlocal count
        if not isinstance(leaf, torch.Tensor):
            return leaf
        torch.save(to_host(leaf), _file(folder, count))
        count += 1
        return torch.tensor(count - 1)

    torch.save(tree_map(number_of, data), path)


def _folder(path: Path) -> Path:
    return path.with_name(path.name + ".tensors")


def _file(folder: Path, tid: int) -> Path:
    return folder / f"tensor_{tid}.pt"
