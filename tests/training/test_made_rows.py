"""A `collate_fn` that drops samples, or makes several rows of one: what counts are the rows that it delivers.

The oracle is one device that takes the mean over all rows of the samples of each global batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from modes import HOST, PROCESSES_2, SOLO, THREADS_2, THREADS_3, Mode, scaling
from torch.utils.data import DataLoader, Dataset, default_collate
from twin import Case, adam, assert_all_are, data, mean_loss, model, windows

from unisono import Accelerator, DeviceLoader, backward, current_world, optimizer_step

pytestmark = pytest.mark.any_family

MODES = scaling(SOLO, THREADS_3, PROCESSES_2)
Rows = Callable[[int], int]


def drops(index: int) -> int:
    """How many rows come of a sample: a sixth of them is lost, and once all three of a batch."""
    return int(index % 6 != 3 and index not in (15, 16, 17))


def crops(index: int) -> int:
    return index % 3 + 1


class Indexed(Dataset[Any]):
    """Each sample with the number of its rows."""

    def __init__(self, samples: int, rows: Rows) -> None:
        self.tensors, self.rows = data(samples).tensors, rows

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, index: int) -> Any:
        return [tuple(each[index] + copy for each in self.tensors) for copy in range(self.rows(index))]


def flatten(samples: Sequence[Any]) -> Any:
    rows = [row for sample in samples for row in sample]
    empty = [torch.empty(0, *shape, dtype=torch.float64) for shape in [(5,), (2,), ()]]
    return default_collate(rows) if rows else empty


def rows_of(indices: Sequence[int], case: Case, rows: Rows) -> list[torch.Tensor]:
    indexed = Indexed(case.samples, rows)
    return flatten([indexed[index] for index in indices])


def plain_run(case: Case, ranks: int, rows: Rows) -> dict[str, torch.Tensor]:
    network = model()
    optimizer = adam(network.parameters())
    for window in windows(case, ranks):
        optimizer.zero_grad()
        batch = rows_of(window, case, rows)
        if len(batch[0]):
            mean_loss(network, batch).backward()
            optimizer.step()
    return network.state_dict()


def run(case: Case, rows: Rows, workers: int = 0, resume: bool = False) -> dict[str, torch.Tensor]:
    """Train on this rank; with `resume`, leave the first epoch after two batches, and go on by another loader."""
    make: Any = partial(
        DataLoader, Indexed(case.samples, rows), case.batch, collate_fn=flatten, num_workers=workers
    )  # fmt: skip
    network = model()
    accelerator = Accelerator(gradient_accumulation_steps=case.accumulate)
    if case.way == "bare":
        network = network.to(current_world().device)
        loader: Any = DeviceLoader(make())
    else:
        network, loader = accelerator.prepare(network, make())
    optimizer = adam(network.parameters())
    optimizer = optimizer if case.way == "bare" else accelerator.prepare(optimizer)
    left, count = resume, 0
    while loader.epoch < case.epochs:
        iterator = iter(loader)
        for number, batch in enumerate(iterator, 1):
            if case.way == "bare":
                backward(mean_loss(network, batch))
                count += 1
                if count == case.accumulate or iterator.is_last():
                    optimizer_step(optimizer)
                    optimizer.zero_grad()
                    count = 0
            else:
                optimizer.zero_grad()
                loss = mean_loss(network, batch)
                loss.backward() if case.way == "plain" else accelerator.backward(loss)
                optimizer.step()
            if left and number == 2:
                break
        if left:
            left, state = False, loader.state_dict()
            loader = DeviceLoader(make()) if case.way == "bare" else accelerator.prepare(make())
            loader.load_state_dict(state)
    return network.state_dict()


CASES = {
    "drops": (Case(24, 3), drops),
    "crops": (Case(24, 3), crops),
    "crops in a tail": (Case(26, 4), crops),
    "drops in a tail": (Case(29, 2), drops),
    "one mean over two batches": (Case(29, 2, accumulate=2), crops),
    "a plain backward": (Case(26, 4, way="plain"), crops),
    "by hand": (Case(29, 4, accumulate=2, way="bare"), crops),
    "drops by hand": (Case(29, 3, way="bare"), drops),
}


RESUMED = ("drops", "one mean over two batches", "by hand")


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_step_is_the_mean_over_the_rows_of_all_ranks(mode: Mode) -> None:
    def body() -> list[Any]:
        found = [run(case, rows) for case, rows in CASES.values()]
        found += [run(*CASES[name], resume=True) for name in RESUMED]
        return [*found, run(*CASES["drops"], workers=2)]

    per_rank = mode.run(body)
    for place, name in enumerate([*CASES, *RESUMED, "drops"]):
        print(name, place)
        assert_all_are([each[place] for each in per_rank], plain_run(CASES[name][0], mode.ranks, CASES[name][1]))


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_global_batch_without_rows_is_skipped_in_every_mode(mode: Mode) -> None:
    """The first batches of some ranks have none, either; a script skips what it gets without rows."""
    inputs, targets, _ = data(120).tensors
    cases = [("plain", 0, {0, 3, 9}), ("plain", 2, {1, 2}), ("weight", 0, {2}), ("block", 0, {0, 2})]

    def body(way: str, workers: int, lost: set[int], ranks: int = 1) -> dict[str, torch.Tensor]:
        def is_kept(index: int) -> bool:
            return index // 12 not in lost and index not in (24, 25, 26, 27, 28, 29)

        def collate(indices: Sequence[int]) -> Any:
            kept = [index for index in indices if is_kept(index)]
            return (inputs[kept], targets[kept]) if kept else None

        accelerator = Accelerator(gradient_accumulation_steps=2)
        network = model()
        loader = DataLoader(range(120), 12 // ranks, collate_fn=collate, num_workers=workers)
        network, optimizer, loader = accelerator.prepare(network, torch.optim.SGD(network.parameters(), 0.01), loader)
        taken = 0
        for batch in loader:
            if batch is None:
                continue
            with accelerator.accumulate() if way == "block" else nullcontext():
                errors = (network(batch[0]) - batch[1]).square().mean(1)
                accelerator.backward(errors.mean(), weight=len(errors) if way == "weight" else None)
                taken += accelerator.sync_gradients
                optimizer.step()
                optimizer.zero_grad()
        return {**accelerator.unwrap_model(network).state_dict(), "taken": torch.tensor(taken)}

    ranks = mode.ranks
    for case, *found in zip(cases, *mode.run(lambda: [body(*each, ranks) for each in cases]), strict=True):
        print(case)
        assert_all_are(found, *SOLO.run(partial(body, *case)))


@pytest.mark.parametrize(
    ("mode", "rows"), [(SOLO, drops), (THREADS_2, crops), (THREADS_2, drops), (PROCESSES_2, crops)]
)
def test_each_row_is_gathered_for_a_metric_once(mode: Mode, rows: Rows) -> None:
    case = Case(26, 3)

    def body(loader: Any) -> tuple[list[Any], list[int], list[int]]:
        accelerator, gathered, valid, size = Accelerator(), [], [], []
        with torch.no_grad():
            for inputs, _, _ in loader:
                gathered += accelerator.gather_for_metrics(inputs * 2).tolist()
                valid.append(loader.valid_samples)
                size.append(len(inputs))
        return gathered, valid, size

    expected = (rows_of(range(26), case, rows)[0] * 2).tolist()
    dataset = Indexed(26, rows)
    found = mode.loop(body, DataLoader(dataset, 3, collate_fn=flatten))
    for gathered, _, _ in found:
        assert sorted(gathered) == sorted(expected)
    assert sum(sum(valid) for _, valid, _ in found) == len(expected)
    for _, valid, size in found:
        assert all(count in (0, delivered) for count, delivered in zip(valid, size, strict=True))


def _keep(samples: Any) -> Any:
    return [sample for sample in samples if sample[1] % 4]


@pytest.mark.parametrize(
    ("collate", "expected"),
    [
        (lambda samples: {"text": [str(label) for _, label in _keep(samples)]}, 3),
        (lambda samples: [{"x": x, "boxes": torch.zeros(label, 4)} for x, label in _keep(samples)], None),
        (lambda samples: tuple(zip(*_keep(samples), strict=True)), 3),  # the labels decide: no fields of 5 rows
        (lambda samples: tuple(zip(*[(torch.zeros(n, n), n) for _, n in _keep(samples)], strict=True)), 3),
        (lambda samples: {"images": [x for x, _ in _keep(samples)]}, None),  # 3 images, or 3 fields of 5 rows
        (lambda samples: {"images": [x for x, _ in samples]}, 4),
        (lambda samples: {"images": [x for x, _ in _keep(samples)], "labels": ["a", "b", "c"]}, 3),
        (lambda samples: ([torch.ones(4, 5), torch.ones(4, 5)], torch.ones(4)), 4),
        (lambda samples: {"views": [torch.ones(4, 5), torch.ones(4, 5)]}, None),  # 2 views, or 2 rows of 4
        (lambda samples: [object() for _ in samples], 4),
        (lambda samples: [object() for _ in _keep(samples)], None),  # 3 rows, or 3 fields
        (lambda samples: (torch.ones(4), torch.ones(9)), None),  # images and boxes
        (lambda samples: tuple(default_collate(_keep(samples)[:2])) * 2, 2),
        (lambda samples: ((torch.ones(4), torch.ones(4)), (torch.ones(4), torch.ones(4))), None),  # 2 rows of 4, or 4
        (lambda samples: _keep(samples), 3),
        (lambda samples: (torch.zeros(4), torch.zeros(9), torch.zeros(4)), 4),  # labels, tokens, offsets
        (lambda samples: default_collate(_keep(samples)), 3),
        (lambda samples: {"x": torch.ones(3, 5), "mean": torch.ones(4)}, None),  # as many as samples, by chance
        (lambda samples: [torch.ones(3, 5), torch.ones(3, 5), torch.ones(3, 5), torch.ones(3, 5)], None),
        (lambda samples: (torch.ones(1, 4), torch.ones(1, 1)), 1),
        (lambda samples: ([torch.ones(3, 5), torch.ones(3, 5)], torch.ones(3)), 3),
        (lambda samples: [torch.ones(size, 5) for size in range(1, 5)], 4),  # of different sizes
        (lambda samples: torch.stack([x for x, _ in samples], 1), None),  # 4 samples along dimension 1, or 5 rows
        (lambda samples: [x for x, _ in samples], None),  # 4 samples, or 4 fields of 5 rows
        (lambda samples: None, 0),
        (lambda samples: object(), 4),
    ],
)
def test_the_rows_of_what_collate_fn_returns(collate: Any, expected: int) -> None:
    samples = [(torch.zeros(5, device=HOST), label) for label in range(4)]
    loader = DeviceLoader(DataLoader(samples, 4, collate_fn=collate))  # type: ignore[arg-type]
    assert [loader.valid_samples for _ in loader] == [expected]


def test_fields_of_two_samples_are_told_from_samples_by_their_shapes() -> None:
    for shapes, expected in [((5,), (1,)), 1], [((5,), (5,)), None]:
        samples = [tuple(torch.zeros(shape, device=HOST) for shape in shapes), None]
        collate = lambda samples: default_collate([each for each in samples if each is not None])  # noqa: E731
        loader = DeviceLoader(DataLoader(samples, 2, collate_fn=collate))  # type: ignore[arg-type]
        assert [loader.valid_samples for _ in loader] == [expected]


def test_where_the_rows_are_not_known_their_number_is_asked_for_and_taken() -> None:
    samples = [(torch.full((5,), index + 1.0), torch.zeros(5)) for index in range(8)]

    def body(is_given: bool) -> list[float]:
        accelerator = Accelerator()
        network = torch.nn.Linear(5, 1, bias=False)
        network, _, loader = accelerator.prepare(
            network,
            torch.optim.SGD(network.parameters(), 1.0),
            DataLoader(samples, 4, collate_fn=lambda batch: [x for x, _ in batch[accelerator.process_index :]]),
        )
        for batch in loader:
            accelerator.backward(network(torch.stack(batch)).mean(), weight=len(batch) if is_given else None)
            return network.weight.grad[0].tolist()
        return []

    with pytest.raises(ValueError, match=r"how many rows this batch has.* weight=number"):
        THREADS_2.run(partial(body, False))
    rows = torch.tensor([1.0, 2, 3, 4, 6, 7, 8])
    for found in THREADS_2.run(partial(body, True)):
        torch.testing.assert_close(torch.tensor(found), rows.mean().repeat(5))


@pytest.mark.parametrize(("mode", "workers"), [(SOLO, 0), (THREADS_2, 1), (PROCESSES_2, 0)], ids=str)
def test_a_list_of_samples_has_as_many_rows_whatever_their_own_sizes_are(mode: Mode, workers: int) -> None:
    """Sequences of different lengths, one at a time; and images of three channels, of which some are dropped."""
    for samples, size in (
        ([torch.ones(2 + 3 * each, 3) * each for each in range(6)], 1),
        ([None if each % 3 == 1 else torch.ones(3, 2, 2) * each for each in range(12)], 3),
    ):

        def body(samples: Any = samples, size: int = size) -> list[int | None]:
            keep = DataLoader(samples, size, collate_fn=_not_none, num_workers=workers)
            loader = DeviceLoader(keep, split="global")
            return [loader.valid_samples for batch in loader]

        counts = list(zip(*mode.run(body), strict=True))
        kept = [each is not None for each in samples]
        assert sum(map(sum, counts)) == sum(kept)


def _not_none(samples: Any) -> Any:
    return [each for each in samples if each is not None]


def test_on_one_device_every_metric_row_counts_whatever_the_batch_says() -> None:
    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(range(8), 4, collate_fn=lambda rows: (torch.ones(4), torch.ones(9))))
    for labels, _ in loader:
        assert loader.valid_samples is None
        assert len(accelerator.gather_for_metrics(labels)) == 4


@pytest.mark.parametrize("options", [{"tail": "pad"}, {"fixed_batch_size": True}], ids=str)
def test_a_size_that_is_promised_is_not_given_up_in_silence(options: Any) -> None:
    dataset = Indexed(10, lambda index: int(index != 5))
    with pytest.raises(ValueError, match="collate_fn returned 3 rows of 4 samples"):
        list(DeviceLoader(DataLoader(dataset, 4, collate_fn=flatten), **options))
