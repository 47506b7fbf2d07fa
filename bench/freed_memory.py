"""What it saves that a worker keeps freed memory: the time of an epoch, against glibc as it tunes itself, on CPUs.

python bench/freed_memory.py
"""

from __future__ import annotations

import os
from functools import partial

from blocks import interleave, options, show
from virtual_ranks import cost

DEVICES = ("cpu",)


def _tuned_by_glibc(kind: str, batches: int) -> float:
    os.environ["MALLOC_PERTURB_"] = "0"  # does nothing, except that a worker leaves the allocator alone
    try:
        return cost(kind, batches)
    finally:
        del os.environ["MALLOC_PERTURB_"]


def main() -> None:
    given = options(__doc__, DEVICES, 12, batches=64)
    for kind in ("MLP, 1.1 M parameters", "CNN with BatchNorm"):
        both = {"kept": cost, "glibc's own": _tuned_by_glibc}
        runs = {name: partial(run, kind, given.batches) for name, run in both.items()}
        show(kind, interleave(runs, given.blocks))


if __name__ == "__main__":
    main()
