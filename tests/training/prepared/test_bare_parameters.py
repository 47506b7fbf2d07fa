"""Parameters of no module, and losses with parameters, train like one device; and not at all if left out."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from modes import PROCESSES_2, SOLO, THREADS_2, THREADS_3, Mode
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from twin import Lines, Plain, State, assert_all_are, compare, data, loader_of, mean_loss, model, sgd, whole

from unisono import Accelerator, DataParallel, DeviceLoader, optimizer_step, rank
from unisono.errors import CollectiveMismatchError

SEVERAL = pytest.mark.parametrize("mode", [THREADS_2, PROCESSES_2], ids=str)


def bare(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def with_a_loss_of_its_own(accelerator: Any, loader: DataLoader[Any]) -> State:
    """As SAC's log_alpha."""
    network, log_alpha = model(), bare(0.3)
    optimizers = sgd(network.parameters()), sgd([log_alpha])  # type: ignore[list-item]
    network, log_alpha, *optimizers, loader = accelerator.prepare(network, log_alpha, *optimizers, loader)
    for inputs, targets, _ in loader:
        outputs = network(inputs)
        for each in optimizers:
            each.zero_grad()
        accelerator.backward(F.mse_loss(outputs, targets) + log_alpha.detach().exp() * outputs.square().mean())
        optimizers[0].step()
        accelerator.backward(log_alpha.exp() * (outputs.detach().square() - targets).mean())
        optimizers[1].step()
    return {**whole(network), "log_alpha": log_alpha.detach().clone()}


def zeroed_in_turn(accelerator: Any, loader: DataLoader[Any]) -> State:
    """As SAC's losses, each with its lines: when one is zeroed, the other holds gradients of another batch."""
    network, log_alpha = model(), bare(0.3)
    optimizer, own = sgd(network.parameters()), sgd([log_alpha])  # type: ignore[list-item]
    network, log_alpha, optimizer, own, loader = accelerator.prepare(network, log_alpha, optimizer, own, loader)
    for inputs, targets, _ in loader:
        outputs = network(inputs)
        optimizer.zero_grad()
        accelerator.backward(F.mse_loss(outputs, targets) + log_alpha.detach().exp() * outputs.square().mean())
        optimizer.step()
        own.zero_grad()
        accelerator.backward(log_alpha.exp() * (outputs.detach().square() - targets).mean())
        own.step()
    return {**whole(network), "log_alpha": log_alpha.detach().clone()}


