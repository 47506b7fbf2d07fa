"""`strict`: no implicit moves and no implicit conversions.

torch promotes a bfloat16 tensor that is combined with a float32 one, and moves a scalar tensor from main memory if the
other one is on an accelerator. Both cost time or memory, silently. Under `strict` they are errors.

*Threads:* torch keeps modes per thread, so this one applies to the thread that entered it: a replica's loop enters its
own. The backward pass mixes nothing that the forward pass did not, and is not checked.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, resolve_name

from unisono.errors import MixedPlacementError
from unisono.torch_private import foreach_copy_

PRECISIONS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""The dtypes that count as precisions: integers, booleans and complex numbers mix with each of them."""

# Operations whose purpose is to move or to convert, or that read only a shape or a dtype.
_EXPLICIT = {"to", "copy_", foreach_copy_.__name__, "type_as", "new_tensor", "__set__", "grad", "backward"}
_EXPLICIT |= {"expand_as", "view_as", "reshape_as", "is_same_size", "result_type", "can_cast"}
_FULL_INSIDE = {"batch_norm", "instance_norm"}  # compute statistics in full precision for any input
_TAKES_LENGTHS = {"lstm", "gru", "rnn_tanh", "rnn_relu", "ctc_loss", "tensor_split"}  # need integers in main memory

# torch code that mixes deliberately: an optimizer's numbers, norms of parameters in several precisions, lengths.
_KNOWING = ("torch.optim.", "torch.amp.", "torch.nn.utils.clip_grad", "torch.nn.utils.rnn", "torch.nn.modules.module")
_BETWEEN = {__name__, "torch.overrides", torch.Tensor.backward.__module__, "torch.functional", "torch.nn.functional"}


@contextmanager
def strict() -> Iterator[None]:
    """Raise an error for every operation of this thread that mixes the devices or precisions of its tensors.

    Devices are compared for all tensors, including those without dimensions, which torch would silently move from main
    memory; logical CPU devices count as one. Precisions are compared for floating-point tensors (`PRECISIONS`). Python
    numbers mix with everything.

    Allowed: explicit moves and conversions (`to`, `copy_`, `copy_to`, ...); mixed precisions inside `torch.autocast`,
    whose purpose is to mix; normalisation layers, whose statistics stay in full precision; the lengths of sequences;
    what torch's optimizers and gradient clipping do internally.

    Raises:
        MixedPlacementError: at the operation, which is not carried out; it names the operation and two of its tensors.
    """
    with _Strict():
        yield


class _Strict(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        found: list[torch.Tensor] = []
        _gather_tensors(args, found)
        if kwargs:
            _gather_tensors(kwargs, found)
        # Most operations take tensors of one kind.
        if len(found) > 1 and any(each.dtype != found[0].dtype or each.device != found[0].device for each in found):
            _check_alike(func, found)
        return func(*args, **kwargs)


def _gather_tensors(value: Any, found: list[torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        found.append(value)
    elif isinstance(value, list | tuple):
        for each in value:
            _gather_tensors(each, found)
    elif isinstance(value, dict):
        for each in value.values():
            _gather_tensors(each, found)


def _check_alike(func: Callable[..., Any], tensors: list[torch.Tensor]) -> None:
    name = getattr(func, "__name__", str(func))
    if name in _EXPLICIT or _is_knowing_caller():
        return
    placed = [each for each in tensors if each.is_floating_point()] if name in _TAKES_LENGTHS else tensors
    for each in placed:
        if each.device != placed[0].device:
            _raise_mixed(
                func, placed[0], each, "devices", "moves", "bring both to one device with unisono.placement.copy_to"
            )
    floats = [each for each in tensors if each.dtype in PRECISIONS]
    for each in floats:
        if each.dtype != floats[0].dtype and not (name in _FULL_INSIDE or _is_autocast(each)):
            way_out = "convert one with unisono.precision.to_reduced_precision or to_full_precision"
            _raise_mixed(func, floats[0], each, "precisions", "converts", way_out)


def _is_autocast(tensor: torch.Tensor) -> bool:
    kind = tensor.device.type
    return bool(torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind))


def _is_knowing_caller() -> bool:
    """Whether the operation was called from torch code that mixes deliberately."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") in _BETWEEN:
        frame = frame.f_back
    return frame is not None and str(frame.f_globals.get("__name__")).startswith(_KNOWING)


def _raise_mixed(
    func: Callable[..., Any], one: torch.Tensor, other: torch.Tensor, what: str, verb: str, way_out: str
) -> None:
    name = resolve_name(func) or getattr(func, "__name__", str(func))
    raise MixedPlacementError(
        f"{name} mixes {what}: {_describe_tensor(one)}, and {_describe_tensor(other)}; inside "
        f"unisono.placement.strict() nothing {verb} by itself: {way_out}, or create the tensor of a number with "
        "unisono.placement.scalar_like"
    )


def _describe_tensor(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)} on {tensor.device}"
