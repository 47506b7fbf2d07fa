"""A report as a table in a terminal. Needs the extra "report" (rich)."""

from __future__ import annotations

from collections.abc import Iterator

from unisono.report.summary import CAUSES, Report, label
from unisono.timeline import PHASES


def print_report(report: Report) -> None:
    """Print where the time of each rank went, in % of its time in loops, the rates, and what the run waited for.

    Args:
        report: the report that `gather_report` returns on rank zero.

    Raises:
        ImportError: rich is not installed; the message has the pip command.
    """
    try:
        from rich.box import SIMPLE_HEAD
        from rich.console import Console
        from rich.table import Table
    except ImportError as error:
        raise ImportError("print_report draws with rich: pip install 'unisono[report]'") from error
    table = Table(  # no vertical lines: it has to fit into 80 columns, the width used if the terminal's is unknown
        title="Where the time went",
        caption="moving runs in the background, concurrently with the others",
        box=SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    table.add_column("rank", no_wrap=True)
    for phase in PHASES:
        table.add_column(
            label(phase).replace(" for", "\nfor").replace("loop ", "loop\n"), justify="right", no_wrap=True
        )
    named = report.named_phases
    if named:  # one column for all of them: their names may be of any length
        table.add_column("named", justify="right", no_wrap=True)
    for name in ("seconds", "samples"):
        table.add_column(name, justify="right")
    for each in report.ranks:
        shares = [each.share(phase) for phase in PHASES] + ([sum(map(each.share, named))] if named else [])
        table.add_row(
            f"{each.rank} {each.device}", *map("{:.1%}".format, shares), f"{each.loop_seconds:.2f}", f"{each.samples:,}"
        )
    console = Console()
    console.print(table)
    console.print(f"{report.samples_per_second:,.0f} samples/s over {len(report.ranks)} rank(s)")
    for line in _lines(report):
        console.print(line, highlight=False)


def _lines(report: Report) -> Iterator[str]:
    """The lines below the table."""
    yield report.verdict
    if report.ranks:
        rate = sum(each.bytes_per_second for each in report.ranks) / 1e6
        depth = sum(each.mean_queue for each in report.ranks) / len(report.ranks)
        causes = ", ".join(f"{cause} {report.waited(cause):.1%}" for cause in CAUSES)
        shares = {
            name: sum(each.share(name) for each in report.ranks) / len(report.ranks) for name in report.named_phases
        }
        if shares:
            yield "named: " + ", ".join(f"{label(name)} {share:.1%}" for name, share in shares.items())
        yield f"waited for: {causes}; {rate:,.1f} MB/s of batches, {depth:.1f} of them waiting per rank"
    if any(each.peak_memory for each in report.ranks):
        peaks = (f"{each.device} {each.peak_memory / 1e6:,.0f} MB" for each in report.ranks)
        yield f"memory of the devices, at most: {', '.join(dict.fromkeys(peaks))}"
    if any(each.peak_rss for each in report.ranks):
        peak = max(each.peak_rss for each in report.ranks)
        busy = sum(each.mean_cpu_percent for each in report.ranks) / 100
        yield f"with loader workers: at most {peak / 1e6:,.0f} MB per rank, {busy:.1f} cores busy over all"
    if counted := report.counters:
        yield "the devices' runtime: " + ", ".join(f"{count:,} {name}" for name, count in counted.items())
    told = []
    if report.dropped:
        told.append(f"{report.dropped:,} samples were dropped with the tail")
    if report.repeated:
        told.append(f"{report.repeated:,} {'' if told else 'samples were '}repeated to pad")
    if told:
        yield ", ".join(told)
    if report.skipped_steps:
        yield f"{report.skipped_steps:,} steps were skipped: none of their samples, or tokens, counted"
