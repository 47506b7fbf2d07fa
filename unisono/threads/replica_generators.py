"""Generators: a separate random generator for a thread, in place of the one that all threads of a process share.

On the CPU torch has one default generator. Replicas that draw from it concurrently get numbers that depend on their
timing. So each replica thread has its own generator, used by everything that draws by default in that thread: dropout
of all kinds, `torch.rand` and its relatives, `nn.init`, distributions, recurrent layers and attention.
`torch.manual_seed`, `torch.get_rng_state` and their relatives, and with them `torch.utils.checkpoint`, refer to it as
well.

Implementation: torch dispatches each operation through a table of kernels, by keys that a thread can enable for itself.
One of these keys exists for this kind of use and is otherwise unused. For it, a kernel is registered here for every
operator that takes a generator: it passes the thread's own if none was given; all other operators skip the key in C++,
at no cost.

*Threads:* each has its own generator or none. A thread without one, and a process forked from a thread with one, draw
from the default generator.

Invariants:
1. An explicitly given generator is used. The default one counts as none, since some functions pass it by default.
   Within `randomness.seeded`, draws use the default generator.
2. `torch.manual_seed` in a replica seeds only the replica's own generators.
3. If torch lacks the key, that is an error.

Not covered: Python's and numpy's generators; in a `TorchDispatchMode`, operators without a generator argument, such as
`rand_like`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from types import FunctionType
from typing import Any

import torch

from unisono.devices.randomness import is_seeding
from unisono.devices.seeding import ask_before_seeding_all, seed_device
from unisono.protocols import Backend
from unisono.torch_private import (
    GENERATOR_ADDRESS,
    TRIED,
    OpOverload,
    all_schemas,
    include_dispatch_key,
    keys_after,
    parse_dispatch_key,
)

_KEY = "TESTING_ONLY_GenericMode"

_of_thread = threading.local()
_installing = threading.Lock()


@contextmanager
def own_generator(generator: torch.Generator) -> Iterator[None]:
    """Make the calling thread draw from this generator, of the CPU, within the block."""
    # `cache` alone lets two threads that come first both register the kernels.
    with _installing:
        _register_kernels()
    outer = getattr(_of_thread, "generator", None)
    _use_generator(generator)
    try:
        yield
    finally:
        _use_generator(outer)


class ReplicaGenerators:
    """The random generators of one replica, which continue from call to call. A device with its own generator gets the
    replica's state while the replica runs, and then its own again."""

    def __init__(self, seed: int, backend: Backend, device: torch.device) -> None:
        self.cpu = torch.Generator().manual_seed(seed)
        self._backend = backend
        self._device = device
        self._state = backend.seeded_state(seed, device)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Make the calling thread, on the replica's device, draw from them within the block."""
        with own_generator(self.cpu):
            if self._state is None:  # a device without its own generator
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
        """Seed the generator of the replica's device, if the device is in that family."""
        if family == self._device.type:
            seed_device(self._backend, self._device, seed)


def _use_generator(generator: torch.Generator | None) -> None:
    _of_thread.generator = generator
    include_dispatch_key(_KEY, generator is not None)


def _own_generator() -> torch.Generator | None:
    """The calling thread's generator, if it has one and should draw from it."""
    own: torch.Generator | None = getattr(_of_thread, "generator", None)
    return None if own is None or is_seeding() else own


def _seeds_own(family: str, seed: int) -> bool:
    """Called when a thread seeds all devices of a family: whether it has its own generators, which are then seeded."""
    if _own_generator() is None:
        return False
    replica: ReplicaGenerators | None = getattr(_of_thread, "replica", None)
    if replica is not None:
        replica.seed_device(family, seed)
    return True


class _Ambient:
    """The default generator as seen by the functions of `torch.random`."""

    def __getattr__(self, name: str) -> Any:
        return getattr(_own_generator() or torch.default_generator, name)


@cache
def _register_kernels() -> list[torch.library.Library]:
    """Register the kernels, once per process; they exist as long as the returned libraries."""
    try:
        below = keys_after(parse_dispatch_key(_KEY))
    except RuntimeError as error:
        raise ImportError(
            f"torch {torch.__version__} has no dispatch key {_KEY}, which gives each replica a generator of its own; "
            f"Unisono was tried with torch {', '.join(TRIED)}: install one of these, or use processes (spawn)"
        ) from error
    include_dispatch_key(_KEY, False)
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(torch.library.fallthrough_kernel, _KEY)
    aten = torch.library.Library("aten", "IMPL")
    for schema in all_schemas():
        names = [argument.name for argument in schema.arguments]
        if schema.name.startswith("aten::") and "generator" in names:
            packet = getattr(torch.ops.aten, schema.name.removeprefix("aten::"), None)
            overload = getattr(packet, schema.overload_name or "default", None)
            if isinstance(overload, OpOverload):
                aten.impl(
                    overload, _kernel_with_generator(overload, names.index("generator"), below), _KEY, with_keyset=True
                )
    _redirect_torch_random()
    ask_before_seeding_all(_seeds_own)
    _leave_first_calls_alone()
    os.register_at_fork(after_in_child=_forget_in_child)
    return [everything, aten]


def _redirect_torch_random() -> None:
    """Make the functions of `torch.random`, under any alias, use the thread's own generator."""
    # By replacing the name in their code, not the object: operators receive that, too, and reject an `_Ambient`.
    torch.random.unisono_generator = _Ambient()  # type: ignore[attr-defined]
    for each in list(vars(torch.random).values()):
        if isinstance(each, FunctionType) and "default_generator" in each.__code__.co_names:
            names = ["unisono_generator" if name == "default_generator" else name for name in each.__code__.co_names]
            each.__code__ = each.__code__.replace(co_names=tuple(names))


def _leave_first_calls_alone() -> None:
    """Disable the check for aliasing custom operators in a compiled graph's first call: its mode hides the kernels."""
    from unisono.torch_private import functorch_entries

    # The default, for the process: a setting belongs to one thread, and another may make a graph's first call.
    entry = functorch_entries.get("check_custom_op_aliasing")
    if entry is not None:
        entry.default = False


def _kernel_with_generator(overload: Any, place: int, below: Any) -> Callable[..., Any]:
    """The operator, with the thread's generator if it has one for the device and none was given."""
    # By address: an operator is given another object for the same generator.
    default = getattr(torch.default_generator, GENERATOR_ADDRESS)

    def kernel(keys: Any, *args: Any, **named: Any) -> Any:
        given = args[place] if len(args) > place else named.get("generator")
        own = _own_generator() if given is None or getattr(given, GENERATOR_ADDRESS) == default else None
        # On an accelerator the device's own generator draws; `in_use` gives it the replica's state.
        if own is not None and _device_of_draw(args, named) == own.device:
            if len(args) > place:
                args = (*args[:place], own, *args[place + 1 :])
            else:
                named["generator"] = own
        return overload.redispatch(keys & below, *args, **named)  # below this key, or the kernel would call itself

    return kernel


def _device_of_draw(args: Sequence[Any], named: dict[str, Any]) -> torch.device | None:
    """The device that the operator draws on; None without a tensor: it then calls an operator that has one."""
    return next((each.device for each in (*args, *named.values()) if isinstance(each, torch.Tensor)), None)


def _forget_in_child() -> None:
    if getattr(_of_thread, "generator", None) is not None:
        _of_thread.generator = None
        include_dispatch_key(_KEY, False)
