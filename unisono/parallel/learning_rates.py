"""Learning rates in words, for the ranks to compare before they step with them."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

from torch.optim import Optimizer

_SHOWN = 3  # more are compared by a checksum


def describe_rates(optimizers: Iterable[Optimizer]) -> str:
    """The learning rates that are plain numbers, to be compared by the ranks, which step with them."""
    # To six digits: hosts may compute the cosine of a schedule differently in the last one.
    rates = [f"{group['lr']:.6g}" for each in optimizers for group in each.param_groups if _is_number(group.get("lr"))]
    shown = list(dict.fromkeys(rates))
    if len(shown) > _SHOWN:
        shown = [*shown[:_SHOWN], f"{zlib.crc32(repr(rates).encode()):08x}"]
    return f" at lr {'/'.join(shown)}" if shown else ""


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)
