"""Whether all ranks train the same model: checked before the first reduction, optionally checked again during training,
and established by a broadcast.

Models are compared by a fingerprint of their bits, computed in one pass over them: on their device, or in main memory
if the device is lazy. If all ranks agree, a reduction of two numbers is all that is sent. Otherwise the fingerprints of
the parameters are exchanged too, to name the first that differs and the ranks that hold it.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from weakref import WeakKeyDictionary

import torch
from torch import nn

from unisono.arguments import check_integer
from unisono.comm.operations import HOST, name_ranks
from unisono.errors import CollectiveMismatchError, ReplicasDifferError
from unisono.report.timeline import REDUCE
from unisono.torch_private import BatchNorm, foreach_copy_
from unisono.training.collectives import with_shape
from unisono.training.gradients import buckets, parts_of
from unisono.training.parameter_names import in_brackets
from unisono.world import World, current_world

logger = logging.getLogger(__name__)

_MANY_WORDS = 4096  # of 8 bytes; with more than these, rows are summed first, which is cheaper than mixing every word
_ROW = 127  # odd, so that changes of the highest bit in all of its words do not cancel out


_Held = tuple[str, str, int | None]
"""A tensor's name, form, and fingerprint, None if only forms are compared."""


class _Calls(WeakKeyDictionary[nn.Module, int]):
    """The number of calls of `check_replicas` by a rank, for each module."""


def check_agreement(parameters: Sequence[torch.Tensor], world: World) -> None:
    """Compare the parameters of all ranks, before gradients of different models are mixed; CollectiveMismatchError
    names the first whose shape, type or values differ."""
    world.comm.announce("a comparison of the ranks' models")
    named = {
        f"the optimizer's parameter {place}{in_brackets(parameter)}": parameter
        for place, parameter in enumerate(parameters)
    }
    found = _first_difference(named, world)
    if found is not None:
        name, holders, _ = found
        raise CollectiveMismatchError(
            f"the ranks' models differ: {name} is {holders}; build the same model on every rank (torch.manual_seed) or "
            "call broadcast_parameters(model) before the first step"
        )


def check_same_structure(module: nn.Module, world: World) -> None:
    """Compare the ranks' modules before they are wrapped: CollectiveMismatchError names the first parameter or buffer
    whose name, shape or type differs, or that not every rank trains. A collective."""
    if world.world_size == 1:
        return
    world.comm.announce("a comparison of the ranks' models")
    own: list[_Held] = [
        (f"the parameter {name!r}", with_shape(each) + ("" if each.requires_grad else ", frozen"), None)
        for name, each in module.named_parameters()
    ]
    own += [(f"the buffer {name!r}", with_shape(each), None) for name, each in module.named_buffers()]
    if len({*world.comm.all_gather_object(zlib.crc32(repr(own).encode()))}) > 1:
        name, holders, _ = _first_unequal(own, world)
        raise CollectiveMismatchError(
            f"the ranks' models differ: {name} of the {type(module).__name__} is {holders}; build the same model on "
            "every rank, from numbers that are the same on all: size = unisono.all_gather_object(size)[0]"
        )


def check_same_step(optimizer: str, parameters: Sequence[torch.Tensor], world: World) -> None:
    """Compare the parameters of an optimizer that nothing in this package reduces: RuntimeError if the ranks differ."""
    world.comm.announce(f"a step of an {optimizer} with parameters that were not prepared")
    named: dict[str, torch.Tensor] = {}
    for place, each in enumerate(parameters):
        named[f"its parameter {place}"] = each
        if each.grad is not None:
            named[f"the gradient of its parameter {place}"] = each.grad
    found = _first_difference(named, world)
    if found is not None:
        raise RuntimeError(
            f"the {optimizer} steps parameters that were not prepared, and {found[0]} is {found[1]}: nothing has "
            "reduced their gradients, and each rank would train a model of its own; prepare the model, the criterion, "
            "or the parameter itself, with the optimizer: log_alpha, optimizer = accelerator.prepare(log_alpha, "
            "optimizer); or call unisono.optimizer_step(optimizer) in place of optimizer.step()"
        )


