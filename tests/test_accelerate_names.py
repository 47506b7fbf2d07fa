"""What the Accelerator shares with Accelerate's: the names, what they mean on any ranks, and advice for all others."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from modes import PROCESSES_2, SOLO, THREADS_2, THREADS_3, Mode, fitting
from torch import nn
from torch.nn import functional as F

import unisono.compat.accelerate as compat
from unisono import Accelerator, DeviceLoader, Output, current_world
from unisono.comm.threads import ThreadCommunicator
from unisono.training.rank_view import split_between

ALL = pytest.mark.parametrize("mode", fitting(SOLO, THREADS_2, THREADS_3, PROCESSES_2, workers=True), ids=str)
SEVERAL = pytest.mark.parametrize("mode", fitting(THREADS_3, PROCESSES_2), ids=str)


def test_a_name_of_theirs_is_an_error_that_says_what_it_is_here() -> None:
    for name, ours in {
        "get_state_dict": "state_dict(model)",
        "setup": "prepare()",
        "rank": "process_index",
        "world_size": "num_processes",
    }.items():
        words = re.escape(f"'Accelerator' object has no attribute '{name}': here it is {ours}")
        with pytest.raises(AttributeError, match=words):
            getattr(Accelerator(), name)


def test_an_unknown_name_is_an_error_without_advice() -> None:
    with pytest.raises(AttributeError, match=r"^'Accelerator' object has no attribute 'prepair'$"):
        Accelerator().prepair  # noqa: B018
    assert not hasattr(Accelerator(), "sync_gradient")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (Accelerator, {"gradient_acumulation_steps": "is it gradient_accumulation_st", "zzz": "there are device, mix"}),
        (Output, {"logdir": "is it log_dir?"}),
        (partial(DeviceLoader, []), {"batchdim": "is it batch_dim?"}),
        (compat.Accelerator, {"fsdp_plugins": "is it fsdp_plugin?", "even_batches": "it is one of DataLoaderConf"}),
    ],
)
def test_an_unknown_argument_says_what_to_pass_instead(make: Callable[..., Any], words: dict[str, str]) -> None:
    for name, hint in words.items():
        with pytest.raises(TypeError, match=re.escape(f"() has no argument {name!r}; {hint}")):
            make(**{name: True})


@ALL
def test_the_facts_are_those_of_the_world(mode: Mode) -> None:
    def facts() -> tuple[Any, ...]:
        one = Accelerator()
        where = (one.process_index, one.local_process_index, one.num_processes)
        return (*where, one.is_main_process, one.is_local_main_process)

    assert mode.run(facts) == [(rank, rank, mode.ranks, rank == 0, rank == 0) for rank in range(mode.ranks)]


@ALL
def test_a_decorated_function_runs_on_rank_zero_alone(mode: Mode) -> None:
    def body() -> list[Any]:
        calls = []

        @Accelerator().on_main_process
        def note(value: int) -> int:
            """Notes."""
            calls.append(value)
            return value + 1

        return [note(3), calls, note.__doc__]

    assert mode.run(body) == [[4, [3], "Notes."]] + [[None, [], "Notes."]] * (mode.ranks - 1)


@pytest.mark.parametrize("turn", ["main_process_first", "local_main_process_first"])
@ALL
def test_the_others_enter_when_the_first_has_left(mode: Mode, turn: str) -> None:
    def body() -> bool:
        accelerator = Accelerator()
        flag = torch.zeros(1, dtype=torch.long)
        with getattr(accelerator, turn)():
            if accelerator.is_main_process:
                flag += 1  # what the first one makes, the others see as soon as they are in
            done = accelerator.check_trigger() if not accelerator.is_main_process else True
        if accelerator.is_main_process:
            accelerator.set_trigger()
            accelerator.check_trigger()
        return done

    assert mode.run(body) == [True] * mode.ranks


@ALL
def test_a_trigger_of_one_rank_is_seen_by_all_once(mode: Mode) -> None:
    def body() -> list[bool]:
        accelerator = Accelerator()
        before = accelerator.check_trigger()
        if accelerator.process_index == mode.ranks - 1:
            accelerator.set_trigger()
        return [before, accelerator.check_trigger(), accelerator.check_trigger()]

    assert mode.run(body) == [[False, True, False]] * mode.ranks


@ALL
def test_nested_values_are_gathered_reduced_and_padded_in_their_form(mode: Mode) -> None:
    def body() -> tuple[Any, ...]:
        accelerator = Accelerator()
        rank = accelerator.process_index
        values = {"a": torch.full((2, 3), float(rank)), "b": [torch.tensor(rank), (torch.full((1, 2), rank),)]}
        uneven = {"rows": torch.full((rank + 1, 2), float(rank)), "none": torch.tensor(1.0)}
        padded = accelerator.pad_across_processes(uneven, pad_index=-1)
        in_front = accelerator.pad_across_processes(uneven["rows"], pad_first=True)
        total = accelerator.reduce(values, "sum", scale=2.0)
        mean = accelerator.reduce(values["a"])
        return accelerator.gather(values), total, mean, padded, in_front, values["a"]

    ranks = range(mode.ranks)
    for rank, (gathered, total, mean, padded, in_front, own) in enumerate(mode.run(body)):
        rows = torch.tensor([float(each) for each in ranks])
        assert torch.equal(gathered["a"], rows.repeat_interleave(2)[:, None].expand(-1, 3))
        assert torch.equal(gathered["b"][0], rows.long())
        assert torch.equal(gathered["b"][1][0][:, 0], rows.long())
        assert torch.equal(total["a"], torch.full((2, 3), 2 * float(sum(ranks))))
        assert total["b"][0] == 2 * sum(ranks)
        assert torch.allclose(mean, torch.full((2, 3), sum(ranks) / len(ranks)))
        assert torch.equal(own, torch.full((2, 3), float(rank))), "the values stay what they are"
        missing = mode.ranks - rank - 1
        assert torch.equal(padded["rows"][:, 0], torch.tensor([float(rank)] * (rank + 1) + [-1.0] * missing))
        assert torch.equal(in_front[:, 0], torch.tensor([0.0] * missing + [float(rank)] * (rank + 1)))
        assert padded["none"] == 1


ONES = torch.ones(2, 2)
OTHER_ACTIONS: dict[str, Callable[[Accelerator], Any]] = {
    "another form": lambda one: one.gather([ONES, ONES]),
    "another order": lambda one: one.gather({"b": ONES, "a": ONES}),
    "another call": lambda one: one.reduce({"a": ONES, "b": ONES}),
    "nothing in it": lambda one: (one.gather({}), one.reduce(torch.ones(1))),
}


@pytest.mark.parametrize("what", OTHER_ACTIONS)
@SEVERAL
def test_structures_that_differ_between_ranks_are_an_error_on_all_of_them(mode: Mode, what: str) -> None:
    def body() -> None:
        accelerator = Accelerator()
        if accelerator.process_index == 1:
            OTHER_ACTIONS[what](accelerator)
        else:
            accelerator.gather({"a": ONES, "b": ONES})

    for told in mode.told(body):
        assert re.search("rank 1.*gather|gather.*rank 1", told), told


@pytest.mark.parametrize("value", [None, 1.5, "text", {"a": None}], ids=str)
@SEVERAL
def test_what_is_no_tensor_is_named_with_its_rank(mode: Mode, value: Any) -> None:
    def body() -> None:
        accelerator = Accelerator()
        accelerator.gather(value if accelerator.process_index == 1 else torch.ones(1))

    with pytest.raises(TypeError, match=r"gather takes tensors, and got .*on rank 1; pass a tensor"):
        mode.run(body)


def worlds(size: int) -> list[Any]:
    return [SimpleNamespace(rank=rank, world_size=size, comm=ThreadCommunicator.group(1)[0]) for rank in range(size)]


@given(st.integers(0, 12), st.integers(1, 5), st.sampled_from([list, tuple, torch.tensor]), st.booleans())
def test_parts_are_the_inputs_once_in_rank_order_and_as_even_as_can_be(
    count: int, size: int, kind: Any, is_dict: bool
) -> None:
    inputs = kind(range(count)) if kind is not torch.tensor else torch.arange(count)
    given_in: Any = {"x": inputs, "y": list(range(count))} if is_dict else inputs
    parts = [split_between(given_in, each) for each in worlds(size)]
    parts = [each["x"] for each in parts] if is_dict else parts
    assert all(type(each) is type(inputs) for each in parts)
    assert [int(each) for part in parts for each in part] == list(range(count))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert sorted(map(len, parts), reverse=True) == [len(each) for each in parts]


@given(st.integers(1, 12), st.integers(1, 5), st.sampled_from([lambda count: list(range(count)), torch.arange]))
def test_padded_parts_are_equally_long_and_end_with_the_last_element(count: int, size: int, make: Any) -> None:
    for world in worlds(size):
        own, padded = ([*map(int, split_between(make(count), world, pads))] for pads in (False, True))
        assert padded == own + [count - 1] * (-(-count // size) - len(own))


def test_what_has_no_parts_is_refused() -> None:
    (world,) = worlds(1)
    for inputs in (3, "text", torch.tensor(1.0), None):
        with pytest.raises(TypeError, match="pass a list, a tuple, a tensor with a dimension"):
            split_between(inputs, world)
    with pytest.raises(ValueError, match=r"different lengths, \{'a': 1, 'b': 2\}"):
        split_between({"a": [1], "b": [1, 2]}, world)


@ALL
def test_values_of_gradients_are_clipped_where_they_are_those_of_the_step(mode: Mode) -> None:
    def body() -> list[float]:
        accelerator, network = Accelerator(gradient_accumulation_steps=2), nn.Linear(2, 1, bias=False)
        nn.init.zeros_(network.weight)
        network, optimizer = accelerator.prepare(network, torch.optim.SGD(network.parameters(), lr=1.0))
        for _ in range(2):
            with accelerator.accumulate(network):
                accelerator.backward(F.mse_loss(network(torch.ones(2, 2)), torch.full((2, 1), 100.0)))
                accelerator.clip_grad_value_(network, 0.25)
                optimizer.step()
                optimizer.zero_grad()
        return network.weight.flatten().tolist()

    assert mode.run(body) == [[0.25, 0.25]] * mode.ranks


@ALL
def test_a_step_that_is_left_out_is_reported_until_the_next_one(mode: Mode) -> None:
    def body() -> list[bool]:
        accelerator, network = Accelerator(mixed_precision="fp16"), nn.Linear(2, 1)
        network, optimizer = accelerator.prepare(network, torch.optim.SGD(network.parameters(), lr=1e-3))
        found = [accelerator.optimizer_step_was_skipped]
        for factor in (1.0, float("inf"), 1.0):
            accelerator.backward(network(torch.ones(2, 2)).float().mean() * factor / 100)
            optimizer.step()
            optimizer.zero_grad()
            found.append(accelerator.optimizer_step_was_skipped)
        return found

    if current_world().backend.unsupported_reason("fp16"):
        pytest.skip("this family has no fp16")
    assert mode.run(body) == [[False, False, True, False]] * mode.ranks


@ALL
def test_microbatches_can_be_set_between_steps_and_a_graph_can_be_retained(mode: Mode) -> None:
    def body() -> tuple[float, int]:
        accelerator = Accelerator()
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        model, optimizer = accelerator.prepare(model, optimizer)
        steps = []
        for every, microbatches in ((1, 1), (2, 2), (1, 1)):
            accelerator.gradient_accumulation_steps = every
            for _ in range(microbatches):
                with accelerator.accumulate(model):
                    loss = model(torch.full((2, 1), accelerator.process_index + 1.0)).mean()
                    accelerator.backward(loss, retain_graph=True)
                    accelerator.backward(loss)
                    steps.append(accelerator.sync_gradients)
                    optimizer.step()
                    optimizer.zero_grad()
        assert steps == [True, False, True, True]
        with pytest.raises(ValueError, match=r"gradient_accumulation_steps=0 is too small"):
            accelerator.gradient_accumulation_steps = 0
        return model.weight.item(), accelerator.gradient_accumulation_steps

    mean = (mode.ranks + 1) / 2
    assert mode.run(body) == [(pytest.approx(3 * 2 * -mean), 1)] * mode.ranks


@ALL
def test_gradients_are_unscaled_once_and_are_those_of_the_step(mode: Mode) -> None:
    def body() -> list[float]:
        accelerator = Accelerator(
            mixed_precision="fp16", gradient_accumulation_steps=2, scaler_options={"init_scale": 1024.0}
        )
        network = nn.Linear(2, 1)
        network, optimizer = accelerator.prepare(network, torch.optim.SGD(network.parameters(), lr=1.0))
        found = []
        for _ in range(2):
            with accelerator.accumulate(network):
                rows = torch.full((2, 2), accelerator.process_index + 1.0)
                accelerator.backward(network(rows).float().mean())
                accelerator.unscale_gradients()
                accelerator.unscale_gradients(optimizer)
                found.append(network.weight.grad.mean().item())
                optimizer.step()
        with pytest.raises(ValueError, match="optimizer 0 is not prepared"):
            accelerator.unscale_gradients([torch.optim.SGD([nn.Parameter(torch.ones(1))])])
        return found

    if current_world().backend.unsupported_reason("fp16"):
        pytest.skip("this family has no fp16")
    for first, second in mode.run(body):
        assert first >= 512, "between microbatches they stay as they are"
        assert second == (mode.ranks + 1) / 2


@ALL
@pytest.mark.parametrize("has_optimizer", [True, False])
def test_a_sync_is_triggered_for_passes_that_ran_without_one(mode: Mode, has_optimizer: bool) -> None:
    def body() -> list[float]:
        accelerator, network = Accelerator(), nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(network.parameters(), lr=1.0)
        network = accelerator.prepare(network)
        if has_optimizer:
            optimizer = accelerator.prepare(optimizer)
        with torch.no_grad():
            network.weight.zero_()
        own = torch.full((2, 1), accelerator.process_index + 1.0)
        with accelerator.no_sync(network):
            losses = [network(own).mean(), network(2 * own).mean()]
        accelerator.backward(losses[0])
        alone = network.weight.grad.item()
        with accelerator.trigger_sync_in_backward(network):
            accelerator.backward(losses[1])
        together = network.weight.grad.item()
        with accelerator.trigger_sync_in_backward(nn.Linear(1, 1)):
            pass
        optimizer.step()
        return [alone, together, network.weight.item()]

    mean = (mode.ranks + 1) / 2
    assert mode.run(body) == [[rank + 1.0, 3 * mean, -3 * mean] for rank in range(mode.ranks)]
