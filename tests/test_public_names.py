"""The names of the package: what is promised is there, in one place, and costs nothing before it is used."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

import unisono
from unisono import building_blocks


def type_checkers_imports(module: ModuleType = unisono) -> dict[str, str]:
    """Each name that a type checker sees, and the module that it comes from; "unisono" for the modules themselves."""
    tree = ast.parse(Path(module.__file__).read_text())
    blocks = [node.body for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    imports = [node for body in blocks for node in body]
    assert imports
    found = {}
    for node in imports:
        assert isinstance(node, ast.ImportFrom)
        for alias in node.names:
            assert alias.asname == alias.name, "a re-export is written as such"
            found[alias.name] = node.module
    return found


HOMES = type_checkers_imports()
MODULES = [name for name, home in HOMES.items() if home == "unisono"]


def test_the_names_are_sorted_and_single():
    assert unisono.__all__ == sorted(set(unisono.__all__))


def test_a_type_checker_sees_the_same_names():
    assert sorted(HOMES.keys() - MODULES) == unisono.__all__


@pytest.mark.parametrize("name", unisono.__all__)
def test_a_public_name_is_the_object_its_home_module_defines(name):
    value = getattr(unisono, name)
    assert value is getattr(import_module(HOMES[name]), name)
    assert value.__module__ == HOMES[name], "its home is the module that defines it"
    assert value.__doc__


def test_a_public_module_is_an_attribute_of_the_package():
    script = f"""
import os, sys, torch, unisono

for name in {MODULES}:
    if not (pid := os.fork()):  # since one module imports others
        module = getattr(unisono, name)
        assert module is sys.modules["unisono." + name] and module.__doc__ and name in dir(unisono)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0, name
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_a_star_import_brings_exactly_these_names():
    scope: dict[str, object] = {}
    exec("from unisono import *", scope)
    assert sorted(scope.keys() - {"__builtins__"}) == unisono.__all__


def test_dir_shows_them_before_they_are_used():
    script = "import unisono; assert set(unisono.__all__) <= set(dir(unisono))"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'unisono' has no attribute 'allreduce'"):
        unisono.allreduce  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'allreduce'"):
        exec("from unisono import allreduce")


def test_importing_the_package_loads_no_torch_and_only_the_zygote_starter():
    script = """
import sys
import unisono
heavy = {"torch", "numpy", "psutil", "cloudpickle", "rich", "matplotlib"} & set(sys.modules)
own = {name.removeprefix("unisono.launch") for name in sys.modules if name.startswith("unisono.")}
assert not heavy and own == {"", ".starting", ".starting.warm_at_import", ".starting.marks"}, (heavy, own)
unisono.errors.BusyError
assert "torch" not in sys.modules, "the errors are cheap too"
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_a_misspelt_name_suggests_the_closest_and_modules_still_import():
    script = """
from unisono import loading
for name in ("Acelerator", "spwan", "nothing_like_it"):
    try:
        exec(f"from unisono import {name}")
    except ImportError as error:
        print(error)
import unisono
print(hasattr(unisono, "Acelerator"))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    misspelt, swapped, unknown, has = done.stdout.splitlines()
    assert misspelt == "cannot import name 'Acelerator' from 'unisono'; did you mean 'Accelerator'?"
    assert swapped == "cannot import name 'spwan' from 'unisono'; did you mean 'spawn'?"
    assert "'nothing_like_it'" in unknown
    assert "did you mean" not in unknown
    assert has == "False"


# The building blocks.

BLOCKS = type_checkers_imports(building_blocks)


def test_a_type_checker_sees_the_same_building_blocks():
    assert sorted(BLOCKS) == building_blocks.__all__


@pytest.mark.parametrize("name", building_blocks.__all__)
def test_a_building_block_is_the_object_of_its_home(name):
    assert getattr(building_blocks, name) is getattr(import_module(BLOCKS[name]), name)


def test_each_building_block_has_a_line_that_says_what_it_does():
    lines = re.findall(r"^ {4}(\S.*?)  +\S", building_blocks.__doc__, re.MULTILINE)
    assert sorted(name for line in lines for name in line.split(", ")) == building_blocks.__all__


def test_a_building_block_is_imported_when_it_is_first_used():
    script = """
import sys
from unisono import building_blocks
assert "torch" not in sys.modules and "check_choice" in dir(building_blocks)
building_blocks.check_choice
assert "torch" not in sys.modules and "check_choice" in vars(building_blocks)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_an_unknown_building_block_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"module 'unisono\.building_blocks' has no attribute 'tree_mop'"):
        building_blocks.tree_mop  # noqa: B018
