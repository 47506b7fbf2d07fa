"""docs/performance.md has the figures of the files in bench/results, and no others."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "docs" / "generate"))
import performance

PAGE = """Text.
<!-- facts -->
<!-- end -->
<!-- figures: cpu a -->
old
<!-- end -->
More.
"""
FILLED = """Text.
<!-- facts -->

- `cpu` (2 x CPU): Fast, 2 cores; python 3.11; on 2026-01-01, in 2 minutes, at a load of 0.5 before

<!-- end -->
<!-- figures: cpu a -->

| | x / z | y / z |
|---|---|---|
| small | 0.25 (0.25 to 0.30) | 12 |
| large | 1.50 | 0.012 |

| | ratio | ours | theirs |
|---|---|---|---|
| other: x / z | 2.00 | 20 ms | 10 ms |

<!-- end -->
More.
"""


def figure(case: str, name: str, ratio: float, **more: Any) -> dict[str, Any]:
    medians = {"low": ratio, "high": ratio, "pairs": 1, "ours": ratio / 100, "theirs": 0.01, "unit": "s"}
    return {"device": "cpu", "script": "a", "case": case, "name": name, "ratio": ratio, **medians, **more}


def results() -> dict[str, Any]:
    machine = {"devices": {"cpu": "2 x CPU"}, "processor": "Fast", "cores": 2, "versions": {"python": "3.11"}}
    figures = [
        figure("small", "x / z", 0.25, high=0.3, pairs=3),
        figure("small", "y / z", 12.3),
        figure("other", "x / z", 2.0),
        figure("large", "x / z", 1.5),
        figure("large", "y / z", 0.0123),
    ]
    facts = {**machine, "load": [0.5], "at": "2026-01-01T10:00+00:00"}
    return {"facts": facts, "seconds": {"cpu a": 120.0}, "figures": figures}


def test_the_page_is_what_is_made_from_the_committed_results() -> None:
    page = performance.PAGE.read_text()
    assert performance.fill(page, performance.read_all()) == page, "run: python docs/generate/performance.py"
    assert page.count("<!-- figures: ") > 10


def test_figures_become_tables_and_the_text_stays() -> None:
    assert performance.fill(PAGE, [results()]) == FILLED
    assert performance.fill(FILLED, [results()]) == FILLED


@pytest.mark.parametrize("count", [0, 2])
def test_a_table_without_figures_or_with_those_of_two_files_is_refused(count: int) -> None:
    with pytest.raises(ValueError, match=f"{count} files in bench/results have figures of a on cpu"):
        performance.fill(PAGE, [results()] * count)
