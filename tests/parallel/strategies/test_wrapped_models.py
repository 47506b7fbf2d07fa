"""Models that torch has wrapped before: those that reduce by themselves are refused, compiled ones are trained."""

from __future__ import annotations

import warnings

import pytest
import torch
from modes import PROCESSES_2, told
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from twin import State, model, sgd

from unisono import Accelerator

STRATEGIES = pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp"])


@STRATEGIES
def test_who_reduces_already_is_refused_and_the_model_inside_is_asked_for(strategy: str) -> None:
    def body() -> list[str]:
        wrapped = DistributedDataParallel(model())
        accelerator = Accelerator(strategy=strategy)
        made = wrapped, nn.Sequential(nn.Tanh(), wrapped), nn.DataParallel(model())
        return [told(lambda m=m: accelerator.prepare(sgd(m.parameters()), m), ValueError) for m in made]

    for itself, part, threaded in PROCESSES_2.run(body):
        assert "it is wrapped or sharded already (DistributedDataParallel), and so reduces gradients" in itself
        assert "the Sequential cannot be prepared: its part '1' is wrapped or sharded already" in part
        assert "it is wrapped or sharded already (DataParallel)" in threaded
        assert all("pass the model inside it (its .module)" in each for each in (itself, part, threaded))


@STRATEGIES
def test_what_torch_has_sharded_is_refused_and_the_plain_model_is_asked_for(strategy: str) -> None:
    def body() -> list[str]:
        from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

        first, second = model(), model()
        fully_shard(first)
        fully_shard(second[0])
        third = FullyShardedDataParallel(model(), device_id=torch.device("cpu"))
        accelerator = Accelerator(strategy=strategy)
        return [told(lambda each=each: accelerator.prepare(each), ValueError) for each in (first, second, third)]

    for itself, part, older in PROCESSES_2.run(body):
        assert "it is wrapped or sharded already (FSDP" in itself
        assert "its part '0' is wrapped or sharded already (FSDP" in part
        assert "it is wrapped or sharded already (FullyShardedDataParallel)" in older
        assert all(
            "pass the model inside it (its .module), or as it was before sharding" in each
            for each in (itself, part, older)
        )


class Viewing(nn.Linear):
    """Returns a view."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs).view(-1)


def test_a_view_that_a_model_returns_may_be_changed_in_place_and_nothing_warns_of_it() -> None:
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
