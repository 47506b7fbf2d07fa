"""`torch_xla.amp.syncfree`: torch's optimizers, with steps that can be skipped.

`found_inf` is read here, which ends a lazy device's graph; without it nothing is read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class _Skips(torch.optim.Optimizer):
    def step(self, closure: Callable[[], Any] | None = None, found_inf: torch.Tensor | None = None) -> Any:
        """Like the step of torch's optimizer; but if `found_inf`, a tensor of one element, is not 0, only the closure
        runs."""
        if found_inf is None or not found_inf.item():
            return super().step(closure)
        with torch.enable_grad():
            return closure() if closure is not None else None


class SGD(_Skips, torch.optim.SGD): ...


class Adam(_Skips, torch.optim.Adam): ...


class AdamW(_Skips, torch.optim.AdamW): ...
