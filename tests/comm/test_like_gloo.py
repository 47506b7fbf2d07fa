"""The group in shared memory gives what gloo gives, for each form of each call: values, futures, kinds of errors.

The forms that torch.distributed's own functions use are those of `test_random_collectives.py`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from modes import by_value
from torch.distributed import distributed_c10d as c10d

from unisono import spawn
from unisono.comm.shared_memory import futex

pytestmark = pytest.mark.skipif(not futex.SUPPORTED, reason="ranks share no memory here")

OPS = ["SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"]
DTYPES = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16]
DTYPES += [torch.float32, torch.float64, torch.complex64, torch.complex128, torch.uint16, torch.float8_e4m3fn]
LARGE = 300_001  # of several blocks

Call = Callable[[Any], Any]  # of a group; returns work, or work and what it has written


def options(kind: str, **values: Any) -> Any:
    made = getattr(c10d, f"{kind}Options")()
    for name, value in values.items():
        setattr(made, name, value)
    return made


def own(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.arange(torch.Size(shape).numel()).view(shape) + 10 * rank + 1).to(dtype)


def alike(rank: int, count: int, *shape: int) -> list[torch.Tensor]:
    return [own(rank + 5 * each, *shape) for each in range(count)]


def forms(rank: int, size: int) -> dict[str, Call]:
    """Each with new tensors."""

    def x(*shape: int) -> torch.Tensor:
        return own(rank, *(shape or (3,)))

    def written(call: Callable[..., Any], *tensors: Any) -> tuple[Any, Any]:
        return call(*tensors), tensors[0]

    def zeros(*shape: int) -> list[torch.Tensor]:
        return [torch.zeros(shape) for _ in range(size)]

    biggest, root = dist.ReduceOp.MAX, size - 1
    at_root = rank == root
    return {
        "allreduce(x)": lambda g: written(g.allreduce, x()),
        "allreduce(x, op)": lambda g: written(lambda t: g.allreduce(t, biggest), x()),
        "allreduce(x, op=)": lambda g: written(lambda t: g.allreduce(tensor=t, op=biggest), x()),
        "allreduce(x, timeout=)": lambda g: written(lambda t: g.allreduce(t, timeout=timedelta(seconds=9)), x()),
        "allreduce([x])": lambda g: written(g.allreduce, [x()]),
        "allreduce([x], op)": lambda g: written(lambda t: g.allreduce(t, biggest), [x()]),
        "allreduce(tensors=, opts=)": lambda g: written(
            lambda t: g.allreduce(tensors=t, opts=options("Allreduce", reduceOp=biggest)), [x()]
        ),
        "allreduce([a, b])": lambda g: written(g.allreduce, alike(rank, 2, 3)),
        "allreduce([a, b], op)": lambda g: written(lambda t: g.allreduce(t, biggest), alike(rank, 2, 3)),
        "allreduce([])": lambda g: g.allreduce([]),
        "allreduce of types": lambda g: g.allreduce([x(), x().double()]),
        "allreduce of sizes": lambda g: g.allreduce([x(), x(2)]),
        "allreduce of nothing": lambda g: written(g.allreduce, x(0)),
        "allreduce of a leaf": lambda g: written(g.allreduce, x().requires_grad_()),
        "allreduce of a scalar": lambda g: written(g.allreduce, torch.tensor(rank + 1.0)),
        "allreduce of sparse": lambda g: written(g.allreduce, x().to_sparse()),
        "allreduce of rows": lambda g: written(
            g.allreduce, torch.sparse_coo_tensor([[rank] * rank], torch.ones(rank, 2), (3, 2))
        ),
        "maximum of sparse": lambda g: g.allreduce(x().to_sparse(), biggest),
        "allreduce of csr": lambda g: g.allreduce(x(2, 2).to_sparse_csr()),
        "premultiplied": lambda g: g.allreduce(x(), dist._make_nccl_premul_sum(2.0)),
        "allreduce_coalesced": lambda g: written(g.allreduce_coalesced, [x(2, 2), x(), x(0)]),
        "allreduce_coalesced, opts": lambda g: written(
            lambda t: g.allreduce_coalesced(t, options("AllreduceCoalesced", reduceOp=biggest)), [x(2, 2), x()]
        ),
        "one tensor twice": lambda g: written(lambda t: g.allreduce_coalesced([t, t]), x()),
        "views that overlap": lambda g: written(lambda t: g.allreduce_coalesced([t[:4], t[2:]]), x(6)),
        "coalesced types": lambda g: g.allreduce_coalesced([x(), x().double()]),
        "coalesced sparse": lambda g: g.allreduce_coalesced([x().to_sparse()]),
        "nothing coalesced": lambda g: g.allreduce_coalesced([]),
        "broadcast(x, root=)": lambda g: written(lambda t: g.broadcast(t, root=root), x()),
        "broadcast(x, root)": lambda g: written(lambda t: g.broadcast(t, root), x()),
        "broadcast([a, b])": lambda g: written(
            lambda t: g.broadcast(t, options("Broadcast", rootRank=root, rootTensor=1)), alike(rank, 2, 3)
        ),
        "broadcast of sparse": lambda g: g.broadcast(x().to_sparse(), 0),
        "no such root": lambda g: g.broadcast(x(), size),
        "a negative root": lambda g: g.broadcast(x(), -1),
        "no such root tensor": lambda g: g.broadcast([x()], options("Broadcast", rootTensor=1)),
        "reduce(x, root=)": lambda g: written(lambda t: g.reduce(t, root=root), x()),
        "reduce(x, root, op)": lambda g: written(lambda t: g.reduce(t, root, biggest), x()),
        "reduce of no such root": lambda g: g.reduce(x(), root=size),
        "allgather(list, x)": lambda g: written(lambda t: g.allgather(t, x()), zeros(3)),
        "allgather(output_tensors=)": lambda g: written(
            lambda t: g.allgather(output_tensors=t, input_tensor=x()), zeros(3)
        ),
        "allgather of two": lambda g: written(
            lambda t: g.allgather(t, alike(rank, 2, 3)), [alike(9, 2 * size, 3), alike(9, 2 * size, 3)]
        ),
        "allgather of nothing": lambda g: g.allgather([], []),
        "too few outputs": lambda g: g.allgather([zeros(3)[1:]], [x()]),
        "outputs of sizes": lambda g: g.allgather([[*zeros(3)[1:], x(2)]], [x()]),
        "outputs of types": lambda g: g.allgather([zeros(3)], [x().double()]),
        "outputs of shapes": lambda g: g.allgather([zeros(3, 2)], [x(2, 3)]),
        "_allgather_base of rows": lambda g: written(lambda t: g._allgather_base(t, x(2, 2)), x(2 * size, 2)),
        "_allgather_base in place": lambda g: written(
            lambda t: g._allgather_base(t, t[LARGE * rank : LARGE * (rank + 1)]), x(LARGE * size)
        ),
        "_allgather_base of a size": lambda g: g._allgather_base(x(3 * size + 1), x()),
        "_allgather_base of a type": lambda g: g._allgather_base(x(3 * size).long(), x()),
        "into its input": lambda g: written(lambda t: g.allgather([t], [t[-1]]), alike(rank, size, LARGE)),
        "allgather_coalesced": lambda g: written(
            lambda t: g.allgather_coalesced(t, [x(), x(2)]), [[torch.zeros(3), torch.zeros(2)] for _ in range(size)]
        ),
        "allgather_coalesced of lists": lambda g: g.allgather_coalesced([zeros(3)], [x()]),
        "gather(list, x, root)": lambda g: written(lambda t: g.gather(t, x(), root), zeros(3) if at_root else []),
        "gather to no root": lambda g: g.gather([], x(), size),
        "scatter(x, list, root)": lambda g: written(
            lambda t: g.scatter(t, alike(rank, size, 3) if at_root else [], root), x()
        ),
        "reduce_scatter(x, list)": lambda g: written(lambda t: g.reduce_scatter(t, alike(rank, size, 3)), x()),
        "reduce_scatter(x, list, op)": lambda g: written(
            lambda t: g.reduce_scatter(t, alike(rank, size, 3), biggest), x()
        ),
        "reduce_scatter of sizes": lambda g: g.reduce_scatter([x()], [zeros(2)]),
        "reduce_scatter of a number": lambda g: g.reduce_scatter([x()], [[*zeros(3), x()]]),
        "reduce_scatter of types": lambda g: g.reduce_scatter([x().long()], [zeros(3)]),
        "into a part": lambda g: written(lambda t: g.reduce_scatter([t[rank]], [t]), alike(rank, size, LARGE)),
        "_reduce_scatter_base in place": lambda g: written(
            lambda t: g._reduce_scatter_base(t[2 * rank : 2 * rank + 2], t), x(2 * size)
        ),
        "_reduce_scatter_base of a size": lambda g: g._reduce_scatter_base(x(), x(3 * size + 1)),
        "_reduce_scatter_base of a type": lambda g: g._reduce_scatter_base(x().long(), x(3 * size)),
        "alltoall_base of splits": lambda g: written(
            lambda t: g.alltoall_base(t, x(2 * size), [2] * size, [2] * size), x(2 * size)
        ),
        "alltoall": lambda g: written(lambda t: g.alltoall(t, alike(rank, size, 3)), zeros(3)),
        "barrier()": lambda g: g.barrier(),
        "barrier(opts)": lambda g: g.barrier(options("Barrier")),
        "barrier(opts=)": lambda g: g.barrier(opts=options("Barrier")),
        "monitored_barrier()": lambda g: g.monitored_barrier(),
        "monitored_barrier of torch": lambda g: dist.monitored_barrier(g, timeout=timedelta(seconds=30)),
        "monitored_barrier of seconds": lambda g: dist.monitored_barrier(g, 30.0, wait_all_ranks=True),
        "its backend": lambda g: (
            g._get_backend(torch.device("cpu")).barrier(),
            torch.device("cpu") in g._device_types,
        ),
        "split_group": lambda g: dist.split_group(g, [list(range(size))]),
    }


def reductions(rank: int) -> dict[str, Call]:
    def call(g: Any, op: str, dtype: torch.dtype) -> Any:
        tensor = own(rank, 3, dtype=dtype)
        return g.allreduce(tensor, getattr(dist.ReduceOp, op)), tensor

    return {f"{op} of {dtype}": lambda g, op=op, dtype=dtype: call(g, op, dtype) for dtype in DTYPES for op in OPS}


def result_of(call: Call, group: Any) -> dict[str, Any]:
    """What a call gives: the tensors written, what its work gives, and its future, or the kind of its error."""
    try:
        work = call(group)
        work, written = work if isinstance(work, tuple) else (work, None)
        if not isinstance(work, dist.Work):
            return {"value": work, "written": written}
        found = {"wait": work.wait(), "completed": work.is_completed(), "written": written}
    except Exception as error:
        return {"error": error}
    for name, of in (("result", work.result), ("future", lambda: work.get_future().wait())):
        try:
            found[name] = of()
        except RuntimeError as error:
            found[name] = error
    return found


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        one, other = (each.to_dense() if each.is_sparse else each for each in (one, other))
        return one.dtype == other.dtype and one.shape == other.shape and torch.allclose(one, other, rtol=0.01)
    if isinstance(one, list):
        return isinstance(other, list) and len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def differences(expected: dict[str, Any], found: dict[str, Any]) -> str:
    if "error" in expected:
        is_like = isinstance(found.get("error", expected["error"]), RuntimeError)
        return "" if is_like == isinstance(expected["error"], RuntimeError) else f"{expected} and {found}"
    if found.keys() != expected.keys():
        return f"{expected} and {found}"
    # gloo has no future for some, and calls some of its work incomplete after the wait.
    names = [name for name, value in expected.items() if not (isinstance(value, Exception) or value is False)]
    return ", ".join(f"{n}: {expected[n]} and {found[n]}" for n in names if not same(expected[n], found[n]))


def compare(_: int) -> tuple[int, list[str]]:
    warnings.simplefilter("ignore")
    rank, gloo, shared = dist.get_rank(), dist.new_group(backend="gloo"), dist.group.WORLD
    wrong, answered = [], 0
    for name, call in {**forms(rank, dist.get_world_size()), **reductions(rank)}.items():
        expected = result_of(call, gloo)
        found = result_of(call, shared)
        answered += "error" not in expected
        if text := differences(expected, found):
            wrong.append(f"{name}: {text}")
        if "error" in expected and "error" not in found and not name.endswith(tuple(map(str, DTYPES))):
            wrong.append(f"{name}: gloo raises {expected['error']}, and shared memory does not")
        tensor = torch.ones(1)
        dist.all_reduce(tensor)  # the group is as good as before
        assert tensor.item() == dist.get_world_size(), name
    return answered, wrong


def test_each_form_of_each_call_gives_what_gloo_gives() -> None:
    with by_value(compare):
        found = spawn(compare, nprocs=2, cores=1, backend="cpu")
    for answered, wrong in found:
        assert not wrong, "\n".join(wrong)
        assert answered > 100
