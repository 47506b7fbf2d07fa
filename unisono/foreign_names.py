"""Names from other frameworks that users may try: attributes of an Accelerator and of the package, arguments of an
Accelerator; with advice on what to do instead."""

from __future__ import annotations

_PREPARE = "prepare() takes models, optimizers, loaders and schedulers, together or one by one"
_ON_RANKS = "write `if accelerator.process_index == n:`, or decorate with on_main_process"
_OTHER_ENGINES = "DeepSpeed, Megatron and pipelines are not supported; strategy= is 'ddp', 'zero1', 'fsdp' or 'spmd'"
_MESH = "there is one axis, data parallel: process_index and num_processes"
_NO_CALLBACKS = "the loop is yours: call the function where the event happens"

_ADVICE = {
    # Accelerate
    "clear": "call free_memory()",
    "context_parallel_rank": _MESH,
    "data_parallel_rank": _MESH,
    "data_parallel_shard_rank": _MESH,
    "deepspeed_plugin": _OTHER_ENGINES,
    "deepspeed_ulysses_dl_adapter": _OTHER_ENGINES,
    "dispatch_batches": "each rank reads its own part; a stream that cannot be divided is read once and distributed",
    "distributed_type": "accelerator.world has the facts: world.is_of_processes, world.backend.name",
    "even_batches": "each sample counts once: the tail is split; pass DeviceLoader(loader, tail=) for another one",
    "fp8_backend": "mixed_precision is 'no', 'bf16' or 'fp16'",
    "get_state_dict": "call state_dict(model)",
    "is_composable_parallelism_enabled": _MESH,
    "is_fsdp2": "strategy='fsdp' is FSDP2",
    "is_last_process": "compare: process_index == num_processes - 1",
    "join_uneven_inputs": "leave it out: all ranks take equally many steps, and uneven batches are weighed exactly",
    "logging_dir": "read project_dir",
    "lomo_backward": "let the optimizer step after backward(loss)",
    "maybe_context_parallel": _MESH,
    "multi_device": "compare: num_processes > 1",
    "non_blocking": "background threads move batches ahead of the loop",
    "on_last_process": _ON_RANKS,
    "on_local_main_process": "write `if accelerator.is_local_main_process:`",
    "on_local_process": _ON_RANKS,
    "on_process": _ON_RANKS,
    "parallelism_config": _MESH,
    "pipeline_parallel_rank": _MESH,
    "prepare_data_loader": _PREPARE,
    "prepare_model": _PREPARE,
    "prepare_optimizer": _PREPARE,
    "prepare_scheduler": _PREPARE,
    "profile": "use torch.profiler.profile(); unisono.gather_report() says where the time of the loop went",
    "save_iteration": "save_state() numbers checkpoints after those in the directory",
    "save": "call save_model(model, directory), or write `if accelerator.is_main_process: torch.save(...)`",
    "should_save_model": "every rank calls state_dict(model), and rank zero, is_main_process, saves it",
    "skip_first_batches": "loaders resume by themselves: loader.load_state_dict(loader.state_dict())",
    "state": "accelerator.world has the rank's facts",
    "step": "accelerator.sync_gradients says whether the current microbatch ends a step",
    "tensor_parallel_rank": _MESH,
    "torch_device_mesh": _MESH,
    "use_distributed": "compare: num_processes > 1",
    "use_seedable_sampler": "pass seed=: the order is a function of the seed and the epoch only",
    "use_stateful_dataloader": "prepared loaders have state_dict() and load_state_dict()",
    "verify_device_map": "prepare() refuses a model that is on several devices",
    # Lightning Fabric
    "all_gather": "call gather(values)",
    "gather_object": "call unisono.all_gather_object(value)",
    "all_reduce": "call reduce(values)",
    "barrier": "call wait_for_everyone()",
    "broadcast": "call unisono.broadcast(tensor)",
    "call": _NO_CALLBACKS,
    "clip_gradients": "call clip_grad_norm_(model, max_norm) or clip_grad_value_(model, clip_value)",
    "global_rank": "read process_index",
    "init_module": "make the model, then prepare(model)",
    "init_tensor": "pass device=accelerator.device to the tensor",
    "is_global_zero": "read is_main_process",
    "launch": "call unisono.spawn(fn), or start the script by `unisono run`",
    "load": "call torch.load, then load_state_dict(model, state)",
    "load_raw": "call torch.load, then load_state_dict(model, state)",
    "local_rank": "read local_process_index",
    "log_dict": "call log(values, step)",
    "logger": "read trackers",
    "loggers": "read trackers",
    "no_backward_sync": "call no_sync(model)",
    "node_rank": "read accelerator.world.node_rank",
    "rank_zero_first": "use main_process_first()",
    "run": "call unisono.spawn(fn)",
    "seed_everything": "pass Accelerator(seed=...)",
    "setup": _PREPARE,
    "setup_dataloaders": _PREPARE,
    "setup_module": _PREPARE,
    "setup_optimizers": _PREPARE,
    "sharded_model": "make the model as it is; prepare() shards it under strategy='fsdp'",
    "strategy": "it was chosen by Accelerator(strategy=...)",
    "to_device": "call unisono.placement.copy_to(values, accelerator.device)",
    "world_size": "read num_processes",
}

