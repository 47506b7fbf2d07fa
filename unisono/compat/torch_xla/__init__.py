"""PyTorch/XLA's names over this framework: its scripts run on cpu, cuda, mps and xla by changing their imports.

`import torch_xla.core.xla_model as xm` becomes `import unisono.compat.torch_xla.core.xla_model as xm`, and so for each
module. UNISONO_BACKEND=cpu, cuda, mps or xla selects the kind of device; if unset, an accelerator is preferred to the
CPU.

This module has what current scripts use of `torch_xla` itself. No code is shared with it; where the original loses data
or errors, or hangs, this does what its documentation promises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from unisono.compat.left_out import left_out
from unisono.compat.torch_xla import _XLAC as _XLAC
from unisono.compat.torch_xla import experimental as experimental
from unisono.compat.torch_xla import runtime as runtime
from unisono.compat.torch_xla.core import devices as _devices
from unisono.compat.torch_xla.core import steps as _steps
from unisono.compat.torch_xla.core import xla_model as _  # noqa: F401 - torch_xla.core.xla_model is there, too
from unisono.compat.torch_xla.distributed import xla_multiprocessing as _multiprocessing

__getattr__ = left_out(__name__)

manual_seed = _devices.set_rng_state
sync = _steps.mark_step


def device(index: int | None = None) -> torch.device:
    """The replica's own device, or the one with the given index. See `xla_model.xla_device`."""
    return _devices.xla_device(index)


@contextmanager
def step() -> Iterator[None]:
    """A `with` block that is a step: a step ends before it, and one after it."""
    sync()
    yield
    sync()


def compile(f: Callable[..., Any] | None = None, full_graph: bool = False, name: str | None = None) -> Any:
    """Make the function a separate step, which a lazy device compiles as a whole; without a function, a `with` block
    like `step`. Values may be read inside, also with `full_graph`: a lazy device's graph ends there."""
    return step() if f is None else step()(f)


def launch(
    fn: Callable[..., Any], args: Sequence[Any] = (), start_method: str = "spawn", debug_single_process: bool = False
) -> list[Any]:
    """Call `fn(index, *args)` in one worker process per device, as `xla_multiprocessing.spawn` does; to debug it, once
    in this process."""
    nprocs = 1 if debug_single_process else None
    found: list[Any] = _multiprocessing.spawn(fn, args, nprocs, start_method=start_method)
    return found
