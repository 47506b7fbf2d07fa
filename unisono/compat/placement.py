"""Where tensors are, and when they are computed: copies of whole structures, errors for mixed placement, barriers and
programs of devices that record work before they execute it.

*Threads:* torch keeps modes per thread, so `strict` applies to the thread that entered it: a replica's loop enters its
own. The backward pass mixes nothing that the forward pass did not, and is not checked.
"""

from __future__ import annotations

import copy
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode, resolve_name

from unisono import current_world
from unisono.building_blocks import Device as Device
from unisono.building_blocks import check_type, leaves, resolve_device, tensors
from unisono.errors import MixedPlacementError

DeviceLike = str | int | torch.device | Device

T = TypeVar("T")
P = ParamSpec("P")

# Copies. All tensors of the structure are found and copied first, each once; `copy.deepcopy` then rebuilds everything
# around them. So one object is one object in the copy: tied parameters, and those of an optimizer and its module.

_WHOLE = (torch.Tensor, torch.optim.Optimizer, type, ModuleType, FunctionType)  # whose attributes are not visited


def copy_to(obj: T, device: DeviceLike) -> T:
    """Copy `obj` with all its tensors on `device`, sharing nothing with the original, even on the same device.

    `requires_grad`, gradients, attributes of parameters and the modules' hooks are copied; hooks of tensors and of
    optimizers, which refer to the originals, are not. A tensor that was computed from others stays connected to them:
    its gradient flows back to the original's device. Views of one memory are copied separately.

    Args:
        obj: a tensor, a module, or a structure of these and of optimizers; its other parts are copied by `deepcopy`.
            Copy an optimizer together with what it optimizes: `model, optimizer = copy_to((model, optimizer), device)`.
            Its step counts and other numbers stay in main memory, where torch keeps them, unless it is `capturable` or
            `fused`; its other state moves.
        device: a string, an index, a `torch.device` or a `Device`; also "meta", for shapes without data.

    Raises:
        TypeError: `device` is not a device, or a part of `obj` cannot be copied.
        ValueError: there is no such device here, an optimizer is copied without its parameters, or a lazy module has
            no parameters yet.
    """
    target = torch.device("meta") if str(device) == "meta" else resolve_device(device)[1]  # type: ignore[arg-type]
    found: dict[int, Any] = {}
    _find(obj, found)
    optimizers = [each for each in found.values() if isinstance(each, torch.optim.Optimizer)]
    for optimizer in optimizers:
        _find_state(optimizer, found)
    copied = [each for each in found.values() if isinstance(each, torch.Tensor)]
    memo: dict[int, Any] = {id(each): _copy_tensor(each, target) for each in copied}
    memo.update((id(each), object.__new__(type(each))) for each in optimizers)
    twin = copy.deepcopy(obj, memo)
    for tensor in copied:
        memo[id(tensor)].__dict__.update(copy.deepcopy(tensor.__dict__, memo))
    for optimizer in optimizers:
        # All attributes, since the state that torch pickles lacks some of LBFGS; "step" is there if a scheduler has
        # replaced it by one that steps the original. Hooks, which are missing then, are created empty.
        own = {key: each for key, each in vars(optimizer).items() if key != "step" and not key.endswith("_hooks")}
        memo[id(optimizer)].__setstate__(copy.deepcopy(own, memo))
    return twin


def _find(obj: Any, found: dict[int, Any]) -> None:
    """Enter all parts of an object by id, with the attributes of every part. The references keep the ids in use."""
    for leaf in leaves(obj):
        if id(leaf) in found:
            continue
        found[id(leaf)] = leaf
        if isinstance(leaf, PackedSequence):
            # Not the batch sizes, which torch reads in main memory.
            _find([leaf.data, leaf.sorted_indices, leaf.unsorted_indices], found)
        elif hasattr(leaf, "__dict__") and not isinstance(leaf, _WHOLE):
            _find(list(vars(leaf).values()), found)


def _find_state(optimizer: torch.optim.Optimizer, found: dict[int, Any]) -> None:
    """Enter what moves with an optimizer's parameters: numbers only if torch expects them there. ValueError if the
    parameters are not entered."""
    for group in optimizer.param_groups:
        if any(id(each) not in found for each in group["params"]):
            raise ValueError(
                f"the {type(optimizer).__name__} steps parameters that are not in the structure; copy it with its "
                "module: model, optimizer = copy_to((model, optimizer), device)"
            )
        numbers_move = group.get("capturable") or group.get("fused")
        states = [optimizer.state.get(parameter, {}) for parameter in group["params"]]
        _find([value for state in states for key, value in state.items() if numbers_move or key != "step"], found)
        _find(group if numbers_move else [], found)


