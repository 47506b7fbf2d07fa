"""FSDP2 with weights: each rank keeps its shard of the parameters, of their gradients and of the optimizer's state.

torch's `fully_shard` does the work: each gradient shard is a shard of the sum over the ranks, times the factor set by
`scale_sums`. A model is gathered and reduced unit by unit; parameters outside of units belong to the model itself, and
stay gathered from its forward to its backward pass. torch's modules for this take a second or two to import, so only
the functions that need them do.

Invariant: a unit shares no parameter with modules outside of it, since torch would shard the parameter for only one of
its holders.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeGuard
from weakref import ref

import torch
from torch import nn

from unisono.comm.operations import HOST
from unisono.strategies import FSDP
from unisono.torch_private import STORAGE_ADDRESS, current_graph_task_id, tracing_context
from unisono.training.agreement import broadcast_together
from unisono.training.gradients import values_of
from unisono.training.meta_modules import fill
from unisono.training.parameter_names import name_of
from unisono.world import World

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

SMALLEST_UNIT = 2**20
"""The least number of parameters in a unit, unless its class is specified: smaller ones would be latency-bound."""

MIXED = "mixed torch.Tensor and DTensor"
"""Of torch's error where a whole tensor met a sharded one."""

_Classes = Sequence[type[nn.Module]]


def shard(model: nn.Module, world: World, options: FSDP) -> FSDPModule:
    """Shard a model that has passed `check_shardable`, in place: its parameters become DTensors with the same names.

    All ranks must already hold the same parameters. Existing optimizers keep the old ones, which are no longer trained.
    A unit must run on all ranks or on none: if control flow differs by rank, choose units that enclose the branch.

    Parts on "meta" are initialised unit by unit, with rank zero's values.
    """
    # Inner units first: `fully_shard` of a module takes all parameters that belong to no unit yet.
    chosen = [*units_of(model, options.units), model]
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    mesh = mesh_in(world, options)
    precision = MixedPrecisionPolicy(
        options.param_dtype, options.reduce_dtype, cast_forward_inputs=options.cast_forward_inputs
    )
    # A rank on the CPU has its parameters in main memory already.
    is_moved = options.offload and world.device.type != torch.default_generator.device.type
    offload = CPUOffloadPolicy() if is_moved else OffloadPolicy()
    for unit in chosen:
        if filled := fill(unit, world.device):
            # Rank zero's values. Only the unit holds them, and sharding frees them.
            broadcast_together(filled, world)
            del filled
        sharded = fully_shard(
            unit,
            mesh=mesh,
            reshard_after_forward=options.reshard_after_forward,
            mp_policy=precision if unit is not model else replace(precision, output_dtype=options.output_dtype),
            offload_policy=offload,
        )
        # Otherwise torch multiplies within the collective (PREMUL_SUM), which gloo does not support.
        sharded.set_force_sum_reduction_for_comms(True)
    # torch's default is the mean over the ranks; the weights make it a sum.
    units = units_in(model)
    scale_sums(units, 1.0)
    if (ahead := options.prefetch) is not None:
        for place, each in enumerate(units):
            each.set_modules_to_forward_prefetch(units[place + 1 : place + 1 + ahead])
            each.set_modules_to_backward_prefetch(units[max(place - ahead, 0) : place][::-1])
    if options.find_unused_parameters:
        sharded.set_reduce_scatter_unused_params(True)
    return sharded  # the last one: the model itself


def mesh_in(world: World, options: FSDP) -> DeviceMesh:
    """The device mesh: one row of ranks for each replica of the parameters; the ranks of a row shard them."""
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    size = world.world_size // options.replicas
    if size * options.replicas != world.world_size or 1 == size < world.world_size:
        raise ValueError(
            f"FSDP(replicas={options.replicas}) cannot divide the {world.world_size} ranks into equal groups of "
            "several; pass a divisor, or use strategy='ddp', where each rank has all parameters"
        )
    if options.replicas == 1:
        # Use the existing group. If there is a GPU, torch would create another one in place of a gloo group: in some
        # versions an NCCL group, which refuses ranks that share the GPU.
        group = torch.distributed.group.WORLD
        assert group is not None
        return DeviceMesh.from_group(group, world.device.type)
    return init_device_mesh(world.device.type, (options.replicas, size), mesh_dim_names=("replicas", "shards"))


