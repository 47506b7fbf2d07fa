"""The other machines of a run: what they report of their ranks, and whether they still live

A worker whose peer was killed is woken at once, since the peer's machine closes the connection. A machine that has
lost its power, or its link, closes nothing: the collective waits for its time-out, and the agent with it, which only
looks at its own workers. So each agent says every second, in the store where the agents meet, that it is there. Where
one has been silent for too long, the workers that may wait for it are ended: that counts as a failure of theirs, and
where a restart is left, they are started again with the machines that are there.

With that it says how far its ranks are, and why its part of the group has failed if it has: then no machine waits for
ranks that are gone, and all know the first cause.

Every agent goes by its own clock, so the clocks of the machines may differ.

*Threads:* two daemons. `unisono-machines` speaks and listens, and waits for ever where the store's machine is silent,
since some of the store's calls have no time-out. `unisono-silence` looks at the clock. The agent's main thread begins
rounds and closes; any thread may say something.
"""

from __future__ import annotations

import contextlib
import json
import platform
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch.distributed as dist

from unisono.errors import UnisonoError
from unisono.launch.hosts.endpoint import split_endpoint
from unisono.outcome import Outcome

_BEAT_S = 1.0
_LINGER_S = 3.0  # how long the endpoint's agent waits, at a bad end, for the others to take leave, who may still read


@dataclass(frozen=True)
class Word:
    """What a machine reports to the others.

    Attributes:
        machine, host: its number in this round, and its name.
        beats: how often it has said something, so that it is not silent.
        pulses: of its ranks that have not ended: how far each is, and the collective that it is in.
        returned: its ranks that have returned.
        num_asks: how often it has asked where the ranks of all stand.
        stacks: where its own stand.
        verdict: why its part of the group has failed, an `Outcome` as bytes.
        is_done: whether its part has come to a good end.
        is_leaving: whether its agent ends in order.
    """

    machine: int
    host: str = field(default_factory=platform.node)
    beats: int = 0
    pulses: dict[int, tuple[int, str]] = field(default_factory=dict)
    returned: Sequence[int] = ()
    num_asks: int = 0
    stacks: dict[int, str] = field(default_factory=dict)
    verdict: bytes = b""
    is_done: bool = False
    is_leaving: bool = False

    def to_text(self) -> str:
        return json.dumps({**asdict(self), "verdict": self.verdict.hex()})

    @classmethod
    def from_text(cls, text: bytes) -> Word:
        facts = json.loads(text)
        facts["pulses"] = {int(rank): (progress, doing) for rank, (progress, doing) in facts["pulses"].items()}
        facts["stacks"] = {int(rank): stack for rank, stack in facts["stacks"].items()}
        facts["verdict"] = bytes.fromhex(facts["verdict"])
        return cls(**facts)


@dataclass
class _Round:
    """One start of all workers."""

    name: str  # the same for all agents, and for no other round
    count: int
    own: Word
    heard: dict[int, tuple[Word | None, float]] = field(default_factory=dict)  # each machine's last, and since when


