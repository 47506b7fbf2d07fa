"""The facade: its arguments, and those of its methods that are one call into a wing."""

from __future__ import annotations

import math

import pytest
import torch
from modes import FAMILY, PROCESSES_2, SOLO, THREADS_2, THREADS_4, fitting
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from twin import Case, assert_all_are, loader_of, model, plain_run, sgd, train

from unisono import Accelerator, DeviceLoader, current_world

BOTH = pytest.mark.parametrize("mode", fitting(THREADS_2, PROCESSES_2), ids=str)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"mixed_precision": "fp8"}, ValueError, "mixed_precision='fp8' does not exist; choose one of no, bf16, fp16"),
        ({"gradient_accumulation_steps": 0}, ValueError, "gradient_accumulation_steps=0 is too small; pass an integer"),
        ({"gradient_accumulation_steps": 2.0}, TypeError, "steps=2.0 is of type float; pass an integer"),
        ({"max_grad_norm": 0}, ValueError, "max_grad_norm=0 is not above 0; pass a positive number"),
        ({"max_grad_norm": float("nan")}, ValueError, "max_grad_norm=nan"),
        *(
            ({name: "yes"}, TypeError, f"{name}='yes' is of type str; pass True or False")
            for name in ("cpu", "device_placement", "split_batches", "sync_batchnorm")
        ),
        ({"strategy": "dp"}, ValueError, "strategy='dp' does not exist; choose one of ddp,.* fsdp, spmd, zero1"),
        ({"strategy": 3}, TypeError, "3 is of type int; pass a name, or options such as unisono.strategies.DDP"),
        ({"fp16": True}, TypeError, "has no argument 'fp16'; pass mixed_precision='fp16'"),
        ({"project_dir": 3}, TypeError, "project_dir=3 is of type int; pass a path, or None"),
        ({"cpu": True, "device": "cpu"}, ValueError, "cpu=True and device='cpu' contradict each other"),
        ({"device": "toaster"}, ValueError, "device 'toaster' does not exist; there are .*cpu:0"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_out_of_range_arguments_are_errors_naming_value_rule_and_way_out(options, error, words):
    with pytest.raises(error, match=words):
        Accelerator(**options)


@pytest.mark.any_family
@pytest.mark.parametrize(
    "options", [{}, {"cpu": FAMILY == "cpu"}, {"device": FAMILY}, {"device": torch.device(FAMILY)}]
)
@pytest.mark.parametrize("mode", fitting(SOLO, THREADS_2, PROCESSES_2), ids=str)
def test_a_device_without_a_number_is_each_ranks_own(mode, options):
    def body():
        accelerator = Accelerator(**options)
        return accelerator.device == current_world().device

    assert mode.run(body) == [True] * mode.ranks


@pytest.mark.any_family
def test_another_ranks_device_is_an_error():
    def body():
        first, second = f"{FAMILY}:0", f"{FAMILY}:1"
        if current_world().rank == 0:
            assert Accelerator(device=first).device == torch.device(first)
            return
        with pytest.raises(ValueError, match=f"device='{first}', but this is rank 1 of 2, whose device is {second}"):
            Accelerator(device=first)

    THREADS_2.run(body)


def test_metrics_are_gathered_of_outputs_that_have_a_gradient():
    outputs = nn.Parameter(torch.arange(3.0)) * 2
    found = Accelerator().gather_for_metrics({"outputs": outputs}, valid_samples=2)["outputs"]
    assert (found.tolist(), found.requires_grad) == ([0, 2], False)


def test_only_rank_zero_prints(capsys):
    THREADS_4.run(lambda: Accelerator().print("once", "only", sep="-"))
    assert capsys.readouterr().out == "once-only\n"


@pytest.mark.any_family
@pytest.mark.parametrize("mode", fitting(SOLO, THREADS_2, PROCESSES_2), ids=str)
def test_a_global_split_steps_on_the_loaders_own_batches(mode):
    def body():
        return train(Accelerator(gradient_accumulation_steps=2), DeviceLoader(loader_of(23, 5), split="global"))

    assert_all_are(mode.run(body), plain_run(Case(23, 5, 2, epochs=1), 1, sgd))


@pytest.mark.any_family
def test_two_accelerators_accumulate_each_for_itself():
    def body():
        often, rarely = Accelerator(), Accelerator(gradient_accumulation_steps=2)
        first, second = model(), model()
        first, of_first, loader = often.prepare(first, sgd(first.parameters()), loader_of(23, 3))
        second, of_second = rarely.prepare(second, sgd(second.parameters()))
        for _ in range(2):
            for inputs, targets, _ in loader:
                for accelerator, network, optimizer in ((often, first, of_first), (rarely, second, of_second)):
                    optimizer.zero_grad()
                    accelerator.backward(F.mse_loss(network(inputs), targets))
                    optimizer.step()
        return first.state_dict(), second.state_dict()

    for mode in fitting(THREADS_2, PROCESSES_2):
        for every, states in enumerate(zip(*mode.run(body), strict=True), 1):
            assert_all_are(states, plain_run(Case(23, 3, every), 2, sgd))


@BOTH
def test_weights_and_order_follow_the_seed_while_ranks_draw_differently(mode):
    def body():
        accelerator = Accelerator(seed=5)
        loader = DataLoader(torch.arange(12), batch_size=12 // accelerator.world.world_size, shuffle=True)
        network, loader = accelerator.prepare(nn.Linear(2, 2), loader)
        drawn = torch.rand(1).item()
        (batch,) = loader
        return network.weight.sum().item(), drawn, accelerator.gather(batch).tolist()

    before = torch.default_generator.get_state()
    first, second = mode.run(body)
    assert torch.equal(torch.default_generator.get_state(), before)
    with torch.random.fork_rng():
        ((weight, _, order),) = SOLO.run(body)
    assert first[0] == second[0] == weight
    assert first[1] != second[1]
    assert first[2] == second[2] == order
    assert sorted(order) == list(range(12))


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_a_sum_loss_is_named_where_the_split_would_change_its_gradient(caplog, reduction: str) -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = accelerator.prepare(nn.Linear(2, 1))
    accelerator.backward(nn.functional.mse_loss(model(torch.ones(3, 2)), torch.ones(3, 1), reduction=reduction))
    assert ("computed with reduction='sum'" in caplog.text) == (reduction == "sum")


@pytest.mark.parametrize(
    ("mode", "strategy"), [(SOLO, "ddp"), (THREADS_2, "ddp"), (PROCESSES_2, "ddp"), (PROCESSES_2, "fsdp")], ids=str
)
def test_clipping_takes_the_arguments_of_torchs_functions(mode, strategy):
    def body():
        accelerator, network = Accelerator(strategy=strategy), torch.nn.Linear(4, 4)
        network, optimizer = accelerator.prepare(network, torch.optim.SGD(network.parameters(), lr=0.1))
        for factor in (1.0, math.inf):
            optimizer.zero_grad()
            (network(torch.ones(1, 4)).sum() * factor).backward()
            if factor == 1:
                norm = accelerator.clip_grad_norm_(network, 0.5, 2.0, True, False)
                accelerator.clip_grad_value_(network, 0.1, foreach=True)
        with pytest.raises(RuntimeError, match=r"total norm of order 2\.0"):
            accelerator.clip_grad_norm_(network.parameters(), 0.5, error_if_nonfinite=True)
        accelerator.clip_grad_norm_(network.parameters(), 0.5)
        return float(norm)

    assert mode.run(body) == [pytest.approx(math.sqrt(20), rel=1e-6)] * mode.ranks
