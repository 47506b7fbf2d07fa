"""One sentence about what a run spent its time on, and the lever that would help."""

from __future__ import annotations

from unisono.report.run import Run

_TAKEN = 0.2  # of the machine's cores, by processes that are not the run's
_FULL = 0.9  # of the machine's cores in use: less, and others have not slowed the run down


def diagnose(run: Run) -> str:
    """The verdict of the run's report; or that other processes take the machine's cores."""
    report = run.report
    if not report.ranks:
        return "nothing is recorded yet"
    busy, own = _machine(run)
    if busy >= _FULL and busy - own >= _TAKEN:
        return (
            f"the machine's cores are taken by others: {busy - own:.0%} of them, and {own:.0%} by this run; end "
            f"the other processes, or give the run cores of its own. Otherwise {report.verdict}"
        )
    return report.verdict


def _machine(run: Run) -> tuple[float, float]:
    """The fraction of the first machine's cores that is in use, and that which the run's ranks there use."""
    host = next(each.samples[-1]["host"] for each in run.ranks if each.samples)
    there = [each for each in run.ranks if each.samples and each.samples[-1]["host"] == host]
    busy = [one["machine_cpu"] for each in there for one in each.samples[1:]]
    seconds = max(each.samples[-1]["t"] - each.samples[0]["t"] for each in there)
    if not busy or not seconds:
        return 0.0, 0.0
    spent = sum(each.samples[-1]["cpu_s"] - each.samples[0]["cpu_s"] for each in there)
    return sum(busy) / len(busy), spent / seconds / (there[0].facts.get("cores") or 1)
