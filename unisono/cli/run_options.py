"""The options of `unisono run`: its own, and torchrun's, each with hyphens and with underscores."""

from __future__ import annotations

import argparse
import math
import re
from functools import partial
from typing import Any

_EXAMPLES = """
examples:
  unisono run train.py --epochs 3                    one worker per device of this machine
  unisono run -n 4 --backend cpu train.py            four workers on the CPU
  unisono run -n 2 -m package.training --epochs 3    a module, as `python -m` runs it
  unisono run -n 2 --max-restarts 3 --log-dir logs train.py
  unisono run --preload transformers,trl train.py    imported once, and not by each worker

on two machines, the same on each (node1 is one of them); with 1:2 one may come later, or be lost:
  unisono run --nnodes 2 --rdzv-endpoint node1:29400 train.py
  unisono run --nnodes 1:2 --max-restarts 3 --rdzv-endpoint node1:29400 train.py

with SLURM, one agent per node; nothing else is needed:
  srun --ntasks-per-node=1 unisono run train.py

exit codes: 0 success; n when a worker ended by sys.exit(n), modulo 256 and never 0; 1 when it failed otherwise;
128 + n when signal n ended it; 2 wrong usage; 130 after Ctrl-C; 143 when the ranks stopped early, as
requested.
"""
_PORT = 29500  # torchrun's, if only --master-addr is given


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the parser of `unisono run` to those of `unisono`, and return it."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "run",
        help="run a script as one worker per device, on one machine or several",
        description="Run a script or a module as one worker per device. Options precede it; what follows "
        "it is passed on to it.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    group: Any = parser
    for names, metavar, text, settings in _OPTIONS:
        if not names:
            group = parser.add_argument_group(text)
            continue
        settings = {"metavar": metavar, **settings} if metavar else {"action": "store_true", **settings}
        spellings = names.split()
        settings.setdefault("dest", spellings[-1][2:].replace("-", "_"))
        group.add_argument(*spellings, help=text, **settings)
        hidden = [f"--{name[2:].replace('-', '_')}" for name in spellings if "-" in name[2:]]
        if hidden:  # with underscores, which torchrun accepts as well
            group.add_argument(*hidden, help=argparse.SUPPRESS, **settings)
    for names, text in _REFUSED.items():
        for name in names.split():
            group.add_argument(name, nargs="?", action=_Refuse, help=argparse.SUPPRESS, const=text)
    parser.add_argument("target", help="script.py; with -m a module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script", metavar="...")
    return parser


class _Refuse(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, _: Any, __: Any, option: str | None = None) -> None:
        parser.error(f"{option} is an option of torchrun: {self.const}")


def endpoint_of(parsed: argparse.Namespace) -> str | None:
    """Where the machines meet, according to the command line; None if it does not say."""
    if parsed.rdzv_endpoint is None and parsed.master_addr is not None:
        return f"{parsed.master_addr}:{parsed.master_port or _PORT}"
    endpoint: str | None = parsed.rdzv_endpoint
    return endpoint


def node_range(text: str) -> tuple[int, int]:
    """Parse a number of machines, or a range of it: "1:2"."""
    found = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    low, high = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= low <= high:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of machines; write 2, or 1:2 for one or two")
    return low, high


def _parse_workers(text: str) -> int | str:
    if text in ("p", "proc", "procs"):  # mpirun's -np, which argparse reads as -n p
        raise argparse.ArgumentTypeError(f"there is no option -n{text}; write -n 2")
    if text.isalpha():
        return text  # auto, gpu or cpu: checked and resolved later, where torch has been imported
    return _parse_number(text, 1, ", nor auto, gpu or cpu")


def _parse_number(text: str, least: int = 0, more: str = "") -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least {least}{more}")
    return int(text)


def _parse_seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of seconds")
    return seconds


def _parse_ranks(text: str) -> tuple[int, ...]:
    return tuple(_parse_number(rank) for rank in text.split(","))


def parse_modules(text: str) -> list[str]:
    """Parse names of modules, separated by commas."""
    names = text.split(",")
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")):
            raise argparse.ArgumentTypeError(
                f"{name!r} is not the name of a module; write names as in torch,transformers"
            )
    return names


def _parse_settings(text: str) -> dict[str, str]:
    pairs = [each.partition("=") for each in text.split(",") if each]
    if not all(name and equals for name, equals, _ in pairs):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list like last_call_timeout=5,keep_alive_interval=2")
    return {name.strip(): value.strip() for name, _, value in pairs}


_NUMBER: dict[str, Any] = {"type": _parse_number}
_POSITIVE: dict[str, Any] = {"type": partial(_parse_number, least=1)}
_ZERO: dict[str, Any] = {**_NUMBER, "default": 0}
_SECONDS: dict[str, Any] = {"type": _parse_seconds}
_MODULES: dict[str, Any] = {"type": parse_modules, "default": []}
_NPROC_HELP = (
    "workers on this machine, else one per device; gpu: one per accelerator, cpu: one per core, auto: the first that "
    "this machine has"
)
_NO_SECRET: dict[str, Any] = {"action": "store_const", "const": "", "dest": "rdzv_secret_file"}
_LOST_HELP = "continue without a machine that is silent for S seconds (%(default)s), or end where too few are left"

