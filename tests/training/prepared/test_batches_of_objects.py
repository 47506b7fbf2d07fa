"""Batches that are objects of a user's class or of a library, and batches that only repeat others, on three ranks.

26 samples in global batches of eight leave a tail of two, so that a rank has only a repeated batch. The oracle is the
same script on one device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from batches import Row
from modes import PROCESSES_2, SOLO, THREADS_3, Mode
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import DataLoader
from twin import assert_all_are, whole

from unisono import Accelerator

MODES = pytest.mark.parametrize("mode", [THREADS_3, PROCESSES_2], ids=str)
SIZES = [number % 5 + 2 for number in range(26)]


@dataclasses.dataclass
class Fields:
    """Nodes of all graphs, the graph of each, and a target for each graph."""

    x: torch.Tensor
    graph: torch.Tensor
    y: torch.Tensor


class Slotted:
    __slots__ = ("graph", "x", "y")

    def __init__(self, **held: Any) -> None:
        for name, value in held.items():
            setattr(self, name, value)


class Stored:
    """As PyTorch Geometric's graphs: a mapping of its own holds all that can be asked for."""

    def __init__(self, **held: Any) -> None:
        self.__dict__["_store"] = Row(**held)

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_store"][name]
        except KeyError:
            raise AttributeError(name) from None


def graphs(kind: Callable[..., Any], numbers: list[int]) -> Any:
    sizes = [SIZES[number] for number in numbers]
    nodes = [torch.full((size, 4), float(number)).cos() for number, size in zip(numbers, sizes, strict=True)]
    return kind(
        x=torch.cat(nodes).double(),
        graph=torch.repeat_interleave(torch.arange(len(numbers)), torch.tensor(sizes)),
        y=torch.tensor([[float(number % 3)] for number in numbers], dtype=torch.float64),
    )


def within(numbers: list[int]) -> Any:
    return SimpleNamespace(parts=[{"graphs": graphs(Slotted, numbers)}])


def packed(numbers: list[int]) -> PackedSequence:
    return pack_sequence([torch.full((SIZES[each], 4), float(each)).cos().double() for each in numbers], False)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 1).double()

    def forward(self, x: torch.Tensor, graph: torch.Tensor, number: int) -> torch.Tensor:
        return x.new_zeros(number, 1).index_add(0, graph, self.layer(x).tanh())


class NetOfObjects(Net):
    """Takes and returns objects."""

    def forward(self, batch: Any) -> Any:
        return SimpleNamespace(found=super().forward(batch.x, batch.graph, len(batch.y)))


def loss_of_graphs(network: Any, batch: Any) -> torch.Tensor:
    batch = batch.parts[0]["graphs"] if hasattr(batch, "parts") else batch
    takes_objects = isinstance(getattr(network, "module", network), NetOfObjects)
    found = network(batch).found if takes_objects else network(batch.x, batch.graph, len(batch.y))
    return (found - batch.y).square().mean()


def loss_of_tokens(network: Any, batch: Any) -> torch.Tensor:
    x = batch.data if isinstance(batch, PackedSequence) else batch.x
    return (network(x, torch.arange(len(x)), len(x)) - x.sin().sum(1, keepdim=True)).square().mean()


def train(
    collate: Callable[[list[int]], Any], loss_of: Callable[..., torch.Tensor], give: Callable[..., Any], make: Any = Net
) -> dict[str, torch.Tensor]:
    """`give(loader, batch)` returns the arguments of `accelerator.backward`; None runs `loss.backward()`."""
    accelerator = Accelerator(split_batches=True)
    network, loader = make(), DataLoader(range(26), batch_size=8, collate_fn=collate)
    network, optimizer, loader = accelerator.prepare(network, torch.optim.SGD(network.parameters(), 0.1), loader)
    for batch in loader:
        loss, given = loss_of(network, batch), give(loader, batch)
        loss.backward() if given is None else accelerator.backward(loss, **given)
        optimizer.step()
        optimizer.zero_grad()
    return whole(network)


