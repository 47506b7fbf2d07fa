"""Ratios from interleaved blocks: on a noisy machine only variants that run close together can be compared."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from statistics import median, quantiles

import torch


def ratio_line(name: str, ours: Sequence[float], theirs: Sequence[float]) -> str:
    """One line: the median of the pairwise ratios ours / theirs, with the quartiles as its spread."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    low, _, high = quantiles(ratios, n=4) if len(ratios) > 1 else (ratios[0],) * 3
    return f"{name:<52} {median(ratios):7.3f}   quartiles {low:.3f} .. {high:.3f}   {len(ratios)} pairs"


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


def conditions() -> str:
    """The conditions on which a figure depends: other programs may run next to `make bench`."""
    load = ", ".join(f"{average:.1f}" for average in os.getloadavg())
    return f"torch {torch.__version__}, {os.cpu_count()} cores, load {load} (1, 5 and 15 minutes)"
