"""Whether all ranks have the same of one model: compared before its first reduction, at some of its steps, and at the
step after a state was loaded."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from unisono.comm.operations import ADVICE_ON_STATES, LOADED
from unisono.errors import BrokenWorldError
from unisono.report.timeline import REDUCE
from unisono.training.agreement import (
    broadcast_together,
    check_agreement,
    find_unequal_parameters,
    fingerprint,
    readable,
    warn_of_unequal_buffers,
)
from unisono.training.steps import Steps
from unisono.training.strategies.held import Members
from unisono.training.strategies.trainers import Trainers


class ModelAgreement:
    """Compares one model on all ranks."""

    def __init__(self, module: nn.Module, members: Members, trainers: Trainers, steps: Steps) -> None:
        self._module, self._members, self._trainers = module, members, trainers
        self._world, self._steps = steps.world, steps
        # A fingerprint of what this rank trained before a state was loaded since the last step, if one was.
        self.before_load: int | None = None
        self._compared: Sequence[torch.Tensor] = ()  # the trained parameters of the first comparison
        self._is_apart = False  # whether it was said that the ranks' parameters differ
        self._num_steps = self._num_shared = 0  # how often optimizers have stepped, and buffers were shared

    def place(self) -> str:
        """The position of this rank, and its learning rates: equal on all ranks, or they would drift apart."""
        loaded = ""
        if self.before_load is not None and (now := self._fingerprint()) != self.before_load:
            loaded = f" after {LOADED} with bits {now % 2**64:016x}"
        return self._steps.step.place() + loaded + self._trainers.rates()

    def note_load(self) -> None:
        """Record what this rank trains, before a state is loaded into it: until the next step, `place` says so if it is
        another one then. A rank may load alone, as for an evaluation, and load back."""
        if self.before_load is None and self._world.comm.size > 1:
            self.before_load = self._fingerprint()

    def announce_load(self) -> None:
        """Have the ranks compare what they have loaded, at the step: its gradients may have been reduced before. A
        collective of the ranks that have loaded another state."""
        if LOADED in (place := self.place()):
            self._world.comm.announce(f"the parameters of {place}")
            try:
                self._world.comm.barrier()  # no other collective may follow
            except BrokenWorldError as error:  # where the others have loaded nothing, and are at their end
                error.add_note(f"this rank steps from a state that it has loaded{ADVICE_ON_STATES}")
                raise

    def _fingerprint(self) -> int:
        """Of the trained parameters, and of the optimizers' states, but those of "zero1", which ranks have parts of."""
        trained = self._members.trained()
        states = [each.state for each in self._trainers.optimizers() if not hasattr(each, "consolidate_state_dict")]
        kept = [state.get(each, {}) for state in states for each in trained]
        held = [each for state in kept for _, each in sorted(state.items()) if isinstance(each, torch.Tensor)]
        return int(fingerprint(readable([*trained, *held], self._world)))

    def check(self, trained: Sequence[torch.Tensor]) -> None:
        """Compare the parameters before the first reduction of these. A collective then."""
        if self._compared is not trained and self._world.comm.size > 1:
            check_agreement(self._members.trained(), self._world)
            self._compared = trained  # after the comparison: an error leaves it to be repeated

    def compare(self) -> None:
        """Look whether all ranks have the same parameters, and say once if they do not: they have, unless these are
        changed by something else than the step. A collective."""
        if not (self._is_apart or self._world.backend.is_lazy):
            with self._world.timeline.loop().span(REDUCE):
                self._is_apart = find_unequal_parameters(self._module, self._steps.step.number, self._world)

    def count_step(self) -> bool:
        """Count a step. Returns whether the ranks are to be compared at it: it costs a pass over the parameters."""
        self._num_steps += 1
        return not self._num_steps & (self._num_steps - 1)  # 1, 2, 4, ...

    def share_buffers(self) -> None:
        """Broadcast rank zero's buffers, since batch statistics make them differ between ranks. A collective."""
        self._num_shared += 1
        if self._num_shared in (1, 10, 100):
            warn_of_unequal_buffers(self._module, self._world)
        broadcast_together(self._members.buffers(), self._world)
