"""CallerState: the modes that a thread has enabled around a call, for other threads that work on its behalf.

Grad mode, inference mode, autocast and the context variables belong to a thread, so a loop that runs in replica threads
would not see the `torch.no_grad()` or `torch.autocast(...)` around it. Default type, anomaly detection and
deterministic algorithms belong to the process and need no copying.

*Threads:* captured in the caller's thread; each replica thread enters its own copy.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TypeVar

import torch

T = TypeVar("T")


@dataclass(frozen=True)
class Autocast:
    """Autocast that is enabled on one family of devices."""

    device_type: str
    dtype: torch.dtype


@dataclass(frozen=True)
class CallerState:
    """The modes that were enabled in the thread that called `of_this_thread`.

    Attributes:
        has_gradients, is_inference: `torch.is_grad_enabled()` and `torch.is_inference_mode_enabled()`.
        autocasts: those of the families on which autocast is enabled.
        caches: whether autocast keeps the weights that it has cast.
        variables: a copy of the context variables, for one thread.
    """

    has_gradients: bool
    is_inference: bool
    autocasts: tuple[Autocast, ...]
    caches: bool
    variables: contextvars.Context

    @classmethod
    def of_this_thread(cls, device_types: Iterable[str]) -> CallerState:
        """The state of the calling thread, with autocast for those families and the CPU."""
        families = dict.fromkeys([torch.default_generator.device.type, *device_types])
        return cls(
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            tuple(
                Autocast(family, torch.get_autocast_dtype(family))
                for family in families
                if torch.is_autocast_enabled(family)
            ),
            torch.is_autocast_cache_enabled(),
            contextvars.copy_context(),
        )

    def run(self, body: Callable[[], T]) -> T:
        """Call `body` in the calling thread with this state; each state can be used once."""
        return self.variables.run(self._run, body)

    def _run(self, body: Callable[[], T]) -> T:
        with ExitStack() as stack:
            # First, since entering it sets the grad mode as well.
            stack.enter_context(torch.inference_mode(self.is_inference))
            stack.enter_context(torch.set_grad_enabled(self.has_gradients))
            for each in self.autocasts:
                stack.enter_context(torch.autocast(each.device_type, each.dtype, cache_enabled=self.caches))
            return body()
