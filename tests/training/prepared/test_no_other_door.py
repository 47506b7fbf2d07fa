"""No optimizer steps on gradients that are one rank's alone, whoever made them; and an attempt that failed can end."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from modes import PROCESSES_2, THREADS_2
from torch.utils.data import DataLoader
from twin import Case, State, assert_all_are, compare, loader_of, mean_loss, model, plain_run, sgd, train

from unisono import Accelerator, DeviceLoader, all_gather_object, backward, optimizer_step
from unisono.strategies import ZeRO1


def test_after_backward_by_hand_only_optimizer_step_may_take_the_step() -> None:
    def body() -> None:
        network = model()
        optimizer = sgd(network.parameters())
        batches = iter(DeviceLoader(loader_of(24, 3)))
        backward(mean_loss(network, next(batches)))
        with pytest.raises(RuntimeError, match=r"call unisono\.optimizer_step\(optimizer\), which reduces them first"):
            optimizer.step()
        optimizer_step(optimizer)
        optimizer.zero_grad()
        optimizer.step()  # on nothing

    THREADS_2.run(body)


def test_only_prepared_optimizers_step_on_assigned_gradients() -> None:
    def body(is_first: bool) -> None:
        accelerator, network = Accelerator(), model()
        network, loader = accelerator.prepare(network, loader_of(24, 3))
        optimizer, trained = sgd(network.parameters()), list(network.parameters())
        batches = iter(loader)
        if not is_first:
            accelerator.backward(mean_loss(network, next(batches)))
        optimizer.step()  # on nothing, if it is the first
        gradients = torch.autograd.grad(mean_loss(network, next(batches)), trained)
        for each, gradient in zip(trained, gradients, strict=True):
            each.grad = gradient
        with pytest.raises(RuntimeError, match=r"they were assigned, and are this rank's alone; prepare\(optimizer\)"):
            optimizer.step()

    THREADS_2.run(lambda: body(False))
    THREADS_2.run(lambda: body(True))


def test_an_optimizer_past_what_its_steps_were_asked_to_do_is_refused() -> None:
    accelerator, network = Accelerator(max_grad_norm=0.1), model()
    network = accelerator.prepare(network)
    optimizer = sgd(network.parameters())
    network(torch.ones(2, 5, dtype=torch.float64)).sum().backward()
    with pytest.raises(RuntimeError, match=r"was not prepared, so that .* would do nothing: .* prepare this one, too"):
        optimizer.step()


def test_without_accumulation_a_lone_rank_may_step_in_the_backward_pass() -> None:
    """As in torch's tutorial on memory: each parameter steps when its gradient is there."""
    network = model()
    optimizers = {each: sgd([each]) for each in network.parameters()}

    def step(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    prepared, loader = Accelerator().prepare(network, loader_of(12, 3))
    for each in prepared.parameters():
        each.register_post_accumulate_grad_hook(step)
    for batch in loader:
        mean_loss(prepared, batch).backward()
    assert_all_are([prepared.state_dict()], plain_run(Case(12, 3, epochs=1), 1, sgd))


class _Fails(torch.autograd.Function):
    """A backward pass that fails in its middle."""

    @staticmethod
    def forward(context: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        raise MemoryError("of the device")


def test_a_failed_reduction_is_not_resumed_and_a_new_attempt_is_exact() -> None:
    def body(strategy: str) -> State:
        accelerator, network = Accelerator(strategy=strategy), model()  # type: ignore[arg-type]
        network, _, loader = accelerator.prepare(network, sgd(network.parameters()), loader_of(23, 3))
        handle = network.module[1].register_forward_hook(lambda module, args, output: _Fails.apply(output))
        batch = next(iter(loader))
        with pytest.raises(MemoryError):
            mean_loss(network, batch).backward()
        handle.remove()
        with pytest.raises(RuntimeError, match=r"has failed on this rank in the middle of its reduction"):
            mean_loss(network, batch).backward()
        accelerator.free_memory()
        return train(accelerator, loader_of(23, 3))

    ranks = PROCESSES_2.run(lambda: [body(strategy) for strategy in ("ddp", "zero1", "fsdp")])
    for states in zip(*ranks, strict=True):
        assert_all_are(states, plain_run(Case(23, 3, epochs=1), 2, sgd))


def test_under_zero1_layers_are_unfrozen() -> None:
    def lines(accelerator: Any, loader: DataLoader[Any]) -> State:
        network = model()
        network[0].requires_grad_(False)
        optimizer = sgd(network.parameters())
        trained, optimizer, loader = accelerator.prepare(network, optimizer, loader)
        for number, batch in enumerate(loader):
            if number == 1:
                network[0].requires_grad_(True)
            accelerator.backward(mean_loss(trained, batch))
            optimizer.step()
            optimizer.zero_grad()
        return {name: each.clone() for name, each in network.state_dict().items()}

    compare(PROCESSES_2, lines, strategy=ZeRO1(find_unused_parameters=True))


@pytest.mark.parametrize("is_released", [False, True], ids=["never prepared", "released"])
def test_an_optimizer_of_a_model_that_was_left_out_is_refused(is_released: bool) -> None:
    def body() -> None:
        accelerator, network = Accelerator(), model()
        if is_released:
            accelerator.prepare(network)
            accelerator.free_memory()
        optimizer = sgd(network.parameters())
        for batch in accelerator.prepare(loader_of(24, 3)):
            mean_loss(network, batch).backward()
            optimizer.step()

    for error in THREADS_2.told(body, RuntimeError):
        assert "the SGD steps parameters that were not prepared, and the gradient of its parameter 0 is" in error


def test_under_fsdp_an_optimizer_of_the_unprepared_parameters_is_refused() -> None:
    def body() -> None:
        accelerator, network = Accelerator(strategy="fsdp"), model()
        optimizer = sgd(network.parameters())
        network, loader = accelerator.prepare(network, loader_of(24, 3))
        mean_loss(network, next(iter(loader))).backward()
        with pytest.raises(RuntimeError, match=r"had before prepare\(\), .* so that the model would not change"):
            optimizer.step()

    PROCESSES_2.run(body)


def test_an_unprepared_scheduler_sets_the_prepared_optimizers_rates() -> None:
    def body(strategy: str) -> list[float]:
        accelerator, network = Accelerator(strategy=strategy), model()  # type: ignore[arg-type]
        optimizer = sgd(network.parameters())
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        network, stepped = accelerator.prepare(network, optimizer)
        found = []
        for _ in range(2):
            network(torch.ones(2, 5, dtype=torch.float64)).sum().backward()
            stepped.step()
            scheduler.step()
            found += [group["lr"] for group in stepped.param_groups]
            accelerator.load_state_dict(stepped, all_gather_object(accelerator.state_dict(stepped))[0])
            if strategy == "zero1":
                stepped.consolidate_state_dict(0)
                [state, _] = all_gather_object(stepped.state_dict() if accelerator.is_main_process else None)
                stepped.load_state_dict(state)
        return found

    assert PROCESSES_2.run(lambda: [body("ddp"), body("zero1")]) == [[[0.05, 0.025]] * 2] * 2


def test_an_optimizer_whose_state_zero1_divided_cannot_be_prepared_again() -> None:
    def body() -> None:
        accelerator, network = Accelerator(strategy="zero1"), model()
        optimizer = sgd(network.parameters())
        prepared, stepped = accelerator.prepare(network, optimizer)
        accelerator.backward(prepared(torch.ones(2, 5, dtype=torch.float64)).sum())
        stepped.step()
        accelerator.free_memory()
        for kind in ("zero1", "ddp"):
            with pytest.raises(ValueError, match=r"strategy='zero1' has divided the state of this SGD"):
                Accelerator(strategy=kind).prepare(network, optimizer)  # type: ignore[arg-type]

    PROCESSES_2.run(body)
