"""What every test runs under, of the package and of those in contrib/: known surroundings, a time limit, the leak
police, one family of devices."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "tests"))

import surroundings

surroundings.normalize()  # before torch, which reads the environment once

import gc  # noqa: E402

gc.disable()  # until all is imported and collected: it would be a fifth of that time

import atexit  # noqa: E402
import os  # noqa: E402

if "PYTEST_XDIST_WORKER" in os.environ:  # it has reported all; to take apart what it has imported takes seconds

    def end(process: int) -> None:
        if process == os.getpid():
            os._exit(0)

    atexit.register(end, os.getpid())  # first, so that it runs last

import re  # noqa: E402
from collections.abc import Iterator  # noqa: E402
from functools import cache  # noqa: E402

import pytest  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

# What hands out the tests to other processes runs none. They would wait for its imports before they begin their own.
_asked = re.findall(r"(?:^|\n)(?:-n|--numprocesses)[\n=]?(\w+)", "\n".join(sys.argv))
RUNS_TESTS = "PYTEST_XDIST_WORKER" in os.environ or not _asked or _asked[-1] == "0"
pytest_plugins = ["pytester", "running_again", "time_limit"]

if RUNS_TESTS:
    import torch

    from unisono import devices, warm

    pytest_plugins.append("leak_police")

settings.register_profile(
    "unisono", deadline=None, max_examples=60, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("unisono")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Take the family at once: before a test module, or the conftest.py of a folder, asks which one it is.

    Lazy devices are loaded now: their settings are for the whole process.
    """
    parser.addoption("--backend", default=None, help="the family of devices for tests that run on any")
    family = parser.parse_known_args(sys.argv[1:]).backend or os.environ.get("UNISONO_BACKEND")  # a worker of xdist
    if not RUNS_TESTS:
        os.environ.update({"UNISONO_BACKEND": family} if family else {})
    elif family is None and any(devices.get_backend(each).is_available() for each in ("cuda", "mps")):
        os.environ["UNISONO_BACKEND"] = "cpu"  # what the other tests mean by the default
    elif family is not None:
        os.environ["UNISONO_BACKEND"] = family
        backend = devices.pick_backend()
        backend.start(backend.device(0))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """On a family that is named, a run of all tests need not import the files that have none for it."""
    is_whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    if is_whole and config.getoption("backend") and collection_path.name.startswith("test_"):
        return not _names_families(collection_path) or None
    return None


@cache
def _names_families(path: Path) -> bool:
    """Whether there is a marker by which `--backend` picks tests, in a file or for its folder."""
    texts = [path, *(folder / "conftest.py" for folder in path.parents if folder.is_relative_to(Path(__file__).parent))]
    texts.remove(Path(__file__))
    return any(re.search(r"mark\.(any_family|xla)\b", each.read_text()) for each in texts if each.exists())


def pytest_collection() -> None:
    """Cores are few, and in a process that runs many tests, workers are forked soon."""
    if RUNS_TESTS:
        torch.set_num_threads(1)
    if "PYTEST_XDIST_WORKER" in os.environ:
        warm()


@pytest.fixture(scope="session")
def fonts() -> None:
    """matplotlib keeps the files of its fonts open."""
    from matplotlib.figure import Figure

    figure = Figure()
    figure.subplots().set_title("text and $10^x$")
    figure.savefig(os.devnull, format="png")


@pytest.hookimpl(wrapper=True, tryfirst=True)  # around that which looks at markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """Begin with what takes long by waiting: at the end, the other processes would have nothing to do beside it."""
    _mark_variants_as_slow(items)
    yield
    items.sort(key=lambda item: item.get_closest_marker("waits_long") is None)


def _mark_variants_as_slow(items: list[pytest.Item]) -> None:
    """Of a test that runs in many ways the fast tests have the cheap ones: two ranks where more of the same kind are
    there, threads beside processes, ddp beside other strategies. Marked with `every_mode` it keeps threads and
    processes."""
    variants: dict[tuple[object, str], set[str]] = {}
    for item in items:
        variants.setdefault((item.parent, item.name.partition("[")[0]), set()).update(_variants_in(item))
    for item in items:
        others = variants[item.parent, item.name.partition("[")[0]]
        if any(others & _cheaper(each, item) for each in _variants_in(item)):
            item.add_marker(pytest.mark.slow)


def _variants_in(item: pytest.Item) -> list[str]:
    return re.findall(r"threads-\d+|processes-\d+|ddp|zero1|fsdp", item.name.partition("[")[2])


def _cheaper(variant: str, item: pytest.Item) -> set[str]:
    """The variants that a fast run has in this one's place."""
    kind, _, count = variant.partition("-")
    if not count:
        return {"ddp"} - {variant}
    if kind == "processes" and item.get_closest_marker("every_mode") is None:
        return {"threads-2", "threads-3", "threads-4"}
    return {f"{kind}-2"} - {variant}


def pytest_collection_finish() -> None:
    """What is imported stays: collections, and the forks of loader workers, need not go through it."""
    global _known_blocks
    _known_blocks = sys.getallocatedblocks()
    gc.freeze()
    atexit.register(gc.unfreeze)  # at the end, what is still frozen counts as leaked by triton
    gc.enable()


MANY = 200_000  # blocks of memory
_known_blocks = sys.maxsize


def pytest_runtest_logfinish() -> None:
    """So does what tests import, or read and keep: of some, each later collection would take a quarter of a second
    more."""
    global _known_blocks
    if RUNS_TESTS and sys.getallocatedblocks() > _known_blocks + MANY:
        gc.collect()
        gc.freeze()
        _known_blocks = sys.maxsize
    _known_blocks = min(_known_blocks, sys.getallocatedblocks())
