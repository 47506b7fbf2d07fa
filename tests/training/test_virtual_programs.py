"""Random loops under virtual ranks, on several numbers of ranks, and continued on others."""

from __future__ import annotations

import random

import pytest
from modes import PROCESSES_2, SOLO, Mode
from virtual_programs import MODES, any_program, verdicts_of


@pytest.mark.parametrize(
    ("seeds", "modes"),
    [(range(4), (SOLO, PROCESSES_2)), pytest.param(range(1000, 1020), MODES, marks=pytest.mark.slow)],
    ids=["some", "many"],
)
def test_random_loops_end_with_the_same_bits_or_are_refused(seeds: range, modes: tuple[Mode, ...]) -> None:
    programs = [any_program(random.Random(seed).choice) for seed in seeds]
    verdicts = verdicts_of(programs, modes)
    assert [(seed, each) for seed, each in zip(seeds, verdicts, strict=True) if each.kind == "different"] == []
    assert sum(each.kind == "exact" for each in verdicts) > len(programs) / 4
