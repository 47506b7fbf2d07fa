"""What a script does by itself with parameters, gradients and hooks: as on one device, or refused, also where each rank
has a part of them."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from modes import FAMILY, PROCESSES_2, SOLO, THREADS_2, Mode, told
from torch import nn
from torch.optim.swa_utils import AveragedModel
from twin import CLOSE, Plain, State, adam, compare, data, loader_of, model, sgd, steps, straight, train, whole

from unisono import Accelerator, rank
from unisono.strategies import DDP, FSDP, ZeRO1

pytestmark = pytest.mark.skipif(FAMILY != "cpu", reason="these are of processes whose tensors torch's groups take")

MODES = [(SOLO, "ddp"), (THREADS_2, "ddp"), *((PROCESSES_2, each) for each in ("ddp", "zero1", "fsdp"))]
EVERYWHERE = pytest.mark.parametrize(("mode", "strategy"), MODES, ids=[f"{mode}-{name}" for mode, name in MODES])
LOST = "a view of a parameter, or of a gradient, is written to"

ROWS, COLUMNS = 5, 4  # which no number of ranks divides
MASK = torch.arange(ROWS * COLUMNS).reshape(ROWS, COLUMNS) % 2


def wholly(tensor: Any) -> torch.Tensor:
    return getattr(tensor, "full_tensor", tensor.clone)().detach()


def squared() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(COLUMNS, ROWS)


Write = Callable[[Any], Any]

RIGHT: dict[str, Write] = {
    "a column": lambda w: w[:, 0].zero_(),
    "transposed": lambda w: w.T[0].zero_(),
    "detached": lambda w: w.detach().zero_(),
    "data": lambda w: w.data.copy_(MASK),
    "with itself": lambda w: w.mul_(w),
    "clamped": lambda w: w.clamp_(-0.1, 0.1),
    "by a whole mask": lambda w: w.mul_(MASK),
    "by a row of it": lambda w: w.__imul__(MASK[0]),
    "filled": lambda w: w.masked_fill_(MASK.bool(), 0),
    "copied": lambda w: w.copy_(MASK),
    "a list of rows": lambda w: w.__setitem__([0], 0),
    "elements of a mask": lambda w: w.__setitem__(MASK.bool(), 0),
    "by rows": lambda w: w.index_copy_(0, torch.tensor([0]), MASK[:1].float()),
    "over rows": lambda w: w.cumsum_(0),
    "normalized": lambda w: w.div_(w.norm(dim=0, keepdim=True)),
    "several": lambda w: torch._foreach_mul_([w], [MASK]),
    "read as a number": lambda w: w.mul_((w.norm() + w[w > 0].sum() + w.max()).item()),
    "ones on a diagonal": nn.init.eye_,
    "sparse": lambda w: nn.init.sparse_(w, 0.5),
    "uniform": nn.init.xavier_uniform_,
    "truncated": nn.init.trunc_normal_,
    "orthogonal": nn.init.orthogonal_,
    "noise": lambda w: w.add_(torch.randn_like(w)),
    "of an own generator": lambda w: w.normal_(generator=torch.Generator().manual_seed(3)),
}
REFUSED: dict[str, Write] = {
    "a row": lambda w: w[0].zero_(),
    "assigned": lambda w: w.__setitem__(0, 0.0),
    "rows": lambda w: w[:1].fill_(0),
    "a row of the data": lambda w: w.data.__setitem__(0, 0.0),
    "a row of what is detached": lambda w: w.detach()[2].zero_(),
    "a row of a row": lambda w: w[1:][0].add_(1),
    "a chunk": lambda w: w.chunk(2)[1].mul_(2),
    "a diagonal": lambda w: w.diagonal().zero_(),
    "a row of a copy": lambda w: w.clone()[0].zero_(),
}
REFUSED_BY_TORCH: dict[str, Write] = {
    "flat": lambda w: w.view(-1).__setitem__(3, 1.0),
    "each row": lambda w: [each.zero_() for each in w],
}


def written(prepare: Callable[[nn.Module], nn.Module], write: Write, to_gradient: bool) -> tuple[torch.Tensor, Any]:
    """What the write leaves, and what is drawn after it."""
    layer: Any = prepare(squared())
    layer(torch.ones(2, COLUMNS)).pow(2).mean().backward()
    torch.manual_seed(2)
    tensor = layer.weight.grad if to_gradient else layer.weight
    with torch.no_grad():
        write(tensor)
    return wholly(tensor), torch.rand(())


def test_a_write_to_what_ranks_divide_is_that_of_one_device_or_refused() -> None:
    kinds = (False, True)  # to a parameter, and to its gradient

    def body() -> list[tuple[list[Any], list[str]]]:
        prepare = lambda layer: Accelerator(strategy="fsdp").prepare(layer)  # noqa: E731
        lost = [*REFUSED.values(), *REFUSED_BY_TORCH.values()]
        return [
            (
                [written(prepare, each, kind) for each in RIGHT.values()],
                [told(lambda w=each, kind=kind: written(prepare, w, kind), RuntimeError) for each in lost],
            )
            for kind in kinds
        ]

    plain = [[written(lambda layer: layer, each, kind) for each in RIGHT.values()] for kind in kinds]
    for own in PROCESSES_2.run(body):
        for (right, refused), expected in zip(own, plain, strict=True):
            for name, found, wanted in zip(RIGHT, right, expected, strict=True):
                print(name)
                torch.testing.assert_close(found, wanted)
            assert all(LOST in each for each in refused[: len(REFUSED)])
            for way in ("weight[[0]] = 0", "weight.masked_fill_(mask, 0)", "weight.copy_(values)"):  # in RIGHT
                assert way in refused[0]


def test_a_write_to_what_is_gathered_until_the_backward_pass_is_refused() -> None:
    def body(when: str) -> str:
        accelerator = Accelerator(strategy="fsdp")
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))

        def step() -> None:
            loss = model(torch.ones(2, 4)).sum()
            if when == "before backward":
                erase()
            accelerator.backward(loss)
            if when == "before the step":
                model(torch.ones(2, 4)).sum()
                erase()
            optimizer.step()
            optimizer.zero_grad()

        @torch.no_grad()
        def erase() -> None:
            accelerator.unwrap_model(model)[1].bias[:1].zero_()

        return " ".join([told(step), told(step)])

    places = ("nothing", "before backward", "before the step")
    for own in PROCESSES_2.run(lambda: [body(each) for each in places]):
        found = ["'1.bias' of the Sequential was changed between a forward pass and its backward" in it for it in own]
        assert found == [False, True, True]


def reset(prepare: Callable[[nn.Module], Any], seed: int) -> list[torch.Tensor]:
    layers = [nn.Linear(3, 5), nn.Embedding(7, 2), nn.Conv1d(2, 3, 2), nn.LayerNorm(3)]
    network = prepare(nn.Sequential(*layers))
    torch.manual_seed(seed)
    for each in network:
        each.reset_parameters()
    return [wholly(each) for each in network.parameters()]


def test_what_differs_by_rank_is_rank_zeros_and_parts_are_saved() -> None:
    def body() -> tuple[list[Any], torch.Tensor]:
        prepare = lambda network: Accelerator(strategy="fsdp").prepare(network)  # noqa: E731
        found = [reset(lambda network: prepare(network).module, seed) for seed in (3, rank())]
        network = prepare(squared())
        network.load_state_dict({"weight": torch.full((ROWS, COLUMNS), 1.0 + rank()), "bias": torch.ones(ROWS)})
        with torch.no_grad():
            network.weight.mul_(torch.arange(4.0) + rank())
        torch.save(network.state_dict(), file := io.BytesIO())
        file.seek(0)
        for name, each in torch.load(file, weights_only=False).items():
            assert type(each) is torch.distributed.tensor.DTensor
            assert torch.equal(each.to_local(), network.state_dict()[name].to_local())
        return found, wholly(network.weight)

    expected = [reset(lambda network: network, seed) for seed in (3, 0)]
    for found, weight in PROCESSES_2.run(body):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        torch.testing.assert_close(weight, torch.arange(4.0).expand(ROWS, COLUMNS))


def test_a_step_of_torchs_optimizers_needs_no_call_per_operation() -> None:
    def body() -> list[int]:
        from unisono.training.strategies.parts import Part

        calls = []
        own: Any = vars(Part)["__torch_dispatch__"].__func__
        Part.__torch_dispatch__ = classmethod(lambda *args: calls.append(args) or own(*args))  # type: ignore[assignment]

        counts = []
        for make, hook in ((sgd, None), (adam, None), (adam, lambda *_: None)):  # which may write to views
            network = model()
            accelerator = Accelerator(strategy="fsdp", max_grad_norm=1.0)
            network, optimizer, loader = accelerator.prepare(network, make(network.parameters()), loader_of(23, 3))
            if hook is not None:
                optimizer.register_step_pre_hook(hook)
            calls.clear()
            for batch in loader:
                straight(accelerator, network, batch)
                optimizer.step()
                optimizer.zero_grad()
            counts.append(len(calls))
        return counts

    for *without, with_hook in PROCESSES_2.run(body):
        assert without == [0, 0]
        assert with_hook > 4


def parameter_of(network: Any) -> Any:
    return next(iter(network.parameters()))


HALF = torch.tensor([0.0, 0.5, 2.0, 1.0, 1.0], dtype=torch.float64)


def halved(gradient: torch.Tensor) -> torch.Tensor:
    return gradient * HALF.to(gradient.device)


def hooked_before() -> nn.Module:
    network = model()
    parameter_of(network).register_hook(halved)
    parameter_of(network).register_hook(lambda gradient: None).remove()
    return network


@pytest.mark.parametrize(
    ("mode", "strategy", "every"),
    [(THREADS_2, "ddp", 1), (PROCESSES_2, "fsdp", 1), (SOLO, "ddp", 2)]
    + [(PROCESSES_2, each, 2) for each in ("ddp", "zero1", "fsdp")],
    ids=str,
)
def test_a_linear_hook_of_a_parameter_acts_as_on_one_device(mode: Mode, strategy: str, every: int) -> None:
    def added(accelerator: Any, loader: Any) -> State:
        return train(accelerator, loader, network=hooked_before())

    def removed(accelerator: Any, loader: Any) -> State:
        network = model()
        handle = parameter_of(network).register_hook(halved)
        last = 2 * (1 if isinstance(accelerator, Plain) else every) - 1
        begin = lambda network: parameter_of(network).register_hook(halved)  # noqa: E731
        after = lambda place, _: place == last and handle.remove()  # noqa: E731
        return train(accelerator, loader, network=network, begin=begin, after=after)

    compare(
        mode,
        {"before prepare": added, "before it, and removed; after it": removed},
        strategy=strategy,
        gradient_accumulation_steps=every,
    )


def with_a_frozen_one(accelerator: Any, loader: Any) -> State:
    """Its hook waits for it."""
    network = hooked_before()
    parameter_of(network).requires_grad_(False)
    after = lambda _, network: parameter_of(network).requires_grad_(True)  # noqa: E731
    return train(accelerator, loader, network=network, after=after)


def with_a_penalty(accelerator: Any, loader: Any) -> State:
    """Whose gradient the hook sees, too."""

    def learn(accelerator: Any, network: Any, batch: Any) -> None:
        straight(accelerator, network, batch)
        parameter_of(network).pow(2).sum().backward()

    network = model()
    parameter_of(network).register_hook(lambda gradient: gradient * 0.5)
    return train(accelerator, loader, learn, network)


def cut(parameter: Any) -> None:
    """Not linear, and no view."""
    parameter.grad.clamp_(-0.01, 0.02)
    parameter.grad[[0, 3]] = 0


def reduced_before(accelerator: Any, loader: Any) -> State:
    network = model()
    parameter_of(network).register_post_accumulate_grad_hook(cut)
    return train(accelerator, loader, network=network)


def reduced_after(accelerator: Any, loader: Any) -> State:
    handles: list[Any] = []
    begin = lambda network: handles.append(parameter_of(network).register_post_accumulate_grad_hook(cut))  # noqa: E731
    return train(accelerator, loader, begin=begin, after=lambda place, _: place == 1 and handles.pop().remove())


def test_a_post_accumulate_hook_is_refused_where_a_pass_does_not_reduce() -> None:
    def body() -> str:
        network = model()
        parameter_of(network).register_post_accumulate_grad_hook(cut)
        lines = lambda: train(  # noqa: E731
            Accelerator(strategy="fsdp", gradient_accumulation_steps=2), loader_of(23, 3), network=network
        )
        return told(lines, RuntimeError)

    for said in PROCESSES_2.run(body):
        assert "'0.weight' of the Sequential has a hook by register_post_accumulate_grad_hook" in said
        assert "change the gradient before optimizer.step(), use register_hook" in said

    def change(accelerator: Any, network: Any, batch: Any) -> None:  # the first way; the second one is tested above
        straight(accelerator, network, batch)
        if getattr(accelerator, "sync_gradients", True):
            cut(parameter_of(network))

    compare(PROCESSES_2, steps(change), strategy="fsdp", gradient_accumulation_steps=2)


class Experts(nn.Module):
    """Of which a batch uses some."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.spare = (nn.Linear(5, 2).double() for _ in range(3))

    def forward(self, inputs: torch.Tensor, names: tuple[str, ...]) -> torch.Tensor:
        return sum(getattr(self, name)(inputs) for name in names)


