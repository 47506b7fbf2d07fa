"""How a call is told, and what two ranks must agree on."""

from __future__ import annotations

import pytest
import torch

from unisono.comm.operations import Call, departure, pack, unpack


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (Call("barrier"), "barrier()"),
        (Call("broadcast_object", argument=1), "broadcast_object(1)"),
        (Call.on("all_gather", torch.ones(2, 3)), "all_gather(float32[2, 3])"),
        (Call.on("all_reduce", torch.tensor(1), "sum"), "all_reduce(int64[], 'sum')"),
        (Call.on("broadcast", torch.ones(0, dtype=torch.bfloat16), 0), "broadcast(bfloat16[0], 0)"),
    ],
)
def test_a_call_reads_as_it_would_be_written(call, text):
    assert str(call) == text


def test_calls_are_equal_exactly_when_name_shape_type_and_argument_are():
    call = Call.on("all_reduce", torch.ones(2), "sum")
    assert call == Call.on("all_reduce", torch.zeros(2), "sum")
    assert call == Call.on("all_reduce", torch.ones(4)[::2], "sum")  # how it lies in memory is each rank's own matter
    others = [
        Call.on("reduce_scatter", torch.ones(2), "sum"),
        Call.on("all_reduce", torch.ones(2, 1), "sum"),
        Call.on("all_reduce", torch.ones(2).double(), "sum"),
        Call.on("all_reduce", torch.ones(2), "max"),
    ]
    assert call not in others


def test_a_packed_call_arrives_equal():
    call = Call.on("all_reduce", torch.ones(2, dtype=torch.float16), "sum")
    assert unpack(pack(call)) == call


def test_departures_are_told_in_the_right_number():
    assert departure([1]) == "rank 1 has left this world"
    assert departure({3, 1}) == "ranks 1, 3 have left this world"
