# ruff: noqa: F403 - the names of these modules are this module's
"""`accelerate.utils`: the names that scripts use of it, and `is_..._available()` of device families and packages."""

from __future__ import annotations

from typing import Any

from unisono.compat.accelerate.utils import imports as _imports
from unisono.compat.accelerate.utils.dataclasses import *
from unisono.compat.accelerate.utils.imports import *
from unisono.compat.accelerate.utils.memory import *
from unisono.compat.accelerate.utils.operations import *
from unisono.compat.accelerate.utils.other import *
from unisono.compat.accelerate.utils.random import *


def __getattr__(name: str) -> Any:
    """Look the name up among the `is_..._available`; the error for others may have advice."""
    return getattr(_imports, name)
