"""The reference of the site has every public name, and says what each of their arguments is."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import unisono

sys.path.insert(0, str(Path(__file__).parent.parent / "docs" / "generate"))
import reference

PAGES = reference.pages()
ANCHORS = {anchor for page in PAGES.values() for anchor in re.findall(r"^#+ .* \{ #(.*) \}$", page, re.MULTILINE)}

CLEAR = {"args", "kwargs", "options", "values", "world", "self", "cls"}
"""Arguments that mean the same everywhere: `world=None` takes the current one."""


def described_callables() -> Iterator[tuple[str, Any]]:
    """Each public function, class and method, by its whole name."""
    public = [(f"unisono.{name}", getattr(unisono, name)) for name in unisono.__all__]
    for module in reference.modules():
        public += [(f"{module.__name__}.{name}", getattr(module, name)) for name in reference.names_of(module)]
    for name, value in public:
        yield name, value
        if inspect.isclass(value):
            yield from ((f"{name}.{each}", member) for each, member in reference.members_of(value))


CALLABLES = dict(described_callables())


def test_every_public_name_is_on_one_page() -> None:
    placed = [name for names in reference.GROUPS.values() for name in names]
    assert sorted(placed) == unisono.__all__


@pytest.mark.parametrize("name", CALLABLES)
def test_every_name_and_method_has_a_heading_and_a_text(name: str) -> None:
    assert name in ANCHORS
    (page,) = (page for page in PAGES.values() if f"{{ #{name} }}" in page)
    text = page.partition(f"{{ #{name} }}")[2].partition("\n#")[0]
    assert re.sub(r"```.*?```|\*property\*|\s", "", text, flags=re.DOTALL), "a docstring"


@pytest.mark.parametrize("name", reference.TASKS)
def test_a_table_by_task_has_each_member_once_and_comes_first(name: str) -> None:
    named = [each for names in reference.TASKS[name].values() for each in names]
    assert sorted(named) == sorted(each for each, _ in reference.members_of(CALLABLES[name]))
    (page,) = (page for page in PAGES.values() if f"{{ #{name} }}" in page)
    table, _, rest = page.partition(f"{{ #{name} }}\n\n")[2].partition("\n\n")
    assert re.findall(r"\]\(#([\w.]+)\)", table) == [f"{name}.{each}" for each in named]
    assert rest.startswith("```python\nclass ")


def test_the_modules_with_public_names_of_their_own_have_some() -> None:
    assert all(reference.names_of(module) for module in reference.modules())


@pytest.mark.parametrize("name", [name for name, value in CALLABLES.items() if not isinstance(value, property)])
def test_every_argument_is_described(name: str) -> None:
    value = CALLABLES[name]
    if inspect.isclass(value) and (issubclass(value, BaseException) or value.__name__ in reference.FROM_ELSEWHERE):
        return  # nobody makes one but this package
    assert undescribed(value) == []


def undescribed(value: Any) -> list[str]:
    """Arguments with neither an entry nor a word in the text; those of a class may be among its attributes.

    Of a single argument the text speaks.
    """
    function = reference._function(value)
    of = value.__mro__ if inspect.isclass(value) else [function]  # fields of a base class have their entries there
    docs = [reference._doc_of(each) or "" for each in of if each.__module__.startswith(("unisono", __name__))]
    found = [reference.parse(doc) for doc in docs]
    known = CLEAR.union(*(each.described(section) for each in found for section in ("Args", "Attributes")))
    known |= set(re.findall(r"`(\w+)", " ".join(docs)))
    own = [name for name in inspect.signature(function).parameters if name not in CLEAR]
    if len(own) < 2 or "others" in known:  # which are as for another class
        return []
    return [name for name in own if name not in known]


def test_an_argument_without_a_description_is_found() -> None:
    def function(given: int, forgotten: int) -> None:
        """Does something.

        Args:
            given: a number.
        """

    assert undescribed(function) == ["forgotten"]


def test_links_lead_to_names_that_are_there() -> None:
    for page in PAGES.values():
        for file, anchor in re.findall(r"\]\(([\w.]*\.md)#([\w.]+)\)", page):
            assert anchor in ANCHORS
            assert f"{{ #{anchor} }}" in PAGES[file]
