"""Digests of a run with virtual ranks: 64-bit numbers that show the first step in which two runs differ.

Each n-th step of an optimizer, and the last of an epoch, has a digest of each parameter's reduced gradient, before it
is clipped, and of each parameter and buffer after the step. All ranks have the same, so that rank zero alone computes
them, on the device; where ranks have shards, the others help to gather these. They are read together, once a step.
`report/record.py` writes them, and `report/digests.py` compares those of two runs.

*Threads:* the rank's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import count
from operator import methodcaller
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.optim import Optimizer

from unisono.batches.deliveries import Batch, Loop
from unisono.training.parameter_names import parameters_of
from unisono.training.replay import replay_of
from unisono.training.steps import Steps
from unisono.training.strategies.engine import Engine
from unisono.training.strategies.sharded import gathered
from unisono.world import World

_CHUNK = 2**15  # words of 8 bytes: what is computed for them stays in a cache, and takes little memory
_PLACE, _FACTOR = -7046029254386353131, -4658895280553007687  # odd: that of the golden ratio, and one of SplitMix64
_SETTINGS = ("virtual_ranks", "seed", "mixed_precision", "max_grad_norm", "split_batches")
_BITS = (1 << 64) - 1


def digest_of(tensor: torch.Tensor) -> torch.Tensor:
    """A digest of the bytes and their places, as a tensor on the same device; the host does not wait for it."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if flat.numel() % 8 or flat.storage_offset() % 8:
        flat = torch.nn.functional.pad(flat, (0, -flat.numel() % 8)).clone()
    total, places = torch.zeros((), dtype=torch.int64, device=flat.device), _places(_CHUNK, flat.device)
    for number, words in enumerate(flat.view(torch.int64).split(_CHUNK)):
        mixed = (words ^ places[: words.numel()]).mul_(_FACTOR + 2 * number)
        total += mixed.bitwise_xor_(mixed >> 32).sum()
    return total


def describe_kernels(world: World) -> dict[str, Any]:
    """What the bits of a run depend on, besides the script, its settings and its data."""
    device = world.backend.device_name(world.device)
    return {"torch": str(torch.__version__), "threads": torch.get_num_threads(), "device": device}


@cache
def _places(count: int, device: torch.device) -> torch.Tensor:
    return torch.arange(1, count + 1, device=device).mul_(_PLACE)


def record_settings(world: World, given: Mapping[str, Any]) -> None:
    """Write the arguments of an Accelerator that bits depend on, and what else they do, where a record is kept."""
    if world.timeline.write_digests is not None:
        settings = {name: given[name] for name in _SETTINGS} | describe_kernels(world)
        started = {"ranks": world.world_size, "backend": world.backend.name, "command": world.state.command}
        world.timeline.write_digests({"settings": settings, **started})


def record_checkpoint(world: World, kind: str, path: object, mark: str, facts: Mapping[str, Any] | None) -> None:
    """Write that a checkpoint was "saved" or "loaded", where a record is kept: a step can be replayed from it. An
    Accelerator's facts are `taken`, by its optimizers, and `bits`, which are empty without virtual ranks."""
    write = world.timeline.write_digests
    if write is not None and facts and facts["bits"]:
        write({kind: str(path), "mark": mark, "steps": [steps for steps, *_ in facts["taken"]]})


def say_weights(world: World, digest: str) -> None:
    """Print the digest of all weights at the end of a run, once, and write it where a record is kept."""
    own = world.state.part(_OfRank)
    if own.said != digest:
        own.said = digest
        print(f"weights sha256 {digest}")
        if world.timeline.write_digests is not None:
            world.timeline.write_digests({"sha256": digest})


class _OfRank:
    """What the Accelerators of a rank share: the number of the next optimizer that is prepared, and what was said."""

    def __init__(self) -> None:
        self.numbers = count()
        self.said = ""


