"""Descriptions of collective calls, and the rules that apply in every mode before ranks meet."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, get_args

import torch

from unisono.errors import BrokenWorldError, CollectiveMismatchError
from unisono.protocols import ReduceOp

REDUCE_OPS: tuple[ReduceOp, ...] = get_args(ReduceOp)
REDUCIBLE = (
    *(torch.float16, torch.float32, torch.float64, torch.bfloat16),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool),
    *(torch.complex64, torch.complex128),
)
"""The dtypes that every mode can reduce; any dtype can be moved."""

HOST = torch.default_generator.device
"""Main memory. Flags and counts are sent from there: sending them from a device, and reading them, would wait for all
of its work."""

CALLED = "called "
_HIDDEN = re.compile(r", round [0-9a-f]{8}| at lr \S+$")
"""What is shown only if nothing else differs."""
_LENGTH, _ROUND = re.compile(r" of \d+ samples"), re.compile(r", round [0-9a-f]{8}")
_OF_STEPS = re.compile(
    r"the gradients of|the end of step|(?:a|the) (?:for|back)ward pass|came to (?:step|attempt)|a loop over|new buckets"
)
_RULE = (
    "call the same collectives in the same order with the same shapes and types (all_gather_samples takes different "
    "numbers of rows); make a call that all ranks must make outside of `if is_rank_zero():`"
)
_RULE_OF_STEPS = (
    "take the same steps on the same rounds: skip a batch, or leave a loop, on all ranks or on none, loop over each "
    "loader equally often, in the same order, and step schedulers alike"
)
_ADVICE_ON_PASSES = (
    "; strategy='fsdp' gathers parameters in each pass: repeat a batch, as after an error, on all ranks or on none"
)
_RULE_OF_WEIGHTS = "pass backward(..., weight=) for each microbatch of a step, or for none"
_RULE_OF_LOOPS = "begin the same loops between the same collectives"
_ADVICE_ON_LOOPS = (
    "; a prepared loader gives each rank its part of the data only: under `if is_rank_zero():`, loop over a DataLoader "
    "that is not prepared"
)
_ADVICE_ON_CALLS = ", and call nothing that all ranks take part in, such as save_state"
_ADVICE_ON_ENDS = "; leave a loop on all ranks together, by a value that all have, such as accelerator.reduce(loss)"
WAY_OUT = (
    "if each rank reads a shard of its own (split_dataset_by_node, dataset.shard, Subset), pass the whole data, or, "
    "for a stream or shards of one length, DeviceLoader(loader, already_sharded=True); if only random augmentation "
    "differs, DeviceLoader(loader, already_sharded=False); otherwise seed each shuffle and random_split alike"
)
_RULE_OF_DATA = f"read the same batches, since the loader gives each rank a part of them; {WAY_OUT}"
LOOP, END = "a loop over", "the end of its function"
"""The beginning of what a rank announces."""
WEIGHTS = "the weights of the batches of a step"
"""What a rank whose batches have weights of their own announces before it reduces."""
_AT_WEIGHTS = re.compile(f"{WEIGHTS}|the gradients of|a comparison of the ranks' models")
LOADED = "load_state_dict()"
"""Part of what a rank announces if it steps from a state that it has loaded since its last step."""
ADVICE_ON_STATES = (
    "; load one state on all ranks: accelerator.load_state_dict(model, state) takes rank zero's, and "
    "accelerator.reduce(loss) gives all ranks one loss to choose the best weights by"
)
_IN_PLACE = ("all_reduce", "broadcast")


@dataclass(frozen=True)
class Call:
    """One rank's call of a collective, or with the name "" an announcement of what it does next, together with its
    peers; if it differs between ranks, they are out of step."""

    name: str
    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None
    argument: str | int | None = None
    purpose: str = ""  # what it was announced for
    place: str = ""  # the type of the tensor's device, if that is not the rank's own

    @classmethod
    def on(cls, name: str, tensor: torch.Tensor, argument: str | int | None = None, place: str = "") -> Call:
        return cls(name, tuple(tensor.shape), tensor.dtype, argument, place=place)

    def __str__(self) -> str:
        if not self.name:
            return self.purpose
        parts = []
        if self.dtype is not None and self.shape is not None:
            parts.append(f"{_name(self.dtype)}{list(self.shape)}{f' on {self.place}' if self.place else ''}")
        if self.argument is not None:
            parts.append(repr(self.argument))
        text = f"{self.name}({', '.join(parts)})"
        link = "in or after" if is_of_loop(self.purpose) else "for"
        return f"{text} {link} {self.purpose}" if self.purpose else text


def action_of(call: Call) -> str:
    """What the rank did, as the end of a sentence that begins with its name. Equal only for equal calls."""
    return f"{CALLED}{call}" if call.name else f"came to {call}"


def digest_of(action: str) -> int:
    """A number below 2**56, the same in every process for equal texts, and different for others."""
    # 7 bytes, so that a digest and its negative fit into an int64 tensor.
    return int.from_bytes(blake2b(action.encode(), digest_size=7).digest())


def fitted(action: str, room: int) -> bytes:
    """The text in at most `room` bytes; if it is truncated, a digest keeps different texts distinct."""
    text = action.encode()
    if len(text) <= room:
        return text
    digest = f"... ({digest_of(action):x})".encode()
    return text[: room - len(digest)] + digest


def check_tensor(tensor: Any, name: str) -> None:
    """Check that a tensor is dense (TypeError) and, for collectives that work in place, writable: elements of an
    expanded tensor share memory (ValueError)."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} takes a tensor, got a {type(tensor).__name__}; all_gather_object takes any object")
    if tensor.layout is not torch.strided:
        raise TypeError(f"{name} takes a dense tensor, got layout {tensor.layout}; call to_dense() first")
    steps = zip(tensor.stride(), tensor.shape, strict=True)
    if name in _IN_PLACE and tensor.numel() and any(stride == 0 and size > 1 for stride, size in steps):
        raise ValueError(
            f"{name} got a tensor of shape {list(tensor.shape)} whose elements share memory, so it cannot be written "
            "in place; pass tensor.clone()"
        )


