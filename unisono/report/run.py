"""A run that has left records (`report/record.py`), read while it is in progress or afterwards."""

from __future__ import annotations

import json
import platform
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil

from unisono.report.restarts import Restarts, restarts_of
from unisono.report.summary import SLOWER, RankSummary, Report
from unisono.report.timeline import Span

_TAKEN = 0.2  # of the machine's cores, by processes other than the run's
_FULL = 0.9  # of the machine's cores in use: if fewer are, others have not slowed the run down
_NEEDED = {"t", "phase", "doing", "step_seconds", "logged"}  # in the line of a second, with the numbers of a summary
_NEEDED |= {each.name for each in fields(RankSummary) if each.default is each.default_factory is MISSING}
_SILENT_S = 10.0  # after a line was due: the rank is no longer there, or its machine is not


@dataclass
class RankRecord:
    """What one rank has recorded in one attempt, since its last restart."""

    rank: int
    path: Path
    # The first line: `began`, a time of day in seconds; `host`, `world_size`, `restart`, `command`, `cores`.
    facts: dict[str, Any] = field(default_factory=dict)
    samples: list[dict[str, Any]] = field(default_factory=list)  # each second's line; `t` counts from the beginning
    end: str | None = None  # "finished", or the error that has ended it; None if no end is recorded
    checkpoint: str = ""  # the place of the last one that the rank has saved; "" if it has ended without any
    settings: dict[str, Any] = field(default_factory=dict)  # that the script has given its trackers; rank zero's
    commit: str = ""  # git's; rank zero's
    earlier: list[RankRecord] = field(default_factory=list)  # the attempts before this one that the file has
    faults: list[dict[str, Any]] = field(default_factory=list)  # of the file, see `write_fault`
    cut: list[str] = field(default_factory=list)  # what is missing, in words

    @property
    def began(self) -> float:
        """When it began, by the clock of its machine, as a time of day in seconds; 0 if the first line is missing."""
        return float(self.facts.get("began", 0.0))

    @property
    def age_s(self) -> float:
        """Seconds since the last line was written."""
        return max(0.0, time.time() - self.path.stat().st_mtime)

    @property
    def is_silent(self) -> bool:
        """Whether the rank has not ended, and no longer records."""
        seconds = self.samples[-1]["t"] if self.samples else 0.0
        return self.end is None and self.age_s > _SILENT_S + seconds / SLOWER

    @property
    def is_lost(self) -> bool:
        """Whether the rank is silent; or has not ended, and was a process of this machine that is no longer there."""
        last = self.samples[-1] if self.samples and self.end is None else {}
        return self.is_silent or (last.get("host") == platform.node() and not psutil.pid_exists(last["pid"]))

    @property
    def host(self) -> str:
        """The name of its machine; "" if neither the first line nor one of a second is there."""
        return str(self.facts.get("host") or (self.samples[-1]["host"] if self.samples else ""))

    @property
    def summary(self) -> RankSummary | None:
        """The numbers of the last line; None if there is none."""
        return summary_of(self.samples[-1]) if self.samples else None

    def steps(self) -> list[tuple[float, float]]:
        """When each step ended, to the second, and how long it took, in seconds."""
        return [(each["t"], seconds) for each in self.samples for seconds in each["step_seconds"]]

    def spans(self) -> dict[str, list[Span]]:
        """The latest spans of each thread, in nanoseconds since the beginning; {} if the rank did not end. A cut line
        is added to `cut`."""
        path = self.path.with_suffix(".spans.jsonl")
        for line in reversed(path.read_text().splitlines() or [""] if path.exists() else []):
            found = parsed(line)
            if found is None:
                self.cut.append(f"{path.name} is cut off")
            elif found.pop("restart") == self.facts.get("restart"):
                return {
                    track: [
                        Span(phase, round(start * 1e9), round((start + length) * 1e9)) for phase, start, length in spans
                    ]
                    for track, spans in found.items()
                }
        return {}


@dataclass
class Attempt:
    """One start of all ranks: their records, in rank order, and what their launchers know of its failure."""

    ranks: list[RankRecord] = field(default_factory=list)
    faults: list[dict[str, Any]] = field(default_factory=list)

    @property
    def fault(self) -> dict[str, Any]:
        """The fault of the machine that knows the cause; {} if none is recorded."""
        return min(self.faults, key=lambda each: (each["is_secondary"], each["at"]), default={})


@dataclass(frozen=True)
class Place:
    """Where a rank is in its epoch."""

    epoch: int  # from 0
    batch: int  # the batches of the epoch so far
    length: int | None  # those of a whole epoch; None if that is unknown
    # To the end of the epoch, if its batches continue as they have come so far; None if the length is unknown, no time
    # has passed in this epoch, or the rank has ended.
    seconds_left: float | None


def place_of(record: RankRecord) -> Place | None:
    """Where a rank is with the last of its lines; None outside a loop that trains."""
    samples = record.samples
    last = samples[-1].get("place") if samples else None
    if last is None:
        return None
    own = [each for each in samples if (each.get("place") or {}).get("epoch") == last["epoch"]]
    seconds, batches = own[-1]["t"] - own[0]["t"], last["batch"] - own[0]["place"]["batch"]
    is_known = last["length"] is not None and batches > 0 and record.end is None and not record.is_lost
    left = max(0, last["length"] - last["batch"]) * seconds / batches if is_known else None
    return Place(last["epoch"], last["batch"], last["length"], left)


