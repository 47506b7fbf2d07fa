"""The benchmarks, as one file of results; and two such files compared, device by device.

python bench/run.py
python bench/run.py compare OLD.json NEW.json
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from unisono.devices import CPU, pick_backend
from unisono.devices.cpu import processor
from unisono.protocols import Backend
from unisono.report.picture import new_figure
from unisono.report.text import aligned

_FIGURE = re.compile(
    r"(?P<name>\S.*?) +(?P<ratio>[-.e\d]+) +quartiles (?P<low>[-.e\d]+) \.\. (?P<high>[-.e\d]+) +(?P<pairs>\d+) pairs"
    r" +(?P<ours>[-+.e\d]+) / (?P<theirs>[-+.e\d]+) (?P<unit>\S+)"
)
_CASE = re.compile(r"(?P<case>.+); torch \S+, .*")
_MUST_AGREE = ("machine", "processor", "cores")
_FEW = 5  # pairs: of fewer, the quartiles tell nothing
_KEY = ("device", "script", "case", "name")
_PACKAGES = ("unisono", "torch", "torch-xla", "accelerate", "lightning-fabric", "torchdata")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, without the program's name; None uses the process's own."""
    parser = argparse.ArgumentParser(
        description="Runs bench/*.py: each compares this package with what it replaces, as ratios of interleaved "
        "blocks. Writes them with the facts of the machine. `compare OLD NEW` prints what has changed between two such "
        "files of the same machine.",
    )
    parser.add_argument("compare", nargs="*", metavar="compare OLD NEW", help="compare two files")
    parser.add_argument("--suite", default=Path(__file__).parent, help="the directory of the scripts; default: bench")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these scripts, by their names without .py")
    parser.add_argument("--device", nargs="+", help="cpu (the default), cuda, mps, xla; or several")
    parser.add_argument(
        "--blocks", type=int, help="of each script, in place of its own number: few are quick, and vary"
    )
    parser.add_argument(
        "-o", "--output", help="the results (default bench.json); or the picture of a comparison, one for each device"
    )
    arguments = parser.parse_args(argv)
    try:
        if not arguments.compare:
            return _run_suite(arguments)
        if arguments.compare[0] != "compare" or len(arguments.compare) != 3:
            parser.error(f"{' '.join(arguments.compare)}: write `python bench/run.py compare OLD.json NEW.json`")
        old, new = (read_results(Path(each)) for each in arguments.compare[1:])
        print(compare(old, new))
        if arguments.output:
            print(*draw(old, new, Path(arguments.output)), sep="\n")
    except (OSError, ValueError, ImportError) as error:
        print(f"bench/run.py: {error}", file=sys.stderr)
        return 1
    return 0


