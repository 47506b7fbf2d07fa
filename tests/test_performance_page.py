"""docs/performance.md has the figures of the files in bench/results, and no others."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "docs" / "generate"))
import performance


def test_the_page_is_what_is_made_from_the_committed_results() -> None:
    page = performance.PAGE.read_text()
    assert performance.fill(page, performance.read_all()) == page, "run: python docs/generate/performance.py"
    assert page.count("<!-- figures: ") > 10


@pytest.mark.parametrize("count", [0, 2])
def test_a_table_without_figures_or_with_those_of_two_files_is_refused(count: int) -> None:
    with pytest.raises(ValueError, match=rf"{count} files in bench/results have figures of"):
        performance.fill(performance.PAGE.read_text(), performance.read_all() * count)
