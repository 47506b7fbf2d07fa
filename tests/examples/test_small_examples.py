"""The smaller examples: a script of Accelerate's users, the same by hand, a notebook, and one that survives its end."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import sklearn.datasets  # noqa: F401 - here, since it sets environment variables
import torch
import warm_scripts
from modes import PROCESSES_2, SOLO, THREADS_2, Mode, preload

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


@pytest.mark.parametrize(("mode", "largest"), [(THREADS_2, 32), (PROCESSES_2, 16)], ids=str)
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
def test_the_accelerator_gives_the_bits_of_five_lines_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))

    def body() -> object:
        from by_hand import compare

        return compare(epochs=2)

    results = PROCESSES_2.run(body)
    for accelerator, by_hand in results:
        assert accelerator.accuracy == by_hand.accuracy > 0.8
        for name, weight in accelerator.weights.items():
            assert torch.equal(weight, by_hand.weights[name]), name
            assert torch.equal(weight, results[0][0].weights[name]), f"the ranks' {name} differ"


@pytest.mark.slow
def test_the_notebook_runs_and_two_workers_train_like_one_device(
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


SCRIPT = Path(__file__).parent.parent.parent / "examples" / "resume.py"


@pytest.mark.slow
@pytest.mark.parametrize(("signum", "then"), [(signal.SIGTERM, "1"), (signal.SIGKILL, "4 --engine local")])
def test_a_run_that_is_ended_goes_on_to_the_end_on_other_devices(tmp_path: Path, signum: int, then: str) -> None:
    def arguments(epochs: int) -> list[str]:
        return ["--directory", str(tmp_path), "--epochs", str(epochs), "--backend", "cpu"]

    checkpoints = tmp_path / "checkpoints"
    with warm_scripts.run(SCRIPT, *arguments(200)) as script:
        while script.poll() is None and not (checkpoints / "latest").exists():
            signal.sigtimedwait([], 0.01)
        script.send_signal(signum)
        code = script.wait(60)
        output = script.communicate(60)
    assert code in (143, -signum), output
    saved = int((checkpoints / "latest").read_text().rpartition("_")[2])
    more = arguments(saved // 4 + 2)  # it saves four times in an epoch, and may have come far meanwhile
    code, output, errors = warm_scripts.complete(
        SCRIPT, *more, "--devices", *then.split(), agents=2 * ("local" in then)
    )
    assert code == 0, errors
    assert re.search(r"test accuracy \d\d\.\d\d%", output)
    assert int((checkpoints / "latest").read_text().rpartition("_")[2]) > saved


def test_a_broken_row_is_left_out_by_going_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))

    def body() -> tuple[int, float]:
        from rewind import train

        return train(0)

    for went_back, loss in PROCESSES_2.run(body):
        assert went_back == 4  # once in each epoch
        assert loss < 1.5
