"""What `make demo` runs: one hash of the weights on each number of devices."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import warm_scripts

SCRIPT = Path(__file__).parent.parent.parent / "examples" / "demo.py"


@pytest.mark.slow
def test_the_demo_has_one_hash_and_accuracy_on_any_number_of_devices(tmp_path: Path) -> None:
    ends = set()
    for devices in "13":
        picture = tmp_path / devices / "digits.png"
        code, output, errors = warm_scripts.complete(
            SCRIPT, "--devices", devices, "--epochs", "2", "--picture", str(picture), takes_apart=devices == "3"
        )
        assert code == 0, errors
        assert output.count("epoch  1") == 1, "rank zero alone prints"
        assert picture.read_bytes().startswith(b"\x89PNG")
        ends.add("\n".join(output.splitlines()[-2:]))
    (end,) = ends
    found = re.fullmatch(r"test accuracy (\d\d\.\d\d)%\nweights sha256 [0-9a-f]{64}", end)
    assert found, end
    assert float(found[1]) > 90


def test_more_devices_than_virtual_ranks_are_refused() -> None:
    code, _, errors = warm_scripts.complete(SCRIPT, "--devices", "5")
    assert code == 2
    assert "--devices 5 is not in 1 to 4, the number of virtual ranks" in errors
