"""Modules that the caller has changed since it imported them, or whose files have been edited."""

from __future__ import annotations

import re
import sys
from collections import OrderedDict
from enum import Flag
from typing import Any

from faults import Script

from unisono.launch.imported_modules import compare_modules, describe_module, describe_modules

CONFIG = """
RATE = 0.1
SIZES = [1, 2]
class Settings:
    def __init__(self):
        self.depth = 3
settings = Settings()
_private = 0
def scale():
    return 2
def train(index):
    return RATE, SIZES, settings.depth, scale()
"""

CHANGED = """
import logging, sys
import config
from unisono.launch.spawn import spawn

logging.basicConfig(format="%(message)s", stream=sys.stdout)
logging.getLogger("unisono.launch.arguments").setLevel(logging.ERROR)

spawn(config.train, nprocs=2)
print("nothing was said")
config.RATE = 0.5
config.SIZES.append(3)
config.settings.depth = 4
config._private = 1
config.scale = lambda: 5
print(spawn(config.train, nprocs=2))
print(spawn(config.train, nprocs=2)[0])
"""

SAID = (
    "config.RATE is 0.5 in the calling process, and 0.1 in workers; config.SIZES is [1, 2, 3] in the calling process, "
    "and [1, 2] in workers; config.settings is Settings(depth=4) in the calling process, and Settings(depth=3) in "
    "workers; config.scale is __main__.<lambda> in the calling process, and code ... in workers: workers import config "
    "themselves. Pass values to fn, or set them in fn; if the file was edited, reload the module in the calling "
    "process, or start that again"
)


def test_what_the_caller_has_changed_is_said_once(tmp_path):
    (tmp_path / "config.py").write_text(CONFIG)
    with Script(CHANGED, tmp_path) as script:
        code, output, errors = script.end()
    assert (code, errors) == (0, "")
    first, said, *results = output.splitlines()
    assert first == "nothing was said"
    assert re.sub(r"code \w+", "code ...", said) == SAID
    assert results == ["[(0.1, [1, 2], 3, 2), (0.1, [1, 2], 3, 2)]", "(0.1, [1, 2], 3, 2)"]


EDITED = """
import config, logging, sys
from pathlib import Path
from unisono.launch.spawn import spawn

logging.basicConfig(format="%(message)s", stream=sys.stdout)
logging.getLogger("unisono.launch.arguments").setLevel(logging.ERROR)
text = Path("config.py").read_text()
Path("config.py").write_text("# a line more moves all the others\\n" + text)
print(spawn(config.train, nprocs=2)[0])
Path("config.py").write_text(text.replace("return 2", "return 200"))
print(spawn(config.train, nprocs=2)[0])
"""


def test_a_module_that_was_edited_is_said_to_be_another_text(tmp_path):
    (tmp_path / "config.py").write_text(CONFIG)
    with Script(EDITED, tmp_path) as script:
        code, output, errors = script.end()
    assert (code, errors) == (0, "")
    first, said, second = output.splitlines()
    assert (first, second) == ("(0.1, [1, 2], 3, 2)", "(0.1, [1, 2], 3, 200)")
    assert re.match(r"config.scale is code (\w+) in the calling process, and code (?!\1)\w+ in workers: workers", said)


def test_installed_modules_are_not_looked_at():
    described = describe_modules()
    assert "faults" in described
    assert described.keys().isdisjoint({"torch", "numpy", "os", "pytest", "unisono", "unisono.launch.spawn"})


class Lazy(OrderedDict[str, int]):
    """Importing what it names takes seconds, and fails, as in transformers."""

    def items(self) -> Any:
        raise ImportError("a library that is not installed")

    values = __iter__ = items  # type: ignore[assignment]


class Proxy:
    """Of an object that exists while a request is served, say."""

    @property
    def __class__(self) -> Any:
        raise RuntimeError("outside of a request")

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError("outside of a request")


class Mode(Flag):
    SLOW = 1
    LOUD = 2


def test_objects_are_described_without_calling_their_own_code(monkeypatch):
    module = sys.modules[__name__]
    monkeypatch.setattr(module, "lazy", Lazy(a=1), raising=False)
    monkeypatch.setattr(module, "proxy", Proxy(), raising=False)
    monkeypatch.setattr(module, "mode", Mode.SLOW | Mode.LOUD, raising=False)
    first = describe_module(module)
    assert first["lazy"] == "{'a': 1}"
    assert first.keys().isdisjoint({"proxy", "mode"})
    assert ~Mode.SLOW & Mode.LOUD, "which the members keep"
    assert describe_module(module) == first


def test_a_difference_names_the_first_globals_and_counts_the_rest():
    here = describe_module(sys.modules[__name__])
    changed = {f"name_{number}": "1" for number in range(8)}
    said: list[str] = []
    compare_modules({__name__: {**here, **changed}}, said.append)
    assert len(said) == 1
    assert "name_4 is 1 in the calling process" in said[0]
    assert "name_5" not in said[0]
    assert "; 3 further globals of it differ: workers import" in said[0]