def experts() -> Experts:
    torch.manual_seed(1)
    return Experts()


# What each rank uses in each step.
USED = [(("left",), ("right",)), (("left", "right"), ("left",)), (("right",), ("right",)), (("right",), ("right",))]


def routed(accelerator: Any, network: Any, optimizer: Any, place: int, every: int = 1) -> None:
    inputs = data(2).tensors[0]
    names = USED[place]
    if isinstance(accelerator, Plain):
        (sum(network(inputs[each : each + 1], names[each]).pow(2).mean() for each in range(2)) / 2).backward()
    else:
        network(inputs[rank() : rank() + 1], names[rank()]).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def route(accelerator: Any) -> State:
    network, optimizer = accelerator.prepare(network := experts(), sgd(network.parameters()))
    for place in range(len(USED)):
        routed(accelerator, network, optimizer, place)
    return whole(network)


def test_momentum_and_decay_leave_parameters_alone_that_no_rank_has_used() -> None:
    chosen = [each(find_unused_parameters=True) for each in (DDP, ZeRO1, FSDP)]
    found = PROCESSES_2.run(lambda: [route(Accelerator(strategy=each)) for each in chosen])
    expected = route(Plain())
    for each in found:
        torch.testing.assert_close(each, [expected] * 3, **CLOSE)
    assert torch.equal(expected["spare.weight"], experts().spare.weight)  # which decay would change