@dataclass
class Run:
    """The records of all ranks, in rank order, and what is missing from them; those of the last attempt, and all
    attempts."""

    directory: Path
    ranks: list[RankRecord]
    attempts: list[Attempt]

    @property
    def command(self) -> str:
        """What was started, as a line."""
        first, *others = next((each.facts["command"] for each in self.ranks if each.facts.get("command")), ["a run"])
        name = Path(first).name
        if name.startswith("ipykernel"):
            return "a notebook"
        return " ".join(["unisono" if name == "__main__.py" else name, *others])

    @property
    def settings(self) -> dict[str, Any]:
        """What the script has given its trackers as settings, by name."""
        return next((each.settings for each in self.ranks if each.settings), {})

    @property
    def commit(self) -> str:
        """The commit of the directory in which the run was started; "" where git knows none."""
        return next((each.commit for each in self.ranks if each.commit), "")

    @property
    def versions(self) -> dict[str, str]:
        """Of this package, torch and Python."""
        return next((each.facts["versions"] for each in self.ranks if "versions" in each.facts), {})

    @property
    def last_logged(self) -> tuple[int | None, dict[str, Any]]:
        """The last step at which the first rank that logs has logged, and the last value of each name."""
        logged = ([each for sample in rank.samples for each in sample["logged"]] for rank in self.ranks)
        found = next(filter(None, logged), [])
        values = {name: value for _, _, each in found for name, value in each.items()}
        return (found[-1][1] if found else None), values

    @cached_property
    def place(self) -> Place | None:
        """Where the first rank that trains is in its epoch; None where none is within a loop that trains."""
        return next((found for each in self.ranks if (found := place_of(each)) is not None), None)

    @property
    def report(self) -> Report:
        """The report of the ranks that have recorded anything."""
        return Report([each.summary for each in self.ranks if each.summary is not None])

    @property
    def verdict(self) -> str:
        """What the run spent its time on, and the lever that would help, as its report says; then whether other
        processes take the machine's cores."""
        report = self.report
        if not report.ranks:
            return "nothing is recorded yet"
        busy, own = self._use_of_cores()
        if busy >= _FULL and busy - own >= _TAKEN:
            return (
                f"{report.verdict}. Other processes take {busy - own:.0%} of the machine's cores, this run {own:.0%}: "
                "end them, or give the run cores of its own"
            )
        return report.verdict

    def _use_of_cores(self) -> tuple[float, float]:
        """The fraction of the first machine's cores that is in use, and the fraction that the run's ranks there use."""
        host = next(each.samples[-1]["host"] for each in self.ranks if each.samples)
        there = [each for each in self.ranks if each.samples and each.samples[-1]["host"] == host]
        busy = [one["machine_cpu"] for each in there for one in each.samples[1:]]
        seconds = max(each.samples[-1]["t"] - each.samples[0]["t"] for each in there)
        if not busy or not seconds:
            return 0.0, 0.0
        spent = sum(each.samples[-1]["cpu_s"] - each.samples[0]["cpu_s"] for each in there)
        return sum(busy) / len(busy), spent / seconds / (there[0].facts.get("cores") or 1)

    @property
    def began(self) -> float:
        """When the first rank of the first attempt began, as a time of day in seconds, by the clock of its machine."""
        first = next((each.ranks for each in self.attempts if each.ranks), self.ranks)
        return _first_beside(next((each for each in first if each.facts), first[0]), first)

    @property
    def seconds(self) -> float:
        """The time from the start of the first attempt to the last line of any rank."""
        return max((self.offset(each) + each.samples[-1]["t"] for each in self.ranks if each.samples), default=0.0)

    @cached_property
    def restarts(self) -> Restarts:
        """What the restarts have cost; the other numbers are those of the last attempt."""
        return restarts_of(self.attempts)

    def device_of(self, record: RankRecord) -> str:
        """The device of a rank, and its machine if there are several; "" if the rank has not recorded a second."""
        is_one = len({each.host for each in self.ranks}) == 1
        device = record.samples[-1]["device"] if record.samples else ""
        return device if is_one else f"{record.host} {device}"

    def offset(self, record: RankRecord) -> float:
        """Seconds from the start of the run to that of a rank's record.

        The clocks of machines may differ. Ranks begin as soon as all have joined the world, so the first rank of each
        machine is placed at the start of its attempt, and the others of the machine after it by their common clock. An
        attempt is placed by the clocks of the machines of its first rank and of that of the first attempt.
        """
        own = next((each.ranks for each in self.attempts if any(record is one for one in each.ranks)), self.ranks)
        begin = _first_beside(next((each for each in own if each.facts), own[0]), own) - self.began
        return begin + record.began - _first_beside(record, own)

    @property
    def failures(self) -> list[str]:
        """What has ended the last attempt, in words: as its launcher knows it, and the errors of ranks."""
        ends = [f"rank {each.rank} ended by {each.end}" for each in self.ranks if each.end not in (None, "finished")]
        fault = self.attempts[-1].fault
        return [*([f"ended at step {fault['done']:,}: {fault['what']}"] if fault else []), *ends]

    @property
    def missing(self) -> list[str]:
        """What the records lack, in words."""
        size = max((each.facts.get("world_size", 0) for each in self.ranks), default=0)
        there = {each.rank for each in self.ranks}
        what = " of the last attempt" if any(each.earlier for each in self.ranks) else ""
        found = [f"rank {rank} has left no record{what}" for rank in range(size) if rank not in there]
        for each in self.ranks:
            found += [f"rank {each.rank}: {text}" for text in dict.fromkeys(each.cut)]
            if each.is_lost:
                why = "stopped with its group" if self.attempts[-1].fault else "its machine or disk has failed"
                found.append(f"rank {each.rank}: it has not recorded its end: it was killed, or {why}")
        return found


