"""What a package that builds on this one needs beside the public names: a device family, a strategy, another API.

`unisono.compat` is such a package, and imports nothing else. Each name comes from its module when it is first used. A
minor release may change one, and says so in the changes.

Arguments and nestings:
    check_choice, check_integer, check_type   raise an error that names the argument, its value and the way out
    explain_unknown_names                     decorator: an unknown name of an argument is an error with the closest one
    leaves, tensors                           what a nesting of any containers holds, each once; of it, the tensors
    map_objects, tree_map                     the nesting with images in place of its objects, or of its leaves

Devices and random numbers:
    Device                                    a device as a value, with the runtime that serves it
    HOST                                      the `torch.device` of main memory
    family_names, get_backend                 the device families, and one by its name
    resolve_device                            the family and the `torch.device` that a user means
    send, map_module                          move one object of a batch; put images in place of a module's tensors
    seed_all                                  seeds the process: Python, NumPy, torch on the CPU
    seed_device, seed_of_device               seed a device's generator, and find a seed from which it continues

Ranks:
    RankView, where                           a rank's properties by Accelerate's names; runs a function on some ranks
    name_ranks                                ranks in words, for messages
    solo_world                                a world of one on a device
    gather_nested, pad_nested, reduce_nested  the methods of an Accelerator, for any world
    let_scripts_name_families                 `init_process_group` takes device families, and joins the world

Training:
    PreparedModel, PreparedScheduler          what becomes of a model and of a scheduler in `Accelerator.prepare`
    prepared                                  the optimizers that are prepared, as a set
    reduce_by_hand                            the reduction of `optimizer_step`, without the step
    SyncBatchNorm                             mixin of a BatchNorm over the samples of all `ranks`
    power_sgd                                 torch's PowerSGD as a `comm_hook` of DDP
    disable_dynamo                            decorator: torch.compile leaves a function out, without being imported
    uncompiled                                the module that torch.compile has wrapped

Loaders, files, threads:
    Sources                                   of several loaders: continues the epochs of each DataLoader that they read
    write_state                               writes a state to one file, whole or not at all
    private_directory                         a directory of this user alone, which is removed even if the process dies
    check_threads                             an error where a library has replaced Python's threads
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unisono.arguments import check_choice as check_choice
    from unisono.arguments import check_integer as check_integer
    from unisono.arguments import check_type as check_type
    from unisono.arguments import explain_unknown_names as explain_unknown_names
    from unisono.checkpoint.contents import write_state as write_state
    from unisono.comm.operations import HOST as HOST
    from unisono.comm.operations import name_ranks as name_ranks
    from unisono.comm.thread_start import check_threads as check_threads
    from unisono.devices import family_names as family_names
    from unisono.devices import get_backend as get_backend
    from unisono.devices import resolve_device as resolve_device
    from unisono.devices.device import Device as Device
    from unisono.devices.movement import map_module as map_module
    from unisono.devices.movement import send as send
    from unisono.devices.randomness import seed_all as seed_all
    from unisono.devices.seeding import seed_device as seed_device
    from unisono.devices.seeding import seed_of_device as seed_of_device
    from unisono.launch.hosts.join_world import let_scripts_name_families as let_scripts_name_families
    from unisono.launch.job import private_directory as private_directory
    from unisono.loading.registry import Sources as Sources
    from unisono.torch_private import disable_dynamo as disable_dynamo
    from unisono.training.batch_norm import SyncBatchNorm as SyncBatchNorm
    from unisono.training.collectives import gather_nested as gather_nested
    from unisono.training.collectives import pad_nested as pad_nested
    from unisono.training.collectives import reduce_nested as reduce_nested
    from unisono.training.compilation import uncompiled as uncompiled
    from unisono.training.optimizer import prepared as prepared
    from unisono.training.optimizer import reduce_by_hand as reduce_by_hand
    from unisono.training.prepared.model import PreparedModel as PreparedModel
    from unisono.training.prepared.scheduler import PreparedScheduler as PreparedScheduler
    from unisono.training.rank_view import RankView as RankView
    from unisono.training.rank_view import where as where
    from unisono.training.strategies.ddp import power_sgd as power_sgd
    from unisono.tree import leaves as leaves
    from unisono.tree import map_objects as map_objects
    from unisono.tree import tensors as tensors
    from unisono.tree import tree_map as tree_map
    from unisono.world import solo_world as solo_world

_HOMES = {
    "arguments": "check_choice check_integer check_type explain_unknown_names",
    "checkpoint.contents": "write_state",
    "comm.operations": "HOST name_ranks",
    "comm.thread_start": "check_threads",
    "devices": "family_names get_backend resolve_device",
    "devices.device": "Device",
    "devices.movement": "map_module send",
    "devices.randomness": "seed_all",
    "devices.seeding": "seed_device seed_of_device",
    "launch.hosts.join_world": "let_scripts_name_families",
    "launch.job": "private_directory",
    "loading.registry": "Sources",
    "torch_private": "disable_dynamo",
    "training.batch_norm": "SyncBatchNorm",
    "training.collectives": "gather_nested pad_nested reduce_nested",
    "training.compilation": "uncompiled",
    "training.optimizer": "prepared reduce_by_hand",
    "training.prepared.model": "PreparedModel",
    "training.prepared.scheduler": "PreparedScheduler",
    "training.rank_view": "RankView where",
    "training.strategies.ddp": "power_sgd",
    "tree": "leaves map_objects tensors tree_map",
    "world": "solo_world",
}
_HOME_OF = {name: f"unisono.{home}" for home, names in _HOMES.items() for name in names.split()}

__all__ = sorted(_HOME_OF)


if not TYPE_CHECKING:  # for a type checker there are the imports above, and no other name

    def __getattr__(name: str) -> Any:
        if name not in _HOME_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(_HOME_OF[name]), name)
        return value


def __dir__() -> list[str]:
    return __all__
