"""Accelerator: a facade over the wings, so that a plain training loop runs on any number of devices.

Each method is one call into a wing; examples/by_hand.py shows the same loop without it.

Who owns what: the accelerator owns what is shared by its models and optimizers (the loss scaler, the count of
microbatches); these live as long as it does.

*Threads:* one accelerator per rank, used in the thread of the rank's loop.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from unisono.checkpoint.methods import CheckpointMethods
from unisono.checkpoint.prepared_states import PreparedStates
from unisono.foreign_names import advice_on
from unisono.loaders.device_iterator import DeviceIterator
from unisono.loaders.parallel_loader import DeviceLoader, ParallelLoader
from unisono.parallel.collectives import all_gather_samples
from unisono.parallel.ledger import Ledger
from unisono.parallel.microbatches import Microbatches
from unisono.parallel.nested_collectives import gather_nested, pad_nested, reduce_nested
from unisono.parallel.optimizer import ByHand
from unisono.parallel.passes import Passes
from unisono.parallel.prepared.builder import Builder
from unisono.parallel.prepared.checks import (
    AUTOCAST,
    check_accumulation,
    check_arguments,
    check_choices,
    check_features,
    check_reduction,
    check_scaler,
    world_on,
)
from unisono.parallel.prepared.metrics import valid_rows
from unisono.parallel.prepared.model import PreparedModel
from unisono.parallel.prepared.prepared_objects import PreparedObjects
from unisono.parallel.prepared.scaler import LossScaler
from unisono.parallel.prepared.schedule_units import Unit, check_unit
from unisono.parallel.rank_view import RankView, Trigger
from unisono.parallel.strategies.selection import options_of, strategy_class, strategy_in
from unisono.parallel.strategies.states import load_model_state, load_optimizer_state, model_state, optimizer_state
from unisono.protocols import ReduceOp
from unisono.strategies import Choice
from unisono.tracking.tracked import Tracked
from unisono.tracking.trackers import LogWith, Trackers
from unisono.world import World, current_world


class Accelerator(RankView, Tracked, CheckpointMethods):
    """Runs a plain training loop on one device, on the threads of a DataParallel, or in spawned workers.

        accelerator = Accelerator()
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)  # loss.backward() does as well, but for fp16, accumulation and weights
            optimizer.step()

    The gradient that `optimizer.step()` applies is that of the mean loss over all samples of the step, on all ranks.

    Args:
        device: of a world of one; None takes the world's. A rank of several has its device.
        mixed_precision: "bf16" and "fp16" run the models' forward passes under autocast, and "fp16" scales the loss; a
            step that overflows is skipped on all ranks. "no" leaves the types of the model.
        gradient_accumulation_steps: how many microbatches make an optimizer step. `optimizer.step()`, `zero_grad()` and
            `scheduler.step()` do nothing in between; a loop's last step takes what is left.
        max_grad_norm: clips the gradients, over all parameters of an optimizer and all ranks, before each step.
        strategy: of processes: "ddp", "zero1" (each rank keeps a part of the optimizer's state) or "fsdp" (and of the
            parameters and gradients). "spmd", for XLA in a plain script: one program, whose batches lie over all
            devices of the process; BatchNorm sees the global batch. `unisono.strategies` has each with its options.
        compile: compile the models; a mapping has the arguments of `torch.compile`.
        seed: of python's, numpy's and torch's generators, the same on each rank, and of the loaders' orders. Behind
            the first `prepare` with a model, each rank's generators continue from a seed of its own.
        cpu: take the CPU, whatever there is.
        device_placement: move models, optimizers' states and batches; False moves nothing.
        sync_batchnorm: BatchNorm sees the global batch.
        nan_guard: a gradient that is NaN or infinite is an error that names parameter and rank. Costs a pass over each
            gradient.
        loss_reduction: what losses are over the samples of a batch: "mean", and the gradient is that of the mean over
            the step; or "sum", and it is that of the sum.
        scaler_options: for "fp16", the arguments of torch's GradScaler: `init_scale`, `growth_interval`, ...
        schedule_unit: what schedules count: "batch", the batches of the loader as the script wrote it; "step", the
            optimizer steps of this run; "device_step", those that one device would take. None finds out, and is an
            error where it matters and cannot be known.
        log_with: where `log` writes, beside a file of JSON lines: "tensorboard", "wandb", "mlflow", "all" (those that
            are installed), objects with the methods of `unisono.Tracker`, or a list of these.
        project_dir: the directory of what trackers write, and of checkpoints; None takes "runs" in the working
            directory.
        total_limit: how many numbered checkpoints stay; None keeps all.
        world: None takes the current one.

    Attributes:
        world: the rank's.
        device: where batches and models go.
        mixed_precision, project_dir: as they were given.
        scaler: of the loss, for "fp16": torch's GradScaler, whose `state_dict()` belongs into a checkpoint; else None.

    Raises:
        TypeError, ValueError: an argument is out of its range, or does not fit another one.
        ImportError: the library of a tracker is not installed.
    """

    def __init__(
        self,
        device: str | int | torch.device | None = None,
        mixed_precision: Literal["no", "bf16", "fp16"] = "no",
        gradient_accumulation_steps: int = 1,
        max_grad_norm: float | None = None,
        strategy: Literal["ddp", "zero1", "fsdp", "spmd"] | Choice = "ddp",
        compile: bool | Mapping[str, Any] = False,
        seed: int | None = None,
        *,
        cpu: bool = False,
        device_placement: bool = True,
        sync_batchnorm: bool = False,
        nan_guard: bool = False,
        loss_reduction: Literal["mean", "sum"] = "mean",
        scaler_options: Mapping[str, Any] | None = None,
        schedule_unit: Unit | None = None,
        log_with: LogWith = None,
        project_dir: str | os.PathLike[str] | None = None,
        total_limit: int | None = None,
        world: World | None = None,
    ) -> None:
        check_arguments(mixed_precision, max_grad_norm, nan_guard)
        check_accumulation(gradient_accumulation_steps)
        check_choices(compile, seed)
        check_scaler(scaler_options, mixed_precision)
        check_unit(schedule_unit)
        check_reduction(loss_reduction)
        options = options_of(strategy)
        kind = strategy_class(options)
        kind.check_options(options, mixed_precision, max_grad_norm)
        self.world = world_on(world or current_world(), device, cpu, kind)
        check_features(self.world, kind, options, mixed_precision, compile)
        self.device = self.world.device
        self.scaler = None
        if mixed_precision == "fp16":
            self.scaler = LossScaler(self.device.type, self.world.rank == 0, **(scaler_options or {}))
        every = gradient_accumulation_steps
        ledger = Ledger(self.world.comm.size, every, is_mean=every > 1, is_sum=loss_reduction == "sum")
        self.mixed_precision, self.project_dir = mixed_precision, project_dir
        self._accumulated = every
        self._trackers = Trackers(log_with, project_dir, self.world.rank == 0)
        self._trigger = Trigger(self.world)
        self._microbatches = Microbatches(self.world, ledger)
        self._passes = Passes(self._microbatches)
        self.world.state.part(ByHand).trainers.add(self._passes)
        reduced = AUTOCAST.get(mixed_precision)
        self._autocast = None if reduced is None else partial(torch.autocast, self.device.type, reduced)
        builder = Builder(
            world=self.world,
            passes=self._passes,
            strategy=strategy_in(self.world, kind, ledger, options),
            autocast=self._autocast,
            scaler=self.scaler,
            moves=device_placement,
            compiles=compile,
            is_synchronized=sync_batchnorm,
            checks_numbers=nan_guard,
            max_grad_norm=max_grad_norm,
            seed=seed,
        )
        self._prepared = PreparedObjects(
            builder, partial(_prepared_loader, self.world, device_placement, seed), schedule_unit
        )
        self._states = PreparedStates(self._prepared, self._microbatches, self.scaler, project_dir, total_limit)

    def prepare(self, *objects: Any) -> Any:
        """Models, optimizers, loaders, schedulers, lists of them and None, each prepared: in the order in which they
        were given; one object gives one object.

        A model moves to the device and gets the parameters of rank zero; it comes back as one that behaves the same.
        An optimizer made before comes back itself, pointing to the moved parameters ("zero1": another in its place).
        A DataLoader, or any other iterable of batches, becomes a `DeviceLoader`. A metric of torchmetrics comes back
        itself, and gathers over the ranks when it computes.

        Raises:
            TypeError: an object is none of these; the message names its class and position.
            ValueError: an object is prepared already, a model lies on two devices, or an optimizer has a parameter of
                no prepared model.
        """
        made = self._prepared.prepare(objects)
        return made[0] if len(made) == 1 else tuple(made)

    def free_memory(self) -> None:
        """Let go of everything that was prepared. Optimizers step by themselves again, and models and optimizers can be
        prepared again, by this Accelerator or another one; what is not held elsewhere is garbage. A model that strategy
        "fsdp" has sharded stays so: make a new one.
        """
        self._prepared.release()

    @property
    def gradient_accumulation_steps(self) -> int:
        """How many microbatches make an optimizer step. Set it between steps: one that has begun ends as it was begun.

        Raises:
            TypeError, ValueError: it is set to what is no whole number from 1 on.
        """
        return self._accumulated

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        check_accumulation(steps)
        self._accumulated = steps
        self._microbatches.ledger.accumulate(steps)

    def backward(
        self,
        loss: torch.Tensor,
        weight: float | torch.Tensor | None = None,
        batch: Any = None,
        *,
        retain_graph: bool = False,
    ) -> None:
        """`loss.backward()`; for fp16 the loss is scaled.

        Args:
            weight, batch: as for `unisono.backward`. None takes the batch that the model's inputs came from.
            retain_graph: keep the graph for another backward pass.

        Raises:
            ValueError: as for `unisono.backward`.
        """
        self.world.timeline.loop().loss = loss.detach()
        if self.scaler is not None:
            if self._microbatches.begins_step():
                self.scaler.settle()
            loss = self.scaler.scale(loss)
        self._passes.backward(loss, weight, batch, retain_graph)

    def accumulate(self, *models: nn.Module) -> AbstractContextManager[None]:
        """A microbatch, for batches from elsewhere; those of a prepared loader are counted by themselves.

        Args:
            models: nothing depends on them.
        """
        return self._microbatches.block()

    @property
    def sync_gradients(self) -> bool:
        """Whether `optimizer.step()` steps on the present microbatch, and does not wait for more."""
        return self._microbatches.is_boundary()

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the last step of a prepared optimizer was left out, on all ranks: its gradients overflowed (fp16), or
        nothing counted in it (all weights were 0)."""
        return any(each.was_skipped for each in self._prepared.steppers())

    def set_trigger(self) -> None:
        """Let `check_trigger` report True on all ranks: one of them has to stop, say."""
        self._trigger.set()

    def check_trigger(self) -> bool:
        """Whether some rank has called `set_trigger` since the last check. Every rank calls it. A small collective."""
        return self._trigger.check()

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Forward passes of this prepared model, in the block, let their backward passes reduce nothing."""
        with model.no_sync() if isinstance(model, PreparedModel) else nullcontext():
            yield

    def clip_grad_norm_(
        self, parameters: nn.Module | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor | None:
        """Clip the norm of the reduced, unscaled gradients of all ranks; while microbatches accumulate, nothing.

        Args:
            parameters: or a model.
            max_norm: the norm that is left, at most.
            norm_type: p of the p-norm; infinity for the largest element.

        Returns:
            The norm before, a tensor of one element; None while microbatches accumulate.
        """
        return self._prepared.clip_norm(parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: nn.Module | Iterable[torch.Tensor], clip_value: float) -> None:
        """Clip each element of the reduced, unscaled gradients to [-clip_value, clip_value]; while microbatches
        accumulate, nothing.

        Args:
            parameters: or a model.
            clip_value: the bound, positive.
        """
        self._prepared.clip_value(parameters, clip_value)

    def autocast(self) -> AbstractContextManager[Any]:
        """The context of the precision, for what is computed outside the models' forward passes."""
        return nullcontext() if self._autocast is None else self._autocast()

    def gather(self, values: Any, dim: int = 0) -> Any:
        """Every rank's tensors, concatenated along `dim` in rank order; 0-dim tensors become a vector.

        Args:
            values: a tensor, or any nesting of tensors, of the same shapes on each rank. For different numbers
                of rows use `pad_across_processes` or `gather_for_metrics`; for objects `unisono.all_gather_object`.

        Raises:
            TypeError: a value is no tensor.
            ValueError: one requires grad: `unisono.functional.all_gather` has a gradient.
            CollectiveMismatchError: the ranks' nestings, shapes or types differ.
        """
        return gather_nested(values, dim, self.world)

    def gather_for_metrics(self, values: Any, valid_samples: int | None = None) -> Any:
        """Every rank's samples, each exactly once, in rank order; values, without gradients.

        Args:
            values: a tensor, or any nesting of tensors, with one row for each sample of a batch; repeated samples are
                left out. A tensor of the batch itself, or an output of a prepared model, says which batch; otherwise
                it is the one that this rank received last, or the last few together.
            valid_samples: how many rows count, from the front, where they are not those of batches.

        Raises:
            ValueError: the number of rows matches no recent batches; or it may be one batch or another, and
                different rows of them count.
            TypeError: as for `unisono.all_gather_samples`.
        """
        kept, count = valid_rows(values, valid_samples, self.world)
        with torch.no_grad():
            return all_gather_samples(kept, count, world=self.world)

    def reduce(self, values: Any, reduction: ReduceOp = "mean", scale: float = 1.0) -> Any:
        """The reduction over all ranks, times `scale`: new tensors, in the same nesting.

        Args:
            values: a tensor, or any nesting of tensors, of the same shapes on each rank.
            reduction: "sum", "mean", "min", "max" or "product".

        Raises:
            TypeError, ValueError, CollectiveMismatchError: as for `gather`; or there is no such reduction.
        """
        return reduce_nested(values, reduction, scale, self.world)

    def pad_across_processes(self, values: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
        """The tensors, each filled up along `dim` to the largest size that it has on any rank. A small collective.

        Args:
            values: a tensor, or any nesting of tensors. One without that dimension stays as it is.
            pad_index: the value that fills.
            pad_first: fill in front.

        Raises:
            TypeError, ValueError, CollectiveMismatchError: as for `gather`.
        """
        return pad_nested(values, dim, pad_index, pad_first, self.world)

    def print(self, *values: Any, **options: Any) -> None:
        """`print` on rank zero."""
        if self.world.rank == 0:
            print(*values, **options)

    def end_training(self) -> None:
        """End the run: close all trackers, and wait for a checkpoint that is under way. Once more, it does nothing.

        Raises:
            Exception: what a tracker has raised, after the end of all others; of several, an ExceptionGroup. What a
                save has failed with.
        """
        try:
            super().end_training()
        finally:
            self._states.close()

    def unwrap_model(self, model: nn.Module) -> nn.Module:
        """The module that was prepared."""
        return model.module if isinstance(model, PreparedModel) else model

    def state_dict(self, prepared: nn.Module | Optimizer) -> dict[str, Any]:
        """The state of a prepared model or optimizer in torch's plain form: whole, on the CPU, without prefixes.

        Every rank calls it; rank zero gets it, the others {}. A loader has its own `state_dict()`.

        Raises:
            TypeError: it is neither.
        """
        if isinstance(prepared, Optimizer):
            return optimizer_state(prepared, self._prepared.modules(), self.world)
        if not isinstance(prepared, nn.Module):
            raise TypeError(
                f"state_dict takes a prepared model or optimizer, got a {type(prepared).__name__}; loaders, schedulers "
                "and the scaler have a state_dict() of their own"
            )
        return model_state(self.unwrap_model(prepared), self.world)

    if not TYPE_CHECKING:  # for a type checker a name that is not here is an error

        def __getattr__(self, name: str) -> Any:
            """
            Raises:
                AttributeError: no such name; for names of other frameworks the message says what to use instead.
            """
            raise AttributeError(advice_on(name), name=name, obj=self)

    def load_state_dict(self, prepared: nn.Module | Optimizer, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` gave, or what a plain model or optimizer did, under any strategy and number of ranks.

        Every rank calls it; rank zero's state counts.

        Args:
            prepared: a prepared model or optimizer.
            state: by the names of the module that was prepared; other ranks than zero may pass {}.
        """
        if isinstance(prepared, Optimizer):
            load_optimizer_state(prepared, self._prepared.modules(), state, self.world)
        else:
            load_model_state(self.unwrap_model(prepared), state, self.world)


def _prepared_loader(world: World, moves: bool, seed: int | None, loader: Any) -> Any:
    """The loader of this rank; those of this package stay what they are."""
    if isinstance(loader, DeviceLoader | DeviceIterator | ParallelLoader):
        return loader
    device = None if moves else torch.get_default_device()
    return DeviceLoader(loader, device, seed=seed, world=world)
