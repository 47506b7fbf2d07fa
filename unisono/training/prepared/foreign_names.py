"""The names here of attributes of Accelerate's Accelerator and Lightning's Fabric."""

from __future__ import annotations

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


def describe_missing(name: str) -> str:
    """The text of the AttributeError for a name that an Accelerator does not have."""
    ours = f": here it is {_OURS[name]}" if name in _OURS else ""
    return f"'Accelerator' object has no attribute {name!r}{ours}"
