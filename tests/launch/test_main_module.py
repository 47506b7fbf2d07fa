"""What goes to the workers: of `__main__`, of a file, `-c`, standard input or a notebook; modules by name."""

from __future__ import annotations

import os
import threading
import types

import pytest
import torch
import torch.backends.mkldnn
from faults import Script
from torch.backends import cudnn

from unisono.comm.pickling import describe_unpicklable
from unisono.errors import UnisonoError
from unisono.launch.spawn import spawn

SCRIPT = """
import io, os, pickle, sys, time
import torch
from unisono.launch.spawn import spawn
from unisono.comm.outcome import RemoteTraceback

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


@pytest.mark.slow
@pytest.mark.parametrize("way", ["warm", "command", "stdin"])
def test_what_main_defines_goes_to_the_workers_and_comes_back_as_itself(tmp_path, way):
    with Script(f"FILE = {way == 'warm'}\n" + SCRIPT, tmp_path, way) as script:
        assert script.end() == (0, "done\n", "")
        assert script.survivors() == []


FRESH = """
import sys, torch
from torch.utils.data import DataLoader, Dataset
from unisono.launch.spawn import spawn

class Squares(Dataset):
    def __len__(self):
        return 3
    def __getitem__(self, index):
        return index * index

def collate(rows):
    return rows

def work(index):
    loader = DataLoader(Squares(), num_workers=1, multiprocessing_context=METHOD, collate_fn=collate)
    return list(loader)

if GUARD or __name__ == "__main__":
    print(spawn(work, nprocs=2))
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_fresh_loader_workers_find_what_the_script_defines(tmp_path, method):
    with Script(FRESH.replace("METHOD", repr(method)).replace("GUARD", "False"), tmp_path) as script:
        assert script.end() == (0, "[[[0], [1], [4]], [[0], [1], [4]]]\n", "")
        assert script.survivors() == []


@pytest.mark.slow
def test_they_do_not_run_a_spawn_that_no_main_guard_protects(tmp_path):
    with Script(FRESH.replace("METHOD", "'forkserver'").replace("GUARD", "True"), tmp_path) as script:
        code, _, errors = script.end()
        assert code == 1
        assert "put that call under `if __name__ == " in errors
        assert script.survivors() == []


IMPORTED = """
from unisono.launch.spawn import spawn
def work(index):
    return index
spawn(work, nprocs=2)
"""


@pytest.mark.slow
def test_a_spawn_at_its_modules_own_import_is_an_error_not_an_endless_tree(tmp_path):
    (tmp_path / "imported.py").write_text(IMPORTED)
    with Script("import imported  # which calls spawn", tmp_path) as script:
        code, _, errors = script.end()
        assert code == 1
        assert "unisono.errors.UnpicklableError: fn or its arguments cannot be rebuilt in the worker" in errors
        assert "put that call under `if __name__ == " in errors
        assert script.survivors() == []


@pytest.mark.slow
def test_groups_in_groups_come_to_an_end(tmp_path, monkeypatch):
    """Where a module that a worker imports later spawns at its top level, each group would start further ones."""

    def depth(index):
        return int(os.path.basename(os.environ["UNISONO_RENDEZVOUS"]).split("-")[1])

    assert spawn(lambda index: spawn(depth, nprocs=2), nprocs=2) == [[2, 2], [2, 2]]
    monkeypatch.setenv("UNISONO_RENDEZVOUS", str(tmp_path / "unisono-3-abc"))
    with pytest.raises(UnisonoError, match=r"in a worker of a worker, 3 deep; .* put that call under"):
        spawn(lambda index: None, nprocs=2)


ATEN = torch.ops.aten
ADD, ADD_TENSOR = torch.ops.aten.add, torch.ops.aten.add.Tensor
LOCK = threading.Lock()


