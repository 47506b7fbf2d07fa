"""Train at random under random faults, for as long as asked: `python tests/soak.py --minutes 30`.

Each run trains in random worlds until all epochs are over: on processes, threads or an engine, with a fault in each life
but the last, and other ranks and another strategy in the next. Then each sample of each epoch was trained on once, the
weights are those of one device, each fault has ended in the errors that are meant for it, and this process, which starts
all of them, has nothing more than before: no descriptors, threads, processes, files. Prints a line per run, what the
user reads of each fault, and a summary; `--seed N` repeats one run. As root, in mounts of its own, with full disks, too.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import json
import os
import random
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
        subprocess.run(["unshare", "--mount", "true"], check=True, stderr=subprocess.DEVNULL)
        enter = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=256m soak /dev/shm && exec "$@"', "soak"]
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
from resumable import Ledger, Run, assert_each_once  # noqa: E402

from unisono import Accelerator, all_reduce, current_world, spawn  # noqa: E402
from unisono.engines import Local  # noqa: E402

RANKS = [1, 2, 3, 4, 6, 8]  # they divide the global batch
HANG_S, LIMIT_S, SETTLE_S = 6.0, 240.0, 20.0
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
FULL = ("a full disk", "a full /dev/shm")
IN_THREADS = ["none", "a slow rank", "an early break", "an exception", "a full disk"]


class Fault(NamedTuple):
    """What happens after a batch, on one rank, once; and how often is saved."""

    kind: str
    rank: int
    batch: int
    every: int
    is_async: bool
    root: Path

    def __call__(self, accelerator: Accelerator, count: int) -> bool:
        world = current_world()
        is_due = count == self.batch and world.restart_count == 0
        is_here = world.rank == self.rank % world.world_size
        full = {"a full disk": self.root, "a full /dev/shm": Path("/dev/shm")}
        if is_due and is_here and self.kind in full:
            fill(full[self.kind])
        if self.kind == "a slow rank" and is_here:
            time.sleep(0.05)
        if count % self.every == 0 or (is_due and self.kind == "an early break"):
            accelerator.save_state(is_async=self.is_async)
        if is_due and is_here:
            self.strike()
        return is_due and self.kind == "an early break"

    def strike(self) -> None:
        if self.kind == "an exception":
            raise LookupError("a fault of the soak")
        if self.kind == "kill -9 of a rank":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.kind == "a short SIGSTOP of a rank":
            subprocess.Popen(["sh", "-c", f"sleep 1; kill -CONT {os.getpid()}"])
        if "SIGSTOP" in self.kind:
            os.kill(os.getpid(), signal.SIGSTOP)


def fill(directory: Path) -> None:
    with contextlib.suppress(OSError), (directory / "filler").open("wb", buffering=0) as file:
        while file.write(bytes(1 << 16)):
            pass


class Life(NamedTuple):
    """A training from its checkpoint, if there is one, to its end or its fault."""

    mode: str
    ranks: int
    strategy: str
    workers: int
    restarts: int
    group: str | None
    fault: Fault

    def live(self, root: Path) -> tuple[torch.Tensor, Ledger]:
        run = Run(root / "run", self.strategy, workers=self.workers, after=self.fault)
        if self.mode == "threads":
            return Mode("threads", self.ranks).run(run)[0]
        options: dict[str, Any] = {"timeout": 120.0, "max_restarts": self.restarts, "process_group": self.group}
        options["hang_timeout_s"] = HANG_S if "SIGSTOP" in self.fault.kind else None
        if self.mode == "engine":
            options["engine"] = Local(2)
        return spawn(lambda _: run(), nprocs=self.ranks, cores=1, backend="cpu", **options)[0]


LIMITED = """
import json, os, resource
from pathlib import Path

if __name__ == "__main__":
    {limits}
    from resumable import Run
    from unisono import spawn

    weights, ledger = spawn(lambda _: Run(Path("run"))(), nprocs={ranks}, backend="cpu", cores=1, timeout=60)[0]
    print(json.dumps(ledger.seen))
"""
IS_READABLE = all(each.stat().st_mode & 1 for place in (os.__file__, torch.__file__) for each in Path(place).parents)
DROP = "os.setgroups([]); os.setgid(65534); os.setuid(65534)" if IS_ROOT and IS_READABLE else ""
LIMITS = {
    f"ulimit -n 64{', as nobody' if DROP else ''}": f"resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64)); {DROP}",
    "a refused memfd": "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))",  # by its size
}
COMMAND = """
import os, sys
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
    if {handles} and should_stop():
        accelerator.save_state()
        return True
    if count % 2 == 0:
        accelerator.save_state()

