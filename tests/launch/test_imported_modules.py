"""Modules that the caller has changed since it imported them, or whose files have been edited."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from faults import Script

from unisono.launch.imported_modules import describe_module, describe_modules

CONFIG = """
RATE = 0.1
SIZES = [1, 2]
_private = 0
def scale():
    return 2
def train(index):
    return RATE, SIZES, scale()
"""

BEGIN = """
import config, logging, sys
from pathlib import Path
from unisono.launch.spawn import spawn
logging.basicConfig(format="%(message)s", stream=sys.stdout)
logging.getLogger("unisono.launch.arguments").setLevel(logging.ERROR)
"""
CHANGED = """
spawn(config.train, nprocs=2)
print("nothing was said")
config.RATE = 0.5
config.SIZES.append(3)
config._private = 1
config.scale = lambda: 5
print(spawn(config.train, nprocs=2))
print(spawn(config.train, nprocs=2)[0])
"""

SAID = (
    "config.RATE is 0.5 in the calling process, and 0.1 in workers; config.SIZES is [1, 2, 3] in the calling process, "
    "and [1, 2] in workers; config.scale is code ... in the calling process, and code ... in workers: workers import "
    "config themselves. Pass values to fn, or set them in fn; if the file was edited, reload the module in the calling "
    "process, or start that again"
)


def lines_of(source: str, directory: Path) -> list[str]:
    (directory / "config.py").write_text(CONFIG)
    with Script(BEGIN + source, directory) as script:
        code, output, errors = script.end()
    assert (code, errors) == (0, "")
    return output.splitlines()


def test_what_the_caller_has_changed_is_said_once(tmp_path):
    first, said, *results = lines_of(CHANGED, tmp_path)
    assert first == "nothing was said"
    assert re.sub(r"code \w+", "code ...", said) == SAID
    assert results == ["[(0.1, [1, 2], 2), (0.1, [1, 2], 2)]", "(0.1, [1, 2], 2)"]


EDITED = """
text = Path("config.py").read_text()
Path("config.py").write_text("# a line more moves all the others\\n" + text)
print(spawn(config.train, nprocs=2)[0])
Path("config.py").write_text(text.replace("return 2", "return 200"))
print(spawn(config.train, nprocs=2)[0])
"""


def test_a_module_that_was_edited_is_said_to_be_another_text(tmp_path):
    first, said, second = lines_of(EDITED, tmp_path)
    assert (first, second) == ("(0.1, [1, 2], 2)", "(0.1, [1, 2], 200)")
    assert re.match(r"config.scale is code (\w+) in the calling process, and code (?!\1)\w+ in workers: workers", said)


def test_installed_modules_are_not_looked_at():
    described = describe_modules()
    assert "faults" in described
    assert described.keys().isdisjoint({"torch", "numpy", "os", "pytest", "unisono", "unisono.launch.spawn"})


class Lazy(dict[str, int]):
    """Importing what it names takes seconds, and fails, as in transformers."""

    def __getattribute__(self, name: str) -> Any:
        raise ImportError("a library that is not installed")


def test_only_plain_data_and_functions_are_described(monkeypatch):
    module = sys.modules[__name__]
    for name, value in {"plain": {"a": [1, (2.5, None)]}, "lazy": Lazy(), "large": [*range(20_000)]}.items():
        monkeypatch.setattr(module, name, value, raising=False)
    described = describe_module(module)
    assert described["plain"] == "{'a': [1, [2.5, None]]}"
    assert described.keys().isdisjoint({"Lazy", "lazy", "large"})
