"""Leases: one object at a time computes on a lazy device, since two threads that record on one end the process.

*Threads:* any. A lease ends when its holder is idle; it is never returned, so no interrupt can leave one behind.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol
from weakref import WeakValueDictionary

import torch

from unisono.errors import BusyError


class Holder(Protocol):
    """Takes leases. It is idle, except from before it takes one until it has stopped using the devices."""

    @property
    def is_usable(self) -> bool:
        """Whether it is idle."""


class Leases:
    """The last holder of each device."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders: WeakValueDictionary[torch.device, Holder] = WeakValueDictionary()

    def take(self, devices: Sequence[torch.device], holder: Holder) -> None:
        """Lease the devices to `holder`, all or none.

        Raises:
            BusyError: another holder has one of them.
        """
        with self._lock:
            for device in devices:
                other = self._holders.get(device)
                if other is not None and other is not holder and not other.is_usable:
                    raise BusyError(
                        f"{device} is used by another {type(other).__name__}, and a lazy device serves one at a time; "
                        "wait until that call has returned, or use other devices"
                    )
            self._holders.update(dict.fromkeys(devices, holder))


leases = Leases()
"""The leases of this process."""
