"""strategy="ddp": torch's DistributedDataParallel reduces during the backward pass, each bucket as soon as it is full.

DDP decides in the forward pass whether the next backward pass reduces. Here that is known only when the backward pass
begins: forward passes run as under `no_sync`, and the reducer is prepared when a backward pass begins. Buffers are
broadcast after a step. So a forward pass has no collective, and one rank alone may evaluate.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, compress
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
)
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from unisono.comm.selection import begin_average
from unisono.comm.shutdown import free_reducer
from unisono.devices.randomness import numpy_state, set_numpy_state
from unisono.report.timeline import REDUCE, Timeline
from unisono.strategies import DDP
from unisono.torch_private import (
    ACTIVE,
    BUILD_PARAMETERS,
    GradBucket,
    current_graph_task_id,
    overrides,
    push_rebuilt_parameters,
    rebuild_buckets,
    reset_reducer,
)
from unisono.training.agreement import broadcast_together
from unisono.training.gradients import is_sparse, scale_in_place
from unisono.training.parameter_names import listed
from unisono.training.steps import Steps
from unisono.training.strategies.engine import Engine
from unisono.training.strategies.held import is_left_at
from unisono.training.strategies.strategy import Strategy
from unisono.tree import tensors, tree_map
from unisono.world import World

_SYNCS_NO_BUFFERS: dict[str, Any] = next(
    {name: False}
    for name in ("forward_sync_buffers", "broadcast_buffers")  # deprecated in newer versions of torch
    if name in inspect.signature(DistributedDataParallel).parameters
)
_HOOKS = {None: allreduce_hook, "fp16": fp16_compress_hook, "bf16": bf16_compress_hook}
_FORWARD_PASSES = 16  # the most that one backward pass may use, with find_unused_parameters


class DDPStrategy(Strategy):
    """The strategy for a world of processes."""

    is_of_torch = True

    def wrap_model(self, module: nn.Module) -> Engine:
        if not any(each.requires_grad for each in module.parameters()):  # refused by DDP
            return super().wrap_model(module)
        return DDPEngine(module, self.world, self.steps, self.options)


class DDPEngine(Engine):
    """Runs the module in DistributedDataParallel, which reduces during the backward pass."""

    def __init__(self, module: nn.Module, world: World, steps: Steps, options: DDP) -> None:
        super().__init__(module, world, steps, options.broadcast_buffers)
        self._options = options
        self._finds_unused = options.find_unused_parameters
        self._outputs: list[list[torch.Tensor]] = []  # of each forward pass since the last backward pass
        self._unsent: set[int] = set()  # not empty while DDP reduces, until the last bucket is sent
        self._is_late, self._is_zeroed_in_part, self._at_forward = False, False, 0
        self._is_converted = False
        self._sparse: dict[torch.Tensor, None] = {}  # parameters that have sparse gradients, also where they are frozen
        self._wrap()

    def _wrap(self, fills: bool = True) -> None:
        """Create a reducer for the currently trained parameters; if it fills, with rank zero's values. A collective."""
        options = self._options
        self._names = {each: name for name, each in self.module.named_parameters() if each.requires_grad}
        self._frozen = [each for each in self.module.parameters() if not each.requires_grad]
        self._replicated = _Ordered(
            self.module,
            find_unused_parameters=options.find_unused_parameters,
            bucket_cap_mb=options.bucket_cap_mb,  # may be a fraction
            gradient_as_bucket_view=options.gradient_as_bucket_view,
            init_sync=fills,
            **_SYNCS_NO_BUFFERS,
        )
        if fills and "broadcast_buffers" in _SYNCS_NO_BUFFERS:  # of an older torch, which sends no first values either
            broadcast_together([*self.module.buffers()], self.world)
        self._sparse.update(dict.fromkeys(self._replicated.sparse))
        push_rebuilt_parameters(self._replicated.reducer)
        rebuild_buckets(self._replicated.reducer)  # the final ones; with find_unused_parameters torch keeps the first
        self._replicated.require_backward_grad_sync = False  # `prepare` begins what its forward pass would
        attach_hook(self._replicated, options.comm_hook, self.steps.factor, self._unsent.clear, self.world.timeline)

    def adapt_to_trained(self) -> None:
        if any(each.requires_grad for each in self.module.parameters()):
            self._wrap(fills=False)  # the graphs of earlier forward passes need the others unchanged

    def note_conversion(self) -> None:
        self._is_converted = True

    def refresh(self) -> None:
        super().refresh()
        if self._is_converted:
            self._is_converted = False
            self.world.comm.announce(f"new buckets for the converted parameters of the {self.name}")
            self.world.comm.barrier()  # names the ranks, if only some have converted theirs
            self.adapt_to_trained()

    def state(self) -> dict[str, Any] | None:
        hook = self._options.comm_hook
        return hook_state(hook) if callable(hook) else None

    def load_state(self, state: dict[str, Any]) -> None:
        if callable(hook := self._options.comm_hook):
            load_hook_state(hook, state, next(iter(self._names)).device)

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], method: str | None = None) -> Any:
        if not torch.is_grad_enabled():
            return super().run(args, kwargs, method)
        if self._unsent and current_graph_task_id() < 0:  # not in a checkpoint's recomputation
            raise RuntimeError(failed_before(self.name))
        self._at_forward = self.gradients.arrivals.count()
        if not self._finds_unused:
            # What is left of DDP's forward pass, without the frames that torch.compile would put into graphs.
            before = getattr(DistributedDataParallel, ACTIVE)
            setattr(DistributedDataParallel, ACTIVE, self._replicated)  # torch.compile cuts graphs at its buckets
            try:
                return (self._call if method is None else getattr(self.module, method))(*args, **kwargs)
            finally:
                setattr(DistributedDataParallel, ACTIVE, before)
        # DDP's forward pass lets the parameters arrive of outputs that the loss leaves out.
        result = self._replicated(*args, **kwargs) if method is None else super().run(args, kwargs, method)
        found = [each for each in tensors(result) if each.requires_grad]
        for each in found if method is None else ():
            if each.grad_fn is not None:  # torch's function holds the DDP weakly; `adapt_to_trained` makes another
                each.register_hook(partial(_keep, self._replicated))
        self._outputs = [*self._outputs[1 - _FORWARD_PASSES :], found]
        return result

    def prepare_reduction(self, reduces: bool) -> None:
        # DDP waits for each gradient once. One that has arrived in this pass already, at a parameter that the outputs
        # do not depend on, would never come; and a parameter frozen since the forward pass would be given one.
        is_frozen = not all(map(attrgetter("requires_grad"), self._names))
        is_late = is_frozen or self.gradients.arrivals.count() != self._at_forward
        outputs, self._outputs = list(chain.from_iterable(self._outputs)), []
        self._is_late = reduces and (is_late or (self._finds_unused and self._may_misread(outputs)))
        if reduces and not self._is_late:
            # Ranks that are not at the same place get an error here, where DDP would hang or mix gradients.
            self.world.comm.announce(f"the gradients of {self.agreement.place()}")
            # From these outputs DDP finds the unused parameters. Without `find_unused_parameters` it gets none, and
            # waits for all.
            self._replicated.reducer.prepare_for_backward(outputs)
            self._unsent.add(0)

    def _may_misread(self, outputs: list[torch.Tensor]) -> bool:
        """Whether DDP would leave out, or wait for, what it must not, where it looks for unused parameters.

        It leaves what it finds unused as it is, also where an earlier reduction's result is to be multiplied. It takes
        for used what has arrived since its last reduction, though it was zeroed, and what an output depends on whose
        own pass is still to come.
        """
        return self.gradients.is_divided or self._is_zeroed_in_part or not outputs or not all(map(is_left_at, outputs))

    def note_zeros(self, optimizer: Optimizer | None = None) -> bool:
        is_zero = super().note_zeros(optimizer)
        self._is_zeroed_in_part = not is_zero
        if is_zero and self._finds_unused:
            reset_reducer(self._replicated.reducer)  # it would take what has arrived before for used
        return is_zero

    def complete_reduction(self) -> None:
        if self._is_late:
            self.reduce_late()
            return
        # Those that were frozen with a gradient, which DDP does not know.
        left = set(map(id, self._left))  # which may have none on this rank
        if held := [each for each in self._frozen if each.grad is not None or id(each) in left]:
            self.reduce_late(held)
        # The last bucket was not sent: it, or one before it, still waits for a gradient.
        if self._unsent:
            lacking = [name for each, name in self._names.items() if each.grad is None or not each.requires_grad]
            raise RuntimeError(
                f"the backward pass gave no gradient to {listed(lacking) or 'some parameters'} of the {self.name} on "
                "this rank, and the strategy waits for all that were trained when it was prepared; where parameters "
                "are unused or frozen, or the loss leaves an output out, pass all outputs to the loss, and Accelerator("
                "strategy=unisono.strategies.DDP(find_unused_parameters=True))"
            )

    def reduce_late(self, parameters: Sequence[torch.Tensor] | None = None) -> None:
        super().reduce_late(parameters)
        for each in self._sparse:  # as in other steps, on all ranks: an optimizer's state may be sparse
            if each.grad is not None and not is_sparse(each.grad):
                each.grad = each.grad.to_sparse(1)


