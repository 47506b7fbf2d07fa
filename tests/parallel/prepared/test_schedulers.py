"""One optimizer step is one scheduler step."""

from __future__ import annotations

import warnings

import pytest
import torch
from modes import PROCESSES_2, THREADS_2, fitting
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)
from twin import loader_of, model, sgd

from unisono import Accelerator

INPUTS = torch.ones(1, 5).double()


@pytest.fixture(autouse=True)
def no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def rates_of(make, steps=10):
    """Plainly, behind each step."""
    network = model()
    optimizer = sgd(network.parameters())
    scheduler = make(optimizer)
    return [(optimizer.step(), scheduler.step(), optimizer.param_groups[0]["lr"])[2] for _ in range(steps)]


SCHEDULERS = {
    "lambda": lambda optimizer: LambdaLR(optimizer, lambda step: 0.9**step),
    "one cycle": lambda optimizer: OneCycleLR(optimizer, max_lr=0.3, total_steps=12),
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, 9),
    "sequential": lambda optimizer: SequentialLR(
        optimizer, [LinearLR(optimizer, total_iters=3), StepLR(optimizer, 2)], milestones=[3]
    ),
    "chained": lambda optimizer: ChainedScheduler([LinearLR(optimizer), StepLR(optimizer, 2)]),
}


@pytest.mark.parametrize("when", ["together", "made before, prepared later", "made later"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_the_rates_are_those_of_the_plain_loop_whatever_accumulates(name, when):
    accelerator, network = Accelerator(gradient_accumulation_steps=2), model()
    optimizer = sgd(network.parameters())
    if when == "made later":
        network, optimizer, loader = accelerator.prepare(network, optimizer, loader_of(18, 2))
        scheduler = accelerator.prepare(SCHEDULERS[name](optimizer))
    else:
        scheduler = SCHEDULERS[name](optimizer)
        together = [scheduler] if when == "together" else []
        network, optimizer, loader, *_ = made = accelerator.prepare(network, optimizer, loader_of(18, 2), *together)
        scheduler = made[-1] if together else accelerator.prepare(scheduler)
    rates = []
    for _ in range(2):  # 9 batches: the last one is a step of its own
        for inputs, _, _ in loader:
            optimizer.zero_grad()
            accelerator.backward(network(inputs).sum())
            optimizer.step()
            scheduler.step()
            rates.append(optimizer.param_groups[0]["lr"])
    ends = [1, 3, 5, 7, 8, 10, 12, 14, 16, 17]
    assert [rates[place] for place in ends] == pytest.approx(rates_of(SCHEDULERS[name]), rel=1e-12)
    assert rates[1] == rates[2]


@pytest.mark.parametrize("mode", fitting(THREADS_2, PROCESSES_2), ids=str)
def test_rates_do_not_depend_on_the_number_of_ranks(mode):
    def body():
        accelerator, network = Accelerator(), model()
        optimizer = sgd(network.parameters())
        network, optimizer, scheduler = accelerator.prepare(
            network, optimizer, LambdaLR(optimizer, lambda step: 0.9**step)
        )
        for _ in range(9):
            network(INPUTS).sum().backward()
            optimizer.step()
            scheduler.step()
        return scheduler.get_last_lr(), scheduler.last_epoch

    assert mode.run(body) == [([pytest.approx(0.1 * 0.9**9)], 9)] * 2


def prepared(make, **options):
    accelerator, network = Accelerator(**options), model()
    optimizer = sgd(network.parameters())
    network, optimizer, scheduler = accelerator.prepare(network, optimizer, make(optimizer))

    def step():
        optimizer.zero_grad()
        accelerator.backward(network(INPUTS).sum())
        optimizer.step()

    return step, optimizer, scheduler


def test_a_scheduler_may_step_once_an_epoch():
    step, optimizer, scheduler = prepared(lambda optimizer: StepLR(optimizer, 1, gamma=0.5))
    for _ in range(3):
        for _ in range(4):
            step()
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.1 / 8


def test_a_plateau_is_seen_in_the_metric():
    step, optimizer, scheduler = prepared(lambda optimizer: ReduceLROnPlateau(optimizer, patience=0, factor=0.5))
    for metric in (1.0, 0.5, 0.5, 0.5):
        step()
        scheduler.step(metric)
    assert optimizer.param_groups[0]["lr"] == 0.1 / 4


def test_a_scheduler_stepped_by_hand_is_an_error():
    step, _, scheduler = prepared(SCHEDULERS["lambda"])
    step()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scheduler.scheduler.step()
    for each in (step, scheduler.step):
        with pytest.raises(
            RuntimeError, match="LambdaLR was stepped by hand, from 0 to 1; call step\\(\\) on what prepare"
        ):
            each()


def test_a_scheduler_step_without_an_optimizer_step_is_an_error():
    step, _, scheduler = prepared(SCHEDULERS["lambda"])
    with pytest.raises(RuntimeError, match="LambdaLR is stepped without an optimizer step since its last one"):
        scheduler.step()
    step()
    scheduler.step()
    with pytest.raises(RuntimeError, match="without an optimizer step"):
        scheduler.step()


def test_a_loaded_state_goes_on():
    step, _, scheduler = prepared(SCHEDULERS["cosine"])
    for _ in range(4):
        step()
        scheduler.step()
    step, optimizer, other = prepared(SCHEDULERS["cosine"])
    other.load_state_dict(scheduler.state_dict())
    optimizer.param_groups[0]["lr"] = scheduler.get_last_lr()[0]
    step()
    other.step()
    assert other.last_epoch == 5
    assert optimizer.param_groups[0]["lr"] == pytest.approx(rates_of(SCHEDULERS["cosine"])[4])
