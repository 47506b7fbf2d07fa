"""Where the time went: phases tile a loop without gaps, totals are complete, helpers have tracks of their own."""

from __future__ import annotations

import itertools
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.report import timeline as timelines
from unisono.report.timeline import COMPUTE, DEVICE, FETCH, MAX_SPANS, MOVE, PHASES, REDUCE, STEP, Span, Timeline, Track


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> itertools.count[int]:
    """Time in whole steps: each look at the clock is one later than the look before."""
    ticks = itertools.count(1)
    monkeypatch.setattr(timelines, "perf_counter_ns", lambda: next(ticks))
    return ticks


def test_a_span_within_a_phase_interrupts_it_and_comes_back_to_it(clock):
    track = Track("loop")
    track.switch(COMPUTE)
    with track.span(REDUCE):
        pass
    track.switch(None)
    track.switch(None)  # outside any loop nothing is recorded
    assert list(track.spans) == [Span(COMPUTE, 1, 2), Span(REDUCE, 2, 3), Span(COMPUTE, 3, 4)]
    assert track.totals == {COMPUTE: 2, REDUCE: 1}


@given(st.lists(st.sampled_from([*PHASES, None]), max_size=30))
def test_phases_tile_the_time_without_gaps_and_the_totals_are_their_sums(phases):
    track = Track("loop")
    for phase in [*phases, None]:
        track.switch(phase)
    spans = list(track.spans)
    assert [span.phase for span in spans] == [phase for phase in phases if phase is not None]
    assert all(span.start <= span.stop for span in spans)
    span_of = iter(spans)
    placed = [None if phase is None else next(span_of) for phase in phases]
    for one, other in itertools.pairwise(placed):
        assert one is None or other is None or one.stop == other.start
    for phase in PHASES:
        assert track.totals.get(phase, 0) == sum(span.stop - span.start for span in spans if span.phase == phase)


def test_totals_stay_complete_when_old_spans_are_forgotten(clock):
    track = Track("loop")
    for _ in range(MAX_SPANS + 10):
        with track.span(MOVE):
            pass
    assert len(track.spans) == MAX_SPANS
    assert track.totals == {MOVE: MAX_SPANS + 10}
    assert track.spans[-1].stop == 2 * (MAX_SPANS + 10)


def test_each_thread_has_one_loop_track():
    timeline = Timeline()
    mine, theirs = timeline.loop(), []
    thread = threading.Thread(target=lambda: theirs.extend([timeline.loop(), timeline.loop()]))
    thread.start()
    thread.join()
    assert timeline.loop() is mine
    assert theirs[0] is theirs[1] is not mine
    assert timeline.tracks() == [mine, theirs[0]]


def test_the_next_helper_of_a_name_goes_on_with_the_track_of_the_last():
    timeline = Timeline()
    with timeline.helper("transfer") as first:
        pass
    with (
        timeline.helper("transfer") as again,
        timeline.helper("transfer") as beside,
        timeline.helper("reader") as other,
    ):
        assert again is first
        assert beside is not first
        assert other.name == "reader"
    assert timeline.tracks() == [first, beside, other]


class Device:
    """Comes to the stamps that are left in its work when the test says so; each work takes what was submitted."""

    def __init__(self) -> None:
        self.submitted = self.reached = self.asked = 0

    def stamp(self) -> int:
        return self.submitted

    def elapsed_ns(self, first: int, second: int) -> int | None:
        self.asked += 1
        return second - first if second <= self.reached else None


def one_step(track: Track, device: Device, fetch: int = 0) -> None:
    """The host submits at once, and waits in the reduction for the backward pass."""
    for phase, work in ((FETCH, fetch), (COMPUTE, 100), (REDUCE, 10), (STEP, 5)):
        track.switch(phase)
        device.submitted += work


def test_the_backward_pass_counts_as_computing_even_if_awaited_elsewhere(clock):
    timeline, device = Timeline(), Device()
    timeline.follow(device)
    for _ in range(3):
        one_step(timeline.loop(), device)
    timeline.loop().switch(None)
    device.reached = device.submitted
    timeline.loop().on_device.read()
    _, on_device = timeline.tracks()
    assert on_device.name == DEVICE
    assert on_device.totals == {FETCH: 0, COMPUTE: 300, REDUCE: 30, STEP: 15}
    assert timeline.loop().totals == {FETCH: 3, COMPUTE: 3, REDUCE: 3, STEP: 3}  # of the host


def test_stamps_are_read_two_steps_later_and_not_waited_for():
    timeline, device = Timeline(), Device()
    timeline.follow(device)
    track = timeline.loop()
    for _ in range(4):
        one_step(track, device, fetch=1)
    assert device.asked == 0
    one_step(track, device, fetch=1)
    assert (device.asked, track.on_device.totals) == (4, {})  # the device is at nothing yet, and the loop continues
    device.reached = 116
    one_step(track, device, fetch=1)
    assert track.on_device.totals == {FETCH: 1, COMPUTE: 100, REDUCE: 10, STEP: 5}


def test_where_no_stamp_can_be_left_the_phase_before_goes_on():
    timeline, device = Timeline(), Device()
    timeline.follow(device)
    track = timeline.loop()
    track.switch(COMPUTE)
    device.submitted, leave = 100, device.stamp
    device.stamp = lambda: None
    track.switch(REDUCE)
    device.submitted, device.stamp = 110, leave
    track.switch(None)
    device.reached = 110
    track.on_device.read()
    assert track.on_device.totals == {COMPUTE: 110}
