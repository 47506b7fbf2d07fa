"""The methods of an Accelerator for gradients, and for values of all ranks, by Accelerate's names.

*Threads:* the rank's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from unisono.arguments import check_type
from unisono.protocols import ReduceOp
from unisono.report.timeline import REDUCE
from unisono.training.clipping import clip_grad_norm
from unisono.training.collectives import gather_nested, pad_nested, reduce_nested
from unisono.training.passes import Passes
from unisono.training.prepared.checks import check_accumulation
from unisono.training.prepared.metrics import gather_rows
from unisono.training.prepared.model import PreparedModel
from unisono.training.prepared.prepared_objects import PreparedObjects
from unisono.training.prepared.scaler import LossScaler
from unisono.training.steps import Steps
from unisono.world import World


class GradientMethods:
    """Backward passes, microbatches, clipping."""

    scaler: LossScaler | None
    _steps: Steps
    _passes: Passes
    _prepared: PreparedObjects

    @property
    def gradient_accumulation_steps(self) -> int:
        """The number of microbatches per optimizer step. Set it between steps: it does not affect one that has begun.

        Raises:
            TypeError, ValueError: the new value is not a positive integer.
        """
        return int(self._steps.policy.every)

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        check_accumulation(steps)
        if self._steps.virtual is not None:
            raise ValueError(
                f"gradient_accumulation_steps={steps} cannot be set with virtual_ranks={self._steps.virtual.count}, "
                "where a round is a step; make an Accelerator with one virtual rank for each batch of a step"
            )
        self._steps.set_every(steps)

    def backward(
        self,
        loss: torch.Tensor,
        weight: float | torch.Tensor | None = None,
        batch: Any = None,
        *,
        retain_graph: bool = False,
    ) -> None:
        """`loss.backward()`; with "fp16" the loss is scaled.

        Args:
            loss: a tensor of one element.
            weight, batch: as for `unisono.backward`. None uses the batch that the model's inputs came from: by their
                memory; or, if they were computed from a batch, the one that was drawn last, if it has their rows.
            retain_graph: keep the graph for another backward pass.

        Raises:
            TypeError: the loss is not a tensor.
            ValueError: as for `unisono.backward`; or it is unknown which batch the inputs belong to, and with
                `gradient_accumulation_steps` > 1 that decides which microbatches make a step.
        """
        if type(loss) is not torch.Tensor:  # saves the call
            check_type(loss, "loss", "pass the tensor that the loss function returned", torch.Tensor)
        if self.scaler is not None and self._steps.begins_step():
            # All microbatches of a step must have one loss scale, so an update waits for the next step.
            self.scaler.settle()
        scaled = loss if self.scaler is None else self.scaler.scale(loss)
        self._passes.backward(scaled, weight, batch, retain_graph)
        self._passes.look(loss)

    def accumulate(self, *models: nn.Module) -> AbstractContextManager[None]:
        """The block is one microbatch, whatever passes it has.

        Batches of prepared loaders are counted without it. It is needed if batches are skipped or drawn ahead, and
        changed before the model sees them; and to say what a microbatch of other data is.

        Args:
            models: ignored; for compatibility with Accelerate.
        """
        return self._steps.in_block()

    @property
    def sync_gradients(self) -> bool:
        """Whether `optimizer.step()` takes a step at this point, rather than waiting for more microbatches; after it,
        whether it did. Changes nothing.

        Between forward and backward pass it speaks for the microbatch whose backward pass is next.
        """
        return self._steps.is_boundary()

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the last step of a prepared optimizer was skipped, on all ranks: its gradients overflowed (fp16), or
        all weights in it were 0."""
        return any(each.was_skipped for each in self._prepared.steppers())

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Forward passes of this prepared model within the block leave their gradients unreduced."""
        return model.no_sync() if isinstance(model, PreparedModel) else nullcontext()

    def clip_grad_norm_(
        self,
        parameters: nn.Module | Iterable[torch.Tensor],
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor | None:
        """Clip the norm of the reduced, unscaled gradients. Does nothing while microbatches accumulate.

        Args:
            parameters: parameters, or a model.
            max_norm: the largest norm allowed.
            norm_type: p of the p-norm; infinity for the largest element.
            error_if_nonfinite, foreach: as for torch's function.

        Returns:
            The norm before clipping, a 0-dim tensor; None while microbatches accumulate.

        Raises:
            RuntimeError: `error_if_nonfinite`, and the norm is infinite or NaN; on all ranks, which share it.
        """
        with self._prepared.reduced(parameters, "clip_grad_norm_") as found:
            if found is None:
                return None
            return clip_grad_norm(found, max_norm, self._steps.world, norm_type, error_if_nonfinite, foreach)

    def clip_grad_value_(
        self, parameters: nn.Module | Iterable[torch.Tensor], clip_value: float, foreach: bool | None = None
    ) -> None:
        """Clip each element of the reduced, unscaled gradients to [-clip_value, clip_value]. Does nothing while
        microbatches accumulate.

        Args:
            parameters: parameters, or a model.
            clip_value: the bound, positive.
            foreach: as for torch's function.
        """
        with self._prepared.reduced(parameters, "clip_grad_value_") as found:
            if found is not None:
                nn.utils.clip_grad_value_(found, clip_value, foreach)

    def unscale_gradients(self, optimizer: Optimizer | Sequence[Optimizer] | None = None) -> None:
        """With "fp16", unscale the gradients. They are reduced first, so every rank must call it; the step does neither
        again. Does nothing while microbatches accumulate.

        Args:
            optimizer: a prepared optimizer, or several; None means all of them.

        Raises:
            ValueError: an optimizer is not prepared.
        """
        if self.scaler is None:
            return
        given = [optimizer] if isinstance(optimizer, Optimizer) else optimizer
        found = self._prepared.steppers() if given is None else map(self._prepared.stepper_of, given)
        for place, stepper in enumerate(found):
            if stepper is None:
                raise ValueError(f"optimizer {place} is not prepared; pass what prepare() returned")
            if self._steps.is_boundary():
                stepper.reduce()

    @contextmanager
    def trigger_sync_in_backward(self, model: nn.Module) -> Iterator[None]:
        """A block that reduces the gradients of the step so far when it ends, after forward passes under `no_sync`;
        without it, `optimizer.step()` reduces them. Does nothing while microbatches accumulate.

        Args:
            model: a prepared model; for another one the block does nothing.
        """
        yield
        world = self._steps.world
        if not isinstance(model, PreparedModel) or world.comm.size == 1 or not self._steps.is_boundary():
            return
        if model.engine.gradients.is_own:
            with world.timeline.loop().span(REDUCE):
                self._passes.reduce(model.engine)


class GatherMethods:
    """Values of all ranks."""

    world: World
    _steps: Steps

    def gather(self, values: Any, dim: int = 0) -> Any:
        """Gather the tensors of all ranks, concatenated along `dim` in rank order; 0-dim tensors become a vector.

        Args:
            values: a tensor, or any nesting of tensors, with the same shapes on each rank. For different numbers of
                rows use `pad_across_processes` or `gather_for_metrics`; for objects `unisono.all_gather_object`.
            dim: the dimension to concatenate along.

        Returns:
            The same nesting, each tensor `world_size` times as long along `dim`.

        Raises:
            TypeError: a value is not a tensor.
            ValueError: a tensor requires grad; `unisono.functional.all_gather` is differentiable.
            CollectiveMismatchError: the ranks' nestings, shapes or dtypes differ.
        """
        return gather_nested(values, dim, self.world)

    def gather_for_metrics(self, values: Any, valid_samples: int | None = None) -> Any:
        """Gather the samples of all ranks, each exactly once, in rank order, without gradients.

        Args:
            values: a tensor, or any nesting of tensors, with one row per sample of a batch; rows that repeat samples
                (padding) are left out. A tensor of the batch itself, or an output of a prepared model, identifies its
                batch. Others with as many rows belong to the batch that this rank received last.
            valid_samples: for rows that do not come from one batch: how many of them count, from the front.

        Raises:
            ValueError: some batch has repeated samples, and it is unknown which rows of the values do; or they belong
                to several batches, and different rows count.
            TypeError: as for `unisono.all_gather_samples`.
            CollectiveMismatchError: the ranks received these batches in different rounds; or they make different calls.
        """
        return gather_rows(values, valid_samples, self.world)

    def reduce(self, values: Any, reduction: ReduceOp = "mean", scale: float = 1.0) -> Any:
        """Reduce over all ranks, and multiply by `scale`.

        Args:
            values: a tensor, or any nesting of tensors, with the same shapes on each rank.
            reduction: "sum", "mean", "min", "max" or "product".
            scale: a factor for the result.

        Returns:
            New tensors, in the same nesting.

        Raises:
            TypeError, ValueError, CollectiveMismatchError: as for `gather`; or `reduction` is unknown.
        """
        return reduce_nested(values, reduction, scale, self.world)

    def pad_across_processes(self, values: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
        """Pad each tensor along `dim` to its largest size on any rank. A small collective.

        Args:
            values: a tensor, or any nesting of tensors. A tensor without that dimension is returned unchanged.
            dim: the dimension to pad.
            pad_index: the value to pad with.
            pad_first: pad at the front.

        Raises:
            TypeError, ValueError, CollectiveMismatchError: as for `gather`.
        """
        return pad_nested(values, dim, pad_index, pad_first, self.world)


_OURS = {
    "all_gather": "gather(values)",
    "all_reduce": "reduce(values)",
    "barrier": "wait_for_everyone()",
    "broadcast": "unisono.broadcast(tensor)",
    "clear": "free_memory()",
    "clip_gradients": "clip_grad_norm_(model, max_norm) or clip_grad_value_(model, clip_value)",
    "gather_object": "unisono.all_gather_object(value)",
    "get_state_dict": "state_dict(model)",
    "global_rank": "process_index",
    "is_global_zero": "is_main_process",
    "launch": "unisono.spawn(fn), or `unisono run`",
    "local_rank": "local_process_index",
    "log_dict": "log(values, step)",
    "no_backward_sync": "no_sync(model)",
    "on_local_main_process": "`if accelerator.is_local_main_process:`",
    "on_process": "`if accelerator.process_index == n:`",
    "profile": "torch.profiler.profile(); unisono.gather_report() says where the time of the loop went",
    "rank": "process_index",
    "rank_zero_first": "main_process_first()",
    "save": "save_model(model, directory), or torch.save on rank zero",
    "seed_everything": "Accelerator(seed=...)",
    "skip_first_batches": "loader.load_state_dict(state): loaders resume by themselves",
    "state": "accelerator.world, which has the rank's facts",
    "use_distributed": "num_processes > 1",
    "world_size": "num_processes",
    **dict.fromkeys(("prepare_data_loader", "prepare_model", "prepare_optimizer", "prepare_scheduler"), "prepare()"),
    **dict.fromkeys(("setup", "setup_dataloaders", "setup_module", "setup_optimizers"), "prepare()"),
}
"""The names here of attributes of Accelerate's Accelerator and Lightning's Fabric."""


def describe_missing(name: str) -> str:
    """The text of the AttributeError for a name that an Accelerator does not have."""
    ours = f": here it is {_OURS[name]}" if name in _OURS else ""
    return f"'Accelerator' object has no attribute {name!r}{ours}"
