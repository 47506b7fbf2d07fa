"""How a worker that torch's agent watches tells why it failed: the file that the agent reads, with facts of ours in it.

The file has the form that torch's own `record` writes, so any launcher built on the agent shows our traceback. Our
facts, beside it, say which failure was first and which only followed from a peer's.

What a worker has to tell that is no failure, it tells by a mark: an empty file with that name at its end.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

_OURS = "unisono"

Mark = Literal["heeds", "stopped"]  # SIGTERM is a wish to it; it has come to an agreed early end


@dataclass(frozen=True)
class Failure:
    """Why one worker failed.

    Attributes:
        rank, node_rank, restart_count, pid: where; `pid` is the worker's own.
        message: the exception's type and text, or what became of the process.
        traceback: the whole of it, where there was an exception.
        exit_code: what the worker ends with.
        is_secondary: whether it only follows from another's failure.
        at: when, in seconds since the epoch.
    """

    rank: int
    node_rank: int
    restart_count: int
    pid: int
    message: str
    traceback: str = ""
    exit_code: int = 1
    is_secondary: bool = False
    at: float = field(default_factory=time.time)

    @classmethod
    def of(cls, environ: Mapping[str, str], pid: int, message: str, **facts: Any) -> Failure:
        """That of the worker with these variables."""
        return cls(
            rank=int(environ["RANK"]),
            node_rank=int(environ["GROUP_RANK"]),
            restart_count=int(environ["TORCHELASTIC_RESTART_COUNT"]),
            pid=pid,
            message=message,
            **facts,
        )

    @property
    def where(self) -> str:
        return f"rank {self.rank}, node {self.node_rank}, pid {self.pid}, restart {self.restart_count}"


def write_failure(failure: Failure, path: str | None = None) -> None:
    """Leave it where the agent looks; a failure that has been left there stays, for it was first.

    Args:
        path: of another worker's file; None takes this worker's.
    """
    path = path or os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or os.path.exists(path):
        return
    details = {"py_callstack": failure.traceback or failure.message, "timestamp": str(int(failure.at))}
    content = {
        "message": {"message": failure.message, "extraInfo": details},
        _OURS: dataclasses.asdict(failure),
    }
    with open(f"{path}.part", "w") as file:
        json.dump(content, file)
    os.replace(f"{path}.part", path)


def read_failure(content: Mapping[str, Any]) -> Failure | None:
    """Our facts in what the agent has read, if the worker left any."""
    facts = content.get(_OURS)
    return Failure(**facts) if isinstance(facts, dict) else None


def has_failed(path: str) -> bool:
    """Whether the worker that would leave word of a failure there has done so."""
    return os.path.exists(path)


def leave_mark(mark: Mark) -> None:
    """Tell that of this worker."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        Path(f"{path}.{mark}").touch()


def is_marked(path: str, mark: Mark) -> bool:
    """Whether the worker that would leave word of a failure there has told that of itself."""
    return os.path.exists(f"{path}.{mark}")
