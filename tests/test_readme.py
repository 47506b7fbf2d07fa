"""The README's example runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import warm_scripts

README = Path(__file__).parent.parent / "README.md"


@pytest.mark.slow
def test_the_example_of_the_readme_runs_and_both_ranks_agree(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    script = tmp_path / "example.py"
    script.write_text(example)
    code, output, errors = warm_scripts.complete(script)
    assert code == 0, errors
    lines = output.splitlines()
    losses = [float(line.rpartition(" ")[2]) for line in lines if line.startswith("epoch")]
    assert len(losses) == 3, "rank zero alone prints, once per epoch"
    assert losses[-1] < losses[0]
    first, second = eval(lines[-1])
    assert first == second
