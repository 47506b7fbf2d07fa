"""The leak police catches what it is there for, and lets a clean test pass."""

from __future__ import annotations

import leak_police
import pytest

WORLD = "a world, of this thread or of the process"
LEAKS = {
    "a named thread": (
        "gate = threading.Event(); started = threading.Thread(target=gate.wait, name='unisono-reader', daemon=True)\n"
        "    started.start(); held.append(gate)",
        "thread 'unisono-reader'",
    ),
    "a thread that is no daemon": (
        "gate = threading.Event(); threading.Thread(target=gate.wait, args=(60,), name='mine').start()\n"
        "    held.append(gate)",
        "thread 'mine'",
    ),
    "a child": ("held.append(subprocess.Popen(['sleep', '60']))", "child process"),
    "a variable": ("os.environ['LEAKED'] = 'yes'", "environment variable LEAKED='yes'"),
    "a removed variable": ("del os.environ['HOME']", "environment variable HOME=None"),
    "an open file": ("held.append(open(__file__))", "1 open file(s) among"),
    "a process group": (
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)",
        "an initialised default process group",
    ),
    "a process's world": ("set_process_world(solo_world())", WORLD),
    "a thread's world": ("held.append(use_world(solo_world())); held[-1].__enter__()", WORLD),
}

HEAD = """
import os, subprocess, threading
import torch.distributed as dist
from unisono.world import set_process_world, solo_world, use_world
held = []
"""


@pytest.fixture
def policed(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.setattr(leak_police, "PATIENCE_S", 0.2)
    pytester.makeconftest("pytest_plugins = ['leak_police']")
    return pytester


@pytest.mark.parametrize("name", LEAKS)
def test_a_leak_fails_the_test_that_leaks(policed: pytest.Pytester, name: str) -> None:
    line, told = LEAKS[name]
    release = "def teardown_module():\n    for each in held:\n        getattr(each, 'set', lambda: None)()\n"
    release += "        getattr(each, 'close', lambda: None)()\n        getattr(each, 'wait', lambda: None)()\n"
    policed.makepyfile(HEAD + f"def test_leaks():\n    {line}\ndef test_next_is_clean():\n    pass\n" + release)
    result = policed.runpytest_inprocess("-p", "no:cacheprovider", "-p", "no:randomly")
    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines([f"*the test leaked *{told.replace('[', '[[]')}*"])


def test_what_is_tidied_up_or_just_ending_passes(policed: pytest.Pytester) -> None:
    policed.makepyfile(
        HEAD
        + """
def test_tidy(monkeypatch, tmp_path):
    monkeypatch.setenv("LEAKED", "no")
    with use_world(solo_world()), open(tmp_path / "file", "w"):
        pass
    subprocess.run(["true"])
def test_just_ending():
    threading.Timer(0.05, lambda: None).start()
"""
    )
    policed.runpytest_inprocess("-p", "no:cacheprovider", "-p", "no:randomly").assert_outcomes(passed=2)
