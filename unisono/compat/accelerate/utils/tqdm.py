"""`accelerate.utils.tqdm`: a progress bar of rank zero."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from unisono.progress import tqdm as bar_of_rank_zero


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """`unisono.tqdm`; with `main_process_only=False` tqdm's own bar, on every rank."""
    return bar_of_rank_zero(*args, **kwargs) if main_process_only else import_module("tqdm.auto").tqdm(*args, **kwargs)
