"""`unisono bench`: the benchmarks of a checkout, as one file; and two such files compared, device by device."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_RATIO = re.compile(
    r"(?P<name>\S.*?) +(?P<ratio>\d+\.\d+) +quartiles (?P<low>[\d.]+) \.\. (?P<high>[\d.]+) +(?P<pairs>\d+) pairs"
)
_MUST_AGREE = ("device", "machine", "cores", "processor")


def add_parser(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "bench",
        help="run the benchmarks of a checkout, or compare two results",
        description="Runs bench/*.py of a checkout: each compares this package with what it replaces, as ratios of "
        "interleaved blocks. Writes them with the facts of the machine. `unisono bench compare OLD NEW` prints what "
        "has changed between two such files.",
    )
    parser.add_argument("compare", nargs="*", metavar="compare OLD NEW", help="compare two files")
    parser.add_argument("--suite", default="bench", help="the directory of the scripts; default: bench")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these scripts, by their names without .py")
    parser.add_argument("--device", default="", help="passed to the scripts that take --device; others run on the CPU")
    parser.add_argument("-o", "--output", help="the file: results (default bench.json), or the picture of a comparison")
    parser.set_defaults(parser=parser, run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the subcommand."""
    try:
        if not arguments.compare:
            return _run_suite(arguments)
        if arguments.compare[0] != "compare" or len(arguments.compare) != 3:
            arguments.parser.error(f"{' '.join(arguments.compare)}: write `unisono bench compare OLD.json NEW.json`")
        old, new = (read_results(Path(each)) for each in arguments.compare[1:])
        print(compare(old, new))
        if arguments.output:
            print(draw(old, new, Path(arguments.output)))
    except (OSError, ValueError) as error:
        print(f"unisono bench: {error}", file=sys.stderr)
        return 1
    return 0


def _run_suite(arguments: argparse.Namespace) -> int:
    suite = Path(arguments.suite)
    scripts = sorted(each for each in suite.glob("*.py") if 'if __name__ == "__main__"' in each.read_text())
    if not scripts:
        raise FileNotFoundError(f"{suite}/ holds no benchmarks: run this in a checkout, or pass --suite DIRECTORY")
    unknown = set(arguments.only or ()) - {each.stem for each in scripts}
    if unknown:
        raise ValueError(f"--only {' '.join(sorted(unknown))}: there are {', '.join(each.stem for each in scripts)}")
    chosen = [each for each in scripts if not arguments.only or each.stem in arguments.only]
    if arguments.device and not any('"--device"' in each.read_text() for each in chosen):
        raise ValueError(
            f"--device {arguments.device}: none of {', '.join(each.stem for each in chosen)} takes a device"
        )
    found: list[dict[str, Any]] = []
    failed = []
    for script in chosen:
        takes_device = bool(arguments.device) and '"--device"' in script.read_text()
        command = [sys.executable, str(script), *(["--device", arguments.device] if takes_device else [])]
        if "import torch_xla" in script.read_text() and find_spec("torch_xla") is None:
            continue
        print(f"{' '.join(command[1:])}", flush=True)
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        device = arguments.device if takes_device else ""
        found += [{"script": script.stem, "device": device, **each} for each in _ratios(process.stdout)]
        if process.wait():
            failed.append(script.stem)
    output = Path(arguments.output or "bench.json")
    output.write_text(json.dumps({"facts": machine_facts(arguments.device), "ratios": found}, indent=1) + "\n")
    print(output)
    if failed:
        print(f"unisono bench: failed: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


def _ratios(lines: Any) -> Iterator[dict[str, Any]]:
    """The ratios among the lines of a script, which are shown as they come; each with the heading above it."""
    heading = ""
    for line in lines:
        print(line, end="", flush=True)
        match = _RATIO.match(line)
        if match:
            numbers = {name: float(match[name]) for name in ("ratio", "low", "high")}
            yield {"heading": heading, "name": match["name"], **numbers, "pairs": int(match["pairs"])}
        elif line.strip() and not line.startswith("median"):
            heading = re.sub(r"[;,] torch \S+,.*", "", line.strip())


def machine_facts(device: str) -> dict[str, Any]:
    """What a figure depends on."""
    return {
        "device": device,
        "machine": platform.machine(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "load": os.getloadavg(),
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor()
    )


def read_results(path: Path) -> dict[str, Any]:
    """Read a file of `unisono bench`; ValueError if it is none."""
    try:
        found = json.loads(path.read_text())
        if not found["ratios"] or not found["facts"]:
            raise ValueError("it is empty")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is no result of `unisono bench` ({error}): run that, and pass the file it writes"
        ) from None
    return dict(found)


def _pairs(old: dict[str, Any], new: dict[str, Any]) -> list[tuple[str, str, dict[str, Any], dict[str, Any]]]:
    """The ratios that both results have: device, name, old, new.

    Raises:
        ValueError: they are of unlike machines, or have none in common.
    """
    differ = [name for name in _MUST_AGREE if old["facts"].get(name) != new["facts"].get(name)]
    if differ:
        shown = "; ".join(f"{name}: {old['facts'].get(name)} and {new['facts'].get(name)}" for name in differ)
        raise ValueError(f"the results are of unlike machines ({shown}); compare two of the same machine")
    keyed = [
        {(each["device"], each["script"], each["heading"], each["name"]): each for each in one["ratios"]}
        for one in (old, new)
    ]
    common = [key for key in keyed[0] if key in keyed[1]]
    if not common:
        raise ValueError("the results have no benchmark in common; run the same scripts for both")
    return [(key[0], f"{key[1]}: {key[3]}", keyed[0][key], keyed[1][key]) for key in common]


def compare(old: dict[str, Any], new: dict[str, Any]) -> str:
    """A table: each ratio before and after, and old / new; above 1, it has become better. `*`: beyond the quartiles."""
    from unisono.report.text import aligned  # here, since it imports torch

    rows = [["", "device", "old", "new", "old/new", ""]]
    for device, name, before, after in _pairs(old, new):
        is_clear = before["high"] < after["low"] or after["high"] < before["low"]
        numbers = [f"{before['ratio']:.3f}", f"{after['ratio']:.3f}", f"{before['ratio'] / after['ratio']:.3f}"]
        rows.append([name, device, *numbers, "*" if is_clear else ""])
    return aligned(rows)


def draw(old: dict[str, Any], new: dict[str, Any], path: Path) -> Path:
    """A picture (PNG or SVG, by the suffix): old / new of each benchmark, a panel for each device."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("a picture needs matplotlib: pip install 'unisono[report]'") from error
    pairs = _pairs(old, new)
    devices = list(dict.fromkeys(each[0] for each in pairs))
    figure = Figure(figsize=(10, 1 + 0.24 * len(pairs)), layout="constrained")
    panels = figure.subplots(
        len(devices), 1, squeeze=False, height_ratios=[sum(each[0] == one for each in pairs) for one in devices]
    )
    for panel, device in zip(panels[:, 0], devices, strict=True):
        shown = [each for each in pairs if each[0] == device][::-1]
        changes = [before["ratio"] / after["ratio"] for _, _, before, after in shown]
        panel.barh(
            [name[:70] for _, name, _, _ in shown],
            changes,
            color=["#66a182" if each >= 1 else "#d1495b" for each in changes],
        )
        panel.axvline(1, color="#444", linewidth=1)
        panel.set(title=device, xlabel="old / new: above 1, the new version is better")
        panel.tick_params(axis="y", labelsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    return path.absolute()
