"""Compiled replicas: each graph is compiled once, with every replica's own weights, and nobody waits in vain."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch._dynamo
from functorch.compile import make_boxed_func
from modes import PROCESSES_2, THREADS_2, THREADS_4
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel

from unisono import DataParallel, current_world
from unisono.comm.gate import compiling
from unisono.comm.threads import ThreadCommunicator
from unisono.parallel import compilation
from unisono.parallel.batch_norm import synchronize_batch_norm
from unisono.parallel.compilation import compile_module

FOUR = [f"cpu:{rank}" for rank in range(4)]


class Counting:
    """A backend that runs graphs as they are, and counts those that it is given, by direction."""

    def __init__(self) -> None:
        self.forward = self.backward = 0
        self._compile = aot_autograd(fw_compiler=self._forward, bw_compiler=self._backward)

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        return self._compile(graph, inputs)

    def _forward(self, graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        self.forward += 1
        return make_boxed_func(graph.forward)

    def _backward(self, graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        self.backward += 1
        return make_boxed_func(graph.forward)

    @property
    def counts(self) -> tuple[int, int]:
        return self.forward, self.backward


class Net(nn.Module):
    """Two layers, one of them in a container, with a buffer between."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(3, width)
        self.rest = nn.Sequential(nn.ReLU(), nn.Linear(width, 2))
        self.register_buffer("factor", torch.ones(width))

    def forward(self, inputs: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.rest(self.first(inputs) * self.factor) * scale


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    compilation.known_families.clear()
    yield
    torch._dynamo.reset()


def each_its_own(replicas: list[nn.Module]) -> None:
    """Give every replica other weights."""
    for number, replica in enumerate(replicas):
        torch.manual_seed(number)
        for parameter in replica.parameters():
            nn.init.normal_(parameter)
        nn.init.constant_(replica.factor, number + 1.0)


def steps(model: nn.Module, sizes: list[int]) -> list[torch.Tensor]:
    """The outputs of all batches, then the gradients of their sum."""
    outputs = [model(torch.ones(size, 3) / size) for size in sizes]
    for output in outputs:
        output.square().sum().backward()
    return [*(output.detach() for output in outputs), *(each.grad for each in model.parameters())]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "graphs"),
    [([5], 1), ([5, 5, 5], 1), ([5, 6, 7, 8, 9], 2), ([5, 6, 7, 1], 3)],
    ids=["one size", "again", "any size", "and one alone"],
)
def test_replicas_that_arrive_at_once_compile_each_graph_once_and_use_their_own_weights(sizes, graphs):
    backend = Counting()
    replicas = DataParallel(Net(), FOUR)
    each_its_own(replicas.models)
    expected = [steps(copy.deepcopy(model), sizes) for model in replicas.models]

    def loop(model: nn.Module, *_: Any) -> list[torch.Tensor]:
        current_world().comm.barrier()
        return steps(compile_module(model, current_world(), backend=backend), sizes)

    torch.testing.assert_close(replicas(loop, []), expected)
    assert backend.counts == (graphs, graphs)


def test_models_whose_root_is_torchs_own_class_are_compiled_too():
    """Of torch.nn's own forward methods torch compiles no frame."""
    backends = [Counting(), Counting()]
    for backend, width in zip(backends, (4, 5), strict=True):
        replicas = DataParallel(nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 2)), FOUR)
        for number, model in enumerate(replicas.models):
            nn.init.constant_(model[0].weight, number + 1.0)
        expected = [steps(copy.deepcopy(model), [5, 5]) for model in replicas.models]
        found = replicas.run_on_replicas(
            lambda model, *_, backend=backend: steps(compile_module(model, current_world(), backend=backend), [5, 5])
        )
        torch.testing.assert_close(found, expected)
        assert backend.counts == (1, 1)


@pytest.mark.slow
def test_a_compiled_model_runs_while_another_one_compiles():
    """Of what a thread traces, torch lets some things be seen by all threads."""

    class Other(Net):
        pass

    running, other = (
        compile_module(each, current_world(), backend="aot_eager", dynamic=False) for each in (Net(), Other())
    )
    running(torch.ones(5, 3))
    is_over = threading.Event()

    def run() -> int:
        rounds = 0
        while not is_over.is_set():
            running(torch.ones(5, 3)).sum().backward()
            rounds += 1
        return rounds

    with ThreadPoolExecutor(1) as pool:
        rounds = pool.submit(run)
        for size in (2, 3, 4):
            other(torch.ones(size, 3)).sum().backward()
        is_over.set()
    assert rounds.result() > 0


# What the module stays.


def test_the_module_stays_what_it_was_and_its_copies_are_plain():
    module = Net()
    names, kind = list(module.state_dict()), type(module)
    assert compile_module(module, current_world(), backend=Counting()) is module
    assert list(module.state_dict()) == names
    assert type(module) is kind
    module(torch.ones(2, 3))
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert copied._compiled_call_impl is None
        assert torch.equal(copied(torch.ones(2, 3)), module(torch.ones(2, 3)))