{handles} and should_stop()
weights, ledger = Run(Path("run"), after=after)()
if rank() == 0:
    print(json.dumps(ledger.seen))
"""
STRIKES = {
    "the launcher": ("os.kill(launcher, signal.SIGTERM)", -signal.SIGTERM),
    "a rank": ("os.kill(os.getpid(), signal.SIGTERM)", 143),
    "the group": ("os.killpg(os.getpgid(launcher), signal.SIGTERM)", -signal.SIGTERM),
}


def any_life(draw: random.Random, root: Path, faults: list[str], workers: int) -> Life:
    mode = draw.choice(["processes"] * 6 + ["threads"] * 3 + ["engine"])
    ranks = draw.choice([2, 4, 6, 8] if mode == "engine" else RANKS)
    strategy = draw.choice(["ddp", "zero1", "fsdp"]) if mode != "threads" else "ddp"
    kind = draw.choice([each for each in faults if mode != "threads" or each in IN_THREADS])
    if mode == "processes" and ranks == 1 and kind not in IN_THREADS:
        ranks = 2  # one rank is this very process
    restarts = draw.choice([0, 0, 1]) if kind in ("kill -9 of a rank", "SIGSTOP of a rank", "an exception") else 0
    group = draw.choice([None, None, "gloo"])
    fault = Fault(kind, draw.randrange(8), draw.randrange(1, 6), draw.randrange(1, 4), draw.random() < 0.5, root)
    return Life(mode, ranks, strategy, workers, restarts, group, fault)


class Soak:
    """Runs, and what was seen in them."""

    def __init__(self) -> None:
        self.faults, self.outcomes, self.read = Counter[str](), Counter[str](), dict[str, str]()
        with tempfile.TemporaryDirectory() as root:
            self.plain = [Run(Path(root) / str(workers), workers=workers)()[0] for workers in (0, 1)]

    def note(self, fault: str, outcome: str, read: str = "") -> str:
        self.faults[fault] += 1
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
            life = any_life(draw, root, faults if number else ["none"], workers)
            kind, outcome, read = life.fault.kind, "well", ""
            try:
                weights, ledger = life.live(root)
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
        seeds = [draw.random() for _ in range(2)]
        for number in range(2):
            (root / str(number)).mkdir()
        with ThreadPoolExecutor(2) as pool:
            jobs = [
                pool.submit(self.train, random.Random(seed), root / str(number), FULL)  # both have it
                for number, seed in enumerate(seeds)
            ]
        return " | ".join(job.result() for job in jobs)

    def be_hit(self, draw: random.Random, root: Path) -> str:
        """Trainings whose launcher, ranks or all processes are hit anywhere: by SIGTERM, or by SIGKILL in a save."""
        kind = draw.choice(["preempt", "kill"])
        landed = hits_of(kind, draw.randrange(1 << 30))
        return "; ".join(self.note(f"{kind}: {each}", "well") for each in landed.elements())

    def be_limited(self, draw: random.Random, root: Path) -> str:
        fault, ranks = draw.choice(list(LIMITS)), draw.choice(RANKS[1:])
        with Script(
            LIMITED.format(limits=LIMITS[fault], ranks=ranks), root, "file", TMPDIR=str(root), PYTHONPATH=PATH
        ) as script:
            code, output, errors = script.end(LIMIT_S)
            assert not script.survivors()
            if "memfd" in fault:
                assert "no memory in common" in errors, errors
            if code == 0:
                assert_each_once(ledger_of(output))
            else:
                assert "ulimit -n" in errors, errors
        read = errors if code == 0 else errors.strip().splitlines()[-1]
        return f"processes-{ranks}: {self.note(fault, 'well' if code == 0 else 'refused', read)}"

    def be_told_to_stop(self, draw: random.Random, root: Path) -> str:
        """`unisono run`, and again."""
        victim, handles, ranks = draw.choice(list(STRIKES)), draw.random() < 0.5, draw.choice(RANKS[1:])
        strike, code_of_it = STRIKES[victim]
        places = {"batch": draw.randrange(1, 6), "rank": draw.randrange(ranks), "strike": strike, "handles": handles}
        (root / "train.py").write_text(TRAINING.format(**places))
        fault = (
            f"SIGTERM to {victim} of `unisono run`, should_stop()"
            if handles
            else f"SIGTERM to {victim} of `unisono run`"
        )
        for expected in (143 if handles else code_of_it, 0):
            with Script(COMMAND.format(ranks=ranks), root, PYTHONPATH=PATH) as script:
                code, output, errors = script.end(LIMIT_S)
                assert not (left := script.survivors()), left
                assert code == expected, f"{fault}: exit code {code}"
                assert victim == "a rank" or not expected or "asked by SIGTERM" in errors, f"{fault}: {errors}"
            if expected:
                said = f"run-{ranks}: {self.note(fault, f'exit code {code}', errors)}"
        assert_each_once(ledger_of(output))
        return said

    def crowd(self, draw: random.Random, root: Path) -> str:
        assert spawn(lambda _: all_reduce(torch.ones(1)).item(), nprocs=64, cores=1, backend="cpu") == [64.0] * 64
        return self.note("64 ranks", "well")

    def repeat(self, draw: random.Random, root: Path) -> str:
        for _ in range(300):
            assert spawn(lambda index: index, nprocs=2, cores=1, backend="cpu") == [0, 1]
        return self.note("300 groups in a row", "well")

    def spawn_from_threads(self, draw: random.Random, root: Path) -> str:
        def start(number: int) -> list[Any]:
            return spawn(lambda index: (number, index), nprocs=2, cores=1, backend="cpu")

        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(start, range(100))) == [[(number, 0), (number, 1)] for number in range(100)]
        return self.note("100 spawns from 4 threads", "well")

    def run(self, what: Any, seed: int) -> str:
        """One run, in a directory of its own, of which nothing may be left."""
        faulthandler.dump_traceback_later(2 * LIMIT_S, exit=True)
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


def ledger_of(output: str) -> Ledger:
    ledger = Ledger()
    ledger.seen = json.loads(output.splitlines()[-1])
    return ledger


def files_here() -> set[str]:
    """In /dev/shm, where it is this program's own, and in the directory for temporary files."""
    places = [os.environ["TMPDIR"], *(["/dev/shm"] if HAS_MOUNTS else [])]
    return {os.path.join(place, name) for place in places for name in os.listdir(place)}


