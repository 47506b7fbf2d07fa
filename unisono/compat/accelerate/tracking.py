"""`accelerate.tracking`: the base class of a script's own trackers, and what a script sees of those of libraries."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Any

from unisono.compat.accelerate.state import PartialState
from unisono.compat.left_out import left_out

__getattr__ = left_out(__name__)


def on_main_process(method: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator of a tracker's method: it runs on rank zero; elsewhere it returns None, unless the tracker has
    `main_process_only = False`."""

    @wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        is_everywhere = not getattr(self, "main_process_only", False)
        return method(self, *args, **kwargs) if is_everywhere or PartialState().is_main_process else None

    return run


class GeneralTracker:
    """Base class of an object in `Accelerator(log_with=)`. Only rank zero's is called.

    A subclass has a `name` and a `tracker`, and defines `log(values, step, **options)`; the other methods may do
    nothing. `requires_logging_directory` has no effect: the object opens its own files.
    """

    main_process_only = True

    def __init__(self, _blank: bool = False) -> None:
        missing = [name for name in ("name", "requires_logging_directory", "tracker") if name not in dir(self)]
        if missing and not _blank:
            raise NotImplementedError(f"{type(self).__name__} has no {', '.join(missing)}; define them in the class")

    def start(self) -> None:
        """Called by `init_trackers`."""

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Called by `init_trackers`, with its configuration."""

    def log(self, values: Mapping[str, Any], step: int | None, **options: Any) -> None:
        """Called by `accelerator.log`."""
        raise NotImplementedError(f"{type(self).__name__} must define log(values, step, **options)")

    def finish(self) -> None:
        """Called by `end_training`."""

    def close(self) -> None:
        """`finish`."""
        self.finish()


def refuse_other_ranks(trackers: Iterable[Any], ranks: int) -> None:
    """ValueError for a tracker of several ranks that logs on each: the others' values would be lost."""
    for each in trackers:
        if ranks > 1 and isinstance(each, GeneralTracker) and not each.main_process_only:
            raise ValueError(
                f"{type(each).__name__} has main_process_only=False, and Accelerator calls only rank zero's tracker; "
                "call its own methods in the loop, or set main_process_only=True and log accelerator.gather(values)"
            )


def start_own(trackers: Iterable[Any], config: Mapping[str, Any] | None) -> None:
    """Begin the run of a script's own trackers."""
    for each in trackers:
        if isinstance(each, GeneralTracker):
            each.start()
            if config is not None:
                each.store_init_configuration(config)


class LibraryTracker:
    """A tracker of a library; the library's own object is its `tracker`, and has the names that it has in Accelerate:
    `writer` (TensorBoard), `run` (W&B) and `active_run` (MLflow)."""

    def __init__(self, native: Any) -> None:
        self.name = native.name
        self.tracker = self.writer = self.run = self.active_run = native.tracker
        self._native = native

    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Pass the values to the library."""
        self._native.log(values, step)

    def close(self) -> None:
        """End the library's run."""
        self._native.close()

    finish = close
