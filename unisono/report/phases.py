"""Phases that a user names: what a report shows apart from the loop's body."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from unisono.timeline import PHASES
from unisono.world import current_world


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Give the time of the block a name in the report: `with unisono.phase("augmentation"): ...`.

    All of its time counts, with the loops, collectives and steps in it; of nested blocks, the inner one's name counts.
    It costs about two microseconds. "evaluate", "log" and "save" add to what the package names so itself.

    Args:
        name: of the phase; the same name adds up.

    Raises:
        TypeError, ValueError: it is no text, empty, or one of the loop's own phases.
    """
    if not isinstance(name, str):
        raise TypeError(f"phase({name!r}): a name is a text")
    if not name or name in PHASES:
        raise ValueError(f"phase({name!r}): {', '.join(map(repr, PHASES))} are the loop's own; choose another name")
    with current_world().timeline.loop().named(name):
        yield
