"""Precision, clipping and the guard: what happens to gradients between the reduction and the step."""

from __future__ import annotations

import warnings

import pytest
import torch
from modes import PROCESSES_2, SOLO, THREADS_2, THREADS_3, each_of, scaling
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR
from twin import adam, assert_same_bits, compare, data, loader_of, mean_loss, model, steps, straight, train

from unisono import Accelerator

mode = each_of(scaling(SOLO, THREADS_3, PROCESSES_2))


def clipped_by_hand(accelerator, loader):
    network = model()
    network, optimizer, loader = accelerator.prepare(network, adam(network.parameters()), loader)
    norms = []
    for inputs, targets, _ in loader:
        optimizer.zero_grad()
        accelerator.backward(F.mse_loss(network(inputs), targets))
        norm = accelerator.clip_grad_norm_(network.parameters(), 0.1)
        optimizer.step()
        norms += [norm] if norm is not None else []
    return {**network.state_dict(), "norms": torch.stack(norms)}


def clipped_part_by_part(accelerator, network, batch):
    mean_loss(network, batch).backward()
    for name, most in (("0", 0.1), ("2", 0.05)):
        accelerator.clip_grad_norm_(list(network.get_submodule(name).parameters()), most)


@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=pytest.mark.any_family), 2])
def test_the_norm_is_that_of_the_global_batch(mode, accumulate):
    lines = {"by hand": clipped_by_hand, "part by part": steps(clipped_part_by_part)}
    compare(mode, lines, 23, 3, gradient_accumulation_steps=accumulate)


def test_max_grad_norm_is_clipping_by_hand(mode):
    def clipped(accelerator, network, batch):
        straight(accelerator, network, batch)
        accelerator.clip_grad_norm_(network, 0.1)

    def body():
        by_option = train(Accelerator(max_grad_norm=0.1), loader_of(23, 3), make_optimizer=adam)
        return by_option, train(Accelerator(), loader_of(23, 3), clipped, make_optimizer=adam)

    for pair in mode.run(body):
        assert_same_bits(pair)


@pytest.mark.parametrize("pair", [THREADS_2, PROCESSES_2], ids=str)
def test_an_overflow_on_one_rank_skips_step_and_scheduler_on_all(pair):
    def body():
        accelerator = Accelerator(mixed_precision="fp16")
        network = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        scheduler = LambdaLR(optimizer, lambda step: 0.5**step)
        network, optimizer, scheduler = accelerator.prepare(network, optimizer, scheduler)
        seen = []
        for number in range(4):
            bad = number == 1 and accelerator.world.rank == 1
            optimizer.zero_grad()
            before = network.weight.detach().clone()
            loss = 0.1 * network(torch.ones(2, 4)).mean()
            accelerator.backward(loss * torch.inf if bad else loss)
            optimizer.step()
            scheduler.step()
            has_moved = not torch.equal(before, network.weight)
            seen.append((has_moved, accelerator.scaler.get_scale(), scheduler.last_epoch))
        return seen, network.weight.detach()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", ResourceWarning)  # of what tests before have left, whenever it is collected
        (first, weight), (second, other) = pair.run(body)
    assert first == second == [(True, 65536, 1), (False, 65536, 1), (True, 32768, 2), (True, 32768, 3)]
    assert torch.equal(weight, other)


@pytest.mark.parametrize(
    ("mode", "precision"), [(SOLO, "bf16"), (THREADS_3, "fp16"), (PROCESSES_2, "bf16"), (PROCESSES_2, "fp16")], ids=str
)
def test_reduced_precision_is_close_and_forward_passes_run_in_it(mode, precision):
    small = 0.01  # or the first scale overflows

    def body():
        accelerator = Accelerator(mixed_precision=precision, gradient_accumulation_steps=2, max_grad_norm=0.5 * small)
        network = model().float()
        kinds = []
        network[0].register_forward_hook(lambda module, inputs, output: kinds.append(output.dtype))
        network, optimizer, loader = accelerator.prepare(
            network, torch.optim.SGD(network.parameters(), lr=0.1 / small), loader_of(23, 3)
        )
        for inputs, targets, _ in loader:
            optimizer.zero_grad()
            accelerator.backward(small * F.mse_loss(network(inputs.float()), targets.float()))
            optimizer.step()
        with accelerator.autocast():
            kinds.append((torch.ones(2, 2) @ torch.ones(2, 2)).dtype)
        return network.state_dict(), set(kinds)

    network = model().float()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1 / small)
    tensors = [each.float() for each in data(23).tensors]
    step = 6 * mode.ranks
    for start in range(0, 23, step):
        optimizer.zero_grad()
        (small * F.mse_loss(network(tensors[0][start : start + step]), tensors[1][start : start + step])).backward()
        nn.utils.clip_grad_norm_(network.parameters(), 0.5 * small)
        optimizer.step()
    for state, kinds in mode.run(body):
        assert kinds == {{"bf16": torch.bfloat16, "fp16": torch.float16}[precision]}
        torch.testing.assert_close(state, network.state_dict(), rtol=0.02, atol=0.01)


def test_two_optimizers_share_the_scaler_and_may_skip_a_clipped_batch():
    accelerator = Accelerator(mixed_precision="fp16")
    first, second = nn.Linear(3, 3), nn.Linear(3, 1)
    first, second, of_first, of_second, loader = accelerator.prepare(
        first, second, *[torch.optim.SGD(each.parameters(), lr=0.1) for each in (first, second)], [loader_of(24, 4)]
    )
    for number, (inputs, _, _) in enumerate(loader[0]):
        of_first.zero_grad()
        of_second.zero_grad()
        accelerator.backward(0.01 * second(first(inputs[:, :3].float())).mean())
        accelerator.clip_grad_norm_([*first.parameters(), *second.parameters()], 1.0)
        if number == 2:
            continue
        of_second.step()
        of_first.step()
    assert accelerator.scaler.get_scale() == 65536


def test_under_fp16_plain_backward_is_refused_with_or_without_a_loader():
    accelerator, network = Accelerator(mixed_precision="fp16"), model().float()
    network, optimizer, loader = accelerator.prepare(
        network, torch.optim.SGD(network.parameters(), lr=0.1), loader_of(8, 2)
    )

    def step(inputs, backward):
        optimizer.zero_grad()
        backward(network(inputs.float()).sum())
        optimizer.step()

    for number, (inputs, _, _) in enumerate(loader):
        if number % 2:
            with pytest.raises(RuntimeError, match=r"made by loss.backward\(\); call accelerator.backward\(loss\)"):
                step(inputs, torch.Tensor.backward)
        else:
            step(inputs, accelerator.backward)
    step(torch.ones(1, 5), accelerator.backward)
    with pytest.raises(RuntimeError, match=r"made by loss.backward\(\)"):
        step(torch.ones(1, 5), torch.Tensor.backward)
    step(torch.ones(1, 5), accelerator.backward)


def test_a_block_without_autocast_computes_in_full_precision() -> None:
    accelerator = Accelerator(mixed_precision="bf16")
    x = torch.ones(2, 2, device=accelerator.device)
    with accelerator.autocast():
        with accelerator.autocast(enabled=False):
            assert (x @ x).dtype == torch.float32
        assert (x @ x).dtype == torch.bfloat16
