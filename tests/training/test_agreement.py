"""Replicas that drift apart are noticed, and the message says where and on whom."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from modes import PROCESSES_2, SOLO, THREADS_2, THREADS_4, Mode, hearing, scaling
from torch import nn
from torch.utils.data import DataLoader
from twin import assert_same_bits

import unisono
from unisono import Accelerator, rank
from unisono.errors import ReplicasDifferError
from unisono.training.agreement import check_replicas, fingerprint
from unisono.world import current_world

LARGE = 3 * 4096  # words, of eight bytes: beyond what counts with its place


def bits_of(*tensors: torch.Tensor) -> int:
    return int(fingerprint(tensors))


MODEL = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def model() -> nn.Sequential:
    """The same on each rank, without a seed: threads share their generator."""
    return copy.deepcopy(MODEL)


def told(mode: Mode, body: Callable[[], object]) -> list[tuple[str, str, list[int]] | None]:
    """What each rank hears of its replicas' difference: the message, the name, the ranks."""

    def listen() -> tuple[str, str, list[int]] | None:
        try:
            body()
        except ReplicasDifferError as error:
            return str(error), error.name, error.ranks
        return None

    return mode.run(listen)


@given(st.integers(1, 40), st.data())
def test_any_flipped_bit_of_a_small_tensor_changes_its_fingerprint(count, data):
    octets = torch.randint(256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(count))
    changed = octets.clone()
    changed[data.draw(st.integers(0, count - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert bits_of(octets) == bits_of(octets.clone())
    assert bits_of(octets) != bits_of(changed)


@given(st.integers(0, LARGE - 1), st.integers(0, 62))
def test_any_flipped_bit_of_a_large_tensor_changes_its_fingerprint(place, bit):
    words = torch.arange(LARGE)
    changed = words.clone()
    changed[place] ^= 1 << bit
    assert bits_of(words) != bits_of(changed)


def test_a_fingerprint_is_of_the_values_and_their_places():
    one, other, large = torch.rand(3, 4), torch.rand(4, 3), torch.rand(100, 256)
    assert bits_of(one, other) != bits_of(other, one)
    assert len({bits_of(one), bits_of(one.flip(0)), bits_of(one.flip(1))}) == 3
    assert bits_of(large) != bits_of(large.flip(0))
    assert bits_of(torch.tensor([math.nan, 1.0])) == bits_of(torch.tensor([math.nan, 1.0]))
    assert bits_of(torch.zeros(1)) != bits_of(-torch.zeros(1))
    image, flat = torch.rand(2, 3, 8, 8), torch.rand(101)
    assert bits_of(image) == bits_of(image.to(memory_format=torch.channels_last))
    assert bits_of(flat[1:]) == bits_of(flat[1:].clone())  # it does not begin at a multiple of eight bytes
    assert bits_of(torch.tensor(1.0)) == bits_of(torch.ones(1))


@pytest.mark.parametrize(
    "dtype",
    [torch.float16, torch.float8_e4m3fn, torch.complex64, torch.bool, torch.int8, torch.uint16, torch.int64],
    ids=str,
)
def test_a_tensor_of_any_type_and_length_has_a_fingerprint(dtype):
    for count in (0, 1, 5, 40_001):
        tensor = torch.zeros(count, dtype=dtype)
        changed = tensor.clone()
        changed[-1:] = 1
        assert bits_of(tensor) == bits_of(tensor.clone())
        assert (bits_of(tensor) == bits_of(changed)) == (count == 0)


@pytest.mark.any_family
@pytest.mark.parametrize("mode", scaling(SOLO, THREADS_2, PROCESSES_2), ids=str)
def test_replicas_that_agree_pass(mode):
    def body() -> int:
        network = model()
        network[1].running_mean += unisono.rank()  # its own on each rank, and not compared
        for _ in range(3):
            check_replicas(network)
        return 3

    assert mode.run(body) == [3] * mode.ranks


@pytest.mark.any_family
@pytest.mark.parametrize("mode", scaling(THREADS_4, PROCESSES_2), ids=str)
def test_the_first_parameter_that_differs_is_named_with_its_holders(mode):
    def body() -> None:
        network = model()
        check_replicas(network)
        with torch.no_grad():
            if unisono.rank() == mode.ranks - 1:
                network[2].weight[0, 0] += 1e-6
                network[2].bias += 1
        check_replicas(network)

    last, others = mode.ranks - 1, list(range(mode.ranks - 1))
    for message, name, ranks in told(mode, body):
        assert message.startswith("the replicas differ at call 2 of check_replicas: the parameter '2.weight' is ")
        assert name == "the parameter '2.weight'"
        assert f" on rank{f's {others}' if len(others) > 1 else ' 0'} and float32[2, 4] with bits" in message
        assert f"on rank {last}. Every rank must begin with" in message
        assert ranks == [last]


def test_two_ranks_that_differ_in_their_own_ways_are_both_the_odd_ones():
    def body() -> None:
        network = nn.Linear(2, 2)
        nn.init.constant_(network.weight, {1: 1.0, 2: 2.0}.get(unisono.rank(), 0.0))
        nn.init.zeros_(network.bias)
        check_replicas(network)

    five = Mode("threads", 5)
    for message, _, ranks in told(five, body):
        assert "on ranks [0, 3, 4] and float32[2, 2] with bits " in message
        assert ranks == [1, 2]


def test_only_every_so_many_calls_compare():
    def body() -> list[int]:
        network, world = model(), current_world()
        compared, reduce = [], world.comm.all_reduce
        for call in range(1, 8):
            world.comm.all_reduce = lambda *a, call=call: (compared.append(call), reduce(*a))[1]
            check_replicas(network, every=3)
        return compared

    assert THREADS_2.run(body) == [[3, 6]] * 2


def test_modules_of_different_make_differ_by_the_name_of_a_parameter():
    def body() -> None:
        network = nn.Sequential(nn.Linear(2, 2), *([nn.Linear(2, 2)] if unisono.rank() else []))
        for parameter in network.parameters():
            nn.init.zeros_(parameter)
        check_replicas(network)

    for message, _, _ in told(THREADS_2, body):
        assert "the parameter '1.weight' is missing on rank 0 and float32[2, 2] with bits" in message


@pytest.mark.parametrize(("every", "kind"), [(0, ValueError), (-1, ValueError), (1.5, TypeError), (True, TypeError)])
def test_what_is_no_number_of_calls_is_refused(every, kind):
    with pytest.raises(kind, match=f"every={every}"):
        check_replicas(nn.Identity(), every)


def own_state(kept: dict) -> dict:
    """Each rank's own, as where each keeps the best by its own loss."""
    return {name: each + rank() for name, each in kept.items()}


def load_own(accelerator, model, optimizer, kept):
    model.load_state_dict(own_state(kept))


def load_on_one_rank(accelerator, model, optimizer, kept):
    if rank() == 1:
        model.load_state_dict(own_state(kept))


def load_own_momentum(accelerator, model, optimizer, kept):
    state = copy.deepcopy(optimizer.state_dict())
    for each in state["state"].values():
        each["momentum_buffer"] = each["momentum_buffer"] + rank()
    optimizer.load_state_dict(state)


def load_one(accelerator, model, optimizer, kept):
    model.load_state_dict({name: each + 1 for name, each in kept.items()})


def load_one_momentum(accelerator, model, optimizer, kept):
    optimizer.load_state_dict(optimizer.state_dict())


def load_for_an_evaluation(accelerator, model, optimizer, kept):
    if rank() == 0:
        trained = copy.deepcopy(model.state_dict())
        model.load_state_dict(own_state({name: each * 2 for name, each in kept.items()}))
        model.load_state_dict(trained)


def load_that_of_rank_zero(accelerator, model, optimizer, kept):
    accelerator.load_state_dict(model, own_state(kept))


def choose_by_a_loss_of_all(accelerator, model, optimizer, kept):
    if accelerator.reduce(torch.tensor(1.0 + rank())) < 2:
        model.load_state_dict(kept)


@pytest.mark.parametrize(
    ("mode", "strategy", "accumulated"),
    [(THREADS_2, "ddp", 1), (PROCESSES_2, "ddp", 2), (PROCESSES_2, "zero1", 1)],
    ids=str,
)
def test_ranks_that_load_states_of_their_own_are_named_at_the_next_step(mode, strategy, accumulated):
    def body(load):
        accelerator = Accelerator(strategy=strategy, gradient_accumulation_steps=accumulated)
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        loader = accelerator.prepare(DataLoader(torch.ones(16, 3), batch_size=2))
        kept = None
        for _ in range(2):
            if kept is not None:
                load(accelerator, model, optimizer, kept)
            kept = copy.deepcopy(model.state_dict())
            for batch in loader:
                model(batch).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        return model.weight.detach().clone()

    is_whole = strategy == "ddp"  # under "zero1" ranks have parts of the optimizer's state
    one, own = ([load_one_momentum], [load_own_momentum]) if is_whole else ([], [])
    loads = (load_one, *one, load_for_an_evaluation, load_that_of_rank_zero, choose_by_a_loss_of_all)
    assert_same_bits(mode.run(lambda: [body(load) for load in loads]))
    for load in (load_own, load_on_one_rank, *own):
        shown = " ".join(mode.told(lambda load=load: body(load)))
        assert f"the gradients of step {8 // accumulated // 2 + 1} (" in shown
        assert "after load_state_dict() with bits" in shown
        assert "load one state on all ranks: accelerator.load_state_dict(model, state) takes rank zero's, and" in shown


def test_loading_different_states_is_named_even_after_the_last_reduction():
    def body(load):
        accelerator = Accelerator()
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for batch in accelerator.prepare(DataLoader(torch.ones(4, 3), batch_size=2)):
            model(batch).sum().backward()
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        load(accelerator, model, optimizer, copy.deepcopy(model.state_dict()))
        optimizer.step()

    THREADS_2.run(lambda: body(load_one))
    shown = " ".join(THREADS_2.told(lambda: body(load_on_one_rank)))
    assert "after load_state_dict() with bits" in shown or "this rank steps from a state that it has loaded" in shown
    assert "load one state on all ranks: accelerator.load_state_dict(model, state) takes rank zero's, and" in shown


def write(model: nn.Module) -> None:
    if rank() == 1:
        with torch.no_grad():
            model[0].weight[0].sub_(1)  # type: ignore[index]


def write_data(model: nn.Module) -> None:
    if rank() == 0:
        model[2].bias.data.zero_()  # type: ignore[index]


def load_a_part(model: nn.Module) -> None:
    model[2].load_state_dict({name: each + rank() for name, each in model[2].state_dict().items()})  # type: ignore[index]


def add_noise(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(rank())
    with torch.no_grad():
        model[0].bias.add_(torch.randn(4, generator=generator))  # type: ignore[index]


def clamp(model: nn.Module) -> None:
    with torch.no_grad():
        for each in model.parameters():
            each.clamp_(-0.1, 0.1)


def write_for_an_evaluation(model: nn.Module) -> None:
    if rank() == 0:
        kept = [each.detach().clone() for each in model.parameters()]
        for each, value in zip(model.parameters(), kept, strict=True):
            each.data.zero_()
            each.data.copy_(value)


def write_on_one_rank_and_broadcast(model: nn.Module) -> None:
    write_data(model)
    unisono.broadcast_parameters(model)


def change(mode: Mode, how: Callable[[nn.Module], None], steps: int, at: int, saved: str | None = None) -> list[str]:
    """What is said where the parameters are changed before a step."""

    def body() -> list[str]:
        with hearing("unisono.training.agreement") as said:
            accelerator = Accelerator()
            prepared, optimizer = accelerator.prepare(network := model(), torch.optim.SGD(network.parameters(), lr=0.1))
            for number, batch in enumerate(accelerator.prepare(DataLoader(torch.ones(4 * steps, 5), batch_size=2))):
                if number == at:
                    how(prepared)
                prepared(batch).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            if saved is not None:
                accelerator.save_state(saved)
        return said

    return [each for said in mode.run(body) for each in said if "train different models" in each]


@pytest.mark.parametrize(
    ("mode", "how", "name"),
    [
        (THREADS_2, write, "0.weight"),
        (THREADS_2, load_a_part, "2.weight"),
        (THREADS_2, add_noise, "0.bias"),
        (PROCESSES_2, write_data, "2.bias"),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_parameters_changed_on_one_rank_or_by_its_own_numbers_are_named(mode, how, name):
    said = set(change(mode, how, steps=5, at=2))  # compared at steps 1, 2 and 4; threads share a logger
    assert len(said) == 1
    (text,) = said
    assert f"the ranks train different models: the parameter {name!r} of the Sequential is float32[" in text
    assert " on rank 0 and float32[" in text
    assert "on rank 1 after step 4; what changes" in text
    assert "or on one rank before unisono.broadcast_parameters(model), which all ranks call" in text


def test_gradients_changed_by_a_ranks_own_numbers_are_an_error():
    def body() -> None:
        accelerator = Accelerator()
        prepared, optimizer = accelerator.prepare(network := model(), torch.optim.SGD(network.parameters(), lr=0.1))
        for batch in accelerator.prepare(DataLoader(torch.ones(8, 5), batch_size=2)):
            prepared(batch).square().sum().backward()
            network[0].bias.grad.add_(rank())
            optimizer.step()
            optimizer.zero_grad()

    for said in THREADS_2.told(body):
        assert "the parameter '0.bias' of the Sequential is float32[4] with bits" in said
        assert "after step 1, and its gradients differ. What changes .grad before a step must do so on every" in said


def test_nothing_is_said_of_parameters_that_are_changed_alike():
    def alike(network):
        clamp(network)
        write_for_an_evaluation(network)
        write_on_one_rank_and_broadcast(network)

    assert not change(THREADS_2, alike, steps=5, at=2)


def test_they_are_named_when_they_are_saved(tmp_path):
    assert change(THREADS_2, write, steps=3, at=2, saved=str(tmp_path / "checkpoint"))
