"""The exit codes of a run: those of `unisono run`, and those in the files of a run that a script's `spawn` has made."""

from __future__ import annotations

from unisono.errors import ClosedError, WorkerDiedError

INTERRUPTED = 130  # 128 + SIGINT


def exit_code_of(error: BaseException | None) -> int:
    """The exit code of a run that ended with an error, or without.

    0 for success; n if a worker ended by `sys.exit(n)`, modulo 256 and never 0; 128 + n if signal n ended it; 143 after
    an agreed stop, 130 after Ctrl-C; 1 for any other error.
    """
    if error is None:
        return 0
    if isinstance(error, ClosedError) and isinstance(error.__cause__, WorkerDiedError):  # by `ProcessContext.stop`
        return exit_code_of(error.__cause__)
    if isinstance(error, SystemExit):  # includes that of an agreed stop
        return error.code % 256 or 1 if isinstance(error.code, int) else 1
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, WorkerDiedError) and error.exit_code:
        return 128 - error.exit_code if error.exit_code < 0 else error.exit_code % 256 or 1
    return 1
