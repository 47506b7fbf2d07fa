"""How Accelerate's arguments map to the native ones, and which of them have no counterpart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from unisono.compat.accelerate.utils.dataclasses import (
    AutocastKwargs,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    DynamoBackend,
    FullyShardedDataParallelPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
    TorchDynamoPlugin,
)
from unisono.strategies import DDP, FSDP

_ENGINES = "DeepSpeed is not supported; leave it out, or shard by fsdp_plugin=FullyShardedDataParallelPlugin()"
_ONE_AXIS = "there is one axis, data parallel; shard large models by fsdp_plugin=FullyShardedDataParallelPlugin()"
_INSTEAD = {
    "deepspeed_plugin": _ENGINES,
    "deepspeed_plugins": _ENGINES,
    "megatron_lm_plugin": _ONE_AXIS,
    "torch_tp_plugin": _ONE_AXIS,
    "parallelism_config": _ONE_AXIS,
    "mixed_precision": "choose 'no', 'fp16' or 'bf16'",
}
_HOOKS = {
    DDPCommunicationHookType.NO: None,
    DDPCommunicationHookType.FP16: "fp16",
    DDPCommunicationHookType.BF16: "bf16",
    DDPCommunicationHookType.POWER_SGD: "powersgd",
}


def refuse_arguments(**given: Any) -> None:
    """Refuse arguments that have no counterpart.

    Raises:
        ValueError: one of them is not None.
    """
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"{name}={value!r:.100} has no counterpart here: {_INSTEAD[name]}")


class Handlers:
    """The elements of `kwargs_handlers`, by what they are for.

    Attributes:
        ddp, scaler, profile, autocast: None if not given.

    Raises:
        ValueError: one has no counterpart, or two are for the same thing.
    """

    ddp: DistributedDataParallelKwargs | None = None
    scaler: GradScalerKwargs | None = None
    profile: ProfileKwargs | None = None
    autocast: AutocastKwargs | None = None

    def __init__(self, given: Sequence[Any]) -> None:
        kinds = {
            DistributedDataParallelKwargs: "ddp",
            GradScalerKwargs: "scaler",
            ProfileKwargs: "profile",
            AutocastKwargs: "autocast",
            InitProcessGroupKwargs: "group",
        }
        for each in given:
            name = next((name for kind, name in kinds.items() if isinstance(each, kind)), None)
            if name is None:
                raise ValueError(
                    f"kwargs_handlers has a {type(each).__name__}, which has no counterpart here; leave it out: "
                    f"{', '.join(kind.__name__ for kind in kinds)} are taken"
                )
            if name in vars(self):
                raise ValueError(f"kwargs_handlers has two {type(each).__name__}; pass one")
            setattr(self, name, each)

    def ddp_options(self) -> DDP:
        """Convert them for the native Accelerator."""
        if self.ddp is None:
            return DDP()
        hook, wrapper = (DDPCommunicationHookType(each) for each in (self.ddp.comm_hook, self.ddp.comm_wrapper))
        if hook not in _HOOKS or wrapper != DDPCommunicationHookType.NO:
            raise ValueError(
                f"comm_hook={hook} with comm_wrapper={wrapper} has no counterpart here; choose comm_hook among "
                f"{', '.join(map(str, _HOOKS))}, and no wrapper"
            )
        return DDP(
            self.ddp.find_unused_parameters,
            self.ddp.bucket_cap_mb,
            self.ddp.gradient_as_bucket_view,
            self.ddp.broadcast_buffers,
            _HOOKS[hook],
            self.ddp.comm_state_option or None,
        )

    def scaler_options(self) -> dict[str, Any]:
        """Convert them for the native Accelerator."""
        options = (self.scaler or GradScalerKwargs()).to_dict()
        if not options.pop("enabled"):
            raise ValueError("GradScalerKwargs(enabled=False) has no counterpart: fp16 needs its loss scaled; use bf16")
        return options


def compile_arguments(
    backend: DynamoBackend | str | None, plugin: TorchDynamoPlugin | None
) -> bool | Mapping[str, Any]:
    """Convert them for the native Accelerator.

    Raises:
        ValueError: both are given.
    """
    if backend is not None and plugin is not None:
        raise ValueError("dynamo_backend and dynamo_plugin are both given; pass one of them")
    asked = plugin or TorchDynamoPlugin(backend=backend or DynamoBackend.NO)
    name = str(asked.backend).lower()
    if name == "no" or asked.disable:
        return False
    wanted = {
        "mode": asked.mode,
        "fullgraph": asked.fullgraph or None,
        "dynamic": asked.dynamic,
        "options": asked.options,
    }
    return {"backend": name} | {key: value for key, value in wanted.items() if value is not None}


def _sharding(plugin: FullyShardedDataParallelPlugin, num_machines: int) -> dict[str, Any]:
    """What is gathered, and among which ranks, by the fields of FSDP2 or by the name of one of FSDP1's strategies.

    The names are those of `torch.distributed.fsdp.ShardingStrategy`; the field may hold its members, too.
    """
    asked = plugin.reshard_after_forward
    if isinstance(asked, bool | int):
        return {"reshard_after_forward": asked}
    name = str(asked or getattr(plugin.sharding_strategy, "name", plugin.sharding_strategy)).upper().lstrip("_")
    options: dict[str, Any] = {}
    if name in ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2"):
        options["reshard_after_forward"] = False
    if name.startswith("HYBRID_SHARD"):
        options["replicas"] = num_machines
    return options


def fsdp_options(plugin: FullyShardedDataParallelPlugin, num_machines: int) -> FSDP:
    """Convert the plugin to the native Accelerator's strategy.

    Raises:
        ValueError: a field that changes results has no counterpart.
    """
    asked = {
        "ignored_modules": plugin.ignored_modules is not None,
        "param_init_fn": plugin.param_init_fn is not None,
        "activation_checkpointing": plugin.activation_checkpointing,
    }
    for name, is_asked in asked.items():
        if is_asked:
            raise ValueError(f"FullyShardedDataParallelPlugin({name}=...) has no counterpart here; leave it out")
    policy = plugin.mixed_precision_policy
    return FSDP(
        param_dtype=getattr(policy, "param_dtype", None),
        reduce_dtype=getattr(policy, "reduce_dtype", None),
        offload=bool(getattr(plugin.cpu_offload, "offload_params", plugin.cpu_offload)),
        **_sharding(plugin, num_machines),
    )