def check_reduction(tensor: torch.Tensor, op: str, name: str = "all_reduce") -> None:
    """Refuse a reduction that is inexact, or that some mode does not support, alike on every rank. TypeError where it
    is not defined for the dtype; ValueError where none has that name."""
    check_tensor(tensor, name)
    if op not in REDUCE_OPS:
        raise ValueError(f"{name} op={op!r} does not exist; choose one of {', '.join(REDUCE_OPS)}")
    if tensor.dtype not in REDUCIBLE:
        known = ", ".join(map(_name, REDUCIBLE))
        raise TypeError(f"{name} does not support {_name(tensor.dtype)}; it reduces {known}; convert first")
    if tensor.dtype == torch.bool and op not in ("min", "max"):
        raise TypeError(f"{name} of bool tensors is 'min' (and) or 'max' (or), not {op!r}; convert to int64 to count")
    if tensor.is_complex() and op not in ("sum", "mean"):
        raise TypeError(f"{name} of complex tensors is 'sum' or 'mean', not {op!r}")
    if op == "mean" and not (tensor.is_floating_point() or tensor.is_complex()):
        raise TypeError(f"{name} op='mean' of {tensor.dtype} would round; convert to a floating type, or use 'sum'")


def check_root(root: int, size: int) -> None:
    """Check that `root` is a rank of the world; ValueError if `root` is not in 0 .. size - 1."""
    if not 0 <= root < size:
        raise ValueError(f"root={root} is not a rank in a world of {size}; ranks are 0 to {size - 1}")


def check_scatter(tensor: torch.Tensor, size: int, name: str = "reduce_scatter") -> None:
    """Check that a tensor can be split into `size` equal parts along dim 0; ValueError if its first dimension is
    missing or not a multiple of `size`."""
    if tensor.ndim == 0 or tensor.shape[0] % size:
        raise ValueError(
            f"{name} over {size} ranks splits dim 0 into equal parts, but the shape is {list(tensor.shape)}; "
            f"pad dim 0 to a multiple of {size}"
        )


