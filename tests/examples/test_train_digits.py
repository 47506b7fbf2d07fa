"""One training function, three ways: the same result, whatever it ran on."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import warm_scripts
from packages import load_script

SCRIPT = Path(__file__).parent.parent.parent / "examples" / "train_digits.py"

STEPS = 23  # 1437 training samples in global batches of 64, the last of 29

# In float64 only the order of the additions differs between the modes, a relative 1e-16 each, which two epochs of
# training amplify to less than 1e-12 here. A wrong weight of the tail would show as 1e-3.
TIGHT: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-11}
# The same in float32, of relative 6e-8.
LOOSE: dict[str, Any] = {"rtol": 1e-3, "atol": 1e-4}


EXAMPLE = load_script(SCRIPT)  # here, since what it imports sets environment variables


@pytest.fixture(autouse=True)
def _workers_can_import_the_example(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))


@cache
def solo(dtype: torch.dtype, epochs: int) -> Any:
    return EXAMPLE.run("solo", epochs=epochs, dtype=dtype)


@pytest.mark.parametrize(
    ("mode", "ranks", "dtype", "tolerance"),
    [
        ("processes", 2, torch.float64, TIGHT),
        ("threads", 2, torch.float64, TIGHT),
        pytest.param("threads", 4, torch.float64, TIGHT, marks=pytest.mark.slow),
        pytest.param("processes", 2, torch.float32, LOOSE, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_every_mode_gives_the_losses_and_weights_of_one_device(
    mode: str, ranks: int, dtype: torch.dtype, tolerance: dict[str, Any]
) -> None:
    expected = solo(dtype, 2)
    result = EXAMPLE.run(mode, ranks, epochs=2, dtype=dtype)
    assert len(result.losses) == 2 * STEPS
    torch.testing.assert_close(torch.tensor(result.losses), torch.tensor(expected.losses), **tolerance)
    assert len(result.weights) == ranks
    for name, weight in expected.weights[0].items():
        torch.testing.assert_close(result.weights[0][name], weight, **tolerance)
        for other in result.weights[1:]:
            assert torch.equal(other[name], result.weights[0][name]), f"the ranks' {name} differ in their bits"
    assert sum(each.samples for each in result.report.ranks) == 2 * 1437, "each training sample once per epoch"
    assert (result.accuracy * 360) == pytest.approx(round(result.accuracy * 360), abs=1e-9), "over 360 test samples"
    assert abs(result.accuracy - expected.accuracy) <= (0 if dtype == torch.float64 else 2 / 360)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["processes", "threads"])
def test_the_script_trains_and_leaves_a_picture(mode: str, tmp_path: Path) -> None:
    picture = tmp_path / "deep" / "digits.png"
    arguments = ["--mode", mode, "--epochs", "1", "--picture", str(picture)]
    code, output, errors = warm_scripts.complete(SCRIPT, *arguments, takes_apart=True)
    assert code == 0, errors
    assert output.count("epoch  1") == 1, "rank zero alone prints"
    for words in ("waiting", "moving", "body", "reducing", "stepping", "samples/s", "test accuracy", str(picture)):
        assert words in output
    assert picture.read_bytes().startswith(b"\x89PNG")
