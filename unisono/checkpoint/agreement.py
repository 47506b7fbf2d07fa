"""What ranks agree on before a checkpoint is written, and after it is read.

*Threads:* the ranks' own.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from unisono.checkpoint.directory import Place, check_place, find
from unisono.checkpoint.folders import Folder
from unisono.checkpoint.manifest import Manifest, read_manifest
from unisono.errors import CheckpointError
from unisono.outcome import Outcome
from unisono.world import World


def agree_on(ask: Callable[[], Any], world: World) -> Any:
    """Call `ask` on rank zero, and return its result on all ranks; or raise its error on all of them."""
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
    for each in failed:
        if each is not None:
            Outcome.failure(own).unwrap() if own is not None else Outcome.from_bytes(each).unwrap()


def raise_together(own: BaseException | None, world: World) -> None:
    """Raise, on all ranks, the error of the first rank that has one. A collective."""
    raise_any(world.comm.all_gather_object(encode_error(own)), own)


def checked_score(score: Any) -> float | None:
    """The score as a float, or None; TypeError if it is not a number."""
    try:
        return None if score is None else float(score)
    except (TypeError, ValueError, RuntimeError):
        # A tensor of several elements raises RuntimeError.
        raise TypeError(f"score={score!r:.80} is of type {type(score).__name__}; pass one number, or None") from None


def chosen_place(place: Place | Callable[[], Place], score: float | None) -> Place | None:
    """Where the checkpoint goes; None if the existing one has at least that score, or `score` is NaN."""
    chosen = place() if callable(place) else place
    check_place(chosen)
    if score is None:
        return chosen
    known = _score_at(chosen.folder)
    return chosen if not math.isnan(score) and (known is None or score > known) else None


def _score_at(folder: Folder) -> float | None:
    try:
        manifest: Manifest = find(folder, read_manifest)[1]  # nothing more, since the loop is waiting
        return manifest.score
    except CheckpointError:
        return None


def new_manifest(step: int, score: float | None, world: World, kinds: dict[str, list[str]]) -> Manifest:
    """Make a manifest, complete except for its files."""
    versions = {"torch": str(torch.__version__)}
    try:
        versions["unisono"] = version("unisono")
    except PackageNotFoundError:
        versions["unisono"] = ""
    return Manifest(step, score, world.world_size, time.time(), kinds, versions)
