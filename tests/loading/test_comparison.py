"""Data that differs by rank is never dealt as if it were the same: it is taken as parts, or refused with a way out."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from modes import PROCESSES_2, THREADS_2, Mode
from stand_ins import stand_ins
from streams import COUNT, Stream, all_of, passes, refused
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, get_worker_info, random_split

from unisono import Accelerator, DeviceLoader, current_world, rank
from unisono.errors import CollectiveMismatchError, StateError
from unisono.loading.comparison import make_of

WORDS = r"must read the same batches.* DeviceLoader\(loader, already_sharded=True\);.* already_sharded=False\);"


def both_ways_out(mode: Mode, make: Callable[[], Any]) -> list[list[list[Any]]]:
    """What the ranks get, each way, of what they refuse by themselves."""

    def body() -> list[list[Any]]:
        found = []
        for option in (True, False):
            loader = DeviceLoader(make(), already_sharded=option)
            found.append([number for batch in loader for number in batch[: loader.valid_samples].flatten().tolist()])
        return found

    def refuse() -> None:
        for _ in DeviceLoader(make()):
            pass

    with pytest.raises(CollectiveMismatchError, match=WORDS):
        mode.run(refuse)
    return mode.run(body)


class OfRank:
    """Batches of this rank alone, as of loaders that find their rank: every second one of 12."""

    def __init__(self, form: Callable[[torch.Tensor], Any]) -> None:
        self.form, self.place = form, rank()

    def __iter__(self) -> Iterator[Any]:
        yield from (self.form(torch.arange(2 * k, 2 * k + 2)) for k in range(self.place, 12, 2))


FORMS: dict[str, Callable[[torch.Tensor], Any]] = {
    "integers": lambda numbers: numbers,
    "fractions": lambda numbers: numbers.float(),
    "arrays": lambda numbers: numbers.double().numpy(),
    "bytes": lambda numbers: numbers.to(torch.uint8),
    "fractions at one rate": lambda numbers: {"audio": numbers.float(), "rate": torch.full((2,), 16000)},
    "nested": lambda numbers: [{"x": (numbers.half(), ["text", "text"])}],
}


@pytest.mark.parametrize(("mode", "form"), [*((THREADS_2, form) for form in FORMS), (PROCESSES_2, "nested")], ids=str)
def test_batches_that_differ_by_rank_are_refused_whatever_they_hold(mode, form):
    def body() -> None:
        for _ in DeviceLoader(OfRank(FORMS[form])):  # without a step, or a metric
            pass

    with pytest.raises(CollectiveMismatchError, match=WORDS):
        mode.run(body)


@pytest.mark.parametrize("mode", [THREADS_2, PROCESSES_2], ids=str)
def test_steps_show_what_differs_behind_first_batches_that_are_alike(mode):
    def body() -> None:
        model = torch.nn.Linear(2, 1)
        accelerator = Accelerator()
        loader = OfRank(lambda numbers: numbers.float() * (numbers >= 8))  # silence at first
        model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1), loader)
        for batch in loader:
            accelerator.backward(model(batch).sum())
            optimizer.step()

    with pytest.raises(CollectiveMismatchError, match=WORDS):
        mode.run(body)


def test_both_ways_out_of_the_error_are_taken():
    for parts, whole in both_ways_out(THREADS_2, lambda: OfRank(FORMS["fractions"])):
        assert len(parts) == 12, "its own"
        assert len(whole) == 6, "half of what it reads"


class NoisyBatches:
    """The same batches on each rank, each augmented in its own way."""

    def __iter__(self) -> Iterator[Any]:
        noise = random.Random(rank())
        yield from ((torch.tensor([noise.random()] * 2), torch.tensor([k, k + 1])) for k in range(0, 12, 2))


def test_batches_with_labels_may_be_augmented_by_each_rank():
    def body() -> int:
        return len([*DeviceLoader(NoisyBatches())])

    assert THREADS_2.run(body) == PROCESSES_2.run(body) == [3, 3]


class Numbers(Dataset):
    """`length` samples, each made of its number."""

    def __init__(self, make: Callable[[int], Any], first: int = 0, step: int = 1, length: int = 24) -> None:
        self.make, self.first, self.step, self.length = make, first, step, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.make(self.first + index * self.step)


class ManyAtOnce(Numbers):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


def fraction(number: int) -> torch.Tensor:
    return torch.tensor(float(number))


WHOLE: Any = range(48)
PARTS: dict[str, Callable[[], Any]] = {
    "every second": lambda: Numbers(int, rank(), 2),
    "fractions": lambda: Numbers(fraction, 24 * rank()),
    "many at once": lambda: ManyAtOnce(fraction, rank(), 2),
    "rows": lambda: TensorDataset(torch.arange(24.0) + 24 * rank()),
    "a subset": lambda: Subset(WHOLE, range(rank(), 48, 2)),
    "split with another seed": lambda: random_split(WHOLE, [24, 24], torch.Generator().manual_seed(rank()))[0],
}


@pytest.mark.parametrize(("part", "workers"), [*((part, 0) for part in PARTS), ("fractions", 1)])
def test_a_dataset_of_the_same_length_with_other_samples_is_refused(part, workers):
    def body() -> None:
        for _ in DeviceLoader(DataLoader(PARTS[part](), 4, shuffle=True, num_workers=workers)):
            pass

    with pytest.raises(CollectiveMismatchError, match=WORDS):
        THREADS_2.run(body)


def test_shards_that_begin_alike_are_refused():
    """As texts do, of which many are empty."""
    texts = [""] * 8 + [f"text {index}" for index in range(40)]
    part = {rank: texts[:8] + texts[8 + rank :: 2] for rank in range(2)}

    def body() -> None:
        for _ in DeviceLoader(DataLoader(part[rank()], batch_size=1)):  # type: ignore[arg-type]
            pass

    with pytest.raises(CollectiveMismatchError, match=WORDS):
        THREADS_2.run(body)


def test_shards_of_huggingfaces_are_refused_and_taken_as_parts():
    pytest.importorskip("datasets")

    def loop_over(by_node: bool, already_sharded: bool | None = None) -> list[int]:
        from datasets import Dataset
        from datasets.distributed import split_dataset_by_node

        whole = Dataset.from_dict({"x": [*range(24)]}).with_format("torch")
        part = split_dataset_by_node(whole, rank(), 2) if by_node else whole.shard(2, rank())
        loader = DeviceLoader(DataLoader(part, 4), already_sharded=already_sharded)
        return [number for batch in loader for number in batch["x"].tolist()]

    with pytest.raises(CollectiveMismatchError, match=WORDS):
        THREADS_2.run(lambda: loop_over(True))
    for found in zip(*THREADS_2.run(lambda: [loop_over(by_node, True) for by_node in (True, False)]), strict=True):
        assert sorted(itertools.chain(*found)) == list(range(24))


class Augmented(Numbers):
    """Fractions that are augmented at random: by the process's generators, and by one of the dataset's own."""

    def __init__(self) -> None:
        super().__init__(fraction)
        self.own = numpy.random.default_rng()

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index) * random.random() + torch.rand(()) + self.own.random()


@pytest.mark.parametrize(("mode", "workers"), [(THREADS_2, 0), (THREADS_2, 1), (PROCESSES_2, 1)], ids=str)
def test_a_dataset_may_be_augmented_at_random(mode, workers):
    def body() -> tuple[int, bool]:
        torch.manual_seed(rank())
        before = torch.get_rng_state()
        batches = [*DeviceLoader(DataLoader(Augmented(), 4, num_workers=workers))]
        return len(batches), workers == 0 or torch.equal(before, torch.get_rng_state())

    assert mode.run(body) == [(3, True)] * 2


def test_the_comparison_leaves_the_generators_as_they_were():
    class Drawing(Numbers):
        def __getitem__(self, index: int) -> Any:
            return torch.rand(()), index

    def body() -> list[float]:
        torch.manual_seed(5)
        return [float(noise) for batch, _ in DeviceLoader(DataLoader(Drawing(int, length=8), 4)) for noise in batch]

    torch.manual_seed(5)
    expected = [float(torch.rand(())) for _ in range(4)]
    assert PROCESSES_2.run(body) == [expected] * 2


class Sharding(torch.utils.data.Sampler):
    """Cuts the indices by rank, and says so by other names than torch's."""

    def __init__(self, names: tuple[str, str]) -> None:
        self.place = rank()
        self.__dict__.update(zip(names, (rank(), current_world().world_size), strict=True))

    def __len__(self) -> int:
        return 12

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.place, 24, 2))


