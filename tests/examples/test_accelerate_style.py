"""A script of Accelerate's users: the same result on one device, on threads and in processes, whatever batch fits."""

from __future__ import annotations

from pathlib import Path

import pytest
import sklearn.datasets  # noqa: F401 - here, since it sets environment variables
import torch
from modes import PROCESSES_2, SOLO, THREADS_2, Mode

SCRIPT = Path(__file__).parent.parent.parent / "examples" / "accelerate_style.py"


@pytest.mark.parametrize(("mode", "largest"), [(SOLO, 32), (THREADS_2, 32), (PROCESSES_2, 16)], ids=str)
def test_any_ranks_and_batches_train_what_one_device_does(
    mode: Mode, largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))

    def body(largest: int) -> tuple[float, dict[str, torch.Tensor]]:
        from accelerate_style import parse, training_function

        return training_function(parse(["--num_epochs", "2", "--largest_batch_size", str(largest)]))

    ((accuracy, weights),) = SOLO.run(lambda: body(64))
    assert accuracy > 0.85
    for found, own in mode.run(lambda: body(largest)):
        assert found == pytest.approx(accuracy, abs=0.01)
        torch.testing.assert_close(dict(own), dict(weights), rtol=0, atol=1e-3)
