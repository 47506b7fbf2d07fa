"""What a tracker is, and which values it gets: plain numbers and texts, by name."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any, Protocol, runtime_checkable

from unisono.tree import is_array

Value = bool | int | float | str


@runtime_checkable
class Tracker(Protocol):
    """Where metrics go. An object with these two methods may be passed in `Accelerator(log_with=)`.

    Its `name`, where it has one, or the name of its class is what `get_tracker` finds it by. Rank zero's alone is
    called. What it raises reaches the caller of `Accelerator.log` and `end_training`.
    """

    def log(self, values: Mapping[str, Value], step: int | None) -> None:
        """Take the values of a step. They are plain numbers and texts."""

    def close(self) -> None:
        """Write what has not been written, and let go. Called once."""


def name_of(tracker: Tracker) -> str:
    """The name by which a tracker is found."""
    return str(getattr(tracker, "name", type(tracker).__name__))


def plain_values(values: Mapping[str, Any]) -> dict[str, Value]:
    """The values as a tracker gets them; tensors are copied to the host.

    Raises:
        TypeError: there is no mapping, a key is no text, or a value is neither a real number nor a text.
        ValueError: a tensor or an array has another number of elements than one.
    """
    if not isinstance(values, Mapping):
        raise TypeError(f"log takes a mapping from names to values, and got a {type(values).__name__}")
    return {_checked_key(key): _plain(key, value) for key, value in values.items()}


def plain_step(step: Any) -> int | None:
    """The step as a number.

    Raises:
        TypeError: it is no whole number.
    """
    if step is None:
        return None
    if isinstance(step, bool) or not hasattr(step, "__index__"):
        raise TypeError(f"step={step!r} is a {type(step).__name__}; pass a whole number, or None")
    return int(step)


def _checked_key(key: Any) -> str:
    if not isinstance(key, str):
        raise TypeError(f"log got the key {key!r}, a {type(key).__name__}; keys are texts")
    return key


def _plain(key: str, value: Any) -> Value:
    if is_array(value):
        elements = value.numel() if hasattr(value, "numel") else value.size
        if elements != 1:
            raise ValueError(
                f"log got {key!r} with {elements} elements, of shape {tuple(value.shape)}; log one number, "
                f"{key}.mean() or {key}.norm() for example"
            )
        value = value.item()
    elif hasattr(value, "dtype") and hasattr(value, "item"):  # a numpy scalar, whose bool is no python number
        value = value.item()
    if isinstance(value, bool | str):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    way_out = "give each of its values a key of its own" if isinstance(value, Mapping) else "leave it out"
    raise TypeError(
        f"log got {key!r} of type {type(value).__name__}; numbers, tensors of one element and texts can be logged; "
        f"{way_out}"
    )
