"""Loops of every kind train the weights of one device with the whole batch: a microbatch is a pass, and no delivery."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from modes import HOST, PROCESSES_2, SOLO, THREADS_2, THREADS_3, Mode
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from twin import Case, State, adam, assert_all_are, compare, data, loader_of, mean_loss, model, plain_run, sgd

from unisono import Accelerator, SampleGenerator

MODES = [SOLO, THREADS_2, THREADS_3, PROCESSES_2]
CASE = Case(samples=23, batch=3)  # the last batch of two, and of three ranks is uneven


class Training:
    """A prepared model, optimizer and loader."""

    def __init__(self, accumulate: int = 1, **options: Any) -> None:
        self.accelerator = Accelerator(gradient_accumulation_steps=accumulate, **options)
        network = model()
        self.network, self.optimizer, self.loader = self.accelerator.prepare(
            network, adam(network.parameters()), loader_of(CASE.samples, CASE.batch)
        )

    def learn(self, batch: Any) -> None:
        self.accelerator.backward(mean_loss(self.network, batch))

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def one_ahead(batches: Iterable[Any], change: Callable[[Any], Any] = lambda batch: batch) -> Iterator[Any]:
    """As timm's and apex's prefetchers do."""
    held = None
    for batch in batches:
        if held is not None:
            yield held
        held = change(batch)
    if held is not None:
        yield held


def straight(training: Training) -> None:
    for batch in training.loader:
        training.learn(batch)
        training.step()


def with_plain_backward(training: Training) -> None:
    for batch in training.loader:
        mean_loss(training.network, batch).backward()
        training.step()


def drawn_in_twos(training: Training) -> None:
    """As transformers' Trainer does."""
    batches = iter(training.loader)
    while drawn := list(itertools.islice(batches, 2)):
        for batch in drawn:
            training.learn(batch)
            training.optimizer.step()
        training.optimizer.zero_grad()


def drawn_one_ahead(training: Training) -> None:
    for batch in one_ahead(training.loader):
        training.learn(batch)
        training.step()


def next_drawn_before_backward(training: Training) -> None:
    batches = iter(training.loader)
    batch = next(batches, None)
    while batch is not None:
        loss = mean_loss(training.network, batch)
        batch = next(batches, None)
        training.accelerator.backward(loss)
        training.step()


def all_drawn_first(training: Training) -> None:
    for batch in list(training.loader):
        training.learn(batch)
        training.step()


def after_a_look_at_the_first(training: Training) -> None:
    next(iter(training.loader))
    straight(training)


def zeroed_before_backward(training: Training) -> None:
    for batch in training.loader:
        loss = mean_loss(training.network, batch)
        training.optimizer.zero_grad()
        training.accelerator.backward(loss)
        training.optimizer.step()


def zeroed_by_the_model_before_backward(training: Training) -> None:
    for batch in training.loader:
        loss = mean_loss(training.network, batch)
        training.network.zero_grad()
        training.accelerator.backward(loss)
        training.optimizer.step()


def computed_inputs(training: Training) -> None:
    for inputs, *others in training.loader:
        training.learn([inputs + 0, *others])
        training.step()


def with_evaluation_inside(training: Training) -> None:
    for batch in training.loader:
        training.learn(batch)
        with torch.no_grad():
            for seen, _, _ in itertools.islice(training.loader, 2):
                training.network(seen)
        training.step()


LOOPS = (
    straight,
    with_plain_backward,
    drawn_in_twos,
    drawn_one_ahead,
    next_drawn_before_backward,
    all_drawn_first,
    after_a_look_at_the_first,
    zeroed_before_backward,
    zeroed_by_the_model_before_backward,
    computed_inputs,
    with_evaluation_inside,
)


