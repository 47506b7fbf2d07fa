"""Witnesses: every `witness_every` steps, each rank computes a batch of the next rank as well, and the gradients of
both are compared.

What two ranks compute of one virtual rank has the same bits, so a difference is silent data corruption: a device that
computes wrong, and reports no error (Dixit et al., "Silent Data Corruptions at Scale", 2021).

*Threads:* the rank's.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from itertools import compress
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim import Optimizer

from unisono.batches.virtual_ranks import WITNESS, Draw
from unisono.errors import CorruptedComputeError
from unisono.training.digests import digest_of
from unisono.training.strategies.virtual_sums import Tensors
from unisono.world import World


class Witnesses:
    """The gradients of one module that two ranks have computed, by their digests."""

    def __init__(self, module: nn.Module, world: World) -> None:
        self._module, self._world = module, world
        self.forget()

    def forget(self) -> None:
        """No step has begun."""
        # Of each optimizer: the digests of this rank's own batch, and of the one whose witness it is.
        self._names: WeakKeyDictionary[Optimizer, list[str]] = WeakKeyDictionary()
        self._noted: WeakKeyDictionary[Optimizer, dict[bool, tuple[Draw, torch.Tensor]]] = WeakKeyDictionary()

    def note(self, optimizer: Optimizer, draw: Draw, parameters: Sequence[torch.Tensor], gradients: Tensors) -> None:
        """An optimizer was asked to step on a batch that two ranks compute, with gradients of these parameters."""
        zero = torch.zeros((), dtype=torch.int64, device=self._world.device)
        found = [digest_of(gradients[each]) if each in gradients else zero for each in parameters]
        self._names[optimizer] = self._names_of(parameters)
        self._noted.setdefault(optimizer, {})[draw.turn == WITNESS] = draw, torch.stack(found)

    def compare(self, optimizer: Optimizer, step: int) -> None:
        """Compare what the ranks have noted before that step of an optimizer: CorruptedComputeError, on all ranks, if
        two of them have computed different gradients of one virtual rank. A collective."""
        noted, world = self._noted.pop(optimizer), self._world
        draw, own = noted[False]
        carried, seen = torch.stack(world.comm.all_gather(torch.stack([own, noted[True][1]]))).unbind(1)
        pairs = draw.carried.pairs(draw.witnesses or 0)  # by the rank that carries it
        differ = (carried != seen[[witness for _, witness in pairs]]).tolist()
        if not any(map(any, differ)):
            return
        devices = world.comm.all_gather_object(
            f"{world.device} of {platform.node()}, {world.backend.device_name(world.device)}"
        )
        found = sorted(
            _Difference(rank, carrier, witness, [*compress(self._names[optimizer], differ[carrier])])
            for carrier, (rank, witness) in enumerate(pairs)
            if any(differ[carrier])
        )
        where = f"step {step} (epoch {draw.epoch}, samples from {draw.sample} on)"
        raise CorruptedComputeError(_describe(where, found, devices), step, *found[0][:3], found[0].names[0])

    def _names_of(self, parameters: Sequence[torch.Tensor]) -> list[str]:
        known = {id(each): name for name, each in self._module.named_parameters()}
        return [known[id(getattr(each, "sharded", each))] for each in parameters]  # FSDP2's name their shards


class _Difference(NamedTuple):
    """A virtual rank whose gradients differ; the rank that carries it, and its witness; and the parameters' names."""

    rank: int
    carrier: int
    witness: int
    names: list[str]


def _describe(where: str, found: list[_Difference], devices: list[str]) -> str:
    rank, carrier, witness, (name, *more) = found[0]
    others = ", ".join(f"virtual rank {each.rank} (ranks {each.carrier} and {each.witness})" for each in found[1:])
    in_all = set.intersection(*({each.carrier, each.witness} for each in found))
    return (
        f"{where}: the gradient of {name}{f', and of {len(more)} more parameters,' * bool(more)} has other bits for "
        f"virtual rank {rank} on rank {carrier} ({devices[carrier]}) than on its witness, rank {witness} "
        f"({devices[witness]})"
        + f"; the same is true of {others}" * bool(others)
        + (f": rank {min(in_all)} is one of the two each time" if len(in_all) == 1 < len(found) else "")
        + ". Nothing has stepped on it. Either a device computes wrong: continue from the last checkpoint without "
        + (f"rank {min(in_all)}'s" if len(in_all) == 1 else "one of them")
        + ", and see whether it happens again. Or the devices are different models, or the loop's Python carries "
        "something from batch to batch (docs/virtual_ranks.md): then leave out witness_every"
    )
