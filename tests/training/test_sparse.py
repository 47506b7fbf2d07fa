"""Sparse embeddings train as on one device, whoever reduces."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from modes import FAMILY, PROCESSES_2, SOLO, THREADS_2, Mode
from torch import nn
from torch.nn import functional as F
from twin import CLOSE, Lines, Plain, State, adam, assert_all_are, compare, loader_of, seeded

from unisono import Accelerator, DeviceLoader, backward, current_world, optimizer_step
from unisono.strategies import DDP
from unisono.training.agreement import fingerprint
from unisono.training.gradients import reduce_gradients

pytestmark = pytest.mark.skipif(FAMILY == "xla", reason="XLA has dense tensors only")

MODES = pytest.mark.parametrize("mode", [SOLO, THREADS_2, PROCESSES_2], ids=str)


class Words(nn.Module):
    """Of inputs it takes whole numbers; each batch has few of them."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(40, 4, sparse=sparse), nn.Linear(4, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.table((inputs * 8 + 20).long().clamp(0, 39))).mean(1))


def words(sparse: bool = True) -> Any:
    return seeded(Words(sparse).double())


def loss_of(network: nn.Module, batch: list[torch.Tensor], tokens: bool = False) -> torch.Tensor:
    errors = F.mse_loss(network(batch[0]), batch[1], reduction="none").mean(1)
    return (errors * batch[2]).sum() / batch[2].sum().clamp(min=1) if tokens else errors.mean()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5)


