"""Train at random under random faults, for as long as asked: `python tests/soak.py --minutes 30`.

Each run trains until all epochs are over: on processes, threads or an engine, with a fault in each life but the last,
and other ranks and another strategy in the next. Then each sample of each epoch was trained on once, the weights are
those of one device, each fault has had the end that is meant for it, and this process has no more descriptors, threads,
processes and files than before. Prints a line per run, what the user reads of each fault, and a summary; `--seed N`
repeats one run. As root, in mounts of its own, disks are full at times, too.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

TESTS = Path(__file__).parent
IS_ROOT, MOUNTED = os.geteuid() == 0, "UNISONO_SOAK_MOUNTS"
if __name__ == "__main__" and IS_ROOT and MOUNTED not in os.environ and shutil.which("unshare"):
    with contextlib.suppress(subprocess.CalledProcessError):  # without the right to
        enter = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=256m soak /dev/shm && exec "$@"', "soak"]
        subprocess.run([*enter, "true"], check=True, stderr=subprocess.DEVNULL)
        os.execvpe("unshare", [*enter, sys.executable, *sys.argv], {**os.environ, MOUNTED: "1"})
sys.path += [each for each in (str(TESTS), str(TESTS / "checkpoint")) if each not in sys.path]
PATH = f"{TESTS.parent}:{TESTS}:{TESTS / 'checkpoint'}"
HAS_MOUNTS = MOUNTED in os.environ
if __name__ == "__main__":
    import surroundings

    surroundings.normalize()
    os.environ["PYTHONPATH"] = PATH
    os.chmod(os.environ["TMPDIR"], 0o711)  # an ordinary user comes to the files below

import psutil  # noqa: E402
import torch  # noqa: E402
from faults import Script  # noqa: E402
from leak_police import footprint, leaks  # noqa: E402
from modes import Mode, preload  # noqa: E402
from preemptions import hits_of  # noqa: E402
from recoveries import recover  # noqa: E402
from resumable import Ledger, Run, assert_each_once  # noqa: E402

from unisono import Accelerator, all_reduce, current_world, spawn  # noqa: E402
from unisono.engines import Local  # noqa: E402

RANKS = [1, 2, 3, 4, 6, 8]  # they divide the global batch
LIMIT_S, SETTLE_S = 240.0, 20.0
HANGS_S = {"a short SIGSTOP of a rank": 30.0, "SIGSTOP of a rank": 6.0}
ENDS = {  # fault: how a life may end by it
    "none": ["well"],
    "a slow rank": ["well"],
    "an early break": ["left"],
    "a short SIGSTOP of a rank": ["well"],
    "an exception": ["LookupError"],
    "kill -9 of a rank": ["WorkerDiedError"],
    "SIGSTOP of a rank": ["WorkerHungError"],
    "a full disk": ["OSError", "well"],  # where none was saved later
    "a full /dev/shm": ["OSError", "RuntimeError", "WorkerDiedError", "well"],
}
SIGNALS = {"kill -9 of a rank": signal.SIGKILL}
SIGNALS |= dict.fromkeys(["a short SIGSTOP of a rank", "SIGSTOP of a rank"], signal.SIGSTOP)
FULL = ("a full disk", "a full /dev/shm")
IN_THREADS = ["none", "a slow rank", "an early break", "an exception", "a full disk"]


class Life(NamedTuple):
    """A training from its checkpoint, if there is one, to its end or its fault: after a batch, on one rank, once."""

    root: Path
    mode: str
    ranks: int
    strategy: str
    workers: int
    restarts: int
    group: str | None
    fault: str
    rank: int
    batch: int
    every: int  # batches between saves
    is_async: bool

    @classmethod
    def drawn(cls, draw: random.Random, root: Path, faults: list[str], workers: int) -> Life:
        mode = draw.choice(["processes"] * 6 + ["threads"] * 3 + ["engine"])
        ranks = draw.choice([2, 4, 6, 8] if mode == "engine" else RANKS)
        strategy = draw.choice(["ddp", "zero1", "fsdp"]) if mode != "threads" else "ddp"
        fault = draw.choice([each for each in faults if mode != "threads" or each in IN_THREADS])
        if mode == "processes" and fault not in IN_THREADS:
            ranks = max(2, ranks)  # one rank is this very process
        restarts = draw.choice([0, 0, 1]) if fault in ("kill -9 of a rank", "SIGSTOP of a rank", "an exception") else 0
        place = draw.randrange(ranks), draw.randrange(1, 6), draw.randrange(1, 4)
        group = draw.choice([None, None, "gloo"])
        return cls(root, mode, ranks, strategy, workers, restarts, group, fault, *place, draw.random() < 0.5)

    def live(self) -> tuple[torch.Tensor, Ledger]:
        run = Run(self.root / "run", self.strategy, workers=self.workers, after=self.after)
        if self.mode == "threads":
            return Mode("threads", self.ranks).run(run)[0]
        options: dict[str, Any] = {"timeout": 120.0, "max_restarts": self.restarts, "process_group": self.group}
        options["hang_timeout_s"] = HANGS_S.get(self.fault)
        options["engine"] = Local(2) if self.mode == "engine" else None
        return spawn(lambda _: run(), nprocs=self.ranks, cores=1, backend="cpu", **options)[0]

    def after(self, accelerator: Accelerator, count: int) -> bool:
        is_here = current_world().rank == self.rank
        is_due = count == self.batch and current_world().restart_count == 0
        leaves = is_due and self.fault == "an early break"
        if is_here and self.fault == "a slow rank":
            time.sleep(0.05)
        if is_here and is_due and self.fault in FULL:
            filler = (self.root if self.fault == "a full disk" else Path("/dev/shm")) / "filler"
            with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
                while file.write(bytes(1 << 16)):
                    pass
        if leaves or count % self.every == 0:
            accelerator.save_state(is_async=self.is_async)
        if is_here and is_due and self.fault == "an exception":
            raise LookupError("a fault of the soak")
        if is_here and is_due and self.fault == "a short SIGSTOP of a rank":
            stopped = f"grep -q 'State:.T' /proc/{os.getpid()}/status"
            subprocess.Popen(["sh", "-c", f"until {stopped}; do sleep 0.1; done; sleep 1; kill -CONT {os.getpid()}"])
        if is_here and is_due and self.fault in SIGNALS:
            os.kill(os.getpid(), SIGNALS[self.fault])
        return leaves


COMMAND = """
import os, resource, signal, sys

