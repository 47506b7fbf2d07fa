"""How environment variables affect a run, if they were set for another one or by an image."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import psutil


class EnvironmentRisk(NamedTuple):
    """A variable that changes what a run does, and what to do about it."""

    setting: str  # as in a shell: NAME=value
    effect: str
    way_out: str = ""
    is_harmful: bool = False


def _is_on(value: str) -> bool:
    return value.lower() not in ("", "0", "false", "off", "no", "n")


def _is_off(value: str) -> bool:
    return not _is_on(value)


def _is_set(value: str) -> bool:
    return True


def _binds_threads(value: str) -> bool:
    return value.lower() not in ("", "false", "none", "disabled")


def _is_missing_interface(value: str) -> bool:
    wanted = [name.strip() for name in value.removeprefix("^").removeprefix("=").split(",") if name.strip()]
    return not any(here.startswith(name) for name in wanted for here in psutil.net_if_addrs())


_Rule = tuple[str, Callable[[str], bool], str, str]  # the names, whether a value matters, the effect, the way out
_HARMFUL: tuple[_Rule, ...] = (
    (
        "GLOO_SOCKET_IFNAME NCCL_SOCKET_IFNAME",
        _is_missing_interface,
        "names no network interface of this machine, so workers cannot meet",
        "name an existing one, or unset it",
    ),
    (
        "GOMP_CPU_AFFINITY KMP_AFFINITY OMP_PROC_BIND OMP_PLACES",
        _binds_threads,
        "binds threads to cores, and those of each worker to the same ones",
        "unset it; spawn(..., cores=Cores(pin=True)) gives each worker its own cores",
    ),
    (
        "CUDA_LAUNCH_BLOCKING",
        _is_on,
        "makes every kernel wait for the one before it",
        "unset it, unless you look for a failing kernel",
    ),
    (
        "NCCL_ASYNC_ERROR_HANDLING TORCH_NCCL_ASYNC_ERROR_HANDLING",
        _is_off,
        "lets a collective wait forever for a peer that has died",
        "unset it, unless it is meant",
    ),
)
_NOTABLE: tuple[_Rule, ...] = (
    (
        "NCCL_P2P_DISABLE NCCL_SHM_DISABLE NCCL_IB_DISABLE",
        _is_on,
        "denies NCCL a fast path between devices",
        "unset it, unless that path is broken here",
    ),
    (
        "TORCH_DISTRIBUTED_DEBUG",
        "DETAIL".__eq__,
        "compares every collective before it runs, which costs a third of a small step",
        "unset it: workers of one machine compare calls themselves, and those of several under unisono run --checked",
    ),
    (
        "OMP_NUM_THREADS",
        _is_set,
        "is used as the number of CPU threads of each worker, however many workers there are",
        "unset it for a fair share of the cores, or pass spawn(..., cores=N)",
    ),
    (
        "CUDA_VISIBLE_DEVICES HIP_VISIBLE_DEVICES",
        _is_set,
        "decides which devices are visible, and renumbers them",
        "unset it to see all",
    ),
)
_LEFTOVER = "announces ranks, but no launcher is recognised: a plain script would not train alone"
_FAMILIES = ("NCCL_", "TORCH_NCCL_", "GLOO_", "PYTORCH_", "TORCH_")  # listed without further comment


def environment_risks(environ: Mapping[str, str] | None = None, is_launched: bool = False) -> Iterator[EnvironmentRisk]:
    """Yield the risks of an environment.

    Args:
        environ: the variables; None uses this process's own.
        is_launched: whether a launcher has started this process, so that a place among peers is expected.
    """
    environ = os.environ if environ is None else environ
    if not is_launched and environ.get("WORLD_SIZE", "1") != "1":
        yield EnvironmentRisk(f"WORLD_SIZE={environ['WORLD_SIZE']}", _LEFTOVER, "if it is left over, unset it", True)
    named = set()
    for rules, is_harmful in ((_HARMFUL, True), (_NOTABLE, False)):
        for names, applies, effect, way_out in rules:
            for name in names.split():
                if name in environ and applies(environ[name]):
                    named.add(name)
                    yield EnvironmentRisk(f"{name}={environ[name]}", effect, way_out, is_harmful)
    others = sorted(name for name in environ if name.startswith(_FAMILIES) and name not in named)
    if others:
        yield EnvironmentRisk(" ".join(f"{name}={environ[name]}" for name in others), "is passed on to every worker")
