"""A thread's own random generator: everything random draws from it, and nothing else does."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from modes import devices
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from unisono import DataParallel, all_reduce
from unisono.devices.randomness import seeded
from unisono.threads.replica_generators import own_generator

TWO = devices(2)
ONES = torch.ones(4, 6)
IMAGES = torch.arange(2400.0).view(2, 3, 20, 20)

DRAWS: dict[str, Callable[[], torch.Tensor]] = {
    "rand": lambda: torch.rand(3),
    "randn": lambda: torch.randn(3),
    "randperm": lambda: torch.randperm(20),
    "bernoulli": lambda: torch.bernoulli(torch.full((40,), 0.5)),
    "multinomial": lambda: torch.multinomial(torch.ones(40), 20),
    "normal": lambda: torch.normal(0.0, 1.0, (3,)),
    "normal_": lambda: torch.empty(3).normal_(),
    "poisson": lambda: torch.poisson(ONES * 1000),
    "gamma": lambda: torch.distributions.Gamma(ONES, ONES).sample(),
    "dirichlet": lambda: torch.distributions.Dirichlet(ONES).sample(),
    "dropout": lambda: F.dropout(torch.ones(40), 0.5),
    "alpha_dropout": lambda: F.alpha_dropout(torch.ones(40), 0.5, True),
    "fractional_max_pool2d": lambda: nn.FractionalMaxPool2d(2, output_ratio=0.3)(IMAGES),
    "attention": lambda: F.scaled_dot_product_attention(ONES[None], ONES[None], IMAGES[:1, 0, :4, :6], dropout_p=0.5),
    "MultiheadAttention": lambda: nn.MultiheadAttention(6, 2, 0.5)(ONES, ONES, ONES)[0],
    "LSTM": lambda: nn.LSTM(6, 6, 2, dropout=0.5)(ONES)[0],
    "a layer": lambda: nn.Linear(3, 3).weight,
    "vmap": lambda: torch.vmap(lambda row: F.dropout(row, 0.5), randomness="different")(torch.ones(4, 20)),
}


def drawn(draw: Callable[[], torch.Tensor], seed: int) -> torch.Tensor:
    with own_generator(torch.Generator().manual_seed(seed)):
        return draw().detach()


@pytest.mark.parametrize("name", DRAWS)
def test_everything_random_draws_only_from_the_threads_own_generator(name):
    draw, before = DRAWS[name], torch.get_rng_state()
    one, again, other = drawn(draw, 1), drawn(draw, 1), drawn(draw, 2)
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    assert torch.equal(torch.get_rng_state(), before)


def test_it_gives_the_numbers_that_the_default_generator_would_give():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        expected = F.dropout(torch.ones(100), 0.3), torch.rand(3)
    with own_generator(torch.Generator().manual_seed(7)):
        assert torch.equal(F.dropout(torch.ones(100), 0.3), expected[0])
        assert torch.equal(torch.rand(3), expected[1])


def test_a_generator_that_is_given_is_used():
    with own_generator(torch.Generator().manual_seed(1)):
        given = torch.rand(3, generator=torch.Generator().manual_seed(5))
        listed = torch.randperm(9, generator=torch.Generator().manual_seed(5))
    assert torch.equal(given, torch.rand(3, generator=torch.Generator().manual_seed(5)))
    assert torch.equal(listed, torch.randperm(9, generator=torch.Generator().manual_seed(5)))


def test_the_functions_of_torch_random_mean_the_threads_own():
    before = torch.get_rng_state()
    with own_generator(torch.Generator().manual_seed(1)):
        assert torch.initial_seed() == 1
        torch.manual_seed(5)
        state, first = torch.get_rng_state(), torch.rand(3)
        torch.set_rng_state(state)
        assert torch.equal(torch.rand(3), first)
        with torch.random.fork_rng(devices=[]):
            torch.rand(3)
        second = torch.rand(3)
    assert torch.equal(torch.get_rng_state(), before)
    numbers = torch.Generator().manual_seed(5)
    assert torch.equal(torch.rand(3, generator=numbers), first)
    assert torch.equal(torch.rand(3, generator=numbers), second)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpoint_recomputes_with_the_masks_of_its_forward(use_reentrant):
    leaf = torch.ones(200, requires_grad=True)
    with own_generator(torch.Generator().manual_seed(1)):
        output = checkpoint(lambda each: F.dropout(each, 0.5), leaf, use_reentrant=use_reentrant)
        torch.rand(5)
        output.sum().backward()
    assert torch.equal(leaf.grad, output.detach())


def test_a_seed_in_a_thread_with_its_own_generator_reaches_no_gpu(monkeypatch):
    if torch.cuda.is_initialized():
        pytest.skip("what waits for the start of the GPUs is counted")
    waiting = type(torch.cuda._lazy_seed_tracker)()
    monkeypatch.setattr(torch.cuda, "_lazy_seed_tracker", waiting)
    with own_generator(torch.Generator()):
        torch.manual_seed(5)
        torch.seed()
    assert not waiting.get_calls()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
    assert waiting.get_calls()


def test_who_seeds_the_process_draws_from_what_he_has_seeded():
    def order() -> list[int]:
        with seeded(4):
            return torch.randperm(30).tolist()

    before, expected = torch.get_rng_state(), order()
    with own_generator(own := torch.Generator().manual_seed(1)):
        state = own.get_state()
        assert order() == expected
        assert torch.equal(own.get_state(), state)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_forked_process_draws_from_the_default_generator():
    ends = os.pipe()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        expected = torch.rand(1).item()
        torch.manual_seed(3)
        with own_generator(torch.Generator().manual_seed(1)):
            if (pid := os.fork()) == 0:
                os.write(ends[1], repr(torch.rand(1).item()).encode())
                os._exit(0)
    os.waitpid(pid, 0)
    found = os.read(ends[0], 100).decode()
    for each in ends:
        os.close(each)
    assert float(found) == expected


def test_a_thread_draws_its_own_numbers_in_code_another_thread_compiled():
    compiled = torch.compile(lambda inputs: F.dropout(torch.relu(inputs), 0.5), backend="aot_eager")
    before = torch.get_rng_state()
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        masks = [pool.submit(drawn, lambda: compiled(torch.ones(50)), 1).result() for pool in (one, other, one, other)]
    assert all(torch.equal(mask, masks[0]) for mask in masks)
    assert torch.equal(torch.get_rng_state(), before)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.5), nn.Linear(16, 1))


def trained(calls: int) -> tuple[list[torch.Tensor], list[list[float]]]:
    torch.manual_seed(0)
    replicas = DataParallel(network(), TWO)

    def train(model, loader, device, context):
        masks = []
        for inputs in loader:
            model.zero_grad()
            model(inputs).sum().backward()
            masks += F.dropout(torch.ones(20, device=device)).tolist()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.01 * all_reduce(parameter.grad, "mean")
        return masks

    batches = [torch.full((2, 6), float(number)) for number in range(12)]
    masks = [sum(each, []) for each in zip(*[replicas(train, batches) for _ in range(calls)], strict=True)]  # noqa: RUF017
    return [parameter.detach().cpu() for parameter in replicas.models[0].parameters()], masks


@pytest.mark.any_family
def test_a_dropout_run_repeats_bit_for_bit_with_masks_differing_by_replica():
    weights, masks = trained(3)
    for _ in range(2):
        again, masks_again = trained(3)
        assert all(map(torch.equal, weights, again))
        assert masks_again == masks
    assert masks[0] != masks[1]


@pytest.mark.any_family
def test_the_generators_can_be_kept_and_set():
    replicas = DataParallel(network(), TWO)
    states = [generator.get_state() for generator in replicas.generators]
    first = replicas.run_on_replicas(lambda *_: torch.rand(2).tolist())
    for generator, state in zip(replicas.generators, states, strict=True):
        generator.set_state(state)
    assert replicas.run_on_replicas(lambda *_: torch.rand(2).tolist()) == first


@pytest.mark.any_family
def test_replicas_that_seed_alike_build_alike_though_they_do_it_at_once():
    together = threading.Barrier(2)

    def build(model, device, context):
        torch.manual_seed(5)
        together.wait(20)
        return [parameter.tolist() for parameter in network().parameters()]

    replicas = DataParallel(nn.Identity(), TWO)
    for _ in range(5):
        one, other = replicas.run_on_replicas(build)
        assert one == other
