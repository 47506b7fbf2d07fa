"""What the documents link to exists, and what can be chosen is in their tables."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from unisono import ParallelLoader
from unisono.backends import OWN
from unisono.cli.main import COMMANDS
from unisono.loaders.sharding import Tail
from unisono.parallel.strategies.strategy import STRATEGIES
from unisono.tracking.libraries import LIBRARIES

ROOT = Path(__file__).parent.parent
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_decisions_have_a_number_each_and_are_short() -> None:
    decisions = sorted((ROOT / "docs" / "decisions").glob("*.md"))
    numbers = [page.read_text().partition(".")[0] for page in decisions]
    assert numbers == [f"# {int(page.name[:4])}" for page in decisions]
    assert len(set(numbers)) == len(numbers)  # some are missing: those of records that were replaced
    assert [page.name for page in decisions if len(page.read_text().splitlines()) > 60] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_decision_that_is_referred_to_exists(page: Path) -> None:
    numbers = {page.name[:4] for page in (ROOT / "docs" / "decisions").glob("*.md")}
    named = re.findall(r"[Dd]ecision (\d+)", page.read_text())
    assert [each for each in named if f"{int(each):04}" not in numbers] == []


def rows(page: str) -> str:
    """The first cells of all tables of a page."""
    lines = (ROOT / "docs" / page).read_text().splitlines()
    return "\n".join(line.split("|")[1] for line in lines if line.startswith("|"))


@pytest.mark.parametrize(
    ("choices", "page"),
    [(get_args(Tail), "loading.md"), (STRATEGIES, "training.md"), (LIBRARIES, "tracking.md")],
    ids=["tails", "strategies", "trackers"],
)
def test_each_choice_is_in_the_table_of_its_page(choices: list[str], page: str) -> None:
    assert [each for each in choices if f'`"{each}"`' not in rows(page)] == []


def test_each_tail_policy_is_in_the_docstring_of_the_loader() -> None:
    assert [each for each in get_args(Tail) if f'"{each}":' not in (ParallelLoader.__doc__ or "")] == []


def test_each_family_and_each_command_is_in_the_documents() -> None:
    text = "".join(page.read_text() for page in PAGES)
    assert [name for name in OWN if f'"{name}:0"' not in text and f'"{name}"' not in text] == []
    assert [name for name in COMMANDS if f"unisono {name}" not in text] == []