def check_replicas(module: nn.Module, every: int = 1, world: World | None = None) -> None:
    """Compare the parameters of all ranks, bit by bit, at every n-th call; call it after each step, on every rank.

    It costs one pass over the parameters and a reduction of two numbers. It detects any change of bits, except values
    of a large parameter that are swapped within a kilobyte.

    Args:
        module: the same on each rank.
        every: compare at each `every`-th call for this module, and only count the others.
        world: None means the current one.

    Raises:
        TypeError, ValueError: `every` is not a positive integer.
        ReplicasDifferError: they differ. The message names the first such parameter, and who holds which value.
        BrokenWorldError, CollectiveMismatchError: as for `all_reduce`.
    """
    check_integer(every, "every", 1, "pass 1 to compare at each call, or a larger integer")
    world = world or current_world()
    counts = world.state.part(_Calls)
    counts[module] = number = counts.get(module, 0) + 1  # counted by each rank alone: all make the same calls
    if number % every == 0:
        named = {f"the parameter {name!r}": each for name, each in module.named_parameters()}
        with world.timeline.loop().span(REDUCE):
            found = _first_difference(named, world)
        if found is not None:
            name, holders, others = found
            raise ReplicasDifferError(
                f"the replicas differ at call {number} of check_replicas: {name} is {holders}. Every rank must begin "
                "with the same parameters (broadcast_parameters) and update them by the same gradients "
                "(optimizer_step), without random operations that differ by rank",
                name,
                others,
            )


def broadcast_parameters(module: nn.Module, root: int = 0, world: World | None = None) -> None:
    """Copy the root's parameters and buffers to every rank, in place; those on the device "meta" are skipped.

    Args:
        module: of the same shape and types on all ranks.
        root: the rank whose values are sent.

    Raises:
        CollectiveMismatchError: the modules differ in shape or type.
        BrokenWorldError: a peer failed or departed.
    """
    world = world or current_world()
    for tensor in module.state_dict().values():
        if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
            world.comm.broadcast(tensor, root)


@torch.no_grad()
def broadcast_together(tensors: Sequence[torch.Tensor], world: World) -> None:
    """Copy rank zero's tensors to every rank, in place, in flat buckets."""
    for group in buckets(tensors):
        flat = torch.cat([each.reshape(-1) for each in group])
        world.comm.broadcast(flat)
        parts = flat.split([each.numel() for each in group])
        foreach_copy_(group, [part.view_as(each) for each, part in zip(group, parts, strict=True)])


def warn_of_unequal_buffers(module: nn.Module, world: World) -> None:
    """Warn on rank zero if its buffers are about to replace different ones on other ranks. Those of BatchNorm always
    differ, unless it is synchronised (docs/limits.md). A collective."""
    named: dict[str, torch.Tensor] = {
        f"the buffer {f'{path}.{name}' if path else name!r}": buffer
        for path, part in module.named_modules()
        if not isinstance(part, BatchNorm)
        for name, buffer in part.named_buffers(recurse=False)
    }
    found = _first_difference(named, world) if named else None
    if found is not None and world.rank == 0:
        logger.warning(
            f"{found[0]} of the {type(module).__name__} is {found[1]} after a step: forward() updates it from each "
            "rank's own data, and rank zero's replaces the others'; reduce what updates it (unisono.all_reduce), or "
            "keep each rank's by the strategy's broadcast_buffers=False, such as "
            "strategy=unisono.strategies.DDP(broadcast_buffers=False)"
        )


def find_unequal_parameters(module: nn.Module, step: int, world: World) -> bool:
    """Whether the ranks' trained parameters differ after that step, of which rank zero warns. A collective.

    Raises:
        CollectiveMismatchError: the step's gradients differed, too.
    """
    named = {f"the parameter {name!r}": each for name, each in module.named_parameters() if each.requires_grad}
    found = _first_difference(named, world) if named else None
    if found is None:
        return False
    name, model, parameter = found[0], type(module).__name__, named.get(found[0])  # None: it is frozen on this rank
    held = None if parameter is None else [each for each in [parameter.grad] if each is not None]
    bits = None if held is None else int(fingerprint(readable(held, world)))
    gradients = set(world.comm.all_gather_object(bits))
    if len(gradients) > 1 and None not in gradients:
        raise CollectiveMismatchError(
            f"the ranks train different models: {name} of the {model} is {found[1]} after step {step}, and its "
            "gradients differ. What changes .grad before a step must do so on every rank, by the same numbers; and the "
            "engine of a strategy leaves the sum over the ranks in it, the same bits on all of them (see add_up in "
            "unisono.strategies.Engine)"
        )
    if world.rank == 0:
        logger.warning(
            f"the ranks train different models: {name} of the {model} is {found[1]} after step {step}; what changes "
            "parameters beside an optimizer must do so on every rank, by the same numbers, or on one rank before "
            "unisono.broadcast_parameters(model), which all ranks call; unisono.check_replicas(model) after each step "
            "names the first step"
        )
    return True


