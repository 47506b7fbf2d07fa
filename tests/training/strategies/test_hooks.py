"""Communication hooks against the gradient of the whole batch on one device, in float64 and under uneven shares."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from modes import PROCESSES_2, Mode, each_of
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from twin import assert_same_bits

from unisono import Accelerator
from unisono.training.strategies.ddp import attach_hook, power_sgd
from unisono.world import current_world

PROCESSES_3 = Mode("processes", 3)
WIDTH = 24
CUTS = {2: [0, 1, 11], 3: [0, 4, 4, 11]}  # of 11 samples; one of three ranks has none
TAKES_COMPLEX = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 11)
DTYPES = (torch.float64, torch.complex128) if TAKES_COMPLEX else (torch.float64,)
SEVERAL_BUCKETS = 0.002  # MB, less than a layer

Gradients = list[torch.Tensor]


mode = each_of([PROCESSES_3])


def network(dtype: torch.dtype = torch.float64) -> nn.Module:
    numbers = torch.Generator().manual_seed(0)
    made = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, dtype=dtype) for _ in range(3)])
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=numbers, dtype=dtype) / 5)
    return made


def batch(dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(11, WIDTH, generator=torch.Generator().manual_seed(1), dtype=dtype)


def loss_of(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """The mean over the samples; 0 with a gradient of 0 where there are none."""
    outputs = model(inputs).tanh().abs()
    return F.mse_loss(outputs, torch.ones_like(outputs)) if len(inputs) else outputs.sum()


def own_part(inputs: torch.Tensor) -> torch.Tensor:
    world = current_world()
    cuts = CUTS[world.world_size]
    return inputs[cuts[world.rank] : cuts[world.rank + 1]]


def own_share() -> float:
    return len(own_part(batch())) / len(batch())


def gradients_of(model: nn.Module) -> Gradients:
    return [parameter.grad.clone() for parameter in model.parameters()]


def plain_gradients(dtype: torch.dtype = torch.float64) -> Gradients:
    """The oracle: the whole batch on one device."""
    model = network(dtype)
    loss_of(model, batch(dtype)).backward()
    return gradients_of(model)


def hooked(
    hook: Any, scale: Callable[[], float] = own_share, dtype: torch.dtype = torch.float64
) -> DistributedDataParallel:
    ddp = DistributedDataParallel(network(dtype), bucket_cap_mb=SEVERAL_BUCKETS)
    attach_hook(ddp, hook, scale)
    return ddp


def test_gradients_are_those_of_the_whole_batch_however_it_was_dealt(mode):
    def body(dtype: torch.dtype) -> tuple[list[Gradients], int]:
        asked = []

        def scale() -> float:
            asked.append(True)
            return own_share()

        ddp = hooked(None, scale, dtype)
        found = []
        for _ in range(3):  # DDP builds its buckets again after the first
            ddp.zero_grad()
            loss_of(ddp, own_part(batch(dtype))).backward()
            found.append(gradients_of(ddp))
        return found, len(asked)

    for dtype, *ranks in zip(DTYPES, *mode.run(lambda: [body(each) for each in DTYPES]), strict=True):
        assert_same_bits([found for found, _ in ranks])
        for step in ranks[0][0]:
            torch.testing.assert_close(step, plain_gradients(dtype), rtol=1e-12, atol=1e-14)
        assert [asked for _, asked in ranks] == [3] * mode.ranks, "once a backward pass, not once a bucket"


@pytest.mark.skipif(TAKES_COMPLEX, reason="this torch takes complex gradients")
def test_complex_gradients_are_refused_where_torch_reduces_them_wrongly():
    def body() -> None:
        ddp = hooked(None, dtype=torch.complex128)
        loss_of(ddp, own_part(batch(torch.complex128))).backward()

    with pytest.raises(ValueError, match="reduces complex gradients wrongly"):
        PROCESSES_2.run(body)


def test_compressed_gradients_are_close_to_exact_and_equal_on_all_ranks(mode):
    def body() -> dict[tuple[str, torch.dtype], Gradients]:
        found = {}
        for name in ("fp16", "bf16"):
            for dtype in (*DTYPES, torch.float32):
                ddp = hooked(name, dtype=dtype)
                loss_of(ddp, own_part(batch(dtype))).backward()
                found[name, dtype] = gradients_of(ddp)
        return found

    ranks = mode.run(body)
    assert_same_bits(ranks)
    for (name, dtype), gradients in ranks[0].items():
        precision = {"fp16": 2**-10, "bf16": 2**-7}[name]
        largest = max(float(each.abs().max()) for each in plain_gradients(dtype))
        torch.testing.assert_close(
            gradients, plain_gradients(dtype), rtol=precision, atol=precision * largest * mode.ranks
        )
        assert not all(
            torch.allclose(own, exact, rtol=1e-5, atol=0)
            for own, exact in zip(gradients, plain_gradients(dtype), strict=True)
        ), f"{name} has sent {dtype} uncompressed"


def test_a_gradient_too_large_for_fp16_is_infinite_on_all_ranks():
    def body() -> bool:
        ddp = hooked("fp16", lambda: 1e9 * own_share())
        loss_of(ddp, own_part(batch())).backward()
        return any(bool(each.isinf().any()) for each in gradients_of(ddp))

    assert PROCESSES_2.run(body) == [True, True]


@pytest.mark.skipif(torch.cuda.is_available(), reason="beside a GPU torch's PowerSGD takes GPUs' gradients only")
def test_a_custom_hook_gets_weighted_gradients_like_torchs_powersgd(mode):
    def body() -> list[list[Gradients]]:
        runs = []
        for rank in (11, 1):  # 11 samples make gradients of rank 11 at most
            options = {"matrix_approximation_rank": rank, "start_powerSGD_iter": 2, "min_compression_rate": 0.1}
            ddp = hooked(power_sgd(**options))
            runs.append([])
            for _ in range(4):
                ddp.zero_grad()
                loss_of(ddp, own_part(batch())).backward()
                runs[-1].append(gradients_of(ddp))
        return runs

    ranks = mode.run(body)
    assert_same_bits(ranks)
    enough, too_low = ranks[0]
    for step in (*enough[:2], *too_low[:2]):
        torch.testing.assert_close(step, plain_gradients(), rtol=1e-12, atol=1e-14)
    for step in enough[2:]:
        torch.testing.assert_close(step, plain_gradients(), rtol=1e-6, atol=1e-8)
    for step in too_low[2:]:
        matrices = [each for each in step if each.ndim == 2]
        assert [int(torch.linalg.matrix_rank(each, rtol=1e-6)) for each in matrices] == [1, 1, 1]
        vectors = [each for each in step if each.ndim == 1]
        torch.testing.assert_close(
            vectors, [each for each in plain_gradients() if each.ndim == 1], rtol=1e-12, atol=1e-14
        )


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
