"""What goes to the workers with `fn`: modules by name, the globals of `__main__`, the lines of a notebook's cells."""

from __future__ import annotations

import threading
import types

import pytest
import torch
import torch.backends.mkldnn
from faults import Script
from torch.backends import cudnn

from unisono.launch.spawn import spawn
from unisono.pickling import describe_unpicklable

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


@pytest.mark.parametrize(
    ("code", "met"),
    [
        ("def inner():\n  return LOCK\ndef work(i):\n  return inner()", "work, inner"),
        ("class Box:\n  def use(self):\n    return LOCK\ndef work(i):\n  return Box()", "work, Box, Box.use"),
        ("class Box: pass\nbox = Box()\nbox.lock = LOCK\ndef work(i):\n  return box", "work, Box"),
    ],
)
def test_what_cannot_travel_is_named_with_what_led_to_it(code, met):
    assert describe_unpicklable(by_value(code)["work"]) == f"; pickling came to it by {met}"


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
