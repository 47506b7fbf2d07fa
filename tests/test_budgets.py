"""The house stays small: each room has the lines it has, and what is long does not grow.

The numbers are in `budgets.toml`. A change that needs more says why, in a comment beside the number; one that needs
less lowers it.
"""

from __future__ import annotations

import ast
import tomllib
from collections import Counter
from pathlib import Path

import pytest

import unisono

PACKAGE = Path(__file__).parent.parent / "unisono"
BUDGETS = tomllib.loads((Path(__file__).parent / "budgets.toml").read_text())
LONG_FILE, LONG_FUNCTION = 400, 60
SLACK = 0.03  # of a room: what it may be below its number, so that not every change has to touch the table

LINES = {path.relative_to(PACKAGE).as_posix(): path.read_text().count("\n") for path in sorted(PACKAGE.rglob("*.py"))}


def functions() -> dict[str, int]:
    return {
        f"{path}:{node.name}": (node.end_lineno or 0) - node.lineno + 1
        for path in LINES
        for node in ast.walk(ast.parse((PACKAGE / path).read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def rooms() -> Counter[str]:
    found: Counter[str] = Counter()
    for path, lines in LINES.items():
        found[path.partition("/")[0] if "/" in path else "top"] += lines
    return found


def test_the_top_has_few_modules_and_few_names():
    assert len([path for path in LINES if "/" not in path]) <= BUDGETS["top"]["modules"]
    assert len(unisono.__all__) <= BUDGETS["top"]["names"]


@pytest.mark.parametrize("room", sorted({*rooms(), *BUDGETS["rooms"]}))
def test_a_room_has_the_lines_of_its_budget(room):
    lines, budget = rooms()[room], BUDGETS["rooms"].get(room, 0)
    assert lines <= budget, f"{room} has {lines} lines, {lines - budget} more than tests/budgets.toml gives it"
    assert lines >= (1 - SLACK) * budget, f"{room} has {lines} lines now: lower its {budget} in tests/budgets.toml"


@pytest.mark.parametrize(
    ("kind", "measured", "limit"), [("files", lambda: LINES, LONG_FILE), ("functions", functions, LONG_FUNCTION)]
)
def test_what_is_long_is_known_and_does_not_grow(kind, measured, limit):
    known = BUDGETS[kind]
    long = {name: lines for name, lines in measured().items() if lines > limit}
    grown = {name: lines for name, lines in long.items() if lines > known.get(name, limit)}
    assert not grown, f"longer than {limit} lines, or than tests/budgets.toml says: {grown}; divide them"
    assert not (gone := known.keys() - long.keys()), f"no longer long: take {sorted(gone)} out of tests/budgets.toml"
