"""A worker's death by the out-of-memory killer is told from one by `kill -9`, with the limit."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import psutil
import pytest

from unisono.devices.cores import cgroup_directories
from unisono.errors import WorkerDiedError
from unisono.launch.spawn import spawn
from unisono.launch.watching.memory import OomWatch, memory_limit
from unisono.world import current_world

GIB = 1 << 30
MIB = 1 << 20
LIMIT = 96 * MIB
STEP = 8 * MIB


def a_machine(root: Path, group_kills: int | None = 0, machine_kills: int | None = 0, limit: int = 8 * GIB) -> Path:
    """A file system with the counters of one control group and of the machine."""
    group = root / "sys/fs/cgroup/job"
    (root / "proc/self").mkdir(parents=True, exist_ok=True)
    group.mkdir(parents=True, exist_ok=True)
    (root / "proc/self/cgroup").write_text("0::/job\n")
    (group / "memory.max").write_text(f"{limit}\n")
    kills = "" if group_kills is None else f"oom_kill {group_kills}\n"
    (group / "memory.events").write_text(f"oom {group_kills}\n{kills}oom_group_kill 0\n")
    (root / "proc/vmstat").write_text("pgfault 12\n" + ("" if machine_kills is None else f"oom_kill {machine_kills}\n"))
    return root


HALF = psutil.virtual_memory().total // 2
VERDICTS = {  # the kills of the control group and of the machine, before and afterwards
    "in the group": ((2, 7), (3, 8), r"the kernel's out-of-memory killer ended it \(1 in its control group"),
    "on the machine": ((0, 3), (0, 4), r"perhaps the kernel's out-of-memory killer ended it \(1 on the machine since"),
    "beside the group": ((None, 3), (None, 4), "perhaps the kernel's out-of-memory killer ended it"),
    "none": ((2, 7), (2, 7), r"the kernel counted no out-of-memory kill meanwhile, so another process .*\(kill -9"),
    "uncounted": ((None, None), (None, None), "this system does not report whether its out-of-memory killer did it$"),
}


@pytest.mark.parametrize("name", VERDICTS)
def test_what_the_kernel_has_counted_says_who_has_ended_a_worker(tmp_path, name):
    before, after, words = VERDICTS[name]
    watch = OomWatch(root=a_machine(tmp_path, *before, HALF))
    a_machine(tmp_path, *after, HALF)
    found = watch.verdict()
    assert re.match(f"; {words}", found)
    limit = f"the limit of its control group is {HALF / GIB:.1f} GiB, for everything that runs there"
    assert (limit in found and "a smaller batch, fewer loader workers" in found) == ("ended it" in words)


def test_the_least_limit_on_the_way_up_counts(tmp_path):
    total = psutil.virtual_memory().total
    assert memory_limit(root=a_machine(tmp_path, limit=total // 4)) == (total // 4, "of its control group")
    (tmp_path / "sys/fs/cgroup/memory.max").write_text(f"{total // 8}\n")
    assert memory_limit(root=tmp_path) == (total // 8, "of its control group")
    assert memory_limit(root=tmp_path / "nowhere") == (total, "of the machine")
    assert 0 < memory_limit()[0] <= total


# A real one.


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group below our own, which has little memory."""
    own = next((each for each in cgroup_directories("memory") if each.is_dir()), None)
    if own is None:
        pytest.skip("no control group of memory is mounted")
    path = own / f"unisono-test-{uuid4().hex[:8]}"
    try:
        path.mkdir()
    except OSError as error:
        pytest.skip(f"a control group cannot be made here: {error}")
    try:
        yield path
    finally:
        for _ in range(100):  # a process leaves it a moment after it was reaped
            with contextlib.suppress(OSError):
                path.rmdir()
                break
            threading.Event().wait(0.02)


def confine(group: Path) -> None:
    limits = {"memory.max": LIMIT, "memory.limit_in_bytes": LIMIT, "memory.swap.max": 0, "memory.swappiness": 0}
    done = set()
    for name, value in limits.items():
        with contextlib.suppress(OSError):
            if (group / name).exists():
                (group / name).write_text(str(value))
                done.add(name)
    if not done & {"memory.max", "memory.limit_in_bytes"}:
        pytest.skip("this control group takes no limit of memory")


def verdict_of_a_kill_by_hand() -> str:
    process = subprocess.Popen(["sleep", "1000"])
    watch = OomWatch(process.pid)
    process.kill()
    assert process.wait() == -9
    return watch.verdict()


@pytest.mark.skipif(not os.path.exists("/proc/vmstat"), reason="such kills are not counted here")
def test_a_kill_by_hand_is_not_taken_for_the_killers():
    # The killer may strike anywhere on the machine meanwhile, as in the next test.
    verdicts = [verdict_of_a_kill_by_hand() for _ in range(20)]
    assert any(each.startswith("; the kernel counted no out-of-memory kill meanwhile") for each in verdicts)


def test_a_worker_that_the_killer_has_ended_is_told_with_the_way_out(group):
    confine(group)

    def grow(index):
        if index == 1:
            (group / "cgroup.procs").write_text(str(os.getpid()))
            held = []
            while True:
                held.append(bytearray(b"x") * STEP)
        current_world().comm.barrier()

    with pytest.raises(WorkerDiedError, match=r"rank 1 .* killed by SIGKILL before fn returned; .*out-of-memory") as e:
        spawn(grow, nprocs=2)
    assert "a smaller batch, fewer loader workers" in str(e.value)
