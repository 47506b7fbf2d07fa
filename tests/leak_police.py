"""The leak police: a test that leaves something behind fails, whatever it asserted.

Watched: threads (ours by name, and any that is no daemon), child processes and those of a zygote, the environment, the
default process group, the ambient world, open files. What is about to end gets a few seconds, so a test need not wait
for it.

Not ours, and not watched: the resource trackers of `multiprocessing` and of other libraries, which live as long as the
interpreter.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch._dynamo  # noqa: F401 - the first optimizer imports it, and it sets environment variables
import torch.distributed as dist
import warm_scripts

from unisono import world
from unisono.launch.starting import zygote_client

PATIENCE_S = 30.0
_PROC = Path("/proc")
_NOT_OURS = {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR"}  # which torch 2.9 sets when it first compiles something


@dataclass(frozen=True)
class Footprint:
    """What this process holds at one moment."""

    threads: set[threading.Thread]
    children: set[int]
    environ: dict[str, str]
    files: dict[int, str]
    has_group: bool
    has_world: bool
    zygotes: frozenset[int]  # and the interpreter that scripts are forked from: they outlive a test


def footprint() -> Footprint:
    zygotes = {client.process.pid for client in zygote_client.clients.values()}
    zygotes |= {*filter(None, [warm_scripts.server_pid()])}
    parents = {os.getpid(), *zygotes}
    return Footprint(
        threads={thread for thread in threading.enumerate() if thread.name.startswith("unisono-") or not thread.daemon},
        children={child for parent in parents for child in _descendants(parent)} - parents,
        environ={name: value for name, value in os.environ.items() if name not in _NOT_OURS},
        files=_open_files(),
        has_group=dist.is_initialized(),
        has_world=world.given_world() is not None,
        zygotes=frozenset(zygotes),
    )


def leaks(before: Footprint, after: Footprint) -> list[str]:
    """What is there after and was not there before, in words."""
    found = [f"thread {thread.name!r}" for thread in after.threads - before.threads]
    found += [_describe(child) for child in _leaked_children(before, after)]
    if after.environ != before.environ:
        changed = {name for name, _ in before.environ.items() ^ after.environ.items()}
        found += [f"environment variable {name}={after.environ.get(name)!r}" for name in sorted(changed)]
    if after.has_group and not before.has_group:
        found.append("an initialised default process group")
    if after.has_world and not before.has_world:
        found.append("a world, of this thread or of the process")
    return found + _leaked_files(before, after)


@pytest.fixture(autouse=True)
def leak_police() -> Iterator[None]:
    world._solo = None  # what a loop leaves in the world of one is not the next test's
    before = footprint()
    yield
    found = leaks(before, footprint())
    deadline = time.monotonic() + PATIENCE_S
    while found and time.monotonic() < deadline:
        _wait_for_the_ending(before)
        found = leaks(before, footprint())
    if found:
        _clean(before)
        pytest.fail("the test leaked " + "; ".join(found), pytrace=False)


def _leaked_children(before: Footprint, after: Footprint) -> list[psutil.Process]:
    """A tracker is nobody's leak."""
    found = []
    for pid in after.children - before.children:
        with contextlib.suppress(psutil.Error):
            child = psutil.Process(pid)
            if not _is_tracker(child):
                found.append(child)
    return found


def _leaked_files(before: Footprint, after: Footprint) -> list[str]:
    if len(after.files) <= len(before.files):
        return []
    trackers = _tracker_files()
    opened = {
        number: target
        for number, target in after.files.items()
        if before.files.get(number) != target and number not in trackers
    }
    if any(target.startswith("/dev/nvidia") for target in opened.values()):
        return []  # whenever CUDA starts another part of it, its driver opens more, pipes and sockets among them
    not_ours = trackers & (after.files.keys() - before.files.keys())
    growth = len(after.files) - len(before.files) - len(not_ours)
    growth -= len(after.zygotes - before.zygotes)  # a zygote's control socket stays, and that of warm scripts
    return [f"{growth} open file(s) among {opened}"] if growth > 0 else []


def _is_tracker(child: psutil.Process) -> bool:
    return "resource_tracker import main" in " ".join(child.cmdline())


def _tracker_files() -> set[int]:
    """The writing ends of the pipes to the trackers: multiprocessing's, and those that libraries have brought."""
    trackers = [
        getattr(module, "_resource_tracker", None)
        for name, module in list(sys.modules.items())
        if name.endswith("resource_tracker")
    ]
    return {tracker._fd for tracker in trackers if getattr(tracker, "_fd", None) is not None}


def _wait_for_the_ending(before: Footprint) -> None:
    """Give what is just ending a moment: join it where it can be joined; garbage may hold files."""
    now = footprint()
    for thread in now.threads - before.threads:
        with contextlib.suppress(RuntimeError):  # it is being started, by somebody who was interrupted meanwhile
            thread.join(0.05)
    psutil.wait_procs(_leaked_children(before, now), timeout=0.05)
    gc.collect()
    threading.Event().wait(0.01)


def _clean(before: Footprint) -> None:
    """The next test is not to blame for this one."""
    for child in _leaked_children(before, footprint()):
        with contextlib.suppress(psutil.Error):
            child.kill()
    if dist.is_initialized() and not before.has_group:
        dist.destroy_process_group()
    current = os.environ.get("PYTEST_CURRENT_TEST")
    os.environ.clear()
    os.environ.update(before.environ)
    if current is not None:
        os.environ["PYTEST_CURRENT_TEST"] = current
    world._thread_world.set(None)
    world.set_process_world(None)


def _descendants(pid: int) -> set[int]:
    found = _children(pid)
    return found.union(*map(_descendants, found))


def _children(pid: int) -> set[int]:
    """The direct children, from the files in which the kernel lists them; those that have ended and wait are there."""
    try:
        lists = [task.joinpath("children").read_text() for task in (_PROC / str(pid) / "task").iterdir()]
    except OSError:  # no such list on this system, or a thread that has just ended
        with contextlib.suppress(psutil.Error):
            return {child.pid for child in psutil.Process(pid).children()}
        return set()
    return {int(child) for each in lists for child in each.split()}


def _describe(child: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return f"child process {child.pid} ({child.status()}): {' '.join(child.cmdline())[:120]}"
    return f"child process {child.pid}"


def _open_files() -> dict[int, str]:
    found: dict[int, str] = {}
    directory = _PROC / "self" / "fd"
    if directory.exists():
        for number in os.listdir(directory):
            with contextlib.suppress(OSError):  # the descriptor of this very listing is gone by now
                found[int(number)] = os.readlink(directory / number)
    return found
