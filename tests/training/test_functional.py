"""Collectives with gradients: what ranks compute together is what one device computes of all their rows.

The oracles are plain code over the rows of all ranks, in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from modes import FAMILY, HOST, PROCESSES_2, SOLO, THREADS_3, each_of, in_main_memory, scaling
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from twin import CLOSE, assert_all_are, data, model

import unisono
from unisono import Accelerator, functional

pytestmark = pytest.mark.any_family

Tensors = list[torch.Tensor]


mode = each_of(scaling(SOLO, THREADS_3, PROCESSES_2))
peers = each_of(scaling(THREADS_3, PROCESSES_2))


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64, device=HOST)


def rows_of(rank: int, rows: int = 3, width: int = 4, seed: int = 0) -> torch.Tensor:
    """A rank's rows, in main memory; so that the twin has those of all."""
    return numbers(rows, width, seed=1000 * seed + rank)


def here(x: torch.Tensor) -> torch.Tensor:
    """A leaf on the rank's device."""
    return x.to(unisono.current_world().device).requires_grad_()


def assert_close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(in_main_memory(found), expected, **CLOSE)


def own_loss(values: torch.Tensor, rank: int) -> torch.Tensor:
    """A loss that is another one on each rank, and has second derivatives."""
    weights = numbers(*values.shape, seed=77 + rank).to(values.device)
    return (weights * values).sin().sum() + (values.square() * weights).sum()


# What each rank gets, as a function of what all ranks have.
TWINS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[Tensors], Tensors]]] = {
    "all_gather": (functional.all_gather, lambda every: [torch.cat(every)] * len(every)),
    "all_gather dim 1": (lambda x: functional.all_gather(x, 1), lambda every: [torch.cat(every, 1)] * len(every)),
    "all_gather dim -1": (lambda x: functional.all_gather(x, -1), lambda every: [torch.cat(every, -1)] * len(every)),
    "all_gather of scalars": (
        lambda x: functional.all_gather(x.sin().sum()),
        lambda every: [torch.stack([x.sin().sum() for x in every])] * len(every),
    ),
    "all_gather_samples": (functional.all_gather_samples, lambda every: [torch.cat(every)] * len(every)),
    "all_reduce sum": (functional.all_reduce, lambda every: [torch.stack(every).sum(0)] * len(every)),
    "all_reduce mean": (
        lambda x: functional.all_reduce(x, "mean"),
        lambda every: [torch.stack(every).mean(0)] * len(every),
    ),
}


def test_the_gradient_and_the_second_one_are_of_the_ranks_summed_losses(mode):
    def differentiate() -> Any:
        found = {}
        for name, (call, _) in TWINS.items():
            x = here(rows_of(unisono.rank(), rows=24))
            result = call(x)
            (first,) = torch.autograd.grad(own_loss(result, unisono.rank()), x, create_graph=True)
            penalty = (first * numbers(24, 4, seed=unisono.rank()).to(x.device)).sum()
            penalty.backward()
            found[name] = (result.detach(), first.detach(), x.grad)
        return found

    every_rank = mode.run(differentiate)
    for name, (_, twin) in TWINS.items():
        every = [rows_of(rank, rows=24).requires_grad_() for rank in range(mode.ranks)]
        results = twin(every)
        loss = sum(own_loss(result, rank) for rank, result in enumerate(results))
        first = torch.autograd.grad(loss, every, create_graph=True, materialize_grads=True)
        penalty = sum((each * numbers(24, 4, seed=rank)).sum() for rank, each in enumerate(first))
        second = torch.autograd.grad(penalty, every, materialize_grads=True)
        for rank, found in enumerate(every_rank):
            assert_close(found[name], (results[rank].detach(), first[rank].detach(), second[rank]))


def test_the_argument_stays_as_it_is_and_the_result_is_ones_own(mode):
    def change() -> None:
        for call, _ in TWINS.values():
            x = here(rows_of(unisono.rank(), rows=24))
            with torch.no_grad():
                call(x).add_(1)
            assert torch.equal(x, here(rows_of(unisono.rank(), rows=24)))
        whole = torch.ones(mode.ranks, dtype=torch.int64, device=x.device)
        assert functional.all_reduce(whole).tolist() == [mode.ranks] * mode.ranks
        assert whole.tolist() == [1] * mode.ranks, "integers have no gradient, and a value"

    mode.run(change)


