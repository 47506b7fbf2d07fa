"""Copies of snapshots on the next machine, where the state is divided among the ranks of all machines: so that one of
them may be lost.

Each rank sends what it has written to the rank with its number on the next machine, and receives from the machine
before, alongside its steps, with half of the bandwidth. What it has received is a part of the snapshot like its own, in
another region of the same memory.

When a rank begins snapshot n + 1, it has waited until its copy of n is received; so have all others when n + 2 begins,
since a step lies between. With one slot more than without copies, n is then whole, whichever machine is lost.

*Threads:* the rank's own thread calls `send`, `wait` and `drop_after`; one more sends and receives.
"""

from __future__ import annotations

import threading
import time
from queue import SimpleQueue

import torch

from unisono.checkpoint.snapshot_memory import SlotWriter
from unisono.comm.aside import exchange_aside
from unisono.comm.operations import HOST
from unisono.launch.process_group import suppress_greetings
from unisono.world import World

_PIECE = 16 << 20  # bytes


class Neighbours:
    """The copies that one rank sends and receives. All ranks make theirs together, as for `new_group`.

    Args:
        own: writes this rank's snapshots.
        guests: writes those of the machine before.
    """

    def __init__(self, world: World, own: SlotWriter, guests: SlotWriter) -> None:
        self._own, self._guests, count = own, guests, world.local_world_size
        self._to, self._from = ((world.rank + shift) % world.world_size for shift in (count, -count))
        with suppress_greetings():
            self._exchange = exchange_aside(self._to, self._from)
        self._numbers, self._is_idle, self._error = SimpleQueue[int](), threading.Event(), list[Exception]()
        self._is_waited_for = threading.Event()
        self._is_idle.set()
        threading.Thread(target=_copy_all, args=(self,), name="unisono-copies", daemon=True).start()

    def send(self, number: int) -> None:
        """Begin to copy this rank's last snapshot, after `wait`."""
        self._is_waited_for.clear()
        self._is_idle.clear()
        self._numbers.put(number)

    def wait(self) -> None:
        """Wait until the copies that were begun are here and there. Raises the error of the transport."""
        self._is_waited_for.set()
        self._is_idle.wait()
        for error in self._error:
            raise error

    def drop_after(self, step: int) -> None:
        """As in `SlotWriter`, for the copies that are here, after `wait`."""
        self._guests.drop_after(step)

    def copy_all(self) -> None:
        """Copy each snapshot that is to be sent, until one cannot be; in the thread next to the rank's."""
        try:
            while not self._error:
                self._copy(self._numbers.get())
                self._is_idle.set()
        except Exception as error:
            error.add_note(f"while a snapshot was copied to rank {self._to}, and one from rank {self._from}")
            self._error.append(error)
            self._is_idle.set()

    def _copy(self, number: int) -> None:
        sent = self._own.written(number)
        size = torch.zeros(1, dtype=torch.int64, device=HOST)
        self._exchange(torch.tensor([sent.numel()], device=HOST), size)
        received = self._guests.begin(number, int(size))
        for begin in range(0, max(sent.numel(), received.numel()), _PIECE):
            began = time.monotonic()
            self._exchange(sent[begin : begin + _PIECE], received[begin : begin + _PIECE])
            self._is_waited_for.wait(time.monotonic() - began)
        self._guests.commit(number)


def _copy_all(neighbours: Neighbours) -> None:
    neighbours.copy_all()
