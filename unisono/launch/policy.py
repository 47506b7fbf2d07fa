"""Policy: how a job is started, watched and ended, by the arguments of `spawn`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from unisono.launch.watching.output import OutputOptions


@dataclass(frozen=True)
class Policy:
    """How a job is run; the docstring of `spawn` describes each field."""

    start_method: str = "zygote"
    grace_s: float = 5.0
    daemon: bool = False
    max_restarts: int = 0
    hang_timeout_s: float | None = None
    log_dir: Path | None = None
    output: OutputOptions = field(default_factory=OutputOptions)
