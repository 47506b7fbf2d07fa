"""The table of docs/exactness.md, from the rules by which steps are made: page and code are the same.

    python docs/generate/exactness.py

What is between `<!-- rules -->` and `<!-- end -->` is made; the rest is written.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from inspect import getdoc
from pathlib import Path

from unisono.training.rules import REQUEST, RULES, YES, ZERO, Policy

PAGE = Path(__file__).parent.parent / "exactness.md"

_MARKED = re.compile(r"(<!-- rules -->\n).*?(<!-- end -->)", re.DOTALL)
_ANSWERS = {REQUEST: "it is taken", ZERO: "it zeroes"}


def fill(page: str) -> str:
    """The page with its table."""
    return _MARKED.sub(lambda found: f"{found[1]}\n{_rules()}\n\n{found[2]}", page)


def _rules() -> str:
    states: dict[tuple[str, str, str], list[str]] = {}
    for state, *rest in RULES:
        states.setdefault((rest[0], rest[1], rest[2]), []).append(f"*{state}*")
    rows = [
        [
            "any" if len(found) == len({each.state for each in RULES}) else ", ".join(found),
            event,
            _words(Policy, condition) if condition else "",
            _ANSWERS[event] if then == YES else f"*{then}*",
        ]
        for (event, condition, then), found in states.items()
    ]
    return _table(("state", "event", "if", "then"), rows)


def _words(policy: type[Policy], condition: str) -> str:
    return str(getdoc(getattr(policy, condition)))


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(each) + " |" for each in (head, ["---"] * len(head), *rows))


if __name__ == "__main__":
    PAGE.write_text(fill(PAGE.read_text()))