def trained(loop: Callable[[Training], None], accumulate: int, strategy: str = "ddp") -> State:
    training = Training(accumulate, strategy=strategy)
    for _ in range(2):
        loop(training)
    return training.accelerator.state_dict(training.network)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_however_batches_are_drawn_the_weights_are_those_of_one_device(mode: Mode, accumulate: int) -> None:
    loops = [each for each in LOOPS if each is not drawn_in_twos or accumulate == 2]
    ranks = mode.run(lambda: [trained(loop, accumulate) for loop in loops])
    expected = plain_run(CASE._replace(accumulate=accumulate), mode.ranks)
    for loop, state in zip(loops, ranks[0], strict=True):
        print(loop.__name__)
        assert_all_are([state], expected)


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("strategy", ["zero1", "fsdp"])
def test_under_every_strategy_they_are(strategy: str, accumulate: int) -> None:
    loops = [
        straight,
        with_plain_backward,
        drawn_one_ahead,
        all_drawn_first,
        zeroed_by_the_model_before_backward,
        computed_inputs,
    ]
    first, _ = PROCESSES_2.run(lambda: [trained(loop, accumulate, strategy) for loop in loops])
    expected = plain_run(CASE._replace(accumulate=accumulate), 2)
    for loop, state in zip(loops, first, strict=True):
        print(loop.__name__)
        assert_all_are([state], expected)


def two_loaders(accelerator: Any, loader: DataLoader[Any]) -> State:
    """Each loss is the mean over a batch of its own loader; the shorter one begins again."""
    network, size = model(), loader.batch_size or 1
    network, optimizer, loader, other = accelerator.prepare(
        network, adam(network.parameters()), loader, loader_of(13, size)
    )
    for first, second in zip(loader, itertools.chain(other, other, other), strict=False):
        optimizer.zero_grad()
        accelerator.backward(mean_loss(network, first) + 0.5 * network(second[0]).pow(2).mean())
        optimizer.step()
    return network.state_dict()


def two_models_of_two_loaders(accelerator: Any, loader: DataLoader[Any]) -> State:
    first, second, size = model(1), model(2), loader.batch_size or 1
    optimizer = adam([*first.parameters(), *second.parameters()])
    first, second, optimizer, loader, other = accelerator.prepare(first, second, optimizer, loader, loader_of(13, size))
    for one, two in zip(loader, itertools.chain(other, other, other), strict=False):
        optimizer.zero_grad()
        (mean_loss(first, one) + mean_loss(second, two)).backward()
        optimizer.step()
    return {**first.state_dict(), **{f"second.{name}": value for name, value in second.state_dict().items()}}


def replayed(accelerator: Any, loader: DataLoader[Any]) -> State:
    network = model()
    network, optimizer, loader = accelerator.prepare(network, adam(network.parameters()), loader)
    for batch in itertools.islice(itertools.cycle(loader), 9):
        optimizer.zero_grad()
        accelerator.backward(mean_loss(network, batch))
        optimizer.step()
    return network.state_dict()


def clipped_by_torch(accelerator: Any, loader: DataLoader[Any]) -> State:
    network = model()
    network, optimizer, loader = accelerator.prepare(network, sgd(network.parameters()), loader)
    norms = []
    for batch in loader:
        optimizer.zero_grad()
        accelerator.backward(mean_loss(network, batch))
        norms.append(nn.utils.clip_grad_norm_(network.parameters(), 0.1))
        optimizer.step()
    return {**network.state_dict(), "norms": torch.stack(norms)}


def edited_by_hand(accelerator: Any, loader: DataLoader[Any]) -> State:
    network = model()
    network, optimizer, loader = accelerator.prepare(network, sgd(network.parameters()), loader)
    for batch in loader:
        optimizer.zero_grad()
        accelerator.backward(mean_loss(network, batch))
        for each in network.parameters():
            each.grad = each.grad.sign() * each.grad.abs().max()
        optimizer.step()
    return network.state_dict()


def assigned_by_hand(accelerator: Any, loader: DataLoader[Any]) -> State:
    network = model()
    network, optimizer, loader = accelerator.prepare(network, sgd(network.parameters()), loader)
    trained = list(network.parameters())
    for batch in loader:
        for each, gradient in zip(trained, torch.autograd.grad(mean_loss(network, batch), trained), strict=True):
            each.grad = gradient
        accelerator.clip_grad_norm_(trained, 0.1)
        optimizer.step()
    return network.state_dict()


def with_penalties(accelerator: Any, loader: DataLoader[Any]) -> State:
    """On the parameters, and on the gradient with respect to the inputs."""
    network = model()
    network, optimizer, loader = accelerator.prepare(network, sgd(network.parameters()), loader)
    for inputs, targets, _ in loader:
        optimizer.zero_grad()
        varied = inputs.clone().requires_grad_()
        outputs = network(varied)
        (slope,) = torch.autograd.grad(outputs.pow(2).sum(), varied, create_graph=True)
        decay = sum(each.pow(2).sum() for each in network.parameters())
        accelerator.backward(F.mse_loss(outputs, targets) + slope.pow(2).mean() + 0.01 * decay)
        optimizer.step()
    return network.state_dict()


