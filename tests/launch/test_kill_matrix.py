"""Every process of a run, hit by every signal: the run comes to its end, and nothing of it is left.

Where a signal does not end the run, that is said here, and why; the run then still notices the death of a worker.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from faults import NUM_PROCESSES, PROMISE_S, RICH, Ear, Gate, Script, survivors

SLOW = pytest.mark.slow
GRACE_S = 0.3
PATIENCE_S = 120.0  # for a hundred groups, on a slow machine
GROWTH_BYTES = 1 << 20  # that 80 groups may add to a process: the allocator rounds
SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGSEGV, signal.SIGKILL]
BORNE = {
    ("zygote", signal.SIGINT): "a Ctrl-C is the caller's to handle",
    ("zygote", signal.SIGTERM): "who ends a service, or a job, signals all; the caller decides",
    ("zygote", signal.SIGHUP): "a terminal that closes is the caller's to handle",
    ("rank 0", signal.SIGINT): "Python hears of it when the collective ends",
    ("loader worker", signal.SIGTERM): "in a worker they leave that signal to it, which may want to save first",
    ("loader worker", signal.SIGINT): "torch's loader workers leave quietly; whoever reads from them is told",
}

RUN = f"""
def run():
    spawn(work, nprocs=2, grace_s={GRACE_S})
"""
AGAIN_AND_AGAIN = f"""
for _ in range({len(SIGNALS)}):
    Gate(Path("gate").absolute()).wait()
    try:
        run()
    except BaseException as error:
        line.say("ended", type(error).__name__, error)
"""


@dataclass(frozen=True)
class Cast:
    """The processes of one run, by the names that the matrix has for them."""

    pids: dict[str, int]

    @classmethod
    def heard(cls, ear: Ear) -> Cast:
        said = ear.hear_all(2)
        assert [words[:2] for words in said] == [["rank", "0"], ["rank", "1"]], said
        first, second = ([int(word) for word in words[2:]] for words in said)
        return cls({"rank 0": first[0], "rank 1": second[0], "zygote": first[1], "loader worker": second[2]})

    def hit(self, name: str, signum: signal.Signals) -> None:
        os.kill(self.pids[name], signum)


def name_of(hit: tuple[signal.Signals, bool]) -> str:
    return f"{hit[0].name}{' to the group' if hit[1] else ''}"


# SIGTERM is in test_agreed_stops.py, SIGHUP in test_no_orphans.py.
SLOWER = [pytest.param((signum, False), marks=SLOW) for signum in (signal.SIGINT, signal.SIGQUIT, signal.SIGSEGV)]
HITS = [(signal.SIGINT, True), (signal.SIGKILL, False), *SLOWER]


@pytest.mark.parametrize("hit", HITS, ids=name_of)
def test_nothing_survives_a_caller_hit_by(hit: tuple[signal.Signals, bool], tmp_path: Path, ear: Ear) -> None:
    signum, to_group = hit
    with Script(RICH + RUN + "run()", tmp_path) as script:
        Cast.heard(ear)
        assert len(script.living()) == NUM_PROCESSES
        (script.kill_group if to_group else script.kill)(signum)
        is_asked = signum == signal.SIGINT  # the workers are: rank 0 cannot answer
        assert script.survivors(PROMISE_S + GRACE_S * is_asked) == []
        code, _, errors = script.end()
        assert code in (-signum, 128 + signum)
        assert ("KeyboardInterrupt" in errors) == (signum == signal.SIGINT)
        assert script.leftovers() == []


@SLOW
@pytest.mark.parametrize("victim", ["zygote", "rank 0", "rank 1", "loader worker"])
def test_a_run_ends_and_leaves_nothing_whatever_signal_hits_its(victim: str, tmp_path: Path, ear: Ear) -> None:
    source = RICH + RUN + AGAIN_AND_AGAIN
    with Gate.at(tmp_path / "gate").kept() as let_pass, Script(source, tmp_path, zygotes=4) as script:
        for signum in SIGNALS:  # one caller after another would take its time to import torch
            let_pass(1)
            with _named(f"{victim}, {signum.name}"):
                _hit_and_watch(script, ear, victim, signum)
        assert script.end()[0] == 0
        assert script.survivors() == [] == script.leftovers()


def _hit_and_watch(script: Script, ear: Ear, victim: str, signum: signal.Signals) -> None:
    cast = Cast.heard(ear)
    assert len(script.living()) == NUM_PROCESSES
    began = time.monotonic()
    cast.hit(victim, signum)
    if (victim, signum) in BORNE:
        with contextlib.suppress(ProcessLookupError):  # Ctrl-C in rank 0 may have ended the group
            cast.hit("rank 1", signal.SIGKILL)
    said = " ".join(ear.hear(PROMISE_S + GRACE_S))
    assert re.match("ended " + _verdict(cast, victim, signum), said), said
    others = {process.pid for process in script.living()} - {script.process.pid, cast.pids["zygote"]}
    assert survivors(list(others), PROMISE_S + GRACE_S - (time.monotonic() - began)) == []


def _verdict(cast: Cast, victim: str, signum: signal.Signals) -> str:
    """What the caller is told, as a pattern."""
    if (victim, signum) == ("rank 0", signal.SIGINT):  # rank 1's death ends the collective, and rank 0 hears of it
        return "(KeyboardInterrupt|WorkerDiedError rank 1 .* was killed by SIGKILL)"
    if (victim, signum) in BORNE:
        return "WorkerDiedError rank 1 .* was killed by SIGKILL"
    if victim == "zygote":
        return "WorkerDiedError rank . .* the process that it was forked from died"
    if victim == "loader worker":  # torch's handler of SIGCHLD in the worker raises
        return rf"RuntimeError DataLoader worker \(pid\S* {cast.pids[victim]}\b"
    return (
        "KeyboardInterrupt" if signum == signal.SIGINT else f"WorkerDiedError {victim} .* was killed by {signum.name}"
    )


@contextlib.contextmanager
def _named(case: str) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        error.add_note(f"in the case: {case}")
        raise


@SLOW
@pytest.mark.timeout(2 * PATIENCE_S)
def test_eighty_groups_leave_no_trace(tmp_path: Path, ear: Ear) -> None:
    source = """
