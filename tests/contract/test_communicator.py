"""The law of `protocols.Communicator`, sentence by sentence, against every implementation.

A rank's part of a test returns plain data (numbers, texts), and the test compares it with an oracle in plain Python.
"""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from faults import SOON_S
from modes import FAMILY, HOST

from unisono.protocols import Communicator

pytestmark = pytest.mark.every_mode

OPS = ("sum", "mean", "min", "max", "product")
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8)
REDUCIBLE = (*FLOATS, *INTEGERS, torch.int8, torch.bool)
FOLDS: dict[str, Callable[[list[Any]], Any]] = {
    "sum": sum,
    "mean": lambda column: sum(column) / len(column),
    "min": min,
    "max": max,
    "product": math.prod,
}


def ops_of(dtype: torch.dtype) -> tuple[str, ...]:
    if dtype == torch.bool:
        return ("min", "max")
    return OPS if dtype in FLOATS else tuple(op for op in OPS if op != "mean")


def numbers(rank: int) -> list[int]:
    """What a rank brings: small whole numbers, whose folds every type holds exactly."""
    return [rank + 1, 3 - rank % 2, 0, 2, 1, rank % 2, 1, rank]


def fold(op: str, size: int, dtype: torch.dtype) -> list[Any]:
    """The oracle of a reduction of `numbers`, in plain Python."""
    kind = bool if dtype == torch.bool else int
    columns = zip(*([kind(number) for number in numbers(rank)] for rank in range(size)), strict=True)
    return [FOLDS[op](list(column)) for column in columns]


class Told(NamedTuple):
    """An error as its reader sees it."""

    type: str
    text: str
    cause_type: str = ""
    cause_text: str = ""


def told(call: Callable[[], Any]) -> Told | None:
    """What `call` raises, or None."""
    try:
        call()
    except Exception as error:
        cause = error.__cause__
        if cause is None:
            return Told(type(error).__name__, str(error))
        return Told(type(error).__name__, str(error), type(cause).__name__, str(cause))
    return None


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def calls_of(comm: Communicator) -> dict[str, Callable[[], Any]]:
    """Every collective, on small arguments, so that each can be asked to wait or to refuse."""
    tensor = torch.ones(4 * comm.size)
    return {
        "all_reduce": lambda: comm.all_reduce(tensor),
        "all_gather": lambda: comm.all_gather(tensor),
        "reduce_scatter": lambda: comm.reduce_scatter(tensor),
        "all_to_all": lambda: comm.all_to_all(tensor),
        "broadcast": lambda: comm.broadcast(tensor),
        "all_gather_object": lambda: comm.all_gather_object("mine"),
        "broadcast_object": lambda: comm.broadcast_object("mine"),
        "barrier": comm.barrier,
    }


COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_gather_object", "broadcast_object")
COLLECTIVES += ("all_to_all", "barrier")


# What whole worlds do. Each law is the part of a rank, and what all ranks return by the oracle; one world carries out
# all of them.


Law = Callable[[int], tuple[Callable[[Communicator], Any], list[Any]]]
LAWS: dict[str, Law] = {}


def law(function: Law) -> Law:
    LAWS[function.__name__] = function
    return function


def test_a_whole_world_keeps_each_law(ranks):
    def keep(comm):
        return {name: each(comm.size)[0](comm) for name, each in LAWS.items()}

    found = ranks.run(keep)
    for name, each in LAWS.items():
        assert [results[name] for results in found] == each(ranks.size)[1], name


@law
def it_is_a_communicator_that_knows_its_rank_and_size(size):
    return lambda comm: (isinstance(comm, Communicator), comm.rank, comm.size), [(True, r, size) for r in range(size)]


# Reductions.


REDUCTIONS = [(dtype, op) for dtype in REDUCIBLE for op in ops_of(dtype)]


@law
def all_reduce_folds_all_ranks_whatever_the_type(size):
    def reduce(comm):
        return [comm.all_reduce(torch.tensor(numbers(comm.rank)).to(dtype), op).tolist() for dtype, op in REDUCTIONS]

    expected = [fold(op, size, dtype) for dtype, op in REDUCTIONS]
    return reduce, [expected] * size


