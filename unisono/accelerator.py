"""Accelerator: a facade over the other packages, so that a plain training loop runs on any number of devices.

Each method is one call into a package; examples/by_hand.py shows the same loop without it.

The accelerator owns what its models and optimizers share (the loss scaler, the steps) as long as it lives.

*Threads:* one accelerator per rank, used in the thread of the rank's loop.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, overload

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from unisono.arguments import explain_unknown_names
from unisono.batches.alone import NOTHING
from unisono.batches.virtual_ranks import Virtual, virtual_of
from unisono.checkpoint.methods import CheckpointMethods
from unisono.checkpoint.objects import meet, user_module
from unisono.checkpoint.prepared_states import PreparedStates
from unisono.comm.selection import innermost
from unisono.errors import NoWorldError
from unisono.loading.device_iterator import DeviceIterator
from unisono.loading.device_loader import DeviceLoader
from unisono.loading.loader_options import LoaderOptions, check_num_workers
from unisono.loading.parallel_loader import ParallelLoader
from unisono.strategies import Options
from unisono.tracking.trackers import LogWith, Tracked, Trackers
from unisono.training.digests import record_settings, say_weights
from unisono.training.means import Mean
from unisono.training.optimizer import ByHand
from unisono.training.passes import Passes
from unisono.training.prepared.accelerator_methods import GatherMethods, GradientMethods, describe_missing
from unisono.training.prepared.builder import Builder
from unisono.training.prepared.checks import (
    AUTOCAST,
    check_arguments,
    check_features,
    check_snapshots,
    check_virtual,
    family_of,
    world_on,
)
from unisono.training.prepared.prepared_objects import PreparedObjects
from unisono.training.prepared.scaler import LossScaler
from unisono.training.prepared.scheduler import Unit
from unisono.training.rank_view import RankView
from unisono.training.replay import in_scratch, replay_of
from unisono.training.steps import Steps
from unisono.training.strategies.lookup import options_of, strategy_class, strategy_in
from unisono.training.strategies.sharded import gathered
from unisono.training.strategies.states import load_model_state, load_optimizer_state, model_state, optimizer_state
from unisono.world import World, current_world

# What `prepare` returns behaves as what it was given.
Kept = TypeVar("Kept", bound=nn.Module | Optimizer | LRScheduler | Mean | DeviceLoader)
Kept2 = TypeVar("Kept2", bound=nn.Module | Optimizer | LRScheduler | Mean | DeviceLoader)
Kept3 = TypeVar("Kept3", bound=nn.Module | Optimizer | LRScheduler | Mean | DeviceLoader)
Kept4 = TypeVar("Kept4", bound=nn.Module | Optimizer | LRScheduler | Mean | DeviceLoader)
Loader: TypeAlias = DataLoader[Any]

if TYPE_CHECKING:

    class PreparedLoader(DeviceLoader, DataLoader[Any]):  # type: ignore[misc]
        """What a DataLoader becomes: a DeviceLoader, which also has its attributes, and may take its name."""


@explain_unknown_names({name: f"pass mixed_precision={name!r}" for name in ("bf16", "fp16")})
class Accelerator(GradientMethods, GatherMethods, RankView, Tracked, CheckpointMethods):
    """Runs a plain training loop on one device, on the threads of a DataParallel, or in spawned workers.

        accelerator = Accelerator()
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)  # or loss.backward(), except for fp16 and weights
            optimizer.step()

    `optimizer.step()` applies the gradient of the mean loss over all samples of the step, on all ranks.

    Args:
        device: the device of a run with one rank; None uses the current world's. With several ranks, each has its own.
        mixed_precision: "bf16" and "fp16" run the models' forward passes under autocast; "fp16" also scales the loss,
            and a step that overflows is skipped on all ranks. "no" keeps the dtypes of the model.
        gradient_accumulation_steps: the number of microbatches per optimizer step; each use of a batch between two
            calls of `optimizer.step()` is one. In between, `optimizer.step()`, `zero_grad()` and `scheduler.step()` do
            nothing; the last step of a loop uses the microbatches that remain.
        max_grad_norm: clip the gradient norm, over all parameters of an optimizer and all ranks, before each step.
        strategy: for processes: "ddp", "zero1" (shards the optimizer state) or "fsdp" (shards parameters and gradients
            as well). "spmd", for XLA in a plain script: one program whose batches are laid over all devices of the
            process; BatchNorm sees the global batch. `unisono.strategies` has a class for each, with its options.
            Other installed packages add strategies, by names and options of their own.
        compile: compile the models; a mapping holds the arguments of `torch.compile`.
        seed: seeds the generators of Python, NumPy and torch, alike on each rank, and the loaders' orders. After the
            first `prepare` with a model, each rank's generators continue from a seed of their own.
        virtual_ranks: compute what that many devices would compute, with the same bits on any number of ranks up to it
            (docs/virtual_ranks.md). `Virtual(8, witness_every=100)` also looks for devices that compute wrong numbers.
            None: each rank is one.
        digest_every: with virtual ranks, in a recorded run: every n-th step of an optimizer has digests, so that
            `unisono compare` finds where two runs differ. The last step of an epoch has them, too. 0: no step has.
        cpu: use the CPU, even if there are accelerators.
        device_placement: move models, optimizer states and batches to the device; False moves nothing.
        split_batches: a batch of a DataLoader is the global batch, which the ranks divide; otherwise each rank gets
            batches of that size. A `DeviceLoader` has its own `split`.
        num_workers: "auto": DataLoaders over map-style datasets get as many loader workers as the loop needs, found
            while it runs (docs/loading.md). None: as each DataLoader says.
        sync_batchnorm: compute BatchNorm's statistics over the global batch.
        scaler_options: for "fp16", the arguments of torch's GradScaler: `init_scale`, `growth_interval`, ...
        schedule_unit: what schedulers count: "batch", the batches of the loader as the script wrote it; "step", the
            optimizer steps of this run; "device_step", the steps that one device would take. None is an error in a
            loop where these differ: on several ranks, or with accumulation.
        log_with: where `log` writes, besides a file of JSON lines: "tensorboard", "wandb", "mlflow", "all" (those that
            are installed), objects with the methods of `unisono.Tracker`, or a list of these.
        project_dir: the directory for trackers and checkpoints; None uses "runs" in the working directory.
        logging_dir: another directory for trackers.
        total_limit: the number of numbered checkpoints to keep; None keeps all.
        snapshot_every: after how many optimizer steps the state is copied into memory that outlives the workers: in a
            restarted group, `load_state` continues from it (docs/fault_tolerance.md). None: as `unisono run
            --snapshot-every` or spawn(snapshot_every=) say; without them, never.
        snapshots: how many of them are kept, for `rewind()`, besides the one that is being taken.
        world: None uses the current one. A process that torchrun, SLURM, Kubernetes or mpirun has started among others
            joins them first, by `join_world()`.

    Attributes:
        world: this rank's world.
        device: where models and batches are placed.
        mixed_precision, project_dir, split_batches: as given.
        scaler: for "fp16", torch's GradScaler, whose `state_dict()` belongs in a checkpoint; otherwise None.

    Raises:
        TypeError, ValueError: an argument is out of range, or conflicts with another one.
        ImportError: the library of a tracker, or the package of a strategy, is not installed.
    """

    def __init__(
        self,
        device: str | int | torch.device | None = None,
        mixed_precision: Literal["no", "bf16", "fp16"] = "no",
        gradient_accumulation_steps: int = 1,
        max_grad_norm: float | None = None,
        strategy: str | Options = "ddp",
        compile: bool | Mapping[str, Any] = False,
        seed: int | None = None,
        *,
        virtual_ranks: int | Virtual | None = None,
        digest_every: int = 100,
        cpu: bool = False,
        device_placement: bool = True,
        split_batches: bool = False,
        num_workers: Literal["auto"] | None = None,
        sync_batchnorm: bool = False,
        scaler_options: Mapping[str, Any] | None = None,
        schedule_unit: Unit | None = None,
        log_with: LogWith = None,
        project_dir: str | os.PathLike[str] | None = None,
        logging_dir: str | os.PathLike[str] | None = None,
        total_limit: int | None = None,
        snapshot_every: int | None = None,
        snapshots: int = 1,
        world: World | None = None,
    ) -> None:
        # What needs no device is checked before `world_on` starts to use one.
        given = locals()
        check_arguments(given)
        check_num_workers(num_workers)
        options = options_of(strategy)
        kind = strategy_class(options)
        self._strategy = options.name
        self.world = world_on(world or _joined_world(family_of(device, cpu)), device, cpu, kind)
        check_features(self.world, kind, options, mixed_precision, compile)
        virtual = None if virtual_ranks is None else check_virtual(given, self.world, options)
        self.world.state.seeds_batches = virtual is not None
        if virtual is not None:
            self.world.backend.repeat_kernels()
            self.world.state.deliveries.settle()
            record_settings(self.world, {**given, "virtual_ranks": virtual.count})
        self.device = self.world.device
        self.scaler = LossScaler(self.device.type, **(scaler_options or {})) if mixed_precision == "fp16" else None
        is_replay = replay_of(self.world) is not None
        if is_replay:  # the files of the run stay as they are, and its trackers get nothing
            log_with, project_dir = None, in_scratch(project_dir or "runs", self.world)
        self.mixed_precision, self.project_dir, self.split_batches = mixed_precision, project_dir, split_batches
        self._trackers = Trackers(log_with, logging_dir or project_dir, self.world.rank == 0 and not is_replay)
        self._steps = Steps(self.world, gradient_accumulation_steps, virtual)
        self._passes = Passes(self._steps)
        # For `unisono.backward`, which may get a loss of this Accelerator's models.
        self.world.state.part(ByHand).trainers.add(self._passes)
        reduced = AUTOCAST.get(mixed_precision)
        self._autocast = None if reduced is None else partial(torch.autocast, self.device.type, reduced)
        builder = Builder(
            world=self.world,
            passes=self._passes,
            strategy=strategy_in(self.world, kind, self._steps, options),
            autocast=self._autocast,
            scaler=self.scaler,
            moves=device_placement,
            compiles=compile,
            is_synchronized=sync_batchnorm,
            max_grad_norm=max_grad_norm,
            seed=seed,
            digest_every=digest_every,
        )
        self._prepared = PreparedObjects(
            builder,
            partial(_prepared_loader, self.world, device_placement, split_batches, seed, virtual_ranks, num_workers),
            schedule_unit,
        )
        if self.world.rank == 0 < self.world.world_size - 1:  # one rank says it
            begun = getattr(innermost(self.world.comm), "num_begun", None)
            self.world.state.deliveries.lone_steps.follow(begun, NOTHING)
        self._states = PreparedStates(self._prepared, self._steps, self.scaler, project_dir, total_limit)
        every = self.world.state.snapshot_every if snapshot_every is None else snapshot_every
        if every is not None:
            check_snapshots(every, snapshots, self.world, kind, options)
            self._states.keep_snapshots(every, snapshots)

    # A type checker knows what becomes of a model, an optimizer, a scheduler and a loader, in the usual orders.
    @overload
    def prepare(self, a: Kept, /) -> Kept: ...
    @overload
    def prepare(self, a: Loader, /) -> PreparedLoader: ...
    @overload
    def prepare(self, a: Kept, b: Kept2, /) -> tuple[Kept, Kept2]: ...
    @overload
    def prepare(self, a: Kept, b: Loader, /) -> tuple[Kept, PreparedLoader]: ...
    @overload
    def prepare(self, a: Loader, b: Loader, /) -> tuple[PreparedLoader, PreparedLoader]: ...
    @overload
    def prepare(self, a: Kept, b: Any, /) -> tuple[Kept, Any]: ...
    @overload
    def prepare(self, a: Kept, b: Kept2, c: Kept3, /) -> tuple[Kept, Kept2, Kept3]: ...
    @overload
    def prepare(self, a: Kept, b: Kept2, c: Loader, /) -> tuple[Kept, Kept2, PreparedLoader]: ...
    @overload
    def prepare(self, a: Kept, b: Loader, c: Loader, /) -> tuple[Kept, PreparedLoader, PreparedLoader]: ...
    @overload
    def prepare(self, a: Kept, b: Kept2, c: Any, /) -> tuple[Kept, Kept2, Any]: ...
    @overload
    def prepare(self, a: Kept, b: Kept2, c: Kept3, d: Kept4, /) -> tuple[Kept, Kept2, Kept3, Kept4]: ...
    @overload
    def prepare(self, a: Kept, b: Kept2, c: Loader, d: Kept3, /) -> tuple[Kept, Kept2, PreparedLoader, Kept3]: ...
    @overload
    def prepare(
        self, a: Kept, b: Kept2, c: Loader, d: Loader, /
    ) -> tuple[Kept, Kept2, PreparedLoader, PreparedLoader]: ...
    @overload
    def prepare(self, a: Kept, b: Kept2, c: Any, d: Any, /) -> tuple[Kept, Kept2, Any, Any]: ...
    @overload
    def prepare(
        self, a: Kept, b: Kept2, c: Loader, d: Loader, e: Kept3, /
    ) -> tuple[Kept, Kept2, PreparedLoader, PreparedLoader, Kept3]: ...
    @overload
    def prepare(self, *objects: Any) -> Any: ...
    def prepare(self, *objects: Any) -> Any:
        """Prepare models, parameters, optimizers, loaders, schedulers, lists of them and None.

        A model is moved to the device and given the parameters of rank zero; the returned one behaves the same. An
        optimizer is returned itself, holding the moved parameters (with "zero1", another one in its place). A
        DataLoader, or any other iterable of batches, becomes a `DeviceLoader`. A metric of torchmetrics is returned
        itself, and gathers over the ranks when it computes. A parameter that belongs to no model, or any other leaf
        tensor that requires gradients, is moved and returned itself.

        Returns:
            The prepared objects, in the order given; for one argument, that object alone.

        Raises:
            TypeError: an object is none of these; the message names its class and position.
            ValueError: an object is prepared already, a model lies on two devices, or an optimizer holds a parameter
                of no prepared model.
        """
        made = self._prepared.prepare(objects)
        return made[0] if len(made) == 1 else tuple(made)

    def __repr__(self) -> str:
        world = self.world
        given = [f"rank {world.rank} of {world.world_size}", str(self.device), f"strategy={self._strategy!r}"]
        if self.mixed_precision != "no":
            given.append(f"mixed_precision={self.mixed_precision!r}")
        if self._steps.virtual is not None:
            given.append(f"virtual_ranks={self._steps.virtual.count}")
        return f"{type(self).__name__}({', '.join(given)})"

    def free_memory(self) -> None:
        """Release everything that was prepared: what is not referenced elsewhere is freed.

        Optimizers step by themselves again, and models and optimizers can be prepared again, by this Accelerator or
        another one. A model that strategy "fsdp" has sharded stays sharded, and an optimizer loses the state that
        "zero1" has divided: make new ones, and save `state_dict(optimizer)` before.
        """
        self._prepared.release()
        self._states.drop_snapshots()
        self.world.state.deliveries.settle()

    def autocast(self, enabled: bool = True, cache_enabled: bool | None = None) -> AbstractContextManager[Any]:
        """The autocast context of `mixed_precision`, for what is computed outside the models' forward passes.

        Args:
            enabled, cache_enabled: as for `torch.autocast`.
        """
        return nullcontext() if self._autocast is None else self._autocast(enabled=enabled, cache_enabled=cache_enabled)

    def print(self, *values: Any, **options: Any) -> None:
        """`print` on rank zero only."""
        if self.world.rank == 0:
            print(*values, **options)

    def end_training(self) -> None:
        """End the run: close all trackers, and wait for a checkpoint that is being saved; with virtual ranks, rank zero
        prints the `digest()` of the weights. Idempotent.

        Raises:
            Exception: the error of a tracker, after all others were closed; of several, an ExceptionGroup. The error
                of a failed save.
            RuntimeError: a loop was left in the middle of a round of virtual ranks.
        """
        try:
            super().end_training()
        finally:
            self._states.close()
        if self._steps.virtual is not None and self._prepared.modules():
            digest = self.digest()
            if self.world.rank == 0:
                say_weights(self.world, digest)

    def unwrap_model(self, model: nn.Module) -> nn.Module:
        """The module that was given to `prepare`."""
        return user_module(model)

    def digest(self) -> str:
        """A SHA-256 of the names, parameters and buffers of all prepared models, in the order of their preparation, as
        64 hexadecimal digits: two runs with the same digest have the same bits.

        Under strategy "fsdp" every rank must call it.

        Raises:
            RuntimeError: no model is prepared; or it is called in the middle of a round of virtual ranks, or a loop was
                left there.
        """
        self._states.check_round("digest")
        if not self._prepared.modules():
            raise RuntimeError("digest() found no prepared model; call prepare(model, ...) first")
        with self.world.state.deliveries.evaluations.aside():  # it counts nothing of a loop
            self.world.comm.announce("digest")
            found = hashlib.sha256()
            for module in self._prepared.modules():
                for name, each in module.state_dict().items():
                    if isinstance(each, torch.Tensor):
                        found.update(f"{name} {each.dtype} {list(each.shape)}".encode())
                        whole = gathered(each).detach().cpu().contiguous()
                        found.update(whole.reshape(-1).view(torch.uint8).numpy().tobytes())
        return found.hexdigest()

    def state_dict(self, prepared: nn.Module | Optimizer) -> dict[str, Any]:
        """The state of a prepared model or optimizer in torch's plain form: complete, on the CPU, without prefixes.

        Every rank must call it. A loader has its own `state_dict()`.

        Returns:
            The state, on every rank. Where ranks have parts of it ("fsdp"; of an optimizer also "zero1"), it is on rank
            zero, and the others get an empty one that can be passed to `load_state_dict`; reading or saving it is a
            CheckpointError.

        Raises:
            TypeError: `prepared` is neither a model nor an optimizer.
        """
        if isinstance(prepared, Optimizer):
            return optimizer_state(prepared, self.world)
        if not isinstance(prepared, nn.Module):
            raise TypeError(
                f"state_dict takes a prepared model or optimizer, got a {type(prepared).__name__}; loaders, schedulers "
                "and the scaler have a state_dict() of their own"
            )
        meet(prepared)
        return model_state(self.unwrap_model(prepared), self.world)

    if not TYPE_CHECKING:  # for a type checker a name that is not here is an error

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(describe_missing(name), name=name, obj=self)

    def load_state_dict(self, prepared: nn.Module | Optimizer, state: Mapping[str, Any]) -> None:
        """Load a state made by `state_dict`, or by a plain model or optimizer, under any strategy and number of ranks.

        Every rank must call it; rank zero's state is loaded on all.

        Args:
            prepared: a prepared model or optimizer.
            state: with the names of the module that was given to `prepare`; only rank zero's counts.
        """
        if isinstance(prepared, Optimizer):
            load_optimizer_state(prepared, state, self.world)
        else:
            meet(prepared)
            load_model_state(self.unwrap_model(prepared), state, self.world)


def _joined_world(family: str | None) -> World:
    """The caller's world; if a launcher has started this process among others, it joins them first."""
    with suppress(NoWorldError):
        return current_world()
    from unisono.launch.hosts.join_world import join_world  # here: most processes do without

    return join_world(backend=family)


def _prepared_loader(
    world: World, moves: bool, splits: bool, seed: int | None, virtual: Any, workers: Any, loader: Any
) -> Any:
    """The loader of this rank; loaders of this package stay as they are."""
    if isinstance(loader, DeviceLoader | DeviceIterator | ParallelLoader):
        count = None if virtual is None else virtual_of(virtual).count
        if loader.num_virtual != count:
            raise ValueError(
                f"the {type(loader).__name__} was made with virtual_ranks={loader.num_virtual}, and the Accelerator "
                f"with {count}; give both the same"
            )
        return loader
    device = None if moves else torch.get_default_device()
    options: LoaderOptions = {"seed": seed, "virtual_ranks": virtual, "num_workers": workers}
    options["split"] = "global" if splits else "rank"
    return DeviceLoader(loader, device, world=world, **options)