def check_shardable(trained: nn.Module, units: _Classes | None = None) -> None:
    """Check that `shard` can handle the model, before anything is changed; else ValueError."""
    kinds = (nn.Embedding, nn.EmbeddingBag)
    if layers := [name for name, each in trained.named_modules() if isinstance(each, kinds) and each.sparse]:
        raise ValueError(
            f"strategy='fsdp' reduces dense gradients only, and the layer {layers[0]!r} of the "
            f"{type(trained).__name__} has sparse=True; make it with sparse=False, or use strategy='ddp' or 'zero1'"
        )
    names = {parameter: name for name, parameter in trained.named_parameters()}
    if scalar := next((name for each, name in names.items() if not each.ndim), None):
        raise ValueError(
            f"strategy='fsdp' divides each parameter by ranks, and {scalar!r} of the {type(trained).__name__} is a "
            "scalar; give it the shape [1], or use strategy='ddp' or 'zero1'"
        )
    for unit in [*units_of(trained, units), trained]:  # inner ones first, whose parameters are their own
        own = {each: names.pop(each) for each in unit.parameters() if each in names}
        first = {each.dtype: name for each, name in reversed(own.items()) if each.requires_grad}
        if len(first) > 1:
            shown = " and ".join(f"{name!r} is {dtype}" for dtype, name in reversed(first.items()))
            raise ValueError(
                f"strategy='fsdp' reduces the gradients of a unit in one type, and in the {type(unit).__name__} "
                f"{shown}; give them one type (mixed_precision= computes in another one), or use strategy='ddp'"
            )


def units_in(model: nn.Module) -> list[FSDPModule]:
    """The units of a sharded model, including itself, which are gathered one by one."""
    kind = loaded_class("torch.distributed.fsdp", "FSDPModule")
    return [module for module in model.modules() if isinstance(module, kind)]


def scale_sums(units: Iterable[FSDPModule], factor: float) -> None:
    """Multiply the sums over the ranks in the next reductions; a factor of 0 is ignored, since the sums are 0 then."""
    for unit in units:
        unit.set_gradient_divide_factor(1 / factor if factor else 1.0)


_GRAD: Any = torch.Tensor.grad  # the slot that autograd assigns


class WholeParameter(nn.Parameter):
    """Replaces a sharded parameter while the model runs, and at times between forward and backward.

    Gradients of earlier backward passes belong to the sharded parameter. Outside of backward passes, where user code
    reads or zeroes them, `grad` falls back to those, and None clears both. In a backward pass, autograd and FSDP2 use
    the gradient that arrives at this parameter.
    """

    sharded: nn.Parameter

    @property
    def grad(self) -> torch.Tensor | None:
        own: torch.Tensor | None = _GRAD.__get__(self)
        # Dynamo looks at it for each graph, and expects a gradient of the parameter's shape.
        is_whole_only = own is not None or current_graph_task_id() != -1 or tracing_context() is not None
        return own if is_whole_only else self.sharded.grad

    @grad.setter
    def grad(self, gradient: torch.Tensor | None) -> None:
        _GRAD.__set__(self, gradient)
        if gradient is None and current_graph_task_id() == -1:
            self.sharded.grad = None


def any_whole_gradient(parameters: Sequence[torch.Tensor]) -> bool:
    """Whether a gradient has arrived at some whole parameter."""
    return list(map(_GRAD.__get__, parameters)).count(None) < len(parameters)


def whole_gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """What backward passes have left at a whole parameter."""
    found: torch.Tensor | None = _GRAD.__get__(parameter)
    return found


def drop_whole_gradients(parameters: Iterable[torch.Tensor]) -> None:
    """Drop what earlier backward passes have left at whole parameters; the sharded ones keep theirs."""
    for each in parameters:
        _GRAD.__set__(each, None)


def whole_parameters(model: nn.Module) -> list[WholeParameter]:
    """The tensors that replace a sharded model's parameters while it runs, the same in each run. A collective."""
    sharded = dict(model.named_parameters())
    found: Any = named_whole_parameters(model)
    for name, each in found.items():
        each.__class__, each.sharded = WholeParameter, sharded[name]
    return list(found.values())


def named_whole_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """The same tensors, by their names in the model. A collective."""
    found: dict[str, torch.Tensor] = {}
    unit: Any
    for unit in units_in(model):
        unit.unshard()  # those of inner units stay sharded, and come with their own unit
        found.update((name, each) for name, each in model.named_parameters() if not is_distributed(each))
        unit.reshard()
    return found


