"""What happens when a group seems to hang: its ranks are asked for their stacks, and then the late ranks are named.

Each of several machines reports the progress of its ranks to the others (`MachineReport`), so all notice when none
moves any more. Each sends the stacks of its own ranks, and the one that has them all first reports.

*Threads:* the supervisor's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from unisono.errors import WorkerHungError
from unisono.launch.group_outcome import Worker
from unisono.launch.hang import HangWatch, hung_error
from unisono.launch.reports import Pulse
from unisono.launch.worker import stacks_path
from unisono.stacks import main_stack

if TYPE_CHECKING:
    from unisono.launch.hosts.other_machines import MachineReport, OtherMachines

_STACKS_S = 0.5  # how long the workers of a hung group have to write their stacks
_OTHERS_S = 5.0  # how long other machines have to send theirs: several beats of theirs and ours


class StackCollection:
    """The collection for one group, from the first doubt to the error, or to the next progress.

    Args:
        here: the ranks of this machine.
        ask: sends the workers the signal to write their stacks, into that directory.
        others: the other machines, if the group has ranks there.
    """

    def __init__(
        self,
        watch: HangWatch,
        here: Collection[int],
        directory: Path,
        ask: Callable[[list[Worker]], None],
        others: OtherMachines | None = None,
    ) -> None:
        self._watch = watch
        self._here = here
        self._directory = directory
        self._ask = ask
        self._others = others
        self._due: float | None = None  # when the requested stacks are expected
        self._sizes: dict[int, int] = {}  # the previous sizes of the ranks' stack files
        self._stacks: dict[int, str] | None = None  # of this machine's ranks, while waiting for those of the others
        self._reports: dict[int, MachineReport] = {}  # the last of each other machine
        self._reported: dict[int, tuple[int, str]] = {}  # what the other machines last got about this machine's ranks

    def due(self) -> float | None:
        """When to call `examine`, unless something happens before."""
        return self._watch.deadline() if self._due is None else self._due

    def report_progress(self) -> None:
        """Report the progress of this machine's ranks to the others; it invalidates stacks collected before."""
        pulses = {rank: (its.progress, its.doing) for rank, its in self._watch.pulses.items() if rank in self._here}
        if self._others is not None and pulses != self._reported:
            self._reported, self._stacks = pulses, None
            returned = [rank for rank in self._watch.returned if rank in self._here]
            self._others.say(pulses=pulses, returned=returned, stacks={})

    def hear(self, report: MachineReport, now: float) -> None:
        """Handle another machine's report: the progress of its ranks, or their stacks."""
        before = self._reports.get(report.machine)
        self._reports[report.machine] = report
        for rank, (progress, doing) in report.pulses.items():
            self._watch.hear(rank, Pulse(progress, doing), now)
        for rank in (before.pulses.keys() if before is not None else set()) - report.pulses.keys():
            self._watch.forget(rank, now)
        self._watch.returned.update(report.returned)
        if self._stacks is not None and self._is_answered():
            self._due = now

    def examine(self, now: float, running: Sequence[Worker]) -> WorkerHungError | None:
        """Request the stacks of `running`, which have not ended; on a later call, unless a rank has moved, return the
        error that names the late ranks."""
        if self._due is None:
            self._request_stacks(now, running)
            return None
        if self._stacks is None:
            self._stacks = self._read_stacks(running)
            if self._others is not None:
                self._others.say(stacks={rank: main_stack(text) for rank, text in self._stacks.items()})
                if not self._is_answered():
                    self._due = now + _OTHERS_S
                    return None
        stacks, self._stacks, self._due = self._stacks, None, None
        return self._judge_stacks(now, running, stacks)

    def _request_stacks(self, now: float, running: Sequence[Worker]) -> None:
        self._due = now + _STACKS_S
        paths = {worker.rank: stacks_path(self._directory, worker.rank) for worker in running}
        # Each request appends to these files; what comes after this size is the answer to this one.
        self._sizes = {rank: path.stat().st_size for rank, path in paths.items() if path.exists()}
        self._ask(list(running))

    def _read_stacks(self, running: Sequence[Worker]) -> dict[int, str]:
        ranks = {worker.rank for worker in running}
        return {
            rank: stacks_path(self._directory, rank).read_bytes()[size:].decode(errors="replace")
            for rank, size in self._sizes.items()
            if rank in ranks
        }

    def _judge_stacks(self, now: float, running: Sequence[Worker], stacks: dict[int, str]) -> WorkerHungError | None:
        # A rank may have moved since the stacks were requested.
        deadline = self._watch.deadline()
        if deadline is None or now < deadline:
            return None
        ranks = [worker.rank for worker in running]
        for report in self._reports.values():
            stacks = {**stacks, **report.stacks}
            ranks += report.pulses
        return hung_error(self._watch, stacks, sorted(ranks))

    def _is_answered(self) -> bool:
        """Whether all machines that have ranks left have sent their stacks."""
        if self._others is None:
            return True
        reports = self._reports.values()
        return len(reports) == self._others.count and all(each.stacks or not each.pulses for each in reports)