if __name__ == "__main__":
    {limits}
    from unisono.cli.main import main
    os.environ["LAUNCHER"] = str(os.getpid())
    sys.exit(main(["run", "-n", "{ranks}", "--backend", "cpu", "--no-prefix", "train.py"]))
"""
TRAINING = """
import json, os, signal
from pathlib import Path
from resumable import Run
from unisono import rank, should_stop

def after(accelerator, count):
    if count == {batch} and rank() == {rank} and not Path("hit").exists():
        Path("hit").touch()
        launcher = int(os.environ["LAUNCHER"])
        {strike}
    is_over = {handles} and should_stop()
    if is_over or count % 2 == 0:
        accelerator.save_state()
    return is_over

{handles} and should_stop()
weights, ledger = Run(Path("run"), after=after)()
if rank() == 0:
    print(json.dumps(ledger.seen))
"""
IS_READABLE = all(each.stat().st_mode & 1 for place in (os.__file__, torch.__file__) for each in Path(place).parents)
DROP = "os.setgroups([]); os.setgid(65534); os.setuid(65534)" if IS_ROOT and IS_READABLE else ""
LAUNCHES = {  # fault: what limits the launcher, the strike, the exit code, and what is said
    "ulimit -n 64" + ", as nobody" * bool(DROP): (
        f"resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64)); {DROP}",
        *("pass", 0, ""),
    ),
    "a refused memfd": (  # for its size
        "os.environ['PYTHONDONTWRITEBYTECODE'] = '1'; "  # it would leave the half of a module's file
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))",
        *("pass", 0, "no memory in common"),
    ),
    "SIGTERM to the launcher": ("", "os.kill(launcher, signal.SIGTERM)", -signal.SIGTERM, "asked by SIGTERM"),
    "SIGTERM to the group": (
        "",
        "os.killpg(os.getpgid(launcher), signal.SIGTERM)",
        -signal.SIGTERM,
        "asked by SIGTERM",
    ),
    "SIGTERM to a rank": ("", "os.kill(os.getpid(), signal.SIGTERM)", 143, ""),
}


class Soak:
    """Runs, and what was seen in them."""

    def __init__(self) -> None:
        self.faults, self.outcomes, self.read = Counter[str](), Counter[str](), dict[str, str]()
        with tempfile.TemporaryDirectory() as root:
            self.plain = [Run(Path(root) / str(workers), workers=workers)()[0] for workers in (0, 1)]

    def note(self, fault: str, outcome: str, read: str = "") -> str:
        self.faults[fault] += fault != "none"
        self.outcomes[outcome] += 1
        if read.strip():
            self.read.setdefault(fault, read.strip().partition("\n")[0])
        return f"{fault} -> {outcome}"

    def train(self, draw: random.Random, root: Path, without: tuple[str, ...] = ()) -> str:
        """Lives on processes, threads, an engine; all but the last may have a fault."""
        said = []
        workers = draw.choice([0, 0, 2])
        faults = [each for each in ENDS if each not in without]
        faults = [each for each in faults if HAS_MOUNTS or each not in FULL]
        faults = [each for each in faults if workers or each != "a full /dev/shm"]
        for number in reversed(range(draw.randrange(2, 4))):
            life = Life.drawn(draw, root, faults if number else ["none"], workers)
            kind, outcome, read = life.fault, "well", ""
            try:
                weights, ledger = life.live()
                outcome = "well" if all(len(each) == 90 for each in ledger.seen) else "left"
            except Exception as error:
                error.add_note(f"in {life}")
                outcome = next((each.__name__ for each in type(error).__mro__ if each.__name__ in ENDS[kind]), "")
                if not outcome:
                    raise
                read = f"{type(error).__name__}: {error}"
            for directory in (root, Path("/dev/shm")):
                (directory / "filler").unlink(missing_ok=True)
            said.append(f"{life.mode}-{life.ranks} {life.strategy}: {self.note(kind, outcome, read)}")
            assert outcome in ENDS[kind] or (outcome == "well" and number), f"{life} has ended with {outcome}"
            if outcome == "well":
                break
        assert_each_once(ledger)
        torch.testing.assert_close(weights, self.plain[workers > 0], rtol=1e-9, atol=1e-9)
        return "; ".join(said)

    def train_side_by_side(self, draw: random.Random, root: Path) -> str:
        def train(number: int, seed: float) -> str:
            (own := root / str(number)).mkdir()
            return self.train(random.Random(seed), own, without=FULL)  # which both would have

        with ThreadPoolExecutor(2) as pool:
            return " | ".join(pool.map(train, range(2), [draw.random() for _ in range(2)]))

    def be_hit(self, draw: random.Random, root: Path) -> str:
        """Trainings whose caller, ranks or all processes are hit anywhere: by SIGTERM, or by SIGKILL in a save."""
        kind = draw.choice(["preempt", "kill"])
        landed = hits_of(kind, draw.randrange(1 << 30))
        return "; ".join(self.note(f"{kind}: {each}", "well") for each in landed.elements())

    def recover(self, draw: random.Random, root: Path) -> str:
        """Lives with two and three hits, the later ones while they recover."""
        workers = draw.choice([0, 0, 2])
        told, landed, (weights, seen) = recover(draw, root, workers, HAS_MOUNTS)
        for each in landed:
            self.note(each, "well")
        ledger = Ledger()
        ledger.seen = seen
        assert_each_once(ledger)
        weights = torch.tensor(weights, dtype=torch.float64)
        torch.testing.assert_close(weights, self.plain[workers > 0], rtol=1e-9, atol=1e-9)
        return "; ".join(told)

    def launch(self, draw: random.Random, root: Path) -> str:
        """`unisono run` of a training, until it has ended well."""
        fault, ranks = draw.choice(list(LAUNCHES)), draw.choice(RANKS[1:])
        limits, strike, code_then, words = LAUNCHES[fault]
        handles = not limits and draw.random() < 0.5
        places = {"batch": draw.randrange(1, 6), "rank": draw.randrange(ranks), "strike": strike, "handles": handles}
        (root / "train.py").write_text(TRAINING.format(**places))
        source, environ = COMMAND.format(limits=limits, ranks=ranks), {"TMPDIR": str(root), "PYTHONPATH": PATH}
        said = ""
        for expected in dict.fromkeys([143 if handles else code_then, 0]):
            with Script(source, root, "file" if limits else "warm", **environ) as script:
                code, output, errors = script.end(LIMIT_S)
                assert not (left := script.survivors()), left
                assert code == expected, f"{fault}: exit code {code}"
                assert said or words in errors, f"{fault}: {errors}"
            said = said or f"run-{ranks}: {self.note(fault + ', should_stop()' * handles, f'exit code {code}', errors)}"
        ledger = Ledger()
        ledger.seen = json.loads(output.splitlines()[-1])
        assert_each_once(ledger)
        return said

    def start_many(self, draw: random.Random, root: Path) -> str:
        def start(number: int) -> list[Any]:
            return spawn(lambda index: (number, index), nprocs=2, cores=1, backend="cpu")

        assert spawn(lambda _: all_reduce(torch.ones(1)).item(), nprocs=64, cores=1, backend="cpu") == [64.0] * 64
        assert [start(number) for number in range(300)] == [[(number, 0), (number, 1)] for number in range(300)]
        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(start, range(100))) == [[(number, 0), (number, 1)] for number in range(100)]
        return "64 ranks; 300 groups in a row; 100 groups from 4 threads -> well"

    def run(self, what: Any, seed: int) -> str:
        """One run, in a directory of its own, of which nothing may be left."""
        faulthandler.dump_traceback_later(3 * LIMIT_S, exit=True)
        before, files = footprint(), files_here()
        root = Path(tempfile.mkdtemp(prefix="soak-"))
        root.chmod(0o777)
        if HAS_MOUNTS:
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m,mode=777", "soak", root], check=True)
        try:
            said = what(random.Random(seed), root)
        finally:
            if HAS_MOUNTS:
                subprocess.run(["umount", "--lazy", root], check=True)
            shutil.rmtree(root)
        deadline = time.monotonic() + SETTLE_S
        while (left := leaks(before, footprint()) + sorted(files_here() - files)) and time.monotonic() < deadline:
            gc.collect()
            time.sleep(0.05)
        assert not left, f"left: {left}"
        return said


def files_here() -> set[str]:
    """In /dev/shm, where it is this program's own, and in the directory for temporary files. Without the half-made
    semaphores (sem.8nwmOE) of processes that were killed within glibc's sem_open: nobody can know whose they are."""
    places = [os.environ["TMPDIR"], *(["/dev/shm"] if HAS_MOUNTS else [])]
    found = {os.path.join(place, name) for place in places for name in os.listdir(place)}
    return {each for each in found if not re.fullmatch(r"/dev/shm/sem\.\w{6}", each)}


