"""`accelerate.Accelerator`: the native one, with Accelerate's constructor arguments and its other methods."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader

from unisono.accelerator import Accelerator as Native
from unisono.arguments import explain_unknown_names
from unisono.compat.accelerate.data_loader import prepare_data_loader, skip_first_batches
from unisono.compat.accelerate.state import AcceleratorState, GradientState, LastAccelerator, joined_world
from unisono.compat.accelerate.utils import other
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
from unisono.parallel.collectives import all_gather_object
from unisono.parallel.prepared.checks import AUTOCAST
from unisono.parallel.prepared.metrics import NoSuchBatchError
from unisono.parallel.prepared.model import PreparedModel
from unisono.parallel.prepared.scheduler import Unit
from unisono.tree import leaves

logger = logging.getLogger(__name__)

_ONE_AXIS = "there is one axis, data parallel; shard large models by fsdp_plugin=FullyShardedDataParallelPlugin()"
_ELSEWHERE = {
    **dict.fromkeys(DataLoaderConfiguration.__dataclass_fields__, "it is one of DataLoaderConfiguration's"),
    **dict.fromkeys(["deepspeed_plugin", "deepspeed_plugins"], f"DeepSpeed is not supported: {_ONE_AXIS}"),
    **dict.fromkeys(["megatron_lm_plugin", "torch_tp_plugin", "parallelism_config"], _ONE_AXIS),
}
"""What to do instead of arguments that are left out."""

_ONE_OF = (("dynamo_backend", "dynamo_plugin"), ("gradient_accumulation_steps", "gradient_accumulation_plugin"))
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


@explain_unknown_names(_ELSEWHERE)
class Accelerator(Native):
    """Accepts Accelerate's arguments; docs/migrating_from_accelerate.md says what they mean here.

    Args:
        mixed_precision: "no", "fp16" or "bf16"; None uses ACCELERATE_MIXED_PRECISION, or "no".
        fsdp_plugin: selects strategy="fsdp".
        rng_types: has no effect: orders are functions of the seed.
        schedule_unit: as for the native one; "device_step" is Accelerate's meaning.
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
        schedule_unit: Unit | None = "device_step",
    ) -> None:
        given = locals()
        for names in _ONE_OF:
            if all(given[name] not in (None, 1) for name in names):
                raise ValueError(f"{' and '.join(names)} are both given; pass one of them")
        handlers = _handlers_by_kind(kwargs_handlers or ())
        precision = str(mixed_precision or os.environ.get("ACCELERATE_MIXED_PRECISION") or "no")
        project = project_config or ProjectConfiguration()
        if project_dir is not None:
            project.set_directories(os.fspath(project_dir))
        config = dataloader_config or DataLoaderConfiguration(split_batches=split_batches)
        dynamo = dynamo_plugin or TorchDynamoPlugin(backend=dynamo_backend or "no")
        accumulation = gradient_accumulation_plugin or GradientAccumulationPlugin(gradient_accumulation_steps)
        scaler = handlers.get(GradScalerKwargs, GradScalerKwargs())
        strategy = fsdp_plugin or handlers.get(DistributedDataParallelKwargs, DistributedDataParallelKwargs())
        world = joined_world()
        super().__init__(
            mixed_precision=precision,  # type: ignore[arg-type]  # an unknown one is refused there
            gradient_accumulation_steps=accumulation.to_native(),
            cpu=cpu and world.world_size == 1,  # with several ranks, each keeps the device that it was started with
            device_placement=device_placement,
            split_batches=config.split_batches,
            compile=dynamo.to_native(),
            world=world,
            strategy=strategy.to_native(),
            scaler_options=scaler.to_native() if precision == "fp16" else None,
            schedule_unit=schedule_unit,
            log_with=log_with,
            project_dir=project.project_dir,
            total_limit=project.total_limit,
        )
        self._has_warned = False
        self._moves, self._steps_scheduler, self._handlers = device_placement, step_scheduler_with_optimizer, handlers
        self.dataloader_config, self.project_configuration = config, project
        self.world.state.part(LastAccelerator).set(self, fsdp_plugin)
        self.state, self.gradient_state = AcceleratorState(world=self.world), GradientState()

    def prepare(self, *objects: Any) -> Any:
        """Like the native one, but returns unchanged what is already prepared, and what is not a model, optimizer,
        scheduler or DataLoader. (Accelerate's `device_placement` is the Accelerator's here, for all objects.)"""
        taken = [self._made_loader(each) for each in objects if self._is_taken(each)]
        found = iter(super().prepare(*taken, None, None))  # with these it is a tuple, however few are taken
        made = tuple(next(found) if self._is_taken(each) else each for each in objects)
        return made[0] if len(made) == 1 else made

    def prepare_model(self, prepared: Any, device_placement: Any = None, **options: Any) -> Any:
        """`prepare`, for one object."""
        return self.prepare(prepared)

    prepare_optimizer = prepare_scheduler = prepare_data_loader = prepare_model

    def _is_taken(self, each: Any) -> bool:
        if isinstance(each, LRScheduler | ReduceLROnPlateau):
            return self._steps_scheduler
        return isinstance(each, nn.Module | Optimizer | DataLoader) and not isinstance(each, PreparedModel)

    def _made_loader(self, each: Any) -> Any:
        if not isinstance(each, DataLoader):
            return each
        seed = self.dataloader_config.data_seed
        return prepare_data_loader(
            each, split_batches=self.split_batches, put_on_device=self._moves, data_seed=seed, world=self.world
        )

    def free_memory(self, *objects: Any) -> list[None]:  # type: ignore[override]
        """Like the native one; returns one None per object, to assign in their place."""
        super().free_memory()
        return other.release_memory(*objects)

    clear = free_memory

    # Collectives.

    def gather(self, tensor: Any) -> Any:  # type: ignore[override]
        """Like the native one; tensors that require grad are gathered as values."""
        return other.gather(tensor, self.world)

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
            return other.gather(input_data, self.world)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Like the native one, but the default is the sum."""
        return other.reduce(tensor, reduction, scale, self.world)

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

    deepspeed_plugin = None  # not supported
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
            for loader in self._prepared.loaders():
                loader.set_epoch(loader.epoch)

    save_iteration = _view_of("project_configuration.iteration")  # their numbers follow those in the directory
    logging_dir = _view_of("project_configuration.logging_dir")  # trackers write to `project_dir`

    # Profiling and precision.

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        handler: AutocastKwargs | None = autocast_handler or self._handlers.get(AutocastKwargs)
        if handler is None or self.mixed_precision not in AUTOCAST:
            return super().autocast()
        dtype = AUTOCAST[self.mixed_precision]
        return torch.autocast(self.device.type, dtype, handler.enabled, handler.cache_enabled)

    def profile(self, profile_handler: ProfileKwargs | None = None) -> AbstractContextManager[torch.profiler.profile]:
        """A block that is profiled, as the handler says."""
        return other.profiled(profile_handler or self._handlers.get(ProfileKwargs) or ProfileKwargs(), self.world)