class Criterion(nn.Module):
    """A loss with parameters, as ArcFace's."""

    def __init__(self) -> None:
        super().__init__()
        self.mixed = nn.Parameter(torch.tensor([[1.0, 0.2], [0.3, 0.9]], dtype=torch.float64))
        self.heat = nn.Parameter(torch.tensor([0.7], dtype=torch.float64))

    def forward(self, predictions: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(predictions @ self.mixed * self.heat, targets)


def trained(make: Callable[[], list[Any]], loss_of: Callable[..., torch.Tensor]) -> Lines:
    """Models, and parameters of none, which one optimizer trains by a loss of the inputs, the targets and them."""

    def lines(accelerator: Any, loader: DataLoader[Any]) -> State:
        own = lambda each: [*each.parameters()] if isinstance(each, nn.Module) else [each]  # noqa: E731
        made = make()
        optimizer = sgd([parameter for each in made for parameter in own(each)])
        *made, optimizer, loader = accelerator.prepare(*made, optimizer, loader)
        for inputs, targets, _ in loader:
            accelerator.backward(loss_of(inputs, targets, *made))
            accelerator.clip_grad_norm_([parameter for each in made for parameter in own(each)], 0.3)
            optimizer.step()
            optimizer.zero_grad()
        networks = [each for each in made if isinstance(each, nn.Module)]
        return {
            **whole(*networks),
            **{f"bare {n}": each.detach().clone() for n, each in enumerate(made[len(networks) :])},
        }

    return lines


def changes(inputs: torch.Tensor, targets: torch.Tensor, network: Any, criterion: Any) -> torch.Tensor:
    """The inputs of the criterion are computed anew."""
    return criterion(network(inputs).tanh() + 1, targets.tanh() + 1)  # type: ignore[no-any-return]


PROMPT = torch.full((5,), 0.1, dtype=torch.float64)
LINES: dict[str, Lines] = {
    "a loss of its own": with_a_loss_of_its_own,
    "after the model": trained(lambda: [model(), bare(1.5)], lambda x, y, net, heat: F.mse_loss(net(x) / heat, y)),
    "before it": trained(
        lambda: [model(), nn.Parameter(PROMPT.clone())], lambda x, y, net, p: F.mse_loss(net(x + p), y)
    ),
    "without a model": trained(lambda: [bare(0.1, 0.2)], lambda x, y, offset: (y * offset - 1).square().mean()),
    "a criterion": trained(lambda: [model(), Criterion()], lambda x, y, net, criterion: criterion(net(x), y)),
    "a criterion of computed inputs": trained(lambda: [model(), Criterion()], changes),
}


@pytest.mark.parametrize(
    ("mode", "strategy", "accumulate"),
    [(SOLO, "ddp", 2), (THREADS_3, "ddp", 1), *((PROCESSES_2, name, 2) for name in ("ddp", "zero1", "fsdp"))],
    ids=str,
)
def test_they_train_like_one_device_also_in_an_uneven_tail(mode: Mode, strategy: str, accumulate: int) -> None:
    compare(mode, LINES, strategy=strategy, gradient_accumulation_steps=accumulate)


@pytest.mark.parametrize("mode", [THREADS_3, PROCESSES_2], ids=str)
def test_batches_of_earlier_steps_are_not_in_a_pass(mode: Mode) -> None:
    compare(mode, zeroed_in_turn)


def two_losses(accelerator: Any, loader: DataLoader[Any], is_together: bool = False) -> State:
    network, heat = model(), bare(1.5)
    optimizer = sgd([*network.parameters(), heat])  # type: ignore[list-item]
    others = DataLoader(data(20), batch_size=loader.batch_size)
    network, heat, optimizer, *loaders = accelerator.prepare(network, heat, optimizer, loader, others)
    for batches in zip(*loaders, strict=True):
        losses = [mean_loss(network, batch) / heat for batch in batches]
        for loss, batch in [(sum(losses), None)] if is_together else zip(losses, batches, strict=True):
            accelerator.backward(loss, **({"batch": batch} if isinstance(accelerator, Accelerator) else {}))
        optimizer.step()
        optimizer.zero_grad()
    return {**whole(network), "heat": heat.detach().clone()}


def test_losses_of_unequally_counting_batches_need_a_backward_pass_each() -> None:
    compare(THREADS_2, two_losses)
    for error in THREADS_2.told(lambda: two_losses(Accelerator(), loader_of(23, 3), is_together=True)):
        assert "call accelerator.backward(loss, batch=batch) for the loss of each" in error


@SEVERAL
def test_bare_parameters_stay_the_same_tensors_and_take_rank_zeros_values(mode: Mode) -> None:
    def body() -> list[float]:
        scale, shift = bare(1.0 + rank()), nn.Parameter(torch.ones(2) * rank())
        for _ in range(2):
            accelerator = Accelerator()
            [same, [other]] = accelerator.prepare(scale, [shift])
            assert same is scale
            assert other is shift
            with pytest.raises(ValueError, match="each of two prepared models would reduce"):
                accelerator.prepare(scale)
        accelerator.free_memory()
        accelerator.prepare(scale)
        return [scale.item(), *shift.tolist()]

    assert mode.run(body) == [[1.0, 0.0, 0.0]] * 2


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp"])
def test_a_checkpoint_in_mid_step_holds_them_for_any_number_of_ranks(strategy: str, tmp_path: Path) -> None:
    def train(leaves: bool) -> State | None:
        accelerator = Accelerator(strategy=strategy, gradient_accumulation_steps=2, project_dir=tmp_path)  # type: ignore[arg-type]
        network, heat = model(), bare(1.5)
        optimizer = sgd([*network.parameters(), heat])  # type: ignore[list-item]
        loader = DataLoader(data(22), batch_size=6 // accelerator.num_processes)
        network, heat, optimizer, loader = accelerator.prepare(network, heat, optimizer, loader)
        accelerator.load_state(must_exist=False)
        for number, (inputs, targets, _) in enumerate(loader, 1):
            accelerator.backward(F.mse_loss(network(inputs) / heat, targets))
            optimizer.step()
            optimizer.zero_grad()
            if leaves and number == 1:
                accelerator.save_state()
                return None
        return {**whole(network), "heat": heat.detach().clone()}

    PROCESSES_2.run(lambda: train(leaves=True))
    network, heat = model(), bare(1.5)
    optimizer = sgd([*network.parameters(), heat])  # type: ignore[list-item]
    for window in ([*range(12)], [*range(12, 22)]):
        inputs, targets, _ = (each[window] for each in data(22).tensors)
        optimizer.zero_grad()
        F.mse_loss(network(inputs) / heat, targets).backward()
        optimizer.step()
    assert_all_are(SOLO.run(lambda: train(leaves=False)), {**whole(network), "heat": heat.detach()})


NO_PARAMETERS = {
    "what was computed": lambda: bare(1.0) * 2,
    "what does not require gradients": lambda: torch.ones(3),
}


@pytest.mark.parametrize("what", NO_PARAMETERS)
def test_other_tensors_are_refused(what: str) -> None:
    with pytest.raises(
        TypeError, match="at position 0 is of type Tensor, which cannot be prepared unless it is a parameter"
    ):
        Accelerator().prepare(NO_PARAMETERS[what]())


def test_the_error_for_a_list_of_batches_names_the_loader() -> None:
    batches = [(torch.ones(2, 3), torch.ones(2))] * 3
    with pytest.raises(
        TypeError, match=r"at position 0\[0\]\[0\] .*; for a list of batches, unisono.DeviceLoader\(batches"
    ):
        Accelerator().prepare(batches)
    assert len(Accelerator().prepare(DeviceLoader(batches))) == 3


def test_replicas_that_share_one_are_refused() -> None:
    shared = bare(1.0)
    with pytest.raises(ValueError, match=r"one tensor in several replicas, .* make it in the function that the repl"):
        THREADS_2.run(lambda: (accelerator := Accelerator()).prepare(shared) is accelerator.wait_for_everyone())


# Left out of `prepare`.


@pytest.mark.parametrize(("mode", "is_shared"), [(THREADS_2, False), (THREADS_2, True), (PROCESSES_2, True)], ids=str)
def test_a_parameter_that_was_left_out_is_an_error_at_its_first_step(mode: Mode, is_shared: bool) -> None:
    def body() -> None:
        accelerator, log_alpha, network = Accelerator(), bare(0.1), model()
        optimizer = sgd([log_alpha, *(network.parameters() if is_shared else ())])  # type: ignore[list-item]
        network, loader = accelerator.prepare(network, loader_of(24, 3))
        for batch in loader:
            (mean_loss(network, batch) * log_alpha).backward()
            optimizer.step()

    for error in mode.told(body):
        assert "the SGD steps parameters that were not prepared, and the gradient of its parameter 0 is" in error
        assert "log_alpha, optimizer = accelerator.prepare(log_alpha, optimizer)" in error


def test_the_ways_out_train_like_one_device() -> None:
    def lines(prepares: bool) -> Lines:
        def run(accelerator: Any, loader: DataLoader[Any]) -> State:
            network, log_alpha = model(), bare(0.1)
            optimizer = sgd([log_alpha])  # type: ignore[list-item]
            network, loader = accelerator.prepare(network, loader)
            if prepares:
                log_alpha, optimizer = accelerator.prepare(log_alpha, optimizer)
            step = optimizer.step if prepares or isinstance(accelerator, Plain) else lambda: optimizer_step(optimizer)
            for inputs, _, _ in loader:
                optimizer.zero_grad()
                (log_alpha.exp() * network(inputs).detach().mean()).sum().backward()
                step()
            return {"log_alpha": log_alpha.detach().clone()}

        return run

    compare(THREADS_2, {"prepare": lines(True), "optimizer_step": lines(False)})


def test_what_the_ranks_reduce_themselves_or_compute_alike_is_none() -> None:
    def body() -> list[float]:
        accelerator, probe, averaged = Accelerator(), bare(0.1), bare(0.1)
        for each, own in ((probe, 1), (averaged, rank())):
            optimizer = sgd([each])  # type: ignore[list-item]
            for _ in range(11):
                optimizer.zero_grad()
                (each * own).sum().backward()
                assert each.grad is not None
                each.grad = accelerator.reduce(each.grad)
                optimizer.step()
        return [probe.item(), averaged.item()]

    first, second = THREADS_2.run(body)
    assert first == second


@SEVERAL
def test_a_step_of_one_rank_alone_is_named(mode: Mode) -> None:
    def body() -> None:
        accelerator, probe = Accelerator(), bare(0.1)
        if accelerator.is_main_process:
            probe.sum().backward()
            sgd([probe]).step()  # type: ignore[list-item]
        accelerator.wait_for_everyone()

    with pytest.raises(CollectiveMismatchError, match="a step of an SGD with parameters that were not prepared"):
        mode.run(body)


def test_a_group_that_is_added_needs_a_prepared_parameter() -> None:
    def body() -> None:
        accelerator, network, added = Accelerator(), model(), bare(0.1)
        network, optimizer, loader = accelerator.prepare(network, sgd(network.parameters()), loader_of(12, 3))
        [batch, _] = loader
        optimizer.add_param_group({"params": [added]})
        (mean_loss(network, batch) * added).backward()
        with pytest.raises(
            ValueError, match=r"no prepared model; before add_param_group\(\), .* accelerator\.prepare\(par"
        ):
            optimizer.step()
        optimizer.zero_grad()
        accelerator.prepare(later := bare(0.1))
        optimizer.param_groups.pop()
        optimizer.add_param_group({"params": [later]})
        (mean_loss(network, batch) * later).backward()
        optimizer.step()

    THREADS_2.run(body)


def test_a_plain_data_parallel_function_may_train_on_one_device() -> None:
    def body(*_: Any) -> float:
        accelerator, log_alpha = Accelerator(), bare(0.1)
        optimizer = sgd([log_alpha])  # type: ignore[list-item]
        for _, targets, _ in accelerator.prepare(loader_of(24, 3)):
            (log_alpha * targets.mean()).sum().backward()
            optimizer.step()
        return log_alpha.item()

    assert DataParallel(nn.Identity(), ["cpu:0"]).run_on_replicas(body) != [0.1]


def scaled_losses(accelerator: Accelerator) -> tuple[Any, list[torch.Tensor], list[Any]]:
    """An optimizer, and the losses of two batches, to whose outputs a bare parameter is applied last."""
    network, scale = model(), bare(1.5)
    optimizer = sgd([*network.parameters(), scale])
    network, scale, optimizer, loader = accelerator.prepare(network, scale, optimizer, loader_of(12, 2))
    batches = list(islice(loader, 2))
    return optimizer, [(network(each[0]) * scale - each[1]).square().mean() for each in batches], batches


def test_zero_grad_between_forward_and_backward_makes_no_microbatch() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    optimizer, (_, loss), _ = scaled_losses(accelerator)
    optimizer.zero_grad()
    accelerator.backward(loss)
    assert not accelerator.sync_gradients


def test_a_pass_counted_for_another_batch_must_name_its_own() -> None:
    _, (loss, _), batches = scaled_losses(accelerator := Accelerator(gradient_accumulation_steps=2))
    with pytest.raises(
        ValueError, match=r"its loss belongs to another batch; name it, accelerator.backward\(loss, batch="
    ):
        accelerator.backward(loss)
    _, (loss, _), batches = scaled_losses(accelerator := Accelerator(gradient_accumulation_steps=2))
    accelerator.backward(loss, batch=batches[0])
    assert not accelerator.sync_gradients
