"""A report as a picture: the loss curve, and where the time went. Needs the extra "report" (matplotlib)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unisono.report.summary import LOOP_PHASES, Report, colours_of, label
from unisono.report.timeline import COMPUTE, MOVE


def new_figure(height: float = 4) -> Any:
    """An empty figure of matplotlib, of that height in inches; ImportError, with the pip command, without it."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("pictures are drawn with matplotlib: pip install 'unisono[report]'") from error
    return Figure(figsize=(11, height), layout="constrained")


def save_picture(report: Report, losses: Sequence[float], path: str | Path) -> Path:
    """As `Report.save_picture`."""
    figure = new_figure()
    curve, shares = figure.subplots(1, 2, width_ratios=(3, 2))
    colours = colours_of(report.named_phases)

    curve.plot(range(1, len(losses) + 1), losses, color=colours[COMPUTE], linewidth=1)
    # A log axis without a positive value has no range.
    scale = "log" if any(loss > 0 for loss in losses) else "linear"
    curve.set(title="Loss", xlabel="step", ylabel="mean loss of the global batch", yscale=scale)
    curve.grid(alpha=0.3)

    names = [f"rank {each.rank}\n{each.device}" for each in report.ranks]
    left = [0.0] * len(names)
    for phase in (*LOOP_PHASES, *report.named_phases):
        widths = [100 * each.share(phase) for each in report.ranks]
        shares.barh(names, widths, left=left, color=colours[phase], label=label(phase))
        left = [start + width for start, width in zip(left, widths, strict=True)]
    moving = [100 * each.share(MOVE) for each in report.ranks]
    shares.barh(names, moving, height=0.08, color=colours[MOVE], label=f"{label(MOVE)} (beside)")
    shares.invert_yaxis()
    shares.set(title=f"Where the time went, {report.samples_per_second:,.0f} samples/s", xlabel="% of the loops' time")
    shares.set_xlim(0, 100)
    figure.legend(loc="outside lower right", ncols=5, frameon=False, fontsize="small")

    target = Path(path).absolute()
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=130, format="png")
    return target
