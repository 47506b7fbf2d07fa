"""A failed test says how to run it again."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Generator
from pathlib import Path

import pytest

_OF_THE_FAMILY = ("PJRT_DEVICE", "CPU_NUM_DEVICES")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        report.sections.append(("to run it again", command(item.config, item.nodeid)))
    return report


def command(config: pytest.Config, nodeid: str) -> str:
    family = os.environ.get("UNISONO_BACKEND")
    environ = [f"{name}={os.environ[name]}" for name in _OF_THE_FAMILY if family and name in os.environ]
    python = Path(sys.executable)
    if python.is_relative_to(config.rootpath):
        python = python.relative_to(config.rootpath)
    words = [*environ, str(python), "-m", "pytest", "-n0"]
    words += ["--backend", family] if family else []
    seed = config.getoption("randomly_seed", None)
    words += [f"--randomly-seed={seed}"] if seed is not None else []
    return shlex.join([*words, nodeid])
