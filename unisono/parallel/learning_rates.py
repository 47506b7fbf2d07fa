"""Learning rates in words, for the ranks to compare before they step with them."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from itertools import chain
from operator import attrgetter

from torch.optim import Optimizer

_SHOWN = 3  # more are compared by a checksum


def describe_rates(optimizers: Iterable[Optimizer]) -> str:
    """The learning rates that are plain numbers, to be compared by the ranks, which step with them."""
    # To six digits: hosts may compute the cosine of a schedule differently in the last one.
    groups = chain.from_iterable(map(attrgetter("param_groups"), optimizers))
    rates = [f"{rate:.6g}" for group in groups if isinstance(rate := group.get("lr"), int | float)]
    shown = list(dict.fromkeys(rates))
    if len(shown) > _SHOWN:
        shown = [*shown[:_SHOWN], f"{zlib.crc32(repr(rates).encode()):08x}"]
    return f" at lr {'/'.join(shown)}" if shown else ""
