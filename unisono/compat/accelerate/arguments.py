"""How Accelerate's arguments map to the native ones, and which of them have no counterpart: those are a ValueError."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from unisono.compat.accelerate.utils.dataclasses import (
    AutocastKwargs,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    DynamoBackend,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    LoggerType,
    ProfileKwargs,
    TorchDynamoPlugin,
)
from unisono.strategies import DDP, FSDP

_SHARD = "shard large models by fsdp_plugin=FullyShardedDataParallelPlugin()"
_ENGINES = f"DeepSpeed is not supported; leave it out, or {_SHARD}"
_ONE_AXIS = f"there is one axis, data parallel; {_SHARD}"
_REFUSED = {
    "deepspeed_plugin": _ENGINES,
    "deepspeed_plugins": _ENGINES,
    "megatron_lm_plugin": _ONE_AXIS,
    "torch_tp_plugin": _ONE_AXIS,
    "parallelism_config": _ONE_AXIS,
}
_HANDLERS = (DistributedDataParallelKwargs, GradScalerKwargs, ProfileKwargs, AutocastKwargs, InitProcessGroupKwargs)


def _power_sgd(options: Mapping[str, Any]) -> Callable[[Any], Any]:
    from unisono.parallel.strategies.ddp import power_sgd  # which imports torch's DDP

    return power_sgd(**options)


_HOOKS: dict[DDPCommunicationHookType, Callable[[Mapping[str, Any]], Any]] = {
    DDPCommunicationHookType.NO: lambda options: None,
    DDPCommunicationHookType.FP16: lambda options: "fp16",
    DDPCommunicationHookType.BF16: lambda options: "bf16",
    DDPCommunicationHookType.POWER_SGD: _power_sgd,
}


def refuse_engines(given: Mapping[str, Any]) -> None:
    """Refuse the arguments of other engines, which are None unless they are given."""
    for name, advice in _REFUSED.items():
        if given[name] is not None:
            raise ValueError(f"{name}={given[name]!r:.100} has no counterpart here: {advice}")


def _refuse_fields(settings: Any, advice: str, **given: bool) -> None:
    """Refuse fields without a counterpart, if they are given."""
    for name, is_given in given.items():
        if is_given:
            raise ValueError(f"{type(settings).__name__}({name}=...) has no counterpart here: {advice}")


def refuse_both(**given: Any) -> None:
    """Refuse two arguments for one thing: at most one may be true."""
    if all(given.values()):
        raise ValueError(f"{' and '.join(given)} are both given; pass one of them")


def handlers_by_kind(given: Sequence[Any]) -> dict[type[Any], Any]:
    """The elements of `kwargs_handlers`, by their classes."""
    found: dict[type[Any], Any] = {}
    for each in given:
        kind = next((kind for kind in _HANDLERS if isinstance(each, kind)), None)
        if kind is None:
            raise ValueError(
                f"kwargs_handlers has a {type(each).__name__}, which has no counterpart here; leave it out: "
                f"{', '.join(kind.__name__ for kind in _HANDLERS)} are taken"
            )
        if kind in found:
            raise ValueError(f"kwargs_handlers has two {kind.__name__}; pass one")
        found[kind] = each
    return found


def ddp_options(given: DistributedDataParallelKwargs | None) -> DDP:
    """Convert them to the native Accelerator's strategy."""
    asked = given or DistributedDataParallelKwargs()
    hook, wrapper = DDPCommunicationHookType(asked.comm_hook), DDPCommunicationHookType(asked.comm_wrapper)
    if hook not in _HOOKS or wrapper != DDPCommunicationHookType.NO:
        raise ValueError(
            f"comm_hook={hook} with comm_wrapper={wrapper} has no counterpart here; choose comm_hook among "
            f"{', '.join(map(str, _HOOKS))}, and no wrapper"
        )
    return DDP(
        asked.find_unused_parameters,
        asked.bucket_cap_mb,
        asked.gradient_as_bucket_view,
        asked.broadcast_buffers,
        _HOOKS[hook](asked.comm_state_option),
    )


def fsdp_options(plugin: FullyShardedDataParallelPlugin, num_machines: int) -> FSDP:
    """Convert the plugin to the native Accelerator's strategy."""
    _refuse_fields(
        plugin,
        "leave it out",
        ignored_modules=plugin.ignored_modules is not None,
        param_init_fn=plugin.param_init_fn is not None,
        activation_checkpointing=plugin.activation_checkpointing,
    )
    policy = plugin.mixed_precision_policy
    return FSDP(
        param_dtype=getattr(policy, "param_dtype", None),
        reduce_dtype=getattr(policy, "reduce_dtype", None),
        output_dtype=getattr(policy, "output_dtype", None),
        # That of FSDP1's policy, which has no type of outputs, is about inner units only.
        cast_forward_inputs=getattr(policy, "cast_forward_inputs", True) or not hasattr(policy, "output_dtype"),
        offload=bool(getattr(plugin.cpu_offload, "offload_params", plugin.cpu_offload)),
        **_sharding(plugin, num_machines),
    )


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


def scaler_options(given: GradScalerKwargs | None) -> dict[str, Any]:
    """Convert them for the native Accelerator."""
    asked = given or GradScalerKwargs()
    _refuse_fields(asked, "fp16 needs its loss scaled; use bf16", enabled=not asked.enabled)
    return {name: value for name, value in asked.to_dict().items() if name != "enabled"}


def compile_arguments(
    backend: DynamoBackend | str | None, plugin: TorchDynamoPlugin | None
) -> bool | Mapping[str, Any]:
    """Convert them for the native Accelerator."""
    refuse_both(dynamo_backend=backend is not None, dynamo_plugin=plugin is not None)
    asked = plugin or TorchDynamoPlugin(backend=backend or DynamoBackend.NO)
    name = str(asked.backend).lower()
    if name == "no" or asked.disable:
        return False
    wanted: dict[str, Any] = {"mode": asked.mode, "fullgraph": asked.fullgraph or None, "dynamic": asked.dynamic}
    wanted["options"] = asked.options
    return {"backend": name} | {key: value for key, value in wanted.items() if value is not None}


def num_microbatches(steps: int, plugin: GradientAccumulationPlugin | None) -> int:
    """The number of microbatches per step."""
    if plugin is None:
        return steps
    refuse_both(gradient_accumulation_steps=steps != 1, gradient_accumulation_plugin=True)
    advice = "a loop's last step uses the microbatches that are left at its end; leave it out"
    _refuse_fields(plugin, advice, sync_with_dataloader=not plugin.sync_with_dataloader)
    return plugin.num_steps or 1


def tracker_names(log_with: Any) -> Any:
    """Convert trackers for the native Accelerator: enumeration members to their values."""
    if isinstance(log_with, list | tuple):
        return [tracker_names(each) for each in log_with]
    return log_with.value if isinstance(log_with, LoggerType) else log_with
