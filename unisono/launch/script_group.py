"""Scripts that initialise torch's process group themselves, in a process that has already joined its world.

Code written for torchrun, or for torch's own `spawn`, gets the group that it asks for, with its own backend, timeout
and options, in place of ours: the ranks meet in the store that they share, and no port is opened. A script that first
checks `is_initialized()` finds our group; one that names a device family as its backend gets ours. Where ours shares
memory, so does that of a script that asks for gloo, or for nothing; scripts see the name that they know.

Such code also names a device to DistributedDataParallel, which torch refuses for a model on the CPU.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import os
import sys
import weakref
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from unisono.comm.group_counts import count_group, forget_group
from unisono.comm.noted_calls import forget_calls, note_calls
from unisono.comm.operations import HOST
from unisono.comm.sealing import check_members
from unisono.comm.shared_memory.process_group import NAME, SharedMemoryGroup
from unisono.comm.shutdown import free_reducers_before_groups
from unisono.devices import family_names
from unisono.devices.graphs import keep_package_out_of_graphs
from unisono.torch_private import default_store
from unisono.world import current_world

_holders: list[Any] = []
_num_searched = 0  # of the modules in `sys.modules`, from the first

_CREATE = ("new_group", "split_group", "shrink_group")
_DEVICE_ARGUMENTS = ("device_ids", "output_device")
_ACCEPTS = "_unisono_accepts_device_ids"
_OURS = (None, "env://")  # without further arguments, the announced group is meant
_IN_SHARED_MEMORY = (
    "torch.distributed reduces in shared memory here, which is faster than gloo; `unisono run --process-group gloo` "
    '(spawn: process_group="gloo") keeps gloo'
)


def let_scripts_initialise(say: Callable[[str], None]) -> None:
    """Allow a script to initialise the default process group of this process again, though it exists already.

    Destroying that group does not hang while models that it has reduced still exist, and the collectives of all groups
    that a script creates count as progress. `say` gets what the user is to know, from one rank.
    """
    free_reducers_before_groups()
    accept_device_ids(say)
    keep_package_out_of_graphs()  # as gloo's are, which are not Python
    note_calls()
    count_group(dist.group.WORLD)
    groups = _ScriptGroups(say)
    create = {name: functools.partial(_create_counted, made) for name in _CREATE if (made := getattr(dist, name, None))}
    replace_functions(
        **create,
        get_backend=functools.partial(_shown_name, dist.get_backend, groups.names),
        destroy_process_group=functools.partial(_destroy_counted, dist.destroy_process_group),
        init_process_group=initialising(groups.initialise),
    )


class _ScriptGroups:
    """What a script gets for `init_process_group`, in a process that has joined its world."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.names: dict[str, Any] = {NAME: dist.Backend.GLOO}  # what scripts call our groups
        self._say = say
        # What several machines have does not.
        self._shares_memory = isinstance(dist.group.WORLD, SharedMemoryGroup)
        # Weak: a reference would keep the group alive after the script has destroyed it.
        self._ours = weakref.ref(dist.group.WORLD)
        self._store, self._backend = default_store(), dist.get_backend_config()
        self._process, self._rank, self._world_size = os.getpid(), dist.get_rank(), dist.get_world_size()
        self._numbers = itertools.count(1)
        self._inherited: list[Any] = []  # a fork's copies: ending one would end its parent's, or wait

    def initialise(self, original: Callable[..., None], asked: dict[str, Any]) -> None:
        """Initialise what the script asks for: our group, its own in the announced world, or another world."""
        is_of_family = asked.get("backend") in family_names()
        is_announced = asked.get("store") is None and (is_of_family or asked.get("init_method") in _OURS)
        is_other = is_announced and _asked(asked, "world_size", self._world_size) != self._world_size
        if os.getpid() != self._process or is_other:
            self._leave_for_another()
            original(**asked)
        elif is_of_family and dist.is_initialized():
            return
        else:
            self._begin(original, asked, is_of_family, is_announced)
        count_group(dist.group.WORLD)

    def _leave_for_another(self) -> None:
        """Make room for a world that is torch's alone."""
        if self._is_ours():
            if os.getpid() != self._process:
                self._inherited.append(dist.group.WORLD)
                dist.GroupMember.WORLD = None
            else:
                dist.destroy_process_group()

    def _is_ours(self) -> bool:
        return dist.is_initialized() and dist.group.WORLD is self._ours()

    def _begin(
        self, original: Callable[..., None], asked: dict[str, Any], is_of_family: bool, is_announced: bool
    ) -> None:
        if is_of_family:
            asked |= {"backend": self._backend, "init_method": None}
        elif (
            self._backend == f"{HOST.type}:{NAME}"
            and (asked.get("backend") is None or self._shares_memory)
            and _is_of_gloo(asked)
        ):
            self.names[NAME] = dist.Backend(asked.get("backend") or dist.Backend.GLOO)
            asked["backend"] = NAME
        if is_announced:
            # A group that was destroyed has left its addresses in the store.
            prefix = f"unisono/group/{next(self._numbers)}"
            asked["store"] = dist.PrefixStore(prefix, self._store)  # type: ignore[attr-defined]
            asked |= {"init_method": None, "rank": _asked(asked, "rank", self._rank), "world_size": self._world_size}
        if self._is_ours():
            dist.destroy_process_group()
        original(**asked)
        if is_announced:  # wait for all: one that ends its group early would close connections that a peer opens
            if asked["store"].add("begun", 1) == asked["world_size"]:
                asked["store"].set("all_begun", "")
            asked["store"].wait(["all_begun"])
            _check_group(dist.group.WORLD)
        if isinstance(dist.group.WORLD, SharedMemoryGroup) and dist.get_rank() == 0 and dist.get_world_size() > 1:
            self._say(_IN_SHARED_MEMORY)