def test_gradients_of_different_parameters_are_not_mixed_but_named() -> None:
    for said in PROCESSES_2.told(lambda: route(Accelerator(strategy="fsdp"))):
        assert "without gradients for 'right.weight', 'right.bias', 'spare.weight', 'spare.bias'" in said
        assert "without gradients for 'left.weight', 'left.bias', 'spare.weight', 'spare.bias'" in said
        # The way out is tested above.
        assert "Accelerator(strategy=unisono.strategies.FSDP(find_unused_parameters=True))" in said


def test_under_fsdp_unused_or_reordered_parameters_need_no_option() -> None:
    def body() -> State:
        accelerator = Accelerator(strategy="fsdp", gradient_accumulation_steps=2)
        network, optimizer = accelerator.prepare(network := experts(), sgd(network.parameters()))
        names = (("left",), ("right",))[:: 1 - 2 * rank()]
        for place in range(4):
            with accelerator.accumulate():
                network(torch.ones(1, 5).double(), names[place % 2]).pow(2).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return whole(network)

    network = experts()
    optimizer = sgd(network.parameters())
    for _ in range(2):
        sum(network(torch.ones(1, 5).double(), (each,)).pow(2).mean() / 2 for each in ("left", "right")).backward()
        optimizer.step()
        optimizer.zero_grad()
    for found in PROCESSES_2.run(body):
        torch.testing.assert_close(found, whole(network), **CLOSE)


