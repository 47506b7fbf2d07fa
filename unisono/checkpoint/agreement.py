"""Decisions of rank zero, and errors of all ranks, while they save or load together.

*Threads:* the rank's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from unisono.comm.outcome import Outcome, traceback_of
from unisono.comm.stacks import fold_frames, frames_of
from unisono.world import World


def agree_on(ask: Callable[[], Any], world: World) -> Any:
    """Call `ask` on rank zero, and return its result on all ranks; or raise its error on all of them. A collective."""
    outcome: Outcome[Any] = Outcome.capture(ask) if world.rank == 0 else Outcome()
    if outcome.error is not None and not isinstance(outcome.error, Exception):
        raise outcome.error
    found, failed = world.comm.broadcast_object((outcome.value, encode_error(outcome.error)))
    raise_any([failed], outcome.error)
    return found if world.rank else outcome.value


def encode_error(error: BaseException | None) -> bytes | None:
    """Encode an error for the other ranks, even if it cannot be pickled."""
    return None if error is None else Outcome.failure(error).to_bytes()


def raise_any(failed: Sequence[bytes | None], own: BaseException | None) -> None:
    """Raise, on all ranks, an error that one has reported; on that rank, the original error."""
    for each in filter(None, failed):
        outcome = Outcome.failure(own) if own is not None else Outcome.from_bytes(each)
        # A cause with our frames alone would be shown as two headings.
        if own is None and outcome.error is not None and not frames_of(fold_frames(traceback_of(outcome.error))):
            outcome.error.__cause__ = None
        outcome.unwrap()


def raise_together(own: BaseException | None, world: World) -> None:
    """Raise, on all ranks, the error of the first rank that has one. A collective."""
    raise_any(world.comm.all_gather_object(encode_error(own)), own)