class Rebinding:
    """A record of the memory that parameters or gradients have now, to detect assignments `p.data = ...`, which replace
    memory that a strategy continues to use. Of a sharded tensor, the memory of the one that contains the shard counts.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        # The storages are kept alive, so that no new one gets the same address.
        self._known = [(ref(each), each.untyped_storage()) for each in tensors]

    def check(self, strategy: str, attribute: str = "data") -> None:
        """Check that the tensors still have the recorded memory; else RuntimeError names what was assigned."""
        for place, (held, storage) in enumerate(self._known):
            tensor = held()
            if tensor is None:
                continue
            if getattr(tensor.untyped_storage(), STORAGE_ADDRESS) != getattr(storage, STORAGE_ADDRESS):
                name = name_of(tensor) if attribute == "data" else f"gradient {place}"
                raise RuntimeError(
                    f"an optimizer's step, the preparation of a later optimizer of the same parameters, or other code "
                    f"has assigned `parameter.{attribute} = ...`, of {name}, and strategy={strategy!r} "
                    f"continues with the previous memory; change it in place, `parameter.{attribute}.copy_(...)`, step "
                    "the optimizer that was prepared last, or use strategy='ddp'"
                )


def holds_any(parameters: Sequence[torch.Tensor], world: World) -> bool:
    """Whether a gradient is not zero, on any rank. A collective."""
    held = [each.grad for each in parameters if each.grad is not None]
    held = [each.to_local() if is_distributed(each) else values_of(each) for each in held]
    return bool(world.comm.all_reduce(torch.tensor(any(map(torch.any, held)), device=HOST), "max"))


def gathered(tensor: Any) -> torch.Tensor:
    """The whole of a tensor that may be divided among the ranks. A collective then."""
    whole: torch.Tensor = tensor.full_tensor() if is_distributed(tensor) else tensor
    return whole


def is_distributed(tensor: object) -> TypeGuard[DTensor]:
    """Whether the tensor is sharded over the ranks."""
    return isinstance(tensor, loaded_class("torch.distributed.tensor", "DTensor"))


def sharded_like(tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Place an optimizer's per-element value on the parameter's device, sharded like it. A collective if sharded."""
    if not is_distributed(parameter) or is_distributed(tensor) or tensor.shape != parameter.shape:
        return tensor.to(parameter.device)
    return cut_like(parameter, tensor, source=0)


def cut_like(like: DTensor, whole: torch.Tensor, source: int | None = None) -> DTensor:
    """This rank's shard of a tensor of that shape: of its own, the same on every rank; or of the one that the rank
    `source` has, which sends it."""
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole.to(like.device), like.device_mesh, like.placements, src_data_rank=source)


def cut_of(tensor: DTensor) -> list[Any]:
    """The shape of the whole tensor, where this rank's shard begins in it, and the shard."""
    (chunk,) = tensor.__create_chunk_list__()
    return [list(tensor.shape), list(chunk.offsets), tensor.to_local()]


def is_first(tensor: DTensor, ranks: Container[int] | None = None) -> bool:
    """Whether this rank is the first of those that have the same shard; if given, of these ranks."""
    return tensor.device_mesh.get_rank() == next(
        each for each in _peers(tensor, True) if ranks is None or each in ranks
    )


def is_within(tensor: DTensor, ranks: Container[int]) -> bool:
    """Whether the ranks with which this one has the whole tensor are all among these."""
    return all(each in ranks for each in _peers(tensor, False))


def _peers(tensor: DTensor, is_same: bool) -> list[int]:
    """The ranks that have the same shard as this one, or those that have the other shards beside it."""
    places = zip(tensor.device_mesh.get_coordinate() or [], tensor.placements, strict=True)
    index = tuple(slice(None) if placement.is_replicate() == is_same else place for place, placement in places)
    found: list[int] = tensor.device_mesh.mesh[index].flatten().tolist()
    return found


def gather_aside(size: int) -> Callable[[Any], list[Any]]:
    """A function that gathers the values of all `size` ranks in a process group of its own, for their threads that work
    next to their loops. All ranks call this together."""
    from torch.distributed import all_gather_object, new_group

    group = new_group(backend="gloo")

    def gather(value: Any) -> list[Any]:
        found: list[Any] = [None] * size
        all_gather_object(found, value, group)
        return found

    return gather


def loaded_class(module: str, name: str) -> Any:
    """The class, for `isinstance`; an empty tuple if its module is not imported, so that no instance can exist."""
    return getattr(sys.modules.get(module), name, ())


def units_of(model: nn.Module, classes: _Classes | None = None) -> list[nn.Module]:
    """The units of the model, inner ones first; `classes` as in `shard`."""
    holders: dict[nn.Parameter, list[nn.Module]] = {}
    elements: set[nn.Module] = set()
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            holders.setdefault(parameter, []).append(module)
        # Models keep their repeated blocks in one of these.
        if isinstance(module, nn.Sequential | nn.ModuleList):
            elements.update(module)

    units: list[nn.Module] = []
    taken: set[nn.Parameter] = set()
    for module in reversed(list(model.modules())):  # inner modules first
        own = [parameter for parameter in module.parameters() if parameter not in taken]
        if classes is None:
            is_wanted = module in elements and sum(parameter.numel() for parameter in own) >= SMALLEST_UNIT
        else:
            is_wanted = isinstance(module, tuple(classes))
        # FSDP2 gathers a unit when its `forward` is called.
        if module is model or not own or not is_wanted or isinstance(module, nn.ModuleList | nn.ModuleDict):
            continue
        inside = set(module.modules())
        if all(holder in inside for parameter in own for holder in holders[parameter]):
            units.append(module)
            taken.update(own)
    return units
