"""LossScaler: torch's GradScaler, which several optimizers share."""

from __future__ import annotations

import logging
from typing import Any

from torch.amp import GradScaler

logger = logging.getLogger(__name__)


class LossScaler(GradScaler):
    """Draws its conclusions from a step when the next one begins, or when its state is asked for: by then all
    optimizers of the step have stepped.

    The scale stays on the device: it is read where a step was not taken, which the host has seen.

    Args:
        device: the type of the rank's device.
        is_telling: says when a step was not taken.
        options: the other arguments of GradScaler.

    Attributes:
        is_due: an optimizer has stepped, or skipped its step, since the last conclusions.
        has_skipped: one of them has skipped it. Fused optimizers do so on the device, and nobody hears of it.
    """

    def __init__(self, device: str, is_telling: bool, **options: float) -> None:
        super().__init__(device, **options)  # type: ignore[arg-type]
        self.is_due = self.has_skipped = False
        self._is_telling = is_telling

    def settle(self) -> None:
        """Let the scale follow from the steps that were taken and skipped."""
        if self.is_due:
            self.update()
            if self.has_skipped and self._is_telling:
                logger.info("fp16: gradients overflowed, no step was taken; the loss scale is %g", self.get_scale())
            self.is_due = self.has_skipped = False

    def state_dict(self) -> dict[str, Any]:
        self.settle()
        return super().state_dict()
