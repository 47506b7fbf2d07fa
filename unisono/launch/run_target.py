"""What `unisono run` runs: a script, as `python script.py` would, or a module, as by `python -m`.

The world is set up beforehand; `unisono.spawn(fn)` and `unisono.join_world()` detect that they are in one. Programs
written for torchrun find torchrun's variables, and may initialise torch's process group themselves (`script_group.py`).
The command itself imports none of the user's code: that is left to the workers.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import runpy
import signal
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from unisono.comm import preemption
from unisono.errors import ClosedError, StoppedError, WorkerDiedError
from unisono.launch.hosts.endpoint import free_port
from unisono.launch.hosts.environment import TAKEN, RankPlace, announce, take
from unisono.launch.messages import say_once
from unisono.launch.reports import count_of
from unisono.launch.script_group import accept_device_ids
from unisono.world import World, current_world

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Target:
    """What is run: a script, or a module, and its arguments."""

    name: str
    argv: tuple[str, ...] = ()
    is_module: bool = False


def check_target(target: Target) -> None:
    """Check that the target can be run, before anything is started, and without running any of it. ValueError or
    ModuleNotFoundError: there is no such script, or module."""
    if not target.is_module:
        if not os.path.isfile(target.name):
            script = os.path.join(target.name, "__main__.py")
            way = f"{script} is one" if os.path.isfile(script) else "-m runs a module"
            raise ValueError(f"there is no script {target.name!r} in {os.getcwd()}; {way}")
        return
    _set_first_path(os.getcwd())
    _find_module(target.name)


def check_preload(target: Target, names: Iterable[str]) -> None:
    """Check that modules that the workers share can be imported as the target could, without importing any.
    ModuleNotFoundError: no module has such a name."""
    _set_first_path(_directory_of(target))
    for name in names:
        _find_module(name)


def _find_module(name: str) -> None:
    package = name.partition(".")[0]  # the part that can be looked up without importing anything
    try:
        is_there = importlib.util.find_spec(package) is not None
    except ValueError:  # `__main__` was imported from no file
        is_there = False
    if not is_there:
        raise ModuleNotFoundError(
            f"{name!r}: there is no module {package!r} here or in the import path; name it as in an import"
        )


def describe_command(target: Target) -> dict[str, Any]:
    """What is started, and where, for the record of a run; for a script, also the SHA-256 of its text."""
    source = "" if target.is_module else hashlib.sha256(Path(target.name).read_bytes()).hexdigest()
    return {
        "target": target.name,
        "argv": list(target.argv),
        "is_module": target.is_module,
        "directory": os.getcwd(),
        "sha256": source,
    }


def run_target(target: Target) -> None:
    """Run the target in this process, which has its world; `sys.exit(0)` is a success, as for any script, and any other
    SystemExit is raised.

    So is an early end that the ranks have agreed on; `preemption.is_agreed` reports it to the caller.
    """
    sys.argv[:] = [target.name, *target.argv]
    announce(_place_of(current_world()))  # to `spawn` in the script
    try:
        preemption.call(_call_target, target)
    except SystemExit as error:
        if error.code not in (None, 0):
            raise
    finally:
        announce(None)


def _call_target(target: Target) -> None:
    _set_first_path(_directory_of(target))
    if target.is_module:
        # `alter_sys` makes the module the `__main__` of `sys.modules`, as `python -m` does.
        runpy.run_module(target.name, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(target.name, run_name="__main__")


def run_worker_target(rank: int, target: Target, variables: Mapping[str, str]) -> None:
    """Run the target as a worker of `spawn`, with torchrun's variables: those of this rank, and the given ones of the
    run and its machine. WorkerDiedError if it called `sys.exit` with a code other than 0."""
    world = current_world()
    before = getattr(world.comm, "progress", None)
    accept_device_ids(say_once)  # even where the single worker is this process
    if world.timeline.write_digests is not None:
        world.state.command = describe_command(target)
    try:
        with variables_set({**variables, **_variables_of_rank(world)}):
            take(_place_of(world, os.environ))  # child processes of the script are not this rank
            run_target(target)
        has_met = before is None or world.comm.progress != before  # type: ignore[attr-defined]
        is_help = not {"-h", "--help"}.isdisjoint(target.argv)
        if world.world_size > 1 and world.rank == 0 and not (has_met or is_help or count_of(world, "batches")):
            logger.warning(
                "%s has run on %d ranks, and rank 0 has called no collective: a script that does not divide its work "
                "by rank has done all of it on each; an Accelerator that prepares the model, the optimizer and the "
                "loader makes the ranks train one model",
                *(target.name, world.world_size),
            )
    except StoppedError:
        raise
    except SystemExit as error:
        text = f"rank {rank} ended by sys.exit({error.code!r})"
        raise WorkerDiedError(text, rank, exit_code_of(error)) from error


def exit_code_of(error: BaseException | None) -> int:
    """The exit code of `unisono run`, for a run that ended with an error, or without.

    0 for success; n if a worker ended by `sys.exit(n)`, modulo 256 and never 0; 128 + n if signal n ended it; 143 after
    an agreed stop, 130 after Ctrl-C; 1 for any other error.
    """
    if error is None:
        return 0
    if isinstance(error, ClosedError) and isinstance(error.__cause__, WorkerDiedError):  # by `ProcessContext.stop`
        return exit_code_of(error.__cause__)
    if isinstance(error, SystemExit):  # includes that of an agreed stop
        return error.code % 256 or 1 if isinstance(error.code, int) else 1
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT
    if isinstance(error, WorkerDiedError) and error.exit_code:
        return 128 - error.exit_code if error.exit_code < 0 else error.exit_code % 256 or 1
    return 1


def variables_of_run(run_id: str | None, max_restarts: int) -> dict[str, str]:
    """The torchrun variables that are the same for each rank; libraries detect torchrun by them."""
    return {
        "TORCHELASTIC_RUN_ID": run_id or uuid4().hex,
        "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "ROLE_NAME": "default",
    }


def variables_of_machine() -> dict[str, str]:
    """Those of a run on this machine alone. The port is free: a script's rank zero may serve a store on it."""
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GROUP_WORLD_SIZE": "1"}