class OtherMachines:
    """Speaks for this machine, and listens to the others.

    Args:
        endpoint: where the agents meet.
        patience_s: how long a machine may be silent.
        on_word: called with what a machine has said, where that is more than that it is there.
        on_lost: called with a sentence, again and again until the next round, when one has been silent for longer.
        on_cut_off: called with a sentence when the machine of the endpoint has.
        beat_s: how often to speak, at least.
    """

    def __init__(
        self,
        endpoint: str,
        patience_s: float,
        on_word: Callable[[Word], None],
        on_lost: Callable[[str], None],
        on_cut_off: Callable[[str], None],
        beat_s: float = _BEAT_S,
    ) -> None:
        self._endpoint = split_endpoint(endpoint)
        self._patience_s = patience_s
        self._beat_s = min(beat_s, _BEAT_S, patience_s / 5)
        self._on_word, self._on_lost, self._on_cut_off = on_word, on_lost, on_cut_off
        self._answered_at = time.monotonic()
        self._round: _Round | None = None
        self._lock = threading.Lock()  # covers this machine's own word
        self._has_news = threading.Event()
        self._is_over, self._is_closed = threading.Event(), threading.Event()
        self._threads = [
            threading.Thread(target=_talk, args=(self,), name="unisono-machines", daemon=True),
            threading.Thread(target=_watch, args=(self,), name="unisono-silence", daemon=True),
        ]

    @property
    def count(self) -> int:
        """How many they are."""
        return self._round.count - 1 if self._round is not None else 0

    def begin_round(self, name: str, number: int, count: int) -> None:
        """The agents have met, and start workers; this machine's number, of how many."""
        self._round = _Round(f"unisono/machines/{name}", count, Word(number))
        if self._threads[0].ident is None:
            self._answered_at = time.monotonic()
            for thread in self._threads:
                thread.start()
        self._has_news.set()

    def say(self, **facts: Any) -> None:
        """Change what this machine reports, by names of `Word`; how far its ranks are can wait for the next beat."""
        with self._lock:
            if (current := self._round) is None or (word := replace(current.own, **facts)) == current.own:
                return
            current.own = word
        if any(facts.get(name) for name in ("num_asks", "stacks", "verdict", "is_done", "is_leaving")):
            self._has_news.set()

    def ask(self) -> None:
        """Ask where the ranks of all stand."""
        if (current := self._round) is not None:
            self.say(num_asks=current.own.num_asks + 1)

    def failures(self) -> list[Outcome[Any]]:
        """Why other parts of the group have failed; those first that are no victims."""
        found: list[Outcome[Any]] = []
        for word in self._words():
            if word.verdict:
                found.append(Outcome.from_bytes(word.verdict))
            elif word.is_leaving and not word.is_done:
                left = UnisonoError(f"node {word.machine} ({word.host}) has left the run")
                found.append(Outcome(error=left, is_secondary=True))
        return sorted(found, key=lambda outcome: outcome.is_secondary)

    def are_done(self) -> bool:
        """Whether the parts of all other machines have come to a good end."""
        return sum(word.is_done for word in self._words()) == self.count

    @contextlib.contextmanager
    def attended(self, is_host: bool) -> Iterator[None]:
        """After the block nothing is said or heard any more.

        Args:
            is_host: whether this machine serves the endpoint, so that what was said last goes with it.
        """
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
                    thread.join(self._beat_s)  # it may wait for an answer that does not come

    def _linger(self) -> None:
        deadline = time.monotonic() + _LINGER_S
        while sum(word.is_leaving for word in self._words()) < self.count:
            if time.monotonic() > deadline or self._is_closed.is_set():
                break
            time.sleep(0.05)

    def _words(self) -> list[Word]:
        heard = list(self._round.heard.values()) if self._round is not None else []
        return [word for word, _ in heard if word is not None]

    def _converse(self) -> None:
        host, port = self._endpoint
        store = dist.TCPStore(host, port, None, False, wait_for_workers=False)  # type: ignore[attr-defined] # as ever
        is_over = False
        while not is_over:
            self._has_news.wait(self._beat_s)
            self._has_news.clear()
            is_over = self._is_over.is_set()  # what was said before is still passed on
            if (current := self._round) is not None:
                with self._lock:
                    current.own = replace(current.own, beats=current.own.beats + 1)
                store.set(f"{current.name}/{current.own.machine}", current.own.to_text())
                self._listen(store, current)
            self._answered_at = time.monotonic()

    def _listen(self, store: dist.distributed_c10d.Store, current: _Round) -> None:
        for number in set(range(current.count)) - {current.own.machine}:
            key = f"{current.name}/{number}"
            word = Word.from_text(store.get(key)) if store.check([key]) else None
            before, _ = current.heard.get(number, (None, 0.0))
            if word != before or number not in current.heard:
                current.heard[number] = (word, time.monotonic())
                if word is not None and (before is None or word != replace(before, beats=word.beats)):
                    self._on_word(word)

    def _look(self) -> None:
        while not self._is_over.wait(self._beat_s) and not self._is_closed.is_set():
            now = time.monotonic()
            if now - self._answered_at > self._patience_s:
                host, port = self._endpoint
                self._on_cut_off(f"the machine that serves {host}:{port} {self._silence()}, or that of this machine is")
            for number, (word, since) in list(self._round.heard.items() if self._round is not None else ()):
                is_leaving = word is not None and word.is_leaving  # others hear of that from its workers
                if not is_leaving and now - since > self._patience_s:
                    host = "not heard of yet" if word is None else word.host
                    self._on_lost(f"node {number} ({host}) {self._silence()}")

    def _silence(self) -> str:
        return f"has been silent for {self._patience_s:.4g} s: its power or its link is gone"


def _talk(others: OtherMachines) -> None:
    """Body of the first thread. A store that is closed is the agent's own to see."""
    try:
        others._converse()
    except RuntimeError:
        others._is_closed.set()


def _watch(others: OtherMachines) -> None:
    """Body of the second."""
    others._look()
