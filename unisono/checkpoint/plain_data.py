"""What a checkpoint may contain: plain data and tensors, which load without running any code."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch

_LEAVES = (type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device)


def as_plain(value: Any, where: str, copy: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The value, `where` in words, with copies of its tensors; containers keep their types. TypeError if it contains
    something that is not plain data; the message says where."""
    kind = type(value)
    if kind in _LEAVES:
        return value
    if kind in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        return copy(value)
    if kind in (list, tuple, set):
        return kind(as_plain(each, f"{where}[{place}]", copy) for place, each in enumerate(value))
    if kind is Counter:
        return Counter(value)
    if (isinstance(value, Mapping) and kind in (dict, OrderedDict)) or hasattr(value, "default_factory"):
        pairs = [(as_plain(key, f"a key of {where}", copy), value[key]) for key in value]
        made = OrderedDict if kind is OrderedDict else dict
        return made((key, as_plain(each, f"{where}[{key!r}]", copy)) for key, each in pairs)
    if kind.__module__ == "numpy" and hasattr(value, "item") and getattr(value, "ndim", 1) == 0:
        return as_plain(value.item(), where, copy)
    if kind.__module__ == "numpy" and hasattr(value, "tolist"):
        raise TypeError(f"{where} is a numpy array; convert it by torch.from_numpy(array)")
    raise TypeError(
        f"{where} is a {kind.__module__}.{kind.__qualname__}, which could not be loaded safely; convert it to "
        "plain data: numbers, strings, tensors, and lists, tuples, sets and dicts of these"
    )
