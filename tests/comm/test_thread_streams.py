"""Threads whose work lies on streams: what is combined follows all of it, and all of it follows what was combined."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch

from unisono.comm.operations import Call
from unisono.comm.selection import thread_communicators
from unisono.comm.threads import ThreadCommunicator
from unisono.devices.cpu import CpuBackend

LONG = timedelta(seconds=30)
CALL = Call("sum")


class Streams(CpuBackend):
    """A family that notes each mark, by its number, and who waits for it."""

    def __init__(self) -> None:
        self.log: list[tuple[str, int]] = []
        self.marked: list[Any] = []

    def mark(self, device: torch.device, tensors: Any = ()) -> int:
        self.marked.append(tensors)
        self.log.append(("mark", len(self.marked)))
        return len(self.marked)

    def wait_ready(self, token: int) -> None:
        self.log.append(("wait", token))


def meet(seats: list[ThreadCommunicator], values: list[Any], combine: Any) -> list[Any]:
    with ThreadPoolExecutor(len(seats)) as pool:
        return list(pool.map(lambda seat, value: seat.meet(CALL, value, combine), seats, values))


def two_on(family: CpuBackend) -> list[Any]:
    return thread_communicators([torch.device("cpu", 0), torch.device("cpu", 1)], [family, family], LONG)


def test_what_is_combined_lies_between_the_work_before_and_the_work_behind():
    family = Streams()

    def combine(tensors: list[torch.Tensor]) -> torch.Tensor:
        family.log.append(("combine", 0))
        return sum(tensors)

    one, other = meet(two_on(family), [torch.ones(2), torch.ones(2)], combine)
    assert one is other
    names = [name for name, _ in family.log]
    assert names == ["mark"] * 2 + ["wait"] * 2 + ["combine"] + ["mark"] * 2 + ["wait"] * 4
    assert sorted(number for name, number in family.log[2:4]) == [1, 2]
    assert sorted(number for name, number in family.log[7:]) == [3, 3, 4, 4]  # each rank, for what any of them may read
    assert family.marked[2] is family.marked[3] is one  # whose memory is then in use on their streams


def test_where_submitting_is_doing_nobody_waits_for_a_mark():
    class Plain(Streams):
        def mark(self, device: torch.device, tensors: Any = ()) -> None:
            return None

    family = Plain()
    assert meet(two_on(family), [torch.ones(1), torch.ones(1)], lambda tensors: len(tensors)) == [2, 2]
    assert family.log == []


def test_what_is_no_tensor_needs_no_mark():
    family = Streams()
    assert meet(two_on(family), ["a", "b"], "".join) == ["ab", "ab"]
    assert family.log == []
