"""Likeness: whether the models of one process, its replicas, hold the same parameters. No rank meets another for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from unisono.parallel.agreement import fingerprint


def first_difference(models: Sequence[nn.Module]) -> str | None:
    """The name of the first parameter that is not the same in all models, bit by bit; None where there is none.

    Buffers do not count: those of BatchNorm are each replica's own.
    """
    held = [dict(model.named_parameters()) for model in models]
    if len({_bits(list(each.values())) for each in held}) == 1:
        return None
    names = dict.fromkeys(name for each in held for name in each)
    return next(name for name in names if len({_bits([each[name]] if name in each else []) for each in held}) > 1)


def _bits(parameters: Sequence[torch.Tensor]) -> int:
    return int(fingerprint(parameters, parameters[0].device)) if parameters else 0
