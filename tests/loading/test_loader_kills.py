"""Runs that are killed at random go on from their checkpoints on other numbers of ranks and loader workers."""

from __future__ import annotations

import pytest
from loader_kills import EPOCHS, Life, carry_out, check, samples_of, undisturbed
from loader_kinds import COUNT, KINDS, TESTED_HERE

SIMILAR = ("stream by stride", "Hugging Face shuffled", "Hugging Face split by node", "webdataset split by node")
"""Those that differ from others by their order or their cut alone, which are resumed in other tests."""
HERE = [name for name, kind in KINDS.items() if {*kind.needs} <= TESTED_HERE and not kind.lacks and name not in SIMILAR]


def test_what_follows_a_kill_goes_on_elsewhere_with_each_sample_once():
    lives = [Life(2, 0, "rank", 1, 5, 2), Life(1, 1, "all ranks", 0, 6, 4), Life(2, 1)]
    with samples_of("stream of shards") as folder:
        seen, kills = carry_out("stream of shards", lives, folder)
    assert kills == 2
    assert [sorted(each) for each in seen] == [list(range(COUNT))] * EPOCHS


@pytest.mark.slow
@pytest.mark.parametrize("kind", HERE)
def test_runs_that_are_killed_at_random_train_on_each_sample_once(kind):
    expected = undisturbed(kind) if KINDS[kind].keeps_order else []
    check(kind, HERE.index(kind), expected)
