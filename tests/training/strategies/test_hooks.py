"""Communication hooks against the gradient of the whole batch on one device, in float64 and under uneven shares."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from modes import PROCESSES_2, Mode
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader
from twin import assert_same_bits

from unisono import Accelerator
from unisono.strategies import DDP
from unisono.training.strategies.ddp import power_sgd

PROCESSES_3 = Mode("processes", 3)
WIDTH = 24
TAKES_COMPLEX = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 11)
DTYPES = (torch.float64, torch.complex128) if TAKES_COMPLEX else (torch.float64,)

Gradients = list[torch.Tensor]


def drawn(*shape: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def gradients(accelerator: Any, dtype: torch.dtype, steps: int = 1, factor: float = 1.0) -> list[Gradients]:
    """Of so many steps on the same 11 samples, without a change; plainly without an Accelerator."""
    network = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, dtype=dtype) for _ in range(3)])
    with torch.no_grad():
        for place, each in enumerate(network.parameters()):
            each.copy_(drawn(*each.shape, seed=place, dtype=dtype) / 5)
    loader: Any = DataLoader(drawn(11, WIDTH, seed=99, dtype=dtype), 11)
    if accelerator is not None:
        network, loader = accelerator.prepare(network, DataLoader(loader.dataset, 4))
    found: list[Gradients] = []
    for _ in range(steps):  # DDP builds its buckets again after the first
        for inputs in loader:
            outputs = network(inputs).tanh().abs()
            (factor * F.mse_loss(outputs, torch.ones_like(outputs))).backward()
            found.append([each.grad.clone() for each in network.parameters()])
            network.zero_grad()
    return found


def hooked(hook: Any, *given: Any, **options: Any) -> list[Gradients]:
    several_buckets = 0.002  # MB, less than a layer
    return gradients(Accelerator(strategy=DDP(comm_hook=hook, bucket_cap_mb=several_buckets)), *given, **options)


def test_gradients_are_those_of_the_whole_batch_and_close_if_compressed() -> None:
    kinds = [(hook, dtype) for dtype in (*DTYPES, torch.float32) for hook in (None, "fp16", "bf16")]
    ranks = PROCESSES_3.run(lambda: [hooked(*kind, steps=2) for kind in kinds])
    assert_same_bits(ranks)
    for (hook, dtype), steps in zip(kinds, ranks[0], strict=True):
        print(hook, dtype)
        (expected,) = gradients(None, dtype)
        precision = {"fp16": 2**-10, "bf16": 2**-7, None: 1e-12 if dtype != torch.float32 else 1e-5}[hook]
        largest = max(float(each.abs().max()) for each in expected)
        for step in steps:
            torch.testing.assert_close(step, expected, rtol=precision, atol=precision * largest * 3)
        pairs = zip(steps[0], expected, strict=True)
        is_close = all(torch.allclose(own, exact, rtol=1e-5, atol=1e-7 * largest) for own, exact in pairs)
        assert is_close == (hook is None), f"{hook} has sent {dtype} uncompressed"


@pytest.mark.skipif(TAKES_COMPLEX, reason="this torch takes complex gradients")
def test_complex_gradients_are_refused_where_torch_reduces_them_wrongly():
    with pytest.raises(ValueError, match="reduces complex gradients wrongly"):
        PROCESSES_2.run(lambda: hooked(None, torch.complex128))


def test_a_gradient_too_large_for_fp16_is_infinite_on_all_ranks():
    def body() -> bool:
        return any(bool(each.isinf().any()) for each in hooked("fp16", torch.float64, factor=1e9)[0])

    assert PROCESSES_2.run(body) == [True, True]


@pytest.mark.skipif(torch.cuda.is_available(), reason="beside a GPU torch's PowerSGD takes GPUs' gradients only")
def test_a_custom_hook_gets_weighted_gradients_like_torchs_powersgd():
    def body() -> list[list[Gradients]]:
        return [
            hooked(
                power_sgd(matrix_approximation_rank=rank, start_powerSGD_iter=2, min_compression_rate=0.1),
                torch.float64,
                steps=4,
            )
            for rank in (11, 1)  # 11 samples make gradients of rank 11 at most
        ]

    ranks, (expected,) = PROCESSES_3.run(body), gradients(None, torch.float64)
    assert_same_bits(ranks)
    enough, too_low = ranks[0]
    for step in (*enough[:2], *too_low[:2]):
        torch.testing.assert_close(step, expected, rtol=1e-12, atol=1e-14)
    for step in enough[2:]:
        torch.testing.assert_close(step, expected, rtol=1e-6, atol=1e-8)
    for step in too_low[2:]:
        assert [int(torch.linalg.matrix_rank(each, rtol=1e-6)) for each in step if each.ndim == 2] == [1, 1, 1]
        vectors = [[each for each in one if each.ndim == 1] for one in (step, expected)]
        torch.testing.assert_close(*vectors, rtol=1e-12, atol=1e-14)


class Multiplied(TorchDispatchMode):
    """Counts elements that are multiplied or divided, in C++, too."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__.strip("_") in ("mul", "div"):
            self.elements += result.numel()
        return result


def test_no_gradient_is_multiplied_that_plain_ddp_would_not_multiply() -> None:
    def body() -> list[int]:
        counts = []
        for prepare in (DistributedDataParallel, Accelerator(strategy="ddp").prepare):
            network: Any = prepare(nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 2)))
            for _ in range(3):
                loss = network(torch.ones(2, 5)).sum()
                with Multiplied() as multiplied:
                    loss.backward()
            counts.append(multiplied.elements)
        return counts

    for plain, ours in PROCESSES_2.run(body):
        assert ours <= plain
        assert plain == 58  # each gradient, once: what is counted is there
