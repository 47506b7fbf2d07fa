"""Loops that a guess about batches, or about ends of steps, gets wrong: each trains the weights of one device, or is
refused before anything has changed.

What a line of a table runs is written as in `step_programs.py`, whose oracle is one device in plain torch.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch
from modes import PROCESSES_2, SOLO, THREADS_2, THREADS_3, Mode
from plain_steps import judge
from step_programs import Program, Setup, run_programs
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, IterableDataset
from twin import Case, State, assert_all_are, compare, data, loader_of, mean_loss, model, plain_run, seeded, sgd, steps

from unisono import Accelerator, DeviceLoader, backward, optimizer_step

# With a tail of two samples, one of three ranks has none.
MODES = pytest.mark.parametrize("mode", [SOLO, THREADS_3], ids=["one rank", "three ranks"])
STEP = "backward accelerator; step f; read sync; zero f none"
VISIT = f"forward fit; {STEP}"
NAMED = "forward fit; backward named; step f; zero f none"


def program(lines: Iterable[str], **setup: Any) -> Program:
    return Program(Setup(**setup), tuple("; ".join(lines).split("; ")))


def verdicts_on(mode: Mode, programs: Sequence[Program], strategy: str = "ddp") -> list[str]:
    """Of programs that run one after the other."""
    kinds = []
    for one, outcomes in zip(programs, run_programs(mode, programs, strategy), strict=True):
        verdict = judge(one, mode.ranks, outcomes, strategy == "fsdp")
        print(one, verdict)
        kinds.append(verdict.kind)
    return kinds


def of_table(mode: Mode, table: dict[str, Callable[[int], Program]]) -> dict[str, str]:
    """The verdicts on these programs for so many ranks."""
    return dict(zip(table, verdicts_on(mode, [each(mode.ranks) for each in table.values()]), strict=True))


# With `ranks` ranks and batches of two, so many rounds, the last of them with fewer samples than there are ranks.
def rounds(ranks: int, count: int) -> int:
    return 2 * ranks * (count - 1) + max(ranks - 1, 1)


EXACT: dict[str, Callable[[int], Program]] = {
    # First: after a loop in which some batch was not used, it would be refused.
    "inputs are computed, after a batch that was skipped, in accumulate() blocks": lambda ranks: program(
        [*["draw a; compute; enter_block; " + VISIT] * 2, "draw a", *["draw a; compute; enter_block; " + VISIT] * 3],
        samples=12 * ranks - 1,
        every=2,
    ),
    "a list of four batches is replayed, in steps of four": lambda ranks: program(
        ["list a", *(f"replay {number % 4}; {VISIT}" for number in range(12))], samples=rounds(ranks, 4), every=4
    ),
    "an epoch that fits one step is repeated by itertools.cycle": lambda ranks: program(
        [*["draw a; keep; " + VISIT] * 3, "end a", *(f"replay {number % 3}; {VISIT}" for number in range(9))],
        samples=rounds(ranks, 3),
        every=3,
    ),
    "one batch is overfitted, in steps of four": lambda ranks: program(
        ["draw a; leave a", *[VISIT] * 8], samples=rounds(ranks, 2), every=4
    ),
    "two loaders have a backward pass each, and uneven tails": lambda ranks: program(
        [f"draw a; forward fit; backward accelerator; draw b; forward square; {STEP}"] * 6,
        samples=rounds(ranks, 3),
        others=rounds(ranks, 2) + 1,
    ),
    "the loss of one loader, and then that of two, in steps of two": lambda ranks: program(
        [f"draw a; forward fit; forward fit; backward accelerator; draw b; forward square; add; {STEP}"] * 6,
        samples=8 * ranks,
        others=12 * ranks,
        every=2,
    ),
    **{
        f"data from no loader follows an uneven tail, and {way} takes its loss": lambda ranks, way=way: program(
            [
                *["draw a; " + VISIT] * 2,
                "end a",
                *[f"foreign 0; forward square; backward {way}; step f; zero f none"] * 2,
            ],
            samples=rounds(ranks, 2),
        )
        for way in ("accelerator", "plain", "hand")
    },
    "losses are means over tokens, and the tail has fewer samples than ranks": lambda ranks: program(
        [f"draw a; forward tokens; {STEP}"] * 7, samples=rounds(ranks, 6), every=2
    ),
    "sync_gradients is read before a microbatch is given up": lambda ranks: program(
        ["draw a; forward fit; backward accelerator; read sync; zero f none", *["draw a; " + VISIT] * 4],
        samples=rounds(ranks, 5),
        every=2,
    ),
    "one backward pass has losses of two batches of one loop that differ in size": lambda ranks: program(
        [f"draw a; forward fit; draw a; forward square; add; {STEP}"], samples=12 * ranks // 4 + 1, batch=3, every=2
    ),
    "a layer is frozen between a forward pass and its backward pass": lambda ranks: program(
        [f"draw a; {VISIT}; draw a; forward fit; freeze 0; {STEP}; unfreeze 0"] * 2, samples=8 * ranks
    ),
    "the losses of two batches have a weight each, and the last one has its backward pass first": lambda ranks: program(
        [f"draw b; forward tokens; draw a; forward tokens; backward accelerator; {STEP}"] * 3,
        samples=rounds(ranks, 4),
        others=rounds(ranks, 4),
    ),
    "a further use of a loop's last batch is given up, in steps of two": lambda ranks: program(
        [f"draw a; {VISIT}; forward fit; backward accelerator; zero f none; {VISIT}"], samples=2 * ranks, every=2
    ),
    "inputs are computed, after a batch that was skipped": lambda ranks: program(
        ["draw a", *[f"draw a; compute; {VISIT}"] * 4], samples=rounds(ranks, 5)
    ),
    "torch clips a model that the step's last pass has not reached": lambda ranks: program(
        [
            "draw a; forward fit; backward accelerator; step f; step g",
            "forward other; backward plain; clip torch; step f; step g",
        ],
        samples=8 * ranks,
        every=2,
        layout="two",
    ),
    "a pass makes a step larger that is complete, and reaches one of its two models": lambda ranks: program(
        [
            "draw a; forward fit; backward accelerator; step f; step g; forward other; backward plain",
            "draw a; forward fit; backward accelerator; step g",
        ],
        samples=8 * ranks,
        every=2,
        layout="two",
    ),
    "one of two optimizers zeroes its gradients, and no sample counts": lambda ranks: program(
        [
            "draw a; forward tokens; backward accelerator; step g; zero g none",
            "draw a; forward tokens; backward accelerator; zero f none; step g",
        ],
        samples=6 * ranks,
        layout="halves",
    ),
    **{
        f"inputs are computed from batches that were drawn ahead and are named, in steps of {every}": (
            lambda ranks, every=every: program(
                ["ahead a", *["ahead a; draw a; compute; " + NAMED] * 3, "draw a; compute; " + NAMED],
                samples=rounds(ranks, 4),
                every=every,
            )
        )
        for every in (1, 2)
    },
    "what is left of a loop is stepped on after it": lambda ranks: program(
        [*[f"draw a; {VISIT}"] * 2, "leave a; step f; zero f none", f"draw a; {VISIT}"], samples=8 * ranks, every=4
    ),
    "backward() and optimizer_step() by hand do for prepared objects": lambda ranks: program(
        ["draw a; forward fit; backward hand; step_by_hand f; zero f none"] * 4, samples=rounds(ranks, 3)
    ),
    "an accumulate() block goes on in another loop": lambda ranks: program(
        ["enter_block; draw a; forward fit; backward plain; step f; leave a", f"draw a; {VISIT}", f"draw a; {VISIT}"],
        samples=8 * ranks,
        every=4,
    ),
    "two loaders have an accumulate() block each, which are two microbatches": lambda ranks: program(
        [
            "enter_block; draw a; forward fit; backward accelerator; leave_block",
            "enter_block; draw b; forward square; backward accelerator; leave_block; step f; zero f none",
        ]
        * 6,
        samples=12 * ranks,
        others=12 * ranks,
        every=2,
    ),
}


@MODES
def test_the_weights_are_those_of_one_device_where(mode: Mode) -> None:
    assert of_table(mode, EXACT) == dict.fromkeys(EXACT, "exact")


# Four rounds.
SAME = {
    "each as it comes": [f"draw a; {VISIT}"] * 4,
    "by plain backward passes": ["draw a; forward fit; backward plain; step f; zero f none"] * 4,
    "in twos": [f"ahead a; ahead a; draw a; {VISIT}; draw a; {VISIT}"] * 2,
    "one ahead": ["ahead a", *[f"ahead a; draw a; {VISIT}"] * 3, f"draw a; {VISIT}"],
    "the next before the backward pass": ["draw a", *[f"forward fit; ahead a; {STEP}; draw a"] * 3, VISIT],
    "all of them first": ["list a", *(f"replay -{4 - number}; {VISIT}" for number in range(4))],
    "after a look at the first": ["draw a; leave a", *[f"draw a; {VISIT}"] * 4],
    "with a look at the next loop": [f"draw a; look a; {VISIT}"] * 4,
    "with an evaluation between": ["draw a; forward fit; backward accelerator; evaluate 2; step f; zero f none"] * 4,
    "with an evaluation first": [f"draw a; evaluate 2; {VISIT}"] * 4,
    "named after the next draw": [
        "draw a",
        *["compute; forward fit; ahead a; backward named; step f; zero f none; draw a"] * 3,
        "compute; " + NAMED,
    ],
}


@pytest.mark.parametrize(("mode", "every"), [(SOLO, 2), (THREADS_2, 1), (THREADS_2, 3), (THREADS_3, 2)], ids=str)
def test_batches_of_shared_tensors_are_separate_microbatches_in_any_order(mode: Mode, every: int) -> None:
    # All ranks have a batch in the last round, which shares its memory then, or not all of them have.
    sizes = itertools.cycle(2 * (3 * mode.ranks + last) for last in (mode.ranks, max(mode.ranks - 1, 1)))
    pairs = zip(sizes, SAME.values(), strict=False)
    programs = [program(lines * 2, samples=size, every=every, is_same=True) for size, lines in pairs]
    assert verdicts_on(mode, programs) == ["exact"] * len(programs)


# Of two processes.
PLAIN = "draw a; forward fit; backward plain; step f; zero f none"
UNDER_STRATEGIES = {
    "microbatches come after a step was complete": program(
        [*["draw a; forward fit; backward accelerator"] * 3, "step f; zero f none"] * 2, samples=13, every=2
    ),
    "a layer is frozen between a forward pass and its backward pass, and between two forward passes": program(
        [
            f"draw a; {VISIT}; draw a; forward fit; freeze 0; {STEP}; draw a; {VISIT}; unfreeze 0",
            f"draw a; forward fit; freeze 0; draw a; forward square; backward plain; {STEP}",
        ],
        samples=40,
    ),
    **{
        f"layers are frozen and unfrozen after steps of {every}": program(
            [*[PLAIN] * 2 * every, "freeze 0", *[PLAIN] * 2 * every, "freeze 2; unfreeze 0", *[PLAIN] * 2 * every],
            samples=23,
            every=every,
        )
        for every in (1, 2)
    },
    "gradients are never zeroed": program(["draw a; forward fit; backward accelerator; step f"] * 8, samples=23),
    "a forward pass stands between a forward pass and its backward pass, and after both": program(
        ["draw a; forward fit; evaluate 1; backward plain; evaluate 1; forward square; drop; step f; zero f none"] * 4,
        samples=23,
    ),
    "a forward pass fails in its middle, before a step": program(
        ["draw a; forward square; backward accelerator; fail forward; step f; zero f none", f"draw a; {VISIT}"] * 2,
        samples=16,
    ),
}


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp"])
def test_under_every_strategy_they_are_where(strategy: str) -> None:
    found = verdicts_on(PROCESSES_2, list(UNDER_STRATEGIES.values()), strategy)
    assert dict(zip(UNDER_STRATEGIES, found, strict=True)) == dict.fromkeys(UNDER_STRATEGIES, "exact")


REFUSED: dict[str, Callable[[int], Program]] = {
    "computed inputs are drawn ahead, in accumulate() blocks": lambda ranks: program(
        ["ahead a", *["ahead a; draw a; compute; enter_block; " + VISIT] * 4], samples=8 * ranks, every=3
    ),
    "computed inputs are of batches that were listed, in accumulate() blocks": lambda ranks: program(
        ["list a", *[f"replay {number}; compute; enter_block; {VISIT}" for number in range(4)]],
        samples=8 * ranks,
        every=3,
    ),
}


@MODES
def test_it_is_refused_where_only_a_name_tells_which_batch_ends_the_loop(mode: Mode) -> None:
    assert of_table(mode, REFUSED) == dict.fromkeys(REFUSED, "refused")


EXACT_OR_REFUSED: dict[str, Callable[[int], Program]] = {
    "inputs are computed from a batch that was kept, of a loop that was left": lambda ranks: program(
        [f"draw a; keep; draw a; keep; leave a; draw a; replay 1; compute; {VISIT}"], samples=2 * ranks - 1, batch=1
    ),
    "computed inputs are used again after a further draw, in steps of two": lambda ranks: program(
        ["draw a; compute; forward fit; backward accelerator; ahead a", f"forward square; {STEP}"]
        + [f"draw a; {VISIT}"] * 3,
        samples=8 * ranks,
        every=2,
        layout="two",
    ),
    "two loops are open, and inputs are computed from the batch of the first, in steps of two": lambda ranks: program(
        [f"draw a; keep; draw b; replay {number}; compute; {VISIT}" for number in range(3)],
        samples=6 * ranks,
        others=12 * ranks,
        every=2,
    ),
    "data from no loader has the rows of an uneven tail": lambda ranks: program(
        [*["draw a; " + VISIT] * 2, f"foreign 0; {VISIT}"], samples=6 * ranks - 1, batch=3
    ),
    "a layer is frozen within a step": lambda ranks: program(
        [f"draw a; {VISIT}; freeze 0; draw a; {VISIT}; unfreeze 0"] * 3, samples=rounds(ranks, 7), every=2
    ),
    "a backward pass adds to gradients that were assigned, in steps of three": lambda ranks: program(
        ["draw a; forward fit; backward assigned", *[f"draw a; forward fit; {STEP}"] * 3],
        samples=rounds(ranks, 4),
        every=3,
    ),
    "a step on gradients that were assigned after a backward pass": lambda ranks: program(
        ["draw a; forward fit; backward accelerator; forward square; backward assigned; step f"], samples=8 * ranks
    ),
}


@MODES
def test_they_are_or_it_is_refused_where(mode: Mode) -> None:
    found = of_table(mode, EXACT_OR_REFUSED)
    assert {name: kind for name, kind in found.items() if kind not in ("exact", "refused")} == {}


@pytest.mark.parametrize(("mode", "strategy"), [(SOLO, "ddp"), (PROCESSES_2, "fsdp")], ids=str)
def test_gradients_of_the_step_before_must_be_zeroed_in_steps_of_two(mode: Mode, strategy: str) -> None:
    def run(zero: Callable[[nn.Parameter], object]) -> State:
        accelerator, network = Accelerator(strategy=strategy, gradient_accumulation_steps=2), model()
        network, optimizer, loader = accelerator.prepare(network, sgd(network.parameters()), loader_of(23, 3))
        for batch in loader:
            accelerator.backward(mean_loss(network, batch))
            optimizer.step()
            for each in network.parameters() if accelerator.sync_gradients else ():
                zero(each)
        return accelerator.state_dict(network)

    expected = plain_run(Case(23, 3, 2, epochs=1), mode.ranks, sgd)
    for zero in (lambda each: setattr(each, "grad", None), lambda each: each.grad.zero_()):
        assert_all_are(mode.run(lambda zero=zero: run(zero))[:1], expected)
    with pytest.raises(RuntimeError, match=r"are of two steps.*were not zeroed"):
        mode.run(lambda: run(lambda each: None))


@pytest.mark.parametrize("mode", [SOLO, THREADS_2], ids=str)
def test_an_optimizer_zeroes_the_gradients_of_a_step_another_one_took(mode: Mode) -> None:
    def body() -> list[bool]:
        accelerator, maker, critic = Accelerator(gradient_accumulation_steps=2), model(), nn.Linear(2, 1).double()
        maker, critic, step, other, loader = accelerator.prepare(
            maker, critic, sgd(maker.parameters()), sgd(critic.parameters()), loader_of(8 * mode.ranks, 2)
        )
        zeroed = []
        for inputs, *_ in loader:
            accelerator.backward(critic(maker(inputs)).pow(2).mean())
            step.step()
            step.zero_grad()
            other.zero_grad()  # it never steps
            zeroed.append(all(each.grad is None for each in critic.parameters()))
        return zeroed

    assert mode.run(body) == [[False, True, False, True]] * mode.ranks


@pytest.mark.parametrize(("mode", "by_hand"), [(SOLO, True), (THREADS_2, False), (THREADS_2, True)], ids=str)
def test_a_penalty_is_stepped_on_where_no_sample_counts(mode: Mode, by_hand: bool) -> None:
    def body() -> State:
        accelerator, network = Accelerator(), model()
        optimizer, loader = sgd(network.parameters()), accelerator.prepare(loader_of(6, 3))
        if not by_hand:
            network, optimizer = accelerator.prepare(network, optimizer)
        for is_counted in (True, False):
            sum(each.pow(2).sum() for each in network.parameters()).backward()
            for batch in itertools.islice(loader, 1):
                backward(mean_loss(network, batch), weight=int(is_counted))
            optimizer_step(optimizer)
            optimizer.zero_grad()
        return network.state_dict()

    network = model()
    optimizer = sgd(network.parameters())
    batch = next(iter(loader_of(6, 3 * mode.ranks)))
    for is_counted in (True, False):
        (sum(each.pow(2).sum() for each in network.parameters()) + is_counted * mean_loss(network, batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_all_are(mode.run(body), network.state_dict())


class Centre(nn.Module):
    """Returns a parameter itself."""

    def __init__(self) -> None:
        super().__init__()
        self.centre = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"centre": self.centre}


def test_a_model_may_return_only_a_parameter_if_the_batch_is_named() -> None:
    def learn(accelerator: Any, network: Any, batch: Any) -> None:
        loss = (batch[0][:, :3] - network(batch[0])["centre"]).pow(2).mean()
        accelerator.backward(loss, **({"batch": batch} if isinstance(accelerator, Accelerator) else {}))

    compare(THREADS_3, steps(learn, Centre))


@pytest.mark.parametrize("mode", [SOLO, THREADS_2], ids=str)
def test_by_hand_two_steps_on_one_batch_weigh_it_once_each(mode: Mode) -> None:
    def train(batches: Any, run_backward: Any, step: Any) -> State:
        network = model()
        optimizer = sgd(network.parameters())
        for batch in batches:
            for _ in range(2):
                run_backward(mean_loss(network, batch))
                step(optimizer)
                optimizer.zero_grad()
        return network.state_dict()

    states = mode.run(lambda: train(DeviceLoader(loader_of(5, 4)), backward, optimizer_step))  # split 3 / 2
    assert_all_are(states, train(loader_of(5, 4 * mode.ranks), torch.Tensor.backward, torch.optim.SGD.step))


@pytest.mark.parametrize(("mode", "is_prepared"), [(THREADS_2, True), (PROCESSES_2, False)], ids=str)
def test_an_optimizer_that_steps_within_the_backward_pass_is_refused(is_prepared: bool, mode: Mode) -> None:
    def body() -> bool:
        accelerator, network = Accelerator(), model()
        optimizer = sgd(network.parameters())
        if is_prepared:
            network, optimizer, loader = accelerator.prepare(network, optimizer, loader_of(12, 3))
        else:
            network, loader = accelerator.prepare(network, loader_of(12, 3))
        before = {name: each.clone() for name, each in network.state_dict().items()}
        for each in network.parameters():
            each.register_post_accumulate_grad_hook(lambda _: optimizer.step())
        with pytest.raises(RuntimeError, match=r"alone|backward pass"):
            mean_loss(network, next(iter(loader))).backward()
        return all(torch.equal(each, before[name]) for name, each in network.state_dict().items())

    assert all(mode.run(body))


class Stream(IterableDataset[Any]):
    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        return zip(*data(self.samples).tensors, strict=True)


def read_in_a_thread(batches: Iterable[Any], change: Callable[[Any], Any]) -> Iterator[Any]:
    """As scripts prefetch by themselves."""
    channel: queue.Queue[Any] = queue.Queue(2)

    def read() -> None:
        error = None
        try:
            for batch in batches:
                channel.put([change(batch[0]), *batch[1:]])
        except Exception as failure:
            error = failure
        channel.put(error)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    while isinstance(batch := channel.get(), list):
        yield batch
    reader.join()
    if batch is not None:
        raise batch


@pytest.mark.parametrize(
    ("is_changed", "is_stream", "mode"),
    # Several ranks agree on each batch of a stream, and compare at which batches they are: docs/limits.md.
    [(True, False, SOLO), (False, True, SOLO), (False, False, THREADS_2)],
    ids=str,
)
def test_a_thread_of_the_scripts_own_may_draw_the_batches(is_changed: bool, is_stream: bool, mode: Mode) -> None:
    def lines(accelerator: Any, loader: DataLoader[Any]) -> State:
        network = model()
        given: Any = DataLoader(Stream(24), loader.batch_size) if is_stream else loader
        network, optimizer, given = accelerator.prepare(network, sgd(network.parameters()), given)
        for batch in read_in_a_thread(given, (lambda each: each * 2 + 1) if is_changed else lambda each: each):
            optimizer.zero_grad()
            accelerator.backward(mean_loss(network, batch))
            optimizer.step()
        return network.state_dict()

    compare(mode, lines, samples=24)  # even rounds: computed inputs count the same, whatever they are of


class Sam(torch.optim.Optimizer):
    """Sharpness-aware minimisation in two steps, as its authors' implementation has it."""

    def __init__(self, parameters: Iterable[Any], base: Callable[..., torch.optim.Optimizer], **options: Any) -> None:
        super().__init__(parameters, options)
        self.base = base(self.param_groups, **options)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        self.trained = [each for group in self.param_groups for each in group["params"] if each.grad is not None]
        norm = torch.stack([each.grad.norm() for each in self.trained]).norm()
        self.climbed = [each.grad * 0.05 / norm for each in self.trained]
        torch._foreach_add_(self.trained, self.climbed)
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        torch._foreach_sub_(self.trained, self.climbed)
        self.base.step()
        self.zero_grad()


