"""What is said of the first losses, and that the weight which it advises gives the result of one device."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from modes import SOLO, THREADS_2, hearing
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from twin import assert_all_are, whole

from unisono import Accelerator
from unisono.training import losses

LENGTHS = torch.randint(2, 6, (64, 1), generator=torch.Generator().manual_seed(0))
INPUTS = torch.randn(64, 6, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
TARGETS = torch.randint(0, 3, (64, 6), generator=torch.Generator().manual_seed(2))
PADDED = TARGETS.where(torch.arange(6) < LENGTHS, -100)
SHIFTED = TARGETS.where(torch.arange(6) < 5, -100)  # as many of each sample
CLASSES = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)

Loss = Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]


class LanguageModel(nn.Module):
    """Computes its loss itself; with `number`, as transformers do with num_items_in_batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3).double()

    def forward(self, inputs: torch.Tensor, targets: Any = None, number: Any = None) -> Any:
        logits = self.layer(inputs)
        if targets is None:
            return logits
        if number is None:
            return {"loss": F.cross_entropy(logits.flatten(0, 1), targets.flatten()), "logits": logits}
        return {"loss": F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / number}


def entropy(model: Any, x: torch.Tensor, y: torch.Tensor, **options: Any) -> torch.Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten(), **options)


def penalty(model: Any) -> Any:
    return sum(each.square().sum() for each in model.parameters())


