"""Programs that call torch's collectives on groups of gloo: ranks that stand still in different ones are told apart."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import warm_scripts
from agents import agent, free_port
from faults import SOON_S

from unisono.comm.noted_calls import NotedCall, find_mismatch

PROGRAM = """
import sys, torch, torch.distributed as dist
from faults import Line, Gate
dist.init_process_group("gloo")
rank = dist.get_rank()

def evaluate():
    dist.all_reduce(torch.ones(4))

def save():
    {call}

for _ in range(20):
    dist.all_reduce(torch.ones(3))
evaluate() if rank == 0 else save()
dist.all_reduce(torch.ones(4))
"""


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., tuple[int, str, str]]:
    def run(text: str, *options: str) -> tuple[int, str, str]:
        (tmp_path / "program.py").write_text(text)
        given = "run", "-n", "2", "--backend", "cpu", "--process-group", "gloo", *options, "program.py"
        return warm_scripts.launch(tmp_path, *given)

    return run


@pytest.mark.parametrize(
    ("call", "action"),
    [
        ("dist.broadcast(torch.ones(4), 1)", "broadcast(float32 of 4 elements, root 1)"),
        ("dist.all_gather_object([None, None], 5)", "all_gather(int64)"),
    ],
)
def test_calls_that_differ_are_named_with_their_places_at_once(run, call, action):
    began = time.monotonic()
    code, _, errors = run(PROGRAM.format(call=call))
    assert code == 1
    assert "unisono: rank 0 called all_reduce(float32 of 4 elements) in evaluate" in errors
    assert f"while rank 1 called {action} in save" in errors
    assert time.monotonic() - began < SOON_S  # gloo would wait for half an hour


@pytest.mark.slow
def test_calls_that_differ_between_machines_are_named_on_both(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM.format(call="dist.barrier()"))
    command = ["run", "-n", "1", "--backend", "cpu", "--nnodes", "2", "--rdzv-insecure", "--process-group", "gloo"]
    command += ["--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--node-rank"]
    machines = [agent(tmp_path / number, *command, number, str(tmp_path / "program.py")) for number in ("0", "1")]
    with machines[0], machines[1]:
        for code, _, errors in [each.end() for each in machines]:
            assert code == 1
            assert "rank 0 called all_reduce(float32 of 4 elements) in evaluate" in errors
            assert "while rank 1 called barrier() in save" in errors


@pytest.mark.slow
def test_a_rank_that_works_alone_for_long_is_left_alone(run):
    text = "import time, torch, torch.distributed as dist\ndist.init_process_group('gloo')\n"
    text += "for _ in range(3):\n    dist.all_reduce(torch.ones(3))\n"
    # The subject is time: several checks of the ranks' progress, each a second after the last.
    text += "if dist.get_rank() == 0:\n    time.sleep(2.5)\ndist.barrier()\ndist.destroy_process_group()\n"
    # A group of the same name, whose calls are numbered from one again.
    text += "dist.init_process_group('gloo')\ndist.barrier()\n"
    text += "if dist.get_rank() == 1:\n    time.sleep(2.5)\ndist.all_reduce(torch.ones(3))\n"
    code, _, errors = run(text)
    assert code == 0, errors


def test_only_calls_of_one_group_and_number_are_compared():
    def calls(*texts: str, first: int = 1, group: str = "0") -> tuple[NotedCall, ...]:
        return tuple(NotedCall(group, number, text, f"at {text}") for number, text in enumerate(texts, first))

    assert find_mismatch({0: calls("a", "b", "c"), 1: calls("a", "b")}) == ({}, {})
    assert find_mismatch({0: calls("a", "b"), 1: calls("b", "c", first=2)}) == ({}, {})
    assert find_mismatch({0: calls("a"), 1: calls("b", group="1")}) == ({}, {})
    # Of several, the first: what follows it differs because of it.
    found = find_mismatch({0: calls("a", "b", "c"), 1: calls("a", "c", "d"), 2: calls("a", "b")})
    assert found == ({0: "b", 1: "c", 2: "b"}, {0: "at b", 1: "at c", 2: "at b"})


LAST = """
import torch, torch.distributed as dist
from unisono.comm.noted_calls import last_calls
dist.init_process_group("gloo")
for _ in range(40):
    dist.all_reduce(torch.ones(3))
noted = last_calls()
first = noted[0].number  # when the group began, ranks have made themselves known to one another
assert first > 24, noted
assert [each.number for each in noted] == list(range(first, first + 16)), noted
assert noted[0].action == "called all_reduce(float32 of 3 elements)", noted
assert noted[0].place == f'all_reduce() in <module> ("{__file__}", line 6)', noted
dist.destroy_process_group()
assert not last_calls()
dist.init_process_group("gloo")
dist.barrier()
assert last_calls()[-1].number < 16, last_calls()
assert last_calls()[-1].action == "called barrier()", last_calls()
"""


def test_the_last_calls_are_kept_but_not_those_of_an_ended_group(run):
    code, _, errors = run(LAST)
    assert code == 0, errors
