"""Whatever a training loop does, in whatever order: it trains the weights of one device, or is refused in words.

`tests/programs.py` runs thousands of such loops, and makes smaller what differs.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st
from modes import FAMILY, PROCESSES_2, SOLO, THREADS_2, THREADS_3, Mode
from plain_steps import judge
from step_programs import Program, Setup, any_program, run_programs


@st.composite
def programs(draw: Any) -> Program:
    return any_program(lambda choices: draw(st.sampled_from(choices)))


@pytest.mark.any_family
@pytest.mark.skipif(FAMILY == "xla", reason="it would compile thousands of graphs, and its data sets lie there")
# Three ranks are no costlier variant of two: with a tail of two samples, one of them has none.
@pytest.mark.parametrize("mode", [SOLO, THREADS_2, THREADS_3], ids=["one rank", "two ranks", "three ranks"])
def test_a_random_loop_trains_the_weights_of_one_device_or_is_refused(mode: Mode) -> None:
    kinds = Counter[str]()

    @settings(derandomize=True, max_examples=12)
    @given(programs())
    def check(program: Program) -> None:
        (outcomes,) = run_programs(mode, [program])
        verdict = judge(program, mode.ranks, outcomes)
        note(f"{mode}: {program}\n{verdict.reason}")
        kinds[verdict.kind] += 1
        assert verdict.kind != "different"

    check()
    assert kinds["exact"] > kinds.total() / 3, kinds  # most loops are not refused


# Random programs that trained other weights once.
FOUND = [
    (SOLO, Setup(every=4), "draw a; forward fit; backward accelerator; step f; save; resume; step f; step f"),
    (
        THREADS_2,
        Setup(samples=15, others=4, every=2),
        "draw a; forward fit; draw b; forward square; add; backward named; step f",
    ),
    (
        SOLO,
        Setup(every=3),
        "draw a; leave a; forward fit; backward accelerator; foreign 0; forward square; backward plain; step f; step f",
    ),
    (
        SOLO,
        Setup(samples=4, every=3, layout="two"),
        "draw a; keep; draw a; replay 0; forward fit; compute; forward other; backward plain; step g",
    ),
    (
        SOLO,
        Setup(batch=3, every=2, layout="two"),
        "draw b; forward square; backward accelerator; zero_model f zeros; forward other; backward plain; draw b; "
        "forward other; backward plain; step g; draw b; forward square; backward accelerator; zero_model f zeros; "
        "step f",
    ),
    (
        SOLO,
        Setup(batch=3, every=2),
        "draw a; draw a; draw a; draw a; forward fit; backward accelerator; draw a; draw a; step f; draw a; freeze 0; "
        "forward fit; backward accelerator; zero f zeros; draw a; forward square; backward accelerator; step f",
    ),
    (
        THREADS_3,
        Setup(samples=3, others=5, batch=3),
        "draw a; forward fit; draw b; forward square; backward assigned; add; backward accelerator; step f",
    ),
    (
        THREADS_3,
        Setup(samples=6, batch=3, layout="two"),
        "draw a; forward penalty; backward accelerator; step f; forward other; backward plain; decay; forward fit; "
        "backward plain; step f; forward other; backward plain",
    ),
    (THREADS_3, Setup(batch=3), "draw a; draw a; keep; draw a; replay 1; forward copied; backward accelerator; step f"),
    (THREADS_2, Setup(others=4, batch=3), "draw a; forward fit; draw b; forward square; add; backward named; step f"),
    (
        THREADS_2,
        Setup(samples=8, batch=1, every=4, net="sparse"),
        "draw a; forward fit; backward accelerator; step f; save; resume; draw a; forward fit; backward accelerator; "
        "step f; draw a; forward fit; backward accelerator; step f; draw a; forward fit; backward accelerator; step f",
    ),
    (
        THREADS_2,
        Setup(samples=8),
        "best; draw a; forward fit; backward accelerator; step f; zero f none; best; load_best; draw a; forward fit; "
        "backward accelerator; step f",
    ),
    (
        THREADS_2,
        Setup(samples=8, batch=3, is_bare=True, net="norm"),
        "hook 1; draw a; forward scaled; backward accelerator; step f; zero f none; draw a; forward scaled; "
        "backward accelerator; erase_grad 0; step f",
    ),
    (
        PROCESSES_2,
        Setup(others=4, batch=1, every=2, net="routed"),
        "draw a; forward penalty; backward accelerator; step f; draw a; forward fit; backward accelerator; draw b; "
        "forward fit; backward accelerator; step f",
    ),
    (
        PROCESSES_2,
        Setup(net="sparse"),
        "draw a; forward fit; backward accelerator; step f; zero f none; draw a; forward fit; draw b; forward square; "
        "backward accelerator; backward accelerator; step f",
    ),
    (
        PROCESSES_2,
        Setup(every=3, net="routed"),
        "draw b; forward fit; backward accelerator; zero f none; draw b; forward square; backward accelerator; step f",
    ),
    (
        PROCESSES_2,
        Setup(net="sparse", is_bare=True),
        "draw a; forward scaled; backward accelerator; step f; forward other; backward plain; clip accelerator; "
        "forward scaled; backward accelerator; step f",
    ),
    (
        PROCESSES_2,
        Setup(every=2, is_bare=True),
        "draw a; forward scaled; backward accelerator; step f; forward scaled; zero_model f none; "
        "backward accelerator; step f",
    ),
    (
        PROCESSES_2,
        Setup(net="routed"),
        "draw a; forward fit; freeze 0; draw a; forward fit; backward accelerator; backward accelerator; step f",
    ),
    (
        PROCESSES_2,
        Setup(batch=3, every=2, net="routed"),
        "draw a; forward fit; backward accelerator; draw a; freeze 0; forward fit; backward accelerator; step f",
    ),
    (
        THREADS_2,
        Setup(),
        "draw b; forward copied; forward fit; backward accelerator; draw b; forward square; add; backward accelerator; "
        "step f",
    ),
    (
        SOLO,
        Setup(every=2, layout="halves"),
        "draw a; forward fit; backward accelerator; step g; draw a; forward fit; backward accelerator; step g; "
        "freeze 0; zero g none; forward fit; backward accelerator; step f",
    ),
    (
        PROCESSES_2,
        Setup(samples=13, net="sparse"),
        "draw a; draw a; forward fit; backward accelerator; step f; freeze 0; forward fit; backward accelerator; "
        "step f",
    ),
    (
        THREADS_2,
        Setup(every=3),
        "draw a; forward copied; decay; step f; forward copied; draw a; forward copied; decay; backward accelerator; "
        "step f",
    ),
]


@pytest.mark.parametrize("mode", [SOLO, THREADS_2, THREADS_3, PROCESSES_2], ids=["solo", "two", "three", "processes"])
def test_what_was_wrong_once_is_exact_or_refused(mode: Mode) -> None:
    found = [Program(setup, tuple(lines.split("; "))) for where, setup, lines in FOUND if where == mode]
    for program, outcomes in zip(found, run_programs(mode, found), strict=True):
        verdict = judge(program, mode.ranks, outcomes)
        assert verdict.kind in ("exact", "refused"), f"{program}\n{verdict.reason}"


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp"])
def test_under_every_strategy_it_does(strategy: str) -> None:
    loops = [any_program(random.Random(seed).choice) for seed in range(20)]
    outcomes = run_programs(PROCESSES_2, loops, strategy)
    verdicts = [judge(each, 2, found, strategy == "fsdp") for each, found in zip(loops, outcomes, strict=True)]
    different = [f"{each}\n{one.reason}" for each, one in zip(loops, verdicts, strict=True) if one.kind == "different"]
    assert not different, "\n".join(different)
    assert sum(each.kind == "exact" for each in verdicts) > len(loops) / 4  # "fsdp" takes no sparse gradients