def with_means_over_tokens_of_two_kinds(accelerator: Any, loader: DataLoader[Any]) -> State:
    network = model()
    network, optimizer, loader = accelerator.prepare(network, sgd(network.parameters()), loader)
    for inputs, targets, _ in loader:
        optimizer.zero_grad()
        for kind in range(2):
            tokens = 1 + (inputs[:, kind] > 0).double()
            with accelerator.accumulate():
                accelerator.backward(mean_loss(network, [inputs, targets, tokens], True), weight=tokens.sum())
        optimizer.step()
    return network.state_dict()


def sharpness_aware(accelerator: Any, loader: DataLoader[Any]) -> State:
    """SAM in two steps, around an optimizer that nobody has prepared."""
    network = model()
    network, loader = accelerator.prepare(network, loader)
    optimizer = sgd(network.parameters())
    for batch in loader:
        optimizer.zero_grad()
        accelerator.backward(mean_loss(network, batch))
        climbed = []
        with torch.no_grad():
            norm = torch.stack([each.grad.norm() for each in network.parameters()]).norm()
            for each in network.parameters():
                climbed.append(each.grad * 0.05 / norm)
                each.add_(climbed[-1])
        optimizer.zero_grad()
        accelerator.backward(mean_loss(network, batch))
        with torch.no_grad():
            for each, step in zip(network.parameters(), climbed, strict=True):
                each.sub_(step)
        optimizer.step()
    return network.state_dict()


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_the_same_lines_mean_the_same_on_one_device_and_on_several_ranks(mode: Mode) -> None:
    lines = [
        two_loaders,
        two_models_of_two_loaders,
        replayed,
        clipped_by_torch,
        edited_by_hand,
        assigned_by_hand,
        with_penalties,
        with_means_over_tokens_of_two_kinds,
        sharpness_aware,
    ]
    compare(mode, {each.__name__: each for each in lines})


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_torchs_clipping_at_the_boundary_of_an_accumulation_is_that_of_the_whole_step(mode: Mode) -> None:
    def lines(accelerator: Any, loader: DataLoader[Any]) -> State:
        network = model()
        network, optimizer, loader = accelerator.prepare(network, sgd(network.parameters()), loader)
        for batch in loader:
            accelerator.backward(mean_loss(network, batch))
            if getattr(accelerator, "sync_gradients", True):
                nn.utils.clip_grad_norm_(network.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        return network.state_dict()

    compare(mode, {"lines": lines}, gradient_accumulation_steps=3)


def prepared(accelerator: Any, loader: DataLoader[Any]) -> tuple[Any, Any, Any]:
    network = model()
    made: tuple[Any, Any, Any] = accelerator.prepare(network, sgd(network.parameters()), loader)
    return made


def with_a_forward_pass_beside(accelerator: Any, loader: DataLoader[Any]) -> State:
    network, optimizer, loader = prepared(accelerator, loader)
    for batch in loader:
        accelerator.backward(mean_loss(network, batch))
        network(batch[0][:1])  # of the batch, with gradients, and of nothing
        network(torch.ones(2, 5, dtype=torch.float64))
        optimizer.step()
        optimizer.zero_grad()
    return network.state_dict()


def that_gives_up_a_step(accelerator: Any, loader: DataLoader[Any]) -> State:
    network, optimizer, loader = prepared(accelerator, loader)
    step = 0
    for batch in loader:
        accelerator.backward(mean_loss(network, batch))
        if accelerator.clip_grad_norm_(network.parameters(), 10.0) is not None:
            step += 1
            if step == 2:  # its norm is bad, say
                optimizer.zero_grad()
                continue
        optimizer.step()
        optimizer.zero_grad()
    return network.state_dict()


def by_an_optimizer_that_was_not_prepared(accelerator: Any, loader: DataLoader[Any]) -> State:
    network = model()
    optimizer = sgd(network.parameters())
    network, loader = accelerator.prepare(network, loader)
    for batch in loader:
        accelerator.backward(mean_loss(network, batch))
        if getattr(accelerator, "sync_gradients", True):
            optimizer.step()
            optimizer.zero_grad()
    return network.state_dict()


def through_a_reader_without_gradients(accelerator: Any, loader: DataLoader[Any]) -> State:
    @torch.no_grad()
    def changed(batches: Iterable[Any]) -> Iterator[Any]:
        for inputs, *others in batches:
            yield [inputs * 2 + 1, *others]

    network, optimizer, loader = prepared(accelerator, loader)
    for batch in changed(loader):
        accelerator.backward(mean_loss(network, batch))
        optimizer.step()
        optimizer.zero_grad()
    return network.state_dict()


def checkpointed(accelerator: Any, loader: DataLoader[Any]) -> State:
    network, optimizer, loader = prepared(accelerator, loader)
    for inputs, targets, _ in loader:
        outputs = checkpoint(network, inputs * 2, use_reentrant=False)
        accelerator.backward(F.mse_loss(outputs, targets))
        optimizer.step()
        optimizer.zero_grad()
    return network.state_dict()


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_the_lines_around_a_step_leave_the_step_what_it_is(mode: Mode, accumulate: int) -> None:
    lines = [
        with_a_forward_pass_beside,
        that_gives_up_a_step,
        by_an_optimizer_that_was_not_prepared,
        through_a_reader_without_gradients,
        checkpointed,
    ]
    compare(mode, {each.__name__: each for each in lines}, gradient_accumulation_steps=accumulate)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_microbatch_that_failed_and_was_zeroed_counts_for_nothing(mode: Mode) -> None:
    """The first microbatch is given up; the others make steps of two."""

    def body() -> State:
        training = Training(2)
        for number, batch in enumerate(training.loader):
            training.learn(batch)
            if number == 0:  # something has failed
                training.optimizer.zero_grad()
                continue
            training.step()
        return training.accelerator.state_dict(training.network)

    tensors, size = data(CASE.samples).tensors, mode.ranks * CASE.batch
    network = model()
    optimizer = adam(network.parameters())
    for start in range(size, CASE.samples, 2 * size):
        optimizer.zero_grad()
        mean_loss(network, [each[start : start + 2 * size] for each in tensors]).backward()
        optimizer.step()
    assert_all_are(mode.run(body)[:1], network.state_dict())


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_batches_of_a_list_may_be_used_in_any_order(mode: Mode) -> None:
    def body() -> State:
        training = Training(2)
        batches = list(training.loader)
        for place in order(len(batches)):
            training.learn(batches[place])
            training.step()
        return training.accelerator.state_dict(training.network)

    def order(count: int) -> list[int]:
        return [*range(1, count, 2), *range(0, count, 2)]  # the last one stands in the middle

    tensors, size = data(CASE.samples).tensors, mode.ranks * CASE.batch
    rounds = [list(range(start, min(start + size, CASE.samples))) for start in range(0, CASE.samples, size)]
    network = model()
    optimizer = adam(network.parameters())
    places = order(len(rounds))
    for first in range(0, len(places), 2):
        window = [sample for place in places[first : first + 2] for sample in rounds[place]]
        optimizer.zero_grad()
        mean_loss(network, [each[window] for each in tensors]).backward()
        optimizer.step()
    assert_all_are(mode.run(body)[:1], network.state_dict())


@pytest.mark.parametrize("mode", [THREADS_2, PROCESSES_2], ids=str)
def test_replayed_batches_that_were_changed_are_an_error_where_they_count_differently(mode: Mode) -> None:
    def body() -> None:
        training = Training()
        for inputs, *others in itertools.cycle(training.loader):
            training.learn([inputs * 2, *others])
            training.step()

    with pytest.raises(ValueError, match=r"is not known which; name the batch, accelerator\.backward"):
        mode.run(body)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("mode", [SOLO, THREADS_2], ids=str)
def test_where_a_batch_cannot_be_told_and_matters_an_error_names_the_way_out(mode: Mode, accumulate: int) -> None:
    def body() -> None:
        training = Training(accumulate)
        for inputs, *others in one_ahead(training.loader, lambda batch: [batch[0] + 0, *batch[1:]]):
            training.learn([inputs, *others])
            training.step()

    if (mode, accumulate) != (SOLO, 1):  # each batch weighs 1 there
        way = r"with accelerator\.accumulate\(\)" if accumulate > 1 else r"backward\(loss, batch=batch\)"
        with pytest.raises(ValueError, match=way):
            mode.run(body)
    # and by the way out
    expected = plain_run(CASE._replace(accumulate=accumulate, epochs=1), mode.ranks)
    assert_all_are(mode.run(lambda: told_by_hand(accumulate)), expected)


def told_by_hand(accumulate: int) -> State:
    training = Training(accumulate)
    for (inputs, *others), batch in one_ahead(training.loader, lambda batch: ([batch[0] + 0, *batch[1:]], batch)):
        loss = mean_loss(training.network, [inputs, *others])
        training.accelerator.backward(loss, batch=batch)
        training.step()
    return training.network.state_dict()


def test_two_loaders_whose_tails_differ_cannot_share_the_steps_of_an_accumulation() -> None:
    def body() -> None:
        accelerator, network = Accelerator(gradient_accumulation_steps=2), model()
        network, loader, other = accelerator.prepare(network, loader_of(12, 3), loader_of(10, 3))
        for first, second in zip(loader, other, strict=True):
            accelerator.backward(mean_loss(network, first) + mean_loss(network, second))

    with pytest.raises(ValueError, match="losses of one step are of several loaders, whose batches differ in size"):
        THREADS_2.run(body)


# A loader that delivers the same tensors again and again.


def with_evaluation_first(training: Training) -> None:
    for batch in training.loader:
        with torch.no_grad():
            for seen, _, _ in itertools.islice(training.loader, 2):
                training.network(seen)
        training.learn(batch)
        training.step()


def with_a_look_at_the_next_epoch(training: Training) -> None:
    for batch in training.loader:
        next(iter(training.loader))
        training.learn(batch)
        training.step()


def told_behind_the_next(training: Training) -> None:
    batches = iter(training.loader)
    batch = next(batches, None)
    while batch is not None:
        loss = mean_loss(training.network, [batch[0] + 0, *batch[1:]])
        before, batch = batch, next(batches, None)
        training.accelerator.backward(loss, batch=before)
        training.step()


def told_in_the_backward_pass(training: Training) -> None:
    for batch in list(training.loader):
        inputs, *others = batch
        training.accelerator.backward(mean_loss(training.network, [inputs + 0, *others]), batch=batch)
        training.step()


SAME_TENSORS = (
    straight,
    with_plain_backward,
    drawn_in_twos,
    drawn_one_ahead,
    next_drawn_before_backward,
    all_drawn_first,
    after_a_look_at_the_first,
    with_evaluation_inside,
    with_evaluation_first,
    with_a_look_at_the_next_epoch,
)


def trained_on_one_batch(loop: Callable[[Training], None], accumulate: int, count: int) -> State:
    training = Training(accumulate)
    with HOST:
        batch = [*data(5).tensors]
    training.loader = training.accelerator.prepare(SampleGenerator(batch, count))
    for _ in range(2):
        loop(training)
    return training.accelerator.state_dict(training.network)


def plainly_trained_on_one_batch(accumulate: int, count: int, ranks: int) -> State:
    """Steps of so many rounds, each of as many batches as ranks; the last of a loop has what is left."""
    batch, network = data(5).tensors, model()
    optimizer = adam(network.parameters())
    for left in [count - done for _ in range(2) for done in range(0, count, ranks * accumulate)]:
        optimizer.zero_grad()
        mean_loss(network, [torch.cat([each] * min(left, ranks * accumulate)) for each in batch]).backward()
        optimizer.step()
    return network.state_dict()


@pytest.mark.parametrize(("accumulate", "count"), [(1, 7), (2, 7), (2, 12), (3, 11)])
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_batches_of_the_same_tensors_are_microbatches_of_their_own_however_they_are_drawn(
    mode: Mode, accumulate: int, count: int
) -> None:
    loops = [each for each in SAME_TENSORS if each is not drawn_in_twos or accumulate == 2]
    loops += [told_behind_the_next, *([told_in_the_backward_pass] if accumulate == 1 else [])]
    ranks = mode.run(lambda: [trained_on_one_batch(loop, accumulate, count) for loop in loops])
    expected = plainly_trained_on_one_batch(accumulate, count, mode.ranks)
    for loop, state in zip(loops, ranks[0], strict=True):
        print(loop.__name__)
        assert_all_are([state], expected)
