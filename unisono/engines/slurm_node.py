"""`python -m unisono.engines.slurm_node DIRECTORY PER_MACHINE`, a task of a SLURM step: one machine of a run."""

from __future__ import annotations

import sys
from pathlib import Path

from unisono.engines.machine import run_machine
from unisono.launch.hosts.environment import node_of_step


def main() -> None:
    directory, per_machine = Path(sys.argv[1]), int(sys.argv[2])
    number, count, endpoint = node_of_step()
    outcome = run_machine((directory / "bundle").read_bytes(), number, count, per_machine, endpoint)
    # By renaming: the caller must not read half of it.
    written = directory / f".outcome-{number}"
    written.write_bytes(outcome)
    written.rename(directory / f"outcome-{number}")


if __name__ == "__main__":
    main()
