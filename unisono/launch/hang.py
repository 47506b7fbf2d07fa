"""When a group hangs, and which ranks are late: from the workers' pulses and stacks to a sentence.

A group hangs when none of its ranks has made progress for too long. A single slow rank is not a hang: while it
validates alone, for example, its own batches are progress. The user decides how long is too long; the default is
derived from the timeout of the collectives, and applies only if a rank waits in one, so that the report comes shortly
before the transport gives up. Each of several machines reports the progress of its ranks to the others, and then their
stacks; the one that has them all first reports.

*Threads:* the supervisor's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from unisono.comm.noted_calls import find_mismatch
from unisono.comm.operations import mismatch_error
from unisono.comm.stacks import describe_call, frames_of, main_stack, stack_to_user_function
from unisono.errors import CollectiveMismatchError, WorkerHungError
from unisono.launch.group_outcome import Worker
from unisono.launch.job import Job
from unisono.launch.reports import Pulse
from unisono.launch.worker import stacks_path

if TYPE_CHECKING:
    from unisono.launch.hosts.agent_round import MachineReport
    from unisono.launch.hosts.other_machines import OtherMachines

_STACKS_S = 0.5  # how long the workers of a hung group need to write their stacks
_LATE_S = 3.0  # how long they have, on a busy machine; a stopped one never writes it
_END_OF_STACKS = "in <module>\n"  # the main thread's are the last
_OTHERS_S = 5.0  # how long other machines have to send theirs: several beats of theirs and ours
_RETURNED_S = 5.0  # a rank in a collective after a peer has returned may be moving its last data, but nothing else
_BEFORE = 0.8  # of the collectives' timeout: a waiting rank gives up a little later, with less to report

_WAITS_IN = ("/torch/distributed/", "/unisono/comm/", "/torch/autograd/graph.py")  # DDP reduces in the backward pass
_DISPATCH = ("/torch/_ops.py", "/torch/_library/autograd.py")  # between those files and native code
_MISMATCH = "Every rank must call the same collectives in the same order"


@dataclass
class HangWatch:
    """How long the group has stood still, from the first pulse on: by then all ranks have joined. Without
    `hang_timeout_s` most of `timeout_s` counts, and only if a rank waits; what is in transit between machines is not
    known."""

    hang_timeout_s: float | None
    timeout_s: float
    is_of_one_machine: bool = True
    pulses: dict[int, Pulse] = field(default_factory=dict)  # of the ranks that have not ended
    returned: set[int] = field(default_factory=set)  # the ranks that no longer take part
    _progress_at: float = 0.0

    def hear(self, rank: int, pulse: Pulse, now: float) -> None:
        before = self.pulses.get(rank)
        if before is None or before.progress != pulse.progress:
            self._progress_at = now
        self.pulses[rank] = pulse

    def forget(self, rank: int, now: float, has_returned: bool = False) -> None:
        """Record that a rank has ended, which counts as progress."""
        self.pulses.pop(rank, None)
        self._progress_at = now
        if has_returned:
            self.returned.add(rank)

    @property
    def limit(self) -> tuple[float, str]:
        """How many seconds the group may stand still, and what to do where it was meant to."""
        option = "timeout (--timeout)" if self.hang_timeout_s is None else "hang_timeout_s (--hang-timeout)"
        longest_s = _BEFORE * self.timeout_s if self.hang_timeout_s is None else self.hang_timeout_s
        if self.is_of_one_machine and self.returned and self._is_waiting() and longest_s > _RETURNED_S:
            return _RETURNED_S, _MISMATCH
        advice = f"If this is expected to take so long, pass a longer {option}"
        return longest_s, f"{advice}; collectives, batches and steps count as progress"

    def deadline(self) -> float | None:
        """When the group counts as hung, unless something happens before; None if it cannot hang now."""
        if not self.pulses or not (self.hang_timeout_s is not None or self._is_waiting()):
            return None
        return self._progress_at + self.limit[0]

    def _is_waiting(self) -> bool:
        return any(pulse.doing for pulse in self.pulses.values())


class StackCollection:
    """The collection for one group, from the first doubt to the error, or to the next progress; `ask` sends workers the
    signal to write their stacks into that directory."""

    def __init__(
        self, job: Job, directory: Path, ask: Callable[[list[Worker]], None], others: OtherMachines | None = None
    ) -> None:
        self._watch = HangWatch(job.options.hang_timeout_s, job.options.timeout_s, others is None)
        self._here = job.ranks
        self._directory = directory
        self._ask = ask
        self._others = others
        self._due: float | None = None  # when the requested stacks are expected
        self._latest = 0.0  # when they are no longer waited for
        self._sizes: dict[int, int] = {}  # the previous sizes of the ranks' stack files
        self._stacks: dict[int, str] | None = None  # of this machine's ranks, while waiting for those of the others
        self._reports: dict[int, MachineReport] = {}  # the last of each other machine
        self._mismatch: CollectiveMismatchError | None = None
        self._reported: dict[int, Pulse] = {}  # what the other machines last got about this machine's ranks

    def due(self) -> float | None:
        """When to call `examine`, unless something happens before."""
        if self._mismatch is not None:
            return 0.0
        return self._watch.deadline() if self._due is None else self._due

    def hear_pulse(self, rank: int, pulse: Pulse, now: float) -> None:
        """Record the pulse of a rank of this machine."""
        self._watch.hear(rank, pulse, now)
        self._report_progress()
        self._compare_calls()

    def _compare_calls(self) -> None:
        """Compare the last calls of ranks that stand still."""
        actions, places = find_mismatch({rank: pulse.calls for rank, pulse in self._watch.pulses.items()})
        if actions:
            self._mismatch = mismatch_error(actions, places)

    def forget(self, rank: int, now: float, has_returned: bool = False) -> None:
        """Record that a rank of this machine has ended."""
        self._watch.forget(rank, now, has_returned)
        self._report_progress()

    def _report_progress(self) -> None:
        """Report the progress of this machine's ranks to the others; it invalidates stacks collected before."""
        pulses = {rank: pulse for rank, pulse in self._watch.pulses.items() if rank in self._here}
        if self._others is not None and pulses != self._reported:
            self._reported, self._stacks = pulses, None
            returned = [rank for rank in self._watch.returned if rank in self._here]
            self._others.say(pulses=pulses, returned=returned, stacks={})

    def hear(self, report: MachineReport, now: float) -> None:
        """Handle another machine's report: the progress of its ranks, or their stacks."""
        before = self._reports.get(report.machine)
        self._reports[report.machine] = report
        for rank, pulse in report.pulses.items():
            self._watch.hear(rank, pulse, now)
        self._compare_calls()
        for rank in (before.pulses.keys() if before is not None else set()) - report.pulses.keys():
            self._watch.forget(rank, now)
        self._watch.returned.update(report.returned)
        if self._stacks is not None and self._is_answered():
            self._due = now

    def examine(self, now: float, running: Sequence[Worker]) -> WorkerHungError | CollectiveMismatchError | None:
        """Request the stacks of `running`, which have not ended; on a later call, unless a rank has moved, return the
        error that names the late ranks. At once, if the ranks' calls differ."""
        if self._mismatch is not None:
            return self._mismatch
        paths = {worker.rank: stacks_path(self._directory, worker.rank) for worker in running}
        if self._due is None:
            self._due, self._latest = now + _STACKS_S, now + _LATE_S
            # Each request appends to these files; what comes after this size is the answer to this one.
            self._sizes = {rank: path.stat().st_size for rank, path in paths.items() if path.exists()}
            self._ask(list(running))
            return None
        if self._stacks is None:
            written = {
                rank: paths[rank].read_bytes()[size:].decode(errors="replace")
                for rank, size in self._sizes.items()
                if rank in paths
            }
            if now < self._latest and not all(text.endswith(_END_OF_STACKS) for text in written.values()):
                self._due = now + _STACKS_S
                return None
            self._stacks = written
            if self._others is not None:
                self._others.say(stacks={rank: main_stack(text) for rank, text in self._stacks.items()})
                if not self._is_answered():
                    self._due = now + _OTHERS_S
                    return None
        stacks, self._stacks, self._due = self._stacks, None, None
        deadline = self._watch.deadline()
        if deadline is None or now < deadline:  # a rank has moved since the stacks were requested
            return None
        ranks = [*paths]
        for report in self._reports.values():
            stacks |= report.stacks
            ranks += report.pulses
        return hung_error(self._watch, stacks, sorted(ranks))

    def _is_answered(self) -> bool:
        """Whether all machines that have ranks left have sent their stacks."""
        if self._others is None:
            return True
        reports = self._reports.values()
        return len(reports) == self._others.count and all(each.stacks or not each.pulses for each in reports)