def adagrad(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(parameters, lr=0.1)


def trained(make: Callable[[Any], torch.optim.Optimizer], tokens: bool = False, sparse: bool = True) -> Lines:
    def lines(accelerator: Any, loader: Any) -> State:
        network = words(sparse)
        network, optimizer, loader = accelerator.prepare(network, make(network.parameters()), loader)
        for _ in range(2):
            for batch in loader:
                weight = batch[2].sum() * (getattr(loader, "valid_samples", 1) > 0) if tokens else None
                accelerator.backward(loss_of(network, batch, tokens), weight=weight)
                optimizer.step()
                optimizer.zero_grad()
        return network.state_dict()

    return lines


def with_two_optimizers(accelerator: Any, loader: Any) -> State:
    network = words()
    sparse, dense = torch.optim.SparseAdam(network.table.parameters(), lr=0.05), adam(network.head.parameters())
    network, sparse, dense, loader = accelerator.prepare(network, sparse, dense, loader)
    for batch in loader:
        accelerator.backward(loss_of(network, batch))
        sparse.step()
        dense.step()
        sparse.zero_grad()
        dense.zero_grad()
    return network.state_dict()


LINES = {"sgd": trained(sgd), "adagrad": trained(adagrad), "tokens": trained(sgd, tokens=True)}
STAYING = {**LINES, "two optimizers": with_two_optimizers}  # one of which takes sparse gradients only


class Beside(nn.Module):
    """A table whose rows are added to what a layer computes: both get one gradient from the sum, in the same memory,
    unless torch copies the table's because of a row for padding."""

    def __init__(self, first: str, padding: int | None) -> None:
        super().__init__()
        layers = {"layer": nn.Linear(5, 2), "table": nn.Embedding(9, 2, sparse=True, padding_idx=padding)}
        for name in sorted(layers, reverse=first == "table"):  # the pass begins with what was called last
            self.add_module(name, layers[name])
        self.first = first

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        rows = (inputs[:, 0] * 4 + 4).long().clamp(0, 8)
        if self.first == "table":
            return self.table(rows) + torch.tanh(self.layer(inputs))
        return torch.tanh(self.layer(inputs)) + self.table(rows)


def beside(first: str, padding: int | None, tokens: bool = False) -> Lines:
    def lines(accelerator: Any, loader: Any) -> State:
        network = seeded(Beside(first, padding).double())
        network, optimizer, loader = accelerator.prepare(network, sgd(network.parameters()), loader)
        for batch in loader:
            optimizer.zero_grad()
            weight = batch[2].sum() * (getattr(loader, "valid_samples", 1) > 0) if tokens else None
            accelerator.backward(loss_of(network, batch, tokens), weight=weight)
            optimizer.step()
        state: State = network.state_dict()
        return state

    return lines


@pytest.mark.parametrize(
    ("mode", "strategy", "samples", "batch", "accumulate"),
    [
        (SOLO, "ddp", 23, 3, 2),
        (THREADS_2, "ddp", 24, 3, 1),
        (THREADS_2, "ddp", 19, 3, 2),
        (THREADS_2, "ddp", 5, 1, 1),
        (PROCESSES_2, "ddp", 23, 3, 2),
        (PROCESSES_2, "zero1", 19, 3, 1),
        (PROCESSES_2, "ddp", 5, 1, 1),
    ],
    ids=str,
)
def test_a_layer_whose_output_is_added_to_rows_of_a_table_is_exact(
    mode: Mode, strategy: Any, samples: int, batch: int, accumulate: int
) -> None:
    forms = product([("layer", None), ("table", None), ("layer", 0)], [False, True])
    lines = {f"{form}, {tokens=}": beside(*form, tokens) for form, tokens in forms}
    compare(mode, lines, samples, batch, gradient_accumulation_steps=accumulate, strategy=strategy)


@pytest.mark.parametrize(
    ("mode", "strategy", "accumulate"),
    [
        (SOLO, "ddp", 2),
        (THREADS_2, "ddp", 1),
        (THREADS_2, "ddp", 2),
        (PROCESSES_2, "ddp", 2),
        (PROCESSES_2, "zero1", 1),
    ],
    ids=str,
)
def test_the_weights_are_those_of_one_device_in_every_mode(mode: Mode, strategy: Any, accumulate: int) -> None:
    lines = LINES if mode is THREADS_2 else STAYING
    compare(mode, lines, gradient_accumulation_steps=accumulate, strategy=strategy)


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_step_that_was_saved_unfinished_continues_on_any_number_of_ranks(tmp_path: Path, ranks: int) -> None:
    """With four microbatches; two of them on two ranks, the others on `ranks`."""

    def lines(accelerator: Any, of: int, first: int, last: int) -> State:
        network = words()
        loader = loader_of(24, 6 // of)
        network, optimizer, loader = accelerator.prepare(network, sgd(network.parameters()), loader)
        if first:
            accelerator.load_state()
        for number, batch in enumerate(loader, first):
            accelerator.backward(loss_of(network, batch))
            optimizer.step()
            optimizer.zero_grad()
            if number == last:
                break
        if not first:
            accelerator.save_state()
        return network.state_dict()

    def body(of: int, first: int, last: int) -> State:
        return lines(Accelerator(gradient_accumulation_steps=4, project_dir=tmp_path), of, first, last)

    THREADS_2.run(lambda: body(2, 0, 1))
    expected = SOLO.run(
        lambda: lines(Accelerator(gradient_accumulation_steps=4, project_dir=tmp_path / "one"), 1, 0, 3)
    )
    assert_all_are(Mode("threads", ranks).run(lambda: body(ranks, 2, 3)), expected[0])


@pytest.mark.parametrize(
    ("mode", "strategy"), [(SOLO, "ddp"), (THREADS_2, "ddp"), (PROCESSES_2, "ddp"), (PROCESSES_2, "zero1")], ids=str
)
def test_a_row_sparse_momentum_resumes_with_the_bits_of_an_unbroken_run(
    mode: Mode, strategy: str, tmp_path: Path
) -> None:
    def lines(epochs: int, loads: bool) -> State:
        accelerator = Accelerator(strategy=strategy, project_dir=tmp_path)
        network, loader = words(), loader_of(24, 3)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
        network, optimizer, loader = accelerator.prepare(network, optimizer, loader)
        if loads:
            accelerator.load_state(must_exist=True)
        for _ in range(epochs):
            for batch in loader:
                accelerator.backward(loss_of(network, batch))
                optimizer.step()
                optimizer.zero_grad()
            if not loads and epochs == 1:
                accelerator.save_state()
        layouts = {each.layout for values in optimizer.state.values() for each in values.values()}
        assert strategy == "zero1" or mode is THREADS_2 or torch.sparse_coo in layouts  # threads reduce dense ones
        return network.state_dict()

    mode.run(lambda: lines(1, False))
    for found, expected in mode.run(lambda: (lines(1, True), lines(2, False))):
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_difference_in_the_indices_of_rows_alone_is_a_difference() -> None:
    rows = torch.ones(1, 3)
    first, second = (torch.sparse_coo_tensor([[place]], rows, (4, 3), check_invariants=True) for place in (1, 2))
    assert int(fingerprint([first])) != int(fingerprint([second]))
    assert int(fingerprint([first])) == int(fingerprint([first.clone()]))


def test_rows_are_not_compressed() -> None:
    chosen = DDP(comm_hook="fp16")
    tables = PROCESSES_2.run(lambda: trained(sgd)(Accelerator(strategy=chosen), loader_of(23, 3))["table.weight"])
    expected = trained(sgd)(Plain(), loader_of(23, 6))["table.weight"]
    for table in tables:
        assert torch.equal(table, tables[0])
        torch.testing.assert_close(table, expected, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("mode", [SOLO, THREADS_2, PROCESSES_2], ids=str)
def test_their_norm_is_that_of_the_dense_gradient_and_the_guard_reads_them(mode: Mode) -> None:
    def lines(sparse: bool) -> Lines:
        def loop(accelerator: Any, loader: Any) -> State:
            network, norms = words(sparse), []
            network, optimizer, loader = accelerator.prepare(network, sgd(network.parameters()), loader)
            for batch in loader:
                accelerator.backward(loss_of(network, batch))
                norms.append(accelerator.clip_grad_norm_(network.parameters(), 0.1))
                optimizer.step()
                optimizer.zero_grad()
            return {**network.state_dict(), "norms": torch.stack(norms).double()}

        return loop

    ranks = mode.run(lambda: lines(True)(Accelerator(), loader_of(23, 3)))
    assert_all_are(ranks, lines(False)(Plain(), loader_of(23, 3 * mode.ranks)))


@MODES
def test_by_hand_they_become_dense(mode: Mode) -> None:
    def body() -> State:
        network = words()
        optimizer = sgd(network.parameters())
        for _ in range(2):
            for batch in DeviceLoader(loader_of(23, 3)):
                backward(loss_of(network, batch))
                optimizer_step(optimizer)
                optimizer.zero_grad()
        state: State = network.state_dict()
        return state

    assert_all_are(mode.run(body), trained(sgd)(Plain(), loader_of(23, 3 * mode.ranks)))


@pytest.mark.parametrize("mode", [THREADS_2, PROCESSES_2], ids=str)
def test_ranks_may_have_no_such_gradient_or_a_dense_one(mode: Mode) -> None:
    def body() -> list[torch.Tensor]:
        rank, found = current_world().rank, []
        for other in ("none", "dense"):
            table = nn.Embedding(5, 2, sparse=True, dtype=torch.float64).weight
            if rank == 0:
                F.embedding(torch.tensor([3, 1, 3]), table, sparse=True).sum().backward()
            elif other == "dense":
                F.embedding(torch.tensor([1]), table).sum().backward()
            reduce_gradients([table], current_world(), 0.5, "a step")
            found.append(table.grad)
        return found

    column = torch.tensor([0, 0.5, 0, 1, 0], dtype=torch.float64).unsqueeze(1).expand(5, 2)
    for none, dense in mode.run(body):
        torch.testing.assert_close(none, column, **CLOSE)
        torch.testing.assert_close(dense, column + torch.tensor([0, 0.5, 0, 0, 0]).double().unsqueeze(1), **CLOSE)


def test_under_fsdp_they_are_refused_at_prepare() -> None:
    for told in PROCESSES_2.told(lambda: Accelerator(strategy="fsdp").prepare(words()), ValueError):
        assert "the layer 'table' of the Words has sparse=True" in told
        assert "sparse=False, or use strategy='ddp' or 'zero1'" in told
