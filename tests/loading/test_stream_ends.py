"""Parts of a stream that end unevenly, errors, and loops that are left."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from modes import PROCESSES_2, THREADS_2, THREADS_3
from stand_ins import stand_ins
from streams import COUNT, SIZE, Stream, all_of, loader_of, loop, passes, refused
from torch import nn
from torch.nn import functional as F

from unisono import DeviceLoader, optimizer_step, rank
from unisono.errors import BrokenWorldError


@pytest.mark.parametrize(("tail", "steps"), [("split", 4), ("pad", 4), ("drop", 3), (None, 3)])
def test_the_tail_of_uneven_parts(tail, steps):
    found = passes(THREADS_2, Stream, None, tail=tail, fixed_batch_size=tail is None)
    assert [len(each[0].batches) for each in found] == [steps, steps]
    assert len(all_of(found)) == (COUNT if steps == 4 else 6 * SIZE)
    if tail == "pad":
        assert {len(batch) for each in found for batch in each[0].batches} == {SIZE}


@pytest.mark.parametrize("workers", [0, 2])
@stand_ins()
def test_one_device_keeps_the_tail_policies_of_a_stream(workers):
    def sizes(tail: str) -> list[int]:
        return sorted(len(batch) for batch in DeviceLoader(loader_of(Stream(11), workers, size=4), tail=tail))

    whole, short = ([4, 4], [3]) if not workers else ([4, 4], [1, 2])
    assert sizes("split") == short + whole
    assert sizes("drop") == whole
    assert sizes("pad") == [4] * len(short) + whole


class Pairs(Stream):
    """Inputs and targets in float64, with their numbers."""

    def __iter__(self) -> Iterator[Any]:
        numbers = torch.Generator().manual_seed(1)
        inputs = torch.randn(self.count, 5, generator=numbers, dtype=torch.float64)
        yield from zip(inputs, inputs.sum(1, keepdim=True).sin(), range(self.count), strict=True)


def network() -> nn.Module:
    model = nn.Linear(5, 1).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.linspace(-0.3, 0.4, parameter.numel()).view_as(parameter))
    return model


@pytest.mark.parametrize("mode", [THREADS_3, PROCESSES_2], ids=str)
def test_steps_over_uneven_parts_match_one_device_with_the_whole_rounds(mode):
    count = 4 * mode.ranks + 1

    def body() -> tuple[list[list[int]], dict[str, torch.Tensor]]:
        model, rounds = network(), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(2):
            batches = iter(DeviceLoader(loader_of(Pairs(count), size=2)))
            for inputs, targets, numbers in batches:
                rounds.append(numbers[: batches.valid_samples].tolist())
                optimizer.zero_grad()
                F.mse_loss(model(inputs), targets).backward()
                optimizer_step(optimizer)
        return rounds, model.state_dict()

    found = mode.run(body)
    samples = list(Pairs(count))
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for together in zip(*(rounds for rounds, _ in found), strict=True):
        chosen = [samples[number] for numbers in together for number in numbers]
        inputs, targets = torch.stack([each[0] for each in chosen]), torch.stack([each[1] for each in chosen])
        optimizer.zero_grad()
        F.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    assert {0} < {len(numbers) for rounds, _ in found for numbers in rounds}, "some rank had nothing in some round"
    for _, state in found:
        torch.testing.assert_close(state, dict(model.state_dict()), rtol=1e-11, atol=1e-13)


class CodedError(Exception):
    """An error of the user's own."""


class Failing(Stream):
    """Fails on rank 0."""

    def __init__(self) -> None:
        super().__init__()
        self.failing = rank() == 0

    def __iter__(self) -> Iterator[int]:
        for number in range(self.count):
            if number == 12 and self.failing:
                raise CodedError(f"code {number}")
            yield number


@pytest.mark.parametrize("workers", [0, 2])
def test_a_datasets_error_keeps_its_type_and_follows_the_batches_before_it(workers):
    got = []
    with pytest.raises(CodedError) as caught:
        for batch in DeviceLoader(loader_of(Failing(), workers)):
            got += batch.tolist()
    assert str(caught.value) == "code 12"
    assert any(note.startswith("after 12 samples of the stream that part") for note in caught.value.__notes__)
    assert sorted(got) == list(range(12))


def test_an_error_on_one_rank_ends_the_others():
    own, peer = refused(THREADS_2, Failing, None)
    assert (type(own), own.args) == (CodedError, ("code 12",))
    assert (type(peer), str(peer)) == (BrokenWorldError, "the loader of rank 0 failed with CodedError: code 12")
    with pytest.raises(CodedError, match="code 12"):
        passes(PROCESSES_2, Failing, None, workers=1)


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, True)])
def test_leaving_all_ranks_loops_early_begins_the_next_epoch(workers, persistent):
    found = passes(THREADS_2, Stream, 1, 2, None, workers=workers, persistent_workers=persistent)
    assert all_of(found, 2) == list(range(COUNT))
    assert [each[2].state["epoch"] for each in found] == [3, 3]


def test_a_rank_that_leaves_earlier_breaks_the_others():
    def body() -> str:
        loader = DeviceLoader(loader_of(Stream(200), size=1))
        try:
            loop(loader, 1 if rank() else None)
        except BrokenWorldError as error:
            return type(error).__name__
        return "left"

    with contextlib.suppress(BrokenWorldError):
        assert THREADS_2.run(body) == ["BrokenWorldError", "left"]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_that_is_gone_keeps_nothing_alive(workers):
    dataset = Stream()
    torch_loader = loader_of(dataset, workers, persistent_workers=bool(workers))
    loader = DeviceLoader(torch_loader)
    loop(loader)
    gone = [weakref.ref(dataset), weakref.ref(torch_loader)]
    del dataset, torch_loader, loader
    gc.collect()
    assert [each() for each in gone] == [None, None]
