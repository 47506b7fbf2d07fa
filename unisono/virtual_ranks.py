"""Virtual ranks: a run computes what so many devices would compute, and any number of ranks carries it out, with the
same bits. Each rank carries several; their batches follow one another in its loop, and are microbatches of one step.

What is drawn at random for a batch, and what is added over batches, depends on the virtual ranks alone: the generators
are seeded when a batch is delivered, and sums are folded in one binary tree. Its nodes are the residue classes of the
virtual ranks: node (1, 0) has all of them, and node (s, r) those with v % s == r, which are the ones of (2 s, r) and of
(2 s, r + s). So a rank that carries each R-th one has whole subtrees, where R is a power of two.

Prior art: virtual nodes (Or, Zhang and Freedman, "VirtualFlow", MLSys 2022); EasyScale (Li et al., SC 2023).

*Threads:* the rank's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from unisono.randomness import mixed, seed_all, seed_of

T = TypeVar("T")


class Draw(NamedTuple):
    """Which batch of a run it is: the seed of its loader, the epoch, the first sample of its round, and the virtual
    rank, `of` so many."""

    seed: int
    epoch: int
    sample: int
    rank: int
    of: int

    @property
    def round(self) -> tuple[int, int, int]:
        """The round that it is of, the same for all virtual ranks."""
        return self[:3]

    def seed_batch(self) -> int:
        """Seed the process's generators for what is computed with the batch; returns the seed, for the device's."""
        place = seed_of("batch", self.seed, self.epoch, self.of)
        return _seed_all(mixed(mixed(place, self.sample), self.rank))

    def seed_step(self) -> int:
        """Seed them, alike on all ranks, for the step on the round, and what follows."""
        return _seed_all(mixed(seed_of("step", self.seed, self.epoch), self.sample))

    def seed_behind(self) -> int:
        """Seed them, alike on all ranks, for what comes after the loop."""
        return _seed_all(seed_of("behind", self.seed, self.epoch))


def _seed_all(seed: int) -> int:
    seed_all(seed)
    return seed


@dataclass(frozen=True)
class VirtualRanks:
    """The virtual ranks of a run.

    Attributes:
        count: their number.
        own: those that one rank carries, in the order of their batches.
        each: the most that a rank carries: so many batches of a round has each.
    """

    count: int
    own: range
    each: int

    def ends_round(self, draw: Draw) -> bool:
        """Whether it is of the last batch that the rank has of a round."""
        return draw.rank >= (self.each - 1) * self.own.step

    @classmethod
    def carried_by(cls, rank: int, ranks: int, count: int) -> VirtualRanks:
        """Those of one of so many ranks. ValueError: there are more ranks."""
        if count < ranks:
            raise ValueError(f"virtual_ranks={count} are fewer than the {ranks} ranks; start at most {count}")
        return cls(count, range(rank, count, ranks), -(-count // ranks))


Node = tuple[int, int]


class Tree(Generic[T]):
    """Sums of what virtual ranks have, folded as far as they are known.

    Args:
        count: the number of virtual ranks.
        add: returns the sum of two, which it may keep neither of.
    """

    def __init__(self, count: int, add: Callable[[T, T], T]) -> None:
        self._count, self._add = count, add
        self._leaf = 1
        while self._leaf < count:
            self._leaf *= 2
        self.sums: dict[Node, T] = {}

    def put(self, rank: int, value: T) -> None:
        """Add what a virtual rank has."""
        self.put_sum((self._leaf, rank), value)

    def put_sum(self, node: Node, value: T) -> None:
        """Add the sum of all virtual ranks of a node."""
        stride, residue = node
        while stride > 1:
            half = stride // 2
            sibling = stride, (residue + half) % stride
            if sibling[1] < self._count:  # else it has no virtual rank
                if sibling not in self.sums:
                    break
                pair = value, self.sums.pop(sibling)
                value = self._add(*(pair if residue < half else pair[::-1]))
            stride, residue = half, residue % half
        self.sums[stride, residue] = value

    def total(self) -> T:
        """The sum of all; KeyError if some are missing."""
        return self.sums[1, 0]


def sums_of(virtual: VirtualRanks) -> list[Node]:
    """The nodes whose sums a rank has when it has put in all that it carries."""
    tree = Tree[None](virtual.count, lambda one, other: None)
    for each in virtual.own:
        tree.put(each, None)
    return sorted(tree.sums)


def fold_over_ranks(
    virtual: VirtualRanks,
    ranks: int,
    own: Mapping[Node, T],
    exchange: Callable[[list[T]], list[list[T]]],
    add: Callable[[T, T], T],
) -> T:
    """The sum over all virtual ranks, of the sums of each rank. A collective if there are several.

    Args:
        own: this rank's sums, by their nodes.
        exchange: returns the lists of all ranks, in their order; of each, the slice that this one adds up.
    """
    tree = Tree(virtual.count, add)
    nodes = [sums_of(VirtualRanks.carried_by(rank, ranks, virtual.count)) for rank in range(ranks)]
    mine = [own[each] for each in sums_of(virtual)]
    mine += mine[:1] * (max(map(len, nodes)) - len(mine))  # as many on each rank
    found = exchange(mine) if ranks > 1 else [mine]
    for its, sums in zip(nodes, found, strict=True):
        for node, value in zip(its, sums, strict=False):
            tree.put_sum(node, value)
    return tree.total()