def test_a_sampler_that_cuts_by_rank_is_refused_and_taken_as_parts():
    make = lambda: DataLoader(range(24), 2, sampler=Sharding(("slot", "slots")))  # noqa: E731
    parts, whole = zip(*both_ways_out(THREADS_2, make), strict=True)
    assert sorted(itertools.chain(*parts)) == list(range(24))
    assert len({*itertools.chain(*whole)}) < 24, "as it was told"


@pytest.mark.parametrize("names", [("_rank", "_world_size"), ("rank", "num_ranks")])
def test_a_rank_aware_sampler_is_not_cut_again_or_resumed_on_other_ranks(names):
    def body(state: Any = None) -> tuple[list[int], Any]:
        loader = DeviceLoader(DataLoader(range(24), 2, sampler=Sharding(names)))
        if state is not None:
            loader.load_state_dict(state)
        found = [sample for batch in itertools.islice(loader, 3) for sample in batch.tolist()]
        return found, loader.state_dict()

    (first, state), (second, _) = THREADS_2.run(body)
    rest = THREADS_2.run(lambda: body(state))
    assert sorted([*first, *second, *rest[0][0], *rest[1][0]]) == list(range(24))
    with pytest.raises(StateError, match=r"order='Sharding of 2 ranks'"):
        body(state)


