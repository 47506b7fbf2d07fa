"""CallerState: what a thread has switched on around a call, for other threads that work on its behalf.

Gradients and inference mode, autocast, and the context variables are each thread's own, so a loop that runs in replica
threads would not see the `torch.no_grad()` or `torch.autocast(...)` around it. Default type, anomaly detection and
deterministic algorithms belong to the process and need nothing.

*Threads:* taken in the caller's thread; each replica thread enters a copy of its own.
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
    """Autocast on one family of devices, which is switched on."""

    device_type: str
    dtype: torch.dtype


@dataclass(frozen=True)
class CallerState:
    """What was switched on in the thread that called `of_this_thread`.

    Attributes:
        has_gradients, is_inference: `torch.is_grad_enabled()` and `torch.is_inference_mode_enabled()`.
        autocasts: of those families where autocast is on.
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
        """The calling thread's, with autocast for those families and the CPU."""
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
        """Call `body` in the calling thread as if it were the other one; once for each state."""
        return self.variables.run(self._run, body)

    def _run(self, body: Callable[[], T]) -> T:
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(self.is_inference))
            stack.enter_context(torch.set_grad_enabled(self.has_gradients))
            for each in self.autocasts:
                stack.enter_context(torch.autocast(each.device_type, each.dtype, cache_enabled=self.caches))
            return body()
