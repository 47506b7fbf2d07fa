# ruff: noqa: F403 - this module has the names of its settings, too
"""Accelerate's names over this framework: a script runs by changing its imports, in processes and in threads.

`from accelerate import Accelerator` becomes `from unisono.compat.accelerate import Accelerator`, and so for each
module. No code is shared with it. docs/migrating_from_accelerate.md describes the differences.
"""

from __future__ import annotations

import unisono.compat.accelerate.utils  # noqa: F401 - first: `state`, which its modules import, needs one of them
from unisono.compat.accelerate import local_sgd as local_sgd
from unisono.compat.accelerate import logging as logging
from unisono.compat.accelerate import scheduler as scheduler
from unisono.compat.accelerate import tracking as tracking
from unisono.compat.accelerate.accelerator import Accelerator as Accelerator
from unisono.compat.accelerate.data_loader import skip_first_batches as skip_first_batches
from unisono.compat.accelerate.state import PartialState as PartialState
from unisono.compat.accelerate.utils.dataclasses import *
from unisono.compat.accelerate.utils.other import debug_launcher as debug_launcher
from unisono.compat.accelerate.utils.other import find_executable_batch_size as find_executable_batch_size
from unisono.compat.accelerate.utils.other import init_empty_weights as init_empty_weights
from unisono.compat.accelerate.utils.other import init_on_device as init_on_device
from unisono.compat.accelerate.utils.other import notebook_launcher as notebook_launcher
from unisono.compat.accelerate.utils.other import synchronize_rng_states as synchronize_rng_states
from unisono.compat.left_out import left_out

__getattr__ = left_out(__name__)

__version__ = "1.15.0"
"""The version of Accelerate with these names; scripts compare it."""
