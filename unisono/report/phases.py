"""User-named phases, which a report shows separately from the loop's body."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from unisono.report.timeline import PHASES
from unisono.world import current_world


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Attribute the time of the block to a named phase in the report: `with unisono.phase("augmentation"): ...`.

    All of its time counts, including loops, collectives and steps within it; in nested blocks, time goes to the
    innermost name. It costs about two microseconds. "evaluate", "log" and "save" add to the phases that the package
    records under these names.

    Args:
        name: the name of the phase; the times of blocks with the same name are added up.

    Raises:
        TypeError, ValueError: the name is not a string, is empty, or is one of the loop's own phases.
    """
    if not isinstance(name, str):
        raise TypeError(f"phase({name!r}): a name is a string")
    if not name or name in PHASES:
        raise ValueError(
            f"phase({name!r}): {', '.join(map(repr, PHASES))} are reserved for the loop; choose another name"
        )
    with current_world().timeline.loop().named(name):
        yield
