"""Each of these examples trains, on any number of ranks, what its plain twin does by torch alone on one device.

The twin's DataLoader has an order of its own; here it gets the order of Unisono's, and nothing else of it.
"""

from __future__ import annotations

import difflib
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import sklearn.datasets  # noqa: F401 - here, since it sets environment variables
import torch
import warm_scripts
from modes import PROCESSES_2, THREADS_2, Mode
from torch.utils.data import DataLoader

from unisono import DeviceLoader

EXAMPLES = Path(__file__).parent.parent.parent / "examples"

SMALL: dict[str, dict[str, Any]] = {
    "images": {"epochs": 2},
    "gan": {"epochs": 1},
    "gpt": {"epochs": 1, "limit": 6_000},
    "contrastive": {"epochs": 1},
    "finetune_transformer": {"epochs": 1, "limit": 3_000},
}
"""The examples, and how they are made small."""

PLACES = [*((name, THREADS_2) for name in SMALL), ("images", PROCESSES_2)]
LINES_THAT_CHANGE = 30


@pytest.fixture(autouse=True)
def examples(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.chdir(tmp_path)


def load(name: str) -> Any:
    if "transformer" in name and find_spec("transformers") is None:
        pytest.skip("transformers is not installed: pip install 'unisono[transformers]'")
    return import_module(name)


def train_twin(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    twin = load(f"{name}_plain")
    monkeypatch.setattr(twin, "DataLoader", lambda *args, **options: DeviceLoader(DataLoader(*args, **options), seed=0))
    return twin.train(**SMALL[name])


def train(name: str, mode: Mode, directory: Path) -> list[Any]:
    options = dict(SMALL[name], **({"directory": str(directory)} if name == "images" else {}))
    path = str(EXAMPLES)
    return mode.run(lambda: _train(path, name, options))


def _train(path: str, name: str, options: dict[str, Any]) -> Any:
    import sys

    sys.path.insert(0, path)
    try:
        return import_module(name).train(0, **options)
    finally:
        sys.path.remove(path)


@pytest.mark.parametrize(("name", "mode"), PLACES, ids=str)
def test_it_trains_as_its_twin_does(name: str, mode: Mode, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    expected = train_twin(name, monkeypatch)
    for found in train(name, mode, tmp_path):
        torch.testing.assert_close(_numbers(found), _numbers(expected), rtol=0, atol=2e-3)


def _numbers(result: Any) -> Any:
    """A result with its tensors, and lists of numbers, as tensors."""
    if isinstance(result, tuple):
        return tuple(map(_numbers, result))
    return torch.as_tensor(result, dtype=torch.float64)


@pytest.mark.parametrize("name", SMALL)
def test_few_lines_are_other_than_its_twins(name: str) -> None:
    texts = [(EXAMPLES / f"{each}.py").read_text() for each in (f"{name}_plain", name)]
    before, after = (text[text.index("from __future__") : text.index("if __name__")].splitlines() for text in texts)
    changed = [line for line in difflib.ndiff(before, after) if line.startswith("+ ")]
    assert 0 < len(changed) <= LINES_THAT_CHANGE


@pytest.mark.slow
def test_an_example_runs_as_a_script_and_resumes(tmp_path: Path) -> None:
    arguments = ["--backend", "cpu", "--directory", str(tmp_path / "run")]
    code, output, errors = warm_scripts.complete(EXAMPLES / "images.py", "--devices", "2", "--epochs", "2", *arguments)
    assert code == 0, errors
    assert output.count("epoch 1: loss") == 1, "rank zero alone prints"
    code, output, errors = warm_scripts.complete(EXAMPLES / "images.py", "--devices", "1", "--epochs", "2", *arguments)
    assert code == 0, errors
    assert "epoch" not in output, "both epochs are done"
    assert "test accuracy" in output
