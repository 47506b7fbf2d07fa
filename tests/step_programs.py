"""Random training loops, as data: what the package trains on several ranks, and what one device trains in plain torch.

A program is a set-up and a list of operations, each a few words: `draw a`, `forward f`, `backward plain`, `step f`.
`Machine` has what a script has: the batch in its hand, those that it has kept, its losses. `Ranked` runs the operations
with an Accelerator; `Plain` (in `plain_steps.py`) does on one device, over the global batches. An operation whose
operand is not there does nothing, on either: every list of operations is a program, and can be cut anywhere.
"""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from modes import FAMILY, HOST, Mode, in_main_memory
from torch import nn
from torch.distributed import DistError
from torch.utils.data import DataLoader, TensorDataset

from unisono import Accelerator, SampleGenerator, backward, current_world, optimizer_step
from unisono.errors import BrokenWorldError
from unisono.strategies import DDP, FSDP, ZeRO1

NOT_IN_GRAPH = "torch.autograd.grad finds no parameter in the graph of the loss"


class Setup(NamedTuple):
    """What a program trains.

    Attributes:
        samples, others: of loader a, and of loader b.
        batch: of each rank, of both loaders.
        every: k, the microbatches of a step.
        layout: "one": a model f and its optimizer; "two": another one, g; "halves": two optimizers for the halves of f.
        optimizer: "sgd" (with momentum) or "adam".
        is_same: whether loader a delivers the same tensors again and again, one batch per rank as often as it can.
        net: what f begins with: "plain", a layer; "sparse", one with a table, whose gradients are sparse; "routed", two
            layers, of which each sample goes through one; "norm", one with batch normalisation; "noisy", with dropout.
        is_bare: whether a parameter of no model is trained, by the optimizer of f.
        virtual: the number of virtual ranks; 0 for none.
    """

    samples: int = 11
    others: int = 7
    batch: int = 2
    every: int = 1
    layout: str = "one"
    optimizer: str = "sgd"
    is_same: bool = False
    net: str = "plain"
    is_bare: bool = False
    virtual: int = 0


class Program(NamedTuple):
    setup: Setup
    ops: tuple[str, ...]

    def __str__(self) -> str:
        changed = {name: each for name, each in self.setup._asdict().items() if each != Setup._field_defaults[name]}
        return f"{changed}: {'; '.join(self.ops)}"


def data(samples: int, seed: int) -> TensorDataset:
    """Inputs, targets and tokens, some of which are 0."""
    numbers = torch.Generator().manual_seed(seed)
    columns = torch.randn(samples, 5, generator=numbers, dtype=torch.float64, device=HOST).split([3, 2], 1)
    tokens = torch.randint(0, 3, (samples,), generator=numbers, device=HOST).double()
    return TensorDataset(*(each.to(torch.get_default_device()) for each in (*columns, tokens)))


SEEDS = {"a": 1, "b": 2, "c": 3}  # of the loaders; c's is evaluated only


class Looked(nn.Module):
    """A layer, and a row of a table for each sample."""

    def __init__(self, is_sparse: bool) -> None:
        super().__init__()
        self.layer, self.table = nn.Linear(3, 4), nn.Embedding(4, 4, sparse=is_sparse)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        rows = (inputs[:, 0] > 0).long() + 2 * (inputs[:, 1] > 0).long()
        return self.layer(inputs) + self.table(rows)


