"""Starts the zygote before it is requested, so that it imports torch while the caller does.

That is so in notebooks and with `unisono run`; elsewhere, an import starts nothing, and a script can call
`unisono.warm()`.
"""

from __future__ import annotations

import os
import sys

from unisono.launch.starting.marks import OUTER_DIRECTORY

# Set in a process that was started as a worker, or that is to run an agent.
_LAUNCHED = ("RANK", "WORLD_SIZE", "SLURM_PROCID", "PET_NNODES", OUTER_DIRECTORY)


def warm_at_import() -> None:
    """Called by `import unisono`: start the zygote in a notebook."""
    if "ipykernel" in sys.modules:
        warm_early()


def warm_early(inherited: int | None = None) -> None:
    """Start the zygote, unless this process is a worker itself; never raises. It is a fork of this process, if that has
    `inherited` a descriptor from `unisono warm`."""
    process = sys.modules.get("multiprocessing.process")
    is_child = process is not None and process.parent_process() is not None
    is_worker = is_child or any(name in os.environ for name in _LAUNCHED)
    if sys.platform == "linux" and not is_worker:
        from unisono.launch.starting.zygote_client import fork_zygote, warm

        try:
            if inherited is not None:
                fork_zygote(inherited)
            warm()
        except OSError:  # the first spawn gets the same error, and reports it
            return
