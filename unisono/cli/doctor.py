"""`unisono doctor`: examines this machine as a run would find it, and says what needs repair.

*Threads:* each check (`checks.py`) runs in a daemon, `unisono-check`, and is abandoned after a limited time.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import Literal

from unisono.comm.outcome import Outcome

_EPILOG = """\
Each line is ok, a warning (hurts some runs) or a problem (runs do not work). An area without
either has one line; --all has a line for each fact.
The exit code is 1 when there is a problem, else 0.

examples:
  unisono doctor                             all checks, with two real workers: about 5 seconds
  unisono doctor --quick                     starts no worker
  unisono doctor --gpus                      copies between all devices, bit for bit, and collectives of all
  unisono doctor --endpoint host1:29400      can a rendezvous be hosted, or reached, there?
"""

Severity = Literal["ok", "warning", "problem"]


@dataclass(frozen=True)
class Finding:
    """One result of examining the machine: what was examined and found, in one line, and what to do about it. A warning
    affects some runs; a problem prevents runs from working."""

    name: str
    state: Severity
    text: str
    advice: str = ""


def warning_if(is_bad: bool, name: str, text: str, advice: str) -> Finding:
    """A fact; if it is bad, a warning with advice."""
    return Finding(name, "warning", text, advice) if is_bad else Finding(name, "ok", text)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "doctor",
        help="check this machine, and report what needs fixing",
        description="Check versions, devices, memory, limits and environment, start two "
        "workers,\ntime a collective between them, and say what has to be repaired.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--all", action="store_true", help="print every fact, not just what needs action")
    parser.add_argument("--json", action="store_true", help="print every fact as JSON: area, name, state, text, advice")
    parser.add_argument("--quick", action="store_true", help="start no workers")
    parser.add_argument("--gpus", action="store_true", help="copy between all devices, and compare what arrives")
    parser.add_argument("--endpoint", metavar="HOST:PORT", help="a rendezvous endpoint, to be served or reached")
    parser.set_defaults(run=run_doctor)


def run_doctor(options: argparse.Namespace) -> int:
    """Run the checks and print the findings; return 1 if there is a problem, otherwise 0."""
    areas = examine_all(options.quick, options.gpus, options.endpoint)
    if options.json:
        facts = [{"area": area, **asdict(each)} for area, found in areas for each in found]
        print(json.dumps(facts, indent=1))
        return int(any(each["state"] == "problem" for each in facts))
    return int(_print_lines(areas, options.all)["problem"] > 0)


def check_versions() -> Iterator[Finding]:
    """The interpreter, and the packages that this one depends on. Imports none of them: one may be missing."""
    yield Finding("python", "ok", f"{platform.python_version()} ({sys.executable}), {platform.platform()}")
    found: dict[str, str] = {}
    required = [each for each in importlib.metadata.requires("unisono") or () if "extra ==" not in each]
    names = [each[0] for each in map(re.compile(r"[\w.-]+").match, required) if each]
    for name in ("unisono", *names, "torch-xla"):
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    torch = found.get("torch", "")
    xla = found.get("torch-xla", torch)
    is_mixed = xla.split(".")[:2] != torch.split(".")[:2]
    advice = f"torch-xla works with a torch of its own version: pip install torch=={xla}"
    yield warning_if(is_mixed, "packages", ", ".join(f"{name} {number}" for name, number in found.items()), advice)
    if missing := [name for name in names if name not in found]:
        yield Finding("packages", "problem", f"not installed: {', '.join(missing)}", f"pip install {' '.join(missing)}")


def examine_all(is_quick: bool, has_copies: bool, endpoint: str | None) -> Iterator[tuple[str, list[Finding]]]:
    """Run the checks in their order: the area of each, and what it found. They are imported here: `unisono --help` does
    not need torch, and where a part of it is missing, the versions are still reported."""

    def area(
        name: str, check: Callable[[], Iterable[Finding]], limit_s: float = 10, advice: str = ""
    ) -> tuple[str, list[Finding]]:
        return name, examine(name, check, limit_s, advice)

    yield area("packages", check_versions)
    try:
        from unisono.cli import checks
    except ImportError as error:
        yield "import", [Finding("import", "problem", str(error))]
        return
    yield area("devices", checks.check_devices, 30, "the driver does not answer: try its own tool")
    yield area("resources", checks.check_resources, 10, "the file system of temporary files hangs: set TMPDIR")
    yield area("launcher", checks.check_environment)
    if not is_quick:
        advice = "a worker or a collective hangs; py-spy dump --pid PID shows where"
        yield area("workers", checks.check_workers, checks.WORKERS_LIMIT_S, advice)
    if has_copies:
        yield area("copies", checks.check_copies, checks.COPIES_LIMIT_S, "the devices are slow; try fewer of them")
    if endpoint is not None:
        check = partial(checks.check_endpoint, endpoint)
        yield area("endpoint", check, 10, "its name is not resolved; give an address")


def examine(
    name: str, check: Callable[[], Iterable[Finding]], limit_s: float = 10.0, advice_if_late: str = ""
) -> list[Finding]:
    """The findings of a check; its failure, or that it takes longer than `limit_s` seconds, is a problem, too."""
    found: list[Outcome[list[Finding]]] = []
    thread = threading.Thread(target=_run_check, args=(check, found), name="unisono-check", daemon=True)
    thread.start()
    thread.join(limit_s)
    if not found:
        return [Finding(name, "problem", f"no answer within {limit_s:g} s", advice_if_late)]
    if (error := found[0].error) is not None:
        return [Finding(name, "problem", f"could not be checked ({type(error).__name__}: {error})")]
    return found[0].unwrap()


def _run_check(check: Callable[[], Iterable[Finding]], found: list[Outcome[list[Finding]]]) -> None:
    """Body of a check's thread: adds exactly one outcome."""
    found.append(Outcome.capture(lambda: list(check())))


def _print_lines(areas: Iterable[tuple[str, list[Finding]]], is_all: bool) -> Counter[Severity]:
    """Print the findings of each area as they arrive, each with its advice below: all of them, or those that need
    action, or that there are none; and the totals, which are returned."""
    states: Counter[Severity] = Counter()
    for area, found in areas:
        states.update(each.state for each in found)
        bad = [each for each in found if each.state != "ok"]
        for each in found if is_all else bad or [_in_short(area, found)]:
            print(f"{each.state:8} {each.name:14} {each.text}", flush=True)
            if each.advice:
                print(f"{'':23} -> {each.advice}", flush=True)
    print(f"\nproblems: {states['problem']}, warnings: {states['warning']}{'' if is_all else ' (--all: every fact)'}")
    return states


def _in_short(area: str, found: list[Finding]) -> Finding:
    """For an area where all is well: the facts with the area's name, or the names of what was examined."""
    facts = "; ".join(each.text for each in found if each.name == area)
    return Finding(area, "ok", facts or ", ".join(each.name for each in found))