class Digests:
    """The digests of one optimizer's steps.

    Args:
        every: steps with digests are those whose number it divides, and the last of each epoch. In a replay, they are
            those that have digests in the record, and the last.
    """

    def __init__(self, optimizer: Optimizer, steps: Steps, every: int) -> None:
        self._optimizer, self._steps, self._every = optimizer, steps, every
        self._number = next(steps.world.state.part(_OfRank).numbers)
        self._replay = replay_of(steps.world)
        self._names: list[list[str]] = []
        self._step = 0  # the last one whose gradients were noted
        self._of_gradients: list[tuple[str, torch.Tensor]] | None = None
        self._loop: Callable[[], Loop | None] = lambda: None  # and where its last round begins
        self._last_at = math.inf

    def note_gradients(self, step: int, engines: Sequence[Engine]) -> None:
        """The gradients of that step are reduced; called again, as before and after clipping, it does nothing."""
        if step == self._step:
            return
        self._step, self._of_gradients = step, None
        if self._replay is not None:
            self._replay.begin_step(self._number, step)
        if self._has_digests(step):
            named = [(name, each.grad) for name, each in self._parameters(engines)]
            self._of_gradients = self._digests_of([(name, each) for name, each in named if each is not None])

    def note_step(self, step: int, engines: Sequence[Engine]) -> None:
        """That step was taken, the buffers are those after it."""
        self._write(step, engines)
        if self._replay is not None:
            self._replay.end_step(self._number, step)

    def in_debugger(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """That method of the optimizer, with a debugger in front of the step that is replayed, if one is to run."""
        replay = self._replay
        if replay is None or not replay.has_debugger:
            return step

        def debugged(*args: Any, **kwargs: Any) -> Any:
            replay.debug(self._number, self._step)
            return step(*args, **kwargs)

        return debugged

    def _has_digests(self, step: int) -> bool:
        if self._replay is not None:
            return self._replay.wants(self._number, step)
        return step % self._every == 0 or self._is_last(self._steps.step.last)

    def _write(self, step: int, engines: Sequence[Engine]) -> None:
        gradients, self._of_gradients = self._of_gradients, None
        write = self._steps.world.timeline.write_digests
        if gradients is None or step != self._step:
            return
        weights = self._digests_of([*self._parameters(engines), *_named(engines, methodcaller("named_buffers"))])
        if write is None:
            return
        found = torch.stack([each for _, each in (*gradients, *weights)]).tolist()
        values = [f"{each & _BITS:016x}" for each in found]
        names = [[name for name, _ in gradients], [name for name, _ in weights]]
        if names != self._names:
            self._names = names
            write({"optimizer": self._number, "gradients_of": names[0], "weights_of": names[1]})
        cut = len(gradients)
        write({"optimizer": self._number, "step": step, "gradients": values[:cut], "weights": values[cut:]})

    def _digests_of(self, named: Sequence[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
        """On rank zero, their digests; others help to gather what is divided among the ranks."""
        if self._steps.world.timeline.write_digests is not None:
            return [(name, digest_of(gathered(each))) for name, each in named]
        for _, each in named:
            gathered(each)
        return []

    def _parameters(self, engines: Sequence[Engine]) -> list[tuple[str, torch.Tensor]]:
        """Those that the optimizer steps: gradients of others may still be one rank's own."""
        own = set(map(id, parameters_of(self._optimizer)))
        return [(name, each) for name, each in _named(engines, methodcaller("named_parameters")) if id(each) in own]

    def _is_last(self, batch: Batch | None) -> bool:
        """Whether it is in the last round of an epoch, by the number of its first sample; nothing is drawn ahead."""
        if batch is None or batch.draw is None:
            return False
        if self._loop() is not batch.loop:
            self._loop, self._last_at = ref(batch.loop), self._find_last(batch.loop)
        return batch.draw.sample >= self._last_at

    def _find_last(self, loop: Loop) -> float:
        """The number of the first sample of a loop's last round; infinite if it is unknown."""
        lengths, virtual = loop.lengths(), self._steps.virtual
        samples = next(iter(loop.kinds.values())).total  # of a full round, unless it is the last one
        if lengths is None or virtual is None or not samples:
            return math.inf
        return float((lengths[1] // virtual.each - 1) * samples)


def _named(engines: Sequence[Engine], of: Callable[[nn.Module], Any]) -> list[tuple[str, torch.Tensor]]:
    """What a method of modules returns, by names; those of several models begin with their numbers."""
    before = [f"{number}." if len(engines) > 1 else "" for number in range(len(engines))]
    return [(start + name, each) for start, one in zip(before, engines, strict=True) for name, each in of(one.module)]
