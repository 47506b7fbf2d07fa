"""What the tests of the launch share: a line to hear the workers on, and a gate to hold them at."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from faults import SOON_S, Ear, Gate, Line


@pytest.fixture
def line(tmp_path: Path) -> Line:
    return Line.at(tmp_path / "line")


@pytest.fixture
def ear(line: Line) -> Iterator[Ear]:
    with line.hearing() as ear:
        yield ear


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate.at(tmp_path / "gate")


@pytest.fixture
def let_pass(gate: Gate) -> Iterator[Callable[[int], None]]:
    with gate.kept() as let_pass:
        yield let_pass


@pytest.fixture
def soon() -> Iterator[None]:
    """What the test waits for reaches the caller at once."""
    began = time.monotonic()
    yield
    assert time.monotonic() - began < SOON_S
