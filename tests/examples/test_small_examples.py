"""The smaller examples: a script of Accelerate's users, the same by hand, and a notebook."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import sklearn.datasets  # noqa: F401 - here, since it sets environment variables
import torch
from modes import PROCESSES_2, SOLO, THREADS_2, Mode, preload

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


@pytest.mark.parametrize(("mode", "largest"), [(SOLO, 32), (THREADS_2, 32), (PROCESSES_2, 16)], ids=str)
def test_any_ranks_and_batches_train_as_one_device(mode: Mode, largest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))

    def body(largest: int) -> tuple[float, dict[str, torch.Tensor]]:
        from accelerate_style import parse, training_function

        return training_function(parse(["--num_epochs", "2", "--largest_batch_size", str(largest)]))

    ((accuracy, weights),) = SOLO.run(lambda: body(64))
    assert accuracy > 0.85
    for found, own in mode.run(lambda: body(largest)):
        assert found == pytest.approx(accuracy, abs=0.01)
        torch.testing.assert_close(dict(own), dict(weights), rtol=0, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [SOLO, PROCESSES_2], ids=str)
def test_the_accelerator_gives_the_bits_of_five_lines_by_hand(mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))

    def body() -> object:
        from by_hand import compare

        return compare(epochs=2)

    results = mode.run(body)
    for accelerator, by_hand in results:
        assert accelerator.accuracy == by_hand.accuracy > 0.8
        for name, weight in accelerator.weights.items():
            assert torch.equal(weight, by_hand.weights[name]), name
            assert torch.equal(weight, results[0][0].weights[name]), f"the ranks' {name} differ"


@pytest.mark.slow
def test_the_cells_of_the_notebook_run_and_two_workers_train_what_one_device_does(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNISONO_BACKEND", "cpu")
    preload()
    scope: dict[str, Any] = {"__name__": "notebook"}  # no module, so that workers get its functions by value
    for number, cell in enumerate(json.loads((EXAMPLES / "spirals.ipynb").read_text())["cells"]):
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"cell {number}", "exec"), scope)
    assert scope["first"][-1] < scope["first"][0]
    assert "rank " in capsys.readouterr().out.splitlines()[-1], "the note of the worker's error"
