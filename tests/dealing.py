"""Rules for as many ranks as a test has."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from unisono.loading.sharding import Rule, Size

COUNTS = st.integers(1, 9)


EVERY = {
    "samples": st.integers(0, 70),
    "count": st.integers(1, 8),
    "size": st.integers(1, 12),
    "split": st.sampled_from(["rank", "global"]),
}
"""An epoch, and how it is dealt: any of them."""


def rule_of(count: int, **options: Any) -> Rule:
    return Rule(count, tuple(range(count)), **options)


def size_of(batch: Any, is_cut: bool = True) -> Size:
    return Size(len(batch))
