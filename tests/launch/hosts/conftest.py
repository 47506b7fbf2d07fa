"""Networks, and the first store, for the tests of several machines."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch.distributed as dist
from agents import two_networks


@pytest.fixture(scope="session", autouse=True)
def warm_store() -> None:
    """The first store of a process opens a pipe that its library keeps for signals."""
    dist.TCPStore("127.0.0.1", 0, is_master=True)


@pytest.fixture
def networks() -> Iterator[tuple[str, str]]:
    if sys.platform != "linux":
        pytest.skip("network namespaces are Linux's")
    try:
        with two_networks() as names:
            yield names
    except PermissionError as reason:
        pytest.skip(f"this machine gives no network namespaces: {reason}")
