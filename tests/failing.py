"""Datasets that fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from epochs import Numbers

WORKERS = pytest.mark.parametrize("num_workers", [0, 2])


class TwoFactsError(Exception):
    """Has two required arguments, so that its class and its text do not make it again."""

    def __init__(self, code: int, path: str) -> None:
        super().__init__(f"code {code} at {path}")
        self.code, self.path = code, path


class Failing(Numbers):
    """Sample `broken` cannot be loaded."""

    def __init__(self, count: int, broken: int, make: Callable[[], BaseException]) -> None:
        super().__init__(count)
        self.broken, self.make = broken, make

    def __getitem__(self, index: int) -> int:
        if index == self.broken:
            raise self.make()
        return index


def two_facts() -> BaseException:
    return TwoFactsError(21, "a/path")


def caught(iterator: Iterator[Any]) -> tuple[int, BaseException]:
    """How many batches came, and the error behind them."""
    count = 0
    try:
        for _ in iterator:
            count += 1
    except Exception as error:
        return count, error.with_traceback(None)
    pytest.fail("no error was raised")
