"""Whether all ranks train the same model: checked before the first reduction, and brought about by a broadcast."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from unisono.errors import CollectiveMismatchError
from unisono.world import World, current_world


def check_agreement(parameters: Sequence[torch.Tensor], world: World) -> None:
    """Compare the parameters of all ranks, before the gradients of different models are mixed up.

    Raises:
        CollectiveMismatchError: shapes, types or values differ; the message names the first difference.
    """
    everyone = world.comm.all_gather_object([_describe(parameter) for parameter in parameters])
    for rank, theirs in enumerate(everyone):
        if theirs == everyone[0]:
            continue
        pairs = zip(everyone[0], theirs, strict=False)
        place = next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(everyone[0]), len(theirs)))
        here, there = (each[place] if place < len(each) else "missing" for each in (everyone[0], theirs))
        raise CollectiveMismatchError(
            f"the models of rank 0 and rank {rank} differ: the optimizer's parameter {place} is {here} on rank 0 and "
            f"{there} on rank {rank}; build the same model on every rank (torch.manual_seed) or call "
            "broadcast_parameters(model) before the first step"
        )


def broadcast_parameters(module: nn.Module, root: int = 0, world: World | None = None) -> None:
    """Give every rank the root's parameters and buffers, in place.

    Raises:
        CollectiveMismatchError: the modules differ in shape or type.
        BrokenWorldError: a peer failed or departed.
    """
    world = world or current_world()
    for tensor in module.state_dict().values():
        if isinstance(tensor, torch.Tensor):
            world.comm.broadcast(tensor, root)


def _describe(parameter: torch.Tensor) -> str:
    """Shape, type and a fingerprint of the values, as text, in which NaN equals NaN."""
    values = parameter.detach()
    values = torch.view_as_real(values) if values.is_complex() else values
    total, spread = values.double().sum().item(), values.double().abs().sum().item()
    return f"{str(parameter.dtype).removeprefix('torch.')}{list(parameter.shape)} of sum {total!r}, {spread!r}"
