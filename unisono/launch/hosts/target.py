"""What `unisono run` is asked to run: a script, or a function of a module.

`script.py` runs as `python script.py` would run it: as `__main__`, with its arguments in `sys.argv` and its directory
first in `sys.path`. It has its world already; `unisono.spawn(fn)` and `unisono.join_world()` in it find that they are
in one. `package.module:function` is imported and called with the rank, as `spawn` does; arguments follow in `sys.argv`.
"""

from __future__ import annotations

import difflib
import importlib
import os
import runpy
import sys
from collections.abc import Sequence
from typing import Any

from unisono import preemption
from unisono.errors import StoppedError, WorkerDiedError
from unisono.launch.hosts.environment import Place, announce
from unisono.world import World, current_world


def check_target(target: str) -> None:
    """Refuse a target that cannot be run, before anything is started.

    Raises:
        ValueError: there is no such script, or the text is neither a script nor `module:function`.
        ImportError, AttributeError, TypeError: there is no such module or function, or it cannot be called.
    """
    if _is_script(target):
        if not os.path.isfile(target):
            raise ValueError(f"there is no script {target!r} in {os.getcwd()}{_similar_files(target)}")
    else:
        find_function(target)


def find_function(target: str) -> Any:
    """The function that `package.module:function` names."""
    module_name, _, path = target.partition(":")
    if not module_name or not path:
        raise ValueError(f"{target!r} is neither a script (script.py) nor a function (package.module:function)")
    _set_first_path(os.getcwd())
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there, and imports one that is not
        raise ModuleNotFoundError(
            f"{target!r}: there is no module {error.name!r} here or in the import path; name it as in an import"
        ) from None
    for name in path.split("."):
        if not hasattr(found, name):
            close = difflib.get_close_matches(name, dir(found), 1)
            hint = f"; is it {close[0]!r}?" if close else ""
            raise AttributeError(f"{target!r}: {module_name} has no {name!r}{hint}")
        found = getattr(found, name)
    if not callable(found):
        raise TypeError(f"{target!r} is a {type(found).__name__}; name a function that takes the rank")
    return found


def run_target(rank: int, target: str, argv: Sequence[str]) -> None:
    """Run it in this process, which has its world; `sys.exit(0)` is a good end, as for any script.

    So is an early end that the ranks have agreed on: whoever runs the target finds it noted (`preemption.is_agreed`).

    Raises:
        BaseException: what the target raised; SystemExit with another code than 0 too.
    """
    sys.argv[:] = [target, *argv]
    announce(_place_of(current_world()))  # to `spawn` in the script
    try:
        if _is_script(target):
            _set_first_path(os.path.dirname(os.path.abspath(target)))
            runpy.run_path(target, run_name="__main__")
        else:
            find_function(target)(rank)
    except SystemExit as error:
        is_stop = isinstance(error, StoppedError) and preemption.is_agreed()
        if error.code not in (None, 0) and not is_stop:
            raise
    finally:
        announce(None)


def run_worker_target(rank: int, target: str, argv: Sequence[str]) -> None:
    """Run it as a worker of `spawn`, whose words about `sys.exit` are for functions: a script may call it.

    Raises:
        WorkerDiedError: the target called `sys.exit` with another code than 0.
        BaseException: what the target raised.
    """
    try:
        run_target(rank, target, argv)
    except StoppedError:
        raise
    except SystemExit as error:
        text = f"rank {rank} ended by sys.exit({error.code!r})"
        raise WorkerDiedError(text, rank, exit_code_of(error)) from error


def exit_code_of(error: SystemExit) -> int:
    """What a process ends with by that failure: a byte, as the system keeps no more, but never 0."""
    return error.code % 256 or 1 if isinstance(error.code, int) else 1


def _place_of(world: World) -> Place:
    return Place(
        "unisono run",
        rank=world.rank,
        world_size=world.world_size,
        local_rank=world.local_rank,
        local_world_size=world.local_world_size,
        node_rank=world.node_rank,
        address="",
        port=0,
        restart_count=world.restart_count,
    )


def _is_script(target: str) -> bool:
    return target.endswith((".py", ".pyc")) or os.path.isfile(target)


def _set_first_path(directory: str) -> None:
    """Put it where `python` puts the directory of a script."""
    if sys.path and sys.path[0] != directory:
        sys.path.insert(0, directory)


def _similar_files(target: str) -> str:
    directory = os.path.dirname(target) or "."
    if not os.path.isdir(directory):
        return f"; there is no directory {directory!r} either"
    close = difflib.get_close_matches(os.path.basename(target), os.listdir(directory), 1)
    return f"; is it {os.path.join(os.path.dirname(target), close[0])!r}?" if close else ""
