"""The leak police: a test that leaves something behind fails, whatever it asserted.

Watched: threads (ours by name, and any that is no daemon), child processes, the environment, the default process
group, the ambient world, open files. What is just ending gets a moment, so a test need not wait for it.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
import torch._dynamo  # noqa: F401 - the first optimizer imports it, and it sets environment variables
import torch.distributed as dist
from hypothesis import settings

from unisono import backends, world
from unisono.launch.starting import nursery as nurseries

pytest_plugins = ["pytester"]

settings.register_profile("unisono", deadline=None, max_examples=60, print_blob=True)
settings.load_profile("unisono")

PATIENCE_S = 3.0
_OPEN_FILES = Path("/proc/self/fd")
_NOT_OURS = {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR"}  # which torch 2.9 sets when it first compiles something


def pytest_addoption(parser: pytest.Parser) -> None:
    """Take the family at once: before a test module, or the conftest.py of a folder, asks which one it is.

    Lazy devices are loaded now: their settings are for the whole process.
    """
    parser.addoption("--backend", default=None, help="the family of devices for tests that run on any")
    if (family := parser.parse_known_args(sys.argv[1:]).backend) is not None:
        os.environ["UNISONO_BACKEND"] = family
        backends.pick_backend().device(0)


@dataclass(frozen=True)
class Footprint:
    """What this process holds at one moment."""

    threads: set[threading.Thread]
    children: dict[int, psutil.Process]
    environ: dict[str, str]
    files: dict[int, str]
    has_group: bool
    has_thread_world: bool
    has_process_world: bool
    zygotes: frozenset[int] = field(compare=False)


def footprint() -> Footprint:
    zygotes = frozenset(nursery.pid for nursery in nurseries._nurseries.values())
    return Footprint(
        threads={thread for thread in threading.enumerate() if thread.name.startswith("unisono-") or not thread.daemon},
        children={child.pid: child for child in _living_children() if child.pid not in zygotes},
        environ={name: value for name, value in os.environ.items() if name not in _NOT_OURS},
        files=_open_files(),
        has_group=dist.is_initialized(),
        has_thread_world=world._thread_world.get() is not None,
        has_process_world=world._process_world is not None,
        zygotes=zygotes,
    )


def leaks(before: Footprint, after: Footprint) -> list[str]:
    """What is there after and was not there before, in words."""
    found = [f"thread {thread.name!r}" for thread in after.threads - before.threads]
    found += [_describe(child) for pid, child in after.children.items() if pid not in before.children]
    changed = {name for name, _ in before.environ.items() ^ after.environ.items()}
    found += [f"environment variable {name}={after.environ.get(name)!r}" for name in sorted(changed)]
    if after.has_group and not before.has_group:
        found.append("an initialised default process group")
    if after.has_thread_world and not before.has_thread_world:
        found.append("this thread's world")
    if after.has_process_world and not before.has_process_world:
        found.append("the process's world")
    opened = {number: target for number, target in after.files.items() if before.files.get(number) != target}
    growth = (
        len(after.files) - len(before.files) - len(after.zygotes - before.zygotes)
    )  # a zygote's control socket stays
    if growth > 0:
        found.append(f"{growth} open file(s) among {opened}")
    return found


@pytest.fixture(autouse=True)
def leak_police() -> Iterator[None]:
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


def _wait_for_the_ending(before: Footprint) -> None:
    """Give what is just ending a moment: join it where it can be joined; garbage may hold files."""
    now = footprint()
    for thread in now.threads - before.threads:
        thread.join(0.05)
    psutil.wait_procs([child for pid, child in now.children.items() if pid not in before.children], timeout=0.05)
    gc.collect()
    threading.Event().wait(0.01)


def _clean(before: Footprint) -> None:
    """The next test is not to blame for this one."""
    for child in (child for pid, child in footprint().children.items() if pid not in before.children):
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


def _living_children() -> list[psutil.Process]:
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if child.status() != psutil.STATUS_ZOMBIE or child.ppid() == os.getpid():
                found.append(child)
    return found


def _describe(child: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return f"child process {child.pid} ({child.status()}): {' '.join(child.cmdline())[:120]}"
    return f"child process {child.pid}"


def _open_files() -> dict[int, str]:
    found: dict[int, str] = {}
    if _OPEN_FILES.exists():
        for number in os.listdir(_OPEN_FILES):
            with contextlib.suppress(OSError):  # the descriptor of this very listing is gone by now
                found[int(number)] = os.readlink(_OPEN_FILES / number)
    return found
