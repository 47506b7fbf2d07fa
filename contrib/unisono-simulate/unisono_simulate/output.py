"""Predictions as a table, and as a picture, which needs the extra "picture" (matplotlib)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from unisono_simulate.prediction import Prediction

_HEADINGS = ("devices", "step", "waiting", "samples/s", "efficiency", "memory", "checkpoint every", "useful")


def table(predictions: Sequence[Prediction]) -> str:
    """A line for each prediction, below headings; "useful" is what failures leave of the throughput."""
    rows = [_HEADINGS]
    for each in predictions:
        first = f"{each.devices:,}", f"{1e3 * each.step_s:,.1f} ms", f"{1 - each.compute_s / each.step_s:.1%}"
        rates = f"{each.samples_per_s:,.0f}", f"{each.efficiency:.1%}", f"{each.memory_bytes / 2**30:,.2f} GiB"
        checkpoint = "-" if each.checkpoint_s is None else f"{each.checkpoint_s / 60:,.1f} min"
        rows.append((*first, *rates, checkpoint, f"{each.useful:.1%}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def save_picture(predictions: Sequence[Prediction], path: Path) -> None:
    """Draw step time and efficiency by the number of devices into a PNG file; ImportError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("pictures are drawn with matplotlib: pip install matplotlib") from error
    figure = Figure(figsize=(11, 4), layout="constrained")
    times, shares = figure.subplots(1, 2)
    devices = [each.devices for each in predictions]
    parts = zip(*((1e3 * each.compute_s, 1e3 * (each.step_s - each.compute_s)) for each in predictions), strict=True)
    times.stackplot(devices, *parts, labels=("computing", "waiting"), colors=("#2e86ab", "#edae49"))
    times.set(title="A step", xlabel="devices", ylabel="ms", xscale="log")
    shares.plot(devices, [100 * each.efficiency for each in predictions], color="#2e86ab", label="without failures")
    useful = [100 * each.efficiency * each.useful for each in predictions]
    shares.plot(devices, useful, color="#d1495b", linestyle="--", label="with checkpoints and restarts")
    shares.set(title="Efficiency", xlabel="devices", ylabel="% of single devices", xscale="log", ylim=(0, 105))
    for axes in (times, shares):
        axes.grid(alpha=0.3)
        axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, format="png")