def _asked(asked: Mapping[str, Any], name: str, own: int) -> int:
    """The rank or the number of ranks that a script asks for, by an argument or by the environment that it has left."""
    given = asked.get(name, -1)
    return int(os.environ.get(name.upper()) or own) if given in (-1, None) else int(given)


def _is_of_gloo(asked: Mapping[str, Any]) -> bool:
    """Whether a script asks for nothing that only gloo has."""
    named = str(asked.get("backend") or dist.Backend.GLOO).lower()
    return named in (dist.Backend.GLOO, f"{HOST.type}:{dist.Backend.GLOO}") and asked.get("pg_options") is None


def _shown_name(original: Callable[..., Any], names: Mapping[str, Any], group: Any = None) -> Any:
    found = original(group)
    return names.get(found, found)


def initialising(initialise: Callable[[Callable[..., None], dict[str, Any]], None]) -> Callable[..., None]:
    """An `init_process_group` that calls that function, with torch's own and the given arguments."""
    original = dist.init_process_group
    signature = inspect.signature(original)

    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        initialise(original, signature.bind(*args, **kwargs).arguments)

    return init_process_group


def accept_device_ids(say: Callable[[str], None]) -> None:
    """In a world of CPUs, let every DistributedDataParallel of this process take the `device_ids` and `output_device`
    that torch takes for GPUs only. Idempotent."""
    original, world = DistributedDataParallel.__init__, current_world()
    if world.backend.is_accelerated() or hasattr(original, _ACCEPTS):
        return
    signature = inspect.signature(original)

    # Wrapped in its class, which stays itself: for subclasses, `isinstance` and pickle.
    @functools.wraps(original)
    def __init__(*args: Any, **kwargs: Any) -> None:  # noqa: N807
        given = signature.bind(*args, **kwargs)
        if _names_the_cpu(given.arguments):
            for name in _DEVICE_ARGUMENTS:
                given.arguments.pop(name, None)
            if world.rank == 0:
                say(
                    "DistributedDataParallel: device_ids and output_device are left out, since all parameters of the "
                    "model are on the CPU"
                )
        original(*given.args, **given.kwargs)

    setattr(__init__, _ACCEPTS, True)
    DistributedDataParallel.__init__ = __init__  # type: ignore[method-assign]


def _names_the_cpu(given: dict[str, Any]) -> bool:
    """Whether these arguments name at most one device, by its index or as the CPU, for a model that is on the CPU."""
    module, ids = given.get("module"), given.get("device_ids")
    named = [*ids] if isinstance(ids, list | tuple) else []
    if len(named) > 1 or not isinstance(module, nn.Module):
        return False  # torch says what is wrong
    if (output := given.get("output_device")) is not None:
        named.append(output)
    are_known = all(isinstance(each, int) or str(each).partition(":")[0] == HOST.type for each in named)
    return bool(named) and are_known and {each.device.type for each in module.parameters()} == {HOST.type}


def _check_group(group: Any) -> None:
    """Check who takes part. Those that have mapped the same memory are processes of one user."""
    if not isinstance(group, SharedMemoryGroup):
        check_members(group)


def _create_counted(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    group = original(*args, **kwargs)
    _check_group(group)
    count_group(group)
    return group


def _destroy_counted(original: Callable[..., None], group: Any = None) -> None:
    forget_group(group)
    forget_calls(group)
    original(group)


def replace_functions(**functions: Callable[..., Any]) -> None:
    """Let all modules that have imported one of these functions of torch.distributed call the given one instead."""
    replaced = {
        name: (getattr(dist, name), functools.update_wrapper(each, getattr(dist, name)))
        for name, each in functions.items()
    }
    for module in find_holders():
        held = vars(module)
        for name, (original, function) in replaced.items():
            if held.get(name) is original:
                setattr(module, name, function)


def find_holders() -> list[Any]:
    """The modules that have names of functions of torch.distributed. The zygote finds them before it forks: looking at
    all modules would cost each worker 15 ms, most of it to copy the pages with their reference counts."""
    global _num_searched
    names = {name for name, each in vars(dist).items() if type(each) is FunctionType}
    new = max(len(sys.modules) - _num_searched, 0)
    for key, module in [*itertools.islice(reversed(sys.modules.items()), new)]:
        first = key.partition(".")[0]
        if first in sys.stdlib_module_names or (first == "torch" and not key.startswith(dist.__name__)):
            continue  # most objects, and they hold none
        if not names.isdisjoint(getattr(module, "__dict__", ())):
            _holders.append(module)
    _num_searched = len(sys.modules)
    return _holders
