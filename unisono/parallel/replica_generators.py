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
1. A generator that was given explicitly is used. The default one stands for none: it is some functions' own default.
   Who seeds the process himself (`randomness.seeded`) draws from it.
2. `torch.manual_seed` in a replica seeds the replica's own generators, and no other device's.
3. Where torch lacks the names that this stands on, all draw from the default generator, and a warning says so.

What it does not reach: python's and numpy's generators; in a `TorchDispatchMode`, operators that take no generator, as
`rand_like`.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from types import FunctionType
from typing import Any

import torch

from unisono.backends.seeding import ask_before_seeding_all, seed_device
from unisono.protocols import Backend
from unisono.randomness import is_seeding

logger = logging.getLogger(__name__)

_KEY = "TESTING_ONLY_GenericMode"

_of_thread = threading.local()
_installing = threading.Lock()


@contextmanager
def own_generator(generator: torch.Generator) -> Iterator[None]:
    """Let the calling thread draw from this generator, of the CPU, for the block."""
    with _installing:
        is_installed = _is_installed()
    if not is_installed:
        yield
        return
    outer = getattr(_of_thread, "generator", None)
    _use(generator)
    try:
        yield
    finally:
        _use(outer)


class ReplicaGenerators:
    """The random generators of one replica, which continue from call to call.

    On a device that has a generator to itself, that one stands where the replica left it while the replica runs, and is
    put back afterwards.

    Args:
        seed: of both.
    """

    def __init__(self, seed: int, backend: Backend, device: torch.device) -> None:
        self.cpu = torch.Generator().manual_seed(seed)
        self._backend = backend
        self._device = device
        self._state = backend.seeded_state(seed, device)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Let the calling thread, whose device is the replica's, draw from them for the block."""
        with own_generator(self.cpu):
            if self._state is None:
                yield
                return
            before = self._backend.rng_state(self._device)
            self._backend.set_rng_state(self._state, self._device)
            _of_thread.replica = self
            try:
                yield
            finally:
                _of_thread.replica = None
                self._state = self._backend.rng_state(self._device)
                self._backend.set_rng_state(before, self._device)

    def seed_device(self, family: str, seed: int) -> None:
        """Seed the generator of the replica's device, where it is of that family."""
        if family == self._device.type:
            seed_device(self._backend, self._device, seed)


def _use(generator: torch.Generator | None) -> None:
    _of_thread.generator = generator
    torch._C._dispatch_tls_set_dispatch_key_included(_KEY, generator is not None)


def _own() -> torch.Generator | None:
    """The calling thread's generator, where it has one and is to draw from it."""
    own: torch.Generator | None = getattr(_of_thread, "generator", None)
    return None if own is None or is_seeding() else own


def _seeds_own(family: str, seed: int) -> bool:
    """For a thread that seeds all devices of a family: whether it has generators of its own, which are seeded then."""
    if _own() is None:
        return False
    replica: ReplicaGenerators | None = getattr(_of_thread, "replica", None)
    if replica is not None:
        replica.seed_device(family, seed)
    return True


class _Ambient:
    """What the functions of `torch.random` work on."""

    def __getattr__(self, name: str) -> Any:
        return getattr(_own() or torch.default_generator, name)


@cache
def _is_installed() -> bool:
    """Whether threads can have generators here, which is found out once."""
    try:
        return bool(_install())
    except Exception as error:
        logger.warning(
            "replicas share torch's default generator, so what they draw depends on their order: this torch, %s, "
            "lacks what separate generators need (%s: %s)",
            torch.__version__,
            type(error).__name__,
            error,
        )
        return False


@cache
def _install() -> list[torch.library.Library]:
    """Register the kernels, once in a process; they live as long as the libraries that are returned."""
    below = torch._C._dispatch_keyset_full_after(torch._C._dispatch_key_parse(_KEY))
    torch._C._dispatch_tls_set_dispatch_key_included(_KEY, False)
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(torch.library.fallthrough_kernel, _KEY)
    aten = torch.library.Library("aten", "IMPL")
    for schema in torch._C._jit_get_all_schemas():
        names = [argument.name for argument in schema.arguments]
        if schema.name.startswith("aten::") and "generator" in names:
            packet = getattr(torch.ops.aten, schema.name.removeprefix("aten::"), None)
            overload = getattr(packet, schema.overload_name or "default", None)
            if isinstance(overload, torch._ops.OpOverload):
                aten.impl(overload, _kernel(overload, names.index("generator"), below), _KEY, with_keyset=True)
    _redirect()
    ask_before_seeding_all(_seeds_own)
    _leave_first_calls_alone()
    os.register_at_fork(after_in_child=_forget)
    return [everything, aten]


def _redirect() -> None:
    """Let the functions of `torch.random`, by whatever name somebody holds them, work on the thread's own generator.

    By the name in their code, not by what it stands for: that is given to operators as well, which take no `_Ambient`.
    """
    torch.random._ambient_generator = _Ambient()  # type: ignore[attr-defined]
    for each in list(vars(torch.random).values()):
        if isinstance(each, FunctionType) and "default_generator" in each.__code__.co_names:
            names = ["_ambient_generator" if name == "default_generator" else name for name in each.__code__.co_names]
            each.__code__ = each.__code__.replace(co_names=tuple(names))


def _leave_first_calls_alone() -> None:
    """Let torch not look at a compiled graph's first call for custom operators that alias: its mode hides the kernels.

    By the default, for the whole process: what one sets there holds for one thread's context only, and a graph that one
    replica has compiled is looked at in the first call of the next.
    """
    import torch._functorch.config as config

    entry = getattr(config, "_config", {}).get("check_custom_op_aliasing")
    if entry is not None:
        entry.default = False


def _kernel(overload: Any, place: int, below: Any) -> Callable[..., Any]:
    """The operator, with the thread's generator where it has one for the device and none was given."""
    default: int = torch.default_generator._cdata  # type: ignore[attr-defined] # an operator is given another object for the same generator

    def kernel(keys: Any, *args: Any, **named: Any) -> Any:
        given = args[place] if len(args) > place else named.get("generator")
        own = _own() if given is None or given._cdata == default else None
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
