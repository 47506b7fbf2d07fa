"""Starts the zygote before it is requested, so that it imports torch while the caller does.

This is the default in notebooks and with `unisono run`; elsewhere, `UNISONO_WARM=1` in the environment makes `import
unisono` do it, and a script can call `unisono.warm()`. `UNISONO_WARM=0` disables it. Without any of these, an import
starts nothing.
"""

from __future__ import annotations

import os
import sys

from unisono.launch.starting.marks import OUTER_DIRECTORY

VARIABLE = "UNISONO_WARM"
# Set in a process that was started as a worker, or that is to run an agent.
_LAUNCHED = ("RANK", "WORLD_SIZE", "SLURM_PROCID", "PET_NNODES", OUTER_DIRECTORY)


def warm_at_import() -> None:
    """Called by `import unisono`: in a notebook, or if the environment says so, start the zygote."""
    asked = os.environ.get(VARIABLE)
    if (asked or ("1" if "ipykernel" in sys.modules else "0")) != "0":
        warm_early()


def warm_early() -> None:
    """Start the zygote, unless this process is a worker itself or that is disabled; never raises."""
    process = sys.modules.get("multiprocessing.process")
    is_child = process is not None and process.parent_process() is not None
    is_worker = is_child or any(name in os.environ for name in _LAUNCHED)
    if sys.platform == "linux" and not is_worker and os.environ.get(VARIABLE) != "0":
        from unisono.launch.starting.zygote_client import warm

        try:
            warm()
        except OSError:  # the first spawn gets the same error, and reports it
            return
