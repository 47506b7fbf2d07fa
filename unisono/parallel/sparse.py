"""Sparse gradients, such as those of `nn.Embedding(sparse=True)`: the rows of all ranks are gathered, not the table.

Invariant: all ranks know in advance which parameters have them, by `remember_sparse`, since a rank without a gradient
must take part in the same reduction as the others.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from unisono.comm.operations import HOST
from unisono.parallel.parameter_names import name_of
from unisono.torch_private import sparse_indices, sparse_nnz, sparse_values
from unisono.world import World

_known = WeakTensorKeyDictionary()
_NONE, _DENSE = -1, -2  # in place of a number of rows


def remember_sparse(module: nn.Module) -> None:
    """Register the module's sparse embeddings, so that their gradients are reduced as sparse; call it on every rank."""
    for name in sparse_layers(module):
        _known[module.get_submodule(name).weight] = True


def is_known_as_sparse(parameter: torch.Tensor) -> bool:
    """Whether `remember_sparse` has registered it."""
    return parameter in _known


def is_sparse(tensor: torch.Tensor | None) -> bool:
    """Whether it is a sparse tensor of rows with indices."""
    return tensor is not None and tensor.layout is torch.sparse_coo


def values_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or the rows of a sparse one; repeated rows are separate unless it is coalesced."""
    return sparse_values(tensor) if is_sparse(tensor) else tensor


def sparse_layers(module: nn.Module) -> list[str]:
    """The names of the module's sparse embeddings."""
    kinds = (nn.Embedding, nn.EmbeddingBag)
    return [name for name, part in module.named_modules() if isinstance(part, kinds) and part.sparse]


def refuse_unknown(parameter: torch.Tensor) -> None:
    """Refuse a gradient that is not dense if other ranks may treat it as dense. Raises TypeError."""
    if parameter.grad is not None and parameter.grad.layout is not torch.strided:
        raise TypeError(
            f"the gradient of {name_of(parameter, [parameter])} is {parameter.grad.layout}, and other ranks do not "
            "know that; create the layer as nn.Embedding(sparse=True) and call broadcast_parameters(model) or "
            "prepare() on every rank before the first step, or make it with sparse=False"
        )


@torch.no_grad()
def reduce_sparse(parameter: torch.Tensor, world: World, factor: float) -> None:
    """Replace the gradient by the sum over the ranks of factor times gradient; dense if it is dense on one. A
    collective."""
    own, count = parameter.grad, _NONE
    if own is not None:
        own = own * factor if factor else torch.zeros_like(own)
        own = own.coalesce() if is_sparse(own) else own
        count = sparse_nnz(own) if is_sparse(own) else _DENSE
    counts = [int(each) for each in world.comm.all_gather(torch.tensor([count], device=HOST))]
    # Every rank has all counts, so all take the same branch.
    if _DENSE in counts:
        dense = torch.zeros_like(parameter) if own is None else own.to_dense()
        parameter.grad = world.comm.all_reduce(dense)
    elif any(each != _NONE for each in counts):
        if own is None:
            own = torch.sparse_coo_tensor(
                torch.empty((1, 0), dtype=torch.int64, device=parameter.device),
                parameter.new_empty((0, *parameter.shape[1:])),
                parameter.shape,
                check_invariants=False,
            )
        # Transposed, since `_gather` pads along dim 0.
        rows = _gather(sparse_indices(own).t(), counts, world).t()
        values = _gather(sparse_values(own), counts, world)
        # `coalesce` adds up the rows that several ranks have.
        parameter.grad = torch.sparse_coo_tensor(rows, values, parameter.shape, check_invariants=False).coalesce()


def _gather(own: torch.Tensor, counts: list[int], world: World) -> torch.Tensor:
    """The rows of all ranks, concatenated; their numbers may differ between ranks."""
    padded = own.new_zeros((max(counts), *own.shape[1:]))
    padded[: len(own)] = own
    parts = world.comm.all_gather(padded)
    return torch.cat([part[: max(count, 0)] for part, count in zip(parts, counts, strict=True)])
