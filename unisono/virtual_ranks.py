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
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import Generic, NamedTuple, TypeVar

from unisono.arguments import check_integer
from unisono.randomness import mixed, seed_all, seed_of

T = TypeVar("T")

WITNESS = 0
"""The turn of a witness in its round: a batch of another rank that is computed once more, and counts nowhere."""


@dataclass(frozen=True)
class Virtual:
    """The virtual ranks of a run: `Accelerator(virtual_ranks=Virtual(8, witness_every=100))`.

    Attributes:
        count: their number.
        witness_every: once in so many steps, each rank computes a batch of the next rank, too, and the two gradients
            are compared, bit by bit: silent data corruption is found (docs/virtual_ranks.md). None: never.

    Raises:
        TypeError, ValueError: one of them is not a positive integer.
    """

    count: int
    _: KW_ONLY
    witness_every: int | None = None

    def __post_init__(self) -> None:
        check_integer(self.count, "virtual_ranks", 1)
        if self.witness_every is not None:
            check_integer(self.witness_every, "witness_every", 1, "pass a number of steps, or None")

    @classmethod
    def of(cls, given: int | Virtual) -> Virtual:
        """What an argument `virtual_ranks` says."""
        return given if isinstance(given, Virtual) else cls(given)

    def carried_by(self, rank: int, ranks: int) -> VirtualRanks:
        """Those of one of so many ranks: each carries every `ranks`-th one. ValueError: there are more ranks."""
        if self.count < ranks:
            raise ValueError(f"virtual_ranks={self.count} are fewer than the {ranks} ranks; start at most {self.count}")
        return VirtualRanks(rank, tuple(tuple(range(each, self.count, ranks)) for each in range(ranks)))


@dataclass(frozen=True)
class VirtualRanks:
    """The virtual ranks of a run, as its ranks carry them.

    Attributes:
        rank: this one.
        table: of each rank, the virtual ranks that it carries, in the order of their batches.
    """

    rank: int
    table: tuple[tuple[int, ...], ...]

    @cached_property
    def count(self) -> int:
        """The number of virtual ranks."""
        return sum(map(len, self.table))

    @property
    def own(self) -> tuple[int, ...]:
        """Those that this rank carries."""
        return self.table[self.rank]

    @cached_property
    def each(self) -> int:
        """The most that a rank carries: so many batches of a round has each."""
        return max(map(len, self.table))

    def pairs(self, number: int) -> list[tuple[int, int]]:
        """Of each rank, a virtual rank that it carries, and its witness: the rank before, which computes it, too. Which
        one it is at that time looks random, so that no period of an epoch leaves any out."""
        ranks, place = len(self.table), mixed(0, number)
        return [(own[place % len(own)], (rank - 1) % ranks) for rank, own in enumerate(self.table)]

    def witness(self, number: int) -> int:
        """The virtual rank that this rank computes beside its own, at that time."""
        return self.pairs(number)[(self.rank + 1) % len(self.table)][0]


class Draw(NamedTuple):
    """Which batch of a run it is: the seed of its loader, the epoch, the first sample of its round, and the virtual
    rank; `carried` by its rank, as the batch of that `turn` in the round, from 1 on.

    A batch that a rank gets again, to have as many as others, is of the virtual rank after the last one. That of a
    witness is of the virtual rank whose it is, and comes first. `witnesses` is the number of the time, if this round
    has witnesses; `weight` is the number of its samples where it counts.
    """

    seed: int
    epoch: int
    sample: int
    rank: int
    carried: VirtualRanks
    turn: int = 1
    witnesses: int | None = None
    weight: int = 0

    @property
    def round(self) -> tuple[int, int, int]:
        """The round that it is of, the same for all virtual ranks."""
        return self[:3]

    @property
    def counts(self) -> bool:
        """Whether what is computed with it is part of sums."""
        return self.turn != WITNESS and self.rank < self.carried.count

    @property
    def is_compared(self) -> bool:
        """Whether it is a witness, or another rank has a witness of it."""
        if self.witnesses is None:
            return False
        return self.turn == WITNESS or self.carried.pairs(self.witnesses)[self.carried.rank][0] == self.rank

    @property
    def ends_round(self) -> bool:
        """Whether it is the last batch that the rank has of a round."""
        return self.turn == self.carried.each

    def seed_batch(self) -> int:
        """Seed the process's generators for what is computed with the batch; returns the seed, for the device's."""
        return _seed_all(seed_of("batch", *self.round, self.rank, self.carried.count))

    def seed_step(self) -> int:
        """Seed them, alike on all ranks, for the step on the round, and what follows."""
        return _seed_all(seed_of("step", *self.round))

    def seed_behind(self) -> int:
        """Seed them, alike on all ranks, for what comes after the loop."""
        return _seed_all(seed_of("behind", self.seed, self.epoch))


def _seed_all(seed: int) -> int:
    seed_all(seed)
    return seed


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


def sums_of(virtual: VirtualRanks, rank: int | None = None) -> list[Node]:
    """The nodes whose sums a rank, or this one, has when it has put in all that it carries."""
    tree = Tree[None](virtual.count, lambda one, other: None)
    for each in virtual.table[virtual.rank if rank is None else rank]:
        tree.put(each, None)
    return sorted(tree.sums)


def fold_over_ranks(
    virtual: VirtualRanks,
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
    nodes = [sums_of(virtual, rank) for rank in range(len(virtual.table))]
    mine = [own[each] for each in sums_of(virtual)]
    mine += mine[:1] * (max(map(len, nodes)) - len(mine))  # as many on each rank
    found = exchange(mine) if len(nodes) > 1 else [mine]
    for its, sums in zip(nodes, found, strict=True):
        for node, value in zip(its, sums, strict=False):
            tree.put_sum(node, value)
    return tree.total()
