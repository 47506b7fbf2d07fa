"""`accelerate.logging`: loggers that write on rank zero, on all ranks, or rank by rank."""

from __future__ import annotations

import logging
import os
from collections.abc import MutableMapping
from functools import lru_cache
from typing import Any

from unisono.compat.accelerate.state import PartialState


class MultiProcessAdapter(logging.LoggerAdapter[logging.Logger]):
    """A logger whose methods accept `main_process_only` (default True) and `in_order`: the ranks log one after another,
    so every rank must call it. Each line begins with the rank."""

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        msg, kwargs = super().process(msg, kwargs)
        kwargs.setdefault("stacklevel", 2)
        return f"[RANK {PartialState().process_index}] {msg}", kwargs

    def log(self, level: int, msg: Any, *args: Any, **kwargs: Any) -> None:
        state = PartialState()
        main_process_only, in_order = kwargs.pop("main_process_only", True), kwargs.pop("in_order", False)
        if not self.isEnabledFor(level):
            return
        msg, options = self.process(msg, kwargs)
        for turn in range(state.num_processes) if in_order else [state.process_index]:
            if turn == state.process_index and (in_order or not main_process_only or state.is_main_process):
                self.logger.log(level, msg, *args, **options)
            if in_order:
                state.wait_for_everyone()

    @lru_cache(None)  # noqa: B019 - loggers live as long as the process
    def warning_once(self, *args: Any, **kwargs: Any) -> None:
        """`warning`, but only the first time it is called with these arguments."""
        self.warning(*args, **kwargs)


def get_logger(name: str, log_level: str | None = None) -> MultiProcessAdapter:
    """The logger of that name, for several ranks. `log_level` is set for the root logger, too; None uses
    ACCELERATE_LOG_LEVEL, or leaves both unchanged."""
    log_level = log_level or os.environ.get("ACCELERATE_LOG_LEVEL")
    logger = logging.getLogger(name)
    if log_level is not None:
        logger.setLevel(log_level.upper())
        logger.root.setLevel(log_level.upper())
    return MultiProcessAdapter(logger, {})
