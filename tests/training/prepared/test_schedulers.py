"""Learning rates are those of one device, in the unit that the script says; or an error names the lengths."""

from __future__ import annotations

import math
import warnings
from functools import partial

import pytest
import torch
from modes import PROCESSES_2, SOLO, THREADS_2, THREADS_3, Mode, fitting, hearing
from torch.optim.lr_scheduler import (
    ConstantLR,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    LambdaLR,
    LinearLR,
    MultiStepLR,
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
        warnings.simplefilter("ignore", ResourceWarning)  # of what tests before have left, whenever it is collected
        yield


def prepared(make, **options):
    accelerator, network = Accelerator(**options), model()
    optimizer = sgd(network.parameters())
    network, optimizer, scheduler = accelerator.prepare(network, optimizer, make(optimizer))

    def step():
        optimizer.zero_grad()
        accelerator.backward(network(INPUTS).sum())
        optimizer.step()

    return step, optimizer, scheduler


def test_a_plateau_is_seen_in_the_metric():
    step, optimizer, scheduler = prepared(lambda optimizer: ReduceLROnPlateau(optimizer, patience=0, factor=0.5))
    for metric in (1.0, 0.5, 0.5, 0.5):
        step()
        scheduler.step(metric)
    assert optimizer.param_groups[0]["lr"] == 0.1 / 4


def test_in_a_loop_a_scheduler_step_without_an_optimizer_step_is_an_error():
    accelerator, network = Accelerator(), model()
    optimizer = sgd(network.parameters())
    network, optimizer, loader, scheduler = accelerator.prepare(
        network, optimizer, loader_of(4, 2), LambdaLR(optimizer, lambda step: 0.9**step)
    )
    for inputs, _, _ in loader:
        accelerator.backward(network(inputs).sum())
        optimizer.step()
        scheduler.step()
        with pytest.raises(RuntimeError, match="LambdaLR was stepped again without an optimizer step in between"):
            scheduler.step()


SAMPLES, BATCH, EPOCHS = 31, 2, 3
BATCHES = 16  # of an epoch on one device; the last one has one sample


def warmed_up(step, *, num_warmup_steps, num_training_steps):
    """As transformers' schedules are made: a partial function under a LambdaLR."""
    if step < num_warmup_steps:
        return step / num_warmup_steps
    return max(0.0, (num_training_steps - step) / (num_training_steps - num_warmup_steps))


BUILT = {
    "one cycle": lambda optimizer, total: OneCycleLR(optimizer, max_lr=0.3, total_steps=total),
    "cosine": CosineAnnealingLR,
    "linear": lambda optimizer, total: LinearLR(optimizer, 1.0, 0.0, total_iters=total),
    "warm-up": lambda optimizer, total: LambdaLR(
        optimizer, partial(warmed_up, num_warmup_steps=5, num_training_steps=total)
    ),
    "sequential": lambda optimizer, total: SequentialLR(
        optimizer, [LinearLR(optimizer, 0.1, total_iters=4), CosineAnnealingLR(optimizer, total - 4)], milestones=[4]
    ),
}
MODES = pytest.mark.parametrize("mode", fitting(SOLO, THREADS_3, PROCESSES_2), ids=str)


def at_each_batch(scheduler, epoch, number, count):
    if number > 0:
        scheduler.step()


def rates_in(make, is_late=False, epochs=EPOCHS, call=at_each_batch, **options):
    """The rate after each step of a loop over the loader; `make` gets the optimizer, and the loader as it is then, or
    as it is when prepared. `call(scheduler, epoch, number, count)` comes before a loop, with 0, after each batch,
    and after the loop, with -1."""
    accelerator, network, loader = Accelerator(**options), model(), loader_of(SAMPLES, BATCH)
    optimizer, rates = sgd(network.parameters()), []
    scheduler = None if is_late else make(optimizer, loader)
    network, optimizer, loader, scheduler = accelerator.prepare(network, optimizer, loader, scheduler)
    if scheduler is None:
        scheduler = accelerator.prepare(make(optimizer, loader))
    for epoch in range(epochs):
        call(scheduler, epoch, 0, len(loader))
        for number, (inputs, _, _) in enumerate(loader, 1):
            accelerator.backward(network(inputs).sum())
            optimizer.step()
            optimizer.zero_grad()
            call(scheduler, epoch, number, len(loader))
            if accelerator.sync_gradients:
                rates.append(optimizer.param_groups[0]["lr"])
        call(scheduler, epoch, -1, len(loader))
    return rates


def plain_rates(make, count):
    """Of one device: the rate after so many calls of `scheduler.step()`, from 0 on."""
    optimizer = sgd(model().parameters())
    scheduler = make(optimizer)
    rates = [optimizer.param_groups[0]["lr"]]
    for _ in range(count):
        optimizer.step()
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


def ends_of_steps(ranks, accumulate=1):
    """How many batches one device has used when so many ranks end each of their steps, in all epochs."""
    size = ranks * accumulate
    ends = [min(end, BATCHES) for end in range(size, BATCHES + size, size)]
    return [epoch * BATCHES + end for epoch in range(EPOCHS) for end in ends]


@pytest.mark.parametrize("mode", fitting(THREADS_3, PROCESSES_2), ids=str)
def test_a_schedule_built_from_the_plain_or_the_prepared_length_is_exact(mode: Mode) -> None:
    cases = [*((name, "batch") for name in BUILT), *((name, "step") for name in ("one cycle", "sequential"))]

    def rates(name: str, unit: str) -> list[float]:
        def make(optimizer, loader):
            return BUILT[name](optimizer, EPOCHS * len(loader))

        return rates_in(make, unit == "step", schedule_unit=unit)

    for (name, unit), *found in zip(cases, *mode.run(lambda: [rates(*each) for each in cases]), strict=True):
        print(name, unit)
        steps = EPOCHS * (BATCHES if unit == "batch" else -(-BATCHES // mode.ranks))
        plain = plain_rates(lambda optimizer, name=name, steps=steps: BUILT[name](optimizer, steps), steps)
        expected = [plain[end] for end in ends_of_steps(mode.ranks)] if unit == "batch" else plain[1:]
        assert found == [pytest.approx(expected, abs=1e-12)] * mode.ranks


@MODES
def test_a_schedule_counts_what_it_is_told_to_also_where_steps_accumulate(mode: Mode) -> None:
    steps, ends = EPOCHS * -(-BATCHES // (3 * mode.ranks)), ends_of_steps(mode.ranks, 3)
    units = {
        "batch": (48, ends),
        "device_step": (18, [end // BATCHES * 6 + -(-(end % BATCHES) // 3) for end in ends]),  # 6 in an epoch
        "step": (steps, range(1, steps + 1)),
    }

    def rates(unit: str, total: int) -> list[float]:
        make = lambda optimizer, _: BUILT["cosine"](optimizer, total)  # noqa: E731
        return rates_in(make, gradient_accumulation_steps=3, schedule_unit=unit)

    for own in mode.run(lambda: [rates(unit, total) for unit, (total, _) in units.items()]):
        for found, (total, places) in zip(own, units.values(), strict=True):
            plain = plain_rates(lambda optimizer, total=total: BUILT["cosine"](optimizer, total), total)
            assert found == pytest.approx([plain[place] for place in places], abs=1e-12)


def test_a_schedule_too_short_for_its_unit_says_so_and_both_fixes_work() -> None:
    def make(optimizer, loader):
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=EPOCHS * len(loader))

    def body():
        with pytest.raises(ValueError, match="Tried to step") as raised:
            rates_in(make, True, schedule_unit="device_step")
        rates_in(make, schedule_unit="device_step")
        rates_in(make, True, schedule_unit="step")
        return raised.value.__notes__[0]

    for note in THREADS_2.run(body):
        assert note.startswith("with schedule_unit='device_step' one step of these ranks counts as 2: build the OneCyc")


@pytest.mark.parametrize("mode", fitting(SOLO, THREADS_3), ids=str)
def test_microbatches_that_a_script_counts_itself_are_one_step_of_a_device(mode: Mode) -> None:
    total = EPOCHS * BATCHES // 2

    def body() -> list[float]:
        accelerator, network, rates = Accelerator(schedule_unit="device_step"), model(), []
        optimizer, loader = sgd(network.parameters()), loader_of(SAMPLES, BATCH)
        scheduler = BUILT["cosine"](optimizer, total)
        network, optimizer, loader, scheduler = accelerator.prepare(network, optimizer, loader, scheduler)
        for _ in range(EPOCHS):
            for number, (inputs, _, _) in enumerate(loader, 1):
                accelerator.backward(network(inputs).sum() / 2)
                if number % 2 == 0:
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                    rates.append(optimizer.param_groups[0]["lr"])
        return rates

    plain = plain_rates(lambda optimizer: BUILT["cosine"](optimizer, total), total)
    expected = [plain[end // 2] for end in ends_of_steps(mode.ranks, 2)]
    assert mode.run(body) == [pytest.approx(expected, abs=1e-12)] * mode.ranks


UNKNOWN = {
    "no length": (lambda optimizer, _: StepLR(optimizer, 5), {}),
    "an epoch's batches, or twice its steps": (lambda optimizer, _: CosineAnnealingLR(optimizer, 16), {}),
    "two units": (lambda optimizer, _: CosineAnnealingLR(optimizer, 48), {"gradient_accumulation_steps": 2}),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_if_a_schedules_unit_is_unknown_the_error_names_the_lengths(name: str) -> None:
    make, options = UNKNOWN[name]

    def body() -> str:
        with pytest.raises(ValueError, match="an epoch has 16 batches of the loader as you wrote it") as error:
            rates_in(make, **options)
        return str(error.value)

    steps = 4 if options else 8
    for told in THREADS_2.run(body):
        assert f"and {steps} optimizer steps on these ranks; pass Accelerator(schedule_unit=...)" in told


CONSTANT = {
    "lambda": lambda optimizer, _: LambdaLR(optimizer, lambda _: 0.5),
    "partial of a lambda": lambda optimizer, _: LambdaLR(optimizer, partial(lambda _=None, factor=1: factor)),
    "factor": lambda optimizer, _: ConstantLR(optimizer, factor=1.0, total_iters=3),
    "gamma": lambda optimizer, _: MultiStepLR(optimizer, [2, 4], gamma=1.0),
}
NOT_CONSTANT = {
    "a warm-up": lambda optimizer, _: LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5)),
    "a comparison": lambda optimizer, _: LambdaLR(optimizer, lambda step: 1.0 if step != 6 else 0.5),
    "a table": lambda optimizer, _: LambdaLR(optimizer, lambda step: {6: 0.5}.get(step, 1.0)),
    "a truth": lambda optimizer, _: LambdaLR(optimizer, lambda step: 0.5 if step else 1.0),
    "a list of functions": lambda optimizer, _: LambdaLR(optimizer, [lambda step: 0.9**step]),
    "the end of a factor": lambda optimizer, _: ConstantLR(optimizer, factor=0.5, total_iters=3),
    "rounds": lambda optimizer, _: CosineAnnealingLR(optimizer, 16),
}


@pytest.mark.parametrize(("mode", "options"), [(SOLO, {"gradient_accumulation_steps": 2}), (THREADS_3, {})], ids=str)
def test_a_constant_schedule_needs_no_unit(mode: Mode, options: dict[str, int]) -> None:
    for name, make in CONSTANT.items():
        for rates in mode.run(lambda make=make: rates_in(make, epochs=1, **options)):
            assert len(set(rates)) == 1, name


@pytest.mark.parametrize("name", NOT_CONSTANT)
def test_a_temporarily_constant_schedule_is_asked_for_its_unit_at_once(name: str) -> None:
    with pytest.raises(ValueError, match="it is unknown what the"):
        rates_in(NOT_CONSTANT[name], gradient_accumulation_steps=2)


def test_on_one_device_it_is_asked_where_steps_accumulate():
    with pytest.raises(ValueError, match=r"an epoch has 16 batches .* from 16, 'step' if from 6"):
        rates_in(lambda optimizer, _: CosineAnnealingLR(optimizer, 48), gradient_accumulation_steps=3)


@pytest.mark.parametrize("mode", [SOLO, THREADS_2], ids=str)
def test_a_position_that_is_given_needs_no_unit(mode: Mode) -> None:
    def call(scheduler, epoch, number, count):
        if number > 0:
            scheduler.step(epoch + number / count)

    found = mode.run(
        lambda: rates_in(
            lambda optimizer, _: CosineAnnealingWarmRestarts(optimizer, 2), call=call, gradient_accumulation_steps=2
        )
    )
    rounds = BATCHES // mode.ranks
    positions = [(epoch + number / rounds) % 2 for epoch in range(EPOCHS) for number in range(2, rounds + 1, 2)]
    expected = [0.1 * (1 + math.cos(math.pi * each / 2)) / 2 for each in positions]
    assert found == [pytest.approx(expected)] * mode.ranks


@MODES
def test_calls_at_every_few_batches_go_as_far_as_one_devices_do(mode: Mode) -> None:
    def call(scheduler, epoch, number, count):
        if number > 0 and number % 2 == 0:
            scheduler.step()

    make = lambda optimizer, _: LambdaLR(optimizer, lambda step: 0.9**step)  # noqa: E731
    calls = [number // 2 * mode.ranks for number in range(1, -(-BATCHES // mode.ranks) + 1)]
    for rates in mode.run(lambda: rates_in(make, epochs=1, call=call, schedule_unit="batch")):
        assert rates[:-1] == pytest.approx([0.1 * 0.9**each for each in calls[:-1]])


@pytest.mark.parametrize(
    ("mode", "place"), [(SOLO, "beginning"), (THREADS_3, "end"), (THREADS_2, "beginning")], ids=str
)
def test_calls_between_loops_are_one_step_each_as_in_torch(mode: Mode, place: str) -> None:
    warnings.filterwarnings("ignore", "Detected call of")  # torch's: the first comes before the first optimizer step

    def call(scheduler, epoch, number, count):
        if number == (0 if place == "beginning" else -1):
            scheduler.step()

    make = lambda optimizer, *_: CosineAnnealingLR(optimizer, EPOCHS)  # noqa: E731
    firsts = -(-BATCHES // (2 * mode.ranks))  # of each loop
    plain = plain_rates(make, EPOCHS)
    expected = plain[1:] if place == "beginning" else plain[:-1]
    found = mode.run(lambda: rates_in(make, call=call, gradient_accumulation_steps=2)[::firsts])
    assert found == [pytest.approx(expected, abs=1e-12)] * mode.ranks


def test_a_metric_that_differs_between_ranks_is_an_error_on_all_of_them() -> None:
    def body() -> str:
        accelerator, network = Accelerator(), model()
        optimizer = sgd(network.parameters())
        network, optimizer, scheduler = accelerator.prepare(network, optimizer, ReduceLROnPlateau(optimizer))
        network(INPUTS).sum().backward()
        optimizer.step()
        scheduler.step(1.0 + 1e-9 * accelerator.process_index)
        with pytest.raises(ValueError, match="pass one value to all of them") as error:
            scheduler.step(1.0 + accelerator.process_index)
        return str(error.value)

    for rank, told in enumerate(THREADS_3.run(body)):
        assert f"ReduceLROnPlateau got {1 + rank} on rank {rank}, and 1 to 3 on all ranks" in told


@pytest.mark.parametrize(
    ("mode", "options", "place"),
    [
        (SOLO, {}, "after each batch"),
        (SOLO, {"gradient_accumulation_steps": 2}, "after each batch"),
        (THREADS_2, {}, "after each batch"),
        (THREADS_2, {"gradient_accumulation_steps": 2}, "after each batch"),
        (THREADS_2, {"split_batches": True}, "after each batch"),
        (THREADS_2, {}, "after the loop"),
        (THREADS_2, {"gradient_accumulation_steps": 2}, "nowhere"),
        (PROCESSES_2, {}, "after each batch"),
    ],
    ids=str,
)
def test_an_unprepared_scheduler_is_named_where_one_device_would_differ(mode, options, place) -> None:
    def body() -> str:
        accelerator, network = Accelerator(**options, schedule_unit="step"), model()
        optimizer = sgd(network.parameters())
        scheduler = StepLR(optimizer, 1)
        network, optimizer, loader = accelerator.prepare(network, optimizer, loader_of(16, 2))
        if place == "nowhere":
            scheduler = accelerator.prepare(scheduler)
        with hearing("unisono.training.prepared.scheduler") as said, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, of a scheduler that steps where its optimizer does not
            for _ in range(2):
                for inputs, targets, *_ in loader:
                    accelerator.backward((network(inputs) - targets).pow(2).mean())
                    optimizer.step()
                    optimizer.zero_grad()
                    if place != "after the loop":
                        scheduler.step()
                if place == "after the loop":
                    scheduler.step()
        return " ".join(said)

    told = mode.run(body)[0]  # threads hear each other
    is_wrong = place == "after each batch" and (mode.ranks > 1 or options) and not options.get("split_batches")
    expected = "on every microbatch, though 2" if "gradient_accumulation_steps" in options else "once in a step of"
    assert told.count(f"a scheduler of the SGD was not prepared: it advances {expected}") == bool(is_wrong)
