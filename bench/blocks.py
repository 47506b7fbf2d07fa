"""What the benchmarks share: their command line, interleaved blocks, and the lines that `run.py` reads.

On a noisy machine only variants that run close together can be compared. Every figure is a cost, a time or a size, as
ours / theirs: smaller is better. A benchmark is a script that has `DEVICES`, the families that it can measure.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median, quantiles
from typing import Any

import torch


def options(doc: str | None, devices: Sequence[str], /, blocks: int, **defaults: Any) -> argparse.Namespace:
    """The command line of a benchmark: --blocks, --device, and an option for each default; a list takes several.

    What names no device uses the chosen family from then on, in this process and in those below it.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=blocks)
    parser.add_argument("--device", choices=devices, default=devices[0])
    for name, default in defaults.items():
        is_list = isinstance(default, list)
        kind = type(default[0] if is_list else default)
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=default, nargs="+" if is_list else None)
    found = parser.parse_args()
    os.environ["UNISONO_BACKEND"] = found.device
    return found


def interleave(variants: Mapping[str, Callable[[], float]], blocks: int, warm_up: int = 1) -> dict[str, list[float]]:
    """The results of the variants, block by block; each block runs all of them once, every second one in reverse order.

    Args:
        warm_up: the number of additional blocks that run first and are not counted.
    """
    results: dict[str, list[float]] = {name: [] for name in variants}
    for block in range(-warm_up, blocks):
        for name in list(variants)[:: -1 if block % 2 else 1]:
            result = variants[name]()
            if block >= 0:
                results[name].append(result)
    return results


def show(
    case: str, costs: Mapping[str, Sequence[float]], pairs: Iterable[tuple[str, str]] = (), unit: str = "s"
) -> None:
    """Print a line for each pair (ours, theirs) of the costs; without pairs, the first against each of the others."""
    load = ", ".join(f"{average:.1f}" for average in os.getloadavg())
    print(f"\n{case}; torch {torch.__version__}, {os.cpu_count()} cores, load {load} (1, 5 and 15 minutes)")
    first, *others = costs
    for ours, theirs in pairs or [(first, each) for each in others]:
        print(ratio_line(f"{ours} / {theirs}", costs[ours], costs[theirs], unit), flush=True)


def ratio_line(name: str, ours: Sequence[float], theirs: Sequence[float], unit: str = "s") -> str:
    """The median of the pairwise ratios ours / theirs, with the quartiles as its spread; and the medians of both."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    low, _, high = quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else (ratios[0],) * 3
    spread = f"{median(ratios):8.4g}   quartiles {low:.4g} .. {high:.4g}   {len(ratios)} pairs"
    return f"{name:<58} {spread}   {median(ours):.4g} / {median(theirs):.4g} {unit}"