GIVEN = {
    "nothing": lambda loader, batch: None,
    "batch": lambda loader, batch: {"batch": batch},
    "weight": lambda loader, batch: {"weight": loader.valid_samples or 1},
    "both": lambda loader, batch: {"weight": loader.valid_samples or 1, "batch": batch},
}


KINDS: dict[str, tuple[Any, Any]] = {
    "slots": (partial(graphs, Slotted), Net),
    "a mapping within": (partial(graphs, Stored), Net),
    "objects of objects": (within, Net),
    "a model of objects": (partial(graphs, Stored), NetOfObjects),
}


@MODES
def test_a_batch_that_is_an_object_is_known_by_the_memory_of_what_it_holds(mode: Mode) -> None:
    def body() -> dict[str, Any]:
        return {
            f"{kind}, {name}": train(collate, loss_of_graphs, give, make)
            for kind, (collate, make) in KINDS.items()
            for name, give in (GIVEN.items() if kind == "slots" else [*GIVEN.items()][:2])
        }

    (expected,) = SOLO.run(body)
    ranks = mode.run(body)
    for name, state in expected.items():
        print(name)
        assert_all_are([each[name] for each in ranks], state)


@pytest.mark.parametrize(
    "collate", [partial(graphs, Fields), packed, partial(graphs, Stored)], ids=["fields", "packed", "object"]
)
def test_a_batch_that_only_repeats_others_counts_nothing_at_any_weight(collate: Any) -> None:
    def give(loader: Any, batch: Any) -> Any:
        return {"weight": len(batch.data if isinstance(batch, PackedSequence) else batch.x)}

    body = lambda: train(collate, loss_of_tokens, give)  # noqa: E731
    (expected,) = SOLO.run(body)
    assert_all_are(THREADS_3.run(body), expected)


def loss_of_views(network: Any, batch: Any) -> torch.Tensor:
    """Of inputs that are in no batch's memory, and have other rows."""
    batch = SimpleNamespace(x=torch.cat([batch.x, -batch.x]))
    return loss_of_tokens(network, batch)


def test_an_ambiguous_batch_is_an_error_and_each_of_its_ways_out_works() -> None:
    collate = partial(graphs, Stored)
    number_of = lambda batch: 2 * len(batch.x)  # noqa: E731
    ways: list[Callable[..., Any]] = [
        lambda loader, batch: {"weight": number_of(batch), "batch": batch},
        lambda loader, batch: {"weight": 0 if loader.valid_samples == 0 else number_of(batch)},
    ]

    def body() -> list[Any]:
        return [train(collate, loss_of_views, give) for give in ways]

    give = lambda loader, batch: {"weight": number_of(batch)}  # noqa: E731
    with pytest.raises(ValueError, match="a batch that only repeats another rank's rows weighs 0") as caught:
        THREADS_3.run(lambda: train(collate, loss_of_views, give))
    assert "accelerator.backward(loss, weight=weight, batch=batch)" in str(caught.value)
    assert "batch=(); or pass weight=0 for a batch with loader.valid_samples 0" in str(caught.value)
    (expected, *_) = SOLO.run(body)[0]
    for found in zip(*THREADS_3.run(body), strict=True):
        assert_all_are(found, expected)


def test_graphs_of_pytorch_geometric_train_as_on_one_device() -> None:
    geometric: Any = pytest.importorskip("torch_geometric.data")

    def collate(numbers: list[int]) -> Any:
        each = [graphs(Fields, [number]) for number in numbers]
        return geometric.Batch.from_data_list([geometric.Data(x=one.x, y=one.y) for one in each])

    def loss_of(network: Any, batch: Any) -> torch.Tensor:
        return (network(batch.x, batch.batch, batch.num_graphs) - batch.y).square().mean()

    body = lambda: [train(collate, loss_of, give) for give in GIVEN.values()]  # noqa: E731
    (expected, *_) = body()
    for found in zip(*THREADS_3.run(body), strict=True):
        assert_all_are(found, expected)
