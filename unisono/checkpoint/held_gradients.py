"""The gradients of an unfinished step, in a checkpoint: what its microbatches have accumulated so far, and their
claims.

Rank r holds the sum over its microbatches of part * scale * gradient, where the part includes the number of ranks R as
a factor (docs/exactness.md), and the reduction divides by R. So what R ranks held is, on S ranks, their sum times S
/ R; rank zero gets it. On R ranks each gets its own, bit for bit.

*Threads:* the rank's own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from unisono.batches.deliveries import Batch, Loop
from unisono.errors import CheckpointError
from unisono.training.claims import Claim
from unisono.training.gradients import is_sparse
from unisono.training.machine import Step, Visit
from unisono.training.rules import TAKEN
from unisono.training.steps import Steps
from unisono.training.strategies.engine import Engine
from unisono.training.strategies.sharded import is_distributed
from unisono.training.strategies.states import broadcast_entries, plain_name
from unisono.world import World


def claims_of(steps: Steps, engines: Sequence[Engine]) -> dict[str, Any] | None:
    """The microbatches of the unfinished step; None between steps; CheckpointError if it only awaits its optimizer."""
    step = steps.step
    if step.state == TAKEN or not step.visits:
        return None
    if any(each.gradients.reduced_by is not None for each in engines):
        raise CheckpointError(
            "save_state was called between the last backward() of a step and optimizer.step(); call it after that"
        )
    loops = list(dict.fromkeys(each.loop for each in step.visits))
    claims = [
        [*each.claim[:3], None if each.batch is None else each.batch.dealt, each.microbatch, loops.index(each.loop)]
        for each in step.visits
    ]
    return {"number": step.number, "claims": claims}


def held_gradients(engines: Sequence[Engine]) -> dict[str, torch.Tensor]:
    """This rank's gradients by "<position of the model>/<parameter>". A collective under strategy "fsdp"."""
    held: dict[str, torch.Tensor] = {}
    for place, engine in enumerate(engines):
        for name, each in engine.named_leaves().items():
            if each.grad is not None and not is_distributed(each.grad):
                key = f"{place}/{plain_name(engine.module, name)}"
                held[key] = each.grad.coalesce() if is_sparse(each.grad) else each.grad
    return held


def resume_step(
    saved: Sequence[Mapping[str, Any]],
    held: Sequence[Mapping[str, torch.Tensor]] | None,
    steps: Steps,
    engines: Sequence[Engine],
) -> None:
    """Continue the saved step, from `claims_of` of each rank and, on rank zero, their gradients. A collective."""
    own = _part_of_gradients(saved, held, steps.world)
    for place, engine in enumerate(engines):
        for name, each in engine.named_leaves().items():
            gradient = own.get(f"{place}/{plain_name(engine.module, name)}")
            each.grad = None if gradient is None else gradient.to(each.device)
    steps.resume(_rebuild_step(saved, steps))
    for engine in engines:
        engine.gradients.resume()


def _part_of_gradients(
    saved: Sequence[Any], held: Sequence[Mapping[str, torch.Tensor]] | None, world: World
) -> dict[str, torch.Tensor]:
    """This rank's part of the gradients."""
    if len(saved) == world.world_size:
        own: dict[str, torch.Tensor] = {}
        for rank in range(world.world_size):
            entries = dict(broadcast_entries(held[rank] if held is not None else {}, world))
            own = entries if rank == world.rank else own
        return own
    world.comm.barrier()
    if held is None:
        return {}
    # Rank zero gets all of them: the mean over the current ranks must equal the mean over the saved ones.
    factor = world.world_size / len(saved)
    names = dict.fromkeys(name for each in held for name in each)
    return {name: torch.stack([each[name] for each in held if name in each]).sum(0) * factor for name in names}


def _rebuild_step(saved: Sequence[Mapping[str, Any]], steps: Steps) -> Step:
    """The saved step, with claims for the current number of ranks."""
    loops: defaultdict[int, Loop] = defaultdict(Loop)
    world = steps.world
    is_same = len(saved) == world.world_size
    step = Step(steps.policy, saved[0]["number"])
    for place, (_, total, is_given, dealt, microbatch, loop) in enumerate(saved[0]["claims"]):
        # On another number of ranks rank zero holds all gradients, so it claims all samples.
        samples = saved[world.rank]["claims"][place][0] if is_same else total * (world.rank == 0)
        if dealt is None and not is_given and not is_same:  # not from a loader: each rank's counted as one
            samples, total = 1, world.world_size
        batch = None if dealt is None else Batch(loops[loop], int(samples), int(total), 0, dealt=dealt)
        step.visits.append(Visit(object(), batch, Claim(samples, total, is_given), 0, microbatch))
    return step
