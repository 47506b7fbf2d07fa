"""Virtual ranks: what a run computes depends on their number alone, to the last bit."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from modes import PROCESSES_2, on, told
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset

from unisono import Accelerator, Accuracy, DeviceLoader, Mean, Virtual, current_world
from unisono.batches.virtual_ranks import Tree, VirtualRanks, fold_over_ranks, sums_of
from unisono.devices.cpu import CpuBackend
from unisono.errors import CollectiveMismatchError, WorkerDiedError
from unisono.strategies import FSDP

V = 4


def witnessed(count: int | None) -> Any:
    """On three ranks, so many virtual ranks have witnesses, which change nothing else."""
    return Virtual(count, witness_every=2) if count and current_world().world_size == 3 else count


# The tree.


def pairs(table: tuple[tuple[int, ...], ...]) -> Any:
    """The additions over virtual ranks that are carried so, as nested pairs."""
    worlds = [VirtualRanks(rank, table) for rank in range(len(table))]
    count = worlds[0].count
    sums: list[dict[Any, Any]] = []
    for each in worlds:
        tree: Tree[Any] = Tree(count, lambda one, other: (one, other))
        for rank in each.own:
            tree.put(rank, rank)
        sums.append(tree.sums)
    width = max(len(sums_of(each.own, count)) for each in worlds)

    def gather(_: list[Any]) -> list[list[Any]]:
        padded = [[found[node] for node in sums_of(each.own, count)] for each, found in zip(worlds, sums, strict=True)]
        return [each + each[:1] * (width - len(each)) for each in padded]

    return fold_over_ranks(worlds[0], sums[0], gather, lambda one, other: (one, other))


@hypothesis.given(st.data())
def test_the_additions_depend_on_the_number_of_virtual_ranks_alone(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 40))
    ranks = data.draw(st.integers(1, count))
    alone = pairs((tuple(range(count)),))
    assert pairs(VirtualRanks.carried_by(0, ranks, Virtual(count)).table) == alone
    carriers = data.draw(st.permutations([*range(ranks), *data.draw(st.lists(st.integers(0, ranks - 1)))][:count]))
    carriers += [0] * (count - len(carriers))
    assert pairs(tuple(tuple(v for v in range(count) if carriers[v] == rank) for rank in range(ranks))) == alone
    if count == 4:
        assert alone == ((0, 2), (1, 3))


@pytest.mark.parametrize(("count", "ranks", "sums"), [(8, 1, 1), (8, 2, 1), (8, 4, 1), (8, 8, 1), (6, 2, 1), (8, 3, 3)])
def test_a_rank_has_one_sum_where_it_carries_a_whole_subtree(count: int, ranks: int, sums: int) -> None:
    assert len(sums_of(VirtualRanks.carried_by(0, ranks, count).own, count)) == sums


# Training.


class Rows(Dataset[Any]):
    """Rows with noise of all three generators."""

    def __init__(self, count: int, shape: tuple[int, ...]) -> None:
        self.count, self.shape = count, shape

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, place: int) -> Any:
        noise = random.random() + np.random.random() + torch.rand(()).item()
        row = torch.randn(self.shape, generator=torch.Generator().manual_seed(place))
        return row + 0.1 * noise, place % 5


class Tokens(Dataset[Any]):
    def __len__(self) -> int:
        return 37

    def __getitem__(self, place: int) -> Any:
        found = torch.randint(11, (6,), generator=torch.Generator().manual_seed(place))
        return found, int(found.sum()) % 5


class Recurrent(nn.Module):
    def __init__(self, is_sparse: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8, sparse=is_sparse)
        self.cells = nn.GRU(8, 8, 2, batch_first=True, dropout=0.2)
        self.head = nn.Linear(8, 5)

    def forward(self, tokens: torch.Tensor) -> Any:
        return self.head(self.cells(self.embed(tokens))[0][:, -1])


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, 0.1, batch_first=True)
        self.head = nn.Linear(16, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> Any:
        return self.head(self.block(self.embed(tokens)))[:, -1, :5]


def convolutions() -> nn.Module:
    layers = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.3), nn.Flatten(), nn.Linear(4 * 16, 5)]
    return nn.Sequential(*layers)


def wide() -> nn.Module:
    """Parameters of 288 and 480 KB, whose gradients are reduced in place on two ranks."""
    return nn.Sequential(nn.Linear(3, 24_000, bias=False), nn.ReLU(), nn.Linear(24_000, 5))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Dataset[Any]]]] = {
    "convolutions": (convolutions, partial(Rows, 37, (1, 6, 6))),
    "attention": (Attending, Tokens),
    "recurrent": (Recurrent, Tokens),
    "sparse": (partial(Recurrent, True), Tokens),
    "plain": (partial(nn.Linear, 3, 5), partial(Rows, 37, (3,))),
    "wide": (wide, partial(Rows, 37, (3,))),
}


MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAM = partial(torch.optim.Adam, lr=0.01)
SHUFFLED = partial(DataLoader, batch_size=4, shuffle=True)


def train(
    network: str = "convolutions",
    count: int | None = V,
    seed: int = 3,
    epochs: int = 1,
    optimizer: Any = MOMENTUM,
    loader: Any = SHUFFLED,
    noise: float = 0.1,
    state: tuple[str, int] | None = None,
    **options: Any,
) -> Any:
    """Train; return the digest and the number of steps. With a state: save it after so many steps, and end; or, with a
    negative number, go on from it."""
    make, rows = NETWORKS[network]
    directory, at = state or (None, 0)
    accelerator = Accelerator(
        seed=seed,
        virtual_ranks=witnessed(count),
        max_grad_norm=1.0,
        project_dir=directory,
        schedule_unit="step",
        **options,
    )
    model = make()
    steps = optimizer(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(steps, 3, 0.8)
    model, steps, schedule, batches = accelerator.prepare(model, steps, schedule, loader(rows()))
    if at < 0:
        accelerator.load_state()
    taken = 0
    for _ in range(batches.epoch, epochs):
        for inputs, targets in batches:
            if noise and inputs.is_floating_point():
                inputs = inputs + noise * torch.randn_like(inputs)
            accelerator.backward(F.cross_entropy(model(inputs).float(), targets))
            steps.step()
            schedule.step()
            steps.zero_grad()
            taken += accelerator.sync_gradients
            if at > 0 and taken == at:
                accelerator.save_state()
                return None
    return accelerator.digest(), taken


def lists(rows: Any) -> DeviceLoader:
    """Batches as a list, the last one smaller."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        found = [rows[place] for place in range(len(rows))]
    stacks = torch.stack([row for row, _ in found]), torch.tensor([label for _, label in found])
    return DeviceLoader([*zip(*(each.split(5) for each in stacks), strict=True)], virtual_ranks=V)


