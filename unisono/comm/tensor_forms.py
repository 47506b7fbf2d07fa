"""The forms in which transports take tensors and reductions.

*Threads:* any.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

TORCH_OPS = {
    "sum": dist.ReduceOp.SUM,
    # gloo has no average, so the callers divide the sum.
    "mean": dist.ReduceOp.SUM,
    "product": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
}
_WIDER = {torch.int16: torch.int32}  # gloo has no 16-bit integers


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in plain memory, or itself if it already is: contiguous, with no conjugation left to apply."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def needs_copy(tensor: torch.Tensor) -> bool:
    """Whether `plain` copies a dense tensor."""
    return tensor.layout is torch.strided and (not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg())


def wire(tensor: torch.Tensor) -> torch.Tensor:
    """What is reduced: the plain tensor, in a dtype that every process group supports."""
    return plain(tensor).to(_WIDER.get(tensor.dtype, tensor.dtype))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """What is moved: the memory of the plain tensor as bytes, so that any dtype can be sent, bit for bit."""
    return plain(tensor).reshape(-1).view(torch.uint8)


def write_back(tensor: torch.Tensor, sent: torch.Tensor) -> torch.Tensor:
    """The tensor, with what was sent in its place."""
    # The same memory means that the transport has worked in place.
    return tensor if sent.data_ptr() == tensor.data_ptr() else tensor.copy_(sent)


def flat_of(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a dense tensor in main memory as one dimension; a copy if it has gaps or another order."""
    if not tensor.is_cpu or tensor.layout is not torch.strided:
        raise RuntimeError(
            f"the process group 'shm' takes dense tensors in main memory, got {tensor.layout} on {tensor.device}; "
            "unisono.all_reduce and its relatives copy tensors of the rank's device there"
        )
    return plain(tensor).view(-1)


def writable(tensor: torch.Tensor) -> torch.Tensor:
    """`flat_of`, for a tensor that the result can be written back into."""
    flat = flat_of(tensor)
    if not tensor.is_contiguous():
        steps = zip(tensor.stride(), tensor.shape, strict=True)
        if any(stride == 0 and size > 1 for stride, size in steps):
            raise RuntimeError(
                f"a tensor of shape {list(tensor.shape)} whose elements share memory cannot be written in place; pass "
                "tensor.clone()"
            )
    return flat
