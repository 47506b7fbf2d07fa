"""Virtual ranks: a run computes what that many devices would compute, and any number of ranks carries it out, with the
same bits. Each rank carries several; their batches follow one another in its loop, and are microbatches of one step.

What is drawn at random for a batch, and what is summed over batches, depends on the virtual ranks alone: the generators
are seeded when a batch is delivered, and sums are folded in one binary tree. Its nodes are the residue classes of the
virtual ranks: node (1, 0) has all of them, and node (s, r) those with v % s == r, which are the ones of (2 s, r) and of
(2 s, r + s). So a rank that carries each R-th one has whole subtrees, where R is a power of two.

Prior art: virtual nodes (Or, Zhang and Freedman, "VirtualFlow", MLSys 2022); EasyScale (Li et al., SC 2023).

*Threads:* the rank's.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property, lru_cache, partial
from operator import mul
from typing import Generic, NamedTuple, TypeVar

from unisono.arguments import check_integer, check_type
from unisono.devices.randomness import mixed, seed_all, seed_of

T = TypeVar("T")

WITNESS = 0
"""The turn of a witness in its round: a batch of another rank that is computed again, and counts nowhere."""


@dataclass(frozen=True)
class Virtual:
    """The virtual ranks of a run: `Accelerator(virtual_ranks=Virtual(8, witness_every=100, balance=True))`.

    Attributes:
        count: their number.
        witness_every: once in this many steps, each rank also computes a batch of the next rank, and the two gradients
            are compared, bit by bit: silent data corruption is found (docs/virtual_ranks.md). None: never.
        balance: let slow ranks carry fewer, as measured while they train. The ranks then have different numbers of
            batches in a round, and gather nothing for each batch.

    Raises:
        TypeError, ValueError: an argument has another type, or is not positive.
    """

    count: int
    _: KW_ONLY
    witness_every: int | None = None
    balance: bool = False

    def __post_init__(self) -> None:
        check_integer(self.count, "count", 1)
        if self.witness_every is not None:
            check_integer(self.witness_every, "witness_every", 1, "pass a number of steps, or None")
        check_type(self.balance, "balance", "pass True or False", bool)


def virtual_of(given: int | Virtual) -> Virtual:
    """What the argument `virtual_ranks` means."""
    return given if isinstance(given, Virtual) else Virtual(check_integer(given, "virtual_ranks", 1))


@dataclass(frozen=True)
class VirtualRanks:
    """The virtual ranks of a run, as its ranks carry them.

    Attributes:
        rank: this one.
        table: for each rank, the virtual ranks that it carries, in the order of their batches. The first has the rank's
            number.
        balances: whether the table changes while a loop trains.
        fills: whether a rank that carries fewer than others gets batches again, to have as many.
    """

    rank: int
    table: tuple[tuple[int, ...], ...]
    balances: bool = False
    fills: bool = True

    @classmethod
    def carried_by(cls, rank: int, ranks: int, given: int | Virtual) -> VirtualRanks:
        """Those of one of `ranks` ranks: each carries every `ranks`-th one. ValueError: there are more ranks."""
        count, balances = virtual_of(given).count, virtual_of(given).balance
        if count < ranks:
            raise ValueError(f"virtual_ranks={count} are fewer than the {ranks} ranks; start at most {count}")
        return cls(rank, tuple(tuple(range(each, count, ranks)) for each in range(ranks)), balances and ranks > 1)

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
        """The most that a rank carries."""
        return max(map(len, self.table))

    @property
    def turns(self) -> int:
        """The number of this rank's batches in a round, without that of a witness."""
        return self.each if self.fills else len(self.own)

    def with_table(self, table: Sequence[Sequence[int]]) -> VirtualRanks:
        """The same, distributed differently, by ranks that have different numbers of batches."""
        return replace(self, table=tuple(map(tuple, table)), fills=False)

    def pairs(self, number: int) -> list[tuple[int, int]]:
        """For each rank, a virtual rank that it carries, and its witness: the rank before, which computes it, too. The
        choice at each time looks random, so that no period of an epoch leaves any out."""
        ranks, place = len(self.table), mixed(0, number)
        return [(own[place % len(own)], (rank - 1) % ranks) for rank, own in enumerate(self.table)]

    def witness(self, number: int) -> int:
        """The virtual rank that this rank computes in addition to its own, at that time."""
        return self.pairs(number)[(self.rank + 1) % len(self.table)][0]


