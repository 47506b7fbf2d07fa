"""Runs of several agents in simulated time, for `test_simulated_agents.py`.

Each agent decides by the product's own `AgentRound`. What surrounds it is played: clocks that differ, a store that one
machine serves, messages that take their time, ranks that end when a peer's connection closes, and not when a peer is
silent, torch's barrier at the end; and faults. One start of the workers is played, since nothing but the number of
restarts passes from one to the next.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from unisono.comm.outcome import Outcome
from unisono.errors import BrokenWorldError, UnisonoError
from unisono.launch.hosts.agent_round import AgentRound, MachineReport

PATIENCE_S, BEAT_S, LOOK_S, LINGER_S = 10.0, 1.0, 0.1, 3.0  # of a machine's silence; as `OtherMachines` and `Agent` do
SHORT_S = PATIENCE_S - 3 * BEAT_S  # nobody is lost by so short a silence
SAVES_S = 30.0  # the longest time that ranks work alone, after the last collective
FAULTS = ("a rank fails", "the agent is stopped", "the agent is killed", "the power fails", "a pause", "a cut link")
WELL = Outcome[Any](value=None)


@dataclass
class Fault:
    """What happens to one machine: when, and for how long, if it ends."""

    what: str
    machine: int
    at: float
    for_s: float


@dataclass
class Machine:
    """One machine of the run.

    Attributes:
        part: how its ranks have ended; None while they run.
        end: the agent's verdict; "" while it has none: "well", "cut off", "gone", or the text of an error.
        is_gone: whether the agent's process has ended.
        was_done: whether it was killed, or lost, after it had told that its part was done.
        mute_until: until when it is paused; its ranks, too.
        cut_until: until when nothing reaches it.
    """

    number: int
    clock: float
    round: AgentRound
    part: Outcome[Any] | None = None
    end: str = ""
    ended_at: float = 0.0
    is_gone: bool = False
    is_closed: bool = False
    answered_at: float = 0.0
    mute_until: float = 0.0
    cut_until: float = 0.0
    is_in_barrier: bool = False
    was_done: bool = False


class Simulation:
    """One run of `count` machines, of which `host` serves the store."""

    def __init__(self, draw: random.Random, count: int, host: int, faults: list[Fault], lasts_s: float) -> None:
        self.draw, self.host, self.faults, self.lasts_s = draw, host, faults, lasts_s
        self.now = 0.0
        self.events: list[tuple[float, int, Callable[[], None]]] = []  # when, in which order, what
        self.order = itertools.count()
        self.store: dict[int, MachineReport] = {}
        self.is_served = True  # the store: by a process that runs
        self.machines = [
            Machine(number, draw.uniform(0, 1000), AgentRound("", count, MachineReport(number, host=f"h{number}")))
            for number in range(count)
        ]

    def run(self, until: float) -> list[Machine]:
        for machine in self.machines:
            begins = self.draw.uniform(0, 1)
            machine.answered_at = begins
            for step in (self._exchange, self._watch, self._monitor):
                self._later(begins, step, machine)
            saves_s = self.draw.choice((1.0, 1.0, 1.0, SAVES_S))
            self._later(self.lasts_s + self.draw.uniform(0, saves_s), self._finish, machine)
        for fault in self.faults:
            self._later(fault.at, self._strike, fault)
        while self.events and self.now < until:
            self.now, _, event = heapq.heappop(self.events)
            event()
        return self.machines

    def _later(self, delay: float, step: Callable[..., None], *args: Any) -> None:
        heapq.heappush(self.events, (self.now + delay, next(self.order), lambda: step(*args)))

    def _time(self, machine: Machine) -> float:
        return self.now + machine.clock

    # The ranks.

    def _finish(self, machine: Machine) -> None:
        """The ranks of a machine have done their work, if they could meet all others until then."""
        if machine.part is not None or machine.is_gone:
            return
        running = [each for each in self.machines if each.part is None]
        if any(each.mute_until > self.now or each.cut_until > self.now for each in running):
            self._later(0.2, self._finish, machine)
        elif all(each.part is None or each.part.error is None for each in self.machines) and not self._some_are_dead():
            self._part_ends(machine, WELL)

    def _some_are_dead(self) -> bool:
        return any(each.is_gone and each.part is None for each in self.machines)

    def _part_ends(self, machine: Machine, outcome: Outcome[Any]) -> None:
        if machine.part is None and not machine.is_gone:
            machine.part = replace(outcome, at=self._time(machine))

    def _connections_close(self, machine: Machine) -> None:
        """The ranks of a machine have ended early: those of the others see it, if they are reached."""
        if machine.cut_until <= self.now:
            victim = Outcome[Any].failure(BrokenWorldError("a peer closed the connection"))
            for each in self.machines:
                if each is not machine and each.cut_until <= self.now:
                    self._later(max(self.draw.uniform(0, 2), each.mute_until - self.now), self._part_ends, each, victim)

    def _strike(self, fault: Fault) -> None:
        machine = self.machines[fault.machine]
        if machine.is_gone:
            return
        if fault.what == "a rank fails" and machine.part is None:
            self._part_ends(machine, Outcome[Any].failure(LookupError(f"on {fault.machine}")))
            self._connections_close(machine)
        elif fault.what == "the agent is stopped" and not machine.end:
            stopped = Outcome[Any].failure(UnisonoError(f"the agent on {fault.machine} was stopped"))
            was_running, machine.part = machine.part is None, machine.part or stopped
            machine.round.say(verdict=stopped.to_bytes())
            if was_running:
                self._connections_close(machine)
            self._decided(machine, f"the agent on {fault.machine} was stopped")
        elif fault.what in ("the agent is killed", "the power fails"):
            was_running, machine.end, machine.is_gone = machine.part is None, machine.end or "gone", True
            machine.was_done = fault.machine in self.store and self.store[fault.machine].is_done
            if fault.what == "the agent is killed":
                if was_running:
                    self._connections_close(machine)
                self.is_served &= fault.machine != self.host
            else:
                machine.cut_until = float("inf")
        elif fault.what == "a pause":
            machine.mute_until = self.now + fault.for_s
        elif fault.what == "a cut link":
            machine.cut_until = self.now + fault.for_s

    # The agent.

    def _exchange(self, machine: Machine) -> None:
        """One turn of the thread that speaks with the store."""
        if machine.is_gone or machine.is_closed:
            return
        if machine.mute_until > self.now:
            self._later(machine.mute_until - self.now, self._exchange, machine)
        elif machine.cut_until > self.now or self._host_is_silent(machine):
            self._later(0.25, self._exchange, machine)
        elif not self.is_served:
            machine.is_closed = True
        else:
            machine.round.own = replace(machine.round.own, beats=machine.round.own.beats + 1)
            self.store[machine.number] = machine.round.own
            self._later(self.draw.choice((0.001, 0.05, 0.4)), self._listen, machine)

    def _host_is_silent(self, machine: Machine) -> bool:
        host = self.machines[self.host]
        return machine is not host and (host.cut_until > self.now or host.mute_until > self.now)

    def _listen(self, machine: Machine) -> None:
        if machine.is_gone or not self.is_served:
            machine.is_closed = True
            return
        if machine.mute_until > self.now or machine.cut_until > self.now or self._host_is_silent(machine):
            self._later(0.25, self._listen, machine)
            return
        for number in range(len(self.machines)):
            if number != machine.number:
                report = self.store.get(number)
                if machine.round.hear(number, report, self._time(machine)) and report is not None and report.verdict:
                    heard = Outcome[Any].failure(BrokenWorldError("another machine reports a failure"))
                    self._later(0.2, self._part_ends, machine, heard)
        machine.answered_at = self.now
        is_news = self.store[machine.number] != machine.round.own
        self._later(0.0 if is_news else self.draw.uniform(0.1, BEAT_S), self._exchange, machine)

    def _watch(self, machine: Machine) -> None:
        """One turn of the thread that looks at the clock."""
        if machine.is_gone or machine.is_closed:
            return
        if machine.mute_until > self.now:
            self._later(machine.mute_until - self.now, self._watch, machine)
            return
        if self.now - machine.answered_at > PATIENCE_S:
            if not machine.end:
                machine.end, machine.ended_at = "cut off", self.now
            machine.is_gone = True
            if machine.part is None:
                self._connections_close(machine)
            return
        if lost := machine.round.describe_silence(self._time(machine), PATIENCE_S):
            machine.round.lost = machine.round.lost or lost
            self._part_ends(machine, Outcome(error=UnisonoError(lost)))
        self._later(BEAT_S, self._watch, machine)

    def _monitor(self, machine: Machine) -> None:
        """One look of torch's agent at the workers."""
        if machine.is_gone or machine.end:
            return
        self._later(max(LOOK_S, machine.mute_until - self.now), self._monitor, machine)
        if machine.mute_until > self.now:
            return
        if machine.is_closed and (machine.part is None or machine.part.error is None):
            known = machine.round.trouble()
            self._decided(machine, "the agents have lost each other" if known is None else str(known.error))
        elif machine.part is not None:
            if machine.part.error is None:
                machine.round.say(is_done=True)
            elif not machine.round.own.verdict:
                machine.round.say(verdict=machine.part.to_bytes())
            if (found := machine.round.decide(machine.part, self._time(machine))) is not None:
                self._decided(machine, "well" if found.error is None else str(found.error))

    def _decided(self, machine: Machine, end: str) -> None:
        machine.end, machine.ended_at = end, self.now
        self._leave(machine)

    def _leave(self, machine: Machine) -> None:
        """After its verdict: torch's barrier, after a good end; the last report; the linger of the store's host."""
        if machine.is_gone:
            return
        if machine.end == "well" and not machine.is_closed:
            machine.is_in_barrier = True
            waits = not all(each.is_in_barrier for each in self.machines) and self.is_served
            if waits and self.now < machine.ended_at + PATIENCE_S:
                self._later(0.2, self._leave, machine)
                return
        machine.round.say(is_leaving=True)
        if not machine.is_closed and machine.cut_until <= self.now and machine.mute_until <= self.now:
            self.store[machine.number] = replace(machine.round.own, beats=machine.round.own.beats + 1)
        may_linger = machine.number == self.host and machine.round.has_failed()
        lingers = may_linger and not machine.round.are_gone(self._time(machine), PATIENCE_S)
        self._later(LINGER_S if lingers else 0.1, self._exit, machine)

    def _exit(self, machine: Machine) -> None:
        machine.is_gone = True
        self.is_served &= machine.number != self.host


def play(seed: int) -> Simulation:
    """A random run, and its end."""
    draw = random.Random(seed)
    count = draw.choice((2, 2, 3, 4))
    lasts_s = draw.choice((2.0, 8.0, 30.0))
    faults = [
        Fault(
            draw.choice(FAULTS),
            draw.randrange(count),
            draw.uniform(1, lasts_s + 3),
            draw.choice((0.5, SHORT_S, 2 * PATIENCE_S)),
        )
        for _ in range(draw.choice((0, 1, 1, 2, 3)))
    ]
    simulation = Simulation(draw, count, draw.randrange(count), faults, lasts_s)
    simulation.run(until=lasts_s + 120)
    return simulation
