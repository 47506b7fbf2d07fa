"""ReplicaContext: the attributes that a replica of a `DataParallel` keeps from one call to the next."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch


class ReplicaContext(SimpleNamespace):
    """Keeps any attribute that a loop sets on it from one call to the next.

    Attributes:
        device: the replica's device.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device=device)

    def getattr_or(self, name: str, default: Any) -> Any:
        """Return the attribute `name`; if missing or None, first store `default` (or its result, if callable)."""
        value = getattr(self, name, None)
        if value is None:
            value = default() if callable(default) else default
            setattr(self, name, value)
        return value