def averages(average: Callable[[dict[str, Any], str, Any], None], clone: Callable[[Any], Any]) -> Any:
    """A loop with an average of the parameters by hand: what it is in the end."""

    def lines(accelerator: Any, loader: Any) -> State:
        averaged: dict[str, Any] = {}

        @torch.no_grad()
        def after(_: int, network: Any) -> None:
            for name, each in network.named_parameters():
                average(averaged, name, each)

        begin = lambda network: averaged.update({n: clone(each) for n, each in network.named_parameters()})  # noqa: E731
        train(accelerator, loader, begin=begin, after=after)
        return {name: wholly(each) for name, each in averaged.items()}

    return lines


def moved(averaged: dict[str, Any], name: str, parameter: Any) -> None:
    averaged[name].mul_(0.9).add_(parameter, alpha=0.1)


def summed(averaged: dict[str, Any], name: str, parameter: Any) -> None:
    averaged[name] = 0.9 * averaged[name] + 0.1 * parameter.detach()


def of_whole(averaged: dict[str, Any], name: str, parameter: Any) -> None:
    averaged[name].mul_(0.9).add_(wholly(parameter), alpha=0.1)


def test_under_fsdp_hooks_and_averages_are_those_of_one_device() -> None:
    clone = lambda each: each.detach().clone()  # noqa: E731
    lines = {
        "a hook of a frozen parameter": with_a_frozen_one,
        "a hook, and a penalty": with_a_penalty,
        "a post-accumulate hook before prepare": reduced_before,
        "one after it": reduced_after,
        "an average of clones": averages(moved, clone),
        "of copies": averages(moved, copy.deepcopy),
        "of sums": averages(summed, clone),
        "of whole tensors": averages(of_whole, wholly),
    }
    compare(PROCESSES_2, lines, strategy="fsdp")