def _keep(_: Any, gradient: torch.Tensor) -> None:
    """A hook that keeps an object as long as the graph."""


class _Ordered(DistributedDataParallel):
    """A DDP whose buckets are filled from the last parameter to the first, in each step of each run.

    torch uses this order until the first step, and then the order in which that step's gradients arrived. The order of
    additions depends on the buckets, so a resumed run would not be bit-identical to an uninterrupted one.
    """

    __del__ = free_reducer

    @overrides(BUILD_PARAMETERS)
    def _build_params_for_reducer(self) -> tuple[list[Any], list[bool]]:
        parameters, are_sparse = super()._build_params_for_reducer()
        self.sparse = list(compress(parameters, are_sparse))
        return (parameters, are_sparse) if self.find_unused_parameters else (parameters[::-1], are_sparse[::-1])


def attach_hook(
    ddp: DistributedDataParallel,
    hook: str | Callable[[GradBucket], Any] | None,
    scale: Callable[[], float],
    finish: Callable[[], None],
    timeline: Timeline,
) -> None:
    """Make this DDP reduce gradients to the sum over the ranks of `scale() * gradient`, and call `finish` when the last
    bucket of a backward pass is sent.

    Hooks compute the mean over the ranks: gradients are multiplied by scale() * size before. DDP sends buckets in the
    order of their indices, so that all buckets of a backward pass have the factor that was computed for the first one.
    """
    group = ddp.process_group  # `weighted` must not reference the DDP, whose C++ part references it
    size: int = group.size()
    factor = 1.0

    def weighted(_: None, bucket: GradBucket) -> Any:
        nonlocal factor
        if bucket.index() == 0:
            factor = scale() * size
        gradients = bucket.buffer()
        if gradients.is_complex():
            raise ValueError(  # newer versions put pairs of real numbers into the bucket
                f"torch {torch.__version__} reduces complex gradients wrongly after a communication hook; use a newer "
                "one, or real parameters and torch.view_as_complex in forward()"
            )
        # If this is another thread, of autograd's, the loop's waits for it: a track has one writer at a time.
        track = timeline.backward or timeline.loop_in_backward(gradients.is_cpu)
        before = None if track is None else track.switch(REDUCE)
        is_dense = gradients.layout is torch.strided
        # Before the hook: the NaN of a rank without samples must be zero when the ranks' gradients are added.
        if not is_dense:  # its rows may be the gradient of the layer's output, which the pass has yet to take on
            bucket.set_buffer(gradients * factor if factor else torch.zeros_like(gradients))
        elif factor != 1:
            scale_in_place(gradients, factor)
        sent: Any = begin_average(gradients, group) if is_dense and hook is None else None
        if sent is None and is_dense and callable(hook):
            sent = hook(bucket)
            # A hook of several collectives: with gloo, those of two buckets could be mixed up on some rank.
            if not sent.done():
                sent.wait()
        elif sent is None:  # compression is of dense gradients only
            sent = _HOOKS[hook if is_dense and not callable(hook) else None](group, bucket)
        if bucket.is_last():
            finish()
        # Sent, not reduced: DDP waits for the results when the backward pass ends, which `Passes.backward` sees.
        if track is not None and not (bucket.is_last() and timeline.backward):
            track.switch(before)
        return sent

    weighted.__annotations__ = {}  # which DDP would compare with classes, and which are strings here
    ddp.register_comm_hook(None, weighted)