def _copy_tensor(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy of the same type, parameter or plain tensor, with its gradient."""
    if not tensor.is_leaf:
        return tensor.to(device, copy=True)
    twin = tensor.detach().to(device, copy=True)
    if issubclass(type(tensor), nn.Parameter):
        twin = twin.as_subclass(type(tensor))
    elif isinstance(tensor, nn.Parameter):  # of another class of tensors
        twin = nn.Parameter(twin)
    twin.requires_grad_(tensor.requires_grad)
    if tensor.grad is not None:
        twin.grad = tensor.grad.detach().to(device, copy=True)
    return twin


def scalar_like(value: float, tensor: torch.Tensor) -> torch.Tensor:
    """A zero-dimensional tensor that holds `value`, with the device and dtype of `tensor`; TypeError if that is not a
    tensor."""
    check_type(tensor, "tensor", "pass a tensor", torch.Tensor)
    return torch.full((), value, dtype=tensor.dtype, device=tensor.device)


# Devices that record a step before they execute it.


def lazy_barrier(device: DeviceLike | Sequence[DeviceLike] | None = None, wait: bool = False) -> None:
    """End the step on a device, or on each of a list, so that a lazy device executes what it has recorded; None is this
    rank's device. With `wait`, return only when all work submitted to the devices has finished, on eager devices too.

    A loader's `next()` and an optimizer's step end the step implicitly; a loop with neither keeps recording, so it must
    call this once per iteration. TypeError if `device` is not a device; ValueError if there is none such here.
    """
    if device is None:
        world = current_world()
        resolved = [(world.backend, world.device)]
    else:
        several = device if isinstance(device, Sequence) and not isinstance(device, str) else [device]
        resolved = [resolve_device(each) for each in several]  # type: ignore[arg-type] # a `Device` serves
    for backend, each in resolved:
        backend.mark_step(each)
    for backend, each in resolved if wait else []:
        backend.synchronize(each)


def compiled(fn: Callable[P, T]) -> Callable[P, T]:
    """Make the function one program of a lazy device, compiled once per combination of input shapes and dtypes, for all
    ranks that are threads of this process, and run on every call. On eager devices the function is simply called.

    What was recorded before the call is not part of it, and results are computed when it returns. Reading a value
    inside (`item()`) ends the program at that point and begins another one.
    """

    return _program()(fn)


@contextmanager
def _program() -> Iterator[None]:
    lazy_barrier()
    yield
    lazy_barrier()


# No implicit moves and no implicit conversions.

PRECISIONS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""The dtypes that count as precisions: integers, booleans and complex numbers mix with each of them."""

# Operations whose purpose is to move or to convert, or that read only a shape or a dtype.
_EXPLICIT = {"to", "copy_", "type_as", "new_tensor", "__set__", "grad", "backward"}
_EXPLICIT |= {"expand_as", "view_as", "reshape_as", "is_same_size", "result_type", "can_cast"}

# Code that mixes deliberately: an optimizer's numbers, norms of parameters in several precisions, lengths in main
# memory, statistics in full precision; and code between it and the operation.
_LAYERS = [f"torch.nn.modules.{name}" for name in ("module", "rnn", "batchnorm", "instancenorm")]
_KNOWING = ("torch.optim.", "torch.amp.", "torch.nn.utils.", "torch_xla.", "unisono.training.batch_norm", *_LAYERS)
_BETWEEN = {__name__, "torch.overrides", torch.Tensor.backward.__module__, "torch.functional", "torch.nn.functional"}


_FULL_INSIDE = {"batch_norm", "instance_norm"}  # compute statistics in full precision for any input
_TAKES_LENGTHS = {"lstm", "gru", "rnn_tanh", "rnn_relu", "ctc_loss", "tensor_split"}  # need integers in main memory


@contextmanager
def strict() -> Iterator[None]:
    """Raise an error for every operation of this thread that mixes the devices of its tensors, or the precisions of its
    floating-point tensors (`PRECISIONS`). Logical CPU devices count as one; Python numbers mix with everything.

    Allowed: explicit moves and conversions (`to`, `copy_`, `copy_to`, ...); mixed precisions inside `torch.autocast`;
    what torch's recurrent and normalisation layers, its optimizers and gradient clipping do internally.

    Raises:
        MixedPlacementError: at the operation, which is not carried out; it names the operation and two of its tensors.
    """
    with _Strict():
        yield


class _Strict(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = tensors((*args, *kwargs.values()) if kwargs else args)
        if len({(each.dtype, each.device) for each in found}) > 1:  # most operations take tensors of one kind
            _check_alike(func, found)
        return func(*args, **(kwargs or {}))


def _check_alike(func: Callable[..., Any], found: list[torch.Tensor]) -> None:
    name, kind = getattr(func, "__name__", ""), found[0].device.type
    callers = (str(frame.f_globals.get("__name__")) for frame, _ in traceback.walk_stack(sys._getframe()))
    caller = next(each for each in callers if each not in _BETWEEN)
    if name.removeprefix("_foreach_") in _EXPLICIT or caller.startswith(_KNOWING):
        return
    floats = [each for each in found if each.dtype in PRECISIONS]
    placed = floats if name in _TAKES_LENGTHS else found
    mixes = [("devices", placed[0], each) for each in placed if each.device != placed[0].device]
    if name not in _FULL_INSIDE and not (torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)):
        mixes += [("precisions", floats[0], each) for each in floats if each.dtype != floats[0].dtype]
    for what, *both in mixes:
        one, other = (f"{each.dtype} of shape {tuple(each.shape)} on {each.device}" for each in both)
        raise MixedPlacementError(
            f"{resolve_name(func) or name} mixes {what}: {one}, and {other}; inside unisono.compat.placement.strict() "
            "nothing moves or converts by itself: bring both to one device with copy_to, to one precision with "
            "unisono.compat.precision, or create the tensor of a number with scalar_like"
        )
