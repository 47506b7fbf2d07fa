"""Where a host waits for its device: counted on a machine that has none.

An accelerator stands in that computes on the CPU. Its memory is marked, and what is computed from marked tensors is
marked. A host waits where it reads a marked tensor, or a copy crosses between marked memory and other memory and is not
told to continue by itself: these are the calls that `torch.cuda.set_sync_debug_mode` warns of. (A tensor that is sent
to another one's device stays where it is: the devices of both have one name here.)
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from unisono.batches.storages import StorageMap
from unisono.devices.cpu import CpuBackend
from unisono.tree import tree_map
from unisono.world import World, current_world, use_world

DEVICE = torch.device("cpu", 0)  # main memory is "cpu", without an index

_READS = {"tolist", "numpy", "__array__", "cpu"}  # past the dispatcher, where memory is the CPU's
_READING = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "unique_dim", "is_nonzero"}
_FROM_DATA = {torch.tensor, torch.as_tensor, torch.Tensor.new_tensor}


class Marks:
    """Which tensors lie on the device, by their memory."""

    def __init__(self) -> None:
        self._known: StorageMap[bool] = StorageMap()

    def put(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and not self.has(value):
            self._known.note(value.detach(), True)
        return value

    def has(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and bool(self._known.find(value))


class StandIn(CpuBackend):
    """An accelerator whose memory is marked."""

    def __init__(self, marks: Marks) -> None:
        self._marks = marks

    def is_accelerated(self) -> bool:
        return True

    def to_device(self, batch: Any, device: torch.device) -> tuple[Any, Any]:
        return tree_map(self._marks.put, batch), None


class Syncs(TorchFunctionMode):
    """Counts, in its thread, while it is entered.

    Attributes:
        found: what waited, and the line that did.
    """

    def __init__(self, marks: Marks) -> None:
        super().__init__()
        self.found: list[str] = []
        self.marks = marks
        self._dispatch = _Dispatch(self)

    def __enter__(self) -> Syncs:
        super().__enter__()
        self._dispatch.__enter__()
        return self

    def __exit__(self, *failure: Any) -> None:
        self._dispatch.__exit__(*failure)
        super().__exit__(*failure)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        is_marked = bool(args) and self.marks.has(args[0])
        if func in _FROM_DATA:
            place = kwargs.get("device")
            result = func(*args, **kwargs)
            if place == DEVICE or (func is torch.Tensor.new_tensor and place is None and is_marked):
                if result.numel() and not self.marks.has(result):
                    self.note(f"{name} on the device")
                self.marks.put(result)
            return result
        if is_marked and (name in _READS or (name == "to" and "cpu" in args[1:2])):
            self.note(name)
            return func(args[0].clone() if name in ("cpu", "to") else args[0], *args[1:], **kwargs)
        if is_marked and name == "__getitem__":
            for each in args[1] if isinstance(args[1], tuple) else (args[1],):
                if isinstance(each, list) or (isinstance(each, torch.Tensor) and not self.marks.has(each)):
                    self.note("an index in main memory")
        result = func(*args, **kwargs)
        if kwargs.get("device") == DEVICE or (name == "to" and DEVICE in args):
            self.marks.put(result)
        return result

    def note(self, what: str) -> None:
        lines = [
            each for each in traceback.extract_stack() if "device_syncs" not in each.filename and each.name != "_fn"
        ]
        if "distributed_c10d" in "".join(each.filename for each in lines[-4:]):
            return  # gloo's own copies, which no GPU's transport makes
        ours = [each for each in lines if "/unisono/" in each.filename or "/tests/" in each.filename]
        self.found.append(f"{what} at {ours[-1].filename}:{ours[-1].lineno}, by {lines[-1].name}")


class _Dispatch(TorchDispatchMode):
    """Sees what torch calls in C++, too, and hands marks on."""

    def __init__(self, syncs: Syncs) -> None:
        super().__init__()
        self._syncs, self._marks = syncs, syncs.marks

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        taken = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        are_marked = [self._marks.has(each) for each in taken]
        if name in _READING and any(are_marked):
            self._syncs.note(name)
        if name == "copy_" and len(set(are_marked)) == 2 and not (len(args) > 2 and args[2]):
            self._syncs.note("a copy")
        to_device = name == "_to_copy" and kwargs.get("device") == DEVICE and taken[0].numel()
        if to_device and not any(are_marked) and not kwargs.get("non_blocking"):
            self._syncs.note("a copy to the device")
        result = func(*args, **kwargs)
        if name == "copy_" and not are_marked[0] and len(args) > 2 and args[2]:
            return result  # main memory, which may be read when the device has come to a mark after the copy
        if any(are_marked) or kwargs.get("device") == DEVICE:
            for each in [
                *tree_leaves(result),
                *_written(func, args, kwargs),
            ]:  # C++ makes buckets unseen, and fills them
                self._marks.put(each)
        return result


def _written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """What the operator changes in place."""
    if func.namespace == "c10d":
        return tree_leaves(args)
    names = [each.name for each in func._schema.arguments if each.alias_info is not None and each.alias_info.is_write]
    given = {each.name: value for each, value in zip(func._schema.arguments, args, strict=False)} | kwargs
    return tree_leaves([given[name] for name in names if name in given])


@contextmanager
def on_stand_in() -> Iterator[tuple[World, Marks]]:
    """The rank's world on an accelerator that stands in."""
    marks = Marks()
    with use_world(replace(current_world(), backend=StandIn(marks), device=DEVICE)) as world:
        yield world, marks
