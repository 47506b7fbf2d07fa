"""The README's example runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import warm_scripts
from test_quickstart import is_close

README = Path(__file__).parent.parent / "README.md"
OUTPUTS = re.findall(r"```text\n\$ .*?\n(.*?)```", README.read_text(), re.DOTALL)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_the_example_prints_what_the_page_shows_on_one_device_and_on_two(devices: int, tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    (tmp_path / "train.py").write_text(example)
    (tmp_path / "unisono.py").write_text(warm_scripts.COMMAND)
    code, output, errors = warm_scripts.complete(
        tmp_path / "unisono.py", "run", "--backend", "cpu", "-n", str(devices), "train.py", directory=tmp_path
    )
    assert code == 0, errors
    lines = re.sub(r"^\[rank 0\] ", "", output, flags=re.MULTILINE).splitlines()
    shown = OUTPUTS[devices - 1].splitlines()
    assert len(lines) == len(shown)
    assert all(map(is_close, lines, shown)), lines