def test_unequal_numbers_of_rows_are_gathered_with_gradients(mode):
    """Rank r has r rows, so rank 0 has none; in a nesting, beside labels."""
    dim = 1

    def laid(x: torch.Tensor) -> torch.Tensor:
        return x if dim == 0 else x.mT

    def gather() -> Any:
        rank = unisono.rank()
        x = here(laid(rows_of(rank, rows=rank)))
        batch = {"x": x, "more": [x * 2, torch.full(x.shape, rank, device=x.device)]}
        found = functional.all_gather_samples(batch, dim=dim)
        own_loss(found["x"] * found["more"][0], rank).backward()
        return found["x"].detach(), found["more"][1].tolist(), x.grad

    every = [laid(rows_of(rank, rows=rank)).requires_grad_() for rank in range(mode.ranks)]
    together = torch.cat(every, dim)
    labels = torch.cat([torch.full(x.shape, rank) for rank, x in enumerate(every)], dim).tolist()
    sum(own_loss(together * together * 2, rank) for rank in range(mode.ranks)).backward()
    for rank, (values, found_labels, gradient) in enumerate(mode.run(gather)):
        assert_close((values, gradient), (together.detach(), every[rank].grad))
        assert found_labels == labels


def test_samples_that_do_not_count_get_a_gradient_of_zero(mode):
    def gather() -> Any:
        x = here(rows_of(unisono.rank()))
        functional.all_gather_samples((x, x), valid_samples=2)[1].sum().backward()
        return x.grad.tolist()

    assert mode.run(gather) == [[[mode.ranks] * 4, [mode.ranks] * 4, [0] * 4]] * mode.ranks


def nt_xent(first: torch.Tensor, second: torch.Tensor, own: slice = slice(None)) -> torch.Tensor:
    """SimCLR's loss (Chen et al. 2020, eq. 1): the mean over both views of the `own` samples, against all."""
    views = F.normalize(torch.cat([first, second]), dim=1)
    count = len(first)
    places = torch.arange(2 * count, device=views.device)
    likeness = (views @ views.mT / 0.5).masked_fill(places[:, None] == places, -torch.inf)
    rows = torch.cat([places[:count][own], places[count:][own]])
    return F.cross_entropy(likeness[rows], ((places + count) % (2 * count))[rows])


def network() -> nn.Module:
    return model().to(unisono.current_world().device)


def gradients(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: each.grad for name, each in module.named_parameters()}


def simclr_steps(samples: int, size: int) -> dict[str, torch.Tensor]:
    """The oracle of training: one device, the whole global batches."""
    net, tensors = model(), data(samples).tensors
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    for start in range(0, samples, size):
        first, second = tensors[0][start : start + size], tensors[0][start : start + size] * 1.1 + 0.1
        optimizer.zero_grad()
        nt_xent(net(first), net(second)).backward()
        optimizer.step()
    return net.state_dict()


def train_simclr(samples: int, strategy: Any = "ddp") -> dict[str, torch.Tensor]:
    """The loss of the global batch on each rank, and one weight for all if batches are uneven; rank zero's weights."""
    accelerator = Accelerator(strategy=strategy)
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    net, optimizer, loader = accelerator.prepare(net, optimizer, DataLoader(data(samples), batch_size=3))
    is_even = samples % (3 * unisono.world_size()) == 0
    for x, *_ in loader:
        optimizer.zero_grad()
        rows = (net(x), net(x * 1.1 + 0.1))
        first, second = functional.all_gather_samples(rows, None if is_even else loader.valid_samples)
        accelerator.backward(nt_xent(first, second), weight=None if is_even else len(first) / unisono.world_size())
        optimizer.step()
    return accelerator.state_dict(net)


def test_a_prepared_model_trains_like_one_device_in_an_uneven_tail_too(mode):
    """One sample more than ranks are left for the last round, or one fewer: then one is repeated and does not count."""
    counts = [6 * mode.ranks, 7 * mode.ranks - 1, 7 * mode.ranks + 1]
    for samples, *found in zip(counts, *mode.run(lambda: [train_simclr(each) for each in counts]), strict=True):
        assert_all_are(found[:1], simclr_steps(samples, 3 * mode.ranks))


