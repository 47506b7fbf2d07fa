"""Adds what virtual ranks have in their one tree, bucket by bucket, over the ranks that carry them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from unisono.batches.virtual_ranks import Node, VirtualRanks, fold_over_ranks, sums_of
from unisono.protocols import Communicator
from unisono.training.gradients import buckets
from unisono.training.strategies.virtual_buffers import Tensors

_LARGE = 1 << 18  # bytes: to copy them into a bucket takes longer than one collective more


def fold(
    keys: Sequence[torch.Tensor], sums: Mapping[Node, Tensors], virtual: VirtualRanks, comm: Communicator
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The sums over all virtual ranks, of those of this one. A collective."""

    def exchange(pieces: list[torch.Tensor]) -> list[list[torch.Tensor]]:
        """Of each rank, its sums in the slice that this one adds up: as much is sent as in a ring all-reduce."""
        slices = [each.view(size, -1) for each in pieces]
        return [list(each[0].unbind()) for each in comm.all_to_all(torch.stack(slices, 1))]

    size = comm.size
    if size == 1:
        yield from ((each, sums[1, 0][each]) for each in keys if each in sums[1, 0])
        return
    of_ranks = [sums_of(own, virtual.count) for own in virtual.table]
    nodes = of_ranks[virtual.rank]
    are_two = [*map(len, of_ranks)] == [1, 1]  # one sum each, and a + b is b + a
    # Large gradients are added where they are, behind the first vector.
    large = [each for each in keys if are_two and each.requires_grad and each.nbytes >= _LARGE]
    apart = set(map(id, large))
    for bucket in [*buckets([each for each in keys if id(each) not in apart]), *([each] for each in large)]:
        lengths = [each.numel() for each in bucket]
        room = 0 if are_two else -sum(lengths) % size  # as many for each rank
        own = {node: _flatten(bucket, sums[node], room) for node in nodes}
        if are_two:
            total = comm.all_reduce(own[nodes[0]])
        else:
            total = torch.cat(comm.all_gather(fold_over_ranks(virtual, own, exchange, torch.Tensor.add_)))
        for each, piece in zip(bucket, total.split([*lengths, room]), strict=False):
            yield each, piece.view_as(each)


def _flatten(bucket: list[torch.Tensor], values: Tensors, room: int) -> torch.Tensor:
    """The values of a bucket, one after another, and so many zeros; of a single large one its own memory, if it can."""
    found = map(values.get, bucket)
    pieces = [
        (torch.zeros_like(each) if one is None else one).reshape(-1) for each, one in zip(bucket, found, strict=True)
    ]
    if len(pieces) == 1 and bucket[0].requires_grad and not room:
        return pieces[0]
    return torch.cat([*pieces, bucket[0].new_zeros(room)] if room else pieces)
