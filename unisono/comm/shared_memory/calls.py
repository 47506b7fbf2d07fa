"""How torch calls a process group: in several forms, with work that may be waited for; and the calls that gloo carries
out.

*Threads:* any.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist

from unisono.comm.tensor_forms import needs_copy, plain
from unisono.torch_private import create_work_from_future
from unisono.tree import tensors, tree_map

_ProcessGroup: Any = dist.ProcessGroup  # torch's annotations are incomplete


def done(tensors: Any) -> Any:
    """Work that was completed before it is returned."""
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(tensors)
    return create_work_from_future(future)


def by_gloo_together(name: str) -> Callable[..., Any]:
    """A collective that gloo carries out, after all ranks have compared their calls. Its first argument is written."""

    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        # gloo reads and writes memory without regard to strides.
        dense = {id(each): plain(each) for each in tensors([arguments, named]) if needs_copy(each)}
        sent, named = tree_map(lambda leaf: dense.get(id(leaf), leaf), [list(arguments), named])
        with self.here.lock:  # gloo pairs calls by their order
            self._blocks.barrier(f"called {name}()")
            work = getattr(self._by_gloo(), name)(*sent, **named)
        copied = [each for each in tensors(arguments[:1]) if id(each) in dense]
        if copied:
            work.wait()
            for each in copied:
                each.detach().copy_(dense[id(each)])
        return work

    return call


class _Form(_ProcessGroup):  # type: ignore[misc]
    """A call in any of the forms that torch's methods take; torch makes lists of tensors and options of it."""

    def keep(self, *arguments: Any) -> Any:
        self.arguments = arguments
        return done([])

    allreduce = allreduce_coalesced = broadcast = allgather = reduce_scatter = barrier = keep


def in_any_form(options: type) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Let a method that takes lists of tensors and these options take one tensor, too, and options by name."""

    def decorate(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(self: Any, *arguments: Any, **named: Any) -> Any:
            if named or not arguments or type(arguments[-1]) is not options:
                form = _Form(self.rank(), self.size())
                getattr(_ProcessGroup, method.__name__)(form, *arguments, **named)
                arguments = form.arguments
            return method(self, *arguments)

        return call

    return decorate


def let_monitored_barrier_take(kind: Any) -> None:
    """Let torch's function, which by name refuses every group but gloo's, take groups of this kind."""
    original = dist.monitored_barrier

    @wraps(original)
    def monitored_barrier(
        group: Any = None, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
    ) -> Any:
        found = dist.group.WORLD if group is None else group
        if not isinstance(found, kind):
            return original(group, timeout, wait_all_ranks)
        limit = timedelta(seconds=timeout) if isinstance(timeout, int | float) else timeout
        found.monitored_barrier(limit, wait_all_ranks=wait_all_ranks)
        return None

    for module in (dist, dist.distributed_c10d):
        module.monitored_barrier = monitored_barrier  # type: ignore[attr-defined]