@pytest.mark.skipif(FAMILY != "cpu", reason="these are of processes whose tensors torch's groups take")
@pytest.mark.parametrize("strategy", ["zero1", "fsdp"])
def test_the_strategies_of_processes_train_the_same(strategy):
    found = PROCESSES_2.run(lambda: train_simclr(15, strategy))
    assert_all_are(found[:1], simclr_steps(15, 6))


@pytest.mark.parametrize("way", ["prepared", "backward", "optimizer_step"])
def test_weights_differing_by_rank_are_refused_for_losses_of_all_ranks(peers, way):
    def train() -> int:
        net: nn.Module = model() if way == "prepared" else network()
        loader: Any = DataLoader(data(7 * peers.ranks + 1), batch_size=3)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
        if way == "prepared":
            net, optimizer, loader = Accelerator().prepare(net, optimizer, loader)
        else:
            loader = unisono.DeviceLoader(loader)
        steps = 0
        try:
            for x, *_ in loader:
                optimizer.zero_grad()
                loss = functional.all_gather_samples(net(x), loader.valid_samples).square().mean()
                unisono.backward(loss) if way == "backward" else loss.backward()
                optimizer.step() if way == "prepared" else unisono.optimizer_step(optimizer)
                steps += 1
        except unisono.errors.BrokenWorldError as error:  # on a rank whose part is as that of equal ranks, say
            raise ValueError(str(error.__cause__)) from None
        except ValueError as error:
            raise ValueError(f"{error} in step {steps}") from None
        return steps

    with pytest.raises(ValueError, match=r"unisono\.functional belong to all ranks' losses.* in step 2"):
        peers.run(train)


@pytest.mark.parametrize(
    ("error", "words", "call"),
    [
        (ValueError, "all_reduce op='max' has no gradient here; .* unisono.all_reduce", ("all_reduce", "max")),
        (IndexError, "Dimension out of range", ("all_gather", 2)),
        (ValueError, "has no dimension 3 for its samples", ("all_gather_samples", None, 3)),
        (ValueError, "valid_samples=4, but a tensor has 3", ("all_gather_samples", 4)),
    ],
)
def test_a_wrong_argument_is_refused_in_words(error, words, call):
    name, *arguments = call
    with pytest.raises(error, match=words):
        getattr(functional, name)(torch.ones(3, 2), *arguments)


def test_what_is_no_tensor_and_rows_that_differ_within_a_batch_are_refused():
    for name in ("all_gather", "all_reduce"):
        with pytest.raises(TypeError, match=f"functional.{name} takes a tensor, got a list"):
            getattr(functional, name)([torch.ones(1)])
    with pytest.raises(ValueError, match=r"the tensors have \[2, 3\] samples along dim 0; pass"):
        functional.all_gather_samples((torch.ones(2), torch.ones(3)))
    with pytest.raises(TypeError, match="the batch holds a str"):
        functional.all_gather_samples([torch.ones(2), "name"])


def test_unequal_shapes_are_named_by_rank_with_the_way_out(peers):
    for text in peers.told(lambda: functional.all_gather(here(rows_of(0, rows=2 + (unisono.rank() == 1))))):
        assert "CollectiveMismatchError" in text
        assert "rank 1 c" in text
        assert "functional.all_gather(float64[3, 4], 0) with a gradient" in text
        assert "functional.all_gather(float64[2, 4], 0) with a gradient" in text
        assert "all_gather_samples takes different numbers of rows" in text


def test_a_gradient_on_some_ranks_only_is_named_in_the_forward_pass(peers):
    def gather() -> None:
        x = rows_of(0).to(unisono.current_world().device)
        functional.all_gather(x.requires_grad_() if unisono.rank() == 0 else x)

    for text in peers.told(gather):
        assert "CollectiveMismatchError" in text
        assert "with a gradient" in text
        assert "without a gradient" in text


def test_a_backward_pass_of_some_ranks_only_is_named(peers):
    def differentiate() -> None:
        loss = functional.all_reduce(here(rows_of(0))).sum()
        loss.backward() if unisono.rank() == 0 else unisono.barrier()

    for text in peers.told(differentiate):
        assert "CollectiveMismatchError" in text
        assert "the gradient of functional.all_reduce(float64[3, 4], 'sum')" in text
        assert "barrier()" in text
