"""The example that survives: killed by SIGTERM in mid-epoch, it continues from there on another number of devices."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
import sklearn.datasets  # noqa: F401 - here, since it sets environment variables
import warm_scripts

SCRIPT = Path(__file__).parent.parent.parent / "examples" / "resume.py"


@pytest.mark.slow
@pytest.mark.parametrize(("signum", "then"), [(signal.SIGTERM, "1"), (signal.SIGKILL, "4 --engine local")])
def test_a_run_that_is_ended_goes_on_to_the_end_on_other_devices(tmp_path: Path, signum: int, then: str) -> None:
    def arguments(epochs: int) -> list[str]:
        return ["--directory", str(tmp_path), "--epochs", str(epochs), "--backend", "cpu"]

    checkpoints = tmp_path / "checkpoints"
    with warm_scripts.run(SCRIPT, *arguments(200)) as script:
        while script.poll() is None and not (checkpoints / "latest").exists():
            signal.sigtimedwait([], 0.01)
        script.send_signal(signum)
        code = script.wait(60)
        output = script.communicate(60)
    assert code in (143, -signum), output
    saved = int((checkpoints / "latest").read_text().rpartition("_")[2])
    code, output, errors = warm_scripts.complete(SCRIPT, *arguments(6), "--devices", *then.split())
    assert code == 0, errors
    assert re.search(r"test accuracy \d\d\.\d\d%", output)
    assert int((checkpoints / "latest").read_text().rpartition("_")[2]) > saved