def first_difference(models: Sequence[nn.Module]) -> str | None:
    """The name of the first parameter in which the replicas of one process differ; None if they are equal.

    Not a collective. Buffers are not compared: those of BatchNorm differ between replicas.
    """
    held = [dict(model.named_parameters()) for model in models]
    if len({int(fingerprint(list(each.values()))) for each in held}) == 1:
        return None
    names = dict.fromkeys(name for each in held for name in each)
    apart = (
        name for name in names if len({int(fingerprint([each[name]] if name in each else [])) for each in held}) > 1
    )
    return next(apart)


@torch.no_grad()
def fingerprint(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """A number of at most 62 bits, on the first tensor's device, determined by the tensors' bits in order, NaNs too.

    Every eight bytes of a small tensor count with their position; those of a large one in sums of about a kilobyte.
    """
    device = tensors[0].device if tensors else HOST
    words = [part.to(device) for tensor in tensors for held in parts_of(tensor) for part in _condense(held)]
    # The additional word is for an empty list, which `cat` refuses.
    mixed = torch.cat([*words, torch.zeros(1, dtype=torch.int64, device=device)])
    # The golden ratio times 2**64, as a signed number: splitmix64's step from one position to the next. int64 wraps.
    mixed += torch.arange(1, len(mixed) + 1, device=device) * -0x61C8864680B583EB
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15), (31, 1)):  # the finaliser of splitmix64
        mixed ^= mixed >> shift
        mixed *= factor
    return mixed.sum() >> 2


def _condense(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The bits of a tensor as vectors of int64: the words themselves, or sums of rows of them if there are many."""
    octets = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    cut = len(octets) // 8 * 8
    # `view` to a wider type needs an aligned offset, which a parameter that is a view of a flat buffer may lack.
    whole = octets[:cut].clone() if octets.storage_offset() % 8 else octets[:cut]
    words, rest = whole.view(torch.int64), octets[cut:].to(torch.int64)
    if len(words) <= _MANY_WORDS:
        return [words, rest]
    cut = len(words) // _ROW * _ROW
    return [words[:cut].view(-1, _ROW).sum(1), words[cut:], rest]


def _first_difference(named: Mapping[str, torch.Tensor], world: World) -> tuple[str, str, list[int]] | None:
    """The name of the first tensor in which the ranks differ, who holds what, and which ranks differ from rank zero. A
    collective."""
    if world.comm.size == 1 or _all_agree(named, world):
        return None
    tensors = readable(list(named.values()), world)
    own = [(name, with_shape(each), int(fingerprint([each]))) for name, each in zip(named, tensors, strict=True)]
    return _first_unequal(own, world)


def _first_unequal(own: Sequence[_Held], world: World) -> tuple[str, str, list[int]]:
    """As `_first_difference`, of what is held on ranks that differ."""
    everyone = world.comm.all_gather_object(own)
    # By position, not by name: from the first difference on, models of different structure have different names.
    rows = zip_longest(*everyone)
    row = next(row for row in rows if any(each != row[0] for each in row))
    groups: dict[_Held | None, list[int]] = {}
    for rank, held in enumerate(row):
        groups.setdefault(held, []).append(rank)
    name = next(held[0] for held in groups if held is not None)
    holders = " and ".join(f"{_describe_value(held, name)} on {name_ranks(ranks)}" for held, ranks in groups.items())
    return name, holders, [rank for rank, held in enumerate(row) if held != row[0]]


def _all_agree(named: Mapping[str, torch.Tensor], world: World) -> bool:
    # Names, types and shapes, too: equal bits of another shape are a difference.
    forms = zlib.crc32(repr([(name, with_shape(tensor)) for name, tensor in named.items()]).encode())
    own = fingerprint(readable(list(named.values()), world)) ^ forms
    # The least and the greatest in one reduction: all are equal if these two are. Negating 62 bits cannot overflow.
    least, negated_greatest = world.comm.all_reduce(torch.stack([own, -own]), "min").tolist()
    return bool(least == -negated_greatest)


def readable(tensors: Sequence[torch.Tensor], world: World) -> Sequence[torch.Tensor]:
    """The tensors, in main memory if the device would compile a graph for each shape."""
    return [each.detach().cpu() for each in tensors] if world.backend.is_lazy else tensors


def _describe_value(held: _Held | None, name: str) -> str:
    if held is None:
        return "missing"
    own_name, form, bits = held
    if own_name != name:
        return f"{own_name}, {form}"
    return form if bits is None else f"{form} with bits {bits % 2**64:016x}"
