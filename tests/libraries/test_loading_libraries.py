"""Libraries that load data: each sample once, on any ranks and workers, and after a resume on others."""

from __future__ import annotations

import importlib.util
import itertools
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from loader_kills import check, undisturbed
from loader_kinds import COUNT, KINDS, TESTED_HERE, numbers_of
from modes import PROCESSES_2, Mode
from torch.utils.data import DataLoader

from unisono import DeviceLoader, current_world

pytestmark = [pytest.mark.programs, pytest.mark.timeout(300)]

PROCESSES_1 = Mode("processes", 1)  # what libraries leave in a process ends with it
PLANS = [
    [(PROCESSES_2, 2, 2), (PROCESSES_1, 1, 3), (PROCESSES_2, 1, None)],
    [(PROCESSES_2, 0, 3), (PROCESSES_1, 0, 3), (PROCESSES_2, 0, None)],
]
SHUFFLED = [
    *("Hugging Face shuffled", "litdata", "litdata's loader", "mosaicml-streaming", "mosaicml-streaming's loader"),
]
SEEN_BY_ALL = ["grain", "grain's loader", "torchdata.nodes", "torchrl's buffer", "spdl"]


def need(*names: str) -> None:
    """Skip the test if a module is not here. It is imported in the ranks only."""
    for name in names:
        if importlib.util.find_spec(name.partition(".")[0]) is None:
            pytest.skip(f"needs {name}: make test-programs")


@pytest.fixture
def folder(kind: str, tmp_path: Path) -> str:
    """Where samples are kept, as the library writes them."""
    need(*KINDS[kind].needs)
    KINDS[kind].write(str(tmp_path))
    return str(tmp_path)


def counted(loader: DeviceLoader, most: int | None = None) -> list[int]:
    """The samples that count of the next loop, or of so many batches of it."""
    iterator = iter(loader)
    return [
        each
        for batch in itertools.islice(iterator, most)
        for each in numbers_of(batch)[: iterator.valid_samples].tolist()
    ]


@pytest.mark.parametrize("kind", SHUFFLED)
@pytest.mark.parametrize("workers", [0, 2])
def test_two_epochs_of_two_ranks_have_each_sample_once_and_other_orders(kind, folder, workers):
    def body() -> list[list[int]]:
        loader = DeviceLoader(KINDS[kind].make(folder, workers))
        return [counted(loader) for _ in range(2)]

    first, second = zip(*PROCESSES_2.run(lambda: body()), strict=True)
    for epoch in (first, second):
        assert sorted(itertools.chain(*epoch)) == list(range(COUNT))
    assert first != second


@pytest.mark.parametrize("kind", [*SHUFFLED, *SEEN_BY_ALL])
@pytest.mark.parametrize("plan", PLANS)
def test_the_second_epoch_goes_on_with_other_numbers_of_ranks_and_workers(kind, folder, plan):
    def body(workers: int, most: int | None, state: Any) -> tuple[list[int], Any]:
        loader = DeviceLoader(KINDS[kind].make(folder, workers))
        if state is not None:
            loader.load_state_dict(state)
        elif kind in SHUFFLED:
            loader.set_epoch(1)
        else:
            counted(loader)
        return counted(loader, most), loader.state_dict()

    found, state = [], None
    for mode, workers, most in plan:
        got = mode.run(lambda workers=workers, most=most, state=state: body(workers, most, state))
        found += [sample for samples, _ in got for sample in samples]
        state = got[0][1]
    assert sorted(found) == list(range(COUNT))


@pytest.mark.parametrize("kind", [name for name, kind in KINDS.items() if not {*kind.needs} <= TESTED_HERE])
def test_runs_that_are_killed_at_random_train_on_each_sample_once(kind):
    need(*KINDS[kind].needs)
    expected = undisturbed(kind)
    for seed in range(2):
        check(kind, seed, expected)


def test_batches_of_tensordicts_are_cut_by_themselves():
    need("tensordict")

    def body() -> list[int]:
        from tensordict import TensorDict

        def batch_of(samples: list[int]) -> TensorDict:
            more = TensorDict({"x": torch.tensor(samples).float()}, [len(samples)])
            return TensorDict({"ids": torch.tensor(samples), "more": more}, [len(samples)])

        found = []
        loader = DeviceLoader(DataLoader(range(37), 3, collate_fn=batch_of))
        for batch in loader:
            assert batch.batch_size == batch["more"].batch_size == batch["ids"].shape
            found += batch["ids"][: loader.valid_samples].tolist()
        return found

    assert sorted(itertools.chain(*PROCESSES_2.run(lambda: body()))) == list(range(37))


