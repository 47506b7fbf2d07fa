"""The tables of docs/performance.md, from the results of bench/run.py in bench/results: figures and page are the same.

    python docs/generate/performance.py

What is between `<!-- figures: DEVICE SCRIPT -->`, or `<!-- facts -->`, and `<!-- end -->` is made; the rest is written.
`<!-- figures: DEVICE SCRIPT PATTERN -->` shows only the figures whose `case: name` contains the regular expression.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "performance.md"
RESULTS = ROOT / "bench" / "results"

_MARKED = re.compile(
    r"(<!-- (figures: (?P<device>\w+) (?P<script>\w+)(?: (?P<rows>[^\n]+?))?|facts) -->\n).*?(<!-- end -->)", re.DOTALL
)


def fill(page: str, results: list[dict[str, Any]]) -> str:
    """The page with its tables.

    Raises:
        ValueError: a table has no figures, or those of two files; or its pattern fits none.
    """

    def made(found: re.Match[str]) -> str:
        if found["script"] is None:
            return f"{found[1]}\n{_facts(results)}\n\n{found[6]}"
        wanted = found["device"], found["script"]
        groups = [[each for each in one["figures"] if (each["device"], each["script"]) == wanted] for one in results]
        groups = list(filter(None, groups))
        if len(groups) != 1:
            raise ValueError(
                f"{len(groups)} files in bench/results have figures of {wanted[1]} on {wanted[0]}, and not one: "
                f"run `python bench/run.py --device {wanted[0]} -o bench/results/NAME.json`"
            )
        shown = [each for each in groups[0] if re.search(found["rows"] or "", f"{each['case']}: {each['name']}")]
        if not shown:
            raise ValueError(
                f"{found['rows']!r} fits no figure of {wanted[1]} on {wanted[0]}; change it in {PAGE.name}"
            )
        return f"{found[1]}\n{_tables(shown)}\n\n{found[6]}"

    return _MARKED.sub(made, page)


def _facts(results: list[dict[str, Any]]) -> str:
    lines = []
    for facts in (each["facts"] for each in results):
        devices = ", ".join(f"`{name}` ({what})" for name, what in facts["devices"].items())
        versions = ", ".join(f"{name} {number}" for name, number in facts["versions"].items())
        load = ", ".join(f"{each:.1f}" for each in facts["load"])
        lines.append(
            f"- {devices}: {facts['processor']}, {facts['cores']} cores; {versions}; on {facts['at'][:10]}, "
            f"at a load of {load} before"
        )
    return "\n".join(lines)


def _tables(figures: list[dict[str, Any]]) -> str:
    """Cases that compare the same things are a table of both; others are the rows of a list, with their medians."""
    cases: dict[str, list[dict[str, Any]]] = {}
    for each in figures:
        cases.setdefault(each["case"], []).append(each)
    alike: dict[tuple[str, ...], list[str]] = {}
    for case, members in cases.items():
        alike.setdefault(tuple(each["name"] for each in members), []).append(case)
    tables, rows = [], []
    for names, together in alike.items():
        if len(names) == 1 or len(together) == 1:
            for each in (each for case in together for each in cases[case]):
                medians = [_amount(each[side], each["unit"]) for side in ("ours", "theirs")]
                rows.append([f"{each['case']}: {each['name']}", _ratio(each), *medians])
            continue
        columns = [[case, *map(_ratio, cases[case])] for case in together]
        grid = [["", *names], *columns]
        tables.append(_table(grid if len(together) >= len(names) else [list(row) for row in zip(*grid, strict=True)]))
    if rows:
        tables.append(_table([["", "ratio", "ours", "theirs"], *rows]))
    return "\n\n".join(tables)


def _table(rows: list[list[str]]) -> str:
    head, *body = (f"| {' | '.join(row)} |".replace("|  |", "| |") for row in rows)
    return "\n".join([head, "|---" * len(rows[0]) + "|", *body])


def _ratio(figure: dict[str, Any]) -> str:
    spread = f" ({_short(figure['low'])}\u2013{_short(figure['high'])})" if figure["pairs"] > 1 else ""
    return f"{_short(figure['ratio'])}{spread}"


def _short(number: float) -> str:
    return f"{number:.{3 if number < 0.1 else 2 if number < 10 else 0}f}"


def _amount(number: float, unit: str) -> str:
    if unit != "s":
        return f"{number:,.{0 if number >= 100 else 2}f} {unit}".removesuffix(" -")
    scale, name = next(pair for pair in ((1, "s"), (1e3, "ms"), (1e6, "µs")) if number * pair[0] >= 1 or pair[0] == 1e6)
    return f"{number * scale:.3g} {name}"


def read_all(directory: Path = RESULTS) -> list[dict[str, Any]]:
    return [json.loads(each.read_text()) for each in sorted(directory.glob("*.json"))]


if __name__ == "__main__":
    PAGE.write_text(fill(PAGE.read_text(), read_all()))
