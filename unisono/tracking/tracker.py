"""The tracker protocol, and the values that a tracker gets: plain numbers and strings, by name."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral, Real
from types import NoneType
from typing import Any, Protocol, SupportsIndex, runtime_checkable

from unisono.arguments import check_type
from unisono.tree import is_array

Value = bool | int | float | str


@runtime_checkable
class Tracker(Protocol):
    """A destination for metrics. An object with these two methods may be passed in `Accelerator(log_with=)`.

    `get_tracker` finds it by its `name` attribute, or else by the name of its class. Only rank zero's is called. Its
    exceptions reach the caller of `Accelerator.log` and `end_training`.
    """

    def log(self, values: Mapping[str, Value], step: int | None) -> None:
        """Log the values of a step.

        Args:
            values: plain numbers and strings, by name.
            step: the training step; None if the script gave none.
        """

    def close(self) -> None:
        """Flush what has not been written, and release resources. Called once."""


def name_of(tracker: Tracker) -> str:
    """The name by which `get_tracker` finds a tracker."""
    return str(getattr(tracker, "name", type(tracker).__name__))


def plain_values(values: Mapping[str, Any]) -> dict[str, Value]:
    """The values as a tracker gets them; tensors are copied to the host.

    Raises:
        TypeError: `values` is not a mapping, a key is not a string, or a value is neither a real number nor a string.
        ValueError: a tensor or an array does not have exactly one element.
    """
    if not isinstance(values, Mapping):
        raise TypeError(f"log takes a mapping from names to values, and got a {type(values).__name__}")
    return {_checked_key(key): _plain(key, value) for key, value in values.items()}


def plain_step(step: Any) -> int | None:
    """The step as an integer, or None; TypeError if the step is not an integer."""
    check_type(step, "step", "pass an integer, or None", SupportsIndex, NoneType)
    return None if step is None else int(step)


def _checked_key(key: Any) -> str:
    if not isinstance(key, str):
        raise TypeError(f"log got the key {key!r}, a {type(key).__name__}; keys are strings")
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
    elif hasattr(value, "dtype") and hasattr(value, "item"):  # a NumPy scalar; its bool is not a Python number
        value = value.item()
    if isinstance(value, bool | str):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    way_out = "give each of its values its own key" if isinstance(value, Mapping) else "leave it out"
    raise TypeError(
        f"log got {key!r} of type {type(value).__name__}; numbers, tensors of one element and strings can be logged; "
        f"{way_out}"
    )
