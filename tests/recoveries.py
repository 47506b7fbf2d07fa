"""Trainings that are hit two or three times, the later times at a random moment of what the first hit has begun: while
the next zygote imports, while the ranks meet, load, train again or end. `python tests/soak.py --kind recover` does it.

A training runs by `spawn`, by `unisono run`, on the engine `Local`, or on two machines, which are network namespaces;
at times as an ordinary user. Its lives follow one another, on other ranks and strategies, until one has ended well.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import secrets
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from agents import free_port, pull_cable, two_networks
from faults import Ear, Line, Script

USER, GRACE_S, LIMIT_S, PACE_S = 12345, 2.0, 240.0, 0.01
LOST_S = 10.0  # after which an agent that is not heard of is given up
GONE_S = GRACE_S + 10.0 + 20.0  # an agent without its caller has 10 s after the grace; the machine may be busy
TRAINING = """
import ctypes, json, os, sys, time
from pathlib import Path
if __name__ == "__main__":
    if {network!r} and os.getuid() == 0:  # the second time as the user, who is in that network
        descriptor = os.open("/run/netns/" + {network!r}, os.O_RDONLY)
        assert ctypes.CDLL(None).setns(descriptor, 0x40000000) == 0
        os.close(descriptor)
    if {user} and os.getuid() == 0:  # who may read the modules of any user
        enter = ["setpriv", "--reuid={user}", "--regid={user}", "--clear-groups"]
        enter += ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
        os.execvp("setpriv", [*enter, sys.executable, *sys.argv])
from faults import Line
from resumable import Run

line = Line(Path({root!r}) / "line")

def after(accelerator, count):
    line.say("trains")
    time.sleep({pace_s})
    if count % {every} == 0:
        line.say("saves")
        accelerator.save_state(is_async={is_async})

def train(*_):
    line.say("loads")
    weights, ledger = Run(Path({root!r}) / "run", {strategy!r}, workers={workers}, after=after)()
    line.say("ends")
    return weights.tolist(), ledger.seen

if __name__ == "__main__":
    {start}
