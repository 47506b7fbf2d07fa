"""DiLoCo for Unisono: each rank steps on its own gradients, and every few steps the ranks meet.

from unisono_diloco import DiLoCo

accelerator = Accelerator(strategy=DiLoCo(every=32, sent_as="bf16"))
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from unisono.strategies import Options


@dataclass(frozen=True)
class DiLoCo(Options):
    """For slow networks: each rank steps on its own gradients, and the ranks meet every few steps, and at the end of a
    loop over a loader. Not exact: the result depends on the number of ranks. In every world.

    At a meeting, the mean over the ranks of how far their parameters have moved is the gradient of an outer step, SGD
    with Nesterov momentum (arXiv:2311.08105), and its result the parameters of all; buffers are rank zero's. Each rank
    keeps two more copies of the parameters.

    Attributes:
        every: the number of optimizer steps between meetings. Of several optimizers of a model, each has stepped then.
        outer_lr, outer_momentum: of the outer step; 1 and 0 average the parameters.
        sent_as: what is sent: "bf16"; "int8", with a scale for every 256 elements, to at most 31 ranks; or None,
            float32, and float64 of such parameters. With "int8" the mean of an element is off by at most the largest
            element among those on all ranks, divided by 2 * (127 // ranks).

    Raises:
        TypeError, ValueError: an option has the wrong type, or is out of range.
    """

    name = "diloco"
    strategy = "unisono_diloco.engine:DiLoCoStrategy"
    every: int = 32
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    sent_as: Literal["bf16", "int8"] | None = None

    def __post_init__(self) -> None:
        for name, kinds in (("every", int), ("outer_lr", int | float), ("outer_momentum", int | float)):
            value = getattr(self, name)
            if not isinstance(value, kinds) or isinstance(value, bool):
                raise TypeError(f"{name}={value!r} is of type {type(value).__name__}; pass a number")
        if self.every < 1:
            raise ValueError(f"every={self.every} is too small; pass a number of steps, such as 32")
        if not 0 < self.outer_lr < float("inf"):
            raise ValueError(f"outer_lr={self.outer_lr} is no learning rate; pass a positive number, such as 0.7")
        if not 0 <= self.outer_momentum < 1:
            raise ValueError(f"outer_momentum={self.outer_momentum} is not in [0, 1); pass a number such as 0.9")
        if self.sent_as not in (None, "bf16", "int8"):
            raise ValueError(f"sent_as={self.sent_as!r} does not exist; choose one of None, 'bf16', 'int8'")

    @classmethod
    def exact(cls) -> DiLoCo:
        """The ranks meet after each step, and take the mean: after a step of plain SGD, that on the mean gradient."""
        return cls(every=1, outer_lr=1, outer_momentum=0)
