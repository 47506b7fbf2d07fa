"""What every test runs under: known surroundings, a time limit, the leak police, one family of devices."""

from __future__ import annotations

import surroundings

surroundings.normalize()  # before torch, which reads the environment once

import gc  # noqa: E402

gc.disable()  # until all is imported and collected: it would be a fifth of that time

import os  # noqa: E402
import re  # noqa: E402
import sys  # noqa: E402
from collections.abc import Iterator  # noqa: E402

import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import settings  # noqa: E402

from unisono import backends, warm  # noqa: E402

pytest_plugins = ["leak_police", "pytester", "running_again", "time_limit"]

settings.register_profile("unisono", deadline=None, max_examples=60, print_blob=True)
settings.load_profile("unisono")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Take the family at once: before a test module, or the conftest.py of a folder, asks which one it is.

    Lazy devices are loaded now: their settings are for the whole process.
    """
    parser.addoption("--backend", default=None, help="the family of devices for tests that run on any")
    family = parser.parse_known_args(sys.argv[1:]).backend or os.environ.get("UNISONO_BACKEND")  # a worker of xdist
    if family is not None:
        os.environ["UNISONO_BACKEND"] = family
        backend = backends.pick_backend()
        backend.start(backend.device(0))


def pytest_collection() -> None:
    """Cores are few, and in a process that runs many tests, workers are forked soon."""
    torch.set_num_threads(1)
    if "PYTEST_XDIST_WORKER" in os.environ:
        warm()


@pytest.hookimpl(wrapper=True, tryfirst=True)  # around that which looks at markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """Begin with what takes long by waiting: at the end, the other processes would have nothing to do beside it."""
    _mark_more_ranks_as_slow(items)
    yield
    items.sort(key=lambda item: item.get_closest_marker("waits_long") is None)


def _mark_more_ranks_as_slow(items: list[pytest.Item]) -> None:
    """Of a test that runs on two ranks and on more of the same kind, the fast tests have the two."""
    modes = {item: re.findall(r"(threads|processes)-(\d+)", item.name) for item in items}
    on_two = {
        (item.parent, item.name.partition("[")[0], kind)
        for item in items
        for kind, count in modes[item]
        if count == "2"
    }
    for item in items:
        where = item.parent, item.name.partition("[")[0]
        if any(int(count) > 2 and (*where, kind) in on_two for kind, count in modes[item]):
            item.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    """What is imported stays: collections, and the forks of loader workers, need not go through it."""
    gc.freeze()
    gc.enable()