class Routed(nn.Module):
    """Each sample goes through one of two layers; one that gets none is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(3, 4) for _ in range(2))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = inputs.new_zeros(len(inputs), 4)
        for number, expert in enumerate(self.experts):
            rows = ((inputs[:, 0] > 0).long() == number).nonzero().flatten()
            if len(rows):
                outputs = outputs.index_copy(0, rows, expert(inputs[rows]))
        return outputs


class Bare(nn.Module):
    """Holds a parameter that is prepared without a module."""

    def __init__(self, value: nn.Parameter) -> None:
        super().__init__()
        self.value = value


def networks(setup: Setup, is_sparse: bool = True) -> dict[str, nn.Module]:
    """f; g, which also takes f's outputs; and t, the bare parameter."""
    numbers = torch.Generator().manual_seed(4)
    first: dict[str, Callable[[], Sequence[nn.Module]]] = {
        "plain": lambda: [nn.Linear(3, 4)],
        "sparse": lambda: [Looked(is_sparse)],
        "routed": lambda: [Routed()],
        "norm": lambda: [nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4)],
        "noisy": lambda: [nn.Linear(3, 4), nn.Dropout(0.3)],
    }
    made: dict[str, nn.Module] = {"f": nn.Sequential(*first[setup.net](), nn.Tanh(), nn.Linear(4, 3)).double()}
    if setup.layout == "two":
        made["g"] = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    if setup.is_bare:
        made["t"] = Bare(nn.Parameter(torch.zeros(2))).double()
    with torch.no_grad():
        for network in made.values():
            for each in network.parameters():
                each.copy_(torch.randn(each.shape, generator=numbers, dtype=torch.float64, device=HOST) / 2)
    return made


def optimizers(setup: Setup, models: dict[str, nn.Module]) -> dict[str, torch.optim.Optimizer]:
    """By the name that an operation calls it: f, g; of halves f has the first."""
    groups = {name: list(model.parameters()) for name, model in models.items()}
    groups["f"] += groups.pop("t", [])
    if setup.layout == "halves":
        groups = {"f": groups["f"][:2], "g": groups["f"][2:]}
    if setup.optimizer == "adam":
        return {name: torch.optim.Adam(group, lr=0.05) for name, group in groups.items()}
    decay = 0 if setup.net == "sparse" else 0.01  # which torch does not have for sparse gradients
    return {name: torch.optim.SGD(group, lr=0.1, momentum=0.9, weight_decay=decay) for name, group in groups.items()}