# Peers that wait.


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.first_norm, self.second_norm = nn.BatchNorm1d(3), nn.BatchNorm1d(3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        middle = self.first_norm(self.first(inputs)).sin()
        return self.second_norm(self.second(middle)).cos()


def normalised(world_share: float, rank: int, backend: Any) -> list[torch.Tensor]:
    torch.manual_seed(0)
    inputs = torch.randn(8, 3, dtype=torch.float64)
    model = Normalised().double()
    synchronize_batch_norm(model, current_world(), lambda: world_share)
    if backend is not None:
        compile_module(model, current_world(), backend=backend)
    own = inputs.chunk(round(1 / world_share))[rank].clone().requires_grad_()
    for _ in range(3):
        output = model(own)
    output.square().mean().backward()
    return [output.detach(), own.grad * world_share]


@pytest.mark.parametrize("mode", [THREADS_2, THREADS_4], ids=str)
def test_replicas_meet_in_the_middle_of_a_model_that_each_must_compile(mode):
    backend = Counting()
    found = mode.run(lambda: normalised(1 / mode.ranks, current_world().rank, backend))
    expected = normalised(1.0, 0, None)
    for place in range(2):
        torch.testing.assert_close(torch.cat([rank[place] for rank in found]), expected[place])
    assert backend.counts == (3, 3), "the model falls into three graphs around its two meetings"


def test_the_gate_is_left_for_a_meeting_and_entered_again_behind_it():
    order = []
    first, second = ThreadCommunicator.group(2)

    def late() -> None:
        with compiling.inside():
            order.append("second")
            second.barrier()

    with compiling.inside():
        thread = threading.Thread(target=late)
        thread.start()
        order.append("first")
        first.barrier()
        assert compiling.is_inside
    thread.join()
    assert order == ["first", "second"]


# Failures.


class BrokenBackendError(Exception):
    pass


def test_what_a_backend_raises_surfaces_on_each_replica_and_the_gate_is_free_again():
    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        raise BrokenBackendError("no such kernel")

    def loop(model: nn.Module, *_: Any) -> str:
        compile_module(model, current_world(), backend=backend)
        with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="no such kernel") as caught:
            model(torch.ones(2, 3))
        return type(caught.value.inner_exception).__name__

    replicas = DataParallel(Net(), FOUR)
    assert replicas(loop, []) == ["BrokenBackendError"] * 4
    good = Counting()
    replicas(lambda model, *_: compile_module(model, current_world(), backend=good)(torch.ones(2, 3)), [])
    assert good.counts == (1, 1)


def test_what_a_model_raises_in_its_first_call_surfaces_in_its_own_type():
    class Picky(Net):
        def forward(self, inputs: torch.Tensor, is_bad: bool = False) -> torch.Tensor:
            if is_bad:
                raise LookupError("no such token")
            return super().forward(inputs)

    def loop(model: nn.Module, *_: Any) -> None:
        compile_module(model, current_world(), backend="eager")(torch.ones(2, 3), current_world().rank == 2)
        current_world().comm.barrier()

    replicas = DataParallel(Picky(), FOUR)
    with pytest.raises(LookupError, match="no such token"):
        replicas(loop, [])
    assert len(replicas(lambda model, *_: model(torch.ones(2, 3)), [])) == 4


@pytest.mark.parametrize(
    ("module", "options", "words"),
    [
        (
            lambda: len,
            {},
            "module=<built-in function len> is of type builtin_function_or_method; pass a torch.nn.Module",
        ),
        (lambda: torch.compile(Net()), {}, "module is the result of torch.compile for a Net"),
        (Net, {"speed": "high"}, "speed"),
    ],
)
def test_what_cannot_be_compiled_is_refused(module, options, words):
    with pytest.raises(TypeError, match=words):
        compile_module(module(), current_world(), **options)


# With torch's own machinery.


@pytest.mark.slow
def test_distributed_data_parallel_over_a_compiled_module_reduces_as_over_a_plain_one():
    def body() -> tuple[bool, tuple[int, int]]:
        def train(backend: Any) -> list[torch.Tensor]:
            torch.manual_seed(0)
            model = Net()
            if backend is not None:
                compile_module(model, current_world(), backend=backend)
            wrapped = DistributedDataParallel(model)
            rank = current_world().rank
            for factor in (1.0, 2.0, 3.0):
                model.zero_grad()
                wrapped(torch.full((4, 3), factor + rank)).square().mean().backward()
            assert list(wrapped.state_dict()) == [f"module.{name}" for name in model.state_dict()]
            return [each.grad for each in model.parameters()]

        backend = Counting()
        pairs = zip(train(None), train(backend), strict=True)
        return all(torch.allclose(one, other) for one, other in pairs), backend.counts

    assert PROCESSES_2.run(body) == [(True, (1, 1))] * 2


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_inductor_compiles_the_model_of_four_threads_once(monkeypatch):
    monkeypatch.setenv("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR", "0")  # inductor sets it, and leaves it behind
    monkeypatch.setattr(torch._inductor.config, "cpp_cache_precompile_headers", False)  # which pays for many kernels
    monkeypatch.setattr(torch._inductor.config, "compile_threads", 1)
    monkeypatch.setattr(torch._inductor.config.cpp, "vec_isa_ok", True)  # without a build of each instruction set
    replicas = DataParallel(Net(), FOUR)
    each_its_own(replicas.models)
    expected = [steps(copy.deepcopy(model), [5, 5]) for model in replicas.models]
    counters.clear()

    def loop(model: nn.Module, *_: Any) -> list[torch.Tensor]:
        current_world().comm.barrier()
        return steps(compile_module(model, current_world()), [5, 5])

    torch.testing.assert_close(replicas(loop, []), expected)
    assert counters["stats"]["unique_graphs"] == 1
