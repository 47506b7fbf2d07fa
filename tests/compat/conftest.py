"""Fixtures of the tests of PyTorch/XLA's names."""

from __future__ import annotations

import pytest
from families import ALONE, PROCESSES, RANKS, THREADS, Way


def pytest_itemcollected(item: pytest.Item) -> None:
    if item.path.name.startswith("test_compat_"):
        item.add_marker(pytest.mark.xla)


@pytest.fixture(params=[ALONE, THREADS, PROCESSES], ids=str)
def way(request: pytest.FixtureRequest) -> Way:
    return request.param


@pytest.fixture(params=[THREADS, PROCESSES], ids=str)
def several(request: pytest.FixtureRequest) -> Way:
    if RANKS == 1:
        pytest.skip("there is one device")
    return request.param