def test_modules_that_are_objects_of_other_classes_travel_by_name():
    def work(index):
        two = ATEN.add(torch.ones(1), 1), ADD(torch.ones(1), 1), ADD_TENSOR(torch.ones(1), torch.ones(1))
        named = torch.backends.mkldnn, torch.backends.mps, torch.ops.aten, torch.classes
        cudnn.benchmark = torch.backends.cudnn.benchmark
        return [each.item() for each in two], cudnn, named

    [(twos, first, rest), _] = spawn(work, nprocs=2)
    assert twos == [2.0] * 3
    assert first is cudnn
    assert rest == (torch.backends.mkldnn, torch.backends.mps, torch.ops.aten, torch.classes)


def by_value(code):
    """The functions of some code, as those of a notebook: nobody can import them."""
    space: dict[str, object] = {"__name__": "__main__", "LOCK": LOCK}
    exec(code, space)
    return space


OBSTACLES = {
    "a global of a function that is called": (
        "def inner():\n  return LOCK\ndef work(i):\n  return inner()",
        "; the function 'inner' uses the global 'LOCK', a lock",
    ),
    "a method": (
        "class Box:\n  def use(self):\n    return LOCK\ndef work(i):\n  return Box()",
        "; the function 'Box.use' uses the global 'LOCK', a lock",
    ),
    "a variable around it": (
        "def make():\n  held = LOCK\n  def inner(i):\n    return held\n  return inner\nwork = make()",
        "; the function 'make.<locals>.inner' uses the variable 'held' of the function around it, a lock",
    ),
    "an attribute of a global": (
        "class Box: pass\nbox = Box()\nbox.lock = LOCK\ndef work(i):\n  return box",
        "; the Box has the attribute 'lock', a lock",
    ),
    "an element": ("work = [1, {'held': LOCK}]", "; it holds one, a lock"),
}


@pytest.mark.parametrize("name", OBSTACLES)
def test_what_cannot_travel_is_named_with_what_uses_it(name):
    code, described = OBSTACLES[name]
    assert describe_unpicklable(by_value(code)["work"]) == described


CELL = '''
import linecache, sys
from unisono.launch.spawn import spawn

cell = """
def fail(index):
    raise ValueError(index)  # in the cell

def source(index):
    import inspect
    return inspect.getsource(fail)
"""
file = "/tmp/ipykernel_1/2.py"
linecache.cache[file] = (len(cell), None, cell.splitlines(keepends=True), file)
exec(compile(cell, file, "exec"))
try:
    spawn(fail, nprocs=2)
except ValueError as error:
    assert "raise ValueError(index)  # in the cell" in str(error.__cause__), error.__cause__
else:
    raise AssertionError("nothing was raised")
assert spawn(source, nprocs=2) == ["def fail(index):\\n    raise ValueError(index)  # in the cell\\n"] * 2
print("done")
'''


def test_the_lines_of_a_cell_are_in_the_traceback_of_a_worker(tmp_path):
    with Script(CELL, tmp_path) as script:
        assert script.end() == (0, "done\n", "")


def test_all_code_that_is_sent_keeps_its_file():
    def files(function):
        inner = [each for each in function.__code__.co_consts if isinstance(each, types.CodeType)]
        return {code.co_filename for code in (function.__code__, *inner)}

    def work(index):
        class Box:
            def open(self):
                return [each + 1 for each in (lambda: (index,))()]

        return files(work), files(Box.open), Box, lambda: lambda: index

    for of_work, of_method, box, function in spawn(work, nprocs=2):
        assert of_work == of_method == files(box.open) == files(function) == {__file__}


IN_A_POOL = """
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

from unisono import spawn

OFFSET = 10


class Point:
    def __init__(self, x):
        self.x = x


def shifted(index):
    return OFFSET + index


def work(index):
    return Point(shifted(index))


def call(how):
    points = spawn(work, nprocs=2, backend="cpu", start_method=how)
    assert all(type(point) is Point for point in points)
    return points


if __name__ == "__main__":
    for context, how in (("spawn", "zygote"), ("forkserver", "spawn")):
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context(context)) as pool:
            print([point.x for point in pool.submit(call, how).result()])
"""


@pytest.mark.slow
def test_a_process_of_multiprocessing_is_a_caller_like_the_script(tmp_path):
    with Script(IN_A_POOL, tmp_path, "file") as script:
        code, output, errors = script.end()
        assert (code, output) == (0, "[10, 11]\n[10, 11]\n"), errors