def test_averages_of_what_a_model_was_before_it_was_sharded_say_what_to_do() -> None:
    def by_hand() -> None:
        network = model()
        averaged = {name: each.detach().clone() for name, each in network.named_parameters()}
        network = Accelerator(strategy="fsdp").prepare(network)
        for name, each in network.named_parameters():
            moved(averaged, name, each.detach())

    def by_torch() -> None:
        averaged = AveragedModel(network := model())
        averaged.update_parameters(Accelerator(strategy="fsdp").prepare(network))

    def of_shards() -> None:
        AveragedModel(Accelerator(strategy="fsdp").prepare(model()).module)

    for *both, last in PROCESSES_2.run(lambda: [told(each) for each in (by_hand, by_torch, of_shards)]):
        for said in both:
            assert "parameter.detach().clone() for an average" in said  # both ways are tested above
            assert "parameter.full_tensor()" in said
        assert "copy the model before prepare(), as AveragedModel(model) does, and prepare both" in last


def changed(change: Callable[[Any], None]) -> Any:
    def lines(accelerator: Any, loader: Any) -> State:
        torch.manual_seed(1)
        network = nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2)).double()
        begin = lambda network: change(getattr(network, "module", network)[1:])  # noqa: E731
        return train(accelerator, loader, network=network, begin=begin)

    return lines


def tied(network: Any) -> None:
    network[1].weight = network[0].weight


def pruned(network: Any) -> None:
    from torch.nn.utils import prune

    prune.l1_unstructured(network[0], "weight", 0.5)


@EVERYWHERE
def test_weights_that_are_tied_or_pruned_after_prepare(mode: Mode, strategy: str) -> None:
    if strategy != "fsdp":
        compare(mode, {"tied": changed(tied), "pruned": changed(pruned)}, strategy=strategy)
        return
    body = lambda: [  # noqa: E731
        told(lambda each=each: changed(each)(Accelerator(strategy="fsdp"), loader_of(23, 3))) for each in (tied, pruned)
    ]
    for said in (each for own in mode.run(body) for each in own):
        assert "is called with another 'weight' of its Linear than the one that was prepared" in said


class Layers(nn.Sequential):
    def first(self, inputs: torch.Tensor) -> Any:
        return self[0](inputs)


def test_a_layer_that_is_called_by_itself_says_what_to_do() -> None:
    def body() -> tuple[str, list[int]]:
        network = Accelerator(strategy="fsdp").prepare(Layers(nn.Linear(4, 6), nn.Linear(6, 2)))
        said = told(lambda: network[0](torch.ones(3, 4)), RuntimeError)
        network.mark_forward_method("first")
        return said, list(network.first(torch.ones(3, 4)).shape)

    for said, shape in PROCESSES_2.run(body):
        assert "a method of the model calls it, after model.mark_forward_method(name)" in said
        assert shape == [3, 6]
