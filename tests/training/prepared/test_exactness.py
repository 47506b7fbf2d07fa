"""Every way to train, on any number of ranks, against one device that takes each global window whole."""

from __future__ import annotations

import pytest
import twin
from hypothesis import given, settings
from hypothesis import strategies as st
from modes import PROCESSES_2, SOLO, THREADS_4, Mode, fitting, scaling
from twin import Case, assert_all_are, plain_run

pytestmark = pytest.mark.every_mode


@st.composite
def cases(draw: st.DrawFn) -> Case:
    samples, batch = draw(st.integers(1, 26)), draw(st.integers(1, 4))
    way = draw(st.sampled_from(["accelerator", "plain", "bare"]))
    tokens = way != "plain" and draw(st.booleans())
    return Case(samples, batch, draw(st.integers(1, 4)), way, tokens, draw(st.none() | st.integers(1, 4)))


def has_tokens(case: Case, ranks: int) -> bool:
    tokens = twin.data(case.samples).tensors[2]
    return not case.tokens or all(tokens[window].sum() for window in twin.windows(case, ranks))


def train_like_one_device(cases: list[Case], mode: Mode) -> None:
    todo = [case for case in cases if has_tokens(case, mode.ranks)]
    results = mode.run(lambda: [twin.run(case) for case in todo])
    for case, states in zip(todo, zip(*results, strict=True), strict=True):
        print(case)
        assert_all_are(states, plain_run(case, mode.ranks))


@settings(max_examples=8)
@given(cases(), st.sampled_from([SOLO, *(Mode("threads", ranks) for ranks in (2, 3, 4))]))
def test_threads_train_like_one_device_however_the_samples_fall(case, mode):
    train_like_one_device([case], mode)


SOME = [Case(23, 2), Case(21, 2, 2, tokens=True, leave_at=2)]
SOME += [Case(17, 2, 3, "plain", leave_at=1), Case(19, 2, 2, "bare", tokens=True)]


@pytest.mark.any_family
@pytest.mark.parametrize(
    "mode", [*fitting(SOLO), *scaling(THREADS_4, PROCESSES_2, Mode("processes", 3), workers=True)], ids=str
)
def test_every_way_to_train_is_like_one_device(mode):
    train_like_one_device(SOME, mode)