WAYS: dict[str, dict[str, Any]] = {
    **{each: {"network": each, "optimizer": MOMENTUM if each == "sparse" else ADAM} for each in NETWORKS},
    "two epochs": {"optimizer": ADAM, "epochs": 2},
    "bf16": {"mixed_precision": "bf16"},
    "fp16": {"mixed_precision": "fp16"},
    "split_batches": {"split_batches": True},
    "zero1": {"strategy": "zero1"},
    "fsdp": {"strategy": "fsdp"},
    "fsdp of wide": {"strategy": "fsdp", "network": "wide"},
    "fsdp of attention": {"strategy": "fsdp", "network": "attention", "optimizer": partial(torch.optim.AdamW, lr=0.01)},
    "drop_last": {"loader": partial(DataLoader, batch_size=3, drop_last=True)},
    "workers": {"loader": partial(DataLoader, batch_size=4, shuffle=True, num_workers=1)},
    "lists": {"loader": lists},
}


@pytest.mark.slow
def test_so_it_is_for_other_numbers_of_virtual_ranks() -> None:
    assert len({on(each, partial(train, count=5)) for each in (1, 2, 5)}) == 1


ONE, ONES = partial(nn.Linear, 1, 1), partial(torch.ones, 8, 1)


class Loop:
    """What a loop has: a model and its rows, which are made behind the seed, an optimizer, and a loader."""

    def __init__(self, make: Any = ONE, rows: Any = ONES, size: int = 2, **options: Any) -> None:
        shuffle, decay = options.pop("shuffle", False), options.pop("decay", 0.0)
        count = options.pop("virtual_ranks", V)
        self.accelerator = Accelerator(virtual_ranks=witnessed(count), **options)
        model, tensors = make(), rows()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=decay)
        data = TensorDataset(*(tensors if isinstance(tensors, tuple) else (tensors,)))
        loader = DataLoader(data, size, shuffle=shuffle)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(model, optimizer, loader)

    def __iter__(self) -> Iterator[Any]:
        yield from self.loader

    def step(self, loss: torch.Tensor, keeps_zeros: bool = False, **options: Any) -> None:
        self.accelerator.backward(loss, **options)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=not keeps_zeros)

    def backward(self, *batches: torch.Tensor) -> None:
        self.accelerator.backward(sum(self.model(each).mean() for each in batches))

    def each(self, act: Callable[[torch.Tensor], Any]) -> None:
        for (inputs,) in self.loader:
            act(inputs)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def values(self) -> list[Any]:
        return values(self.accelerator.unwrap_model(self.model).state_dict().values())


def values(tensors: Iterable[Any]) -> list[Any]:
    return [getattr(each, "full_tensor", each.detach)().tolist() for each in tensors]


def wholly(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def weights(count: int | None) -> list[Any]:
    """Of a network in which nothing is random, and no buffer."""
    make = lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 5)).double()  # noqa: E731
    rows = lambda: (wholly(35, 3), torch.randint(5, (35,)))  # noqa: E731
    loop = Loop(make, rows, 4, seed=0, virtual_ranks=count, max_grad_norm=0.5, shuffle=True)
    for inputs, targets in chain(loop, loop):
        loop.step(F.cross_entropy(loop.model(inputs), targets))
    return loop.values()


def maker_first(count: int | None, by_hand: bool = False, **options: Any) -> list[Any]:
    """The loss of the maker, which comes first, leaves gradients in the judge, on those that it has stepped on."""
    accelerator = Accelerator(seed=1, virtual_ranks=witnessed(count), **options)
    maker, judge = nn.Linear(3, 3).double(), nn.Linear(3, 1).double()
    steps = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (maker, judge)]
    rows = TensorDataset(torch.randn(26, 3, dtype=torch.float64))
    made_by, judged_by, one, other, loader = accelerator.prepare(maker, judge, *steps, DataLoader(rows, 3))
    for (real,) in loader:
        made = made_by(real.flip(1))
        lost, told = F.softplus(-judged_by(made)).mean(), F.softplus(judged_by(made.detach()) - judged_by(real)).mean()
        one.zero_grad()
        accelerator.backward(lost)
        one.step()
        for each in judged_by.parameters() if by_hand else ():
            each.grad = None
        if not by_hand:
            other.zero_grad()
        accelerator.backward(told)
        other.step()
    return values([*made_by.parameters(), *judged_by.parameters()])


