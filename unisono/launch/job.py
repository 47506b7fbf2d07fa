"""What the workers of a group get, in a file of their group's directory, and what they take over from their caller."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import pickle
import platform
import sys
from dataclasses import dataclass, field
from typing import Any

import torch

from unisono import terminal
from unisono.launch.hosts.environment import RankPlace
from unisono.launch.imported_modules import describe_modules
from unisono.launch.options import Options

_PULSE_S = 1.0  # seconds between two checks of a worker's progress


@dataclass(frozen=True)
class Caller:
    """What a worker takes over from the process that has called `spawn`.

    Attributes:
        modules: as `describe_modules` returns them, pickled.
        columns: the width of the terminal that shows the workers' stderr; 0 if there is none.
        main: the file of `__main__`, and its name if it was run by `python -m`; empty where it has none.
    """

    environ: dict[str, str] = field(default_factory=lambda: dict(os.environ))
    directory: str = field(default_factory=os.getcwd)
    path: list[str] = field(default_factory=lambda: list(sys.path))
    argv: list[str] = field(default_factory=lambda: list(sys.argv))
    modules: bytes = field(default_factory=lambda: pickle.dumps(describe_modules()))
    columns: int = field(default_factory=lambda: terminal.columns_of(2))
    main: tuple[str, str] = field(default_factory=lambda: _main_module())


def _main_module() -> tuple[str, str]:
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    return os.path.abspath(file) if file else "", getattr(getattr(main, "__spec__", None), "name", "")


@dataclass(frozen=True)
class Job:
    """What all workers of a group get, the same for each: of a whole group, or of this machine's part of it.

    Attributes:
        call: `Settings`, then `(fn, args)`, pickled by value where needed.
        nprocs: the number of workers on this machine.
        backend: the device family's name.
        num_threads: CPU threads of each worker.
        restart_count: how many times the group has been restarted.
        first_rank, world_size, node_rank: the place of this machine's workers among all; a world size of 0 means that
            these are all.
        address, port, store: where the ranks meet, as in `RankPlace`; without an address, in the group's directory.
    """

    call: bytes
    nprocs: int
    backend: str
    options: Options
    num_threads: int
    caller: Caller = field(default_factory=Caller)
    restart_count: int = 0
    first_rank: int = 0
    world_size: int = 0
    node_rank: int = 0
    address: str = ""
    port: int = 0
    store: str = ""

    @property
    def ranks(self) -> range:
        """The ranks of the workers on this machine."""
        return range(self.first_rank, self.first_rank + self.nprocs)

    @property
    def pulse_s(self) -> float:
        """Seconds between two checks of a worker's progress."""
        return min(_PULSE_S, (self.options.hang_timeout_s or self.options.timeout_s) / 20)

    def place_of(self, rank: int) -> RankPlace:
        """One worker's place in the world."""
        return RankPlace(
            launcher="unisono",
            rank=rank,
            world_size=self.world_size or self.nprocs,
            local_rank=rank - self.first_rank,
            local_world_size=self.nprocs,
            node_rank=self.node_rank,
            address=self.address,
            port=self.port,
            restart_count=self.restart_count,
            is_store_there=True,
            store=self.store,
        )

    def facts(self) -> dict[str, Any]:
        """The facts that a run's directory records about the job."""
        return {
            "argv": self.caller.argv,
            "directory": self.caller.directory,
            "nprocs": self.nprocs,
            "backend": self.backend,
            "num_threads": self.num_threads,
            "host": platform.node(),
            "pid": os.getpid(),
            "platform": platform.platform(),
            "versions": versions(),
        }


def versions() -> dict[str, str]:
    """The versions of what a run depends on, by name."""
    found = {"python": platform.python_version(), "torch": torch.__version__}  # +cpu or +cu130, which metadata lack
    for name in ("unisono", "numpy"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