def held_by(process: psutil.Process) -> dict[str, int]:
    memory = process.memory_full_info().uss >> 20
    return {"descriptors": process.num_fds(), "threads": process.num_threads(), "MiB": memory}


KINDS = [*["train"] * 5, "train_side_by_side", "be_hit", *["launch"] * 2, *["recover"] * 3]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, help="only this run")
    parser.add_argument("--kind", choices={*KINDS, "start_many"}, help="only runs of this kind")
    given = parser.parse_args()
    torch.set_num_threads(1)
    preload()
    soak, failed, runs, began, me = Soak(), 0, 0, time.monotonic(), psutil.Process()
    seed = random.SystemRandom().randrange(1 << 30) if given.seed is None else given.seed
    while time.monotonic() - began < 60 * given.minutes and not (given.seed is not None and runs):
        kind = given.kind or ("start_many" if runs == 2 else random.Random(f"kind {seed}").choice(KINDS))
        at = time.monotonic()
        try:
            said = soak.run(getattr(soak, kind), seed)
        except Exception as error:
            failed += 1
            said = "\n    ".join([f"FAILED {type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
        print(f"seed {seed}, {time.monotonic() - at:.1f} s, {kind}: {said}", flush=True)
        runs, seed = runs + 1, seed + 1
        if runs in (1, 10, 50):  # by then it has what it keeps
            first, at_first = runs, held_by(me)
    print("\nwhat the user reads:", *(f"{fault}\n    {text}" for fault, text in sorted(soak.read.items())), sep="\n")
    for name, counts in (("faults", soak.faults), ("outcomes", soak.outcomes)):
        print(f"{counts.total()} {name}:", ", ".join(f"{count} {what}" for what, count in counts.most_common()))
    growth = ", ".join(f"{value - at_first[name]:+} {name}" for name, value in held_by(me).items())
    print(f"{runs} runs, {failed} failed, {time.monotonic() - began:.0f} s; growth since run {first}: {growth}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