def weighted(count: int | None, has_norm: bool = False) -> list[Any]:
    """By the numbers of tokens: none in the first round, and few in the next batch."""
    norm = partial(nn.BatchNorm1d, 4) if has_norm else nn.Tanh
    make = lambda: nn.Sequential(nn.Linear(3, 4), norm(), nn.Linear(4, 1)).double()  # noqa: E731
    rows = lambda: (wholly(56, 3), torch.randint(6, (56,)).where(torch.arange(56) >= 18, 0))  # noqa: E731
    loop = Loop(make, rows, 4, seed=3, virtual_ranks=count, decay=0.1)
    for inputs, numbers in chain(loop, loop):
        loss = (loop.model(inputs).square()[:, 0] * numbers).sum() / numbers.sum().clamp(min=1)
        loop.step(loss, weight=numbers.sum())
    return loop.values()


def test_weights_of_some_ranks_batches_alone_are_refused_on_all_ranks() -> None:
    def body() -> str:
        loop = Loop(rows=partial(torch.ones, 16, 1))
        with pytest.raises(CollectiveMismatchError) as caught:
            for number, (inputs,) in enumerate(loop):
                weight = 2.0 if loop.accelerator.is_main_process and number > 1 else None
                loop.step(loop.model(inputs).mean(), weight=weight)
        return str(caught.value)

    for text in PROCESSES_2.run(body):
        assert "rank 0 came to the weights of the batches of a step" in text
        assert text.endswith("every rank must pass backward(..., weight=) for each microbatch of a step, or for none")


def leaves_out() -> tuple[str, int]:
    """Takes no step whose norm is not finite; returns how many there were."""
    make = lambda: nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1))  # noqa: E731
    rows = lambda: torch.randn(48, 3).index_fill(0, torch.tensor(17), torch.nan)  # noqa: E731
    loop, left_out = Loop(make, rows, seed=0, shuffle=True), 0
    for (inputs,) in chain(loop, loop):
        loop.optimizer.zero_grad()
        loop.accelerator.backward(loop.model(inputs).square().mean())
        norm = loop.accelerator.clip_grad_norm_(loop.model.parameters(), 1.0)
        if norm is not None and not norm.isfinite():
            loop.optimizer.zero_grad()
            left_out += 1
            continue
        loop.optimizer.step()
    assert left_out == 2
    return loop.accelerator.digest(), left_out


EIGHT = torch.arange(24.0).view(8, 3).cos()


def normalises() -> list[Any]:
    loop = Loop(partial(nn.BatchNorm1d, 3), lambda: EIGHT)
    for (inputs,) in loop:
        loop.step(loop.model(inputs).square().mean())
    assert int(loop.model.module.num_batches_tracked) == 1
    return values([loop.model.module.running_mean])


def delivered() -> list[int]:
    accelerator = Accelerator(virtual_ranks=V)
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(23)), batch_size=2))
    gathered = [accelerator.gather_for_metrics(inputs).tolist() for (inputs,) in loader]
    assert len(loader) == len(gathered) == 3 * -(-V // accelerator.num_processes)
    return [each for found in gathered for each in found]


def collated(drops: bool) -> list[int]:
    """By a function of the script, with a row of each sample, or with fewer."""
    rows = DataLoader(range(11), 2, collate_fn=lambda given: torch.tensor(given[drops:]))  # type: ignore[arg-type]
    accelerator = Accelerator(virtual_ranks=V)
    return [each for batch in accelerator.prepare(rows) for each in accelerator.gather_for_metrics(batch).tolist()]


def edited(edit: Callable[[Accelerator, nn.Module], Any], above: float = 0.9) -> str:
    """What a sharded run ends with, or its error, where the loop does something to some gradients."""
    make = lambda: nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))  # noqa: E731
    loop = Loop(make, partial(torch.randn, 37, 3), seed=1, strategy="fsdp", shuffle=True)
    for (inputs,) in loop:
        loop.optimizer.zero_grad()
        loop.accelerator.backward(loop.model(inputs).square().mean())
        if float(inputs[0, 0]) > above:
            edit(loop.accelerator, loop.model)
        loop.optimizer.step()
    return loop.accelerator.digest()


def test_a_rank_repeating_a_batch_alone_with_divided_parameters_is_told_so() -> None:
    def body() -> None:
        loop = Loop(partial(nn.Linear, 3, 1), partial(torch.randn, 24, 3), strategy="fsdp")
        for number, (inputs,) in enumerate(loop):
            loss = loop.model(inputs).square().mean()
            if number == 1 and loop.accelerator.is_main_process:  # as after an error
                loss = loop.model(inputs).square().mean()
            loop.step(loss)

    with pytest.raises(CollectiveMismatchError, match="repeat a batch, as after an error, on all ranks or on none"):
        on(2, body)


def freezes(count: int | None, strategy: str = "ddp") -> list[Any]:
    """Goes on with gradients of zero at layers that it has frozen: momentum moves these."""
    make = lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()  # noqa: E731
    loop, taken = Loop(make, partial(wholly, 48, 3), seed=1, virtual_ranks=count, strategy=strategy), 0
    for (inputs,) in loop:
        loop.step(loop.model(inputs).square().mean(), keeps_zeros=True)
        taken += loop.accelerator.sync_gradients
        if taken >= 2 and loop.accelerator.sync_gradients:
            loop.accelerator.unwrap_model(loop.model)[0].requires_grad_(False)
    return loop.values()


