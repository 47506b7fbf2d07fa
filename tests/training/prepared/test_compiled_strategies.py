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


@pytest.mark.parametrize(
    ("mode", "strategy", "hows"),
    [
        pytest.param(PROCESSES_2, "fsdp", ["given"], id="a compiled model"),
        *(
            pytest.param(mode, strategy, HOWS, id=f"{strategy}, {mode}", marks=pytest.mark.slow)
            for mode, strategy in [(THREADS_2, "ddp"), (PROCESSES_2, "zero1"), (PROCESSES_2, "fsdp")]
        ),
    ],
)
def test_a_compiled_model_trains_as_in_eager_mode(mode: Mode, strategy: str, hows: list[str]) -> None:
    def body() -> None:
        for every in (2,) if len(hows) > 1 else (1,):
            plain = trained(strategy, "eager", every)
            for how in hows:
                for one, other in zip(trained(strategy, how, every), plain, strict=True):
                    torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)

    mode.run(body)
