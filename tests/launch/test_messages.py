"""What is said to the user while the workers come up."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

import unisono
from unisono.launch import group, messages
from unisono.launch.spawn import spawn


@pytest.mark.parametrize("is_watched", [True, False])
def test_who_watches_is_told_what_takes_long(monkeypatch, capsys, caplog, is_watched):
    monkeypatch.setattr(group, "SLOW_S", 0.0)
    monkeypatch.setattr(messages, "_is_watched", lambda: is_watched)
    with caplog.at_level(logging.INFO, "unisono.launch.messages"):
        assert spawn(lambda index: index, nprocs=2) == [0, 1]
    shown = [line for line in capsys.readouterr().err.splitlines() if "have not begun" in line]
    logged = [each.getMessage() for each in caplog.records if "have not begun" in each.getMessage()]
    assert (len(shown), len(logged)) == ((1, 0) if is_watched else (0, 1))
    assert (shown + logged)[0].removeprefix("unisono: ").startswith("2 of 2 workers have not begun after 0 s: ")


def test_nothing_is_said_when_they_have_begun(monkeypatch, capsys):
    monkeypatch.setattr(group, "SLOW_S", 60.0)
    monkeypatch.setattr(messages, "_is_watched", lambda: True)
    spawn(lambda index: index, nprocs=2)
    assert "have not begun" not in capsys.readouterr().err


SCRIPT = """
import logging
logging.basicConfig(level=logging.INFO)
import unisono.launch.group
unisono.launch.group.SLOW_S = 0.0
{}
if __name__ == "__main__":
    unisono.spawn(print, nprocs=2, backend="cpu")
"""


@pytest.mark.slow
@pytest.mark.parametrize(("extra", "is_advised"), [("", True), ("import unisono.cli.main", False)])
def test_warm_is_advised_to_scripts_alone(extra, is_advised, tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT.format(extra))
    environ = {**os.environ, "PYTHONPATH": str(Path(unisono.__file__).parent.parent)}
    run = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=100, check=True, env=environ)
    (line,) = [each for each in run.stderr.splitlines() if "torch is being imported" in each]
    assert line.endswith("; unisono.warm() at the top of a script does that meanwhile") == is_advised
