"""Findings, and checks that make them: each bounded in time, none able to take the others along.

*Threads:* a check runs on a thread of its own, `unisono-check-<name>`, a daemon: one that never comes back (a dead name
server, a file system that hangs) is left behind, and the program ends without it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from unisono.outcome import Outcome

State = Literal["ok", "note", "warning", "problem"]
STATES: tuple[State, ...] = ("ok", "note", "warning", "problem")


@dataclass(frozen=True)
class Finding:
    """What one look at the machine has shown.

    Attributes:
        name: what was looked at.
        state: "ok"; "note" is good to know; "warning" will hurt some runs; "problem" keeps runs from working.
        text: what was found, in one line.
        advice: what to do about it, where there is anything to do.
    """

    name: str
    state: State
    text: str
    advice: str = ""


@dataclass(frozen=True)
class Check:
    """A question to the machine.

    Attributes:
        name: of the findings about the check itself.
        look: answers it.
        limit_s: how long it may take.
        late: how bad it is when it takes longer.
        when_late: what to do then.
    """

    name: str
    look: Callable[[], Iterable[Finding]]
    limit_s: float = 5.0
    late: State = "warning"
    when_late: str = ""


def examine(check: Check) -> list[Finding]:
    """The findings of a check; one that fails, or takes too long, is a finding too."""
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
    """Body of a check's thread: leaves exactly one outcome."""
    found.append(Outcome.capture(lambda: list(check.look())))
