"""`accelerate.Accelerator`: the native one, with Accelerate's constructor arguments and its other methods."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakSet

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader

from unisono import Accelerator as Native
from unisono import DeviceLoader, Tracker, Virtual, all_gather_object
from unisono.building_blocks import PreparedModel, explain_unknown_names, leaves, prepared
from unisono.compat.accelerate.data_loader import prepare_data_loader, skip_first_batches
from unisono.compat.accelerate.state import AcceleratorState, GradientState, LastAccelerator, asked_device, joined_world
from unisono.compat.accelerate.tracking import LibraryTracker, refuse_other_ranks, start_own
from unisono.compat.accelerate.utils import operations, other
from unisono.compat.accelerate.utils.dataclasses import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    DistributedType,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    ProfileKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
)
from unisono.compat.accelerate.utils.environment import parse_flag_from_env
from unisono.compat.left_out import describe_left_out
from unisono.errors import NoSuchBatchError

logger = logging.getLogger(__name__)

_ONE_AXIS = "there is one axis, data parallel; shard large models by fsdp_plugin=FullyShardedDataParallelPlugin()"
_ELSEWHERE = {
    **dict.fromkeys(DataLoaderConfiguration.__dataclass_fields__, "it is one of DataLoaderConfiguration's"),
    **dict.fromkeys(["deepspeed_plugin", "deepspeed_plugins"], f"DeepSpeed is not supported: {_ONE_AXIS}"),
    **dict.fromkeys(["megatron_lm_plugin", "torch_tp_plugin", "parallelism_config"], _ONE_AXIS),
}
"""What to do instead of arguments that are left out."""

_ONE_OF = (("dynamo_backend", "dynamo_plugin"), ("gradient_accumulation_steps", "gradient_accumulation_plugin"))
_SCHEDULERS = (LRScheduler, ReduceLROnPlateau)
_HANDLERS = (DistributedDataParallelKwargs, GradScalerKwargs, ProfileKwargs, AutocastKwargs, InitProcessGroupKwargs)


def _handlers_by_kind(given: Sequence[KwargsHandler]) -> dict[type[Any], Any]:
    kinds = [type(each) for each in given]
    for kind in kinds:
        if kind not in _HANDLERS or kinds.count(kind) > 1:
            raise ValueError(
                f"kwargs_handlers has {kinds.count(kind)} {kind.__name__}; pass one at most of each of "
                f"{', '.join(each.__name__ for each in _HANDLERS)}"
            )
    return dict(zip(kinds, given, strict=True))


def _view_of(path: str) -> Any:
    """A property: the attribute that this path leads to."""
    return property(attrgetter(path))


def _handler_of(kind: type[KwargsHandler]) -> Any:
    """A property: the handler of this kind that was given, or None."""
    return property(lambda accelerator: accelerator._handlers.get(kind))


@explain_unknown_names(_ELSEWHERE)
class Accelerator(Native):
    """Accepts Accelerate's arguments; docs/migrating_from_accelerate.md says what they mean here.

    Args:
        mixed_precision: "no", "fp16" or "bf16"; None uses ACCELERATE_MIXED_PRECISION, or "no".
        fsdp_plugin: selects strategy="fsdp".
        rng_types: has no effect: orders are functions of the seed.
        schedule_unit, virtual_ranks: as for the native one; "device_step" is Accelerate's meaning.
        step_scheduler_with_optimizer: False leaves schedulers unchanged: each of their steps counts.

    Attributes:
        state, gradient_state: the rank's `AcceleratorState` and `GradientState`.
        dataloader_config, project_configuration: as given.

    Raises:
        TypeError, ValueError: an argument has no counterpart; the message says what to do instead.
    """

    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool = False,
        mixed_precision: str | None = None,
        gradient_accumulation_steps: int = 1,
        cpu: bool = False,
        dataloader_config: DataLoaderConfiguration | None = None,
        fsdp_plugin: FullyShardedDataParallelPlugin | None = None,
        rng_types: Sequence[Any] | None = None,
        log_with: Any = None,
        project_dir: str | os.PathLike[str] | None = None,
        project_config: ProjectConfiguration | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: Sequence[KwargsHandler] | None = None,
        dynamo_backend: str | None = None,
        dynamo_plugin: TorchDynamoPlugin | None = None,
        *,
        schedule_unit: Literal["batch", "step", "device_step"] | None = "device_step",
        virtual_ranks: int | Virtual | None = None,
    ) -> None:
        given = locals()
        for names in _ONE_OF:
            if all(given[name] not in (None, 1) for name in names):
                raise ValueError(f"{' and '.join(names)} are both given; pass one of them")
        handlers = _handlers_by_kind(kwargs_handlers or ())
        for name in ("DEEPSPEED", "MEGATRON_LM", "PARALLELISM_CONFIG"):  # as `accelerate launch` sets them
            if parse_flag_from_env(f"ACCELERATE_USE_{name}"):
                raise ValueError(f"ACCELERATE_USE_{name} is set, but {_ONE_AXIS}; unset it")
        precision = str(mixed_precision or os.environ.get("ACCELERATE_MIXED_PRECISION") or "no")
        project = project_config or ProjectConfiguration()
        if project_dir is not None:
            project.set_directories(os.fspath(project_dir))
        trackers = list(log_with) if isinstance(log_with, list | tuple | set) else [log_with]
        if project.logging_dir is None and any(str(each).lower() == "tensorboard" for each in trackers):
            raise ValueError(
                f"log_with={log_with!r} writes files, and no directory is given; pass project_dir, or "
                "project_config=ProjectConfiguration(logging_dir=...)"
            )
        config = dataloader_config or DataLoaderConfiguration(split_batches=split_batches)
        dynamo = dynamo_plugin or TorchDynamoPlugin()
        dynamo.backend = dynamo_backend or dynamo.backend
        steps = int(os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", gradient_accumulation_steps))
        accumulation = gradient_accumulation_plugin or GradientAccumulationPlugin(steps)
        scaler = handlers.get(GradScalerKwargs, GradScalerKwargs())
        if fsdp_plugin is None and parse_flag_from_env("ACCELERATE_USE_FSDP"):
            fsdp_plugin = FullyShardedDataParallelPlugin()
        strategy = fsdp_plugin or handlers.get(DistributedDataParallelKwargs, DistributedDataParallelKwargs())
        world = joined_world()
        if (every := world.state.snapshot_every) is not None and not config.use_stateful_dataloader:
            raise ValueError(
                f"snapshot_every={every} continues within an epoch, but here loaders begin the epoch again; pass "
                "dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True)"
            )
        super().__init__(
            mixed_precision=precision,  # type: ignore[arg-type]  # an unknown one is refused there
            gradient_accumulation_steps=accumulation.to_native(),
            device=asked_device(cpu) if world.world_size == 1 else None,  # of several, each has that of its start
            device_placement=device_placement,
            split_batches=config.split_batches,
            compile=dynamo.to_native(),
            world=world,
            strategy=strategy.to_native(),
            scaler_options=scaler.to_native() if precision == "fp16" else None,
            schedule_unit=schedule_unit,
            virtual_ranks=virtual_ranks,
            log_with=log_with,
            project_dir=project.project_dir,
            logging_dir=project.logging_dir,
            total_limit=project.total_limit,
        )
        self.device_placement, self.rng_types, self.log_with = device_placement, rng_types, trackers
        self.step_scheduler_with_optimizer = step_scheduler_with_optimizer
        self._virtual_ranks, self._has_warned = virtual_ranks, False
        self._loaders: WeakSet[DeviceLoader] = WeakSet()
        self._handlers = handlers
        self.dataloader_config, self.project_configuration = config, project
        world.state.part(LastAccelerator).set(self, fsdp_plugin)
        self.state, self.gradient_state = AcceleratorState(world=self.world), GradientState()

    def prepare(self, *objects: Any, device_placement: Sequence[bool] | None = None) -> Any:
        """Like the native one, but returns unchanged what is already prepared, and what is not a model, optimizer,
        scheduler or DataLoader. ValueError if `device_placement` differs from the Accelerator's, which is that of all
        objects."""
        if device_placement is not None and any(each != self.device_placement for each in device_placement):
            raise ValueError(
                f"device_placement={device_placement} differs from Accelerator(device_placement={self.device_placement}"
                "); prepare what is placed otherwise by an Accelerator of its own"
            )
        if not self.step_scheduler_with_optimizer:  # they are saved all the same
            self.register_for_checkpointing(*(each for each in objects if isinstance(each, _SCHEDULERS)))
        are_taken = [self._is_taken(each) for each in objects]
        taken = [self._made_loader(each) for each, is_taken in zip(objects, are_taken, strict=True) if is_taken]
        found = iter(super().prepare(*taken, None, None))  # with these it is a tuple, however few are taken
        made = tuple(next(found) if is_taken else each for each, is_taken in zip(objects, are_taken, strict=True))
        return made[0] if len(made) == 1 else made

    def prepare_model(self, model: Any, device_placement: bool | None = None, evaluation_mode: bool = False) -> Any:
        """`prepare`, for one model. `evaluation_mode` has no effect: without an optimizer nothing is reduced."""
        return self.prepare(model, device_placement=None if device_placement is None else [device_placement])

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        """`prepare`, for one optimizer."""
        return self.prepare_model(optimizer, device_placement)

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """`prepare`, for one scheduler."""
        return self.prepare(scheduler)

    def prepare_data_loader(
        self, data_loader: Any, device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        """`prepare`, for one DataLoader."""
        return self.prepare_model(data_loader, device_placement)

    def _is_taken(self, each: Any) -> bool:
        if isinstance(each, _SCHEDULERS):
            return self.step_scheduler_with_optimizer
        is_made = isinstance(each, PreparedModel) or (isinstance(each, Optimizer) and each in prepared)
        return isinstance(each, nn.Module | Optimizer | DataLoader) and not is_made

    def _made_loader(self, each: Any) -> Any:
        if not isinstance(each, DataLoader):
            return each
        made = prepare_data_loader(
            each,
            split_batches=self.split_batches,
            put_on_device=self.device_placement,
            data_seed=self.dataloader_config.data_seed,
            world=self.world,
            virtual_ranks=self._virtual_ranks,
        )
        self._loaders.add(made)
        return made

    def free_memory(self, *objects: Any) -> list[None]:  # type: ignore[override]
        """Like the native one; returns one None per object, to assign in their place."""
        super().free_memory()
        self._loaders.clear()
        return other.release_memory(*objects)

    clear = free_memory

    # Collectives.

    def gather(self, tensor: Any) -> Any:  # type: ignore[override]
        """Like the native one; tensors that require grad are gathered as values."""
        return operations.gather(tensor, self.world)

    def gather_for_metrics(  # type: ignore[override]
        self, input_data: Any, use_gather_object: bool = False
    ) -> Any:
        """Like the native one; objects are gathered into one list over all ranks.

        Objects are gathered as they are: if a batch has repeated samples, remove them first (`loader.valid_samples`).
        Rows that match no batch of a prepared loader are gathered as they are, too; a warning says so, once.
        """
        if use_gather_object or not all(isinstance(each, torch.Tensor) for each in leaves(input_data)):
            return [each for part in all_gather_object(list(input_data), self.world) for each in part]
        try:
            return super().gather_for_metrics(input_data)
        except NoSuchBatchError as error:
            if self.is_main_process and not self._has_warned:
                logger.warning("gather_for_metrics takes all rows of its input: %s", str(error))
                self._has_warned = True
            return operations.gather(input_data, self.world)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Like the native one, but the default is the sum."""
        return operations.reduce(tensor, reduction, scale, self.world)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
        """Like the native one."""
        return super().pad_across_processes(tensor, dim, pad_index, pad_first)

    def join_uneven_inputs(self, *_: Any, **__: Any) -> AbstractContextManager[None]:
        """There is nothing to join: all ranks take the same number of steps."""
        return nullcontext()

    # Code that runs on some ranks only.

    on_local_main_process = _view_of("state.on_local_main_process")
    on_last_process = _view_of("state.on_last_process")
    on_process = _view_of("state.on_process")
    on_local_process = _view_of("state.on_local_process")
    is_last_process = _view_of("state.is_last_process")
    distributed_type = _view_of("state.distributed_type")
    use_distributed = multi_device = _view_of("state.use_distributed")
    is_fsdp2 = _view_of("state.is_fsdp2")

    deepspeed_plugin = parallelism_config = fp8_backend = None  # not supported
    should_save_model = _view_of("is_main_process")

    # How loaders are prepared.

    even_batches = _view_of("dataloader_config.even_batches")
    dispatch_batches = _view_of("dataloader_config.dispatch_batches")
    use_seedable_sampler = _view_of("dataloader_config.use_seedable_sampler")
    non_blocking = _view_of("dataloader_config.non_blocking")
    use_stateful_dataloader = _view_of("dataloader_config.use_stateful_dataloader")

    skip_first_batches = staticmethod(skip_first_batches)

    # Models and how they are saved.

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        return other.extract_model_from_parallel(model, keep_fp32_wrapper, keep_torch_compile)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Mapping[str, Any]:
        """The model's state on this rank. With FSDP every rank must call it; it is complete on rank zero, and empty
        elsewhere."""
        if self.distributed_type != DistributedType.FSDP:
            return self.unwrap_model(model).state_dict()
        return self.state_dict(model) or {}

    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        other.save(obj, f, self.project_configuration.save_on_each_node, safe_serialization)

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: Any = None,
        safe_serialization: bool = True,
    ) -> None:
        """Like the native one: one file. `max_shard_size` has no effect."""
        super().save_model(model, save_directory, safe_serialization=safe_serialization)

    def save_state(  # type: ignore[override]
        self, output_dir: str | None = None, safe_serialization: bool = True, **options: Any
    ) -> str:
        """Like the native one; with automatic checkpoint naming, `output_dir` is ignored."""
        is_named = self.project_configuration.automatic_checkpoint_naming
        if output_dir is None and not is_named:
            raise ValueError(
                "save_state() got no output_dir; pass one, or ProjectConfiguration(automatic_checkpoint_naming=True)"
            )
        saved = super().save_state(None if is_named else output_dir)
        self.project_configuration.iteration += 1
        return str(saved)

    def load_state(self, input_dir: str | None = None, **options: Any) -> None:  # type: ignore[override]
        """Like the native one; None uses the latest automatically named checkpoint.

        Loaders restart the epoch that they were in, and scripts skip what was already trained on
        (`skip_first_batches`); with `use_stateful_dataloader` they continue after the last batch.
        """
        super().load_state(input_dir)
        if not self.use_stateful_dataloader:
            for loader in self._loaders:
                loader.set_epoch(loader.epoch)

    save_iteration = _view_of("project_configuration.iteration")  # their numbers follow those in the directory
    logging_dir = _view_of("project_configuration.logging_dir")  # trackers write to `project_dir`

    # Trackers. Accelerate has no file of JSON lines, and calls of a run without trackers do nothing there.

    def init_trackers(
        self,
        project_name: str,
        config: Mapping[str, Any] | None = None,
        init_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        refuse_other_ranks(self.log_with, self.num_processes)
        super().init_trackers(project_name, config, init_kwargs)
        start_own(self.trackers, config)

    def log(
        self, values: Mapping[str, Any], step: int | None = None, log_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """Like the native one, but does nothing before `init_trackers`. ValueError for `log_kwargs`."""
        if log_kwargs:
            raise ValueError(
                f"log_kwargs={log_kwargs} is not supported; log with the library's own object, "
                "accelerator.get_tracker(name, unwrap=True)"
            )
        if super().trackers:
            super().log(values, step)

    @property
    def trackers(self) -> list[Tracker]:
        """Like the native ones, without the JSON lines file."""
        return [self._seen(each) for each in super().trackers if getattr(each, "name", "") != "jsonl"]

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        found = super().get_tracker(name, unwrap)
        return found if unwrap else self._seen(found)

    def _seen(self, tracker: Any) -> Any:
        """The tracker, or the `LibraryTracker` of a library's one."""
        is_given = any(tracker is each for each in self.log_with)
        return LibraryTracker(tracker) if hasattr(tracker, "tracker") and not is_given else tracker

    # Profiling and precision.

    @property
    def native_amp(self) -> bool:
        """Whether forward passes run under autocast. Setting it to False is an error then."""
        return self.mixed_precision != "no"

    @native_amp.setter
    def native_amp(self, is_used: bool) -> None:
        if is_used != self.native_amp:
            raise ValueError(
                f"native_amp={is_used}, but this Accelerator has mixed_precision={self.mixed_precision!r}; pass "
                f"mixed_precision={'bf16' if is_used else 'no'!r} in its place"
            )

    def autocast(  # type: ignore[override]
        self, autocast_handler: AutocastKwargs | None = None
    ) -> AbstractContextManager[Any]:
        handler: AutocastKwargs | None = autocast_handler or self._handlers.get(AutocastKwargs)
        return super().autocast() if handler is None else super().autocast(handler.enabled, handler.cache_enabled)

    autocast_handler, ddp_handler, scaler_handler, init_handler, profile_handler = map(
        _handler_of,
        (AutocastKwargs, DistributedDataParallelKwargs, GradScalerKwargs, InitProcessGroupKwargs, ProfileKwargs),
    )

    def verify_device_map(self, model: nn.Module) -> bool:
        """Whether parts of the model are on several devices."""
        return len({*getattr(model, "hf_device_map", {}).values()}) > 1

    def profile(self, profile_handler: ProfileKwargs | None = None) -> AbstractContextManager[torch.profiler.profile]:
        """A block that is profiled, as the handler says."""
        return other.profiled(profile_handler or self._handlers.get(ProfileKwargs) or ProfileKwargs(), self.world)

    if not TYPE_CHECKING:  # for a type checker a name that is not here is an error

        def __getattr__(self, name: str) -> Any:
            if text := describe_left_out("Accelerator", name):
                raise AttributeError(text, name=name, obj=self)
            return super().__getattr__(name)
