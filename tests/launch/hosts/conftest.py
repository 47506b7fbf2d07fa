"""Networks for the tests of several machines."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from agents import two_networks


@pytest.fixture
def networks() -> Iterator[tuple[str, str]]:
    if sys.platform != "linux":
        pytest.skip("network namespaces are Linux's")
    try:
        with two_networks() as names:
            yield names
    except PermissionError as reason:
        pytest.skip(f"this machine gives no network namespaces: {reason}")
