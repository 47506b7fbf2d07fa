"""A report as a table in a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from unisono.report.summary import CAUSES, Report, label
from unisono.report.timeline import BACKWARD, EVALUATE, FORWARD, LOG, PHASES, SAVE

_TITLE = "Where the time went"
OWN_NAMED = (FORWARD, BACKWARD, EVALUATE, LOG, SAVE)
_CAPTION = "moving runs in the background, concurrently with the others"


def table_of(report: Report) -> str:
    """The report as a table, and the lines below it, without the verdict."""
    return "\n".join([_TITLE, _table(report), _CAPTION, "", *_lines_below(report)])


def aligned(rows: list[list[str]]) -> str:
    """Rows as lines with columns: the first to the left, others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = ([cell.rjust(width) for cell, width in zip(row, widths, strict=True)] for row in rows)
    return "\n".join("  ".join([row[0].strip().ljust(widths[0]), *row[1:]]) for row in padded)


def _table(report: Report) -> str:
    """The table, with headings of one line or two."""
    phases = [label(phase).replace(" for", "\nfor").replace("loop ", "loop\n") for phase in PHASES]
    # A column for each of the package's own named phases; one for those of the user, whose names may be of any length.
    own = [phase for phase in report.named_phases if phase in OWN_NAMED]
    named = [phase for phase in report.named_phases if phase not in own]
    heads = [label(phase).replace(" ", "\n") for phase in own] + (["named"] if named else [])
    headings = ["rank", *phases, *heads, "seconds", "samples"]
    upper, lower = zip(*(("\n" + each).rsplit("\n", 1) for each in headings), strict=True)
    rows = [[each.strip() for each in upper], list(lower)]
    for each in report.ranks:
        shares = [each.share(phase) for phase in (*PHASES, *own)] + ([sum(map(each.share, named))] if named else [])
        percents = map("{:.1%}".format, shares)
        rows.append([f"{each.rank} {each.device}", *percents, f"{each.loop_seconds:.2f}", f"{each.samples:,}"])
    return aligned(rows)


def _lines_below(report: Report) -> Iterator[str]:
    """The lines below the table."""
    seconds = max((each.loop_seconds for each in report.ranks), default=0.0)
    yield (
        f"{report.samples_per_second:,.0f} samples/s over {len(report.ranks)} rank(s), in the {seconds:,.2f} s that "
        "the slowest has spent in loops"
    )
    if report.ranks:
        rate = sum(each.bytes_per_second for each in report.ranks) / 1e6
        depth = sum(each.mean_queue for each in report.ranks) / len(report.ranks)
        causes = ", ".join(f"{cause} {report.waited(cause):.1%}" for cause in CAUSES)
        shares = {
            name: sum(each.share(name) for each in report.ranks) / len(report.ranks)
            for name in report.named_phases
            if name not in OWN_NAMED
        }
        if shares:
            yield "named: " + ", ".join(f"{label(name)} {share:.1%}" for name, share in shares.items())
        yield f"waited for: {causes}; {rate:,.1f} MB/s of batches, {depth:.1f} of them waiting per rank"
    for described in dict.fromkeys(words for each in report.ranks for words in each.workers):
        yield f"num_workers='auto': {described}"
    if any(each.peak_memory for each in report.ranks):
        peaks = (f"{each.device} {each.peak_memory / 1e6:,.0f} MB" for each in report.ranks)
        yield f"memory of the devices, at most: {', '.join(dict.fromkeys(peaks))}"
    if counted := report.counters:
        yield "the devices' runtime: " + ", ".join(f"{count:,} {name}" for name, count in counted.items())
    if report.repeated:
        yield f"{report.repeated:,} samples were repeated to pad"
    if report.skipped_steps:
        yield f"{report.skipped_steps:,} steps were skipped: none of their samples, or tokens, counted"
    if found := [each for each in report.ranks if each.not_finite]:
        first = min(found, key=lambda each: each.not_finite)
        yield f"not finite, a loss or a gradient, from step {first.not_finite:,} on: rank {first.rank} has met it first"