class OfItsRank(Stream):
    """Cuts itself by the rank that it was made on and by loader workers, as litdata's datasets do."""

    def __init__(self, cuts: bool = True, names: tuple[str, str] = ("global_rank", "world_size")) -> None:
        super().__init__()
        self.env = SimpleNamespace(**dict(zip(names, (rank(), current_world().world_size), strict=True)))
        self.cuts = cuts

    def __iter__(self) -> Iterator[Any]:
        place, places = vars(self.env).values() if self.cuts else (0, 1)
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        yield from map(self.form, range(place * workers + worker, self.count, places * workers))

    def form(self, number: int) -> Any:
        return number


class Fractions(OfItsRank):
    def form(self, number: int) -> Any:
        return torch.tensor(float(number))


@pytest.mark.parametrize(("kind", "workers"), [(OfItsRank, 0), (OfItsRank, 2), (Fractions, 1)])
@stand_ins()
def test_a_rank_aware_dataset_is_cut_once_whether_or_not_it_cuts_itself(kind, workers):
    for cuts in (True, False):
        found = passes(THREADS_2, partial(kind, cuts), None, None, workers=workers)
        assert all_of(found) == all_of(found, 1) == list(range(COUNT))


def test_processes_cut_such_a_dataset_once_too_and_resume():
    whole = passes(PROCESSES_2, OfItsRank, None, workers=2)
    assert all_of(whole) == list(range(COUNT))
    first = passes(PROCESSES_2, OfItsRank, 2, workers=2)
    rest = passes(PROCESSES_2, OfItsRank, None, workers=2, state=first[0][0].state)
    for (all_,), (before,), (after,) in zip(whole, first, rest, strict=True):
        assert before.batches + after.batches == all_.batches


@stand_ins()
def test_a_dataset_that_differs_by_rank_and_does_not_say_so_is_refused():
    for kind in (OfItsRank, Fractions):
        errors = refused(THREADS_2, partial(kind, True, ("mine", "all")), None, workers=2)
        assert [type(error) for error in errors] == [CollectiveMismatchError] * 2
        assert all("begin with different samples, so cutting them again would lose some" in str(e) for e in errors)
        found = passes(THREADS_2, partial(kind, True, ("mine", "all")), None, workers=2, already_sharded=True)
        assert all_of(found) == list(range(COUNT))


class InItsFolder(Stream):
    """The same on each rank, but for a path."""

    def __init__(self) -> None:
        super().__init__()
        self.path = f"/tmp/{rank()}"

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        yield from range(info.id, self.count, info.num_workers)


class ShuffledByWorker(InItsFolder):
    def __iter__(self) -> Iterator[int]:
        own = [*super().__iter__()]
        random.Random().shuffle(own)
        yield from own


@pytest.mark.parametrize("kind", [InItsFolder, ShuffledByWorker])
@stand_ins()
def test_what_differs_otherwise_is_no_reason_to_refuse_a_stream(kind):
    assert all_of(passes(THREADS_2, kind, None, workers=2)) == list(range(COUNT))


PLACE = 0


def test_what_a_dataset_is_made_of_is_found_wherever_it_lies():
    def closed_over(place: int) -> Callable[[], int]:
        return lambda: place

    def generate(place: int) -> Iterator[int]:
        yield place

    kinds: list[Callable[[int], Any]] = [
        lambda place: Subset(WHOLE, range(place, 8, 2)),
        lambda place: Numbers(closed_over(place)),
        lambda place: [{"files": [f"{place}/{number}" for number in range(10**5)]}],
        lambda place: TensorDataset(torch.arange(1000.0) + place),
        lambda place: numpy.arange(1000) * (place + 1.0),
        generate,
    ]
    for make in kinds:
        assert make_of(make(0), 0, 2) == make_of(make(0), 0, 2)
        assert make_of(make(0), 0, 2) != make_of(make(1), 0, 2)


def test_a_global_number_that_a_method_uses_is_found(monkeypatch):
    class Global(Stream):
        def __iter__(self) -> Iterator[int]:
            yield PLACE

    before = make_of(Global(), 0, 2)
    monkeypatch.setattr(f"{__name__}.PLACE", 1)
    assert make_of(Global(), 0, 2) != before


def test_the_rank_is_known_by_both_numbers():
    for names, is_known in ((("rank", "world_size"), True), (("_rank", "_num_replicas"), True), (("a", "b"), False)):
        holder = SimpleNamespace(inner=SimpleNamespace(**dict(zip(names, (1, 2), strict=True))))
        assert make_of(holder, 1, 2).knows_rank == is_known
        assert not make_of(holder, 0, 2).knows_rank