def masked(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    mask = (y != -100).flatten()
    return (entropy(model, x, y, reduction="none") * mask).sum() / mask.sum()


def of_the_step(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """What Accelerate's guides write: a sum over tokens by those of all batches of the step, times their number."""
    return entropy(model, x, y, reduction="sum") * 2 / ((y != -100).sum() + 28)


def masked_of_the_step(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    mask = (y != -100).flatten()
    return (entropy(model, x, y, reduction="none") * mask).sum() * 2 / (mask.sum() + 28)


def halved(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return model(x).square().sum() / (2 * len(x))


PLAIN: dict[str, tuple[torch.Tensor, Loss]] = {
    "mean": (TARGETS, entropy),
    "as many ignored of each": (SHIFTED, entropy),
    "a model's own, as many ignored": (SHIFTED, lambda model, x, y: model(x, y)["loss"]),
    "smoothed": (TARGETS, lambda model, x, y: entropy(model, x, y, label_smoothing=0.1)),
    "a sum over samples / their number": (TARGETS, lambda model, x, y: entropy(model, x, y, reduction="sum") / len(x)),
    "a sum / all targets": (TARGETS, lambda model, x, y: entropy(model, x, y, reduction="sum") / y.numel()),
    "a sum of as many features as samples": (TARGETS, lambda model, x, y: model(x).square().sum() / 64),
    "half a mean by hand": (TARGETS, halved),
    "half a mean, by a factor": (TARGETS, lambda model, x, y: 0.5 * entropy(model, x, y, reduction="sum") / y.numel()),
    "a sum times a fraction": (TARGETS, lambda model, x, y: torch.tensor(1 / len(x)) * model(x).square().sum()),
    "a part of a mean, as many ignored of each": (SHIFTED, lambda model, x, y: 0.3 * entropy(model, x, y)),
    "with a GradScaler": (
        TARGETS,
        lambda model, x, y: entropy(model, x, y, reduction="sum") / y.numel() * (y[0, 0] + 1).float(),
    ),
    "a product": (TARGETS, lambda model, x, y: entropy(model, x, y) * model(x).square().mean()),
    "a hundredth of sums": (TARGETS, lambda model, x, y: model(x).square().sum(1).mean() * (1 / len(INPUTS))),
    "with a penalty": (TARGETS, lambda model, x, y: entropy(model, x, y) + penalty(model)),
    "with a penalty by all samples": (
        TARGETS,
        lambda model, x, y: entropy(model, x, y) + penalty(model) / len(INPUTS),
    ),
    "sums of features": (TARGETS, lambda model, x, y: model(x).square().sum(1).mean()),
    "a sum of means": (TARGETS, lambda model, x, y: model(x).square().mean(0).sum()),
    "several": (TARGETS, lambda model, x, y: torch.stack([entropy(model, x, y), model(x).mean()]).sum()),
    "classes as probabilities": (
        TARGETS,
        lambda model, x, y: F.cross_entropy(model(x).flatten(0, 1), F.one_hot(y.flatten(), 3).double()),
    ),
}
SUM = "computed with reduction='sum', or as a sum by hand"
IGNORED = "without ignore_index=-100; gradients .* weight=\\(targets != -100\\).sum"
OTHERS: dict[str, tuple[str, torch.Tensor, Loss]] = {
    "ignored": (IGNORED, PADDED, entropy),
    "a module": (IGNORED, PADDED, lambda model, x, y: nn.CrossEntropyLoss()(model(x).transpose(1, 2), y)),
    "a model's own": (IGNORED, PADDED, lambda model, x, y: model(x, y)["loss"]),
    "in a sum": (IGNORED, PADDED, lambda model, x, y: 0.3 * entropy(model, x, y) + model(x).square().mean()),
    "by the batch's tokens": (
        IGNORED,
        PADDED,
        lambda model, x, y: entropy(model, x, y, reduction="sum") / (y != -100).sum(),
    ),
    "by all tokens": (
        "leave num_items_in_batch out",
        PADDED,
        lambda model, x, y: model(x, y, 2 * (y != -100).sum())["loss"],
    ),
    "by the tokens of the step": ("a sum over .* mean over this batch's targets", PADDED, of_the_step),
    "masked, by the tokens of the step": (
        "a sum, divided by .* by the number of this batch's terms alone, .* weight=number",
        PADDED,
        masked_of_the_step,
    ),
    "classes": (
        "weight=class_weights\\[targets\\].sum",
        TARGETS,
        lambda model, x, y: entropy(model, x, y, weight=CLASSES),
    ),
    "classes, ignored": (
        "class_weights\\[targets\\[targets != -100\\]\\].sum",
        PADDED,
        lambda model, x, y: entropy(model, x, y, weight=CLASSES),
    ),
    "sum": (SUM, TARGETS, lambda model, x, y: entropy(model, x, y, reduction="sum")),
    "sum of errors": (SUM, TARGETS, lambda model, x, y: F.mse_loss(model(x), x[..., :3], reduction="sum")),
    "sum by hand": (SUM, TARGETS, lambda model, x, y: model(x).square().sum() + penalty(model)),
    "by all samples": (
        "a sum, divided by 64, the samples of an epoch; .* write the mean over this batch's$",
        TARGETS,
        lambda model, x, y: model(x).square().mean((1, 2)).sum() / len(INPUTS),
    ),
    "sum of errors, by all samples": (
        "the samples of an epoch",
        TARGETS,
        lambda model, x, y: F.mse_loss(model(x).mean((1, 2)), x.mean((1, 2)), reduction="sum") / len(INPUTS),
    ),
    "masked": ("is a sum, divided by .* weight=divisor", PADDED, masked),
    "chosen targets": (
        "of 8 samples; gradients .* weight=",
        PADDED,
        lambda model, x, y: F.cross_entropy(model(x)[y >= 0], y[y >= 0]),
    ),
    "chosen terms": (
        "terms that were chosen of 8 samples",
        PADDED,
        lambda model, x, y: entropy(model, x, y, reduction="none")[y.flatten() >= 0].mean(),
    ),
}


def train(targets: torch.Tensor, loss_of: Loss, give: Any = None, is_plain: bool = False, **options: Any) -> Any:
    accelerator, model = Accelerator(**options), LanguageModel()
    loader = DataLoader(TensorDataset(INPUTS, targets), 8)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1), loader)
    for x, y in loader:
        loss = loss_of(model, x, y)
        loss.backward() if is_plain else accelerator.backward(loss, None if give is None else give(y))
        optimizer.step()
        optimizer.zero_grad()
    return whole(model)


@pytest.mark.parametrize("is_plain", [True, False], ids=["loss.backward()", "accelerator.backward(loss)"])
def test_a_loss_that_is_not_a_mean_over_samples_is_named_once_and_no_other(is_plain: bool) -> None:
    losses._watching.clear()  # those of earlier tests' models that had no four passes
    for name, (targets, loss_of) in PLAIN.items():
        with hearing("unisono") as said:
            train(targets, loss_of, is_plain=is_plain, gradient_accumulation_steps=2)
        assert (name, said) == (name, [])
    for name, (words, targets, loss_of) in OTHERS.items():
        with hearing("unisono") as said:
            train(targets, loss_of, is_plain=is_plain, gradient_accumulation_steps=2)
        assert len(said) == 1, name
        assert re.search(words, said[0]), said
    assert torch.autograd.backward is losses._beneath


def test_what_a_profiler_puts_around_backward_stays_there(monkeypatch: pytest.MonkeyPatch) -> None:
    before, calls = torch.autograd.backward, []

    def counted(*args: Any, **kwargs: Any) -> None:
        calls.append(1)
        before(*args, **kwargs)

    monkeypatch.setattr(torch.autograd, "backward", counted)
    losses._watching.clear()
    targets, loss_of = next(iter(PLAIN.values()))
    train(targets, loss_of, is_plain=True, gradient_accumulation_steps=2)
    assert torch.autograd.backward is counted
    assert calls


def test_on_one_device_with_one_batch_in_a_step_nothing_is_said() -> None:
    with hearing("unisono") as said:
        for _, targets, loss_of in OTHERS.values():
            train(targets, loss_of)
    assert said == []


WEIGHTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "ignored": lambda targets: (targets != -100).sum(),
    "a model's own": lambda targets: (targets != -100).sum(),
    "masked": lambda targets: (targets != -100).sum(),
    "chosen targets": lambda targets: (targets[targets >= 0] != -100).sum(),
    "classes, ignored": lambda targets: CLASSES[targets[targets != -100]].sum(),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_the_advised_weight_gives_one_devices_result_without_a_message(name: str) -> None:
    _, targets, loss_of = OTHERS[name]
    body = lambda: train(targets, loss_of, WEIGHTS[name], split_batches=True)  # noqa: E731
    (expected,) = SOLO.run(body)
    with hearing("unisono") as said:
        assert_all_are(THREADS_2.run(body), expected)
    assert said == []
    with hearing("unisono") as said:
        THREADS_2.run(lambda: train(targets, loss_of, is_plain=True))
    assert len(said) == 1
