"""What the Accelerator does can be done by hand, in five lines: the same weights, bit by bit."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import sklearn.datasets  # noqa: F401 - here, since it sets environment variables
import torch
import warm_scripts
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


@pytest.mark.slow
def test_the_script_tells_that_both_agree() -> None:
    code, output, errors = warm_scripts.complete(SCRIPT, "--devices", "2", "--epochs", "1")
    assert code == 0, errors
    assert output.count("the same weights both ways") == 1, "rank zero alone prints"


def test_by_hand_takes_five_lines_and_no_function_is_long() -> None:
    source = SCRIPT.read_text()
    functions = {each.name: each for each in ast.parse(source).body if isinstance(each, ast.FunctionDef)}
    assert all(each.end_lineno - each.lineno < 25 for each in functions.values() if each.end_lineno is not None)
    numbers = re.findall(r"# (\d)\b", ast.get_source_segment(source, functions["train_by_hand"]) or "")
    assert numbers == ["1", "2", "3", "4", "5"]
