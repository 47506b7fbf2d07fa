"""The same names mean the same in a plain script, in a DataParallel thread and in a spawned worker."""

from __future__ import annotations

import itertools

import pytest
import torch
from modes import PROCESSES_2, SOLO, THREADS_3, each_of, scaling

import unisono
from unisono.comm.threads import ThreadCommunicator
from unisono.world import thread_worlds

pytestmark = [pytest.mark.any_family, pytest.mark.every_mode]


mode = each_of(scaling(SOLO, THREADS_3, PROCESSES_2))


def test_a_rank_knows_its_place_and_reduces_and_receives_in_place(mode):
    root = mode.ranks - 1

    def body():
        rank = unisono.rank()
        assert (unisono.local_rank(), unisono.world_size(), unisono.is_rank_zero()) == (rank, mode.ranks, rank == 0)
        assert unisono.all_reduce(torch.tensor(1)) == mode.ranks, "the sum is what is meant without a word"
        reduced, sent = torch.tensor([1.0, 2.0]) + rank, torch.full((2,), float(rank))
        assert unisono.all_reduce(reduced, "max") is reduced
        assert unisono.broadcast(sent, root) is sent
        return rank, reduced.tolist(), sent.tolist(), unisono.broadcast(torch.tensor(rank + 5)).item()

    expected = [1.0 + root, 2.0 + root], [float(root)] * 2, 5
    assert mode.run(body) == [(rank, *expected) for rank in range(mode.ranks)]


def test_all_gather_concatenates_in_rank_order(mode):
    dims = (0, 1, -1)

    def gather():
        mine = torch.arange(6).reshape(2, 3) + 10 * unisono.rank()
        found = [unisono.all_gather(mine, dim) for dim in dims]
        found[0] += 0  # a tensor of one's own
        assert torch.equal(mine, torch.arange(6).reshape(2, 3) + 10 * unisono.rank())
        return [each.tolist() for each in found]

    parts = [torch.arange(6).reshape(2, 3) + 10 * rank for rank in range(mode.ranks)]
    assert mode.run(gather) == [[torch.cat(parts, dim).tolist() for dim in dims]] * mode.ranks


def test_all_gather_samples_keeps_the_counting_ones_from_unequal_ranks(mode):
    def whole(rank):
        rows = mode.ranks + 1
        return torch.arange(2 * rows).reshape(rows, 2).narrow(0, 0, rows - rank) + 100 * rank

    def gather(dim):
        mine = whole(unisono.rank())
        batch = {"x": mine if dim == 0 else mine.T, "more": [mine if dim == 0 else mine.T]}
        found = unisono.all_gather_samples(batch, max(2 - unisono.rank(), 0), dim)
        assert torch.equal(found["more"][0], found["x"])
        return found["x"].tolist()

    counting = torch.cat([whole(rank)[: max(2 - rank, 0)] for rank in range(mode.ranks)])
    assert mode.run(lambda: [gather(0), gather(1)]) == [[counting.tolist(), counting.T.tolist()]] * mode.ranks


@pytest.mark.parametrize(
    ("error", "words", "batch", "valid_samples"),
    [
        (ValueError, "valid_samples=4, but a tensor has 3 samples along dim 0", (torch.zeros(5), torch.zeros(3)), 4),
        (ValueError, "valid_samples=-1, but a tensor has 3 samples", torch.zeros(3), -1),
        (ValueError, "a tensor of shape () has no dimension 0", torch.tensor(1.0), 1),
        (TypeError, "valid_samples=1.0 is of type float", torch.zeros(3), 1.0),
        (TypeError, "the batch holds a str, .* all_gather_object", [torch.zeros(1), "name"], 1),
    ],
)
def test_all_gather_samples_refuses_what_has_no_such_samples(error, words, batch, valid_samples):
    with pytest.raises(error, match=words.replace("()", r"\(\)")):
        unisono.all_gather_samples(batch, valid_samples)


def test_a_world_may_be_named_instead_of_the_current_one():
    world = thread_worlds([torch.device("cpu:0"), torch.device("cpu:1")])[1]
    assert (unisono.rank(world), unisono.local_rank(world), unisono.world_size(world)) == (1, 1, 2)
    assert not unisono.is_rank_zero(world)
    assert unisono.is_rank_zero()


def test_collectives_count_as_reducing():
    own = unisono.current_world()
    world = unisono.World(device=own.device, backend=own.backend, comm=ThreadCommunicator.group(1)[0])
    for collective in (
        lambda: unisono.all_reduce(torch.ones(1), world=world),
        lambda: unisono.all_gather(torch.ones(1), world=world),
        lambda: unisono.broadcast(torch.ones(1), world=world),
        lambda: unisono.all_gather_object(1, world),
        lambda: unisono.barrier(world),
    ):
        before = len(world.timeline.loop().spans)
        collective()
        assert [span.phase for span in world.timeline.loop().spans][before:] == ["reduce"]


REFUSED = {
    "all_reduce": unisono.all_reduce,
    "all_gather": unisono.all_gather,
    "broadcast": unisono.broadcast,
    "all_gather_samples": lambda x: unisono.all_gather_samples({"rows": [x]}, 1),
}


def test_silently_cutting_a_graph_is_refused_before_anything_is_sent(mode):
    def refuse():
        tensors = (torch.nn.Parameter(torch.ones(2)), torch.ones(2, requires_grad=True) * 2)
        for name, x in itertools.product(REFUSED, tensors):
            if unisono.rank() == 0:  # on this rank alone: nobody waits for the others
                with pytest.raises(ValueError) as refused:
                    REFUSED[name](x)
                assert str(refused.value) == (
                    f"{name} got a tensor that requires grad, and its result would have no gradient; pass x.detach() "
                    f"for the value, or call unisono.functional.{name.replace('broadcast', 'all_gather')}(x) for a "
                    "result with a gradient"
                )
            REFUSED[name](x.detach())
            with torch.no_grad():
                REFUSED[name](x)
        return unisono.all_reduce(torch.tensor(1)).item()

    assert mode.run(refuse) == [mode.ranks] * mode.ranks
