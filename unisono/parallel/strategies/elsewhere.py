"""What ranks get in place of a state that only rank zero has."""

from __future__ import annotations

from typing import Any

from unisono.errors import CheckpointError
from unisono.pickling import BETWEEN_RANKS


class Elsewhere(dict[str, Any]):
    """Stands for a state that is on rank zero: without entries, so that `if state:` means that it is here.

    It is a dict for `Accelerator.load_state_dict`, which takes rank zero's, for copies, and as a result of `spawn`. If
    every rank saves what it has to one file, the last one would leave {} there: so whatever reads it or pickles it for
    a file is an error.

    Args:
        what: whose state it is: "model" or "optimizer".
    """

    def __init__(self, what: str) -> None:
        super().__init__()
        self._what = what

    def _refuse(self, *_: Any) -> Any:
        """
        Raises:
            CheckpointError: always.
        """
        raise CheckpointError(
            f"this rank does not have the state of the {self._what}, of which each rank has a part: it is whole on "
            "rank zero only; call state_dict on every rank, and read or save what it returns on rank zero: "
            "if accelerator.is_main_process: torch.save(...)"
        )

    __reduce_ex__ = __getitem__ = __contains__ = __iter__ = __or__ = _refuse
    get = keys = values = items = _refuse

    def __repr__(self) -> str:
        return f"<the state of the {self._what}, on rank zero>"

    def copy(self) -> Elsewhere:
        return self

    def __copy__(self) -> Elsewhere:
        return self

    def __deepcopy__(self, memo: Any) -> Elsewhere:
        return self


class EmptyElsewhere(Elsewhere):
    """One that may be read, as if it were {}: for functions that every rank calls, and that save on rank zero, such as
    `save_pretrained(state_dict=..., is_main_process=...)`."""

    __contains__, __iter__ = dict.__contains__, dict.__iter__
    get, keys, values, items = dict.get, dict.keys, dict.values, dict.items


BETWEEN_RANKS[Elsewhere] = BETWEEN_RANKS[EmptyElsewhere] = lambda state: (type(state), (state._what,))
