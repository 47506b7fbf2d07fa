"""Map over, slice and measure a nested batch of any containers.

Containers are mappings, list, tuple, named tuple, set, frozenset and dataclass; everything else is a leaf. A rebuilt
container keeps its type and order; an object that occurs twice is visited once and stays shared; the batch itself is
never modified. (`torch.utils._pytree` has neither dataclasses nor user-defined mappings nor shared leaves.)

Only `tensors` looks into leaves, too: what an object of a user's class or of a library holds is its own business, but
its memory says which batch a tensor belongs to.
"""

from __future__ import annotations

import copy
import dataclasses
import numbers
import operator
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import islice
from types import FunctionType, MemberDescriptorType, ModuleType
from typing import Any

import numpy
import torch
from torch.nn.utils.rnn import PackedSequence

from unisono.torch_private import get_unwrapped, is_in_torch_func

PLAIN = (str, bytes, numbers.Number, type(None))  # leaves that hold no samples
_PLAIN_TYPES = frozenset((str, bytes, int, float, bool, complex, type(None)))  # those seen at a glance
_TENSOR, _STRIDED = frozenset((torch.Tensor,)), frozenset((torch.strided,))
_layout_of, _nbytes_of = operator.attrgetter("layout"), operator.attrgetter("nbytes")
# What an object may hold that is not part of a batch.
_CLOSED = (type, ModuleType, FunctionType, numpy.ndarray, torch.nn.Module, torch.utils.data.Dataset)
_LOOKED_AT = 10_000  # objects: one that refers to half the program is not a batch


def tree_map(fn: Callable[[Any], Any], tree: Any) -> Any:
    """Rebuild `tree` with `fn(leaf)` in place of each leaf; return `tree` itself if no leaf changes."""
    return _map(fn, tree, {})


def map_objects(fn: Callable[[Any], Any], tree: Any) -> Any:
    """As `tree_map`, but texts and numbers stay; fast where a container holds nothing else."""

    def if_plain(node: Any) -> Any:
        return node if type(node) in (list, tuple) and are_plain(node) else None

    return _map(lambda leaf: leaf if type(leaf) in _PLAIN_TYPES else fn(leaf), tree, {}, if_plain)


def leaves(tree: Any) -> list[Any]:
    """The leaves of `tree`, in order; a shared leaf once."""
    return [node for node in _nodes(tree, is_whole=True) if not is_container(node)]


def objects(tree: Any) -> list[Any]:
    """The leaves of `tree` except texts and numbers, each once, in order: what may be moved, measured or shared. Fast
    where a container holds only texts and numbers."""
    flat = flat_tensors(tree)
    return [*{id(each): each for each in flat}.values()] if flat else [n for n in _nodes(tree) if not is_container(n)]


def _nodes(tree: Any, is_whole: bool = False) -> list[Any]:
    """The leaves of `tree`, with texts and numbers if `is_whole`, and each container after what it holds; all once."""
    found: dict[int, Any] = {}  # with the nodes, as in `_map`
    _visit(tree, found, is_whole)
    return [*found.values()]


def are_plain(nodes: Collection[Any]) -> bool:
    """Whether all are texts or numbers."""
    kinds = [*map(type, nodes)]
    # Most often all have one type, and counting it takes a fraction of looking up each.
    return _PLAIN_TYPES.issuperset(kinds[:1] if kinds.count(kinds[0]) == len(kinds) else kinds) if kinds else True


def _visit(node: Any, found: dict[int, Any], is_whole: bool) -> None:
    # Not a function within `_nodes`: it would be in a cycle with `found`, which would hold batches until a collection.
    if id(node) not in found and (is_whole or type(node) not in _PLAIN_TYPES):
        held = children(node) if is_container(node) else []
        if is_whole or not are_plain(held):
            for child in held:
                _visit(child, found, is_whole)
        found[id(node)] = node  # not before: a container that contains itself is a RecursionError


def children(node: Any) -> list[Any]:
    """What a container holds."""
    if isinstance(node, Mapping):
        return list(node.values())
    if isinstance(node, list | tuple | set | frozenset):
        return list(node)
    return [getattr(node, field.name) for field in dataclasses.fields(node) if hasattr(node, field.name)]


def tensors(tree: Any) -> list[torch.Tensor]:
    """The tensors among the leaves, and in the attributes of those that are objects. Fast for the most common batches,
    since it runs several times a step."""
    flat = flat_tensors(tree)
    if flat is not None:
        return list(flat)
    found: dict[int, torch.Tensor] = {}
    for leaf in objects(tree):
        if type(leaf) is torch.Tensor:
            found[id(leaf)] = leaf
        else:
            _look_into(leaf, found)
    return [*found.values()]