def test_a_replay_buffers_state_is_not_copied_for_each_batch():
    need("torchrl")

    def body() -> tuple[int, int]:
        from tensordict import TensorDict
        from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
        from torchrl.data.replay_buffers.samplers import SamplerWithoutReplacement

        asked = []

        class Buffer(TensorDictReplayBuffer):
            def state_dict(self) -> Any:
                asked.append(1)
                return super().state_dict()

        buffer = Buffer(storage=LazyTensorStorage(4096), sampler=SamplerWithoutReplacement(), batch_size=16)
        buffer.extend(TensorDict({"ids": torch.arange(4096), "x": torch.zeros(4096, 1024)}, [4096]))
        return len({number for batch in DeviceLoader(buffer) for number in batch["ids"].tolist()}), len(asked)

    ((found, asked),) = PROCESSES_1.run(lambda: body())
    assert found == 4096
    assert asked < 4096 // 16 // 4


@pytest.mark.parametrize("name", ["DistributedDeterministicSampler", "DistributedRandomSampler"])
def test_spdls_samplers_are_not_cut_again(name):
    need("spdl.source")

    def body() -> list[int]:
        import spdl.source

        world = current_world()
        sampler = getattr(spdl.source, name)(COUNT, rank=world.rank, world_size=world.world_size)
        return [
            number for batch in DeviceLoader(DataLoader(range(COUNT), 2, sampler=sampler)) for number in batch.tolist()
        ]

    assert sorted(itertools.chain(*PROCESSES_2.run(lambda: body()))) == list(range(COUNT))


def test_an_order_of_completion_is_refused_and_an_order_of_input_is_dealt():
    need("spdl.dataloader")

    def body(order: str) -> list[int]:
        from spdl.dataloader import DataLoader as Pipeline

        loader = Pipeline(range(COUNT), batch_size=2, aggregator=torch.tensor, num_threads=2, output_order=order)
        loader = DeviceLoader(loader)
        return [number for batch in loader for number in batch[: loader.valid_samples].tolist()]

    with pytest.raises(ValueError, match=r"as soon as one of its 2 threads completes .* pass output_order='input'"):
        PROCESSES_2.run(lambda: body("completion"))
    assert sorted(itertools.chain(*PROCESSES_2.run(lambda: body("input")))) == list(range(COUNT))


@pytest.mark.parametrize("mode", [PROCESSES_1, PROCESSES_2], ids=str)
def test_grains_batches_are_dealt_once_and_resumed(mode: Mode):
    need("grain")

    def make() -> DeviceLoader:
        import grain

        batches = grain.MapDataset.range(COUNT).shuffle(seed=3).batch(2).to_iter_dataset()
        return DeviceLoader(batches)

    def body() -> list[int]:
        first, rest = make(), make()
        found = [number for batch in itertools.islice(first, 3) for number in batch.tolist()]
        rest.load_state_dict(first.state_dict())
        return found + [number for batch in rest for number in batch[: rest.valid_samples].tolist()]

    assert sorted(itertools.chain(*mode.run(lambda: body()))) == list(range(COUNT))


def test_a_node_loader_that_resumes_in_another_order_is_noticed(caplog):
    need("torchdata")

    def make() -> DeviceLoader:
        from torchdata import nodes

        generator = torch.Generator(torch.default_generator.device).manual_seed(3)
        sampler = torch.utils.data.RandomSampler(range(COUNT), generator=generator)
        return DeviceLoader(nodes.Loader(nodes.Mapper(nodes.Batcher(nodes.SamplerWrapper(sampler), 2), torch.tensor)))

    for epoch in range(2):
        first, rest = make(), make()
        for _ in range(epoch):
            assert len([*first]) == COUNT // 2
        found = [number for batch in itertools.islice(first, 3) for number in batch.tolist()]
        rest.load_state_dict(first.state_dict())
        with caplog.at_level(logging.WARNING):
            found += [number for batch in rest for number in batch.tolist()]
        is_exact = sorted(found) == list(range(COUNT))
        assert is_exact != ("does not continue from its state_dict as it did" in caplog.text)