@law
def reduce_scatter_gives_each_rank_its_part_of_the_fold_for_any_type(size):
    def reduce(comm):
        found = []
        for dtype, op in REDUCTIONS:
            part = comm.reduce_scatter(torch.tensor(numbers(comm.rank)).to(dtype), op)
            found.append((part.dtype == dtype, part.tolist()))
        return found

    count = len(numbers(0)) // size
    parts = [slice(rank * count, (rank + 1) * count) for rank in range(size)]
    return reduce, [[(True, fold(op, size, dtype)[part]) for dtype, op in REDUCTIONS] for part in parts]


@law
def all_to_all_gives_each_rank_what_all_have_for_it_whatever_the_type(size):
    # More than a block of shared memory, and rows of several numbers.
    lengths, dtypes = (1, 3, 2**19), (torch.float32, torch.bfloat16, torch.int16, torch.bool, torch.complex64)

    def exchange(comm):
        found = []
        for length, dtype in [(each, torch.float64) for each in lengths] + [(2, each) for each in dtypes]:
            brought = torch.full((comm.size * length, 2), float(comm.rank)).to(dtype)
            brought[:, 1] = torch.arange(comm.size).repeat_interleave(length).to(dtype)
            parts = comm.all_to_all(brought.t().contiguous().t())  # a view with strides
            wanted = [torch.tensor([rank, comm.rank]).to(dtype).expand(length, 2) for rank in range(comm.size)]
            found.append([torch.equal(part, each) for part, each in zip(parts, wanted, strict=True)])
            parts[0].zero_()  # a copy
        return found

    return exchange, [[[True] * size] * (len(lengths) + len(dtypes))] * size


@law
def all_reduce_works_in_place_and_returns_its_tensor(size):
    def reduce(comm):
        tensor = torch.full((3,), comm.rank + 1.0)
        alias = tensor.view(3)
        return comm.all_reduce(tensor) is tensor, alias.tolist()

    return reduce, [(True, [float(sum(range(1, size + 1)))] * 3)] * size


@law
def a_strided_view_is_reduced_in_place_and_what_lies_between_stays(size):
    def reduce(comm):
        found = []
        for dtype in (torch.float32, torch.int16):
            whole = torch.arange(12).reshape(3, 4).to(dtype)
            column = whole[:, 1::2].t()
            found.append((comm.all_reduce(column) is column, whole.tolist()))
        return found

    expected = [[number * (size if number % 2 else 1) for number in range(row, row + 4)] for row in (0, 4, 8)]
    return reduce, [[(True, expected)] * 2] * size


