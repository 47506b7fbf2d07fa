"""The page of errors has a section for each public class of `unisono.errors`, and for no other."""

from __future__ import annotations

import inspect
import re

import pytest
from test_code_blocks import ROOT

from unisono import errors

PAGE = (ROOT / "docs" / "errors.md").read_text()
_PARTS = re.split(r"^### (.*)\n", PAGE, flags=re.MULTILINE)[1:]
SECTIONS = dict(zip(_PARTS[::2], _PARTS[1::2], strict=True))
CLASSES = [name for name, each in vars(errors).items() if inspect.isclass(each) and each.__module__ == errors.__name__]


def test_each_public_class_has_a_section_and_each_section_a_class() -> None:
    assert sorted(SECTIONS) == sorted(name for name in CLASSES if not name.startswith("_"))


@pytest.mark.parametrize("name", SECTIONS)
def test_a_section_says_what_it_means_and_what_to_do(name: str) -> None:
    assert len(re.split(r"\n\n## ", SECTIONS[name])[0].strip()) > 80
    assert name in str(errors.__doc__), "the tree of classes has it, too"
