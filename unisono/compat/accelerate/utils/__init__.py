# ruff: noqa: F403 - the names of these modules are this module's
"""`accelerate.utils`: the names that scripts use of it, and `is_..._available()` of device families and packages."""

from __future__ import annotations

import sys
from typing import Any

from unisono.compat.accelerate.utils import other as _other
from unisono.compat.accelerate.utils.dataclasses import *
from unisono.compat.accelerate.utils.operations import *
from unisono.compat.accelerate.utils.other import *

for _name in ("environment", "imports", "memory", "random", "tqdm"):  # modules there, whose names are all in `other`
    sys.modules[f"{__name__}.{_name}"] = _other


def __getattr__(name: str) -> Any:
    """Look the name up among the `is_..._available`; the error for others may have advice."""
    return getattr(_other, name)
