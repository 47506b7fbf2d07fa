"""SLURM's compressed lists in the environment: of hosts, and of the number of tasks on each."""

from __future__ import annotations

import re
from collections.abc import Iterator

_ELEMENT = r"(?:[^,\[\]\s]|\[[^\[\]\s]+\])+"  # up to a comma outside brackets
_LIST = re.compile(rf"{_ELEMENT}(?:,{_ELEMENT})*")
_BRACKETS = re.compile(r"\[([^\[\]]*)\]")


def expand_hosts(text: str) -> list[str]:
    """The hosts of a compressed list: `node[003-005,9],other1` gives node003, node004, node005, node9, other1.

    Raises:
        ValueError: brackets do not match, or contain something other than numbers and ranges.
    """
    if not _LIST.fullmatch(text):
        raise ValueError("its names or brackets are malformed; a list looks like node[01-04,9],other1")
    return [host for element in re.findall(_ELEMENT, text) for host in _expand_element(element)]


def _expand_element(element: str) -> Iterator[str]:
    found = _BRACKETS.search(element)
    if found is None:
        yield element
        return
    head, tail = element[: found.start()], element[found.end() :]
    for piece in found[1].split(","):
        for number in _expand_range(piece):
            yield from _expand_element(f"{head}{number}{tail}")


def _expand_range(piece: str) -> Iterator[str]:
    """`003-005` gives 003, 004, 005: the width of the first number is kept."""
    first, _, last = piece.partition("-")
    last = last or first
    if not (first.isdecimal() and last.isdecimal() and int(first) <= int(last)):
        raise ValueError(f"[{piece}] is neither a number nor a range")
    for number in range(int(first), int(last) + 1):
        yield str(number).zfill(len(first))


def expand_counts(text: str) -> list[int]:
    """The number of tasks on each node: `2(x3),1` gives [2, 2, 2, 1].

    Raises:
        ValueError: it is not such a list.
    """
    counts: list[int] = []
    for piece in text.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", piece)
        if found is None:
            raise ValueError("a list of counts looks like 2(x3),1")
        counts += [int(found[1])] * int(found[2] or 1)
    return counts
