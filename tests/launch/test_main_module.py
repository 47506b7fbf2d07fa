"""Functions and classes of `__main__`: of a file, of `python -c`, of standard input, none with a main guard."""

from __future__ import annotations

from pathlib import Path

import pytest
from faults import Script

SCRIPT = """
import io, os, pickle, sys, time
import torch
from unisono.launch.spawn import spawn
from unisono.outcome import RemoteTraceback

OFFSET = 1

class Box:
    class Lid:
        pass
    def __init__(self, value):
        self.value = value
        self.lid = Box.Lid()
    def shifted(self):
        return self.value + OFFSET

class Awkward(Exception):
    def __init__(self, *, code):
        super().__init__()
        self.code = code

def work(index, box):
    assert isinstance(box, Box)
    torch.save(Box(0), io.BytesIO())  # plain pickle finds the class too
    return Box(index)

def fail(index):
    raise Awkward(code=index + 7)

methods = dict(vars(Box))
results = spawn(work, args=(Box(5),), nprocs=2)
assert all(type(result) is Box and type(result.lid) is Box.Lid for result in results), results
assert {name: vars(Box)[name] for name in methods} == methods, "the caller's class was rewritten"
OFFSET = 100
assert [result.shifted() for result in results] == [100, 101]

try:
    spawn(fail, nprocs=2)
except Awkward as error:
    assert error.code in (7, 8)
    assert type(error.__cause__) is RemoteTraceback
    assert "raise Awkward(code=index + 7)" in str(error.__cause__) or not FILE, error.__cause__
    assert "in fail" in str(error.__cause__)
else:
    raise AssertionError("nothing was raised")
assert os.listdir(os.environ["TMPDIR"]) == [], os.listdir(os.environ["TMPDIR"])
print("done")
"""


@pytest.mark.parametrize("way", ["file", "command", "stdin"])
def test_what_main_defines_goes_to_the_workers_and_comes_back_as_itself(tmp_path, way):
    with Script(f"FILE = {way == 'file'}\n" + SCRIPT, tmp_path, way) as script:
        assert script.end() == (0, "done\n", "")
        assert script.survivors() == []


IMPORTED = """
from unisono.launch.spawn import spawn
def work(index):
    return index
spawn(work, nprocs=2)
"""


def test_a_spawn_at_the_import_of_its_own_module_is_an_error_and_no_endless_tree(tmp_path):
    (tmp_path / "imported.py").write_text(IMPORTED)
    with Script("import imported", tmp_path) as script:
        code, _, errors = script.end()
        assert code == 1
        assert "unisono.errors.UnpicklableError: fn or its arguments cannot be rebuilt in the worker" in errors
        assert "put that call under `if __name__ == " in errors
        assert script.survivors() == []


BOMB = """
from unisono import spawn
import worker_module
spawn(worker_module.work, nprocs=2)
"""


def test_a_module_that_spawns_when_a_worker_imports_it_later_comes_to_an_end(tmp_path):
    (tmp_path / "worker_module.py").write_text("def work(index):\n    import script\n")
    with Script(BOMB, tmp_path, PYTHONPATH=f"{tmp_path}:{Path(__file__).parents[1]}") as script:
        code, _, errors = script.end(90)
        assert code == 1
        assert "spawn is called in a worker of a worker, 3 deep" in errors
        assert script.survivors() == []