import gc, json, tempfile, time
from modes import preload
from faults import zygote_pid

def footprint():
    gc.collect()
    found = {}
    for name, process in {"caller": psutil.Process(), "zygote": psutil.Process(zygote_pid())}.items():
        found[f"{name}: descriptors"] = process.num_fds()
        while name == "zygote" and process.num_threads() > 1:  # if it was idle for a moment, it does other work
            time.sleep(0.01)
        found[f"{name}: threads"] = process.num_threads()
        # Not what it alone has: pages that it shares with a worker would become its own when the worker ends.
        with open(f"/proc/{process.pid}/smaps_rollup") as file:
            kib = next(line for line in file if line.startswith("Anonymous:")).split()[1]
        found[f"{name}: memory"] = int(kib) * 1024
    found["processes"] = len(psutil.Process().children(recursive=True))
    found["temporary files"] = len(os.listdir(tempfile.gettempdir()))
    # torch names a segment torch_<process>_<random>_<count>; those of tests that run beside this one do not count.
    found["shared memory"] = len([name for name in os.listdir("/dev/shm") if pids & set(name.split("_")[1:2])])
    return found

pids = set()

def repeat(count):
    for _ in range(count):
        found = spawn(lambda index: str(os.getpid()), nprocs=2)
        assert len(found) == 2
        pids.update(found)
    return footprint()

preload()
print(json.dumps([repeat(20), repeat(80)]))
"""
    with Script(RICH + source, tmp_path, "file") as script:  # a fork's memory grows as it stops sharing pages
        code, output, errors = script.end(PATIENCE_S)
        assert (code, errors) == (0, "")
        before, after = json.loads(output)
        memory = {name for name in before if name.endswith("memory") and ":" in name}
        assert {name: each for name, each in after.items() if name not in memory and before.get(name) != each} == {}
        assert {name: after[name] - before[name] for name in memory if after[name] - before[name] > GROWTH_BYTES} == {}