"""
STARTS = {  # what the caller of a life runs; "rank" is the script of `unisono run`
    "spawn": "from unisono import spawn, warm\n    warm(preload=['torch._dynamo', 'resumable'])\n"
    "    print(json.dumps(spawn(train, **{options})[0]))",
    "engine": "from unisono import spawn\n    from unisono.engines import Local\n"
    "    print(json.dumps(spawn(train, engine=Local(2), **{options})[0]))",
    "run": "from unisono.cli.main import main\n    sys.exit(main({arguments}))",
    "rank": "from unisono import rank\n    found = train()\n    if rank() == 0:\n        print(json.dumps(found))",
}
STARTS["hosts"] = STARTS["run"]
TO_CALLER = [signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGHUP]
VICTIMS = ["zygote", "zygote", "rank", "rank", "ranks"]
MOMENTS = ["now", "imports", "meets", "loads", "trains", "saves", "ends"]


class Hit(NamedTuple):
    """At a moment after the one before, and a while, the victim gets the signal, or the disk is full, or the cable
    out; where it lasts, for that long."""

    moment: str
    delay_s: float
    victim: str
    signum: int
    lasts_s: float

    @classmethod
    def drawn(cls, draw: random.Random, how: str, number: int, is_last: bool, has_disk: bool) -> Hit:
        is_hosts, pauses = how == "hosts", draw.random() < 0.25
        agents = {"engine": ["agent", "agent"], "hosts": ["agent 0", "agent 1"]}.get(how, [])
        victims = VICTIMS + ["disk"] * has_disk + agents + ["cable"] * 2 * is_hosts
        if (is_last or pauses) and not is_hosts:  # whose callers are its agents
            victims += ["caller"] * len(victims) + ["caller and zygote"] * (not pauses)
        moment = draw.choice(MOMENTS if number else ["trains", "trains", "saves", "loads", "meets"])
        delay_s = draw.choice([0.0, draw.random() * 0.05, draw.random() * 0.5, draw.random() * (4 if number else 0.5)])
        victim, lasts_s = draw.choice(victims), 0.0
        if pauses or victim in ("disk", "cable"):
            can_be_lost = is_hosts and (victim == "cable" or "agent" in victim)
            lasts_s = draw.choice([0.5, 1.0, 3.0, 1.5 * LOST_S if can_be_lost else 2.0])
        ends_in_order = "caller" in victim or "agent" in victim
        signum = draw.choice(TO_CALLER) if ends_in_order else signal.SIGKILL
        return cls(moment, delay_s, victim, signal.SIGSTOP if pauses else signum, lasts_s)

    @property
    def harms(self) -> bool:
        """It may cost a restart."""
        return self.victim == "disk" or self.lasts_s == 0 or self.lasts_s > LOST_S

    @property
    def what(self) -> str:
        names = {"disk": "full disk", "cable": "pulled cable"}
        how = names.get(self.victim, f"{self.victim} {signal.Signals(self.signum).name}")
        return how + f" for {self.lasts_s:g} s" * (self.lasts_s > 0)

    def __str__(self) -> str:
        return f"{self.what} {self.moment}+{self.delay_s:.2f}"


class Life(NamedTuple):
    """A training from its checkpoint, if there is one, to its end, whichever."""

    ranks: int
    strategy: str
    restarts: int
    every: int
    is_async: bool
    pace_s: float
    is_elastic: bool  # "hosts" go on with one machine
    hits: list[Hit]

    @classmethod
    def drawn(cls, draw: random.Random, how: str, is_last: bool, has_disk: bool) -> Life:
        count = 0 if is_last else draw.choice([2, 2, 3])
        hits = [Hit.drawn(draw, how, number, number == count - 1, has_disk) for number in range(count)]
        restarts = draw.choice([count, count, count - 1]) if count else 0
        way = draw.choice([2, 4]), draw.choice(["ddp", "zero1", "fsdp"]), restarts
        return cls(*way, draw.randrange(1, 4), draw.random() < 0.5, draw.choice([0.1, 0.3]), draw.random() < 0.5, hits)


class Watcher:
    """Sees the processes of a life, hears its ranks, and hits."""

    def __init__(self, scripts: list[Script], ear: Ear, filler: Path, networks: Sequence[str]) -> None:
        self.scripts, self.ear, self.filler, self.networks = scripts, ear, filler, networks
        self.known: set[int] = set()
        self.undo: list[tuple[float, Callable[[], None]]] = []
        self.heard = Counter[str]()

    def strike(self, hits: list[Hit]) -> list[Hit]:
        """Those that have found a victim."""
        landed: list[Hit] = []
        for hit in hits:
            if not self.wait(self.condition(hit.moment)):
                break
            until = time.monotonic() + hit.delay_s
            self.wait(lambda until=until: time.monotonic() > until)  # type: ignore[misc]
            if self.land(hit):
                landed.append(hit)
        while self.wait(lambda: False):
            pass
        return landed

    def wait(self, condition: Callable[[], bool]) -> bool:
        """Whether it came true before the callers have ended."""
        deadline = time.monotonic() + LIMIT_S
        while any(each.process.poll() is None for each in self.scripts):
            assert time.monotonic() < deadline, "nothing has ended"
            self.listen()
            if condition():
                return True
            time.sleep(PACE_S)
        self.listen(at_end=True)
        return False

    def listen(self, at_end: bool = False) -> None:
        with contextlib.suppress(AssertionError):  # nothing was said
            while True:
                self.heard[self.ear.hear(0.0)[0]] += 1
        for until, undo in self.undo[:]:
            if at_end or time.monotonic() > until:
                self.undo.remove((until, undo))
                with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                    undo()

    def condition(self, moment: str) -> Callable[[], bool]:
        if moment == "now":
            return lambda: True
        if moment in ("imports", "meets"):
            level = "zygote" if moment == "imports" else "rank"
            return lambda: any(each.pid not in self.known for each in self.processes()[level])
        before = self.heard[moment]
        return lambda: self.heard[moment] > before

    def processes(self) -> dict[str, list[psutil.Process]]:
        """By what they are; the newest first."""
        found: dict[str, list[psutil.Process]] = {each: [] for each in ("agent", "zygote", "rank", "other")}
        callers = {each.process.pid for each in self.scripts}
        levels: dict[int, str] = {}
        # By the mark in their environment: the zygote of a warm script is not below it.
        living = {each.pid: each for script in self.scripts for each in script.living()}

        def level_of(pid: int) -> str:
            if pid in levels or pid in callers or pid not in living:
                return levels.get(pid, "caller" if pid in callers else "none")
            try:
                above, command = level_of(living[pid].ppid()), " ".join(living[pid].cmdline())
                is_zygote = "starting.zygote" in command or living[pid].name() == "unisono-zygote"
            except psutil.Error:
                return "other"
            if above in ("zygote", "rank", "other"):
                levels[pid] = "rank" if above == "zygote" else "other"
            else:
                levels[pid] = "zygote" if is_zygote else "agent" if "engines.machine" in command else "other"
            return levels[pid]

        for pid in living:
            if pid not in callers:
                found[level_of(pid)].append(living[pid])
        for each in found.values():
            each.sort(key=lambda process: process.pid, reverse=True)
        return found

    def land(self, hit: Hit) -> bool:
        found = self.processes()
        self.known = {each.pid for each in (*found["zygote"], *found["rank"])}
        until = time.monotonic() + hit.lasts_s
        if hit.victim == "disk":
            with contextlib.suppress(OSError), self.filler.open("wb", buffering=0) as file:
                while file.write(bytes(1 << 16)):
                    pass
            self.undo.append((until, lambda: self.filler.unlink(missing_ok=True)))
            return True
        if hit.victim == "cable":
            pull_cable(self.networks[1])
            self.undo.append((until, lambda: pull_cable(self.networks[1], "up")))
            return True
        callers = [each.process for each in self.scripts]
        agents = found["agent"]
        choices: dict[str, list[Any]] = {
            "zygote": found["zygote"][:1],
            "rank": found["rank"][:1],
            "ranks": found["rank"],
            "agent": [each for each in agents if each.pid % 2] or agents[:1],
            "agent 0": callers[:1],
            "agent 1": callers[1:],
            "caller": callers,
            "caller and zygote": [*callers, *found["zygote"]],
        }
        has_landed = False
        for victim in choices[hit.victim]:
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                victim.send_signal(signal.Signals(hit.signum))
                has_landed = True
                if hit.signum == signal.SIGSTOP:
                    self.undo.append((until, lambda victim=victim: victim.send_signal(signal.SIGCONT)))  # type: ignore[misc]
        return has_landed


def expected_codes(how: str, life: Life, landed: list[Hit], number: int) -> set[int]:
    """How the caller of this number may end after these hits: well, while there are restarts; with the signal that it,
    or another agent, got; or with an error."""
    harmful = [each for each in landed if each.harms]
    signals = [each.signum for each in harmful if "caller" in each.victim or each.victim[:6] == "agent "]
    expected = {0, *(-each for each in signals), *(128 + each for each in signals)}
    failures = [each for each in harmful if "caller" not in each.victim]
    if how == "hosts" and life.is_elastic and number == 0 and len(failures) <= life.restarts:
        killed = [each for each in failures if each.signum == signal.SIGKILL and each.victim == "agent 1"]
        if killed == failures:
            return {0}  # it goes on alone
    if len(failures) > life.restarts or any(
        each.victim in ("disk", "cable") or "agent" in each.victim for each in failures
    ):
        expected |= {1, 137}
    return expected


@contextlib.contextmanager
def started(how: str, life: Life, root: Path, user: int, workers: int, networks: tuple[str, ...]) -> Iterator[Any]:
    """The callers of a life: one, or two agents."""
    options = {"nprocs": life.ranks, "cores": 1, "backend": "cpu", "max_restarts": life.restarts, "grace_s": GRACE_S}
    arguments = ["run", "-n", str(life.ranks), "--backend", "cpu", "--no-prefix", "--grace", str(GRACE_S)]
    arguments += ["--max-restarts", str(life.restarts)]
    if how == "hosts":
        arguments[2] = str(life.ranks // 2)
        arguments += ["--nnodes", "1:2" if life.is_elastic else "2", "--rdzv-endpoint", f"10.77.0.1:{free_port()}"]
        arguments += ["--lost-after", f"{LOST_S:g}", "--rdzv-conf", "join_timeout=20"]
    arguments.append(str(root / "train.py"))
    places: dict[str, Any] = {"root": str(root), "strategy": life.strategy, "workers": workers, "user": 0}
    places |= {"pace_s": life.pace_s, "every": life.every, "is_async": life.is_async, "network": ""}
    (root / "train.py").write_text(TRAINING.format(**places, start=STARTS["rank"]))
    start = STARTS[how].format(options=options, arguments=arguments)
    with contextlib.ExitStack() as stack:
        scripts = []
        for number, network in enumerate(networks or [""]):
            (directory := root / f"caller-{number}").mkdir(exist_ok=True)
            source = TRAINING.format(**{**places, "user": user, "network": network}, start=start)
            environ = {"TMPDIR": str(root / "tmp"), "HOME": str(root), "PYTHONPATH": os.environ["PYTHONPATH"]}
            way = "file" if user or network else "warm"
            scripts.append(stack.enter_context(Script(source, directory, way, **environ)))
        yield scripts


def recover(draw: random.Random, root: Path, workers: int, is_apart: bool) -> tuple[list[str], list[str], Any]:
    """A training until it has ended well: its lives in words, the hits that have landed, and what it has returned.

    `is_apart`: this process has mounts of its own, a small disk at `root`, and may make networks.

    Raises:
        AssertionError: a life had another end, or took longer; something is left.
    """
    how = draw.choice(["spawn"] * 4 + ["run"] * 2 + ["engine"] * 2 + ["hosts"] * is_apart)
    user = draw.choice([0, 0, 0, USER]) if os.geteuid() == 0 and shutil.which("setpriv") else 0
    told, all_landed = list[str](), list[str]()
    for name in ("tmp", "run"):
        (root / name).mkdir()
        (root / name).chmod(0o777)
    line, secret = Line.at(root / "line"), root / ".unisono-secret"
    line.path.chmod(0o666)
    secret.write_text(secrets.token_hex())
    secret.chmod(0o600)
    if user:
        os.chown(secret, user, user)
    with contextlib.ExitStack() as stack:
        networks = stack.enter_context(two_networks()) if how == "hosts" else ()
        for is_last in (False, False, True):
            life = Life.drawn(draw, how, is_last, is_apart)
            with (
                line.hearing() as ear,
                started(how, life, root, user, workers, networks) as scripts,
            ):
                landed = Watcher(scripts, ear, root / "filler", networks).strike(life.hits)
                ends = [each.end(LIMIT_S) for each in scripts]
                left = [each for script in scripts for each in script.survivors(GONE_S)]
                name = f"{how}-{life.ranks}{' as user' * bool(user)}: {', '.join(map(str, landed)) or 'none'}"
                assert not left, f"{name} has left {left}"
                for number, (code, _, errors) in enumerate(ends):
                    expected = sorted(expected_codes(how, life, landed, number))
                    assert code in expected, (
                        f"{name} has ended with {code}, not with one of {expected}: {errors[-3000:]}"
                    )
                    # A signal needs no word that comes when an agent still imports, or has done its work.
                    assert code <= 0 or errors.strip(), f"{name} has ended with {code} without a word"
            told.append(f"{name} -> {', '.join(str(code) for code, _, _ in ends)}")
            all_landed += [each.what + " in a recovery" * bool(number) for number, each in enumerate(landed)]
            is_well = all(code == 0 for code, _, _ in ends)
            if is_well or all(each.signum != signal.SIGKILL or "caller" not in each.victim for each in landed):
                stay = [each.name for each in (root / "tmp").iterdir() if "torchinductor" not in each.name]
                assert not stay, f"{name} has left the files {stay}"
            if is_well:
                break
    (found,) = [json.loads(each) for _, output, _ in ends for each in output.splitlines() if each.startswith("[[")]
    return told, all_landed, found
