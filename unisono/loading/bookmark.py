"""The state of a loader: where the next pass begins, and whether that fits its data.

*Threads:* the loop's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from unisono.errors import StateError
from unisono.loading.sharding import Rule
from unisono.loading.sources import Begun, Progress, Source, State

_VERSION = 1
_FACTS = ("version", "epoch", "seed", "length", "order")  # the keys of a state that are not part of the position


class Bookmark:
    """The progress of the last pass begun over a source, or the beginning of the next one."""

    def __init__(self, source: Source, rule: Rule) -> None:
        self._source, self._rule = source, rule
        self._begun: Begun | None = None
        self._progress: Sequence[Progress] = ()

    def open(self, begun: Begun, progress: Sequence[Progress]) -> None:
        """Note that a pass has begun, with the progress of its loops."""
        self._begun, self._progress = begun._replace(pieces=iter(())), progress

    def state(self) -> State:
        """The state after the last round that all loops of the pass have received."""
        return state_after(self._source, self._begun, self._progress)

    def load(self, state: Mapping[str, Any]) -> None:
        """Let the next pass begin at a saved state; StateError if it is not the state of such a source."""
        check_state(state, self._source)
        self.seek(state["epoch"], {name: value for name, value in state.items() if name not in _FACTS})

    def seek(self, epoch: int, position: State) -> None:
        self._source.seek(epoch, position, self._rule)
        self._begun = None


def state_after(source: Source, begun: Begun | None, progress: Sequence[Progress]) -> State:
    """The state after the last round that all loops of a pass have received; after their end, that of the next pass."""
    if begun is None or all(each.has_ended for each in progress):
        epoch, position = source.next_position()
    else:
        slowest = min(progress, key=lambda each: each.rounds)
        epoch, position = begun.epoch, slowest.position or begun.position
    facts = _VERSION, epoch, source.seed, source.length, source.order
    return {**dict(zip(_FACTS, facts, strict=True)), **position}


def check_state(state: Mapping[str, Any], source: Source) -> None:
    """StateError if it is not a loader's state, or of another version, dataset, seed or sampler, in this order."""
    if not isinstance(state, Mapping) or "version" not in state:
        raise StateError(f"state={state!r:.200} is not what a loader's state_dict() returns")
    if state["version"] != _VERSION:
        raise StateError(
            f"the state has version {state['version']!r}, this loader reads version {_VERSION}; load it with the "
            "version of unisono that saved it, or restart the epoch with set_epoch",
            "version",
        )
    for name in ("epoch", "offset", "batches"):
        number = state.get(name, 0 if name == "batches" else None)  # which exists only in some positions
        if isinstance(number, bool) or not isinstance(number, int) or number < 0:
            raise StateError(f"the state's {name} is {number!r}; it must be an integer of at least 0")
    for name, here, way_out in (
        ("length", source.length, "load it over the same dataset (a shard: on as many ranks), or call set_epoch"),
        ("seed", source.seed, f"pass seed={state.get('seed')}"),
        ("order", source.order, "use the same shuffle= or sampler="),
    ):
        if (saved := state.get(name)) != here:
            raise StateError(
                f"the state was saved with {name}={saved!r}, this loader has {name}={here!r}, so the order would "
                f"differ; {way_out}",
                name,
            )