_HANDLERS = "the options of DDP, FSDP and the loss scaler are strategy= and scaler_options="
_STARTED = "devices are chosen where ranks are started, by unisono.spawn(fn, nprocs=) or `unisono run -n`"

ON_ARGUMENTS = {
    # Accelerate
    "dataloader_config": "pass split_batches= and seed=; a unisono.DeviceLoader has further options",
    "deepspeed_plugin": _OTHER_ENGINES,
    "dispatch_batches": _ADVICE["dispatch_batches"],
    "dynamo_backend": "pass compile=True, or torch.compile's arguments",
    "even_batches": _ADVICE["even_batches"],
    "fsdp_plugin": "pass strategy='fsdp', or unisono.strategies.FSDP(...)",
    "gradient_accumulation_plugin": "pass gradient_accumulation_steps=",
    "kwargs_handlers": _HANDLERS,
    "parallelism_config": _MESH,
    "project_config": "pass project_dir= and total_limit=",
    "rng_types": "pass seed=",
    "step_scheduler_with_optimizer": "pass schedule_unit=: what schedulers count",
    # Lightning Fabric, and arguments of trainers
    "accelerator": _STARTED,
    "bf16": "pass mixed_precision='bf16'",
    "callbacks": _NO_CALLBACKS,
    "devices": _STARTED,
    "fp16": "pass mixed_precision='fp16'",
    "loggers": "pass log_with=",
    "num_nodes": "start ranks on several machines by `unisono run --nnodes`",
    "precision": "pass mixed_precision='bf16' or 'fp16'",
}
"""Arguments that an Accelerator does not have."""

IN_PACKAGE = {
    "PartialState": "unisono.rank(), world_size() and local_rank() are the rank's facts; current_world() has all",
    "debug_launcher": "call unisono.spawn(fn, args, nprocs=2, backend='cpu')",
    "Fabric": "unisono.Accelerator has its methods, under Accelerate's names",
    "gather_object": "call all_gather_object(value)",
    "init_process_group": "call unisono.join_world() in ranks that another launcher has started",
    "notebook_launcher": "call unisono.spawn(fn, args, nprocs), in a notebook, too",
    "set_seed": "pass Accelerator(seed=...)",
    "skip_first_batches": _ADVICE["skip_first_batches"],
}
"""Names that the package `unisono` does not have."""


def advice_on(name: str) -> str:
    """The text of the AttributeError for a name that an Accelerator does not have."""
    advice = _ADVICE.get(name)
    return f"'Accelerator' object has no attribute {name!r}" + (f": {advice}" if advice else "")
