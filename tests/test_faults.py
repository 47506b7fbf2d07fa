"""The tools that make faults see what a script leaves, however it was started."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from faults import Line, Script

LEAVING = """
import subprocess, tempfile
from pathlib import Path
from faults import Line, stand_still
tempfile.mkdtemp(prefix="unisono-1-")
child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
Line(Path("line")).say(child.pid)
stand_still()
"""


@pytest.mark.parametrize("way", ["warm", "file"])
def test_a_script_s_processes_and_directories_are_found_wherever_they_are(tmp_path: Path, way: str) -> None:
    with Line.at(tmp_path / "line").hearing() as ear, Script(LEAVING, tmp_path, way) as script:
        [child] = ear.hear()
        assert {process.pid for process in script.living()} == {script.process.pid, int(child)}
        script.kill(signal.SIGKILL)
        assert script.process.wait(60) == -signal.SIGKILL
        assert [process.pid for process in script.living()] == [int(child)]
        assert len(script.leftovers()) == 1
    assert script.survivors() == []
