"""Whatever happens to some machines and messages, the other agents end alike, in time, and tell the cause.

In simulated time, by random runs (`simulated_agents.py`): a thousand here; `python tests/launch/hosts/
test_simulated_agents.py 10000` takes a minute for ten thousand. What real agents do is seen in test_agent.py and
test_hosts.py.
"""

from __future__ import annotations

import sys

import pytest
from simulated_agents import PATIENCE_S, SAVES_S, SHORT_S, Fault, Machine, Simulation, play

SETTLES_S = 8.0  # beats, looks, a victim's wait for the cause, and the linger of the host
Runs = list[tuple[int, Simulation]]


@pytest.fixture(scope="module", params=range(0, 1000, 100), ids=str)
def runs(request: pytest.FixtureRequest) -> Runs:
    return [(seed, play(seed)) for seed in range(request.param, request.param + 100)]


def unharmed(run: Simulation) -> list[Machine]:
    """The machines that nothing has happened to; none, if something has happened to the one that serves the store."""
    struck = {fault.machine for fault in run.faults}
    return [] if run.host in struck else [each for each in run.machines if each.number not in struck]


def is_short(fault: Fault) -> bool:
    return fault.what in ("a pause", "a cut link") and fault.for_s <= SHORT_S


def test_agents_that_nothing_has_happened_to_end_alike(runs):
    for seed, run in runs:
        ends = [each.end for each in unharmed(run)]
        assert len({end == "well" for end in ends}) <= 1, (seed, ends)


def test_each_agent_ends_within_the_patience_after_the_last_fault(runs):
    for seed, run in runs:
        last = max([run.lasts_s + SAVES_S, *(fault.at + fault.for_s for fault in run.faults)])
        ends = [(each.end, each.ended_at) for each in run.machines]
        assert all(end and at <= last + PATIENCE_S + SETTLES_S for end, at in ends), (seed, ends)


def test_a_silence_shorter_than_the_patience_ends_nothing(runs):
    for seed, run in runs:
        if len(run.faults) < 2 and all(map(is_short, run.faults)):
            assert [each.end for each in run.machines] == ["well"] * len(run.machines), seed


def test_one_fault_is_the_cause_that_all_others_tell(runs):
    for seed, run in runs:
        if len(run.faults) == 1 and not is_short(run.faults[0]):
            what, number = run.faults[0].what, run.faults[0].machine
            left = f"node {number} (h{number}) has left the run"
            told = {
                "a rank fails": (f"on {number}",),
                "the agent is stopped": (f"the agent on {number} was stopped", left),
            }.get(what, (f"node {number} (h{number}) has been silent",))
            ends = [each.end for each in unharmed(run)]
            assert all(end == "well" or end.startswith(told) for end in ends), (seed, what, ends)


def test_a_machine_that_is_lost_after_its_part_was_done_harms_nobody(runs):
    for seed, run in runs:
        if len(run.faults) == 1 and run.machines[run.faults[0].machine].was_done:
            assert all(each.end == "well" for each in unharmed(run)), seed


if __name__ == "__main__":
    for seed in range(int(sys.argv[1])):
        played = [(seed, play(seed))]
        test_agents_that_nothing_has_happened_to_end_alike(played)
        test_each_agent_ends_within_the_patience_after_the_last_fault(played)
        test_a_silence_shorter_than_the_patience_ends_nothing(played)
        test_one_fault_is_the_cause_that_all_others_tell(played)
        test_a_machine_that_is_lost_after_its_part_was_done_harms_nobody(played)
