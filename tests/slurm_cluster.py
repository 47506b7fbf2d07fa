"""A SLURM cluster for the tests that need one."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

Entry = tuple[tuple[str, ...], dict[str, str]]


@pytest.fixture(scope="package")
def slurm_entry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Entry]:
    """What precedes a command in the cluster's namespaces, and its variables."""
    missing = [name for name in ("slurmctld", "slurmd", "munged", "unshare", "ip") if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"needs root, and {missing}: apt-get install slurm-wlm munge iproute2")
    directory = tmp_path_factory.mktemp("slurm")
    for path in (directory, *directory.parents):
        if os.stat(path).st_uid == 0 and path != Path("/"):
            path.chmod(path.stat().st_mode | 0o055)  # munged wants a path that others can look through
    command = ["unshare", "--mount", "--pid", "--net", "--fork", "--kill-child", "--mount-proc", "bash"]
    cluster = subprocess.Popen([*command, str(Path(__file__).parent / "engines" / "cluster.sh"), str(directory)])
    try:
        wait_until((directory / "ready").exists, lambda: f"no cluster: {cluster.poll()}", limit_s=30.0)
        inside = psutil.Process(cluster.pid).children()[0].pid
        enter = ("nsenter", f"--target={inside}", "--mount", "--net", "--pid", "--wd=.")
        yield enter, {"SLURM_CONF": str(directory / "slurm.conf")}
    finally:
        cluster.kill()  # and with it, by --kill-child, the first process of its namespace, and all others
        cluster.wait()


def wait_until(is_true: Callable[[], bool], describe: Callable[[], str], limit_s: float = 90.0) -> None:
    deadline = time.monotonic() + limit_s
    while not is_true():
        assert time.monotonic() < deadline, describe()
        time.sleep(0.1)
