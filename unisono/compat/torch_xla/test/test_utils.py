"""`torch_xla.test.test_utils`: what training scripts print, and write for TensorBoard."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import datetime
from types import MappingProxyType
from typing import Any

from unisono.compat.left_out import left_out
from unisono.compat.torch_xla.core.devices import DeviceName, get_ordinal
from unisono.compat.torch_xla.debug import metrics, metrics_compare_utils

__getattr__ = left_out(__name__)


def get_summary_writer(logdir: str | None) -> Any:
    """TensorBoard's writer for that folder; None if no folder is given."""
    if not logdir:
        return None
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(log_dir=logdir)
    write_to_summary(writer, 0, {"TensorboardStartTimestamp": time.time()})
    return writer


def write_to_summary(
    summary_writer: Any,
    global_step: int | None = None,
    dict_to_write: Mapping[str, float] = MappingProxyType({}),
    write_xla_metrics: bool = False,
) -> None:
    """Write scalars under their names, and this replica's metrics and counters if asked for; nothing, if the writer is
    None."""
    if summary_writer is None:
        return
    own = metrics_compare_utils.parse_metrics_report(metrics.metrics_report()) if write_xla_metrics else {}
    for name, value in {**dict_to_write, **own}.items():
        summary_writer.add_scalar(name, value, global_step)


def close_summary_writer(summary_writer: Any) -> None:
    """Flush and close the writer; does nothing if it is None."""
    if summary_writer is not None:
        summary_writer.flush()
        summary_writer.close()


def now(format: str = "%H:%M:%S") -> str:
    """The time of day, as text."""
    return datetime.now().strftime(format)


def print_training_update(
    device: DeviceName,
    step: int,
    loss: float,
    rate: float,
    global_rate: float,
    epoch: int | None = None,
    summary_writer: Any = None,
) -> None:
    """Print training progress: the replica, the step, its loss, samples per second now and since the beginning."""
    rates = {"Rate": f"{rate:.2f}", "GlobalRate": f"{global_rate:.2f}"}
    _print_line("Training", device, Epoch=epoch, Step=step, Loss=f"{loss:.5f}", **rates)
    write_to_summary(summary_writer, None, {"examples/sec": rate, "average_examples/sec": global_rate})


def print_test_update(
    device: DeviceName, accuracy: float | None, epoch: int | None = None, step: int | None = None
) -> None:
    """Print the progress of an evaluation."""
    _print_line("Test", device, Step=step, Epoch=epoch, Accuracy=None if accuracy is None else f"{accuracy:.2f}")


def _print_line(what: str, device: DeviceName, **values: Any) -> None:
    ordinal = get_ordinal(None)
    place = device if ordinal is None else f"{device}/{ordinal}"
    parts = [f"{name}={value}" for name, value in values.items() if value is not None]
    line = " ".join(["|", what, f"Device={place}", *parts, f"Time={now()}"])
    print(f"{line}\n", end="", flush=True)  # in one write: replicas that are threads print concurrently
