"""Functions and classes of `__main__`: of a file, of `python -c`, of standard input, none with a main guard."""

from __future__ import annotations

import os

import pytest
from faults import Script

from unisono.errors import UnisonoError
from unisono.launch.spawn import spawn

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
def test_loader_workers_that_are_fresh_interpreters_find_what_the_script_defines(tmp_path, method):
    with Script(FRESH.replace("METHOD", repr(method)).replace("GUARD", "False"), tmp_path, "file") as script:
        assert script.end() == (0, "[[[0], [1], [4]], [[0], [1], [4]]]\n", "")
        assert script.survivors() == []


@pytest.mark.slow
def test_they_do_not_run_a_spawn_that_no_main_guard_protects(tmp_path):
    with Script(FRESH.replace("METHOD", "'forkserver'").replace("GUARD", "True"), tmp_path, "file") as script:
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
def test_a_spawn_at_the_import_of_its_own_module_is_an_error_and_no_endless_tree(tmp_path):
    (tmp_path / "imported.py").write_text(IMPORTED)
    with Script("import imported", tmp_path, "file") as script:
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
