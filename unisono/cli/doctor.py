"""`unisono doctor`: examines this machine as a run would find it, and says what has to be repaired.

The checks are in `machine_checks.py`, `network_checks.py` and `worker_checks.py`; each yields `Finding`s. This module
is the entry point: the command line, the order of the checks, the output.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from functools import partial

from unisono.cli.findings import Check, Finding, State, examine

_NAME_WIDTH = 14
_COUNTED: tuple[State, ...] = ("problem", "warning", "note")
_EPILOG = """\
Each line is ok, a note (good to know), a warning (hurts some runs) or a problem (runs do not work).
The exit code is 1 when there is a problem, else 0.

examples:
  unisono doctor                             everything, with two real workers: about 5 seconds
  unisono doctor --quick                     starts no worker
  unisono doctor --endpoint host1:29400      can a rendezvous be hosted, or reached, there?
  unisono doctor --json | jq '.findings[] | select(.state != "ok")'
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to those of `unisono`."""
    parser = subparsers.add_parser(
        "doctor",
        help="check this machine, and report what needs fixing",
        description="Check versions, devices, cores, memory, limits, network and environment, start two "
        "workers,\ntime a collective between them, and say what has to be repaired.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="start no workers")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--endpoint", type=_parse_endpoint, metavar="HOST:PORT", help="a rendezvous endpoint, to be bound or reached"
    )
    parser.set_defaults(run=run_doctor, parser=parser)


def run_doctor(options: argparse.Namespace) -> int:
    """Run the checks and print the findings; return 1 if there is a problem, otherwise 0."""
    checks = list_checks(options.quick, options.endpoint)
    found = (finding for check in checks for finding in examine(check))
    states = _print_json(list(found)) if options.json else _print_lines(found)
    return int(states["problem"] > 0)


def list_checks(is_quick: bool, endpoint: tuple[str, int] | None) -> Iterator[Check]:
    """The checks in their order. They are imported here, so that `unisono --help` does not need torch."""
    from unisono.cli import machine_checks, network_checks, worker_checks

    yield Check("versions", machine_checks.versions)
    yield Check("devices", machine_checks.devices, 30, when_late="the driver does not answer: try its own tool")
    yield Check("cores", machine_checks.cores)
    yield Check("memory", machine_checks.memory)
    yield Check("limits", machine_checks.limits)
    yield Check("temporary", machine_checks.temporary_files, 10, "problem", "its file system hangs: set TMPDIR")
    yield Check("environment", machine_checks.environment)
    if not is_quick:
        late = "a worker or a collective hangs; py-spy dump --pid PID shows where"
        yield Check("workers", worker_checks.workers, worker_checks.LIMIT_S, "problem", late)
    if endpoint is not None:
        late = "its name is not resolved; give an address"
        yield Check("endpoint", partial(network_checks.endpoint, *endpoint), 10, "problem", late)
    yield Check("names", network_checks.names, 6, when_late=network_checks.RESOLVER_ADVICE)


def _parse_endpoint(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise argparse.ArgumentTypeError(f"{text!r} is not an endpoint; write HOST:PORT, with a port from 1 to 65535")
    return host.strip("[]"), int(port)


def _print_json(found: list[Finding]) -> Counter[State]:
    states = Counter(each.state for each in found)
    report = {"is_fine": not states["problem"], "findings": [asdict(each) for each in found]}
    print(json.dumps(report, indent=2))
    return states


def _print_lines(found: Iterable[Finding]) -> Counter[State]:
    """Print one line for each finding as it arrives, with its advice below, and the totals; return the totals."""
    states: Counter[State] = Counter()
    for each in found:
        states[each.state] += 1
        print(f"{each.state:8} {each.name:{_NAME_WIDTH}} {each.text}", flush=True)
        if each.advice:
            print(f"{'':8} {'':{_NAME_WIDTH}} -> {each.advice}", flush=True)
    counts = [f"{states[state]} {state}{'s' * (states[state] != 1)}" for state in _COUNTED if states[state]]
    print("\n" + (", ".join(counts) or "nothing to mend"))
    return states
