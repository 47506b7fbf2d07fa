"""The other machines of a run: what they report of their ranks, and whether they are still alive.

A worker whose peer was killed is woken immediately, since the peer's machine closes the connection. A machine that has
lost its power, or its link, closes nothing: the collective waits for its timeout, and the agent with it. So each agent
announces every second, in the store where the agents meet, that it is alive, the progress of its ranks, and, if its
part of the group has failed, the reason. When a machine has been silent for too long, the workers that may be waiting
for it are ended: that counts as their failure. Every agent uses only its own clock, so clocks may differ.

*Threads:* two daemons. `unisono-machines` sends and receives; it blocks indefinitely if the store's machine is silent,
since some of the store's calls have no timeout. `unisono-silence` checks the clock. The agent's main thread begins
rounds and closes; any thread may call `say`.
"""

from __future__ import annotations

import contextlib
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from unisono.comm.sealing import Overwriting, UnsignedError, sealed_store
from unisono.launch.hosts.agent_round import AgentRound, MachineReport, silence
from unisono.launch.hosts.endpoint import split_endpoint

_BEAT_S = 1.0
# how long the endpoint's agent waits, after a failure, for the others to leave, since they may still be reading
_LINGER_S = 3.0


class OtherMachines:
    """Speaks for this machine, and listens to the others."""

    def __init__(
        self,
        endpoint: str,  # where the agents meet
        patience_s: float,  # that a machine may be silent
        on_report: Callable[[MachineReport], None],  # which says more than that the machine is alive
        # With a sentence when a machine has been silent for longer, and whether it is the first time in this round;
        # called until the next round.
        on_lost: Callable[[str, bool], None],
        on_cut_off: Callable[[str], None],  # with a sentence when the endpoint's machine has been silent
        beat_s: float = _BEAT_S,  # the longest interval between two reports
    ) -> None:
        self._endpoint = split_endpoint(endpoint)
        self._patience_s = patience_s
        self._beat_s = min(beat_s, _BEAT_S, patience_s / 5)
        self._on_report, self._on_lost, self._on_cut_off = on_report, on_lost, on_cut_off
        self._answered_at = time.monotonic()
        self.round = AgentRound("", 1, MachineReport(0))  # before the first start, this machine is alone
        self._lock = threading.Lock()  # covers this machine's own report
        self._has_news = threading.Event()
        self._overwriting = Overwriting()  # of reports, from any machine
        self._is_over, self._is_closed = threading.Event(), threading.Event()
        self._threads = [
            threading.Thread(target=_run_exchange, args=(self,), name="unisono-machines", daemon=True),
            threading.Thread(target=_watch, args=(self,), name="unisono-silence", daemon=True),
        ]

    @property
    def count(self) -> int:
        """The number of other machines."""
        return self.round.count - 1

    def begin_round(self, name: str, number: int, count: int) -> None:
        """Begin a round: the agents have met and start workers. Takes this machine's number, and the number of
        machines."""
        # A new object, not a change of the old one, which the threads may be reading.
        self.round = AgentRound(f"unisono/machines/{name}", count, MachineReport(number))
        if self._threads[0].ident is None:
            self._answered_at = time.monotonic()
            for thread in self._threads:
                thread.start()
        self._has_news.set()

    def say(self, **facts: Any) -> None:
        """Change what this machine reports (`AgentRound.say`); the progress of its ranks can wait for the next beat."""
        with self._lock:
            is_news = self.round.say(**facts)
        if is_news and any(facts.get(name) for name in ("stacks", "verdict", "is_done", "is_leaving")):
            self._has_news.set()

    def listen_now(self) -> None:
        """Take the others' reports now, without waiting for the next beat."""
        self._has_news.set()

    @contextlib.contextmanager
    def attended(self, is_host: bool) -> Iterator[None]:
        """End all communication when the block ends. If this machine serves the endpoint, all reports are lost when it
        exits: after a failure, wherever it was, the others may still need them."""
        try:
            yield
        finally:
            self.say(is_leaving=True)
            if is_host and self.round.has_failed():
                self._linger_for_readers()
            self._is_over.set()
            self._has_news.set()
            for thread in self._threads:
                if thread.ident is not None:
                    thread.join(self._beat_s)  # it may be waiting for an answer that never comes

    def _linger_for_readers(self) -> None:
        deadline = time.monotonic() + _LINGER_S
        while time.monotonic() < deadline and not self._is_closed.is_set():
            if self.round.are_gone(time.monotonic(), self._patience_s):
                break
            time.sleep(0.05)

    def _exchange_reports(self) -> None:
        host, port = self._endpoint
        store = sealed_store(dist.TCPStore(host, port, None, False, wait_for_workers=False))  # type: ignore[attr-defined] # torch re-exports it silently
        is_over = False
        while not is_over:
            self._has_news.wait(self._beat_s)
            # Cleared before the report is sent, so that later news causes another turn.
            self._has_news.clear()
            is_over = self._is_over.is_set()  # read first, so that the last reports are still sent
            with self._lock:
                current = self.round
                current.own = replace(current.own, beats=current.own.beats + 1)
            report: Any = pickle.dumps(current.own)  # annotated as str, but accepts bytes
            store.set(f"{current.name}/{current.own.machine}", report)
            self._listen(store, current)
            # Reached only if the store has answered.
            self._answered_at = time.monotonic()

    def _listen(self, store: dist.distributed_c10d.Store, current: AgentRound) -> None:
        for number in set(range(current.count)) - {current.own.machine}:
            key = f"{current.name}/{number}"
            try:
                # `get` alone would wait until the key exists.
                report = pickle.loads(store.get(key)) if store.check([key]) else None
                if current.hear(number, report, time.monotonic()) and report is not None:
                    self._on_report(report)
            except UnsignedError as error:
                self._overwriting.note(error, f"the report of machine {number}")


def _run_exchange(others: OtherMachines) -> None:
    """Body of the first thread. The agent itself notices a closed store."""
    try:
        others._exchange_reports()
    except RuntimeError:
        others._is_closed.set()


def _watch(others: OtherMachines) -> None:
    """Body of the second thread."""
    while not others._is_over.wait(others._beat_s) and not others._is_closed.is_set():
        current, now = others.round, time.monotonic()
        if now - others._answered_at > others._patience_s:
            host, port = others._endpoint
            silent = silence(now - others._answered_at)
            others._on_cut_off(f"the machine that serves {host}:{port} {silent}, or this one's is")
        if lost := current.describe_silence(now, others._patience_s):
            is_first, current.lost = not current.lost, current.lost or lost
            others._on_lost(lost, is_first)
