"""Models that torch has wrapped before: those that reduce by themselves are refused, compiled ones are trained."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from modes import PROCESSES_2, told
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from twin import State, model, sgd

from unisono import Accelerator


def wrapped_already() -> dict[str, nn.Module]:
    """By what is said of them."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    wrapped, sharded, in_part = DistributedDataParallel(model()), model(), model()
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(sharded, mesh=mesh)
    fully_shard(in_part[0], mesh=mesh)
    itself = "it is wrapped or sharded already"
    return {
        f"{itself} (DistributedDataParallel), and so reduces gradients": wrapped,
        "its part '1' is wrapped or sharded already (DistributedDataParallel)": nn.Sequential(nn.Tanh(), wrapped),
        f"{itself} (DataParallel)": nn.DataParallel(model()),
        f"{itself} (FSDP": sharded,
        "its part '0' is wrapped or sharded already (FSDP": in_part,
        f"{itself} (FullyShardedDataParallel)": FullyShardedDataParallel(model(), device_id=torch.device("cpu")),
    }


def test_a_wrapped_or_sharded_model_is_refused_asking_for_the_one_inside() -> None:
    def body(strategy: Any) -> dict[str, str]:
        accelerator = Accelerator(strategy=strategy)
        return {words: told(lambda m=m: accelerator.prepare(m), ValueError) for words, m in wrapped_already().items()}

    for own in PROCESSES_2.run(lambda: [body(each) for each in ("ddp", "zero1", "fsdp")]):
        for words, said in (pair for found in own for pair in found.items()):
            assert words in said
            assert "pass the model inside it (its .module)" in said


class Viewing(nn.Linear):
    """Returns a view."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs).view(-1)


def test_a_view_a_model_returns_can_be_changed_in_place_without_warning() -> None:
    def train(strategy: str) -> State:
        torch.manual_seed(0)
        network = Viewing(3, 2)
        accelerator = Accelerator(strategy=strategy)
        network, optimizer = accelerator.prepare(network, sgd(network.parameters()))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            outputs = network(torch.ones(4, 3, device=accelerator.device))
        outputs += 1
        outputs.square().mean().backward()
        optimizer.step()
        return accelerator.state_dict(network)

    sharded, whole = PROCESSES_2.run(lambda: [train(strategy) for strategy in ("fsdp", "ddp")])[0]
    torch.testing.assert_close(sharded, whole)
