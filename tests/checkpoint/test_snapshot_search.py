"""Which snapshot is the newest that machines have together: a rule over what each has found."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from unisono.checkpoint.snapshot_memory import Snapshot
from unisono.checkpoint.snapshot_search import _newest

MACHINES = [[0, 1], [2, 3]]
ALIKE, DIVIDED = 2, 4  # the parts that are needed


def found(needed: int, *taken: tuple[int, int, Iterable[int]]) -> list[list[Snapshot]]:
    """What the first rank of each machine finds of snapshots (attempt, number, ranks), and the others do not look."""
    parts = [
        Snapshot(attempt, n, 10 * attempt + n, rank, 4, needed, 0.0) for attempt, n, ranks in taken for rank in ranks
    ]
    of = [[part for part in parts if part.rank in machine] for machine in MACHINES]
    return [of[0], [], of[1], []]


@pytest.mark.parametrize(
    ("needed", "taken", "chosen", "whole", "own"),
    [
        (ALIKE, [(0, 4, range(4)), (0, 5, range(4))], (0, 5), [0, 1], [0, 1, 2, 3]),
        (ALIKE, [(0, 4, range(4)), (0, 5, [0, 1, 2])], (0, 4), [0, 1], [0, 1, 2, 3]),  # rank 3 was killed as it copied
        (ALIKE, [(0, 4, [0, 1]), (0, 5, [0, 1])], (0, 5), [0, 1], [0, 1]),  # the second machine is lost
        (ALIKE, [(0, 5, [2, 3])], (0, 5), [2, 3], [2, 3]),  # the first is
        (ALIKE, [(0, 4, [0, 1]), (0, 5, [0])], (0, 4), [0, 1], [0, 1]),
        (ALIKE, [(0, 9, range(4)), (1, 0, [1, 2, 3])], (1, 0), [2, 3], [1, 2, 3]),
        (ALIKE, [(0, 9, range(4)), (1, 0, [1, 2])], (0, 9), [0, 1], [0, 1, 2, 3]),
        (DIVIDED, [(0, 4, range(4)), (0, 5, range(4))], (0, 5), [0, 1, 2, 3], [0, 1, 2, 3]),
        (DIVIDED, [(0, 4, range(4)), (0, 5, range(3))], (0, 4), [0, 1, 2, 3], [0, 1, 2, 3]),
    ],
)
def test_the_newest_complete_snapshot_is_chosen(needed, taken, chosen, whole, own) -> None:
    places, parts = _newest(found(needed, *taken))
    assert {each[:2] for each in places} == {chosen} == {each[:2] for each in parts}
    assert [each.rank for each in parts] == whole
    assert [each.rank for each in places] == own
    assert all(place == each.rank - each.rank % 2 for each, place in places.items())  # read by the machine's first


@pytest.mark.parametrize(
    ("needed", "taken", "newest"),
    [
        (ALIKE, [], []),
        (ALIKE, [(0, 0, [0]), (0, 1, [0, 3])], [0, 3]),  # two parts, but of no machine all
        (DIVIDED, [(0, 5, [0, 1]), (0, 4, [0, 1, 2])], [0, 1]),
    ],
)
def test_without_a_complete_one_the_parts_of_the_newest_are_named(needed, taken, newest) -> None:
    places, parts = _newest(found(needed, *taken))
    assert not parts
    assert [each.rank for each in places] == newest
