"""Generators: a random generator of its own for a thread, in place of the one that all threads of a process share.

On the CPU torch has one default generator. Replicas that draw from it at the same time get numbers that depend on who
comes first. So each replica thread brings one of its own: whatever draws by default in that thread draws from it.
That is dropout of all kinds, `torch.rand` and its kin, `nn.init`, distributions, recurrent layers and attention; and
`torch.manual_seed`, `torch.get_rng_state` and the like, and with them `torch.utils.checkpoint`, mean it, too.

How: torch sends each operation through a table of kernels, by keys that a thread can switch on for itself. One of them
exists for this kind of use and is otherwise unused. Under it, every operator that takes a generator has a kernel here,
which passes the thread's own where none was given; all other operators skip the key in C++ and cost nothing more.

*Threads:* each has its own or none. A thread without one, and a process forked from one with, draw from the default.

Invariants:
1. A generator that was given explicitly is used. So is the default one by who seeds it himself (`randomness.seeded`).

What it does not reach: python's and numpy's generators; in a `TorchDispatchMode`, and so in a compiled function's first
call, operators that take no generator, as `rand_like`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import torch

from unisono.protocols import Backend
from unisono.randomness import is_seeding

_KEY = "TESTING_ONLY_GenericMode"

_of_thread = threading.local()
_installing = threading.Lock()


@contextmanager
def own_generator(generator: torch.Generator) -> Iterator[None]:
    """Let the calling thread draw from this generator, of the CPU, for the block."""
    with _installing:
        _install()
    _of_thread.generator = generator
    torch._C._dispatch_tls_set_dispatch_key_included(_KEY, True)
    try:
        yield
    finally:
        torch._C._dispatch_tls_set_dispatch_key_included(_KEY, False)
        _of_thread.generator = None


class ReplicaGenerators:
    """The random generators of one replica, which go on from call to call.

    On a device that has a generator to itself, that one stands where the replica left it while the replica runs, and is
    put back afterwards.

    Args:
        seed: of both.
    """

    def __init__(self, seed: int, backend: Backend, device: torch.device) -> None:
        self.cpu = torch.Generator().manual_seed(seed)
        self._backend = backend
        self._device = device
        self._state: torch.Tensor | None = None
        if device.type != self.cpu.device.type:
            with suppress(RuntimeError):  # a family without generators that one can make
                self._state = torch.Generator(device).manual_seed(seed).get_state()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Let the calling thread, whose device is the replica's, draw from them for the block."""
        with own_generator(self.cpu):
            if self._state is None:
                yield
                return
            before = self._backend.rng_state(self._device)
            self._backend.set_rng_state(self._state, self._device)
            try:
                yield
            finally:
                self._state = self._backend.rng_state(self._device)
                self._backend.set_rng_state(before, self._device)


def _own() -> torch.Generator | None:
    """The calling thread's generator, where it has one and is to draw from it."""
    own: torch.Generator | None = getattr(_of_thread, "generator", None)
    return None if own is None or is_seeding() else own


class _Ambient:
    """What the functions of `torch.random` take for the default generator."""

    def __getattr__(self, name: str) -> Any:
        return getattr(_own() or torch.default_generator, name)


@cache
def _install() -> list[torch.library.Library]:
    """Register the kernels, once in a process; they live as long as the libraries that are returned."""
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(torch.library.fallthrough_kernel, _KEY)
    aten = torch.library.Library("aten", "IMPL")
    below = torch._C._dispatch_keyset_full_after(torch._C._dispatch_key_parse(_KEY))
    for schema in torch._C._jit_get_all_schemas():
        names = [argument.name for argument in schema.arguments]
        if schema.name.startswith("aten::") and "generator" in names:
            packet = getattr(torch.ops.aten, schema.name.removeprefix("aten::"), None)
            overload = getattr(packet, schema.overload_name or "default", None)
            if isinstance(overload, torch._ops.OpOverload):
                aten.impl(overload, _kernel(overload, names.index("generator"), below), _KEY, with_keyset=True)
    torch.random.default_generator = _Ambient()  # type: ignore[attr-defined, assignment] # where its functions look
    os.register_at_fork(after_in_child=_forget)
    return [everything, aten]


def _kernel(overload: Any, place: int, below: Any) -> Callable[..., Any]:
    """The operator, with the thread's generator where it has one for the device and none was given."""

    def kernel(keys: Any, *args: Any, **named: Any) -> Any:
        is_given = named.get("generator") is not None or (len(args) > place and args[place] is not None)
        own = None if is_given else _own()
        if own is not None and _device(args, named) == own.device:
            if len(args) > place:
                args = (*args[:place], own, *args[place + 1 :])
            else:
                named["generator"] = own
        return overload.redispatch(keys & below, *args, **named)

    return kernel


def _device(args: Sequence[Any], named: dict[str, Any]) -> torch.device | None:
    """Where the operator draws; None where it has no tensor: then it calls one that has."""
    return next((each.device for each in (*args, *named.values()) if isinstance(each, torch.Tensor)), None)


def _forget() -> None:
    if getattr(_of_thread, "generator", None) is not None:
        _of_thread.generator = None
        torch._C._dispatch_tls_set_dispatch_key_included(_KEY, False)