KINDS = [*["train"] * 5, "train_side_by_side", "be_hit", "be_limited", "be_told_to_stop"]
KINDS += ["crowd", "repeat", "spawn_from_threads"]  # once each


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, help="only this run")
    parser.add_argument("--kind", choices=KINDS, help="only runs of this kind")
    given = parser.parse_args()
    torch.set_num_threads(1)
    preload()
    soak, failed, runs, began = Soak(), 0, 0, time.monotonic()
    once = {} if given.kind else dict(zip((3, 6, 9), KINDS[-3:], strict=True))
    seed, me = random.SystemRandom().randrange(1 << 30) if given.seed is None else given.seed, psutil.Process()
    held: dict[str, int] = {}
    while time.monotonic() - began < 60 * given.minutes and not (given.seed is not None and runs):
        kind = given.kind or once.pop(runs, "") or random.Random(f"kind {seed}").choice(KINDS[:-3])
        at = time.monotonic()
        try:
            said = soak.run(getattr(soak, kind), seed)
        except Exception as error:
            failed += 1
            said = "\n    ".join([f"FAILED {type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
        print(
            f"{seed:10} {time.monotonic() - at:5.1f} s {me.memory_full_info().uss >> 10} KiB {kind}: {said}", flush=True
        )
        runs, seed = runs + 1, seed + 1
        if runs in (1, 10):  # by then it has what it keeps
            held = {"descriptors": me.num_fds(), "threads": me.num_threads(), "KiB": me.memory_full_info().uss >> 10}
    grown = {"descriptors": me.num_fds(), "threads": me.num_threads(), "KiB": me.memory_full_info().uss >> 10}
    print("\nwhat the user reads:", *(f"{fault}\n    {text}" for fault, text in sorted(soak.read.items())), sep="\n")
    for name, counts in (("faults", soak.faults), ("outcomes", soak.outcomes)):
        print(f"{counts.total()} {name}:", ", ".join(f"{count} {what}" for what, count in counts.most_common()))
    growth = ", ".join(f"{grown[name] - held[name]:+} {name}" for name in held)
    print(f"{runs} runs, {failed} failed, {time.monotonic() - began:.0f} s; growth: {growth}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
