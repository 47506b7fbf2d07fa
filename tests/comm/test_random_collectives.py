"""Collectives of torch.distributed in shared memory give gloo's answers: random ones, of any type, shape and layout."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from modes import by_value

from unisono import spawn
from unisono.comm.shared_memory.process_group import SharedMemoryGroup

RANKS = 3
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
DTYPES += [torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool]
OPS = [dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX]
OPS += [dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR]
# The names of torch 2.13, and those before.
ALL_GATHER_TENSOR = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
REDUCE_SCATTER_TENSOR = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
TOLERANCE = {torch.bfloat16: 0.05, torch.float16: 5e-3, torch.float32: 1e-5, torch.float64: 1e-12}


def make(shape: list[int], dtype: torch.dtype, layout: str, seed: int) -> torch.Tensor:
    """A tensor of that shape, whose elements lie in memory as the layout says."""
    generator = torch.Generator().manual_seed(seed)
    count = math.prod(shape)
    few = [min(count, 997)]  # repeated: to draw all of a long tensor would be most of the time; no two parts are alike
    found = torch.randint(0, 4, few, generator=generator)
    found = (found + torch.rand(few, generator=generator) * dtype.is_floating_point).to(dtype)
    made = found.repeat(count // 997 + 1)[:count].reshape(shape)
    if layout == "every second" and shape:
        return torch.stack([made, made], dim=-1).flatten(-2)[..., ::2]
    return made.T.contiguous().T if layout == "transposed" and made.ndim == 2 else made


def draw(seed: int) -> tuple[str, Callable[[int], Callable[..., list[torch.Tensor]]]]:
    """A random collective, in words; and by rank, what calls it in a group, and returns what it has written."""
    chance = random.Random(seed)
    dtype, op, root = chance.choice(DTYPES), chance.choice(OPS), chance.randrange(RANKS)
    shape = [chance.choice([0, 1, 2, 3, 5, 8]) for _ in range(chance.randrange(4))]
    if chance.random() < 0.05:
        shape = [300_001]
    layout, waits = chance.choice(["dense", "dense", "every second", "transposed"]), chance.random() < 0.3
    name = chance.choice(
        ["all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor",
         "reduce_scatter", "gather", "scatter", "all_to_all_single"]
    )  # fmt: skip
    if name in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"):
        layout, shape = "dense", shape or [2]  # torch wants these to be dense

    def by_rank(rank: int) -> Callable[[dist.ProcessGroup], list[torch.Tensor]]:
        def call(group: dist.ProcessGroup, layout: str = layout) -> list[torch.Tensor]:
            own = make(shape, dtype, layout, 100 * seed + rank)
            parts = [make(shape, dtype, layout, 100 * seed + 10 * rank + each) for each in range(RANKS)]
            whole = torch.cat(parts) if shape else own
            common = {"group": group, "async_op": waits}
            received, is_root = torch.empty_like(whole), rank == root
            calls = {  # and what each has written
                "all_reduce": (lambda: dist.all_reduce(own, op, **common), [own]),
                "broadcast": (lambda: dist.broadcast(own, root, **common), [own]),
                "reduce": (lambda: dist.reduce(own, root, op, **common), [own] * is_root),
                "all_gather": (lambda: dist.all_gather(parts, own, **common), parts),
                "all_gather_into_tensor": (lambda: ALL_GATHER_TENSOR(whole, own, **common), [whole]),
                "reduce_scatter_tensor": (lambda: REDUCE_SCATTER_TENSOR(own, whole, op, **common), [own]),
                "reduce_scatter": (lambda: dist.reduce_scatter(own, parts, op, **common), [own]),
                "gather": (lambda: dist.gather(own, parts if is_root else None, root, **common), parts * is_root),
                "scatter": (lambda: dist.scatter(own, parts if is_root else None, root, **common), [own]),
                "all_to_all_single": (lambda: dist.all_to_all_single(received, whole, **common), [received]),
            }
            work, written = calls[name][0](), calls[name][1]
            if waits:
                work.wait()
            return written

        return call

    words = f"{name}, {dtype}, {shape}, {layout}, {op}, root {root}{', async' if waits else ''}"
    return words, by_rank


def compare(first: int, count: int) -> tuple[int, list[str]]:
    """How many collectives gloo has answered, and which of them were answered otherwise, or not, in shared memory."""
    rank, gloo, shared = dist.get_rank(), dist.new_group(backend="gloo"), dist.group.WORLD
    assert isinstance(shared, SharedMemoryGroup)
    answered, wrong = 0, []
    for seed in range(first, first + count):
        words, by_rank = draw(seed)
        try:
            expected = by_rank(rank)(gloo, "dense")  # which takes tensors with gaps for dense ones
        except (RuntimeError, ValueError):
            continue  # gloo does not have it: a type, or an operation
        try:
            found = by_rank(rank)(shared)
        except (RuntimeError, ValueError, NotImplementedError) as error:
            wrong.append(f"{seed}: {words}: {error}")
            continue
        answered += 1
        tolerance = TOLERANCE.get(expected[0].dtype, 0) if expected else 0
        for one, other in zip(expected, found, strict=True):
            if not torch.allclose(one.double(), other.double(), rtol=tolerance, atol=tolerance):
                wrong.append(f"{seed}: {words}: {one} and {other}")
    return answered, wrong


def test_random_collectives_are_answered_as_gloo_answers_them() -> None:
    first, count = random.randrange(10**6), 200
    with by_value(compare):
        found = spawn(
            lambda _: compare(first, count), nprocs=RANKS, cores=1, backend="cpu", timeout=timedelta(seconds=60)
        )
    assert [wrong for _, wrong in found] == [[]] * RANKS
    assert min(answered for answered, _ in found) > count / 2
