"""Ratios from interleaved blocks: on a noisy machine only what runs side by side can be compared."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median, quantiles


def ratio_line(name: str, ours: Sequence[float], theirs: Sequence[float]) -> str:
    """One line: the median of the pairwise ratios ours / theirs, with the quartiles as its spread."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    low, _, high = quantiles(ratios, n=4) if len(ratios) > 1 else (ratios[0],) * 3
    return f"{name:<52} {median(ratios):7.3f}   quartiles {low:.3f} .. {high:.3f}   {len(ratios)} pairs"
