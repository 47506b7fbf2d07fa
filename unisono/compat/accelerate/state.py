"""`accelerate.state`: which rank this is, under Accelerate's names.

In Accelerate it is one object per process; here each instance is a view of the caller's world, so that threads of a
DataParallel see their own. A process started by torchrun joins its world on first use.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn, ParamSpec, TypeVar
from weakref import ref

import torch

from unisono import Accelerator, World, current_world, join_world
from unisono.building_blocks import HOST, RankView, resolve_device, solo_world, where
from unisono.compat.accelerate.utils.dataclasses import DistributedType
from unisono.compat.accelerate.utils.environment import parse_flag_from_env
from unisono.compat.left_out import left_out, refuse

__getattr__ = left_out(__name__)

P = ParamSpec("P")
T = TypeVar("T")


def joined_world() -> World:
    """The caller's world; if a launcher has announced one, this process joins it first."""
    join_world()
    return current_world()


def last_accelerator() -> Accelerator | None:
    """The rank's last Accelerator, if it is alive."""
    return joined_world().state.part(LastAccelerator).it()


def world_of_last() -> World:
    """Its world, which is another one than the caller's where a script of one rank has chosen the device; without one,
    the caller's."""
    made = last_accelerator()
    return joined_world() if made is None else made.world


def is_initialized() -> bool:
    """True: a state is a view of the caller's world, which always exists."""
    return True


def asked_device(cpu: bool = False) -> str | None:
    """The device that a script of one rank has asked for: the CPU, or that of ACCELERATE_TORCH_DEVICE."""
    return HOST.type if cpu or parse_flag_from_env("ACCELERATE_USE_CPU") else os.environ.get("ACCELERATE_TORCH_DEVICE")


def _keep(*_: Any) -> None:
    """There is no state to reset; the device was bound, and the world is left, where the rank was started."""


class PartialState(RankView):
    """The facts about a rank, whose `world` it is a view of: that of its last Accelerator, or the caller's.

    `cpu` has an effect on one rank without an Accelerator; other options are for the process group, which was created
    where the ranks were started.
    """

    initialized = True
    debug = fork_launched = False

    def __init__(self, cpu: bool = False, *, world: World | None = None, **options: Any) -> None:
        self.world = world or world_of_last()
        is_free = world is None and self.world is joined_world() and self.num_processes == 1
        if is_free and (device := asked_device(cpu)):
            self.world = solo_world(*resolve_device(device))

    @property
    def device(self) -> torch.device:
        return self.world.device

    default_device = device

    @property
    def backend(self) -> str | None:
        """The process group's backend; None with one rank."""
        return self.world.backend.process_group_backend if self.use_distributed else None

    @property
    def distributed_type(self) -> DistributedType:
        family = self.world.backend.name.upper()
        if family in DistributedType.__members__:  # torch_xla's scripts ask for it on one device, too
            return DistributedType[family]
        if self.world.world_size == 1:
            return DistributedType.NO
        usual = "MULTI_GPU" if self.world.backend.is_accelerated() else "MULTI_CPU"
        return DistributedType.__members__.get(f"MULTI_{family}", DistributedType[usual])

    @property
    def use_distributed(self) -> bool:
        return self.world.world_size > 1

    @property
    def is_last_process(self) -> bool:
        return self.world.rank == self.world.world_size - 1

    def on_local_main_process(self, function: Callable[P, T]) -> Callable[P, T | None]:
        return where(lambda: self.is_local_main_process, function)

    def on_last_process(self, function: Callable[P, T]) -> Callable[P, T | None]:
        return where(lambda: self.is_last_process, function)

    def on_process(self, function: Callable[..., Any] | None = None, process_index: int | None = None) -> Any:
        """Decorator: the function runs on that rank, and in a world of one; elsewhere it returns None."""
        return self._decorate_where(lambda: self.process_index == process_index, function)

    def on_local_process(
        self, function: Callable[..., Any] | None = None, local_process_index: int | None = None
    ) -> Any:
        """Like `on_process`, for the rank of that number on each machine."""
        return self._decorate_where(lambda: self.local_process_index == local_process_index, function)

    def _decorate_where(self, holds: Callable[[], bool], function: Callable[..., Any] | None) -> Any:
        decorate = partial(where, lambda: holds() or not self.use_distributed)
        return decorate if function is None else decorate(function)

    def print(self, *values: Any, **options: Any) -> None:
        if self.is_local_main_process:
            print(*values, **options)

    _reset_state = set_device = destroy_process_group = staticmethod(_keep)

    def __repr__(self) -> str:
        return (
            f"Distributed environment: {self.distributed_type.value}\nNum processes: {self.num_processes}\nProcess "
            f"index: {self.process_index}\nLocal process index: {self.local_process_index}\nDevice: {self.device}\n"
        )


class AcceleratorState(PartialState):
    """The facts about a rank, with the settings of its last Accelerator; arguments for one to be created have no
    effect.

    Attributes:
        mixed_precision: "no", "fp16" or "bf16".
        fsdp_plugin: the one that was given, or None.
    """

    deepspeed_plugin = deepspeed_plugins = megatron_lm_plugin = parallelism_config = device_mesh = None

    def __init__(
        self, mixed_precision: Any = None, cpu: bool = False, *, world: World | None = None, **options: Any
    ) -> None:
        super().__init__(cpu, world=world)
        last = joined_world().state.part(LastAccelerator)
        self.mixed_precision, self.fsdp_plugin = last.mixed_precision, last.fsdp_plugin

    @property
    def is_fsdp2(self) -> bool:
        return self.distributed_type == DistributedType.FSDP

    @property
    def distributed_type(self) -> DistributedType:
        """FSDP with an `fsdp_plugin`, with several processes."""
        is_sharded = self.fsdp_plugin is not None and self.world.takes_engines
        return DistributedType.FSDP if is_sharded else super().distributed_type

    def __repr__(self) -> str:
        return f"{super().__repr__()}\nMixed precision type: {self.mixed_precision}\n"


class GradientState:
    """The position of the rank's last Accelerator among its microbatches. What only a loader's own loop knows is an
    AttributeError."""

    initialized = sync_with_dataloader = adjust_scheduler = True
    _reset_state = staticmethod(_keep)

    def __init__(self, gradient_accumulation_plugin: Any = None) -> None:
        joined_world()

    @property
    def sync_gradients(self) -> bool:
        """Whether `optimizer.step()` takes a step at the current microbatch."""
        made = last_accelerator()
        return made is None or made.sync_gradients

    @property
    def num_steps(self) -> int:
        made = last_accelerator()
        return 1 if made is None else made.gradient_accumulation_steps

    @property
    def in_dataloader(self) -> bool:
        """Whether a loop over a prepared loader is running."""
        return any(each.is_open for each in world_of_last().state.deliveries.recent())

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the innermost loop has received its last batch. May wait for the loader: all ranks must ask, or
        none."""
        innermost = next((each for each in world_of_last().state.deliveries.recent() if each.is_open), None)
        return innermost is None or innermost.ends_here()

    def __getattr__(self, name: str) -> NoReturn:
        refuse(f"{__name__}.GradientState", name)


class LastAccelerator:
    """The rank's last Accelerator and its settings, which outlive it."""

    def __init__(self) -> None:
        self.it: Callable[[], Accelerator | None] = lambda: None
        self.mixed_precision = "no"
        self.fsdp_plugin: Any = None

    def set(self, accelerator: Accelerator, fsdp_plugin: Any) -> None:
        self.it, self.mixed_precision, self.fsdp_plugin = ref(accelerator), accelerator.mixed_precision, fsdp_plugin