def two_models(alternates: bool) -> str:
    accelerator = Accelerator(seed=1, virtual_ranks=witnessed(V))
    maker, judge = nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.2), nn.Linear(4, 1))
    steps = [torch.optim.Adam(each.parameters(), lr=0.01) for each in (maker, judge)]
    rows = TensorDataset(torch.randn(26, 3))
    maker, judge, one, other, loader = accelerator.prepare(maker, judge, *steps, DataLoader(rows, 3, shuffle=True))
    for (real,) in loader:
        made = maker(torch.randn(len(real), 2))
        other.zero_grad()
        accelerator.backward(F.softplus(-judge(real)).mean() + F.softplus(judge(made.detach())).mean())
        if alternates:
            other.step()
        judge.requires_grad_(False)
        one.zero_grad()
        accelerator.backward(F.softplus(-judge(made)).mean())
        judge.requires_grad_(True)
        if not alternates:
            other.step()
        one.step()
    return accelerator.digest()


def test_a_state_may_be_loaded_in_the_middle_of_a_round(tmp_path: Path) -> None:
    def body(leaves: bool) -> str:
        make = lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))  # noqa: E731
        loop = Loop(make, partial(torch.randn, 48, 3), 3, seed=1, shuffle=True)
        loop.accelerator.save_state(tmp_path / "begin")
        for left_at in (5, -1) if leaves else (-1,):
            for number, (inputs,) in enumerate(loop.loader):
                loop.step(loop.model(inputs).square().mean())
                if number == left_at:
                    loop.accelerator.load_state(tmp_path / "begin")
                    break
        return loop.accelerator.digest()

    assert body(leaves=True) == body(leaves=False)


@pytest.mark.slow
def test_the_script_of_the_page_prints_the_same_on_each_number_of_ranks(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "virtual_ranks.md").read_text()
    (script := tmp_path / "train.py").write_text(page.split("```python\n")[1].split("```")[0])
    printed = set()
    for ranks in ("1", "3"):
        command = [sys.executable, "-m", "unisono", "run", "--backend", "cpu", "-n", ranks, "--no-prefix", str(script)]
        printed.add(subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout)
    assert len(printed) == 1
    assert len(printed.pop().strip()) == 16


# What is refused.


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"virtual_ranks": 0}, "virtual_ranks=0"),
        ({"virtual_ranks": 4, "gradient_accumulation_steps": 2}, "pass virtual_ranks=8"),
        ({"virtual_ranks": 4, "sync_batchnorm": True}, "each virtual rank has statistics of its own"),
        ({"virtual_ranks": 4, "strategy": FSDP(offload=True)}, "or 'fsdp', without replicas=, offload="),
        ({"virtual_ranks": 4, "strategy": FSDP(param_dtype=torch.bfloat16)}, "and dtypes"),
    ],
)
def test_what_does_not_go_with_them_is_refused_at_once(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Accelerator(**options)


def test_a_loader_must_have_as_many() -> None:
    accelerator = Accelerator(virtual_ranks=2)
    rows = DataLoader(TensorDataset(torch.ones(6, 1)), 1)
    assert len(accelerator.prepare(DeviceLoader(rows, virtual_ranks=2))) == 6
    with pytest.raises(ValueError, match="virtual_ranks=None, and the Accelerator with 2; give both the same"):
        accelerator.prepare(DeviceLoader(rows))
    with pytest.raises(ValueError, match="virtual_ranks=2, and the Accelerator with None"):
        Accelerator().prepare(DeviceLoader(rows, virtual_ranks=2))


def test_a_stream_is_refused() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[torch.Tensor]:
            return iter(torch.ones(6, 1))

    with pytest.raises(ValueError, match="a stream has none: Stream is an IterableDataset; use a map-style"):
        Accelerator(virtual_ranks=2).prepare(DataLoader(Stream(), 1))


def test_data_that_are_divided_already_are_refused() -> None:
    def body() -> None:
        rows = torch.arange(8.0)
        cut = DistributedSampler(rows, num_replicas=2, rank=current_world().rank)  # type: ignore[arg-type]
        accelerator = Accelerator(virtual_ranks=2)
        accelerator.prepare(DataLoader(rows, sampler=cut))  # type: ignore[arg-type]

    for said in PROCESSES_2.told(body):
        assert "deals out the batches of all ranks, and this loader gives each rank its own part" in said
        assert "leave the sharding to this loader (shuffle=True in place of a DistributedSampler)" in said


@pytest.mark.parametrize("name", ["save_state", "save_model", "digest"])
def test_what_would_be_the_state_within_a_round_is_refused(name: str, tmp_path: Path) -> None:
    loop = Loop(virtual_ranks=2, project_dir=tmp_path)
    (inputs,) = next(batches := iter(loop.loader))
    loop.step(loop.model(inputs).sum())
    with pytest.raises(RuntimeError, match=f"{name} was called in the middle of a round of 2 virtual ranks"):
        getattr(loop.accelerator, name)(*[loop.model, tmp_path][: 2 * (name == "save_model")])
    del batches  # which is open until here


def looks_ahead(loop: Loop) -> None:
    before: list[torch.Tensor] = []
    for (inputs,) in loop.loader:
        before.append(inputs)
        if len(before) == 2:
            loop.backward(before.pop(0))


def adds_losses(loop: Loop) -> None:
    losses: list[torch.Tensor] = []
    for (inputs,) in loop.loader:
        losses.append(loop.model(inputs).mean())
        if len(losses) == 2:
            loop.accelerator.backward(losses[0] + losses[1])


def sharpens(loop: Loop) -> None:
    def act(inputs: torch.Tensor) -> None:
        loop.backward(inputs)
        with torch.no_grad():
            loop.model.module.weight.add_(0.1)
        loop.optimizer.zero_grad()
        loop.backward(inputs)

    loop.each(act)


def uses_more_threads(loop: Loop) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        loop.each(loop.backward)
    finally:
        torch.set_num_threads(before)


def evaluates(loop: Loop) -> None:
    with torch.no_grad():
        for (inputs,) in loop.loader:
            loop.model(inputs)


def drops_one(loop: Loop, drops_pass: bool) -> None:
    """The first batch has no step, or the second one no pass."""
    for number, (inputs,) in enumerate(loop.loader):
        if not drops_pass or number != 1:
            loop.backward(inputs)
        if drops_pass or number % 2:
            loop.optimizer.step()
            loop.optimizer.zero_grad()


def weighs_twice(loop: Loop) -> None:
    for (inputs,) in loop.loader:
        for weight in (2.0, None):
            loop.accelerator.backward(loop.model(inputs).mean(), weight=weight)


LOOPS: dict[str, tuple[Callable[[Loop], Any], str]] = {
    "clips": (
        lambda it: it.each(lambda x: (it.backward(x), nn.utils.clip_grad_norm_(it.model.parameters(), 0.1))),
        "clip by accelerator.clip_grad_norm_",
    ),
    "looks ahead": (looks_ahead, "draw each batch where it is used"),
    "joins": (lambda it: it.backward(*(each for (each,) in [*it.loader][:2])), "draw each batch where it is used"),
    "adds losses": (adds_losses, "losses of several batches"),
    "sharpens": (sharpens, "another change of its parameters, in the same round"),
    "steps twice": (
        lambda it: it.each(lambda x: (it.backward(x), it.optimizer.step())),
        "was asked to step twice for one batch",
    ),
    "steps on some": (partial(drops_one, drops_pass=False), "was asked to step for 1 of the 2 batches"),
    "leaves out a pass": (partial(drops_one, drops_pass=True), "on a batch that had no backward pass"),
    "zeroes nothing": (
        lambda it: [(it.backward(inputs), it.optimizer.step()) for (inputs,) in it.loader],
        "found gradients that its optimizer had stepped on, .* call its zero_grad",
    ),
    "closes": (
        lambda it: it.each(lambda x: it.optimizer.step(lambda: it.backward(x))),
        "and a closure cannot be combined",
    ),
    "uses more threads": (uses_more_threads, r"set_num_threads\(2\) was called"),
    "makes graphs": (
        lambda it: it.each(lambda x: it.model(x).mean().backward(create_graph=True)),
        r"create_graph=True\) through the",
    ),
    "goes past": (
        lambda it: it.each(lambda x: it.accelerator.backward(it.model.module(x).mean())),
        "bypassed what prepare\\(\\) has returned",
    ),
    "evaluates": (evaluates, "in a loop without gradients: .* call its eval"),
    "weighs twice": (weighs_twice, "two passes of one batch have weight=2 and weight=None, .* pass the same in both"),
    "accumulates": (
        lambda it: setattr(it.accelerator, "gradient_accumulation_steps", 2),
        "cannot be set with virtual_ranks=2",
    ),
}


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_whose_bits_would_depend_on_the_ranks_is_refused(name: str) -> None:
    run, words = LOOPS[name]
    has_norm = name in ("goes past", "evaluates")
    make = (lambda: nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1))) if has_norm else ONE
    with pytest.raises((RuntimeError, ValueError), match=words):
        run(Loop(make, virtual_ranks=2))


