"""Environment variables that were set for another run, or by an image, and affect this one."""

from __future__ import annotations

import os
from collections.abc import Iterator

import psutil

_BINDING = ("GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PROC_BIND", "OMP_PLACES")
_PASSED_ON = ("NCCL_", "TORCH_NCCL_", "GLOO_", "PYTORCH_", "TORCH_", "OMP_", "CUDA_")


def environment_risks(is_launched: bool) -> Iterator[tuple[str, str]]:
    """Yield what this process's variables do to a run, and what to do about it; no advice where they only change it.

    Args:
        is_launched: whether a launcher has started this process, so that a place among peers is expected.
    """
    environ = os.environ
    if not is_launched and environ.get("WORLD_SIZE", "1") != "1":
        text = f"WORLD_SIZE={environ['WORLD_SIZE']} announces ranks, but no launcher is recognised"
        yield text, "a plain script would not train alone: unset it if it is left over"
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        wanted = [each.strip() for each in environ.get(name, "").lstrip("^=").split(",") if each.strip()]
        if wanted and not any(here.startswith(each) for each in wanted for here in psutil.net_if_addrs()):
            text = f"{name}={environ[name]} names no network interface of this machine, so workers cannot meet"
            yield text, "name an existing one, or unset it"
    if bound := [name for name in _BINDING if environ.get(name, "").lower() not in ("", "false", "none", "disabled")]:
        text = f"{' '.join(bound)}: threads are bound to cores, and those of each worker to the same ones"
        yield text, "unset it; spawn(..., cores=Cores(pin=True)) gives each worker its own"
    if others := sorted(name for name in environ if name.startswith(_PASSED_ON)):
        yield f"{' '.join(f'{name}={environ[name]}' for name in others)}: every worker gets this", ""