@pytest.mark.parametrize("mode", [SOLO, THREADS_2], ids=str)
def test_sharpness_aware_minimisation_in_two_steps_may_have_a_scheduler(mode: Mode) -> None:
    def lines(accelerator: Any, loader: DataLoader[Any]) -> State:
        network = model()
        optimizer: Any = Sam(network.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
        scheduler = LambdaLR(optimizer, lambda step: 0.9**step)
        network, optimizer, scheduler, loader = accelerator.prepare(network, optimizer, scheduler, loader)
        for batch in loader:
            accelerator.backward(mean_loss(network, batch))
            optimizer.first_step()
            accelerator.backward(mean_loss(network, batch))
            optimizer.second_step()
            scheduler.step()
        return network.state_dict()

    compare(mode, lines, schedule_unit="step")


def twice_through_one_graph(accelerator: Any, network: nn.Module, batch: Any) -> None:
    network.eval()
    outputs = network(batch[0])
    network(batch[0])
    F.mse_loss(outputs, batch[1]).backward(retain_graph=True)
    network(batch[0])
    outputs.pow(2).mean().backward()


@pytest.mark.parametrize("mode", [SOLO, PROCESSES_2], ids=str)
def test_in_evaluation_batch_norm_allows_two_backward_passes_of_one_graph(mode: Mode) -> None:
    norm = lambda: nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 2))  # noqa: E731
    lines = steps(twice_through_one_graph, lambda: seeded(norm().double()))
    compare(mode, lines, gradient_accumulation_steps=2)
