"""The state of the agents' rendezvous, which torch's agents keep in their store: who takes part in the round.

*Threads:* the agent's main one, and torch's, which keeps this machine alive.
"""

from __future__ import annotations

import logging
import math
import os
import pickle
import time
from collections.abc import Callable
from typing import Any

from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend

from unisono.comm.sealing import Overwriting, UnsignedError, seal, unseal
from unisono.errors import UnisonoError
from unisono.outcome import Outcome

_OVERWRITTEN_S = 20.0  # of an attack, after which the run ends
_LEFT_OUT_S = 10.0  # the others give up a machine that has gone sooner

logger = logging.getLogger(__name__)


class LeftOut:
    """Whether the run has all its machines, and this is none of them, as when it was started twice: torch's agent waits
    silently then, and ends well.

    Attributes:
        reason: that in words; "" if it takes part, or may soon.
    """

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._parameters = parameters
        self._since = math.inf
        self._has_told = False
        self.reason = ""

    def __call__(self, state: bytes) -> None:
        """Look at a state; say once that this machine is left out."""
        found, asked, now = pickle.loads(state), self._parameters, time.monotonic()
        is_in = any((each.addr, each.pid) == (asked.local_addr, os.getpid()) for each in found.participants)
        if is_in or not found.complete or len(found.participants) < asked.max_nodes:
            self.reason, self._since = "", math.inf
            return
        hosts = ", ".join(sorted(each.addr for each in found.participants))
        self.reason = (
            f"the run {asked.run_id!r} at {asked.endpoint} has its {asked.max_nodes} machines ({hosts}), and this "
            "agent is none of them"
        )
        self._since = min(self._since, now)
        if now - self._since > _LEFT_OUT_S and not self._has_told:
            self._has_told = True
            logger.warning(
                "%s: it joins if one of them is lost; if it is to be a run of its own, end it, and give that run "
                "another --rdzv-id, and a port of its own by --rdzv-endpoint",
                self.reason,
            )

    def end(self) -> Outcome[Any]:
        """The end of an agent that was left out until the run was over."""
        what = self.reason or f"this agent has come after all machines of the run {self._parameters.run_id!r}"
        return Outcome(error=UnisonoError(f"{what}; that run is over, and nothing has run here"))


class SealedBackend(RendezvousBackend):
    """Signs the state of the agents' rendezvous (`comm/sealing.py`), which torch loads as a pickle, and restores what
    somebody without the secret has overwritten. UnsignedError, from both methods: what is there first is not signed.

    States are numbered, so that an older one that somebody has written again is not believed. While somebody goes on
    writing, the agents cannot meet; that ends the run."""

    def __init__(self, backend: RendezvousBackend, run_id: str) -> None:
        self._backend = backend
        self._place = f"rendezvous {run_id}"
        self._known: bytes | None = None  # the latest state that was signed
        self._number = 0  # of it
        self._is_closed = False
        self._overwriting = Overwriting()
        self.on_state: Callable[[bytes], None] = lambda state: None  # called with each that is read

    def close(self) -> None:
        """Write nothing more: torch's thread that keeps this machine alive outlives the secret."""
        self._is_closed = True

    @property
    def name(self) -> str:
        return self._backend.name

    def get_state(self) -> tuple[bytes, Any] | None:
        found = self._open(self._backend.get_state())
        if found is None:
            return None
        self.on_state(found[0])
        return found[0], found[1]

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, Any, bool] | None:
        found: tuple[bytes, Any, bool] | None = self._open(self._write(state, token))
        return found

    def _open(self, found: tuple[bytes, Any] | tuple[bytes, Any, bool] | None) -> Any:
        if found is None:
            return None
        try:
            numbered = unseal(found[0], self._place)
            if (number := int.from_bytes(numbered[:8])) < self._number:
                raise UnsignedError("an older one was written again by somebody else")
            self._number, self._known = number, numbered[8:]
        except UnsignedError as error:
            if self._known is None:
                raise
            found = self._write(self._known, found[1]) or found
            self._note_overwritten(error)
            return (unseal(found[0], self._place)[8:], found[1], False)
        return (self._known, *found[1:])

    def _note_overwritten(self, error: UnsignedError) -> None:
        passed_s = self._overwriting.note(error, "the state of the rendezvous, which is restored")
        if passed_s > _OVERWRITTEN_S:  # the agents cannot meet
            raise UnsignedError(f"the state of the rendezvous has been overwritten for {passed_s:.0f} s: {error}")

    def _write(self, state: bytes, token: Any) -> Any:
        sealed = seal((self._number + 1).to_bytes(8) + state, self._place)
        if self._is_closed:  # looked at later: what was sealed before is signed
            raise RendezvousClosedError
        return self._backend.set_state(sealed, token)
