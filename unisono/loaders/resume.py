"""A loader's state: the position of its loop, and the checks when it is loaded.

A state is plain data, the same on every rank: `version`, `epoch`, `seed`, `length` (of the dataset, None if it has
none), `order` (the sampler's class), and the position in the epoch: `offset`, the number of samples that all ranks have
taken together, and whatever else the source needs.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from unisono.errors import StateError
from unisono.loaders.sharding import Claim

VERSION = 1
FACTS = ("version", "epoch", "seed", "length", "order")
"""The keys of a state that are not part of the position."""

State = dict[str, Any]


class Progress:
    """The progress of one device's loop in a pass: the batches that it has received, not those prefetched.

    Attributes:
        rounds: the number of batches received.
        position: that of the source after the last of them; None before the first.
        claim: that of the last of them.
        has_ended: whether the loop has reached the end of the data.
        is_left: whether the loop was left, before or after that.
    """

    def __init__(self) -> None:
        self.rounds = 0
        self.position: Any = None
        self.claim = Claim(0, None)
        self.has_ended = False
        self.is_left = False

    @property
    def is_over(self) -> bool:
        """Whether no more batches will be delivered."""
        return self.has_ended or self.is_left

    def advance(self, position: Any, claim: Claim) -> None:
        """Record that one more batch was delivered."""
        self.rounds += 1
        self.position, self.claim = position, claim


def is_stateful(owner: Any) -> bool:
    """Whether `owner` follows torch's `Stateful` protocol, in which `state_dict` needs no arguments."""
    if not all(callable(getattr(owner, name, None)) for name in ("state_dict", "load_state_dict")):
        return False
    with suppress(ValueError):  # of a function in C that has no signature
        try:
            inspect.signature(owner.state_dict).bind()
        except TypeError:  # mosaicml-streaming's wants numbers of samples
            return False
    return True


def check_state(state: Mapping[str, Any], length: int | None, seed: int, order: str | None) -> None:
    """Check that a loader can continue from a state.

    Raises:
        StateError: it is not a loader's state, or belongs to another version, dataset, seed or class of sampler;
            checked in this order.
    """
    if not isinstance(state, Mapping) or "version" not in state:
        raise StateError(f"state={state!r:.200} is not what a loader's state_dict() returns")
    if state["version"] != VERSION:
        raise StateError(
            f"the state has version {state['version']!r}, this loader reads version {VERSION}; load it with the "
            "version of unisono that saved it, or restart the epoch with set_epoch",
            "version",
        )
    missing = [name for name in ("epoch", "seed", "length", "offset") if name not in state]
    if missing:
        raise StateError(f"the state has no {', '.join(missing)}: it is not what a loader's state_dict() returns")
    for name in ("epoch", "offset", "batches"):  # "batches" exists only in some positions
        number = state.get(name, 0)
        if isinstance(number, bool) or not isinstance(number, int) or number < 0:
            raise StateError(f"the state's {name} is {number!r}; it must be an integer of at least 0")
    if state["length"] != length:
        raise StateError(
            f"the state was saved over {state['length']} samples, this loader's dataset has {length}: the order would "
            "differ; load it over the same dataset, or begin an epoch with set_epoch",
            "length",
        )
    if state["seed"] != seed:
        raise StateError(
            f"the state was saved with seed {state['seed']}, this loader has seed {seed}: the order would differ; pass "
            f"seed={state['seed']}",
            "seed",
        )
    if state.get("order", order) != order:
        raise StateError(
            f"the state was saved in the order of a {state['order']}, this loader's is that of a {order}; use the same "
            "shuffle= or sampler=",
            "order",
        )
