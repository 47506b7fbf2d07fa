"""The tracker protocol, and the values that a tracker gets: plain numbers and strings, by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import NoneType
from typing import Any, Protocol, SupportsIndex, runtime_checkable

from unisono.arguments import check_type

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
    """The name that `get_tracker` finds a tracker by."""
    return str(getattr(tracker, "name", type(tracker).__name__))


def plain_values(values: Mapping[str, Any]) -> dict[str, Value]:
    """The values as a tracker gets them: tensors are copied to the host; None, a value not yet known, is left out.

    Raises the errors of `Accelerator.log`.
    """
    check_type(values, "values", "pass a mapping from names to values", Mapping)
    return {key: _plain(key, value) for key, value in values.items() if value is not None}


def plain_step(step: Any) -> int | None:
    """The step as an integer, or None; TypeError if the step is not an integer."""
    check_type(step, "step", "pass an integer, or None", SupportsIndex, NoneType)
    return None if step is None else int(step)


def _plain(key: str, value: Any) -> Value:
    check_type(key, "key", "keys are strings", str)
    plain = value
    if hasattr(value, "item"):  # a tensor, an array, or a scalar of NumPy
        try:
            plain = value.item()
        except (RuntimeError, ValueError):
            shape = tuple(value.shape)
            raise ValueError(f"log got {key!r} of shape {shape}; log one number, such as {key}.mean()") from None
    if not isinstance(plain, Value):
        raise TypeError(
            f"log got {key!r} of type {type(plain).__name__}; numbers, tensors of one element and strings can be "
            "logged: give each of several values its own key, and leave out anything else"
        )
    return plain