# Options of torchrun, and their counterparts.
_REFUSED = {
    "--tee -t --redirects -r": "--log-dir DIR keeps the output of all workers, and shows it, too",
    "--local-ranks-filter --local_ranks_filter": "--log-ranks 0,1 shows the output of these ranks of all machines",
    "--no-python --no_python": "the target is a Python script, or with -m a module; a script can call subprocess.run",
    "--role": "the workers of unisono run have one role, default; leave it out",
    "--logs-specs --logs_specs": "--log-dir DIR keeps the output of all workers",
    "--duplicate-stdout-filters --duplicate_stdout_filters --duplicate-stderr-filters --duplicate_stderr_filters": (
        "--log-dir DIR keeps the output of all workers"
    ),
    "--event-log-handler --event_log_handler": "--log-dir DIR keeps a record of the run",
    "--run-path --run_path --use-env --use_env": "unisono run does so always; leave it out",
    "--signals-to-handle --signals_to_handle": "SIGTERM and Ctrl-C always reach the workers; leave it out",
    "--virtual-local-rank --virtual_local_rank": "give torch.cuda.set_device the LOCAL_RANK, and leave it out",
}

# Spellings, the name of the value (none for a switch), help, settings of `add_argument`; without spellings a group.
_OPTIONS: list[tuple[str, str, str, dict[str, Any]]] = [
    ("", "", "workers", {}),
    ("-n --nproc --nprocs --nproc-per-node", "N", _NPROC_HELP, {"dest": "nproc", "type": _parse_workers}),
    ("-m --module", "", "the target is a module, which is run as `python -m` does", {}),
    ("--backend", "B", "the device family; else the first that has devices", {}),
    ("--start-method", "M", "how workers are started, zygote or spawn; see `spawn`", {}),
    ("--preload", "M,..", "modules that are imported once for all workers, before they start", _MODULES),
    ("", "", "CPU cores", {}),
    ("--num-threads", "N", "CPU threads of each worker; else its share of the cores", _POSITIVE),
    ("--num-loader-workers", "N", "of each worker's DataLoader, which then get their share of the cores, too", _ZERO),
    ("--numa-binding", "M", "keep each worker to the cores near its GPU: node, socket, exclusive or core-complex", {}),
    ("", "", "collectives", {}),
    ("--timeout", "S", "their time limit (%(default)s)", {**_SECONDS, "default": 1800.0}),
    (
        "--process-group",
        "G",
        "gloo: let ranks on the CPU reduce over the network, and not in memory that they share",
        {},
    ),
    ("", "", "failing and restarting", {}),
    ("--max-restarts", "N", "restart all workers, at most N times", _NUMBER),
    ("--snapshot-every", "N", "every N steps, keep the state in memory, for restarts", _NUMBER),
    ("--hang-timeout", "S", "stop when no rank makes progress for S seconds", _SECONDS),
    ("--shutdown-timeout --grace", "S", "between SIGTERM and SIGKILL (5; 25 with several machines)", _SECONDS),
    ("", "", "output", {}),
    ("--log-dir", "DIR", "also keep each worker's output, and a record of what it did, there", {}),
    ("--profile", "A:B[@R,..]", "torch.profiler for steps A to B - 1, numbered from 1, of these ranks or all", {}),
    ("--log-ranks", "R,..", "show the output of these ranks only", {"type": _parse_ranks}),
    ("--no-prefix", "", "do not begin each line with its [rank 0]", {}),
    ("", "", "more than one machine", {}),
    ("--standalone", "", "one machine, whatever the environment says", {}),
    ("--nnodes", "A[:B]", "machines; with A:B any number between", {"type": node_range}),
    ("--node-rank", "R", "the number of this one, where they have numbers", _NUMBER),
    ("--rdzv-endpoint", "H:P", "where the agents meet, host:port; the host is one of the machines", {}),
    ("--master-addr", "H", "the same as --rdzv-endpoint H:P, with", {}),
    ("--master-port", "P", f"the port ({_PORT})", _POSITIVE),
    ("--rdzv-backend", "B", "only c10d; static is treated as c10d", {"choices": ["c10d", "static"]}),
    ("--rdzv-id", "ID", "the name of the run, the same on all", {}),
    ("--rdzv-secret-file", "F", "the secret that they sign with; else UNISONO_RDZV_SECRET or ~/.unisono-secret", {}),
    ("--rdzv-insecure", "", "do without a secret, on a network that only you can reach", _NO_SECRET),
    ("--rdzv-conf", "K=V,..", "settings of torch's rendezvous", {"type": _parse_settings, "default": {}}),
    ("--lost-after", "S", _LOST_HELP, {**_SECONDS, "default": 60.0}),
    ("--monitor-interval", "S", "accepted for torchrun's sake: ends are noticed at once", _SECONDS),
    ("--local-addr", "A", "this machine's address for the others", {}),
]
