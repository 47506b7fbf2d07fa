"""`accelerate.tracking`: the trackers of the Accelerator."""

from __future__ import annotations

from typing import NoReturn

from unisono.compat.absent import refuse

_OWN = "pass log_with= the name of a library, or an object with the methods of unisono.Tracker"
_INSTEAD = dict.fromkeys(
    ["GeneralTracker", "TensorBoardTracker", "WandBTracker", "MLflowTracker", "on_main_process", "filter_trackers"],
    _OWN,
)


def __getattr__(name: str) -> NoReturn:
    refuse(__name__, name, _INSTEAD)
