"""A program of `unisono doctor --gpus`: does what one device of a family sends to another arrive, and how fast?

It prints a line as JSON before and after each pair: a copy that hangs ends only with its process.
"""

from __future__ import annotations

import json
import sys
import time

import torch

from unisono.comm.operations import HOST
from unisono.devices import get_backend

_BYTES, _REPEATED = 32 << 20, 3


def main(family_name: str) -> None:
    """Copy random bytes between all pairs of devices, and from each to main memory and back."""
    family = get_backend(family_name)
    devices = [family.device(index) for index in range(family.device_count())]
    host = torch.randint(256, (_BYTES,), dtype=torch.uint8, device=HOST, generator=torch.Generator(HOST).manual_seed(0))
    for source in devices:
        sent = host.to(source)
        for target in devices:
            print(json.dumps({"from": str(source), "to": str(target)}), flush=True)
            taken, is_equal = [], True
            for _ in range(_REPEATED):
                for each in (source, target):
                    family.synchronize(each)
                began = time.perf_counter()
                received = host.to(target) if source == target else sent.to(target)
                family.synchronize(target)
                taken.append(time.perf_counter() - began)
                is_equal = is_equal and torch.equal(received.cpu(), host)
            print(json.dumps({"is_equal": is_equal, "rate": _BYTES / min(taken)}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