class Draw(NamedTuple):
    """Identifies a batch of a run: the seed of its loader, the epoch, the first sample of its round, and the virtual
    rank; `carried` by its rank, as the batch of that `turn` in the round, from 1 on.

    A batch that a rank gets again, to have as many as others, has the virtual rank after the last one. That of a
    witness keeps its virtual rank, and comes first. `witnesses` is the number of the time, if this round has witnesses;
    `weight` is the number of its samples where it counts.
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
        """Its round, the same for all virtual ranks."""
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
        """Whether it is the rank's last batch in a round."""
        return self.turn == self.carried.turns

    def seed_batch(self) -> int:
        """Seed the process's generators for what is computed with the batch; returns the seed, for the device's."""
        place = seed_of("batch", self.seed, self.epoch, self.carried.count)
        return _seed_all(mixed(mixed(place, self.sample), self.rank))

    def seed_step(self) -> int:
        """Seed them, alike on all ranks, for the step on the round, and what follows."""
        return _seed_all(mixed(seed_of("step", self.seed, self.epoch), self.sample))

    def seed_after_loop(self) -> int:
        """Seed them, alike on all ranks, for what comes after the loop."""
        return seed_after_loop(self.seed, self.epoch)


def seed_after_loop(seed: int, epoch: int) -> int:
    """Seed the generators, alike on all ranks, for what comes after a loop over that epoch."""
    return _seed_all(seed_of("behind", seed, epoch))


def _seed_all(seed: int) -> int:
    seed_all(seed)
    return seed


Node = tuple[int, int]


class Tree(Generic[T]):
    """Sums of what `count` virtual ranks have, folded as far as they are known. `add` may keep neither of its two."""

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


@lru_cache
def sums_of(own: tuple[int, ...], count: int) -> list[Node]:
    """The nodes whose sums a rank has when it has put in these virtual ranks, out of `count`."""
    tree = Tree[None](count, lambda one, other: None)
    for each in own:
        tree.put(each, None)
    return sorted(tree.sums)


def fold_over_ranks(
    virtual: VirtualRanks,
    own: Mapping[Node, T],
    exchange: Callable[[list[T]], list[list[T]]],
    add: Callable[[T, T], T],
) -> T:
    """The sum over all virtual ranks, of the sums of each rank. `exchange` returns the lists of all ranks, in their
    order; of each, the slice that this rank adds up. A collective if there are several ranks."""
    tree = Tree(virtual.count, add)
    nodes = [sums_of(each, virtual.count) for each in virtual.table]
    mine = [own[each] for each in nodes[virtual.rank]]
    mine += mine[:1] * (max(map(len, nodes)) - len(mine))  # as many on each rank
    found = exchange(mine) if len(nodes) > 1 else [mine]
    for its, sums in zip(nodes, found, strict=True):
        for node, value in zip(its, sums, strict=False):
            tree.put_sum(node, value)
    return tree.sums[1, 0]


_GAIN = 1.1
"""How much faster a round must become for the table to change: measurements vary."""


def rebalanced(virtual: VirtualRanks, times: Sequence[float]) -> VirtualRanks:
    """The virtual ranks as the ranks should carry them, given how long each takes for a batch: so that the slowest rank
    needs the least time for a round. The same object if little would be gained.

    Few virtual ranks move, and those that leave ranks few sums to send.
    """
    ranks = range(len(virtual.table))
    counts = [1 for _ in ranks]  # each keeps the one with its number
    for _ in range(virtual.count - len(ranks)):
        counts[min(ranks, key=lambda rank: (counts[rank] + 1) * times[rank])] += 1
    turns = [virtual.each if virtual.fills else len(own) for own in virtual.table]
    if max(map(mul, turns, times)) < _GAIN * max(map(mul, counts, times)):
        return virtual
    table = [[*own] for own in virtual.table]
    while any(more := [len(own) - count for own, count in zip(table, counts, strict=True)]):
        giver, taker = more.index(max(more)), more.index(min(more))
        moved = min(table[giver][1:], key=partial(_num_sums, table[giver], table[taker], virtual.count))
        table[giver].remove(moved)
        insort(table[taker], moved, 1)
    return virtual.with_table(table)


def _num_sums(giver: list[int], taker: list[int], count: int, moved: int) -> int:
    """The number of sums of two ranks, after a virtual rank has moved from one to the other."""
    after = [each for each in giver if each != moved], [*taker, moved]
    return sum(len(sums_of(tuple(each), count)) for each in after)
