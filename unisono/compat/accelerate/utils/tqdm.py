"""`accelerate.utils.tqdm`: a progress bar of the first rank of a machine."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from unisono.compat.accelerate.state import PartialState


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """tqdm's, which is to be installed; other ranks get one that shows nothing."""
    bar = import_module("tqdm.auto").tqdm

    if main_process_only and not kwargs.get("disable"):
        kwargs["disable"] = not PartialState().is_local_main_process
    return bar(*args, **kwargs)
