"""How environment variables affect a run, if they were set for another one or by an image."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TextIO

import psutil


@dataclass(frozen=True)
class EnvironmentRisk:
    """Variables that change what a run does, and what to do about it."""

    setting: str  # as in a shell: NAME=value
    effect: str
    way_out: str = ""
    is_harmful: bool = False


@dataclass(frozen=True)
class _Rule:
    names: tuple[str, ...]
    applies: Callable[[str], bool]  # takes the value
    effect: str
    way_out: str
    is_harmful: bool = False


def _is_on(value: str) -> bool:
    return value.lower() not in ("", "0", "false", "off", "no", "n")


def _is_set(value: str) -> bool:
    return True


def _is_missing_interface(value: str) -> bool:
    wanted = [name.strip() for name in value.removeprefix("^").removeprefix("=").split(",") if name.strip()]
    return not any(here.startswith(name) for name in wanted for here in psutil.net_if_addrs())


def _is_no_count(value: str) -> bool:
    return not (value.isdecimal() and int(value) >= 1)


_UNSET = "unset it, unless it is meant"
_RULES = (
    _Rule(
        ("CPU_NUM_DEVICES",),
        _is_no_count,
        "is no number of devices",
        "set it to an integer of at least 1, or unset it",
        True,
    ),
    _Rule(
        ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"),
        _is_missing_interface,
        "names no network interface of this machine, so workers cannot meet",
        "name an existing one, or unset it",
        True,
    ),
    _Rule(
        ("GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PROC_BIND", "OMP_PLACES"),
        lambda value: value.lower() not in ("", "false", "none", "disabled"),
        "binds threads to cores, and those of each worker to the same ones",
        "unset it; spawn(..., pin_cores=True) gives each worker its own cores",
        True,
    ),
    _Rule(
        ("CUDA_LAUNCH_BLOCKING",),
        _is_on,
        "makes every kernel wait for the one before it",
        "unset it, unless you look for a failing kernel",
        True,
    ),
    _Rule(("PYTORCH_NO_CUDA_MEMORY_CACHING",), _is_on, "makes every allocation a call to the driver", _UNSET, True),
    _Rule(
        ("NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
        lambda value: not _is_on(value),
        "lets a collective wait forever for a peer that has died",
        _UNSET,
        True,
    ),
    _Rule(
        ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE"),
        _is_on,
        "denies NCCL a fast path between devices",
        "unset it, unless that path is broken here",
    ),
    _Rule(
        ("TORCH_DISTRIBUTED_DEBUG",),
        lambda value: value.upper() == "DETAIL",
        "compares every collective before it runs, which costs a third of a small step",
        "unset it: workers of one machine compare calls themselves, and those of several under unisono run --checked",
    ),
    _Rule(
        ("OMP_NUM_THREADS",),
        _is_set,
        "is used as the number of CPU threads of each worker, however many workers there are",
        "unset it for a fair share of the cores, or pass spawn(..., num_threads=N)",
    ),
    _Rule(
        ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"),
        _is_set,
        "decides which devices are visible, and renumbers them",
        "unset it to see all",
    ),
)
_FAMILIES = ("NCCL_", "TORCH_NCCL_", "GLOO_", "PYTORCH_", "TORCH_")  # listed without further comment
_PLACE = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def environment_risks(environ: Mapping[str, str] | None = None, is_launched: bool = False) -> Iterator[EnvironmentRisk]:
    """Yield the risks of an environment.

    Args:
        environ: the variables; None uses this process's own.
        is_launched: whether a launcher has started this process, so that a place among peers is expected.
    """
    environ = os.environ if environ is None else environ
    named = set()
    for rule in _RULES:
        for name in rule.names:
            if name in environ and rule.applies(environ[name]):
                named.add(name)
                yield EnvironmentRisk(f"{name}={environ[name]}", rule.effect, rule.way_out, rule.is_harmful)
    if not is_launched:
        yield from _leftovers(environ)
    others = sorted(name for name in environ if name.startswith(_FAMILIES) and name not in named)
    if others:
        yield EnvironmentRisk(" ".join(f"{name}={environ[name]}" for name in others), "is passed on to every worker")


def _leftovers(environ: Mapping[str, str]) -> Iterator[EnvironmentRisk]:
    """A place among peers that no launcher seems to have assigned."""
    found = [name for name in _PLACE if name in environ]
    if found:
        is_many = environ.get("WORLD_SIZE", "1") != "1"
        yield EnvironmentRisk(
            " ".join(f"{name}={environ[name]}" for name in found),
            "announces a rank among processes, but no launcher is recognised"
            + (": a plain script would not train alone" if is_many else ""),
            f"if it is left over: unset {' '.join(found)}",
            is_many,
        )


def wants_color(stream: TextIO) -> bool:
    """Whether text on the stream should be coloured: on a terminal, unless NO_COLOR (no-color.org) forbids it."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