@pytest.mark.parametrize(
    ("model", "optimizer", "strategy", "words"),
    [
        (nn.SyncBatchNorm(1), torch.optim.SGD, "fsdp", "use BatchNorm"),
        (nn.Linear(1, 1), torch.optim.SparseAdam, "ddp", "use Adam or SGD"),
        (nn.Linear(1, 1), partial(torch.optim.AdamW, fused=True), "fsdp", "pass fused=False"),
    ],
)
def test_what_needs_the_ranks_is_refused(model: nn.Module, optimizer: Any, strategy: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Accelerator(virtual_ranks=2, strategy=strategy).prepare(model, optimizer(model.parameters(), lr=0.1))


def noisy_steps() -> Any:
    """Numbers that are drawn between a step and the next batch, and behind a loop that was left."""
    loop = Loop(partial(nn.Linear, 2, 2), partial(torch.randn, 40, 2), seed=2)
    drawn, taken = [torch.rand(()).item()], 0
    for (inputs,) in loop.loader:
        loop.step(loop.model(inputs).square().mean())
        if loop.accelerator.sync_gradients:
            with torch.no_grad():
                loop.model.module.weight.add_(0.01 * torch.randn(2, 2))
            taken += 1
        if taken == 3:
            break
    return drawn, torch.rand(()).item(), loop.accelerator.digest()


@pytest.mark.parametrize(
    ("left_out", "words"), [(2, "step for 1 of the 2 batches"), (3, "has a batch twice, or lacks one of the round")]
)
def test_a_batch_that_is_left_out_is_refused(left_out: int, words: str) -> None:
    loop = Loop(size=1, rows=partial(torch.ones, 6, 1), virtual_ranks=2)
    with pytest.raises(RuntimeError, match=words):
        for number, (inputs,) in enumerate(loop.loader):
            if number != left_out:
                loop.step(loop.model(inputs).sum())


def test_data_of_no_loader_is_refused() -> None:
    loop = Loop()
    with pytest.raises(ValueError, match="has a loss on data of none; prepare its loader"):
        loop.backward(torch.ones(3, 1))


@pytest.mark.parametrize("count", [None, 3])
def test_batches_of_others_are_refused(count: int | None) -> None:
    accelerator = Accelerator(virtual_ranks=count)
    model = accelerator.prepare(nn.Linear(1, 1))
    (inputs,) = next(iter(DeviceLoader(DataLoader(TensorDataset(torch.ones(6, 1)), 1), virtual_ranks=2)))
    with pytest.raises(ValueError, match=f"with virtual_ranks=2 cannot be trained on with virtual_ranks={count}"):
        accelerator.backward(model(inputs).sum())


def test_one_with_them_leaves_nothing_to_another() -> None:
    Accelerator(virtual_ranks=3)
    loop = Loop(rows=partial(torch.ones, 6, 1), size=1, virtual_ranks=None)
    loop.accelerator.backward(loop.model(next(iter(loop.loader))[0]).sum())
    assert loop.model.module.weight.grad == 1


def peeking_steps(peeks: bool) -> str:
    """Of a loop that asks before its random numbers whether the batch is the last one, which reads the next."""
    accelerator = Accelerator(seed=4, virtual_ranks=V, max_grad_norm=0.5)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.4), nn.Linear(4, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = DataLoader(Rows(24, (3,)), 3, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, rows)
    batches = iter(loader)
    for inputs, targets in batches:
        if peeks:
            batches.is_last()
        noise = random.random() + np.random.random()
        accelerator.backward(F.cross_entropy(model(inputs + noise), targets))
        optimizer.step()
        optimizer.zero_grad()
    return accelerator.digest()


def passes_behind_the_reduction() -> str:
    """Of a loop with two optimizers of one model, in which buffers change between clipping and stepping, too."""
    accelerator = Accelerator(seed=4, virtual_ranks=V)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    steps = [torch.optim.SGD(each.parameters(), lr=0.1) for each in model]
    rows = DataLoader(TensorDataset(torch.randn(40, 3)), 2, shuffle=True)
    model, loader, *steps = accelerator.prepare(model, rows, *steps)
    for (inputs,) in loader:
        accelerator.backward(model(inputs).square().mean())
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        with torch.no_grad():
            model(2 * inputs)
        for each in steps:
            each.step()
            each.zero_grad()
    return accelerator.digest()


def means(state: str | None = None, leaves: bool = False) -> Any:
    """What a loop reports: a mean of losses of very different sizes, an accuracy, and gathered losses."""
    accelerator = Accelerator(seed=4, virtual_ranks=witnessed(V), project_dir=state)
    model = nn.Linear(3, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = DataLoader(Rows(61, (3,)), 4, shuffle=True)
    model, optimizer, loader, mean, share = accelerator.prepare(model, optimizer, rows, Mean(), Accuracy())
    if state is not None and not leaves:
        accelerator.load_state()
    gathered = []
    for inputs, targets in loader:
        losses = F.cross_entropy(model(inputs), targets, reduction="none").exp() ** 7
        mean.update(losses.mean(), targets)
        share.update(model(inputs), targets)
        accelerator.backward(losses.log().mean())
        optimizer.step()
        optimizer.zero_grad()
        gathered.append(accelerator.gather_for_metrics(losses.detach()))
        if leaves and accelerator.sync_gradients:
            accelerator.save_state()
            return None
    found = torch.cat(gathered).tolist()
    assert state is not None or len(found) == 61
    return mean.compute().hex(), share.compute().hex(), found


def scales() -> Any:
    """The loss scales of fp16, of which the first ones overflow."""
    scaler = {"init_scale": 2.0**17, "growth_interval": 2}
    make = lambda: nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 5))  # noqa: E731
    rows = lambda: (torch.randn(200, 6), torch.randint(5, (200,)))  # noqa: E731
    loop = Loop(make, rows, 4, seed=1, mixed_precision="fp16", scaler_options=scaler, shuffle=True)
    found = []
    for inputs, targets in loop:
        loop.step(F.cross_entropy(loop.model(inputs), targets))
        if loop.accelerator.sync_gradients:
            found.append(loop.accelerator.scaler.state_dict())
    assert len({each["scale"] for each in found}) > 2
    return found, loop.accelerator.digest()


