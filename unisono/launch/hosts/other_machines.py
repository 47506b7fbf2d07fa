"""The other machines of a run: what they report of their ranks, and whether they are still alive.

A worker whose peer was killed is woken immediately, since the peer's machine closes the connection. A machine that has
lost its power, or its link, closes nothing: the collective waits for its timeout, and the agent with it. So each agent
announces every second, in the store where the agents meet, that it is alive, the progress of its ranks, and, if its
part of the group has failed, the reason. When one has been silent for too long, the workers that may be waiting for it
are ended: that counts as a failure of theirs. Every agent uses only its own clock, so those of the machines may differ.

*Threads:* two daemons. `unisono-machines` sends and receives; it blocks indefinitely if the store's machine is silent,
since some of the store's calls have no timeout. `unisono-silence` checks the clock. The agent's main thread begins
rounds and closes; any thread may call `say`.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import platform
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch.distributed as dist

from unisono.comm.sealing import UnsignedError, sealed_store
from unisono.errors import UnisonoError
from unisono.launch.hosts.endpoint import split_endpoint
from unisono.outcome import Outcome

logger = logging.getLogger(__name__)

_BEAT_S = 1.0
_SILENCE_S = 3.0  # several beats: a machine that has been silent for so long explains why its peers failed
# how long the endpoint's agent waits, after a failure, for the others to leave, since they may still be reading
_LINGER_S = 3.0


@dataclass(frozen=True)
class MachineReport:
    """What a machine reports to the others.

    Attributes:
        machine, host: its number in this round, and its host name.
        beats: how many times it has reported; it changes even if nothing else does.
        pulses: for each of its ranks that has not ended, its progress and its current collective.
        stacks: where its own ranks are, once none of all ranks has moved for too long.
        verdict: why its part of the group has failed, an `Outcome` as bytes.
    """

    machine: int
    host: str = field(default_factory=platform.node)
    beats: int = 0
    pulses: dict[int, tuple[int, str]] = field(default_factory=dict)
    returned: Sequence[int] = ()
    stacks: dict[int, str] = field(default_factory=dict)
    verdict: bytes = b""
    is_done: bool = False
    is_leaving: bool = False


@dataclass
class _AgentRound:
    """One start of all workers."""

    name: str  # the same for all agents, and for no other round
    count: int
    own: MachineReport
    # each machine's latest report, and since when
    heard: dict[int, tuple[MachineReport | None, float]] = field(default_factory=dict)


class OtherMachines:
    """Speaks for this machine, and listens to the others.

    Args:
        endpoint: where the agents meet.
        patience_s: seconds that a machine may be silent.
        on_report: called with a machine's report, if it says more than that the machine is alive.
        on_lost: called with a sentence, repeatedly until the next round, when a machine has been silent for longer.
        on_cut_off: called with a sentence when the endpoint's machine has been.
        beat_s: the longest interval between two reports.
    """

    def __init__(
        self,
        endpoint: str,
        patience_s: float,
        on_report: Callable[[MachineReport], None],
        on_lost: Callable[[str], None],
        on_cut_off: Callable[[str], None],
        beat_s: float = _BEAT_S,
    ) -> None:
        self._endpoint = split_endpoint(endpoint)
        self._patience_s = patience_s
        self._beat_s = min(beat_s, _BEAT_S, patience_s / 5)
        self._on_report, self._on_lost, self._on_cut_off = on_report, on_lost, on_cut_off
        self._answered_at = time.monotonic()
        self._round: _AgentRound | None = None
        self._lock = threading.Lock()  # covers this machine's own report
        self._has_news = threading.Event()
        self._is_over, self._is_closed = threading.Event(), threading.Event()
        self._threads = [
            threading.Thread(target=_talk, args=(self,), name="unisono-machines", daemon=True),
            threading.Thread(target=_watch, args=(self,), name="unisono-silence", daemon=True),
        ]

    @property
    def count(self) -> int:
        """The number of other machines."""
        return self._round.count - 1 if self._round is not None else 0

    def begin_round(self, name: str, number: int, count: int) -> None:
        """Begin a round: the agents have met and start workers. Takes this machine's number, and the number of
        machines."""
        # A new object, not a change of the old one, which the first thread may be reading.
        self._round = _AgentRound(f"unisono/machines/{name}", count, MachineReport(number))
        if self._threads[0].ident is None:
            self._answered_at = time.monotonic()
            for thread in self._threads:
                thread.start()
        self._has_news.set()

    def say(self, **facts: Any) -> None:
        """Change what this machine reports, by names of `MachineReport`; the progress of its ranks can wait for the
        next beat."""
        with self._lock:
            if (current := self._round) is None or (report := replace(current.own, **facts)) == current.own:
                return
            current.own = report
        if any(facts.get(name) for name in ("stacks", "verdict", "is_done", "is_leaving")):
            self._has_news.set()

    def failures(self) -> list[Outcome[Any]]:
        """Why other parts of the group have failed; primary causes first, victims last."""
        found: list[Outcome[Any]] = []
        for report in self._reports():
            if report.verdict:
                found.append(Outcome.from_bytes(report.verdict))
            elif report.is_leaving and not report.is_done:
                left = UnisonoError(f"node {report.machine} ({report.host}) has left the run")
                found.append(Outcome(error=left, is_secondary=True))
        return sorted(found, key=lambda outcome: outcome.is_secondary)

    def are_done(self) -> bool:
        """Whether the parts of all other machines have ended successfully."""
        return sum(report.is_done for report in self._reports()) == self.count

    def describe_silence(self, seconds: float = _SILENCE_S) -> str:
        """A sentence on a machine that has been silent for longer; "" if there is none."""
        # A copy: the first thread adds entries meanwhile.
        heard = list(self._round.heard.items()) if self._round is not None else []
        for number, (report, since) in heard:
            for_s = time.monotonic() - since
            if for_s > seconds and not (report is not None and report.is_leaving):  # its workers say why it leaves
                return f"node {number} ({'not heard of yet' if report is None else report.host}) {_silence(for_s)}"
        return ""

    @contextlib.contextmanager
    def attended(self, is_host: bool) -> Iterator[None]:
        """End all communication when the block ends. If this machine serves the endpoint, its last reports are lost
        when it exits."""
        try:
            yield
        finally:
            self.say(is_leaving=True)
            if is_host and self._round is not None and self._round.own.verdict:
                self._linger()
            self._is_over.set()
            self._has_news.set()
            for thread in self._threads:
                if thread.ident is not None:
                    thread.join(self._beat_s)  # it may be waiting for an answer that never comes

    def _linger(self) -> None:
        deadline = time.monotonic() + _LINGER_S
        while time.monotonic() < deadline and not self._is_closed.is_set():
            heard = list(self._round.heard.values()) if self._round is not None else []
            gone = [(report and report.is_leaving) or self._is_lost(since) for report, since in heard]
            if sum(map(bool, gone)) == self.count:
                break
            time.sleep(0.05)

    def _is_lost(self, since: float) -> bool:
        return time.monotonic() - since > self._patience_s

    def _reports(self) -> list[MachineReport]:
        heard = list(self._round.heard.values()) if self._round is not None else []
        return [report for report, _ in heard if report is not None]

    def _exchange_reports(self) -> None:
        host, port = self._endpoint
        store = sealed_store(dist.TCPStore(host, port, None, False, wait_for_workers=False))  # type: ignore[attr-defined] # torch re-exports it silently
        is_over = False
        while not is_over:
            self._has_news.wait(self._beat_s)
            # Cleared before the report is sent, so that later news cause another turn.
            self._has_news.clear()
            is_over = self._is_over.is_set()  # read first, so that the last reports are still sent
            if (current := self._round) is not None:
                with self._lock:
                    current.own = replace(current.own, beats=current.own.beats + 1)
                report: Any = pickle.dumps(current.own)  # annotated as str, but accepts bytes
                store.set(f"{current.name}/{current.own.machine}", report)
                self._listen(store, current)
            # Reached only if the store has answered.
            self._answered_at = time.monotonic()

    def _listen(self, store: dist.distributed_c10d.Store, current: _AgentRound) -> None:
        for number in set(range(current.count)) - {current.own.machine}:
            key = f"{current.name}/{number}"
            # `get` alone would wait until the key exists.
            try:
                report = pickle.loads(store.get(key)) if store.check([key]) else None
            except UnsignedError as error:
                logger.warning("machine %d: %s", number, error)
                continue
            before, _ = current.heard.get(number, (None, 0.0))
            if report is not None and before is not None and report.beats < before.beats:
                logger.warning("machine %d: an older report was written again by somebody else", number)
                continue
            if report != before or number not in current.heard:
                current.heard[number] = (report, time.monotonic())
                if report is not None and (before is None or report != replace(before, beats=report.beats)):
                    self._on_report(report)


def _silence(seconds: float) -> str:
    return f"has been silent for {seconds:.0f} s: it or its link is gone"


def _talk(others: OtherMachines) -> None:
    """Body of the first thread. A closed store is left for the agent itself to notice."""
    try:
        others._exchange_reports()
    except RuntimeError:
        others._is_closed.set()


def _watch(others: OtherMachines) -> None:
    """Body of the second thread."""
    while not others._is_over.wait(others._beat_s) and not others._is_closed.is_set():
        silent_s = time.monotonic() - others._answered_at
        if silent_s > others._patience_s:
            host, port = others._endpoint
            others._on_cut_off(f"the machine that serves {host}:{port} {_silence(silent_s)}, or this one's is")
        if lost := others.describe_silence(others._patience_s):
            others._on_lost(lost)
