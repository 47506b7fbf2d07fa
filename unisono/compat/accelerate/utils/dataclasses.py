"""`accelerate.utils.dataclasses`: the settings of an Accelerator, and what they are natively.

Fields without a counterpart are accepted if they only affect speed or memory; those that would change results are a
ValueError with advice when the Accelerator reads them. Defaults that `accelerate launch` sets are those of its
environment variables.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from enum import StrEnum
from functools import partial
from typing import Any

import torch

from unisono.building_blocks import check_choice
from unisono.compat.accelerate.utils.environment import str_to_bool
from unisono.compat.left_out import left_out
from unisono.strategies import DDP, FSDP

__getattr__ = left_out(__name__)


def _refuse_fields(settings: Any, advice: str, **given: bool) -> None:
    """Refuse fields without a counterpart, if they are given."""
    for name, is_given in given.items():
        if is_given:
            raise ValueError(f"{type(settings).__name__}({name}=...) has no counterpart here: {advice}")


def _variable(name: str, default: Any = None, parse: Callable[[str], Any] = str) -> Callable[[], Any]:
    """A default that the environment variable has."""

    def find() -> Any:
        given = os.environ.get(name)
        return default if given is None else parse(given)

    return find


_flag = partial(_variable, parse=lambda given: bool(str_to_bool(given)))


class DistributedType(StrEnum):
    """How ranks are connected: NO, MULTI_CPU, MULTI_GPU, XLA and FSDP occur; the others exist for comparisons."""

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    MULTI_NPU = "MULTI_NPU"
    MULTI_MLU = "MULTI_MLU"
    MULTI_SDAA = "MULTI_SDAA"
    MULTI_MUSA = "MULTI_MUSA"
    MULTI_XPU = "MULTI_XPU"
    MULTI_HPU = "MULTI_HPU"
    MULTI_NEURON = "MULTI_NEURON"
    DEEPSPEED = "DEEPSPEED"
    FSDP = "FSDP"
    XLA = "XLA"
    MEGATRON_LM = "MEGATRON_LM"


# Their values are these names in lower case.
ComputeEnvironment = StrEnum("ComputeEnvironment", "LOCAL_MACHINE AMAZON_SAGEMAKER")
DynamoBackend = StrEnum("DynamoBackend", "NO EAGER AOT_EAGER INDUCTOR CUDAGRAPHS IPEX TVM OPENXLA HPU_BACKEND")
PrecisionType = StrEnum("PrecisionType", "NO FP8 FP16 BF16")
RNGType = StrEnum("RNGType", "TORCH CUDA MLU SDAA MUSA NPU XLA XPU HPU NEURON GENERATOR")
DDPCommunicationHookType = StrEnum("DDPCommunicationHookType", "NO FP16 BF16 POWER_SGD BATCHED_POWER_SGD")
LoggerType = StrEnum("LoggerType", "ALL TENSORBOARD WANDB MLFLOW")


@dataclass
class KwargsHandler:
    """Base class of the elements of `Accelerator(kwargs_handlers=[...])`."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def to_kwargs(self) -> dict[str, Any]:
        """The fields that differ from their defaults."""
        defaults = type(self)().to_dict()
        return {name: value for name, value in self.to_dict().items() if value != defaults[name]}


@dataclass
class AutocastKwargs(KwargsHandler):
    enabled: bool = True
    cache_enabled: bool | None = None


@dataclass
class DistributedDataParallelKwargs(KwargsHandler):
    """For DistributedDataParallel. `static_graph`, `dim` and `check_reduction` do not change results, and have no
    effect."""

    dim: int = 0
    broadcast_buffers: bool = True
    bucket_cap_mb: int = 25
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    comm_hook: str = DDPCommunicationHookType.NO
    comm_wrapper: str = DDPCommunicationHookType.NO
    comm_state_option: dict[str, Any] = field(default_factory=dict)

    def to_native(self) -> DDP:
        check_choice(self.comm_hook, "comm_hook", "no", "fp16", "bf16", "power_sgd")
        check_choice(self.comm_wrapper, "comm_wrapper", "no")
        hook: Any = None if self.comm_hook == "no" else str(self.comm_hook)
        if hook == "power_sgd":
            from unisono.building_blocks import power_sgd  # which imports torch's DDP

            hook = power_sgd(**self.comm_state_option)
        return DDP(
            self.find_unused_parameters,
            self.bucket_cap_mb,
            self.gradient_as_bucket_view,
            self.broadcast_buffers,
            hook,
        )


@dataclass
class GradScalerKwargs(KwargsHandler):
    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True

    def to_native(self) -> dict[str, Any]:
        _refuse_fields(self, "fp16 needs its loss scaled; use bf16", enabled=not self.enabled)
        return {name: value for name, value in self.to_dict().items() if name != "enabled"}


@dataclass
class InitProcessGroupKwargs(KwargsHandler):
    """Has no effect: the process group is created where the ranks are started, by `spawn` or `unisono run`."""

    backend: str | None = None
    init_method: str | None = None
    timeout: timedelta | None = None


@dataclass
class ProfileKwargs(KwargsHandler):
    """For `torch.profiler.profile`.

    Attributes:
        activities: device families, by the names of torch.profiler.ProfilerActivity in lower case.
        schedule_option: the arguments of `torch.profiler.schedule`.
        output_trace_dir: where each rank exports `profile_{rank}.json`.
    """

    activities: list[str] | None = None
    schedule_option: dict[str, int] | None = None
    on_trace_ready: Callable[..., Any] | None = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: str | None = None

    def build(self) -> torch.profiler.profile:
        kinds, options = torch.profiler.ProfilerActivity.__members__, dict(vars(self))
        activities, schedule, _ = (options.pop(name) for name in ("activities", "schedule_option", "output_trace_dir"))
        return torch.profiler.profile(
            activities=None if activities is None else [kinds[each.upper()] for each in activities],
            schedule=None if schedule is None else torch.profiler.schedule(**schedule),
            **options,
        )