# What a checkpoint says of the bits.


def save_or_load(directory: Path, count: int | None, loads: bool) -> None:
    accelerator = Accelerator(virtual_ranks=count, project_dir=directory)
    model = nn.Linear(3, 1)
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    accelerator.load_state() if loads else accelerator.save_state(directory / "checkpoints" / "checkpoint_0")


@pytest.mark.parametrize(
    ("saved", "loaded", "text"),
    [
        (4, 8, "virtual_ranks=4, now 8"),
        (4, None, "virtual_ranks=4, now None"),
        (None, 4, "virtual_ranks=None, now 4"),
        (4, 4, ""),
        (None, None, ""),
    ],
)
def test_a_checkpoint_of_another_number_of_virtual_ranks_is_named_once(
    saved: int | None, loaded: int | None, text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_or_load(tmp_path, saved, False)
    save_or_load(tmp_path, loaded, True)
    said = [each.getMessage() for each in caplog.records if "the bits will differ" in each.getMessage()]
    assert len(said) == bool(text)
    assert all(each.endswith(f"was saved with {text}") for each in said)


def test_a_checkpoint_of_other_kernels_names_what_differs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_or_load(tmp_path, 4, False)
    monkeypatch.setattr(torch, "__version__", "9.9")
    monkeypatch.setattr(CpuBackend, "device_name", lambda *_: "Abacus")
    save_or_load(tmp_path, 4, True)
    (said,) = [each.getMessage() for each in caplog.records if "the bits will differ" in each.getMessage()]
    assert "now '9.9'" in said
    assert "device=" in said
    assert said.endswith("now 'Abacus'")
    assert "virtual_ranks" not in said
    assert "threads" not in said


# Metrics.


def measure() -> tuple[float, float, list[int]]:
    """A mean over training, an accuracy over a test, and its labels as they are gathered."""
    accelerator = Accelerator(seed=0, virtual_ranks=witnessed(V))
    rows = TensorDataset(torch.randn(38, 3), torch.randint(2, (38,)))
    model = nn.Linear(3, 2)
    model, optimizer, batches, tests = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), 0.1), DataLoader(rows, 2, shuffle=True), DataLoader(rows, 2)
    )
    mean, accuracy = accelerator.prepare(Mean(), Accuracy())
    for inputs, targets in batches:
        loss = F.cross_entropy(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        mean.update(loss, targets)
    labels: list[int] = []
    with torch.no_grad():
        for inputs, targets in tests:
            accuracy.update(model(inputs), targets)
            labels += accelerator.gather_for_metrics(targets).tolist()
    assert labels == rows.tensors[1].tolist()
    return round(mean.compute(), 6), accuracy.compute(), labels


def train_until(kill_at: int, directory: str) -> str:
    """Trains three epochs, with a checkpoint of each step; in step `kill_at`, a rank is killed."""
    accelerator = Accelerator(seed=3, virtual_ranks=V, project_dir=directory, max_grad_norm=0.5)
    model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 5))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loader = DataLoader(Rows(58, (3,)), 3, shuffle=True, drop_last=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.load_state(must_exist=False)
    state = accelerator.unwrap_model(optimizer).state
    while loader.epoch < 3:
        for inputs, targets in loader:
            accelerator.backward(F.cross_entropy(model(inputs), targets))
            step = int(next(iter(state.values()))["step"]) if state else 0
            if step == kill_at and accelerator.world.rank == step % accelerator.world.world_size:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
            optimizer.zero_grad()
            if accelerator.sync_gradients:
                accelerator.save_state()
    return accelerator.digest()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_a_run_killed_repeatedly_ends_with_the_bits_of_an_undisturbed_one(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    whole = on(1, partial(train_until, -1, str(tmp_path / "whole")))
    for kill_at in sorted(draw.sample(range(12), 3)):
        with pytest.raises(WorkerDiedError):
            on(draw.choice([2, 3, V]), partial(train_until, kill_at, str(tmp_path / "killed")))
    assert on(draw.choice([1, 2, 3]), partial(train_until, -1, str(tmp_path / "killed"))) == whole


# Loops within loops, and loops that are left.


def draws_behind(leaves: bool) -> list[list[float]]:
    """Random numbers that a loop draws after its steps, and after an evaluation behind them."""
    accelerator = Accelerator(seed=5, virtual_ranks=V)
    model = nn.Linear(3, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loaders = [DataLoader(Rows(48, (3,)), 3, shuffle=True), DataLoader(Rows(36, (3,)), 3)]
    model, optimizer, loader, others = accelerator.prepare(model, optimizer, *loaders)
    found = []
    for inputs, targets in loader:
        accelerator.backward(F.cross_entropy(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()
        if accelerator.sync_gradients:
            for number, (_, _) in enumerate(others, 1):
                if leaves and number == 2 * -(-V // accelerator.num_processes):  # rounds
                    break
            found.append(torch.rand(1).item() + random.random() + float(np.random.random()))
    assert len(set(found)) == 4
    whole = accelerator.gather(torch.tensor(found)).view(accelerator.num_processes, 4)
    return whole.unique(dim=0).tolist()  # type: ignore[no-untyped-call]


def leave_after(count: int, then: Callable[[Loop, Any], Any]) -> Any:
    loop = Loop(virtual_ranks=2)
    for number, (inputs,) in enumerate(loop.loader, 1):
        loop.step(loop.model(inputs).mean())
        if number == count:
            break
    return then(loop, inputs)


@pytest.mark.parametrize(
    "then",
    [
        lambda loop, inputs: loop.accelerator.digest(),
        lambda loop, inputs: loop.accelerator.save_model(loop.model, "saved"),
        lambda loop, inputs: loop.accelerator.end_training(),
        lambda loop, inputs: loop.each(loop.backward),
    ],
    ids=["digest", "save_model", "end_training", "another loop"],
)
def test_a_loop_that_is_left_in_the_middle_of_a_round_is_refused(
    then: Callable[[Loop, Any], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    leave_after(2, then)
    for count in (1, 3):
        with pytest.raises(RuntimeError, match=f"left after {count} batches, in the middle of a round of 2 .*Subset"):
            leave_after(count, then)


def test_leaving_an_evaluation_mid_round_is_refused_but_not_a_first_look() -> None:
    loop = Loop(virtual_ranks=2)
    next(iter(loop.loader))
    loop.each(loop.backward)
    with torch.no_grad():
        for number, _ in enumerate(loop.loader, 1):
            if number == 3:
                break
    with pytest.raises(RuntimeError, match="left after 3 batches"):
        loop.each(loop.backward)


def test_an_optimizer_asked_for_part_of_a_round_is_refused_in_the_next() -> None:
    loop = Loop(lambda: nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), virtual_ranks=2)
    other = loop.accelerator.prepare(torch.optim.SGD(loop.model.module[1].parameters(), lr=0.1))
    with pytest.raises(RuntimeError, match="asked to step for 1 of the 2 batches"):
        for number, (inputs,) in enumerate(loop.loader):
            loop.backward(inputs)
            if number % 2 == 0:
                other.step()
            loop.optimizer.step()
            loop.optimizer.zero_grad()


# All of them.


DROPS: dict[str, Callable[[Any, Any], Any]] = {
    "None": lambda _, model: [setattr(each, "grad", None) for each in model.parameters()],
    "zero_grad": lambda _, model: model.zero_grad(),
    "module's zero_grad": lambda accelerator, model: accelerator.unwrap_model(model).zero_grad(),
}

RUNS: dict[str, Callable[[], Any]] = {
    **{name: partial(train, **options) for name, options in WAYS.items()},
    "another model's loss": partial(maker_first, V),
    "its gradients dropped": partial(maker_first, V, by_hand=True),
    "its shards' gradients dropped": partial(maker_first, V, by_hand=True, strategy="fsdp"),
    "given weights": partial(weighted, V),
    "a round without weight": partial(weighted, V, has_norm=True),
    "a norm that is not finite": leaves_out,
    "buffers": normalises,
    "untouched shards": partial(edited, lambda *_: None),
    **{f"shards' gradients by {name}": partial(edited, edit) for name, edit in DROPS.items()},
    "frozen layers": partial(freezes, V),
    "frozen shards": partial(freezes, V, "fsdp"),
    "two models": partial(two_models, False),
    "numbers drawn at a step": noisy_steps,
    "a batch that is read ahead": partial(peeking_steps, True),
    "buffers changed before the step": passes_behind_the_reduction,
    "reports": means,
    "loss scales": scales,
    "metrics": measure,
    "numbers drawn behind an evaluation": partial(draws_behind, False),
    "numbers drawn behind one that was left": partial(draws_behind, True),
    # Their batches have no backward pass, so that they might be meant later.
    "samples": delivered,
    "a collate_fn": partial(collated, False),
}


def all_runs() -> dict[str, Any]:
    return {name: body() for name, body in RUNS.items()}


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return dict(on(1, all_runs))


@pytest.mark.parametrize("ranks", [3, *(pytest.param(each, marks=pytest.mark.slow) for each in (V,))])
def test_any_number_of_ranks_ends_with_the_same_bits(ranks: int, alone: dict[str, Any]) -> None:
    found = on(ranks, all_runs)
    assert [name for name in RUNS if found[name] != alone[name]] == []


def test_runs_that_mean_the_same_have_the_same_bits(alone: dict[str, Any]) -> None:
    for names in (
        ("another model's loss", "its gradients dropped", "its shards' gradients dropped"),
        tuple(f"shards' gradients by {name}" for name in DROPS),
        ("frozen layers", "frozen shards"),
    ):
        assert all(alone[each] == alone[names[0]] for each in names), names
    assert alone["shards' gradients by None"] != alone["untouched shards"]
    assert alone["a batch that is read ahead"] == peeking_steps(peeks=False)
    assert alone["samples"] == list(range(23))
    assert alone["a collate_fn"] == list(range(11))
    assert {alone[name][1] for name in NETWORKS} == {3}
    expected = torch.stack([0.1 * EIGHT[at : at + 2].mean(0) for at in range(0, 8, 2)]).mean(0)
    torch.testing.assert_close(torch.tensor(alone["buffers"][0]), expected)


AS_MANY = {"plain": weights, "another model's loss": maker_first, "weights": weighted, "frozen layers": freezes}


def test_it_is_what_as_many_ranks_compute() -> None:
    real = on(V, lambda: {name: body(None) for name, body in AS_MANY.items()})
    for name, body in AS_MANY.items():
        print(name)
        torch.testing.assert_close(body(V), real[name], rtol=1e-9, atol=1e-12)


def test_a_run_goes_on_with_its_bits_on_another_number_of_ranks(alone: dict[str, Any], tmp_path: Path) -> None:
    def body(at: int) -> list[Any]:
        whole, parts, mean = (str(tmp_path / name) for name in ("whole", "parts", "mean"))
        divided = {"strategy": "fsdp"} if at > 0 else {}  # and continues undivided
        return [
            train("convolutions", optimizer=ADAM, state=(whole, at), epochs=2),
            train("attention", optimizer=ADAM, state=(parts, at // 2), **divided),
            (means(mean, leaves=at > 0) or ())[:2],
        ]

    on(2, lambda: body(4))
    whole, parts, mean = on(3, lambda: body(-1))
    assert [whole[0], parts[0]] == [alone["two epochs"][0], alone["attention"][0]]
    assert mean == alone["reports"][:2]


class Scaled(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2, bias=False)
        self.scale = nn.Parameter(torch.tensor(1.0))


class OfNoLibrary(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        pass


def divides(make: Callable[[], nn.Module], optimizer: Any, strategy: Any) -> None:
    Accelerator(virtual_ranks=2, strategy=strategy).prepare(made := make(), optimizer(made.parameters()))


BY_HAND = "changed by hand before it was asked to step"
ON_ANY_NUMBER: list[tuple[str, Callable[[], Any]]] = [
    ("compute all losses of a batch before the first step", partial(two_models, True)),
    (BY_HAND, partial(edited, lambda _, model: nn.utils.clip_grad_norm_(model.parameters(), 0.01), -9.0)),
    (BY_HAND, partial(edited, lambda _, model: nn.utils.clip_grad_value_(model.parameters(), 0.001), -9.0)),
    (BY_HAND, partial(edited, lambda _, model: [it.grad.mul_(0.5) for it in model.parameters() if it is not None], -9)),
    ("let it return tensors with a row of each sample", partial(collated, True)),
    ("'scale' of the Scaled is a scalar; give it the shape", partial(divides, Scaled, torch.optim.SGD, "fsdp")),
    ("LBFGS takes all of them as one", partial(divides, partial(nn.Linear, 2, 2), torch.optim.LBFGS, "fsdp")),
    ("OfNoLibrary is not one of torch.optim's", partial(divides, partial(nn.Linear, 2, 2), OfNoLibrary, "zero1")),
]


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_refused_is_so_on_any_number_of_ranks(ranks: int) -> None:
    found = on(ranks, lambda: [told(body, (RuntimeError, TypeError, ValueError)) for _, body in ON_ANY_NUMBER])
    for (words, _), said in zip(ON_ANY_NUMBER, found, strict=True):
        assert words in said
    if ranks == 2:
        with pytest.raises(ValueError, match="virtual_ranks=1 are fewer than the 2 ranks; start at most 1"):
            on(2, partial(train, count=1))
