"""In functions that Ray Train and submitit call, a plain loop trains what it trains alone."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections import Counter
from pathlib import Path

import pytest
import warm_scripts
from called_by import EPOCHS, SAMPLES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(480)]


def weights(engine: str, directory: Path) -> list[float]:
    """The weight that each rank has in the end, once the samples that were trained on are checked."""
    directory.mkdir()
    script = Path(__file__).with_name("called_by.py")
    environ = {**os.environ, "PYTHONPATH": ":".join(sys.path)}
    code, _, errors = warm_scripts.complete(script, engine, str(directory), environ=environ, timeout=400)
    assert code == 0, errors
    samples = [line for path in directory.glob("ledger-*") for line in path.read_text().splitlines()]
    assert Counter(samples) == {str(number): EPOCHS for number in range(1, SAMPLES + 1)}
    return [float(path.read_text()) for path in directory.glob("weight-*")]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> float:
    """The weight that one device has in the end."""
    [found] = weights("nobody", tmp_path_factory.mktemp("nobody") / "alone")
    return found


@pytest.mark.parametrize("engine", ["ray", "submitit"])
def test_the_weights_are_those_of_one_device_and_each_sample_counts_once(
    engine: str, alone: float, tmp_path: Path
) -> None:
    if importlib.util.find_spec(engine) is None:
        pytest.skip(f"needs {engine}: make test-engines")
    assert weights(engine, tmp_path / engine) == pytest.approx([alone] * 2, rel=1e-5)
    if engine == "submitit":
        assert len(list((tmp_path / engine).glob("waits-*"))) == 2  # the job was stopped, and requeued
