"""A backend that is written for an accelerator by the recipe keeps the law; `make test-toy` shows it without one."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from packages import install

ROOT = Path(__file__).parent.parent.parent
TOY = Path(__file__).parent / "package"
LAW = "tests/contract/test_backend.py"

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="the toy is built by g++"),
    pytest.mark.slow,
    pytest.mark.timeout(300),
]


def run(*command: str, package: Path | None = None) -> str:
    """What an interpreter prints where the toy, and that package, are installed."""
    places = [package, TOY, ROOT] if package else [TOY, ROOT]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, places))}
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return done.stdout


check = partial(run, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--backend", "toy", "-m", "any_family")


def test_a_family_that_was_written_by_the_recipe_keeps_the_law(tmp_path: Path) -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text().partition("\n## A device family\n")[2].partition("\n## ")[0]
    text = text.replace("foo", "toy").replace("Foo", "Toy")
    (code,) = re.findall(r"^```python[^\n]*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    (name,) = re.findall(r'^toy = "(my_package\.backend:ToyBackend)"$', text, re.MULTILINE)
    install(tmp_path, "facts", "", f"[unisono.devices]\ntoy = {name}\n")
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "backend.py").write_text(code)
    check(LAW, package=tmp_path)
