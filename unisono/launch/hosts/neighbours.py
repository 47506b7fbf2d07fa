"""The other machines of a run: do they still live, where nothing else would tell?

A worker whose peer was killed is woken at once, since the peer's machine closes the connection. A machine that has
lost its power, or its link, closes nothing: the collective waits for its time-out, and the agent with it, which only
looks at its own workers. So each agent says every second, in the store where the agents meet, that it is there. Where
one has been silent for too long, the workers that may wait for it are ended: that counts as a failure of theirs, and
where a restart is left, they are started again with the machines that are there.

Every agent goes by its own clock, so the clocks of the machines may differ.

*Threads:* two daemons. `unisono-neighbours` speaks and listens, and waits for ever where the store's machine is silent,
since some of the store's calls have no time-out. `unisono-silence` looks at the clock. The agent's main thread begins
rounds and closes.
"""

from __future__ import annotations

import contextlib
import platform
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch.distributed as dist

from unisono.launch.hosts.endpoint import split_endpoint

_BEAT_S = 1.0
_GONE = "-"  # said by an agent that ends in order: its workers have ended, and others hear of that from theirs


@dataclass
class _Round:
    """One start of all workers."""

    name: str  # the same for all agents, and for no other round
    number: int  # of this machine
    count: int
    heard: dict[int, tuple[str, float]] = field(default_factory=dict)  # what each machine has said last, and since when
    beats: int = 0


class Neighbours:
    """Speaks for this machine, and listens to the others.

    Args:
        endpoint: where the agents meet.
        patience_s: how long a machine may be silent.
        on_lost: called with a sentence, again and again until the next round, when one has been silent for longer.
        on_cut_off: called with a sentence when the machine of the endpoint has.
    """

    def __init__(
        self, endpoint: str, patience_s: float, on_lost: Callable[[str], None], on_cut_off: Callable[[str], None]
    ) -> None:
        self._endpoint = split_endpoint(endpoint)
        self._patience_s = patience_s
        self._beat_s = min(_BEAT_S, patience_s / 5)
        self._on_lost = on_lost
        self._on_cut_off = on_cut_off
        self._answered_at = time.monotonic()
        self._round: _Round | None = None
        self._is_over, self._is_closed = threading.Event(), threading.Event()
        self._threads = [
            threading.Thread(target=_talk, args=(self,), name="unisono-neighbours", daemon=True),
            threading.Thread(target=_watch, args=(self,), name="unisono-silence", daemon=True),
        ]

    def begin_round(self, environ: Mapping[str, str]) -> None:
        """The agents have met, and start workers; the variables of any of them tell who the machines are."""
        name = f"unisono/machines/{environ['MASTER_ADDR']}:{environ['MASTER_PORT']}"  # new each time
        self._round = _Round(name, int(environ["GROUP_RANK"]), int(environ["GROUP_WORLD_SIZE"]))
        if self._threads[0].ident is None:
            self._answered_at = time.monotonic()
            for thread in self._threads:
                thread.start()

    @contextlib.contextmanager
    def attended(self) -> Iterator[None]:
        """After the block nothing is said or heard any more."""
        try:
            yield
        finally:
            self._is_over.set()
            for thread in self._threads:
                if thread.ident is not None:
                    thread.join(self._beat_s)  # it may wait for an answer that does not come

    def _converse(self) -> None:
        host, port = self._endpoint
        store = dist.TCPStore(host, port, None, False, wait_for_workers=False)  # type: ignore[attr-defined] # as ever
        while not self._is_over.wait(self._beat_s):
            if (current := self._round) is not None:
                current.beats += 1
                store.set(f"{current.name}/{current.number}", f"{current.beats} {platform.node()}")
                self._listen(store, current)
            self._answered_at = time.monotonic()
        if (current := self._round) is not None:
            store.set(f"{current.name}/{current.number}", _GONE)

    def _listen(self, store: dist.distributed_c10d.Store, current: _Round) -> None:
        for number in set(range(current.count)) - {current.number}:
            key = f"{current.name}/{number}"
            said = store.get(key).decode() if store.check([key]) else ""
            if said != current.heard.get(number, (None, 0.0))[0]:
                current.heard[number] = (said, time.monotonic())

    def _look(self) -> None:
        while not self._is_over.wait(self._beat_s) and not self._is_closed.is_set():
            now = time.monotonic()
            if now - self._answered_at > self._patience_s:
                host, port = self._endpoint
                self._on_cut_off(f"the machine that serves {host}:{port} {self._silence()}, or that of this machine is")
            for number, (said, since) in list(self._round.heard.items() if self._round is not None else ()):
                if said != _GONE and now - since > self._patience_s:
                    self._on_lost(f"node {number} ({said.partition(' ')[2] or 'not heard of yet'}) {self._silence()}")

    def _silence(self) -> str:
        return f"has been silent for {self._patience_s:.4g} s: its power or its link is gone"


def _talk(neighbours: Neighbours) -> None:
    """Body of the first thread. A store that is closed is the agent's own to see."""
    try:
        neighbours._converse()
    except RuntimeError:
        neighbours._is_closed.set()


def _watch(neighbours: Neighbours) -> None:
    """Body of the second."""
    neighbours._look()