def rows_of_loss(kind: str, models: Any, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor | None:
    """A loss for each sample; None if the set-up has no such loss."""
    f, g, t = models["f"], models.get("g"), models.get("t")
    if kind in ("fit", "tokens"):
        return (f(inputs)[:, :2] - targets).pow(2).mean(1)
    if kind == "scaled":  # by the bare parameter
        return None if t is None else ((f(inputs)[:, :2] - targets).pow(2) * (-t.value).exp() + t.value).mean(1)
    if kind == "square":
        return f(inputs).pow(2).mean(1)
    if kind in ("penalty", "copied"):  # on the gradient for the batch itself, or for a copy of it
        varied = (inputs.detach() if kind == "penalty" else inputs.clone()).requires_grad_()
        outputs = f(varied)
        (slope,) = torch.autograd.grad(outputs.pow(2).sum(), varied, create_graph=True)
        return slope.pow(2).sum(1) + (outputs[:, :2] - targets).pow(2).mean(1)
    if g is None:
        return None
    if kind == "other":
        return (g(inputs) - targets).pow(2).mean(1)
    return g(f(inputs)).pow(2).mean(1)  # "through"


def decay(model: nn.Module) -> torch.Tensor:
    """A penalty on the parameters of f, but for its table, whose gradients stay sparse."""
    return sum(each.pow(2).sum() for name, each in model.named_parameters() if "table" not in name)  # type: ignore


class Loss(NamedTuple):
    """One backward pass.

    Attributes:
        parts: means, and the batches that they are over; their sum is the loss.
        weight: what the mean is over, if that is not samples.
    """

    parts: tuple[tuple[torch.Tensor, Any], ...]
    weight: torch.Tensor | None = None

    @property
    def value(self) -> torch.Tensor:
        return sum(value for value, _ in self.parts)  # type: ignore[return-value]


class Interrupted(Exception):  # noqa: N818 - of the script, and caught by it
    """What a script survives."""


class Machine:
    """What a script has at hand, and the operations.

    Attributes:
        at: the number of the operation that runs.
        seen: what the script reads: whether gradients are synchronized, norms.
    """

    def __init__(self, setup: Setup) -> None:
        self.setup, self.at, self.seen = setup, 0, list[Any]()
        self.models, self.optimizers = dict[str, Any](), dict[str, Any]()
        self.block = contextlib.ExitStack()
        self.has_saved = False
        self.begin()

    def begin(self) -> None:
        """A run of the script begins."""
        self.hand: Any = None
        self.kept: list[Any] = []
        self.queues: dict[str, list[Any]] = {"a": [], "b": []}
        self.loops: dict[str, Iterator[Any]] = {}
        self.losses: list[Loss] = []
        self.bests: list[Any] = []
        self.block.close()

    def run(self, ops: Sequence[str]) -> None:
        for self.at, op in enumerate([*ops, "leave_block"]):
            self.note()
            name, *words = op.split()
            getattr(self, name)(*words)
        self.at += 1
        self.note()

    def note(self) -> None:
        """An operation begins."""

    # Batches.

    def look(self, which: str) -> None:
        """At the first batch of a further loop, which is left."""
        next(self.loop(which))

    def draw(self, which: str) -> None:
        self.hand = self.queues[which].pop(0) if self.queues[which] else self._next(which)

    def ahead(self, which: str) -> None:
        self.queues[which].append(self._next(which))

    def leave(self, which: str) -> None:
        """`break`."""
        self.queues[which].clear()
        self.loops.pop(which, None)

    def end(self, which: str) -> None:
        """What is left of the loop is skipped."""
        for _ in self.loops.pop(which, ()):
            pass

    def list(self, which: str) -> None:
        self.kept.extend(self.loop(which))

    def keep(self) -> None:
        if self.hand is not None:
            self.kept.append(self.hand)

    def replay(self, number: str) -> None:
        if self.kept:
            self.hand = self.kept[int(number) % len(self.kept)]

    def _next(self, which: str) -> Any:
        for _ in range(3):  # a loop that was saved after its last batch resumes with nothing
            if which not in self.loops:
                self.loops[which] = self.loop(which)
            if (batch := next(self.loops[which], None)) is not None:
                return batch
            del self.loops[which]
        raise AssertionError(f"loader {which} delivers nothing")

    # Losses.

    def forward(self, kind: str) -> None:
        if self.hand is None:
            return
        inputs, targets, tokens = self.tensors(self.hand)
        if (errors := rows_of_loss(kind, self.models, inputs, targets)) is None:
            return
        weight = None
        if kind == "tokens":
            value, weight = (errors * tokens).sum() / tokens.sum().clamp(min=1), tokens.sum()
        else:
            value = errors.mean()
        self.losses.append(Loss(((value, self.hand),), weight))

    def add(self) -> None:
        """One backward pass for the last two losses."""
        if len(self.losses) > 1 and self.losses[-1].weight is None and self.losses[-2].weight is None:
            last, first = self.losses.pop(), self.losses.pop()
            self.losses.append(Loss((*first.parts, *last.parts)))

    def backward(self, way: str) -> None:
        if self.losses:
            self.passed(self.losses.pop(), way)

    def drop(self) -> None:
        """Losses that are of no use."""
        self.losses.clear()

    def fail(self, where: str) -> None:
        """The forward or backward pass raises, and the script goes on."""
        if self.hand is not None:
            with contextlib.suppress(Interrupted):
                self.failing(where)

    def freeze(self, layer: str) -> None:
        self._module("f")[int(layer)].requires_grad_(False)

    def unfreeze(self, layer: str) -> None:
        self._module("f")[int(layer)].requires_grad_(True)

    def hook(self, row: str) -> None:
        """A row of the last weight gets no gradient from now on."""
        mask = torch.ones(3, 1, dtype=torch.float64)
        mask[int(row)] = 0
        self._module("f")[-1].weight.register_hook(lambda gradient: gradient * mask.to(gradient.device))

    def erase(self, row: str) -> None:
        with torch.no_grad():
            self._module("f")[-1].weight[int(row)].zero_()

    def erase_grad(self, row: str) -> None:
        if (gradient := self._module("f")[-1].weight.grad) is not None:
            gradient[int(row)].zero_()

    def best(self) -> None:
        """Each rank keeps its first, second, ... state, or the last one before, as by a loss of its own."""
        self.bests.append(self.keep_state())

    def load_best(self) -> None:
        if self.bests:
            self.load_kept()

    def kept_by(self, rank: int) -> Any:
        return self.bests[min(rank, len(self.bests) - 1)]

    def resume(self) -> None:
        """A new run of the script loads what was saved."""
        if self.has_saved:
            self.begin()
            self.restore()

    def _module(self, name: str) -> Any:
        return self.models[name]

    def leave_block(self) -> None:
        self.block.close()


class Computed(list[torch.Tensor]):
    """New tensors, of a batch as it was delivered."""

    def __init__(self, batch: Any) -> None:
        super().__init__(each * 1 + 0 for each in batch)
        self.delivered = getattr(batch, "delivered", batch)


class Ranked(Machine):
    """With the package, on this rank."""

    def __init__(self, setup: Setup, strategy: str, directory: str) -> None:
        super().__init__(setup)
        self.strategy, self.directory = strategy, directory
        self.prepare()

    def prepare(self) -> None:
        setup = self.setup
        kinds = {"ddp": DDP, "zero1": ZeRO1, "fsdp": FSDP}
        self.accelerator = Accelerator(
            gradient_accumulation_steps=setup.every,
            strategy=kinds[self.strategy](find_unused_parameters=setup.net == "routed"),
            project_dir=self.directory,
            sync_batchnorm=setup.net == "norm" and not setup.virtual,
            virtual_ranks=setup.virtual or None,
            seed=1 if setup.virtual else None,
        )
        models = networks(setup)
        steppers = optimizers(setup, models)
        sizes = {"a": setup.samples, "b": setup.others, "c": 5}
        self.loaders = {
            which: DataLoader(data(size, SEEDS[which]), batch_size=setup.batch) for which, size in sizes.items()
        }
        if setup.is_same:
            batch = [*data(setup.batch, SEEDS["a"]).tensors]
            repeated = {which: SampleGenerator(batch, setup.samples // setup.batch) for which in "ac"}
            self.loaders.update(repeated)  # type: ignore[arg-type]
        count = len(models) + len(steppers)
        trained = [each.value if isinstance(each, Bare) else each for each in models.values()]
        prepared = self.accelerator.prepare(*trained, *steppers.values(), *self.loaders.values())
        self.models = {name: Bare(one) if name == "t" else one for name, one in zip(models, prepared, strict=False)}
        self.optimizers = dict(zip(steppers, prepared[len(models) :], strict=False))
        self.loaders = dict(zip(self.loaders, prepared[count:], strict=True))

    def state(self) -> list[torch.Tensor]:
        """This rank's part of the parameters."""
        held = [each.detach() for model in self.models.values() for each in model.parameters()]
        return [getattr(each, "_local_tensor", each).clone() for each in held]

    def loop(self, which: str) -> Iterator[Any]:
        return iter(self.loaders[which])

    def tensors(self, batch: Any) -> Any:
        return batch

    def foreign(self, number: str) -> None:
        rank = current_world().rank
        self.hand = list(data(3, 10 + 10 * int(number) + rank).tensors)

    def compute(self) -> None:
        if self.hand is not None:
            self.hand = Computed(self.hand)

    def passed(self, loss: Loss, way: str) -> None:
        if loss.weight is not None:
            self.accelerator.backward(loss.value, loss.weight)
        elif way == "plain":
            loss.value.backward()
        elif way == "hand":
            backward(loss.value)
        elif way == "named":
            batch = loss.parts[0][1]
            self.accelerator.backward(loss.value, batch=getattr(batch, "delivered", batch))
        elif way == "assigned":
            trained = [p for model in self.models.values() for p in model.parameters() if p.requires_grad]
            gradients = torch.autograd.grad(loss.value, trained, allow_unused=True)
            if self.strategy == "fsdp" and not any(each is not None for each in gradients):
                raise ValueError(NOT_IN_GRAPH)  # so torch says without allow_unused: these are the sharded ones
            for each, gradient in zip(trained, gradients, strict=True):
                if gradient is not None:
                    each.grad = gradient
        else:
            self.accelerator.backward(loss.value)

    def failing(self, where: str) -> None:
        def refuse(*_: Any) -> None:
            raise Interrupted

        module = self._module("f")
        hook = module[1].register_forward_pre_hook(refuse) if where == "forward" else contextlib.nullcontext()
        with hook:
            loss = self.models["f"](self.hand[0]).pow(2).mean()
        loss.register_hook(refuse)
        self.accelerator.backward(loss)

    def decay(self) -> None:
        """A penalty on the parameters, with a backward pass of its own."""
        self.accelerator.backward(decay(self.models["f"]))

    def step(self, name: str) -> None:
        if name in self.optimizers:
            self.optimizers[name].step()

    def step_by_hand(self, name: str) -> None:
        optimizer_step(self.optimizers[name])

    def zero(self, name: str, how: str) -> None:
        if name in self.optimizers:
            self.optimizers[name].zero_grad(set_to_none=how == "none")

    def zero_model(self, name: str, how: str) -> None:
        for each in (name, "t" if name == "f" else name):
            if each in self.models:
                self.models[each].zero_grad(set_to_none=how == "none")

    def clip(self, way: str) -> None:
        norm = None
        if way == "accelerator":
            norm = self.accelerator.clip_grad_norm_(self.models["f"], 0.1)
        elif self.accelerator.sync_gradients:
            norm = nn.utils.clip_grad_norm_(self.models["f"].parameters(), 0.1)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        self.seen.append(None if norm is None else float(norm))

    def read(self, what: str) -> None:
        names = {
            "sync": "sync_gradients",
            "every": "gradient_accumulation_steps",
            "skipped": "optimizer_step_was_skipped",
        }
        self.seen.append(getattr(self.accelerator, names.get(what, "optimizer_step_was_skipped")))

    def enter_block(self) -> None:
        self.block.close()
        self.block.enter_context(self.accelerator.accumulate())

    def evaluate(self, count: str) -> None:
        self.models["f"].eval()
        with torch.no_grad():
            for inputs, *_ in islice(self.loaders["c"], int(count)):
                self.models["f"](inputs)
        self.models["f"].train()

    def save(self) -> None:
        self.accelerator.save_state()
        self.has_saved = True

    def restore(self) -> None:
        self.prepare()
        self.accelerator.load_state()

    def load(self) -> None:
        """What another program has saved, at the beginning of this one."""
        self.begin()
        self.restore()

    def keep_state(self) -> Any:
        if self.strategy == "fsdp":
            return copy.deepcopy(self.accelerator.state_dict(self.models["f"]))
        return copy.deepcopy(self.models["f"].state_dict())

    def load_kept(self) -> None:
        if self.strategy == "fsdp":  # rank zero's
            self.accelerator.load_state_dict(self.models["f"], self.bests[0])
        else:
            self.models["f"].load_state_dict(self.kept_by(current_world().rank))

    def _module(self, name: str) -> Any:
        return self.accelerator.unwrap_model(self.models[name])


LOOPS = (
    "draw a; zero f none; forward fit; backward accelerator; step f",
    "draw a; forward fit; backward plain; step f; zero f zeros",
    "draw a; zero_model f none; forward fit; backward accelerator; clip torch; step f",
    "draw a; forward fit; backward accelerator; forward square; backward accelerator; step f; zero f none",
    "draw a; forward fit; forward square; add; backward plain; step f; zero f none",
    "draw a; forward fit; backward accelerator; draw b; forward fit; backward accelerator; step f; zero f none",
    "draw a; forward fit; draw b; forward square; backward accelerator; backward accelerator; step f; zero f none",
    "draw a; forward fit; draw b; forward square; add; backward accelerator; step f; zero f none",
    "draw a; forward fit; backward accelerator; step f; zero f none; draw b; forward fit; backward plain; step f; "
    "zero f none",
    "draw a; forward penalty; backward accelerator; step f; zero f none",
    "draw a; forward copied; backward accelerator; clip accelerator; step f; zero f none",
    "draw a; compute; forward fit; backward accelerator; step f; zero f none",
    "ahead a; draw a; forward fit; backward accelerator; step f; zero f none",
    "draw a; keep; forward fit; backward accelerator; step f; zero f none; replay 0",
    "replay 1; forward fit; backward accelerator; step f; zero f none",
    "draw a; forward tokens; backward accelerator; step f; zero f none",
    "draw a; forward fit; backward accelerator; foreign 0; forward square; backward plain; step f; zero f none",
    "foreign 1; forward fit; backward accelerator; step f; zero f none",
    "enter_block; draw a; forward fit; backward accelerator; step f; zero f none; leave_block",
    "draw a; forward fit; backward accelerator; draw a; forward fit; backward accelerator; step f; zero f none",
    "draw a; evaluate 2; forward fit; backward accelerator; read sync; step f; read sync; zero f none",
    "draw a; forward fit; backward accelerator; step f; zero f none; save",
    "draw a; forward fit; backward accelerator; erase_grad 1; step f; zero f none; erase 0",
    "draw a; forward fit; backward accelerator; step f; zero f none; best",
    "load_best; draw a; forward fit; backward accelerator; step f; zero f none",
    # With two models.
    "draw a; zero f none; forward through; backward accelerator; step f; zero g none; forward other; "
    "backward accelerator; step g",
    "draw a; forward fit; backward accelerator; forward other; backward accelerator; step f; step g; zero f none; "
    "zero g none",
    "draw a; forward through; backward accelerator; step f; step g; zero f none; zero g none",
)
"""What scripts do with a batch."""

LINES = tuple(
    line
    for group in (
        "draw a, draw b, ahead a, keep, replay 0, replay 1, list a, end a, leave a, leave b, compute, foreign 0",
        "forward fit, forward square, forward penalty, forward copied, forward tokens, forward through, forward other",
        "add, drop, decay, backward accelerator, backward plain, backward named, backward hand, backward assigned",
        "enter_block, leave_block, step f, step g, zero f none, zero f zeros, zero g none, zero_model f none",
        "zero_model f zeros, clip accelerator, clip torch, read sync, read every, read skipped, freeze 0, unfreeze 0",
        "evaluate 1, fail forward, fail backward, save, resume",
        "hook 0, hook 2, erase 1, erase_grad 0, best, load_best",
    )
    for line in group.split(", ")
)

Choose = Callable[[Sequence[Any]], Any]


def any_program(choose: Choose) -> Program:
    """A program of some loops, one after the other, whose bodies may have lines too many, too few, or other ones."""
    every = choose([1, 1, 2, 2, 3, 4])
    setup = Setup(
        samples=choose(range(3, 16)),
        others=choose(range(3, 10)),
        batch=choose([2, 1, 3]),
        every=every,
        layout=choose(["one", "one", "two", "halves"]),
        optimizer=choose(["sgd", "adam"]),
        net=choose(
            ["plain", "plain", *(["sparse"] if FAMILY != "toy" else []), "routed", "norm"]
        ),  # it has no such ones
        is_bare=choose([False, False, True]),
    )
    if setup.net == "sparse":  # torch's Adam takes no sparse gradients
        setup = setup._replace(optimizer="sgd")
    ops = ["draw a", "keep", "draw a", "keep", *choose([["leave a"], []])]
    for _ in range(choose([1, 1, 2, 3])):
        body = choose(LOOPS if setup.layout == "two" else LOOPS[:-3]).split("; ")
        if "step g" not in body and setup.layout != "one":  # train the other one as well
            body += ["forward other", "backward plain"] * (setup.layout == "two") + ["step g", "zero g none"]
        if setup.is_bare:
            body = [choose([line, line.replace("fit", "scaled")]) for line in body]
        for _ in range(choose([0, 0, 1, 2, 3])):
            place = choose(range(len(body)))
            if choose([True, True, False]):
                body.insert(place, choose(LINES))
            elif len(body) > 1 and not body[place].startswith(("forward", "backward")):  # a step needs gradients
                body.pop(place)
        ops += body * choose([1, 2, 3, 5])
    if setup.net == "sparse":  # whose norm torch does not compute
        ops = [op.replace("clip torch", "clip accelerator") for op in ops]
    return Program(setup, tuple(ops))


class Outcome(NamedTuple):
    """How a program ended on a rank.

    Attributes:
        at: the operation that it came to; one more than there are if it ended.
        state: this rank's parameters then.
        seen: as in Machine.
        error: the type and the message; None if it ended.
        is_worded: the package has raised it.
        is_secondary: it says that another rank has failed.
        rank: of a rank that was stopped there is no outcome.
    """

    at: int
    state: list[torch.Tensor]
    seen: list[Any]
    error: str | None = None
    is_worded: bool = False
    is_secondary: bool = False
    rank: int = 0


def run_here(program: Program, strategy: str, directory: str) -> Outcome:
    """Run a program on this rank.

    Raises:
        Exception: what ended it, with its outcome as the attribute `outcome`.
    """
    machine: Ranked | None = None
    try:
        machine = Ranked(program.setup, strategy, directory)
        machine.run(program.ops)
    except Exception as error:
        frames = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
        error.outcome = Outcome(  # type: ignore[attr-defined]
            machine.at if machine else 0,
            machine.state()
            if machine
            else [each for one in networks(program.setup).values() for each in one.parameters()],
            machine.seen if machine else [],
            f"{type(error).__name__}: {error}",
            f"{os.sep}unisono{os.sep}" in frames[-1] or str(error) == NOT_IN_GRAPH,
            isinstance(error, BrokenWorldError | DistError),  # of DDP's own reduction, in a plain loss.backward()
            current_world().rank,
        )
        raise
    finally:
        if machine is not None:
            machine.begin()  # no loop stays open
    return Outcome(machine.at, machine.state(), machine.seen, rank=current_world().rank)


def run_programs(
    mode: Mode,
    programs: Sequence[Program],
    strategy: str = "ddp",
    note: Callable[[int], None] = lambda _: None,
    saved: str | None = None,
) -> list[list[Outcome]]:
    """Run programs on all ranks of a mode, many in one world; after an error the next ones have a new one.

    Args:
        saved: where the programs save and load, each in the directory of its number; None: where each one is alone.

    Returns:
        For each program the outcomes by rank; of ranks that were stopped before they had one, none.
    """
    found: list[list[Outcome]] = []
    with tempfile.TemporaryDirectory() as directory:
        while len(found) < len(programs):
            place = os.path.join(directory, str(len(found)))
            os.mkdir(place)
            with contextlib.suppress(Exception):  # it is in the outcomes
                here = [saved and os.path.join(saved, str(each)) for each in range(len(found), len(programs))]
                mode.run(_body(programs[len(found) :], strategy, place, here))
            by_rank = [_read(os.path.join(place, str(rank))) for rank in range(mode.ranks)]
            # Ranks that have not failed are in a later program when they hear of it.
            ends = [len(each) for each in by_rank if not each or each[-1].error is not None] or map(len, by_rank)
            count = max(min(ends), 1)
            found += [[each[number] for each in by_rank if number < len(each)] for number in range(count)]
            note(len(found))
    return found[: len(programs)]


def _body(programs: Sequence[Program], strategy: str, place: str, saved: Sequence[str | None]) -> Callable[[], None]:
    def body() -> None:
        with open(os.path.join(place, str(current_world().rank)), "wb", buffering=0) as file:
            for number, program in enumerate(programs):
                try:
                    outcome = run_here(program, strategy, saved[number] or os.path.join(place, f"saved-{number}"))
                except Exception as error:
                    pickle.dump(in_main_memory(tuple(error.outcome)), file)  # type: ignore[attr-defined]
                    raise
                pickle.dump(in_main_memory(tuple(outcome)), file)
                current_world().comm.barrier()  # or a rank whose next program is refused at once ends one that is not

    return body


def _read(path: str) -> list[Outcome]:
    found: list[Outcome] = []
    with contextlib.suppress(EOFError, FileNotFoundError), open(path, "rb") as file:
        while True:
            found.append(Outcome(*pickle.load(file)))
    return found