@dataclass
class DataLoaderConfiguration:
    """How DataLoaders are prepared. The other fields have no effect: batches are always moved ahead of the loop, tails
    are split so that each sample counts once, streams are split across ranks, and every loader has a `state_dict`.

    Attributes:
        split_batches: a batch of the DataLoader is the global batch.
        data_seed: the seed for the order of shuffled DataLoaders; None uses that of `set_seed`.
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    data_seed: int | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False
    custom_classes: Any = None


@dataclass
class ProjectConfiguration:
    """Where a run saves its files."""

    project_dir: str | None = None
    logging_dir: str | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0
    save_on_each_node: bool = False

    def __post_init__(self) -> None:
        self.set_directories(self.project_dir)

    def set_directories(self, project_dir: str | None = None) -> None:
        self.project_dir = project_dir
        self.logging_dir = project_dir if self.logging_dir is None else self.logging_dir


@dataclass
class GradientAccumulationPlugin(KwargsHandler):
    """The number of microbatches per step; None is 1. `sync_each_batch` has no effect: it would only save memory."""

    num_steps: int | None = None
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False

    def to_native(self) -> int:
        advice = "a loop's last step uses the microbatches that are left at its end; leave it out"
        _refuse_fields(self, advice, sync_with_dataloader=not self.sync_with_dataloader)
        return 1 if self.num_steps is None else self.num_steps


@dataclass
class TorchDynamoPlugin(KwargsHandler):
    """The arguments of `torch.compile`; nothing is compiled with the backend "no"."""

    backend: str = field(default_factory=_variable("ACCELERATE_DYNAMO_BACKEND", "no"))
    mode: str | None = field(default_factory=_variable("ACCELERATE_DYNAMO_MODE"))
    fullgraph: bool = field(default_factory=_flag("ACCELERATE_DYNAMO_USE_FULLGRAPH", False))
    dynamic: bool | None = field(default_factory=_flag("ACCELERATE_DYNAMO_USE_DYNAMIC"))
    options: Mapping[str, Any] | None = None
    disable: bool = False
    use_regional_compilation: bool = False

    def to_native(self) -> bool | Mapping[str, Any]:
        name = str(self.backend).lower()
        if name == "no" or self.disable:
            return False
        wanted: dict[str, Any] = {"mode": self.mode, "fullgraph": self.fullgraph or None, "dynamic": self.dynamic}
        wanted |= {"options": self.options, "backend": name}
        return {key: value for key, value in wanted.items() if value is not None}


def _resharding(given: str) -> bool:
    """FSDP_RESHARD_AFTER_FORWARD: a bool, or for FSDP1 its strategy, of which only one keeps the parameters."""
    if given in ("FULL_SHARD", "SHARD_GRAD_OP"):
        return given == "FULL_SHARD"
    return bool(str_to_bool(given))


@dataclass
class FullyShardedDataParallelPlugin:
    """For FSDP: `strategy="fsdp"`, torch's FSDP2. Fields that only affect speed and memory have no effect: which layers
    are gathered together, what is prefetched, how states are saved."""

    fsdp_version: int = 2
    sharding_strategy: Any = field(default_factory=_variable("FSDP_SHARDING_STRATEGY"))
    reshard_after_forward: bool | int | None = field(
        default_factory=_variable("FSDP_RESHARD_AFTER_FORWARD", parse=_resharding)
    )
    backward_prefetch: Any = None
    mixed_precision_policy: Any = None
    auto_wrap_policy: Any = None
    cpu_offload: Any = field(default_factory=_flag("FSDP_OFFLOAD_PARAMS", False))
    ignored_modules: Iterable[Any] | None = None
    state_dict_type: Any = None
    state_dict_config: Any = None
    optim_state_dict_config: Any = None
    limit_all_gathers: bool = True
    use_orig_params: bool | None = None
    param_init_fn: Callable[..., Any] | None = None
    sync_module_states: bool | None = None
    forward_prefetch: bool | None = None
    activation_checkpointing: bool = field(default_factory=_flag("FSDP_ACTIVATION_CHECKPOINTING", False))
    cpu_ram_efficient_loading: bool | None = None
    transformer_cls_names_to_wrap: list[str] | None = None
    min_num_params: int | None = None

    def to_native(self) -> FSDP:
        _refuse_fields(
            self,
            "leave it out; in place of a strategy of FSDP1, pass reshard_after_forward=False, which is SHARD_GRAD_OP",
            sharding_strategy=self.sharding_strategy not in (None, "1")
            and "FULL_SHARD" not in str(self.sharding_strategy),
            ignored_modules=self.ignored_modules is not None,
            param_init_fn=self.param_init_fn is not None,
            activation_checkpointing=self.activation_checkpointing,
        )
        policy = self.mixed_precision_policy
        return FSDP(
            param_dtype=getattr(policy, "param_dtype", None),
            reduce_dtype=getattr(policy, "reduce_dtype", None),
            output_dtype=getattr(policy, "output_dtype", None),
            # That of FSDP1's policy, which has no type of outputs, is about inner units only.
            cast_forward_inputs=getattr(policy, "cast_forward_inputs", True) or not hasattr(policy, "output_dtype"),
            offload=bool(getattr(self.cpu_offload, "offload_params", self.cpu_offload)),
            reshard_after_forward=self.reshard_after_forward,
        )
