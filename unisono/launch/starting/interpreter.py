"""The command that starts an interpreter like this one: with the same `-W`, `-X`, `-O` and other options."""

from __future__ import annotations

import subprocess
import sys


def interpreter_command() -> list[str]:
    """The beginning of a command line, before `-c` and the code."""
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined] # multiprocessing's, too
    known = {flags[place + 1].partition("=")[0] for place, flag in enumerate(flags) if flag == "-X"}
    for name, value in sys._xoptions.items():  # options of the program's own
        if name not in known:
            flags += ["-X", name if value is True else f"{name}={value}"]
    return [sys.executable, *flags]
