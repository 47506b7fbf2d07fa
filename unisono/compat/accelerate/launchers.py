"""`accelerate.launchers`: worker processes from a notebook or a script."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from unisono.backends import CPU
from unisono.compat.accelerate.utils.other import patch_environment
from unisono.launch.spawn import spawn


def notebook_launcher(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    num_processes: int | None = None,
    mixed_precision: str = "no",
    max_restarts: int = 0,
    **options: Any,
) -> list[Any]:
    """Call `function(*args)` in that many worker processes, by `unisono.spawn`; may be called repeatedly.

    Args:
        num_processes: None uses all devices.
        mixed_precision: of the Accelerators that the function creates.
        options: for several machines and their launcher; they have no effect.

    Returns:
        What the calls returned, by rank.
    """

    def work(_: int) -> Any:
        with patch_environment(accelerate_mixed_precision=mixed_precision):
            return function(*args)

    return spawn(work, nprocs=num_processes, max_restarts=max_restarts)


def debug_launcher(function: Callable[..., Any], args: Sequence[Any] = (), num_processes: int = 2) -> list[Any]:
    """Like `notebook_launcher`, on the CPU."""
    return spawn(lambda _: function(*args), nprocs=num_processes, backend=CPU)