def _run_suite(arguments: argparse.Namespace) -> int:
    if arguments.blocks is not None and arguments.blocks < 1:
        raise ValueError(f"--blocks {arguments.blocks}: pass 1 or more")
    options = ["--blocks", str(arguments.blocks)] if arguments.blocks else []
    devices = arguments.device or [CPU]
    facts = machine_facts(pick_backend(each) for each in devices)
    jobs = [(device, script) for device in devices for script in _scripts_for(device, arguments)]
    output = Path(arguments.output or "bench.json")
    output.parent.mkdir(parents=True, exist_ok=True)
    figures: list[dict[str, Any]] = []
    seconds: dict[str, float] = {}
    failed = []

    def keep() -> None:
        text = json.dumps({"facts": facts, "seconds": seconds, "figures": figures})
        text = text.replace("}, {", "},\n{").replace(', "figures": ', ',\n"figures":\n')  # a line each
        output.write_text(text + "\n")

    keep()  # an error of the file comes before the measuring, which takes long
    for device, script in jobs:
        print(f"\n# {script} on {device}", flush=True)
        start = time.monotonic()
        command = [sys.executable, str(script), "--device", device, *options]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            figures += [{"device": device, "script": script.stem, **each} for each in _figures(process.stdout)]
        if process.returncode:
            failed.append(f"{script.stem} on {device}")
        seconds[f"{device} {script.stem}"] = round(time.monotonic() - start, 1)
        keep()
    print(output)
    if failed:
        print(f"bench/run.py: failed: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


def _scripts_for(device: str, arguments: argparse.Namespace) -> list[Path]:
    """The chosen benchmarks that can use the device; those that cannot are named."""
    suite = Path(arguments.suite)
    benchmarks = {each: devices for each in sorted(suite.glob("*.py")) if (devices := _devices_of(each))}
    if not benchmarks:
        raise FileNotFoundError(f"{suite}/ holds no benchmarks: pass a --suite DIRECTORY that does")
    names = [each.stem for each in benchmarks]
    if unknown := set(arguments.only or ()) - set(names):
        raise ValueError(f"--only {' '.join(sorted(unknown))}: there are {', '.join(names)}")
    chosen = [each for each in benchmarks if not arguments.only or each.stem in arguments.only]
    able = [each for each in chosen if device in benchmarks[each]]
    cannot = ", ".join(each.stem for each in chosen if each not in able)
    if not able:
        raise ValueError(f"--device {device}: none of {cannot} can use it; choose a device or scripts that go together")
    if cannot:
        print(f"left out on {device}, which they cannot use: {cannot}", flush=True)
    return able


def _devices_of(script: Path) -> tuple[str, ...]:
    """The families that a script says it measures; none of one that is no benchmark."""
    said = re.search(r"^DEVICES = (\(.+\))$", script.read_text(), re.MULTILINE)
    return tuple(ast.literal_eval(said[1])) if said else ()


def _figures(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """The figures among the lines of a script, which are shown as they come; each with the case above it."""
    case = ""
    for line in lines:
        print(line, end="", flush=True)
        if found := _FIGURE.match(line):
            numbers = {name: float(found[name]) for name in ("ratio", "low", "high", "ours", "theirs")}
            yield {"case": case, "name": found["name"], **numbers, "unit": found["unit"], "pairs": int(found["pairs"])}
        elif found := _CASE.match(line):
            case = found["case"]


def machine_facts(families: Iterable[Backend]) -> dict[str, Any]:
    """What a figure depends on, the load before it included."""
    versions = {"python": platform.python_version()}
    for each in _PACKAGES:
        with suppress(PackageNotFoundError):
            versions[each] = version(each)
    return {
        "devices": {each.name: _describe(each) for each in families},
        "machine": platform.machine(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "versions": versions,
        "load": [round(each, 1) for each in os.getloadavg()],
        "at": datetime.now(UTC).isoformat(timespec="minutes"),
    }


def _describe(family: Backend) -> str:
    """How many devices there are, and what torch calls the first."""
    name = family.hardware()
    with suppress(RuntimeError, AttributeError):  # torch has no module for the family, or no name for its devices
        name = torch.get_device_module(family.name).get_device_name(0)
    return f"{family.device_count()} x {name}"


def read_results(path: Path) -> dict[str, Any]:
    """Read a file of results; ValueError if it is none."""
    try:
        found = json.loads(path.read_text())
        if not found["figures"] or not found["facts"]["devices"]:
            raise ValueError("it is empty")
        if any(each["ratio"] <= 0 for each in found["figures"]):
            raise ValueError("a ratio is 0 or less")
        if lacking := {name for name in _MUST_AGREE if name not in found["facts"]} | {
            name for each in found["figures"] for name in (*_KEY, "low", "high", "pairs") if name not in each
        }:
            raise ValueError(f"it lacks {', '.join(sorted(lacking))}")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is no result of `python bench/run.py` ({error}): run that, and pass the file it writes"
        ) from None
    return dict(found)


def _pairs(old: dict[str, Any], new: dict[str, Any]) -> list[tuple[str, str, dict[str, Any], dict[str, Any]]]:
    """The figures that both results have: device, name, old, new.

    Raises:
        ValueError: they are of unlike machines, or have none in common.
    """
    facts = [{**{name: each["facts"][name] for name in _MUST_AGREE}, **each["facts"]["devices"]} for each in (old, new)]
    common = [each for each in facts[0] if each in facts[1]]
    differ = [f"{each}: {facts[0][each]} and {facts[1][each]}" for each in common if facts[0][each] != facts[1][each]]
    if differ:
        raise ValueError(f"the results are of unlike machines ({'; '.join(differ)}); compare two of the same machine")
    keyed = [{tuple(each[name] for name in _KEY): each for each in one["figures"]} for one in (old, new)]
    keys = [key for key in keyed[0] if key in keyed[1]]
    if not keys:
        raise ValueError("the results have no benchmark in common; run the same scripts on the same device for both")
    return [(key[0], f"{key[1]}, {key[2]}: {key[3]}", keyed[0][key], keyed[1][key]) for key in keys]


def _is_clear(old: dict[str, Any], new: dict[str, Any]) -> bool:
    """Whether the change is beyond the quartiles of both, which a few pairs do not have."""
    return min(old["pairs"], new["pairs"]) >= _FEW and bool(old["high"] < new["low"] or new["high"] < old["low"])


def compare(old: dict[str, Any], new: dict[str, Any]) -> str:
    """A table: each ratio before and after, and old / new; above 1, it has become better. `*`: beyond the quartiles."""
    rows = [["", "device", "old", "new", "old/new", ""]]
    for device, name, before, after in _pairs(old, new):
        numbers = [f"{before['ratio']:.3f}", f"{after['ratio']:.3f}", f"{before['ratio'] / after['ratio']:.3f}"]
        rows.append([name, device, *numbers, "*" if _is_clear(before, after) else ""])
    return aligned(rows)


def draw(old: dict[str, Any], new: dict[str, Any], path: Path) -> list[Path]:
    """A picture for each device, PNG or SVG by the suffix, with the device in its name: old / new of each benchmark."""
    pairs = _pairs(old, new)
    path.parent.mkdir(parents=True, exist_ok=True)
    drawn = []
    for device in dict.fromkeys(each[0] for each in pairs):
        shown = [each for each in pairs if each[0] == device][::-1]
        figure = new_figure(1.2 + 0.22 * len(shown))
        axes = figure.subplots()
        axes.set_xscale("log")
        for place, (_, _, before, after) in enumerate(shown):
            change = before["ratio"] / after["ratio"]
            color = ("#66a182" if change >= 1 else "#d1495b") if _is_clear(before, after) else "#b8bcc2"
            axes.bar_label(axes.barh(place, change - 1, left=1, color=color), [f"{change:.2f}"], padding=4, fontsize=7)
        axes.set_yticks(range(len(shown)), [name for _, name, _, _ in shown], fontsize=7)
        axes.axvline(1, color="#444", linewidth=1)
        axes.margins(x=0.15, y=0.01)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter("{x:g}")
        facts = old["facts"]
        axes.set_title(
            f"{device}: {facts['devices'][device]}, {facts['processor']}, {facts['cores']} cores", fontsize=9
        )
        axes.set_xlabel("old / new: above 1 the new version is better; gray: within the quartiles")
        drawn.append(path.with_name(f"{path.stem}-{device}{path.suffix or '.png'}").absolute())
        figure.savefig(drawn[-1], dpi=130)
    return drawn


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
