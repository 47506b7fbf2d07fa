"""A compiled model trains under each strategy as the same model does that is not compiled."""

from __future__ import annotations

import pytest
import torch
from modes import PROCESSES_2, THREADS_2, Mode
from torch import nn
from torch.nn import functional as F
from twin import data, seeded, sgd

from unisono import Accelerator

HOWS = ["option", "given", "method"]


def trained(strategy: str, how: str, every: int) -> list[torch.Tensor]:
    """The losses, and outputs in evaluation, of a loop with a new shape in each second batch."""
    torch.compiler.reset()
    options = {"compile": {"backend": "aot_eager"}} if how == "option" else {}
    accelerator = Accelerator(strategy=strategy, gradient_accumulation_steps=every, **options)
    network: nn.Module = seeded(nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2)).double())
    if how == "given":
        network = torch.compile(network, backend="aot_eager")
    elif how == "method":
        network.compile(backend="aot_eager")
    network, optimizer = accelerator.prepare(network, sgd(network.parameters()))
    inputs, targets, _ = data(24).tensors
    seen = []
    for number in range(4):
        rows = slice(6 * number, 6 * number + 4 + number % 2)
        with accelerator.accumulate():
            loss = F.mse_loss(network(inputs[rows]), targets[rows])
            accelerator.backward(loss, batch=())
            optimizer.step()
            # While gradients are held: dynamo looks at them for each graph.
            network.eval()
            with torch.no_grad():
                seen += [loss.detach(), network(inputs[:3]), network(inputs[: 7 + number])]
            network.train()
            optimizer.zero_grad()
    assert not any("_orig_mod" in name for name in accelerator.state_dict(network) or {})
    return seen


@pytest.mark.slow  # test_compiled_outside.py has the cheap ones
@pytest.mark.parametrize(
    ("mode", "strategy"), [(THREADS_2, "ddp"), (PROCESSES_2, "zero1"), (PROCESSES_2, "fsdp")], ids=str
)
def test_a_compiled_model_trains_as_in_eager_mode(mode: Mode, strategy: str) -> None:
    def body() -> None:
        plain = trained(strategy, "eager", 2)
        for how in HOWS:
            for one, other in zip(trained(strategy, how, 2), plain, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)

    mode.run(body)
