"""Findings, and the checks that make them: each check is bounded in time, and none can affect the others.

*Threads:* a check runs in a separate thread, `unisono-check-<name>`, a daemon: one that never returns (a dead name
server, a hanging file system) is abandoned, and the program ends without it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from unisono.outcome import Outcome

State = Literal["ok", "note", "warning", "problem"]


@dataclass(frozen=True)
class Finding:
    """One result of examining the machine.

    Attributes:
        name: what was examined.
        state: "ok"; "note" is good to know; "warning" will hurt some runs; "problem" prevents runs from working.
        text: what was found, in one line.
        advice: what to do about it, if anything.
    """

    name: str
    state: State
    text: str
    advice: str = ""


def warning_if(is_bad: bool, name: str, text: str, advice: str) -> Finding:
    """A fact; if it is bad, a warning with advice."""
    return Finding(name, "warning", text, advice) if is_bad else Finding(name, "ok", text)


@dataclass(frozen=True)
class Check:
    """One check of the machine.

    Attributes:
        name: of the findings about the check itself.
        look: makes the findings.
        limit_s: the longest time it may take, in seconds.
        late: the state of the finding if it takes longer.
        when_late: what to do then.
    """

    name: str
    look: Callable[[], Iterable[Finding]]
    limit_s: float = 5.0
    late: State = "warning"
    when_late: str = ""


def examine(check: Check) -> list[Finding]:
    """The findings of a check; its failure or timeout is a finding, too."""
    found: list[Outcome[list[Finding]]] = []
    thread = threading.Thread(target=_look, args=(check, found), name=f"unisono-check-{check.name}", daemon=True)
    thread.start()
    thread.join(check.limit_s)
    if not found:
        return [Finding(check.name, check.late, f"no answer within {check.limit_s:g} s", check.when_late)]
    if found[0].error is not None:
        error = found[0].error
        return [Finding(check.name, "warning", f"could not be checked ({type(error).__name__}: {error})")]
    return found[0].unwrap()


def _look(check: Check, found: list[Outcome[list[Finding]]]) -> None:
    """Body of a check's thread: adds exactly one outcome."""
    found.append(Outcome.capture(lambda: list(check.look())))
