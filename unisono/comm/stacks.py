"""Stacks as text: their frames, and the place where the user's program calls into torch or this package.

Stacks written by faulthandler have the most recent call first, tracebacks have it last.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from traceback import walk_stack, walk_tb
from types import FrameType

from unisono.torch_private import WRAPPING_FRAMES

TELL_STACKS = getattr(signal, "SIGRTMIN", 28) + 7  # asks a process for its stacks, also inside C++; USR2 is the user's
PACKAGE = f"{Path(__file__).parent.parent}/"

_SHOWN = 12  # lines of a stack
_CALLERS = ("/unisono/comm/preemption.py", "/unisono/launch/worker.py")  # of the user's function
_ANSWER = "unisono-stack"  # the name of the memory that a process writes its stacks into
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+.*$", re.MULTILINE)
_FRAME = re.compile(r'^\s*File "(?P<file>.*)", line (?P<line>\d+),? in (?P<name>.+)$', re.MULTILINE)
# Of a traceback: frames of this package and of torch's collectives, with their lines of code and marks, before another
# frame or an error of ours.
_HIDDEN = re.compile(
    rf'  File "(?:{re.escape(PACKAGE)}|<frozen runpy>|<model>|'
    r'.*/torch/distributed/(?:c10d_logger|distributed_c10d)\.py).*", '
    r"line \d+, in .*\n(?:    .*\n|  \[Previous .*\n)*"
    r'(?=  File "|unisono\.errors\.)'
)
_WRAPPERS = ("wrapper", "wrapped", "inner", "decorate_context", *WRAPPING_FRAMES)


@dataclass(frozen=True)
class Frame:
    """One line of a stack."""

    file: str
    line: int
    name: str

    @property
    def is_users(self) -> bool:
        """Whether the file belongs neither to a library nor to this package."""
        return "/lib/python" not in self.file and not self.file.startswith((PACKAGE, "<frozen ", "<model>"))

    def __str__(self) -> str:
        return f'{self.name} ("{self.file}", line {self.line})'


def tell_stack_on_request() -> None:
    """Let this process answer `stack_of`."""
    if hasattr(os, "memfd_create"):
        faulthandler.register(TELL_STACKS, os.memfd_create(_ANSWER), all_threads=True)


def stack_of(pid: int) -> str:
    """The stack of the main thread of a process on this machine; "" if it does not answer, as in a call of the kernel
    that cannot be interrupted. Takes at most a second."""
    answer = ""
    with suppress(OSError):
        place = next(each for each in Path(f"/proc/{pid}/fd").iterdir() if _ANSWER in os.readlink(each))
        begin = len(place.read_text())
        os.kill(pid, TELL_STACKS)
        for _ in range(20):
            time.sleep(0.05)
            before, answer = answer, place.read_text()[begin:]
            if answer and answer == before:  # the whole
                break
    return main_stack(answer)


def main_stack(stacks: str) -> str:
    """The stack of the main thread, which faulthandler writes last."""
    starts = [match.start() for match in _THREAD.finditer(stacks)]
    return stacks[starts[-1] :].rstrip() if starts else stacks.rstrip()


def frames_of(stack: str) -> list[Frame]:
    """The frames in the stack of one thread, in the order of the text."""
    return [Frame(each["file"], int(each["line"]), each["name"]) for each in _FRAME.finditer(stack)]


def own_frames(top: FrameType | None = None) -> list[Frame]:
    """The frames from that one on, the most recent call first; None means the calling thread's."""
    return _read_frames(walk_stack(top or sys._getframe(1)))


def frames_of_error(error: BaseException) -> list[Frame]:
    """The frames of an error's traceback, and those of the code that caught it, the most recent call first."""
    return _read_frames(walk_tb(error.__traceback__))[::-1] + own_frames(sys._getframe(1))


def _read_frames(walked: Iterable[tuple[FrameType, int]]) -> list[Frame]:
    return [Frame(frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in walked]


def describe_call(frames: Iterable[Frame]) -> str:
    """Describe the call in the user's program and its place, as `save() in main ("a.py", line 3)`; "" if there is none.
    The frames have the most recent call first."""
    called = ""
    for frame in frames:
        if frame.is_users:
            return f"{called}() in {frame}" if called else ""
        if frame.name not in _WRAPPERS:
            called = frame.name
    return ""


def fold_frames(text: str) -> str:
    """A traceback without the frames of this package and of torch's collectives; an error that is not this package's
    own keeps the frame that raised it."""
    return _HIDDEN.sub("", text)


def stack_to_user_function(stacks: str) -> str:
    """The main thread's stack down to the user's function; of this package's frames, those that the user called."""
    lines = main_stack(stacks).splitlines()
    ours = next((place for place, line in enumerate(lines) if any(each in line for each in _CALLERS)), len(lines))
    shown: list[str] = []
    for is_ours, group in groupby(lines[1:ours], lambda line: PACKAGE in line):  # the first is faulthandler's header
        *inner, outer = group
        shown += [f"  ... {len(inner)} frames of unisono", outer] if is_ours and inner else [*inner, outer]
    return "\n".join(f"  {line}" for line in shown[:_SHOWN]) or "  it did not report its stack"


def users_frame() -> FrameType:
    """The frame of the user's program that the call came from; the caller's, if there is none."""
    walked = [frame for frame, _ in walk_stack(sys._getframe(1))]
    return next((each for each, frame in zip(walked, own_frames(walked[0]), strict=True) if frame.is_users), walked[0])
