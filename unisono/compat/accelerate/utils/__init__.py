# ruff: noqa: F403 - the names of these modules are this module's
"""`accelerate.utils`: the names that scripts use of it, and `is_..._available()` of device families and packages."""

from __future__ import annotations

import sys

from unisono.compat.accelerate.utils import other as _other
from unisono.compat.accelerate.utils.dataclasses import *
from unisono.compat.accelerate.utils.environment import *
from unisono.compat.accelerate.utils.operations import *
from unisono.compat.accelerate.utils.other import *
from unisono.compat.left_out import left_out

# Modules there, whose names are all in `other`.
_MODULES = [f"utils.{name}" for name in ("imports", "memory", "random", "tqdm", "versions")]
for _name in (*_MODULES, "big_modeling", "launchers", "memory_utils"):
    sys.modules[f"unisono.compat.accelerate.{_name}"] = _other

left_out(__name__)
__getattr__ = _other.__getattr__  # `is_..._available`; the error for other names may have advice