def broken(rank: int, call: Call | str, message: str, place: str = "") -> BrokenWorldError:
    """The error of a rank whose call the world can no longer complete; `place`, the user's call as `describe_call`
    returns it, is named if it differs."""
    by = f", called by {place}" if place and not str(call).startswith(place.partition("(")[0]) else ""
    return BrokenWorldError(f"rank {rank} cannot complete {call}{by}: {message}")


def left(rank: int, call: Call) -> BrokenWorldError:
    """The error of a rank that makes a call after it has left."""
    return BrokenWorldError(f"rank {rank} has left this world and cannot call {call}")


def departure(ranks: Sequence[int]) -> str:
    """Describe that ranks have left."""
    has = f"rank {ranks[0]} has" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} have"
    return (
        f"{has} left this world: let all ranks leave a loop together, and call on every rank what concerns all of them "
        "(prepared models and loaders, steps, saves, reductions), not under `if is_main_process:`"
    )


def mismatch_error(actions: Mapping[int, str], places: Mapping[int, str] | None = None) -> CollectiveMismatchError:
    """The error of ranks that met in different actions (`action_of`), which it names, with the users' calls
    (`describe_call`) that are known."""
    groups: dict[str, list[int]] = {}
    short = {rank: _HIDDEN.sub("", action) for rank, action in actions.items()}
    has_loaded = any(LOADED in action for action in actions.values())  # perhaps other learning rates
    for rank, action in sorted((short if len(set(short.values())) > 1 and not has_loaded else actions).items()):
        groups.setdefault(action, []).append(rank)
    first, *others = (
        f"{name_ranks(ranks)} {_action_at_place(action, places.get(ranks[0], '') if places else '')}"
        for action, ranks in groups.items()
    )
    met = f"{first} while {' and '.join(others)}"
    rule = _RULE_OF_LOOPS if any(map(is_of_loop, groups)) else _RULE
    rule = _RULE_OF_STEPS if all(map(_OF_STEPS.search, groups)) else rule
    if rule is _RULE_OF_STEPS and any("a forward pass of the" in each for each in groups):  # which gathers
        rule += _ADVICE_ON_PASSES
    if any(WEIGHTS in each for each in groups) and all(map(_AT_WEIGHTS.search, groups)):
        rule = _RULE_OF_WEIGHTS
    known = {*filter(None, (places or {}).values())}
    alike = len({_LENGTH.sub("", each) for each in short.values()}) == 1 and len(known) <= 1
    if alike and any(map(is_of_loop, groups)):  # the same loop, over other batches
        rule = _RULE_OF_DATA
        loops = {_ROUND.sub("", each) for each in short.values()}
        if len(loops) == 1:
            where = _action_at_place(loops.pop().removeprefix("came to "), next(iter(known), ""))
            met = f"{' and '.join(map(name_ranks, groups.values()))} read different batches in {where}"
    elif any(map(is_of_loop, groups)):
        rule += _ADVICE_ON_LOOPS
        ends = [each for each in groups if each.endswith(END)]
        rule += "" if all(map(is_of_loop, {*groups} - {*ends})) else _ADVICE_ON_CALLS
        rule += _ADVICE_ON_ENDS if ends else ""
    elif alike and len({*map(str, map(_ROUND.findall, groups))}) > 1:
        rule += f"; and it must {_RULE_OF_DATA}"
    rule += ADVICE_ON_STATES if has_loaded else ""
    odd = min(groups.values(), key=len)  # if equally many, those with the lowest rank
    return CollectiveMismatchError(f"{met}; every rank must {rule}", odd)


def is_of_loop(action: str) -> bool:
    return LOOP in action


def _action_at_place(action: str, place: str) -> str:
    """The action, and the user's call that led to it."""
    called, _, where = place.partition("() in ")
    if action.endswith(END):  # in the launcher
        return action
    if called == "__next__":
        return f"{action} in {where}"
    if not place or not action.startswith(CALLED):
        return f"{action} by {place}" if place else action
    if action.startswith(f"{CALLED}{called}("):
        return f"{action} in {where}"
    return f"{CALLED}{place}, which calls {action.removeprefix(CALLED)}"


def name_ranks(ranks: Sequence[int]) -> str:
    """Name ranks: ``name_ranks([1]) == "rank 1"``, ``name_ranks([1, 2]) == "ranks [1, 2]"``."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {list(ranks)}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
