"""How a call is told, and what two ranks must agree on."""

from __future__ import annotations

import torch

from unisono.comm.operations import Call, action_of, mismatch_error
from unisono.errors import CollectiveMismatchError


def test_how_a_tensor_lies_in_memory_is_each_ranks_own_matter():
    assert Call.on("all_reduce", torch.ones(2), "sum") == Call.on("all_reduce", torch.ones(4)[::2], "sum")


CALLS = [Call("barrier"), Call.on("all_reduce", torch.ones(10), "sum"), Call("broadcast_object", argument=1)]


def test_a_mismatch_reads_as_a_sentence():
    barrier, reduction, broadcast = CALLS
    assert str(mismatch_of(barrier, reduction, reduction)).startswith(
        "rank 0 called barrier() while ranks [1, 2] called all_reduce(float32[10], 'sum'); every rank must "
    )
    assert str(mismatch_of(barrier, reduction, barrier, broadcast)).startswith(
        "ranks [0, 2] called barrier() while rank 1 called all_reduce(float32[10], 'sum') and rank 3 called "
        "broadcast_object(1); every rank must "
    )
    steps = [Call("", purpose=f"the gradients of step 4 (batch 5 of its loop, round 0000000{round})") for round in "ab"]
    assert str(mismatch_of(steps[0], barrier)).startswith(
        "rank 0 came to the gradients of step 4 (batch 5 of its loop) while rank 1 called barrier(); every rank must "
        "call the same collectives in the same order"
    )
    for other in (steps[1], Call("", purpose="the gradients of step 5")):
        text = str(mismatch_of(steps[0], other, steps[0]))
        assert text.startswith("ranks [0, 2] came to the gradients of step 4 (batch 5 of its loop")
        assert ("round 0000000a" in text) == (other is steps[1])  # shown only if nothing else differs
        assert f" while rank 1 came to {other}; every rank must take the same steps on the same rounds: skip " in text


def test_ranks_whose_loaders_differ_are_told_of_their_data():
    data = "every rank must read the same batches, since the loader gives each rank a part of them; "
    short, long = (Call("", purpose=f"a loop over a DataLoader of {count} samples, epoch 0") for count in (20, 24))
    assert data in str(mismatch_of(short, long))
    actions = {rank: action_of(entry) for rank, entry in enumerate((short, long))}
    here, elsewhere = ('__next__() in train ("a.py", line 7)', '__next__() in train ("a.py", line 9)')
    for other, is_one in ((here, True), ("", True), (elsewhere, False)):  # another place: perhaps in another order
        places = {0: here, 1: other}
        text = str(mismatch_error(actions, places))
        assert (data in text) == is_one
        assert ("loop over each loader equally often, in the same order" in text) != is_one
    steps = [
        Call("", purpose=f"the gradients of step 3 (batch 3 of its loop, round 0000000{round}) at lr {rate}")
        for round, rate in (("a", 0.1), ("b", 0.1), ("a", 0.2))
    ]
    assert "; and it must read the same batches, since" in str(mismatch_of(*steps[:2]))
    assert "read the same batches" not in str(mismatch_of(steps[0], steps[2]))


def mismatch_of(*entries: Call) -> CollectiveMismatchError:
    return mismatch_error({rank: action_of(entry) for rank, entry in enumerate(entries)})
