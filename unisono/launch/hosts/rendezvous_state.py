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

from torch.distributed.distributed_c10d import Store
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousConnectionError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend

from unisono.comm.outcome import Outcome
from unisono.comm.sealing import Overwriting, UnsignedError, seal, unseal
from unisono.errors import UnisonoError

_OVERWRITTEN_S = 20.0  # of an attack, after which the run ends
_NOTHING = b"Y2FuaW1hZGFt"  # what torch writes before any agent has come
_LEFT_OUT_S = 10.0  # the others give up on a lost machine sooner
_MISSING_S = 10.0  # that agents which were started together may be apart

logger = logging.getLogger(__name__)


class LeftOut:
    """Whether the run has all its machines, and this is not one of them, as when it was started twice: torch's agent
    then waits silently, and ends well."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._parameters = parameters
        self._since = math.inf
        self._has_told = False
        self.reason = ""  # that in words; "" if it takes part, or may soon

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


class Missing:
    """Whether the run has not had all the machines that it needs yet: torch's agent waits for them silently."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._parameters = parameters
        self._since = time.monotonic()
        self._has_told = False
        self.reason = ""  # that in words; "" once they have come

    def __call__(self, state: bytes) -> None:
        """Look at a state; say once that machines are missing."""
        found, asked = pickle.loads(state), self._parameters
        if found.complete or len(found.participants) >= asked.min_nodes:
            self.reason, self._since = "", math.inf  # the loss of a machine is told by others
            return
        hosts = ", ".join(sorted(each.addr for each in found.participants)) or "none"
        self.reason = f"{len(found.participants)} of {asked.min_nodes} machines came to {asked.endpoint} ({hosts})"
        if time.monotonic() - self._since > _MISSING_S and not self._has_told:
            self._has_told = True
            logger.warning("%s, and this agent waits for the others: start the same command on each", self.reason)


class SealedBackend(RendezvousBackend):
    """Keeps the state of the agents' rendezvous, which torch loads as a pickle, signed (`comm/sealing.py`), and
    restores it if a process without the secret has overwritten it, with anything. UnsignedError, from both methods: the
    first state there is not signed.

    States are numbered, so that an older one that was written again is not trusted. While someone keeps writing, the
    agents cannot meet; that ends the run."""

    name = "c10d"  # torch's, which owns this key; but it takes anything there for base64, and fails if it is not

    def __init__(self, store: Store, run_id: str) -> None:
        self._store, self._key = store, f"torch.rendezvous.{run_id}"
        self._place = f"rendezvous {run_id}"
        self._known: bytes | None = None  # the latest state that was signed
        self._number = 0  # of it
        self._is_closed = False
        self._overwriting = Overwriting()
        self.on_state: list[Callable[[bytes], None]] = []  # called with each that is read

    def close(self) -> None:
        """Write nothing more: torch's thread that keeps this machine alive outlives the secret."""
        self._is_closed = True

    def get_state(self) -> tuple[bytes, Any] | None:
        found = self._open_state(self._call("get"))
        if found is not None:
            for look in self.on_state:
                look(found[0])
        return found

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, Any, bool] | None:
        sealed = self._seal_state(state)
        found = self._open_state(self._call("compare_set", token or _NOTHING, sealed))
        return None if found is None else (*found, found[1] == sealed)

    def _open_state(self, value: bytes) -> tuple[bytes, bytes] | None:
        """The state that the store holds as this value, and the value that holds it now; None if there is none yet."""
        while value != _NOTHING or self._known is not None:
            try:
                if value == _NOTHING:
                    raise UnsignedError("it was emptied by somebody else")
                numbered = unseal(value, self._place)
                if (number := int.from_bytes(numbered[:8])) < self._number:
                    raise UnsignedError("an older one was written again by somebody else")
                self._number, self._known = number, numbered[8:]
                return self._known, value
            except UnsignedError as error:
                if self._known is None:
                    raise
                value = self._call("compare_set", value, self._seal_state(self._known))
                passed_s = self._overwriting.note(error, "the state of the rendezvous, which is restored")
                if passed_s > _OVERWRITTEN_S:  # the agents cannot meet
                    raise UnsignedError(
                        f"the state of the rendezvous has been overwritten for {passed_s:.0f} s: {error}"
                    ) from None
        return None

    def _seal_state(self, state: bytes) -> bytes:
        sealed = seal((self._number + 1).to_bytes(8) + state, self._place)
        if self._is_closed:  # checked later: what was sealed before is signed
            raise RendezvousClosedError
        return sealed

    def _call(self, method: str, *values: bytes) -> bytes:
        try:
            return bytes(getattr(self._store, method)(self._key, *values))
        except (ValueError, RuntimeError, TimeoutError) as error:  # as torch's
            raise RendezvousConnectionError("the connection to the rendezvous' store has failed") from error