def innermost(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that the transformations of `torch.func` have wrapped, or itself."""
    while is_in_torch_func(tensor):
        tensor = get_unwrapped(tensor)
    return tensor


def _look_into(leaf: Any, found: dict[int, torch.Tensor]) -> None:
    """Add the tensors that an object holds, in order, without calling its methods."""
    seen: dict[int, Any] = {}  # with the nodes, as in `_map`
    left = [leaf]
    while left and len(seen) < _LOOKED_AT:
        node = left.pop()
        if type(node) in _PLAIN_TYPES or isinstance(node, _CLOSED) or id(node) in seen:
            continue
        seen[id(node)] = node
        if isinstance(node, torch.Tensor):
            found[id(node)] = node
            if not hasattr(node, "__tensor_flatten__"):  # else one that wraps others, as a nested one does
                continue
        left += [*islice(_held_by(node), _LOOKED_AT)][::-1]


def _held_by(node: Any) -> Collection[Any]:
    """What an object holds: the elements of a plain collection, else the values of all its attributes."""
    if isinstance(node, dict):
        return dict.values(node)
    if isinstance(node, list | tuple | set | frozenset | deque):
        return node
    held: list[Any] = []
    with suppress(Exception):  # a class may say anything about its `__dict__`
        held += vars(node).values() if hasattr(node, "__dict__") else ()
    kind: Any = type(node)
    for slot in _slots(kind):
        with suppress(AttributeError):  # not set
            held.append(slot.__get__(node))
    return held


@lru_cache(256)
def _slots(kind: Any) -> list[Any]:
    return [each for base in kind.__mro__ for each in vars(base).values() if type(each) is MemberDescriptorType]


def batch_size(tree: Any, dim: int = 0) -> int | None:
    """The number of samples of a batch: the size, along `dim`, of its tensors and arrays that have this dimension. None
    if none has it, if their sizes differ, or if a packed sequence orders samples in its own way."""
    held = objects(tree)
    sizes = {size_along(leaf, dim) for leaf in held} - {None}
    return sizes.pop() if len(sizes) == 1 and not any(isinstance(leaf, PackedSequence) for leaf in held) else None


def may_list_samples(tree: Any) -> bool:
    """Whether a batch is a list of mappings with the same keys, or of objects of one dataclass: each may be a sample
    that is not collated, or a part of all samples (a view of them), whose tensors show the number of samples."""
    if type(tree) is not list or not tree or not all(map(_is_record, tree)):
        return False
    return len({frozenset(each) if isinstance(each, Mapping) else type(each) for each in tree}) == 1


def can_cut(tree: Any, dim: int = 0) -> bool:
    """Whether it is certain how a batch divides into samples: its size is known and not 0; it holds only dense tensors
    of one size, arrays, texts and numbers; and no list has as many elements as there are samples that are containers,
    or tensors of equal type and dimensionality: each may be one sample, or a part of all."""
    size = batch_size(tree, dim)

    def is_certain(node: Any) -> bool:
        if not is_container(node):
            return size_along(node, dim) in (None, size) if _is_dense(node) else isinstance(node, PLAIN)
        if type(node) not in (list, tuple) or len(node) != size or dim != 0:
            return True
        are_alike = all(map(is_array, node)) and len({(each.dtype, each.ndim) for each in node}) == 1
        return not are_alike and not any(map(is_container, node))

    return bool(size) and all(map(is_certain, _nodes(tree)))


def all_have_rows(tree: Any, dim: int = 0) -> bool:
    """Whether each value of a batch has its rows along `dim`, or is a list with a text or number for each row. A single
    sample seldom passes for one: its label has no rows."""
    size = batch_size(tree, dim)

    def has_rows(node: Any) -> bool:
        if not is_container(node):
            return size_along(node, dim) == size
        held = children(node)
        return len(held) == size if type(node) in (list, tuple) and are_plain(held) else all(map(has_rows, held))

    return size is not None and has_rows(tree)


def flat_tensors(tree: Any) -> Collection[torch.Tensor] | None:
    """The tensors of a batch that is a tensor, or a plain list, tuple or dict of tensors only, as most are; None for
    any other. This runs on every step."""
    kind = type(tree)
    if kind is torch.Tensor:
        return (tree,)
    if kind not in (tuple, list, dict):
        return None
    held: Collection[Any] = tree.values() if kind is dict else tree
    return held if _TENSOR.issuperset(map(type, held)) else None


def nbytes(tree: Any) -> int:
    """The bytes of a batch's dense tensors and arrays; a shared one counts once."""
    return measured(tree)[1]


def measured(tree: Any) -> tuple[Sequence[torch.Tensor], int]:
    """`tensors` and `nbytes` of a batch, which is walked through once: it may hold thousands of tensors or texts."""
    flat = flat_tensors(tree)
    if flat is not None and _STRIDED.issuperset(map(_layout_of, flat)):
        held = [*flat] if len(flat) < 2 else [*{id(each): each for each in flat}.values()]
        return held, sum(map(_nbytes_of, held))
    every = objects(tree)
    dense = [leaf.data if isinstance(leaf, PackedSequence) else leaf for leaf in every]
    return tensors(every), sum([leaf.nbytes for leaf in dense if _is_dense(leaf)])


def take(tree: Any, samples: slice | list[int], dim: int = 0) -> Any:
    """The given samples of a batch, in their order: of every tensor, array and (along dim 0) plain list of its size; a
    leaf without dimension `dim` is kept whole. A slice makes views, a list copies. ValueError if `can_cut` is False."""
    if not can_cut(tree, dim):
        raise ValueError(f"a batch of type {type(tree).__name__} cannot be split: it does not say what one sample is")
    size = batch_size(tree, dim)

    def cut(node: Any) -> Any:
        return node if size_along(node, dim) is None else node[(slice(None),) * (dim % node.ndim) + (samples,)]

    def cut_lists(node: Any) -> Any:
        if _is_sized(node, dim):
            return node[(slice(None),) * dim + (samples,)]
        # One with arrays or containers is a structure, and does not hold one value per sample.
        is_structure = type(node) not in (list, tuple) or any(is_array(each) or is_container(each) for each in node)
        if is_structure or dim != 0 or len(node) != size:
            return None
        return node[samples] if isinstance(samples, slice) else type(node)(node[place] for place in samples)

    return _map(cut, tree, {}, cut_lists)


def size_along(leaf: Any, dim: int) -> int | None:
    """The size of a tensor or array along a dimension; None for anything else, or if it lacks that dimension."""
    if not is_array(leaf) or not -leaf.ndim <= dim < leaf.ndim:
        return None
    if isinstance(leaf, torch.Tensor) and leaf.is_nested:  # a ragged dimension has no size, and may have no shape
        return int(leaf.size(0)) if dim in (0, -leaf.ndim) else None
    return int(leaf.shape[dim])


def is_array(leaf: Any) -> bool:
    """Whether `leaf` is a tensor or a numpy array."""
    return isinstance(leaf, torch.Tensor | numpy.ndarray)


def _is_dense(leaf: Any) -> bool:
    return is_array(leaf) and (isinstance(leaf, numpy.ndarray) or (leaf.layout is torch.strided and not leaf.is_nested))


def is_container(node: Any) -> bool:
    """Whether a node is not a leaf."""
    if type(node) in _PLAIN_TYPES or isinstance(node, torch.Tensor | PackedSequence):
        return False
    return isinstance(node, list | tuple | set | frozenset) or _is_record(node)


def _is_record(node: Any) -> bool:
    return isinstance(node, Mapping) or (dataclasses.is_dataclass(node) and not isinstance(node, type))


def _map(
    fn: Callable[[Any], Any], node: Any, seen: dict[int, tuple[Any, Any]], whole: Callable[[Any], Any] | None = None
) -> Any:
    """Map `fn` over the leaves of `node`; `whole` may replace a container as if it were a leaf. `seen` holds each
    visited node, by id, and its image: a mapping may create values on demand, whose ids would be used again."""
    if id(node) in seen:
        return seen[id(node)][1]
    if not is_container(node):
        image = fn(node)
    elif (image := whole(node) if whole else None) is None:
        held = children(node)
        images = [_map(fn, child, seen, whole) for child in held]
        image = node if all(map(operator.is_, held, images)) else _rebuild(node, images)
    seen[id(node)] = node, image
    return image


def _is_sized(node: Any, dim: int) -> bool:
    """Whether a container knows its batch size, as a TensorDict or a tensorclass, and so is cut by itself."""
    size = getattr(node, "batch_size", None)
    return isinstance(size, torch.Size) and 0 <= dim < len(size)


def _rebuild(node: Any, images: list[Any]) -> Any:
    """A container like that one, which holds the images."""
    if isinstance(node, Mapping):
        return _like_mapping(node, dict(zip(node.keys(), images, strict=True)))  # a TensorDict iterates its rows
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return type(node)._make(images)  # type: ignore[attr-defined]
    if isinstance(node, list) and type(node) is not list:  # its `__init__` may take other arguments
        twin: Any = copy.copy(node)
        twin[:] = images
        return twin
    if isinstance(node, list | tuple | set | frozenset):
        return type(node)(images)
    # A copy rather than a new object, because `__init__` may take other arguments than the fields.
    twin = copy.copy(node)
    held = [field.name for field in dataclasses.fields(node) if hasattr(node, field.name)]
    for name, image in zip(held, images, strict=True):
        object.__setattr__(twin, name, image)  # a frozen dataclass refuses the plain assignment
    return twin


def _like_mapping(node: Mapping[Any, Any], mapped: dict[Any, Any]) -> Any:
    if type(node) is dict:
        return mapped
    try:
        twin: Any = copy.copy(node)
        if hasattr(twin, "clear_device_"):  # a TensorDict would move the images back to its device
            twin.clear_device_()
        if not isinstance(node, dict) and not hasattr(type(node), "__copy__"):
            # The shallow copy shares the container that stores the items.
            vars(twin).update({name: copy.copy(value) for name, value in vars(twin).items() if is_container(value)})
        for key, value in mapped.items():
            twin[key] = value
    except TypeError:  # an immutable mapping is rebuilt from its items
        return type(node)(mapped)  # type: ignore[call-arg]
    return twin