def hung_error(watch: HangWatch, stacks: Mapping[int, str], ranks: list[int]) -> WorkerHungError:
    """Make the error of a group that hangs, from each rank's stacks, as written by faulthandler; `ranks` have not
    ended."""
    pulses = watch.pulses
    doing = {rank: _doing(rank, pulses, stacks) for rank in ranks}
    waiting = {rank: what for rank, what in doing.items() if what}
    late = [rank for rank in ranks if rank not in waiting]
    if waiting and watch.returned:
        late = sorted(watch.returned)
        verdict = f"{_name_waiting(late, 'has', 'have')} returned, while {_group_by_collective(waiting)}"
    elif waiting and late:
        verdict = f"{_name_waiting(late)} late: {_describe_places(late, stacks)}; {_group_by_collective(waiting)}"
    else:
        progress = {rank: pulses[rank].progress for rank in ranks if rank in pulses}
        # A rank with an accelerator waits wherever it needs a result.
        late = [rank for rank, each in progress.items() if each == min(progress.values())]
        behind = "" if len(late) == len(ranks) else f" ({_name_waiting(late)} behind the others)"
        if waiting:
            verdict = f"all ranks wait, but not in the same call: {_group_by_collective(waiting)}{behind}"
        else:
            verdict = f"no rank is in a collective: {_describe_places(ranks, stacks)}{behind}"
    seconds, advice = watch.limit
    text = f"no rank has made progress for {seconds:.4g} s, and {verdict}. {advice}"
    error = WorkerHungError(text, late, dict(stacks))
    for rank in ranks:
        error.add_note(f"rank {rank}:\n{stack_to_user_function(stacks.get(rank, ''))}")
    return error


