"""What the Accelerator does can be done by hand, in five lines: the same weights, bit by bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import sklearn.datasets  # noqa: F401 - here, since it sets environment variables
import torch
from modes import PROCESSES_2, SOLO, Mode

SCRIPT = Path(__file__).parent.parent.parent / "examples" / "by_hand.py"


@pytest.mark.slow
@pytest.mark.parametrize("mode", [SOLO, PROCESSES_2], ids=str)
def test_both_ways_give_the_same_bits(mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))

    def body() -> object:
        from by_hand import compare

        return compare(epochs=2)

    results = mode.run(body)
    for accelerator, by_hand in results:
        assert accelerator.accuracy == by_hand.accuracy > 0.8
        for name, weight in accelerator.weights.items():
            assert torch.equal(weight, by_hand.weights[name]), name
            assert torch.equal(weight, results[0][0].weights[name]), f"the ranks' {name} differ"