def _variables_of_rank(world: World) -> dict[str, str]:
    return {
        **dict.fromkeys(("RANK", "ROLE_RANK"), str(world.rank)),
        **dict.fromkeys(("WORLD_SIZE", "ROLE_WORLD_SIZE"), str(world.world_size)),
        "LOCAL_RANK": str(world.local_rank),
        "LOCAL_WORLD_SIZE": str(world.local_world_size),
        "GROUP_RANK": str(world.node_rank),
        "TORCHELASTIC_RESTART_COUNT": str(world.restart_count),
    }


@contextmanager
def variables_set(variables: Mapping[str, str]) -> Iterator[None]:
    """Set the variables during the block; its changes to other variables persist, except for the place it has taken."""
    before = {name: os.environ.get(name) for name in (*variables, TAKEN)}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _place_of(world: World, variables: Mapping[str, str] | None = None) -> RankPlace:
    variables = variables or {}
    return RankPlace(
        "unisono run",
        rank=world.rank,
        world_size=world.world_size,
        local_rank=world.local_rank,
        local_world_size=world.local_world_size,
        node_rank=world.node_rank,
        address=variables.get("MASTER_ADDR", ""),
        port=int(variables.get("MASTER_PORT", 0)),
        restart_count=world.restart_count,
    )


def _directory_of(target: Target) -> str:
    """The directory that `python` would put first in the import path."""
    return os.getcwd() if target.is_module else os.path.dirname(os.path.abspath(target.name))


def _set_first_path(directory: str) -> None:
    """Put the directory first in `sys.path`, as `python` does with that of a script."""
    if sys.path and sys.path[0] != directory:
        sys.path.insert(0, directory)
