"""Where torch's agents keep the state of their rendezvous: as torch's own, but signed (`comm/sealing.py`), since torch
loads it as a pickle."""

from __future__ import annotations

import logging
from typing import Any

from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend

from unisono.comm.sealing import UnsignedError, seal, unseal

logger = logging.getLogger(__name__)


class SealedBackend(RendezvousBackend):
    """Signs what another backend holds, and restores what somebody without the secret has overwritten.

    Raises:
        UnsignedError, from both methods: what is there when they are called for the first time is not signed.
    """

    def __init__(self, backend: RendezvousBackend) -> None:
        self._backend = backend
        self._known: bytes | None = None  # the latest state that was signed

    @property
    def name(self) -> str:
        return self._backend.name

    def get_state(self) -> tuple[bytes, Any] | None:
        found = self._open(self._backend.get_state())
        return None if found is None else (found[0], found[1])

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, Any, bool] | None:
        found: tuple[bytes, Any, bool] | None = self._open(self._backend.set_state(seal(state), token))
        return found

    def _open(self, found: tuple[bytes, Any] | tuple[bytes, Any, bool] | None) -> Any:
        if found is None:
            return None
        try:
            self._known = unseal(found[0])
        except UnsignedError as error:
            if self._known is None:
                raise
            logger.warning("the state of the rendezvous: %s; it is restored", error)
            found = self._backend.set_state(seal(self._known), found[1]) or found
            return (unseal(found[0]), found[1], False)
        return (self._known, *found[1:])
