"""One training function, three ways: the same result, whatever it ran on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import warm_scripts
from packages import load_script

SCRIPT = Path(__file__).parent.parent.parent / "examples" / "train_digits.py"

STEPS = 23  # 1437 training samples in global batches of 64, the last of 29

# In float64 only the order of the additions differs between the modes, a relative 1e-16 each, which an epoch of
# training amplifies to less than 1e-12 here. A wrong weight of the tail would show as 1e-3.
TIGHT: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-11}


EXAMPLE = load_script(SCRIPT)  # here, since what it imports sets environment variables


@pytest.fixture(autouse=True)
def _workers_can_import_the_example(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))


@pytest.mark.parametrize("mode", ["threads", pytest.param("processes", marks=pytest.mark.slow)])
def test_every_mode_gives_the_losses_and_weights_of_one_device(mode: str) -> None:
    expected = EXAMPLE.run("solo", epochs=1, dtype=torch.float64)
    result = EXAMPLE.run(mode, 2, epochs=1, dtype=torch.float64)
    assert len(result.losses) == STEPS
    torch.testing.assert_close(torch.tensor(result.losses), torch.tensor(expected.losses), **TIGHT)
    assert len(result.weights) == 2
    for name, weight in expected.weights[0].items():
        torch.testing.assert_close(result.weights[0][name], weight, **TIGHT)
        for other in result.weights[1:]:
            assert torch.equal(other[name], result.weights[0][name]), f"the ranks' {name} differ in their bits"
    assert sum(each.samples for each in result.report.ranks) == 1437, "each training sample once"
    assert (result.accuracy * 360) == pytest.approx(round(result.accuracy * 360), abs=1e-9), "over 360 test samples"
    assert result.accuracy == expected.accuracy


@pytest.mark.slow
def test_the_script_trains_and_leaves_a_picture(tmp_path: Path) -> None:
    picture = tmp_path / "deep" / "digits.png"
    arguments = ["--mode", "processes", "--epochs", "1", "--picture", str(picture)]
    code, output, errors = warm_scripts.complete(SCRIPT, *arguments, takes_apart=True)
    assert code == 0, errors
    assert output.count("epoch  1") == 1, "rank zero alone prints"
    for words in ("waiting", "moving", "body", "reducing", "stepping", "samples/s", "test accuracy", str(picture)):
        assert words in output
    assert picture.read_bytes().startswith(b"\x89PNG")
