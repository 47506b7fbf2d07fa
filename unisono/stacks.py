"""Stacks as text: their frames, and the place where the user's program calls into torch or this package.

Stacks written by faulthandler have the most recent call first, tracebacks have it last.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from traceback import walk_stack
from types import FrameType

from unisono.torch_private import WRAPPING_FRAMES

PACKAGE = f"{Path(__file__).parent}/"

_THREAD = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+.*$", re.MULTILINE)
_FRAME = re.compile(r'^\s*File "(?P<file>.*)", line (?P<line>\d+),? in (?P<name>.+)$', re.MULTILINE)
# Of a traceback: a frame with its lines of code and marks, and a stretch of frames.
_BLOCK = re.compile(r'  File "(.*)", line \d+, in .*\n(?:    .*\n|  \[Previous .*\n)*')
_BLOCKS = re.compile(rf"(?:{_BLOCK.pattern.replace('(.*)', '.*')})+")
_FOLDED = (PACKAGE, "<frozen runpy>")
_OWN_ERROR = "unisono.errors."
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
        return "/lib/python" not in self.file and not self.file.startswith((PACKAGE, "<frozen "))

    def __str__(self) -> str:
        return f'{self.name} ("{self.file}", line {self.line})'


def main_stack(stacks: str) -> str:
    """The stack of the main thread, which faulthandler writes last."""
    starts = [match.start() for match in _THREAD.finditer(stacks)]
    return stacks[starts[-1] :].rstrip() if starts else stacks.rstrip()


def frames_of(stack: str) -> list[Frame]:
    """The frames in the stack of one thread, in the order of the text."""
    return [Frame(each["file"], int(each["line"]), each["name"]) for each in _FRAME.finditer(stack)]


def own_frames(top: FrameType | None = None) -> list[Frame]:
    """The frames from that one on, the most recent call first; None means those of the calling thread."""
    return [Frame(frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in walk_stack(top)]


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
    """A traceback in which one line stands for adjacent frames of this package, and of the libraries that it calls and
    that call it. An error that is not this package's own keeps the frame that has raised it."""

    def fold(stretch: re.Match[str]) -> str:
        blocks = [(match[0], Frame(match[1], 0, "")) for match in _BLOCK.finditer(stretch[0])]
        is_raised_by_rule = text.startswith(_OWN_ERROR, stretch.end())
        folded, start = "", 0
        while start < len(blocks):
            block, frame = blocks[start]
            if not frame.file.startswith(_FOLDED):
                folded, start = folded + block, start + 1
                continue
            end = start
            for number, (_, each) in enumerate(blocks[start:], start):
                if each.is_users:
                    break
                end = number + 1 if each.file.startswith(_FOLDED) else end
            shown = blocks[-1][0] if end == len(blocks) and not is_raised_by_rule else ""
            count = end - start - bool(shown)
            if count and (start or end == len(blocks)):  # those that lead to the user's function go without a line
                folded += f"  ... {count} frame{'s' * (count > 1)} of unisono\n"
            folded, start = folded + shown, end
        return folded

    return _BLOCKS.sub(fold, text)