def _doing(rank: int, pulses: Mapping[int, Pulse], stacks: Mapping[int, str]) -> str:
    """The collective that a rank is in, in words: ours are reported, torch's are found on the stack; "" for none."""
    if (pulse := pulses.get(rank)) is not None and pulse.doing and stacks.get(rank, "unknown"):
        return pulse.doing  # a rank without a stack is stopped, and its last pulse is old
    frames = frames_of(main_stack(stacks.get(rank, "")))
    inner = dropwhile(lambda frame: frame.file.endswith(_DISPATCH), frames)
    inside = takewhile(lambda frame: any(part in frame.file for part in _WAITS_IN), inner)
    # torch wraps its collectives in a logging decorator, whose function is named `wrapper`.
    names = [frame.name for frame in inside if frame.name != "wrapper"]
    # The innermost frame is first, so the last of these is the program's call.
    return describe_call(frames) or f"{names[-1]}()" if names else ""


def _describe_places(ranks: list[int], stacks: Mapping[int, str]) -> str:
    texts = []
    for rank in ranks:
        frames = frames_of(main_stack(stacks.get(rank, "")))
        # Frames of the standard library and of installed packages are skipped, if others remain.
        ours = [frame for frame in frames if "/lib/python" not in frame.file] or frames
        place = next((frame for frame in ours if frame.is_users), ours[0] if ours else None)
        unknown = "does not report where it is: it is stopped, or its stack could not be read"
        texts.append(f"rank {rank} {unknown if place is None else f'is in {place}'}")
    return "; ".join(texts)


def _group_by_collective(waiting: Mapping[int, str]) -> str:
    """Say which ranks wait in which collective."""
    ranks: dict[str, list[int]] = {}
    for rank, what in waiting.items():
        ranks.setdefault(what, []).append(rank)
    return ", ".join(f"{_name_waiting(each, 'waits', 'wait')} in {what}" for what, each in ranks.items())


def _name_waiting(ranks: list[int], singular: str = "is", plural: str = "are") -> str:
    return f"rank {ranks[0]} {singular}" if len(ranks) == 1 else f"ranks {ranks} {plural}"