def read_run(path: str | Path) -> Run:
    """Read the records of a run, given by its directory, or by a log directory: its latest run. FileNotFoundError:
    there is no record."""
    root = Path(path)
    files = sorted(root.glob("rank-*.jsonl")) or sorted((root / "latest").glob("rank-*.jsonl"))
    records = [read_rank(each) for each in files if not each.name.endswith(".spans.jsonl")]
    if not records:
        what = "holds no record of a run" if root.is_dir() else "is no directory"
        raise FileNotFoundError(
            f"{path} {what}: pass one that unisono run --log-dir, or spawn(output=Output(log_dir)), has written"
        )
    attempts = _attempts(records)
    # A lost machine leaves records of an attempt that was repeated without it.
    return Run(files[0].parent, next(each.ranks for each in reversed(attempts) if each.ranks), attempts)


def _attempts(records: Sequence[RankRecord]) -> list[Attempt]:
    """The attempts that have any records, in their order."""
    found: defaultdict[tuple[int, int], Attempt] = defaultdict(Attempt)

    def attempt_of(facts: dict[str, Any]) -> Attempt:  # a machine that comes back changes only the number of ranks
        return found[facts.get("restart", 0), facts.get("world_size", 0)]

    for record in sorted(records, key=lambda each: each.rank):
        for each in filter(lambda one: one.facts, (*record.earlier, record)):
            ranks = attempt_of(each.facts).ranks
            ranks[:] = [*(one for one in ranks if one.rank != each.rank), each]
        for fault in record.faults:
            attempt_of(fault).faults.append(fault)

    def order(key: tuple[int, int]) -> tuple[int, float]:
        began = [each.began for each in found[key].ranks]
        return key[0], min(began or [each["at"] for each in found[key].faults])

    attempts = [found[key] for key in sorted(found, key=order)] or [Attempt()]
    last = [*attempts[-1].ranks, *(each for each in records if not each.facts)]
    attempts[-1].ranks = sorted(last, key=lambda each: each.rank)
    return attempts


def _first_beside(record: RankRecord, ranks: Sequence[RankRecord]) -> float:
    """When the first rank on this rank's machine began, by its clock."""
    host = record.facts.get("host")
    return min((each.began for each in ranks if each.facts.get("host") == host), default=record.began)


def summary_of(sample: dict[str, Any]) -> RankSummary:
    """The numbers of a line; TypeError if it is not one of a second."""
    names = {each.name for each in fields(RankSummary)}
    return RankSummary(**{name: value for name, value in sample.items() if name in names})


def read_rank(path: Path) -> RankRecord:
    """Read the record of one rank; what cannot be read is left out, and reported."""
    record = RankRecord(int(path.name.split(".")[0].removeprefix("rank-")), path)
    cut = []
    for number, line in enumerate(lines_of(path), 1):
        found = parsed(line)
        if found is None and not line.endswith("\n") and record.end is None and not record.is_lost:
            break  # it is being written
        if found is None:
            cut.append(number)
        elif "began" in found:
            if record.facts:
                record.earlier.append(replace(record, earlier=[], faults=[]))
            record.facts, record.samples, record.end = found, [], None
        elif "settings" in found:
            record.settings, record.commit = found["settings"], found["commit"]
        elif "fault" in found:
            record.faults.append(found["fault"])
        elif "end" in found:
            record.end, record.checkpoint = found["end"], found.get("checkpoint", "")
        elif found.keys() >= _NEEDED:
            record.samples.append(found)
        else:
            record.cut.append(f"{path.name} has lines of another version of Unisono")
    if cut:
        others = f", and {len(cut) - 1} others are" if len(cut) > 1 else " is"
        record.cut.append(f"line {cut[0]} of {path.name}{others} cut off")
    if record.samples and not record.facts:
        record.cut.append(f"{path.name} does not say when the rank began")
    return record


def lines_of(path: Path) -> Iterator[str]:
    """The lines of a file that has a JSON object on each."""
    with path.open(encoding="utf-8", errors="replace") as file:
        yield from filter(str.strip, file)


def parsed(line: str) -> dict[str, Any] | None:
    """The object; None if a kill has cut it off, or it is being written."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