def _keeper(hook: Callable[..., Any]) -> Any:
    """What holds a hook's state: the first argument of a partial, what a method is bound to, or the hook itself."""
    if isinstance(hook, partial):
        return (*hook.args, *hook.keywords.values(), hook.func)[0]
    return getattr(hook, "__self__", hook)


def hook_state(hook: Callable[..., Any]) -> dict[str, Any]:
    """What a hook keeps from step to step, such as the error that the next gradients make up for: its `state_dict()`,
    or else its attributes, but for groups and functions."""
    keeper, found = _keeper(hook), dict[str, Any]()
    if hasattr(keeper, "load_state_dict"):
        return dict(keeper.state_dict())
    slots = chain.from_iterable(getattr(each, "__slots__", ()) for each in type(keeper).__mro__)
    for name in (*getattr(keeper, "__dict__", ()), *slots):
        value = getattr(keeper, name, None)
        if hasattr(value, "set_state"):  # a generator: torch's, or NumPy's
            value = value.get_state() if isinstance(value, torch.Generator) else numpy_state(value)
        if not isinstance(value, ProcessGroup) and not callable(value):
            found[name] = value
    return found


def load_hook_state(hook: Callable[..., Any], state: dict[str, Any], device: torch.device) -> None:
    """Let the hook continue from what `hook_state` has returned, with tensors on that device."""
    keeper = _keeper(hook)
    moved = tree_map(lambda each: each.to(device) if isinstance(each, torch.Tensor) else each, state)
    if hasattr(keeper, "load_state_dict"):
        keeper.load_state_dict(moved)
        return
    for name, value in state.items():
        generator = getattr(keeper, name, None)
        if not hasattr(generator, "set_state"):
            setattr(keeper, name, moved[name])
        elif isinstance(generator, torch.Generator):
            generator.set_state(value)
        else:
            set_numpy_state(generator, value)


def power_sgd(**options: Any) -> Callable[[GradBucket], Any]:
    """torch's PowerSGD as a hook, with the options of its state."""
    return partial(powerSGD_hook, PowerSGDState(None, **options))


def failed_before(model: str) -> str:
    """The error message for a backward pass after one that failed on this rank during its reduction."""
    return (
        f"the backward pass before, through the {model}, has failed on this rank in the middle of its reduction, which "
        "cannot be resumed, and other ranks may be waiting in it; let the error end the run, or restart on all ranks: "
        "accelerator.free_memory(), and prepare() (under strategy='fsdp' a new model)"
    )
