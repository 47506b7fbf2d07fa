"""The properties of a rank under their usual names, and what ranks do in turn: one goes first, each processes its own
elements, one sets a flag for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

from unisono.comm.operations import HOST
from unisono.training.collectives import all_reduce, barrier
from unisono.world import World

P = ParamSpec("P")
T = TypeVar("T")


class RankView:
    """The properties of a rank, and blocks that ranks run in turn."""

    world: World  # the rank's; set by the subclass
    _is_triggered = False

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank zero: the one that prints and saves."""
        return self.world.rank == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first rank of its machine."""
        return self.world.local_rank == 0

    @property
    def process_index(self) -> int:
        """The rank, 0 to `num_processes - 1`, of a process or a thread."""
        return self.world.rank

    @property
    def local_process_index(self) -> int:
        """The rank among those of this machine."""
        return self.world.local_rank

    @property
    def num_processes(self) -> int:
        """The number of ranks: processes, or threads."""
        return self.world.world_size

    def wait_for_everyone(self) -> None:
        """Wait until every rank has called it, as `unisono.barrier`."""
        barrier(self.world)

    def main_process_first(self) -> AbstractContextManager[None]:
        """A block that rank zero runs first, alone; the others enter it when rank zero has left it."""
        return _first_alone(self.is_main_process, self.world)

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """The same, for the first rank of each machine and the others of that machine."""
        return _first_alone(self.is_local_main_process, self.world)

    def on_main_process(self, function: Callable[P, T]) -> Callable[P, T | None]:
        """Decorator: the function runs on rank zero; elsewhere it returns None."""
        return where(lambda: self.is_main_process, function)

    def set_trigger(self) -> None:
        """Make the next `check_trigger` return True on all ranks; for example, because this rank has to stop."""
        self._is_triggered = True

    def check_trigger(self) -> bool:
        """Whether any rank has called `set_trigger` since the last check. A collective: every rank must call it."""
        flag, self._is_triggered = torch.tensor(int(self._is_triggered), device=HOST), False
        return bool(all_reduce(flag, "max", self.world))

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """A block that gets this rank's part of the inputs, for inference: in rank order, each element once.

        Args:
            inputs: a list, a tuple, a tensor, a `datasets.Dataset`, or a dict of these with equal lengths. If they do
                not divide evenly, the first ranks get one more element.
            apply_padding: repeat the last element, so that all parts have the same length, as `gather` requires.

        Raises:
            TypeError: the inputs are none of these.
            ValueError: lengths in a dict differ.
        """
        yield split_between(inputs, self.world, apply_padding)


def where(holds: Callable[[], bool], function: Callable[P, T]) -> Callable[P, T | None]:
    """The function, which returns None without running if the condition is false when it is called."""

    @wraps(function)
    def chosen(*args: P.args, **kwargs: P.kwargs) -> T | None:
        return function(*args, **kwargs) if holds() else None

    return chosen


@contextmanager
def _first_alone(is_first: bool, world: World) -> Iterator[None]:
    """A block that some ranks run first, and the others after these have left it."""
    if not is_first:
        barrier(world)
    yield
    # Not in a `finally`: after an error of a first rank the others must not enter their blocks.
    if is_first:
        barrier(world)


def split_between(inputs: Any, world: World, apply_padding: bool = False) -> Any:
    """As `RankView.split_between_processes`."""
    if isinstance(inputs, Mapping):
        lengths = {key: len(each) for key, each in inputs.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"inputs have different lengths, {lengths}; pass one element of each for each sample")
        return {key: split_between(each, world, apply_padding) for key, each in inputs.items()}
    is_number = isinstance(inputs, torch.Tensor) and not inputs.ndim
    if isinstance(inputs, str | bytes) or is_number or not hasattr(inputs, "__len__"):
        raise TypeError(
            f"inputs={inputs!r:.100} are a {type(inputs).__name__}, which has no parts; pass a list, a tuple, a tensor "
            "with a dimension, a datasets.Dataset, or a dict of these"
        )
    each, more = divmod(len(inputs), world.world_size)
    start = world.rank * each + min(world.rank, more)
    stop = start + each + (world.rank < more)
    missing = each + bool(more) - (stop - start) if apply_padding else 0
    places = [*range(start, stop), *[len(inputs) - 1] * missing]
    if isinstance(inputs, torch.Tensor):
        return inputs[torch.tensor(places, dtype=torch.long, device=inputs.device)]
    if hasattr(inputs, "select"):
        return inputs.select(places)
    part = [inputs[place] for place in places]
    return tuple(part) if isinstance(inputs, tuple) else part
