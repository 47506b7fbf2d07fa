"""The notebook's cells run, in their order."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from modes import preload

NOTEBOOK = Path(__file__).parent.parent.parent / "examples" / "spirals.ipynb"


def cells() -> list[str]:
    found = json.loads(NOTEBOOK.read_text())["cells"]
    return ["".join(cell["source"]) for cell in found if cell["cell_type"] == "code"]


@pytest.mark.slow
def test_its_cells_run_and_two_workers_train_what_one_device_does(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNISONO_BACKEND", "cpu")
    preload()
    scope: dict[str, Any] = {"__name__": "notebook"}  # no module, so that workers get its functions by value
    for number, cell in enumerate(cells()):
        exec(compile(cell, f"cell {number}", "exec"), scope)
    assert scope["first"][-1] < scope["first"][0]
    assert "rank " in capsys.readouterr().out.splitlines()[-1], "the note of the worker's error"
