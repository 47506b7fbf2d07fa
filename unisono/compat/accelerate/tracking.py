"""`accelerate.tracking`: the trackers of the Accelerator."""

from __future__ import annotations

from typing import NoReturn

from unisono.compat.absent import refuse

_OWN = "log on rank zero (accelerator.is_main_process) by the tracker's own library"
_INSTEAD = dict.fromkeys(
    ["GeneralTracker", "TensorBoardTracker", "WandBTracker", "MLflowTracker", "on_main_process", "filter_trackers"],
    _OWN,
)


def __getattr__(name: str) -> NoReturn:
    refuse(__name__, name, _INSTEAD)
