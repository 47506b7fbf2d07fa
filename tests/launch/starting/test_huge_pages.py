"""Memory that is collapsed into huge pages holds what it held, and a fork sees it as ever."""

from __future__ import annotations

import os
import platform
import re
import sys
from pathlib import Path

import pytest

from unisono.launch.starting.huge_pages import collapse_memory

SIZE = 32 << 20


def huge_kilobytes() -> int:
    return sum(map(int, re.findall(r"^AnonHugePages: +(\d+) kB$", Path("/proc/self/smaps").read_text(), re.MULTILINE)))


def has_the_call() -> bool:
    if sys.platform != "linux":
        return False
    major, minor = map(int, re.findall(r"\d+", platform.release())[:2])
    return (major, minor) >= (6, 1) and Path("/sys/kernel/mm/transparent_hugepage").exists()


@pytest.mark.skipif(not has_the_call(), reason="a Linux from 6.1 on takes this request")
def test_memory_lies_in_huge_pages_and_holds_what_it_held():
    pattern = bytes(range(256)) * (SIZE // 256)
    held = bytearray(pattern)
    collapse_memory()
    assert huge_kilobytes() * 1024 > SIZE // 2
    child = os.fork()
    if child == 0:
        held[SIZE // 2] ^= 255
        os._exit(held[SIZE // 2] != 255 - pattern[SIZE // 2])
    assert os.waitpid(child, 0)[1] == 0
    assert held == pattern, "what a fork writes is its own"


def test_where_there_is_no_such_call_nothing_happens(monkeypatch: pytest.MonkeyPatch):
    def absent(*_: object) -> None:
        raise OSError("no such library")

    monkeypatch.setattr("ctypes.CDLL", absent)
    collapse_memory()
