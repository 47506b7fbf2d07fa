"""What the agents of a run know of one another in one start of all workers, and what follows from that.

Reports and times in, decisions out: no thread, no clock, no store. So `tests/launch/hosts/test_simulated_agents.py` can
play thousands of runs, in which messages are late and machines pause, fail and are lost.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from unisono.comm.outcome import Outcome, first_cause
from unisono.comm.sealing import UnsignedError
from unisono.errors import StoppedError, UnisonoError
from unisono.launch.reports import Pulse

_SILENCE_S = 3.0  # several beats: a machine that has been silent that long explains why its peers failed
_CAUSE_S = 5.0  # longer: a machine's last report is read up to a beat after it was written


@dataclass(frozen=True)
class MachineReport:
    """What a machine reports to the others."""

    machine: int  # its number in this round
    host: str = field(default_factory=platform.node)
    beats: int = 0  # how many times it has reported; changes even if nothing else does
    pulses: dict[int, Pulse] = field(default_factory=dict)  # of its ranks that have not ended
    returned: Sequence[int] = ()
    stacks: dict[int, str] = field(default_factory=dict)  # of its own ranks, once no rank has moved for too long
    verdict: bytes = b""  # why its part of the group has failed, an `Outcome`
    is_done: bool = False
    is_leaving: bool = False


@dataclass
class AgentRound:
    """One start of all workers, as this machine sees it. Times are seconds of its own clock."""

    name: str  # the same for all agents, and for no other round
    count: int  # of machines
    own: MachineReport
    # Each other machine's latest report, and since when; one thread adds to it.
    heard: dict[int, tuple[MachineReport | None, float]] = field(default_factory=dict)
    lost: str = ""  # the machine that is lost, as a sentence
    _failed_at: float = math.inf  # since when it is known that the group has failed

    def say(self, **facts: Any) -> bool:
        """Change what this machine reports, by names of `MachineReport`. Returns whether that is news.

        A part that is done has not failed, even if its agent is stopped afterwards: others may have ended with it."""
        if self.own.is_done:
            facts.pop("verdict", None)
        before, self.own = self.own, replace(self.own, **facts)
        return self.own != before

    def hear(self, number: int, report: MachineReport | None, now: float) -> bool:
        """Take a machine's report, None for none yet. Returns whether it says more than that the machine is alive.
        UnsignedError: it is older than the one before, so something else has written it again."""
        before, _ = self.heard.get(number, (None, 0.0))
        if report is not None and before is not None and report.beats < before.beats:
            raise UnsignedError("an older report was written again by somebody else")
        if report == before and number in self.heard:
            return False
        self.heard[number] = (report, now)
        return report is not None and (before is None or report != replace(before, beats=report.beats))

    def reports(self) -> list[MachineReport]:
        """The latest of each other machine that has reported."""
        return [report for report, _ in list(self.heard.values()) if report is not None]

    def describe_loss(self, now: float) -> str:
        """A sentence on a machine that is lost, or has been silent so long that it may be; "" if there is none."""
        return self.lost or self.describe_silence(now, _SILENCE_S)

    def describe_silence(self, now: float, seconds: float) -> str:
        """A sentence on a machine that has been silent for longer; "" if there is none. One that leaves has said why,
        and the others need nothing more from one whose part is done."""
        for number, (report, since) in list(self.heard.items()):  # a copy: another thread adds to it
            if now - since > seconds and not (report is not None and (report.is_leaving or report.is_done)):
                host = "not heard of yet" if report is None else report.host
                return f"node {number} ({host}) {silence(now - since)}"
        return ""

    def are_gone(self, now: float, seconds: float) -> bool:
        """Whether every other machine leaves, or has been silent for longer."""
        heard = list(self.heard.values())
        gone = [(report is not None and report.is_leaving) or now - since > seconds for report, since in heard]
        return sum(gone) == self.count - 1

    def failures(self) -> list[Outcome[Any]]:
        """Why other parts of the group have failed; primary causes first, victims last."""
        found: list[Outcome[Any]] = []
        for report in self.reports():
            if report.verdict:
                found.append(Outcome.from_bytes(report.verdict))
            elif report.is_leaving and not report.is_done:
                left = UnisonoError(f"node {report.machine} ({report.host}) has left the run")
                found.append(Outcome(error=left, is_secondary=True))
        return sorted(found, key=lambda outcome: outcome.is_secondary)

    def trouble(self) -> Outcome[Any] | None:
        """Why the group has failed although the workers on this machine ended well; None if it has not."""
        if self.lost:
            return Outcome(error=UnisonoError(self.lost))
        failures = dict(enumerate(self.failures()))
        return failures[first_cause(failures)] if failures else None

    def has_failed(self) -> bool:
        """Whether any part of the group has failed, as far as this machine knows."""
        return bool(self.own.verdict) or self.trouble() is not None

    def decide(self, own: Outcome[Any], now: float) -> Outcome[Any] | None:
        """How the round has ended: as this machine's part did (`own`), or as others report; None while that is open.

        A victim's report is not the end for `_CAUSE_S` seconds: the cause may come, or be a machine's silence."""
        is_well = own.error is None or isinstance(own.error, StoppedError)
        if not is_well and not own.is_secondary:
            return own
        found = self.trouble()
        if is_well and found is None:
            return own if sum(report.is_done for report in self.reports()) == self.count - 1 else None
        if found is not None and not found.is_secondary:
            return found
        if lost := self.describe_loss(now):
            return Outcome(error=UnisonoError(lost))
        self._failed_at = min(self._failed_at, now)
        is_over = self.count == 1 or now - self._failed_at > _CAUSE_S
        return (found if is_well else own) if is_over else None


def silence(seconds: float) -> str:
    """What a silence of that many seconds means, for the end of a sentence."""
    return f"has been silent for {seconds:.0f} s: it or its link is gone"
