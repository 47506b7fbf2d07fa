"""Steps of optimizers that take each parameter as a whole, such as Muon, on parameters that are divided by rows.

The ranks exchange rows for whole parameters: each gets some of them, with their gradients and states, steps on these,
and sends the rows back. So the work of a step is divided, as in Distributed Muon (arXiv:2502.16982), no rank gets more
than its share, and what is kept between steps is divided by rows, as with every other optimizer.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from unisono.torch_private import STEP_POST_HOOKS, STEP_PRE_HOOKS
from unisono.training.parameter_names import parameters_of
from unisono.training.strategies.sharded import is_distributed
from unisono.world import World

_HOOKS = STEP_PRE_HOOKS, STEP_POST_HOOKS
_ALIGNED = 16  # bytes, so that what is received can be viewed as any type


class _Form(NamedTuple):
    """What a tensor is like that is divided by rows, and which rank gets it as a whole."""

    owner: int
    shape: torch.Size
    dtype: torch.dtype


class _Exchange(NamedTuple):
    """Sends rows to the owners of whole tensors, and back. Each `size` ranks, a group, have all rows among them."""

    world: World
    size: int

    def gather(self, forms: Sequence[_Form], rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The whole tensors that this rank owns."""
        group = self.world.rank // self.size  # others have the same rows
        sent: dict[int, list[torch.Tensor]] = {}
        for form, each in zip(forms, rows, strict=True):
            if form.owner // self.size == group:
                sent.setdefault(form.owner, []).append(each)
        received = self._exchange(forms, sent)
        own = [form for form in forms if form.owner == self.world.rank]
        parts = [self._unpack(received[group * self.size + place], own, place) for place in range(self.size)]
        return [torch.cat(each).view(form.shape) for form, *each in zip(own, *parts, strict=True)]

    def scatter(self, forms: Sequence[_Form], own: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """This rank's rows of all tensors, of which each rank has passed those that it owns."""
        place = self.world.rank % self.size
        flat = [(each.shape, each.reshape(-1)) for each in own]
        sent = {
            rank: [each[self._cut(shape, rank % self.size)] for shape, each in flat]
            for rank in range(self.world.world_size)
        }
        received = [
            self._unpack(each, [form for form in forms if form.owner == rank], place)
            for rank, each in enumerate(self._exchange(forms, sent))
        ]
        return [next(received[form.owner]).view(-1, *form.shape[1:]) for form in forms]

    def _exchange(self, forms: Sequence[_Form], sent: Mapping[int, Sequence[torch.Tensor]]) -> list[torch.Tensor]:
        """The bytes from each rank; as many from each, which is the most that any has for one."""
        room: dict[tuple[int, int], int] = defaultdict(int)
        for form in forms:
            for place in range(self.size):
                room[form.owner, place] += _aligned(self._num_bytes(form, place))
        packed = torch.empty(self.world.world_size, max(room.values()), dtype=torch.uint8, device=self.world.device)
        for rank, tensors in sent.items():
            begin = 0
            for each in tensors:
                found = each.contiguous().view(-1).view(torch.uint8)
                packed[rank, begin : begin + len(found)] = found
                begin += _aligned(len(found))
        return self.world.comm.all_to_all(packed.view(-1))

    def _unpack(self, packed: torch.Tensor, forms: Sequence[_Form], place: int) -> Iterator[torch.Tensor]:
        begin = 0
        for form in forms:
            size = self._num_bytes(form, place)
            yield packed[begin : begin + size].view(form.dtype)
            begin += _aligned(size)

    def _cut(self, shape: torch.Size, place: int) -> slice:
        """The elements of the rows that a rank of a group has, as `torch.chunk` and FSDP2 divide them."""
        rows, length = -(-shape[0] // self.size), prod(shape[1:])
        return slice(min(rows * place, shape[0]) * length, min(rows * (place + 1), shape[0]) * length)

    def _num_bytes(self, form: _Form, place: int) -> int:
        cut = self._cut(form.shape, place)
        size: int = (cut.stop - cut.start) * form.dtype.itemsize
        return size


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def stepping_whole(optimizer: Optimizer, world: World) -> Callable[..., Any]:
    """The `step` of an optimizer, during which whole parameters are in the place of divided ones. A collective."""
    step, held = optimizer.step, ref(optimizer)

    def whole_step(closure: Callable[[], Any] | None = None, **arguments: Any) -> Any:
        of = held()
        assert of is not None
        with _hooks_outside(of, arguments):
            if closure is None:
                return _step(of, world, lambda: step(**arguments))
            with torch.enable_grad():
                loss = closure()
            _step(of, world, lambda: step(**arguments))
            return loss

    return whole_step


@contextmanager
def _hooks_outside(optimizer: Optimizer, arguments: dict[str, Any]) -> Iterator[None]:
    """A block before and after which the optimizer's hooks are called, instead of within: they see divided parameters,
    as the rest of the script does."""
    before, after = (getattr(optimizer, name) for name in _HOOKS)
    for hook in list(before.values()):
        if (changed := hook(optimizer, (), arguments)) is not None:
            arguments.update(changed[1])
    try:
        for name in _HOOKS:
            setattr(optimizer, name, OrderedDict())
        yield
    finally:
        for name, hooks in zip(_HOOKS, (before, after), strict=True):
            setattr(optimizer, name, hooks)
    for hook in list(after.values()):
        hook(optimizer, (), arguments)


@torch.no_grad()
def _step(optimizer: Optimizer, world: World, step: Callable[[], Any]) -> Any:
    parts: list[Any] = [each for each in parameters_of(optimizer) if is_distributed(each) and each.grad is not None]
    if not parts:
        return step()
    mesh = parts[0].device_mesh
    exchange, owners = _Exchange(world, mesh.size(mesh.ndim - 1)), _owners(parts, world.world_size)
    own, states = _gather(exchange, optimizer, parts, owners)
    with _in_place_of(parts, own, states, optimizer):
        returned = step()
        states = {whole: optimizer.state[whole] for whole in own.values()}
    _scatter(exchange, optimizer, parts, owners, own, states)
    return returned


def _gather(
    exchange: _Exchange, optimizer: Optimizer, parts: Sequence[Any], owners: Sequence[int]
) -> tuple[dict[int, nn.Parameter], dict[torch.Tensor, dict[str, Any]]]:
    """The parameters that this rank owns as a whole, with gradients, by the numbers of their parts; their states."""
    names = [[name for name, each in optimizer.state[part].items() if is_distributed(each)] for part in parts]
    rows, forms = list[torch.Tensor](), list[_Form]()
    for part, owner, divided in zip(parts, owners, names, strict=True):
        found = [part.grad, part, *(optimizer.state[part][name] for name in divided)]
        rows += [each.to_local() for each in found]
        forms += [_Form(owner, each.shape, each.dtype) for each in found]
    wholes = iter(exchange.gather(forms, rows))
    own: dict[int, nn.Parameter] = {}
    states: dict[torch.Tensor, dict[str, Any]] = {}
    for number, (part, owner) in enumerate(zip(parts, owners, strict=True)):
        if owner == exchange.world.rank:
            gradient, whole = next(wholes), nn.Parameter(next(wholes))
            whole.grad, own[number] = gradient, whole
            states[whole] = {**optimizer.state[part], **{name: next(wholes) for name in names[number]}}
    return own, states


def _scatter(
    exchange: _Exchange,
    optimizer: Optimizer,
    parts: Sequence[Any],
    owners: Sequence[int],
    own: Mapping[int, nn.Parameter],
    states: Mapping[torch.Tensor, dict[str, Any]],
) -> None:
    """Give all parts their rows of what their owners have stepped on, and of the states; what has no rows, such as a
    count of steps, all ranks get."""
    world = exchange.world
    described = {
        number: {
            name: _Form(world.rank, each.shape, each.dtype) if _has_rows(each) else each
            for name, each in states[whole].items()
        }
        for number, whole in own.items()
    }
    new = {number: state for each in world.comm.all_gather_object(described) for number, state in each.items()}
    forms, sent = list[_Form](), list[torch.Tensor]()
    for number, (part, owner) in enumerate(zip(parts, owners, strict=True)):
        divided = {name: each for name, each in new[number].items() if isinstance(each, _Form)}
        forms += [_Form(owner, part.shape, part.dtype), *divided.values()]
        if owner == world.rank:
            sent += [own[number], *(states[own[number]][name] for name in divided)]
    received = iter(exchange.scatter(forms, sent))
    for number, part in enumerate(parts):
        part.to_local().copy_(next(received))
        optimizer.state[part] = {
            name: _divided(next(received), part, each.shape) if isinstance(each, _Form) else _here(each, world)
            for name, each in new[number].items()
        }


def _here(value: Any, world: World) -> Any:
    """A value of another rank's state; what was on its device is on this one's."""
    return value.to(world.device) if isinstance(value, torch.Tensor) and not value.is_cpu else value


@contextmanager
def _in_place_of(
    parts: Sequence[torch.Tensor],
    own: Mapping[int, nn.Parameter],
    states: Mapping[torch.Tensor, dict[str, Any]],
    optimizer: Optimizer,
) -> Iterator[None]:
    """A block in which the optimizer has whole parameters instead of parts; others, which no rank divides, it keeps."""
    numbers = {part: number for number, part in enumerate(parts)}
    lists, state = [group["params"] for group in optimizer.param_groups], optimizer.state
    optimizer.state = defaultdict(dict, {**{key: each for key, each in state.items() if key not in numbers}, **states})
    for group in optimizer.param_groups:
        places = [(numbers.get(each), each) for each in group["params"]]
        group["params"] = [
            each if number is None else own[number] for number, each in places if number is None or number in own
        ]
    try:
        yield
        state.update({key: each for key, each in optimizer.state.items() if key not in states})
    finally:
        optimizer.state = state
        for group, each in zip(optimizer.param_groups, lists, strict=True):
            group["params"] = each


def _owners(parts: Sequence[torch.Tensor], size: int) -> list[int]:
    """A rank for each, so that all have about the same work: that of products of a matrix with itself."""
    costs = [each.numel() * min(each.shape[0], each.numel() // max(each.shape[0], 1)) for each in parts]
    load, owners = [0] * size, [0] * len(parts)
    for number in sorted(range(len(parts)), key=lambda number: -costs[number]):
        owners[number] = min(range(size), key=load.__getitem__)
        load[owners[number]] += costs[number]
    return owners


def _has_rows(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim > 0


def _divided(rows: torch.Tensor, like: Any, shape: torch.Size) -> DTensor:
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        rows.clone(), like.device_mesh, like.placements, run_check=False, shape=shape, stride=stride
    )