@law
def an_empty_tensor_passes_through_every_collective(size):
    shapes = [(0,), (0, 3), (4, 0)]

    def pass_through(comm):
        return [
            (
                comm.all_reduce(tensor).shape,
                [each.shape for each in comm.all_gather(tensor)],
                comm.broadcast(tensor).shape,
                comm.reduce_scatter(tensor).shape,
                [each.shape for each in comm.all_to_all(tensor)],
            )
            for tensor in map(torch.empty, shapes)
        ]

    parts = [(shape[0] // size, *shape[1:]) for shape in shapes]
    oracle = [(shape, [shape] * size, shape, part, [part] * size) for shape, part in zip(shapes, parts, strict=True)]
    return pass_through, [oracle] * size


@law
def a_tensor_longer_than_any_transport_buffer_is_reduced(size):
    count = 1 << 20

    def reduce(comm):
        tensor = comm.all_reduce(torch.arange(count, dtype=torch.float64) + comm.rank)
        return torch.equal(tensor, torch.arange(count).double() * comm.size + sum(range(comm.size)))

    return reduce, [True] * size


@law
def a_leaf_that_requires_grad_is_reduced_and_nothing_is_recorded(size):
    def reduce(comm):
        leaf = torch.nn.Parameter(torch.ones(2))
        comm.all_reduce(leaf)
        comm.broadcast(leaf)
        part = comm.reduce_scatter(torch.nn.Parameter(torch.ones(comm.size)))
        gathered = comm.all_gather(leaf)
        return leaf.tolist(), leaf.is_leaf, leaf.requires_grad, part.requires_grad, gathered[0].requires_grad

    return reduce, [([size] * 2, True, True, False, False)] * size


@law
def reduce_scatter_leaves_its_argument_alone(size):
    def reduce(comm):
        brought = torch.arange(float(comm.size))
        part = comm.reduce_scatter(brought)
        part.add_(100)
        return brought.tolist()

    return reduce, [list(range(size))] * size


@law
def main_memory_tensors_are_reduced_and_moved_there_on_any_device(size):
    def body(comm: Communicator) -> tuple[list[Any], set[torch.device]]:
        own = torch.tensor([comm.rank, 1], device=HOST)
        results = [comm.all_reduce(own.clone()), comm.reduce_scatter(own.repeat(comm.size))[:1]]
        assert {each.device for each in comm.all_to_all(own.repeat(comm.size))} == {HOST}
        results += [comm.broadcast(own.clone(), comm.size - 1), *comm.all_gather(own)]
        return [each.tolist() for each in results], {each.device for each in results}

    total = sum(range(size))
    return body, [([[total, size], [total], [size - 1, 1], *([rank, 1] for rank in range(size))], {HOST})] * size


# Moving tensors.


MOVABLE = (*REDUCIBLE, torch.complex64, torch.uint16, *([] if FAMILY == "xla" else [torch.float8_e4m3fn]))


@law
def all_gather_returns_every_tensor_in_rank_order_whatever_its_type(size):
    def gather(comm):
        brought = {dtype: torch.tensor([[comm.rank, 1], [0, 2]]).to(dtype) for dtype in MOVABLE}
        gathered = {dtype: comm.all_gather(tensor) for dtype, tensor in brought.items()}
        return {
            str(dtype): [(each.dtype == dtype, each.real.float().tolist()) for each in gathered[dtype]]
            for dtype in brought
        }

    def expected(dtype, rank):
        number = float(bool(rank)) if dtype == torch.bool else float(rank)
        return True, [[number, 1.0], [0.0, 1.0 if dtype == torch.bool else 2.0]]

    oracle = {str(dtype): [expected(dtype, rank) for rank in range(size)] for dtype in MOVABLE}
    return gather, [oracle] * size


@law
def broadcast_overwrites_with_each_roots_tensor_whatever_its_type(size):
    def broadcast(comm):
        found = {}
        for root in range(comm.size):
            for dtype in MOVABLE:
                tensor = torch.tensor([comm.rank + 1, 0]).to(dtype)
                found[root, str(dtype)] = comm.broadcast(tensor, root) is tensor, tensor.real.float().tolist()
        return found

    oracle = {
        (root, str(dtype)): (True, [1.0 if dtype == torch.bool else root + 1.0, 0.0])
        for root in range(size)
        for dtype in MOVABLE
    }
    return broadcast, [oracle] * size


@law
def views_are_moved_as_what_they_show(size):
    def move(comm):
        found = []
        for dtype in (torch.float32, torch.int16, torch.complex64):
            whole = torch.arange(12).reshape(3, 4).to(dtype) * (comm.rank + 1)
            view = whole[:, 1::2].t()
            gathered = [each.real.tolist() for each in comm.all_gather(view)]
            comm.broadcast(view, comm.size - 1)
            found.append((gathered, whole.real.tolist()))
        return found

    shown = [[1, 5, 9], [3, 7, 11]]
    gathered = [[[number * (other + 1) for number in row] for row in shown] for other in range(size)]
    wholes = []
    for rank in range(size):
        factors = [rank + 1, size]  # the even columns stay, the odd ones are the last rank's
        wholes.append([[number * factors[number % 2] for number in range(row, row + 4)] for row in (0, 4, 8)])
    return move, [[(gathered, whole)] * 3 for whole in wholes]


@law
def a_lazily_conjugated_view_is_moved_as_what_it_shows(size):
    def move(comm):
        view = torch.tensor([1 + 2j]).conj()
        return comm.all_gather(view)[0].tolist(), comm.all_reduce(torch.tensor([1 + 2j]).conj()).tolist()

    return move, [([1 - 2j], [(1 - 2j) * size])] * size


@law
def a_tensor_without_dimensions_is_reduced_and_moved(size):
    def move(comm):
        own = torch.tensor(comm.rank)
        found = [*comm.all_gather(own), comm.all_reduce(own.clone(), "max"), comm.broadcast(own.clone(), 0)]
        return [(each.ndim, each.item()) for each in found]

    expected = [(0, number) for number in [*range(size), size - 1, 0]]
    return move, [expected] * size


@law
def gathered_tensors_are_copies_ones_own_included(size):
    def gather(comm):
        brought = torch.full((2,), float(comm.rank))
        gathered = comm.all_gather(brought)
        for each in gathered:
            each.add_(100)
        comm.barrier()  # in threads, a shared tensor would show another rank's addition by now
        return brought.tolist(), [each.tolist() for each in gathered]

    everyone = [[rank + 100.0] * 2 for rank in range(size)]
    return gather, [([float(rank)] * 2, everyone) for rank in range(size)]


@law
def the_bits_of_what_is_moved_stay(size):
    odd = [math.nan, -0.0, math.inf, 5e-324]

    def move(comm):
        tensor = torch.tensor(odd, dtype=torch.float64)
        return bits(comm.all_gather(tensor)[0]), bits(comm.broadcast(tensor.clone()))

    return move, [(bits(torch.tensor(odd, dtype=torch.float64)),) * 2] * size


# Objects.


@law
def objects_are_gathered_in_rank_order(size):
    def gather(comm):
        return comm.all_gather_object({"rank": comm.rank, "length": [0] * comm.rank * 1000})

    everyone = [{"rank": rank, "length": [0] * rank * 1000} for rank in range(size)]
    return gather, [everyone] * size


@law
def each_roots_object_is_broadcast_and_other_arguments_are_ignored(size):
    def broadcast(comm):
        unpicklable = threading.Lock()
        return [
            comm.broadcast_object(("of", root) if comm.rank == root else unpicklable, root) for root in range(comm.size)
        ]

    return broadcast, [[("of", root) for root in range(size)]] * size


@law
def a_received_object_is_a_copy_for_the_root_and_the_sender_too(size):
    def mutate(comm):
        mine = [comm.rank]
        gathered, sent = comm.all_gather_object(mine), comm.broadcast_object(mine, 0)
        for each in (*gathered, sent):
            each.append("changed")
        comm.barrier()
        return mine, gathered, sent

    everyone = [[rank, "changed"] for rank in range(size)]
    return mutate, [([rank], everyone, [0, "changed"]) for rank in range(size)]


@law
def none_and_functions_travel_as_objects(size):
    def send(comm):
        offset = comm.rank
        functions = comm.all_gather_object(lambda number: number + offset)
        return [function(10) for function in functions], comm.broadcast_object(None), comm.all_gather_object(None)

    expected = [10 + rank for rank in range(size)], None, [None] * size
    return send, [expected] * size


# Barriers.


def test_nobody_passes_a_barrier_before_all_have_come(ranks, tmp_path: Path):
    def meet(comm):
        seen = []
        for turn in range(20):
            (tmp_path / f"{turn}-{comm.rank}").touch()
            comm.barrier()
            seen.append(len(list(tmp_path.glob(f"{turn}-*"))))
        return seen

    assert ranks.run(meet) == [[ranks.size] * 20] * ranks.size


# Bits.


def rounding_fold(comm: Communicator, op: str, dtype: torch.dtype) -> tuple[bytes, list[float]]:
    generator = torch.Generator().manual_seed(comm.rank)
    tensor = torch.rand(1003, generator=generator, dtype=torch.float64, device="cpu") + 0.5
    reduced = comm.all_reduce(tensor.to(dtype).to(torch.get_default_device()), op)
    return bits(reduced), reduced.double().tolist()


def test_all_ranks_have_the_same_bits_again_and_close_ones_across_modes(rounding_ranks):
    def reduce(comm):
        return {(op, dtype): rounding_fold(comm, op, dtype) for op in OPS for dtype in FLOATS}

    first, again = rounding_ranks.run(reduce), rounding_ranks.run(reduce)
    assert all(found == first[0] for found in first)
    assert again == first
    for dtype in (torch.float32, torch.float64):
        generators = [torch.Generator().manual_seed(rank) for rank in range(rounding_ranks.size)]
        brought = [torch.rand(1003, generator=each, dtype=torch.float64) + 0.5 for each in generators]
        columns = list(zip(*(each.to(dtype).tolist() for each in brought), strict=True))
        for op in OPS:
            # Each of the at most three operations rounds once, by half a unit in the last place.
            expected = pytest.approx([FOLDS[op](column) for column in columns], rel=4 * torch.finfo(dtype).eps, abs=0)
            assert first[0][op, dtype][1] == expected, (dtype, op)


# Refusals.


def refusals(comm: Communicator) -> dict[str, tuple[Callable[[], Any], str]]:
    """Calls that every mode refuses, and what the refusal says."""
    ones, size = torch.ones(comm.size), comm.size
    bad: Any = [1.0]
    return {
        "the mean of integers": (lambda: comm.all_reduce(ones.long(), "mean"), "'mean' of torch.int64 would round"),
        "their scattered mean": (lambda: comm.reduce_scatter(ones.int(), "mean"), "'mean' of torch.int32 would round"),
        "the sum of bools": (lambda: comm.all_reduce(ones.bool(), "sum"), "'min' (and) or 'max' (or), not 'sum'"),
        "a least complex number": (lambda: comm.all_reduce(ones.to(torch.complex64), "min"), "or 'mean', not 'min'"),
        "a sum of a rare type": (lambda: comm.all_reduce(ones.to(torch.uint16)), "does not support uint16; it reduces"),
        "eight bit floats": (lambda: comm.reduce_scatter(ones.to(torch.float8_e4m3fn)), "not support float8_e4m3fn"),
        "an unknown operation": (lambda: comm.all_reduce(ones, bad), "choose one of sum, mean, min, max, product"),
        "what is no tensor": (lambda: comm.all_reduce(bad), "all_reduce takes a tensor, got a list; all_gather_object"),
        "a gathered list": (lambda: comm.all_gather(bad), "all_gather takes a tensor, got a list"),
        "a broadcast list": (lambda: comm.broadcast(bad), "broadcast takes a tensor, got a list"),
        "a sparse tensor": (lambda: comm.all_reduce(ones.to_sparse()), "takes a dense tensor, got layout torch.sparse"),
        "an expanded tensor": (lambda: comm.all_reduce(torch.ones(1).expand(4)), "memory, so it cannot be written"),
        "an expanded target": (lambda: comm.broadcast(torch.ones(1).expand(4)), "memory, so it cannot be written"),
        "a root that is no rank": (lambda: comm.broadcast(ones, size), f"root={size} is not a rank in a world"),
        "a negative root": (lambda: comm.broadcast_object(None, -1), f"root=-1 is not a rank in a world of {size}"),
        "parts of a number": (lambda: comm.reduce_scatter(torch.tensor(1.0)), f"pad dim 0 to a multiple of {size}"),
        "parts of unequal sizes": (lambda: comm.all_to_all(torch.ones(())), f"pad dim 0 to a multiple of {size}"),
        "unequal parts": (lambda: comm.reduce_scatter(torch.ones(size + 1, 2)), f"is [{size + 1}, 2]; pad dim"),
    }


LEFT_OUT = {
    "xla": ("a sparse tensor", "eight bit floats", "an expanded tensor", "an expanded target"),
    "toy": ("a sparse tensor",),
}
"""Families have no sparse tensors or no eight bit floats, or say of no tensor that it is an expanded one."""


def test_what_no_mode_can_do_is_refused_alike_and_leaves_the_world_whole(ranks):
    # One rank alone has nothing that could not be cut into equal parts.
    left_out = {*LEFT_OUT.get(FAMILY, ()), *(["unequal parts"] if ranks.size == 1 else [])}

    def be_refused(comm):
        calls = {name: each for name, each in refusals(comm).items() if name not in left_out}
        texts = {name: (told(call), words) for name, (call, words) in calls.items()}
        return texts, comm.all_reduce(torch.ones(1)).item()

    for texts, total in ranks.run(be_refused):
        for name, (refusal, words) in texts.items():
            assert refusal is not None, name
            assert refusal.type in ("TypeError", "ValueError"), name
            assert words in refusal.text, name
        assert total == ranks.size


@law
def an_object_that_cannot_be_pickled_is_refused_before_anyone_is_met(size):
    def be_refused(comm):
        error = told(lambda: comm.all_gather_object(threading.Lock()))
        return error is not None and "cannot pickle" in error.text, comm.all_gather_object(comm.rank)

    return be_refused, [(True, list(range(size)))] * size


# Ranks that lose step.


MISMATCHES: dict[str, tuple[Callable[[Communicator], Any], Callable[[Communicator], Any], str, str]] = {
    "another collective": (
        lambda comm: comm.all_reduce(torch.ones(2)),
        lambda comm: comm.barrier(),
        "all_reduce(float32[2], 'sum')",
        "barrier()",
    ),
    "another shape": (
        lambda comm: comm.all_reduce(torch.ones(2, 3)),
        lambda comm: comm.all_reduce(torch.ones(3, 2)),
        "all_reduce(float32[2, 3], 'sum')",
        "all_reduce(float32[3, 2], 'sum')",
    ),
    "another type": (
        lambda comm: comm.all_gather(torch.ones(2)),
        lambda comm: comm.all_gather(torch.ones(2).long()),
        "all_gather(float32[2])",
        "all_gather(int64[2])",
    ),
    "another operation": (
        lambda comm: comm.reduce_scatter(torch.ones(4), "sum"),
        lambda comm: comm.reduce_scatter(torch.ones(4), "max"),
        "reduce_scatter(float32[4], 'sum')",
        "reduce_scatter(float32[4], 'max')",
    ),
    "another root": (
        lambda comm: comm.broadcast(torch.ones(()), 0),
        lambda comm: comm.broadcast(torch.ones(()), 1),
        "broadcast(float32[], 0)",
        "broadcast(float32[], 1)",
    ),
    "objects and tensors": (
        lambda comm: comm.all_gather_object("a"),
        lambda comm: comm.all_gather(torch.ones(1)),
        "all_gather_object()",
        "all_gather(float32[1])",
    ),
}


RULE = "every rank must call the same collectives in the same order with the same shapes and types"


def each_with(names, **more):
    """Each of these with two threads, and some with other peers, which cost seconds."""
    found = [("threads-2", name) for name in names]
    found += [("threads-4", more["threads"]), *(("processes-2", name) for name in more["processes"])]
    found.append(pytest.param("accelerators-2", more["accelerators"], marks=pytest.mark.slow))
    return pytest.mark.parametrize(("peers", "name"), found, indirect=["peers"])


@each_with(
    MISMATCHES,
    threads="another collective",
    processes=["another collective", "another root", "objects and tensors"],
    accelerators="another type",
)
def test_a_mismatch_names_all_ranks_by_their_calls_and_breaks_the_world(peers, name):
    of_most, of_the_last, call_of_most, call_of_the_last = MISMATCHES[name]

    def lose_step(comm):
        comm.barrier()
        first = told(lambda: (of_the_last if comm.rank == comm.size - 1 else of_most)(comm))
        return first, told(comm.barrier)

    found = peers.run(lose_step)
    mismatches = [first for first, _ in found if first.type == "CollectiveMismatchError"]
    assert len(mismatches) >= (1 if peers.mode == "processes" else peers.size)
    for first in mismatches:
        assert RULE in first.text
        place = rf'in <lambda> \("{re.escape(__file__)}", line \d+\)'
        most, last = (f" called {re.escape(call)} {place}" for call in (call_of_most, call_of_the_last))
        assert re.search(f"{most} while rank {peers.size - 1}{last}", first.text)
    for first, after in found:  # who had come before learns it by the cause
        assert "CollectiveMismatchError" in (first.type, first.cause_type)
        assert (after.type, after.cause_type) == ("BrokenWorldError", "CollectiveMismatchError")


def test_a_collective_on_rank_zero_alone_soon_names_the_returned_ranks(many_peers):
    def save_on_rank_zero_only(comm):
        comm.barrier()
        began = time.monotonic()
        return (told(comm.barrier), time.monotonic() - began) if comm.rank == 0 else None

    error, waited_s = many_peers.run(save_on_rank_zero_only)[0]
    assert error.type == "BrokenWorldError"
    assert error.text.startswith("rank 0 cannot complete barrier(): rank")
    assert "left this world" in error.text
    assert waited_s < SOON_S


# Broken worlds.


@each_with(
    COLLECTIVES,
    threads="barrier",
    processes=["all_reduce", "broadcast_object", "all_to_all"],
    accelerators="reduce_scatter",
)
def test_a_departed_rank_wakes_the_others(peers, name):
    def depart(comm):
        comm.barrier()
        if comm.rank == comm.size - 1:
            return None  # returning is leaving
        return told(calls_of(comm)[name])

    *found, nothing = peers.run(depart)
    assert nothing is None
    for rank, error in enumerate(found):
        assert error.type == "BrokenWorldError"
        assert error.text.startswith(f"rank {rank} cannot complete {name}(")
        assert f"{peers.size - 1} has left this world" in error.text


def test_who_comes_after_a_rank_has_departed_learns_it_too(peers, door):
    def depart(comm):
        comm.barrier()
        if comm.rank == 1:
            comm.leave()
            door.open()
        elif comm.rank == 0:
            door.wait()
            return told(comm.barrier)
        return None

    error = peers.run(depart)[0]
    assert error.type == "BrokenWorldError"
    assert "left this world" in error.text


def test_leaving_is_idempotent_and_final(ranks):
    def leave(comm):
        comm.barrier()
        comm.leave()
        comm.leave()
        return told(comm.barrier)

    found = ranks.run(leave)
    assert found == [
        Told("BrokenWorldError", f"rank {rank} has left this world and cannot call barrier()")
        for rank in range(ranks.size)
    ]


@each_with(
    COLLECTIVES,
    threads="broadcast",
    processes=["all_gather", "all_gather_object", "barrier"],
    accelerators="all_reduce",
)
def test_an_abort_wakes_the_waiters_with_its_cause(peers, name):
    def fail(comm):
        comm.barrier()
        if comm.rank == comm.size - 1:
            comm.abort(LookupError("no such digit"))
        return told(calls_of(comm)[name])

    for rank, error in enumerate(peers.run(fail)):
        assert error.text.startswith(f"rank {rank} cannot complete {name}(")
        assert error.text.endswith(f"rank {peers.size - 1} failed with LookupError: no such digit")
        assert (error.type, error.cause_type, error.cause_text) == ("BrokenWorldError", "LookupError", "no such digit")


def test_an_abort_from_another_thread_wakes_the_waiters(peers, door):
    def fail(comm):
        comm.barrier()
        if comm.rank == 1:
            aborting = threading.Thread(target=comm.abort, args=(LookupError("no such digit"),))
            aborting.start()
            door.wait()  # this rank computes, until the others have been woken
            aborting.join()
            return told(comm.barrier)
        error = told(comm.barrier)
        if comm.rank == 0:
            door.open()
        return error

    for rank, error in enumerate(peers.run(fail)):
        text = f"rank {rank} cannot complete barrier(): rank 1 failed with LookupError: no such digit"
        assert error == Told("BrokenWorldError", text, "LookupError", "no such digit")


def test_an_abort_from_another_thread_wakes_its_own_rank(peers, door):
    if peers.mode == "processes":
        pytest.skip("a thread that waits inside the transport is woken by its peers or by the time-out alone")

    def fail(comm):
        comm.barrier()
        if comm.rank == 0:
            door.wait()  # computes, and does not come
            return None
        if comm.rank == 1:
            aborting = threading.Thread(target=comm.abort, args=(LookupError("no such digit"),))
            aborting.start()
        error = told(comm.barrier)
        if comm.rank == 1:
            aborting.join()
            door.open()
        return error

    for error in peers.run(fail)[1:]:
        assert (error.type, error.cause_type) == ("BrokenWorldError", "LookupError")


def test_the_first_abort_counts(ranks):
    def fail(comm):
        comm.abort(LookupError("first"))
        comm.abort(ValueError("second"))
        return told(comm.barrier)

    def one_fails(comm):
        comm.barrier()
        return fail(comm) if comm.rank == 0 else told(comm.barrier)

    for error in ranks.run(one_fails):
        assert (error.type, error.cause_type, error.cause_text) == ("BrokenWorldError", "LookupError", "first")


def test_once_broken_always_broken_for_every_collective(ranks):
    def fail(comm):
        comm.barrier()
        if comm.rank == 0:
            comm.abort(LookupError("no such digit"))
        return [told(call) for _ in range(2) for call in calls_of(comm).values()]

    for errors in ranks.run(fail):
        assert {(error.type, error.cause_type) for error in errors} == {("BrokenWorldError", "LookupError")}


@pytest.mark.parametrize(
    "peers", ["threads-2", "processes-2", pytest.param("accelerators-2", marks=pytest.mark.slow)], indirect=True
)
def test_a_time_out_tells_what_was_awaited_and_how_long(peers, door):
    def keep_waiting(comm):
        comm.barrier()
        if comm.rank == 1:
            door.wait()
            return None
        error = told(lambda: comm.all_reduce(torch.ones(3)))
        if comm.rank == 0:
            door.open()
        return error

    found = peers.run(keep_waiting, timeout=timedelta(seconds=3))
    errors = [error for rank, error in enumerate(found) if rank != 1]
    for error in errors:
        assert error.type == "BrokenWorldError"
        assert "all_reduce(float32[3], 'sum')" in error.text
    assert any("0:00:03" in error.text or "3000ms" in error.text for error in errors)
    missing = "for ranks [1]" if peers.mode == "threads" else "rank 1 did not arrive"
    assert any(missing in error.text for error in errors)
