"""One replica per device, each in a thread of its own: what it keeps, what its failures do, and that it ends."""

from __future__ import annotations

import gc
import itertools
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any

import pytest
import torch
from interrupts import interrupt_main_thread, interrupting
from modes import FAMILY, PROCESSES_2, devices
from torch import nn

import unisono
from unisono import DataParallel, ReplicaContext, current_world
from unisono.devices.cores import usable_cores
from unisono.errors import BrokenWorldError, BusyError, ClosedError

PATIENCE_S = 60.0
TWO = devices(2)
_, SECOND = TWO


def network() -> nn.Module:
    return nn.Linear(3, 2)


def replica_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("unisono-replica-")]


@pytest.mark.any_family
@pytest.mark.parametrize("is_factory", [False, True])
def test_replicas_copy_a_modules_weights_and_ties_and_leave_it_untouched(is_factory):
    module, made = network(), []
    module.tied = module.weight
    before = {name: value.clone() for name, value in module.state_dict().items()}
    replicas = DataParallel((lambda: (made.append(1), module)[1]) if is_factory else module, TWO)
    assert made == [1] * is_factory, "a factory is called once"

    def train(model, loader, device, context):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(context.device.index)

    assert len({id(model) for model in [module, *replicas.models]}) == 3
    for model in replicas.models:
        assert all(torch.equal(value.cpu(), before[name]) for name, value in model.state_dict().items())
        assert model.tied is model.weight
    replicas(train, [])
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert [model.weight[0, 0].item() for model in replicas.models] == [0.0, 1.0]


def test_no_list_means_every_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CPU_NUM_DEVICES", "3")
    assert DataParallel(network()).devices == ["cpu:0", "cpu:1", "cpu:2"]


@pytest.mark.parametrize(
    ("error", "words", "arguments"),
    [
        (TypeError, "network=5 gives a int; pass a module", (5, TWO)),
        (TypeError, "gives a str; pass a module, or a function that creates one", (lambda: "no module", TWO)),
        (TypeError, "devices='cpu' is of type str; pass a list of devices", (network(), "cpu")),
        (ValueError, "devices=['cpu:0', 'cpu:0'] repeats cpu:0", (network(), ["cpu", "cpu:0"])),
        (ValueError, "device 'foo' does not exist", (network(), ["foo"])),
        (ValueError, "device 'meta' does not exist", (network().to("meta"), [])),
        (RuntimeError, "parameters are on cpu, meta; move", (nn.Sequential(network(), network().to("meta")), [])),
    ],
)
def test_a_wrong_argument_is_refused_by_name_value_and_rule(error, words, arguments):
    with pytest.raises(error, match=re.escape(words)):
        DataParallel(*arguments)


@pytest.mark.any_family
def test_the_loop_gets_its_model_loader_device_and_context():
    replicas = DataParallel(network(), TWO)

    def loop(model, loader, device, context):
        world = unisono.rank(), unisono.local_rank(), unisono.world_size(), unisono.is_rank_zero()
        return model, device, context.device, list(loader), world

    for rank, (model, device, of_context, batches, world) in enumerate(replicas(loop, range(6))):
        assert model is replicas.models[rank]
        assert device == of_context == torch.device(FAMILY, rank)
        assert batches == list(range(rank, 6, 2))
        assert world == (rank, rank, 2, rank == 0)
    shapes = replicas(
        lambda model, loader, *_: [list(batch.shape) for batch in loader], [torch.zeros(2, 5)], batch_dim=1
    )
    assert shapes == [[[2, 3]], [[2, 2]]], "samples along another dimension; the tail is split"
    for use, name in ((lambda: replicas(3, []), "loop_fn"), (lambda: replicas.run_on_replicas(3), "fn")):
        with pytest.raises(TypeError, match=f"^{name}=3 is of type int; pass a function"):
            use()


def test_getattr_or_keeps_what_it_makes_and_makes_none_again():
    context, made = ReplicaContext(torch.device("cpu")), []

    def make() -> list[int]:
        made.append(len(made))
        return made

    assert context.getattr_or("list", make) is context.getattr_or("list", make) is made
    assert made == [0]
    for value in (0, False, "", [], "text"):
        assert context.getattr_or(f"kept {value!r}", value) == context.getattr_or(f"kept {value!r}", "another") == value
    assert context.getattr_or("nothing", lambda: None) is None
    assert context.getattr_or("nothing", 7) == 7


def test_the_callers_thread_count_is_kept_and_replicas_share_the_cores():
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        shares = DataParallel(network(), TWO)(lambda *_: torch.get_num_threads(), [])
        assert torch.get_num_threads() == 3
        with ThreadPoolExecutor(1) as new_thread:
            assert new_thread.submit(torch.get_num_threads).result() == 3, "what a new thread begins with, too"
        assert shares == [max(1, usable_cores() // 2)] * 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.any_family
@pytest.mark.parametrize(
    ("mode", "devices"),
    [
        (torch.no_grad, TWO),
        (torch.inference_mode, TWO),
        (torch.enable_grad, []),
        *((lambda: torch.autocast(FAMILY, torch.bfloat16), each) for each in (TWO, [])),
    ],
    ids=["no_grad", "inference", "none", "autocast", "autocast-none"],
)
def test_replicas_run_each_call_under_the_callers_grad_mode_and_autocast(mode, devices):
    if mode is torch.inference_mode and FAMILY == "xla":
        pytest.skip("torch_xla takes no view of a plain tensor, as Linear does, in inference mode")
    replicas = DataParallel(network(), devices)

    def look(model, *_):
        output = model(torch.ones(1, 3, device=model.weight.device))
        return output.requires_grad, output.dtype, torch.is_inference(output)

    alone = network().to(replicas.models[0].weight.device)
    plain = look(alone)
    if devices:
        replicas.run_on_replicas(lambda *_: torch.set_grad_enabled(False))  # what a replica sets ends with its call
    with mode():
        expected = look(alone)
        assert replicas(look, []) == [expected] * max(1, len(devices))
        assert replicas.run_on_replicas(look) == [expected] * max(1, len(devices))
    assert replicas(look, []) == [plain] * max(1, len(devices))


def test_replicas_see_the_callers_context_variables_and_change_only_copies():
    replicas, variable = DataParallel(network(), TWO), ContextVar("variable", default="unset")
    token = variable.set("mine")
    try:

        def read_and_set(model, device, context):
            seen = variable.get()
            variable.set("theirs")
            return seen, unisono.world_size()

        for _ in range(2):
            assert replicas.run_on_replicas(read_and_set) == [("mine", 2), ("mine", 2)]
        assert variable.get() == "mine"
    finally:
        variable.reset(token)


@pytest.mark.any_family
@pytest.mark.parametrize("devices", [TWO, []], ids=str)
def test_any_function_runs_on_all_replicas_without_a_loader(devices):
    replicas = DataParallel(network(), devices)

    def fn(model, device, context):
        context.calls = context.getattr_or("calls", 0) + 1
        return model, device, context.calls, unisono.rank(), unisono.all_reduce(torch.tensor(1)).item()

    size = max(1, len(devices))
    for call in (1, 2):
        for rank, found in enumerate(replicas.run_on_replicas(fn)):
            assert found == (replicas.models[rank], torch.device(replicas.devices[rank]), call, rank, size)


@pytest.mark.any_family
@pytest.mark.parametrize("devices", [TWO, []], ids=str)
def test_its_state_is_the_networks_and_loading_it_reaches_every_replica(devices):
    module, replicas = network(), DataParallel(network(), devices)
    assert replicas.state_dict().keys() == module.state_dict().keys()
    missing, unexpected = replicas.load_state_dict(module.state_dict())
    assert missing == unexpected == []
    for model in replicas.models:
        assert torch.equal(model.weight.cpu(), module.weight)
        assert model.weight is not module.weight
    assert torch.equal(replicas.state_dict()["weight"].cpu(), module.weight)
    with pytest.raises(RuntimeError, match="Missing key"):
        replicas.load_state_dict({})
    assert replicas.load_state_dict({}, strict=False).missing_keys == ["weight", "bias"]


def fill_one(model: nn.Module, device: torch.device, context: ReplicaContext) -> None:
    if device.index == 1:
        with torch.no_grad():
            model.bias.fill_(7)
        raise KeyError("mine")


@pytest.mark.any_family
def test_a_failure_that_lets_replicas_drift_apart_says_how_to_mend_it():
    replicas = DataParallel(network(), TWO)
    assert replicas.are_alike()
    with pytest.raises(KeyError) as caught:
        replicas.run_on_replicas(fill_one)
    (note,) = [note for note in caught.value.__notes__ if "no longer alike" in note]
    assert "('bias' is the first that differs)" in note
    assert "replicas.load_state_dict(replicas.state_dict())" in note
    assert replicas.is_usable
    assert not replicas.are_alike()
    replicas.load_state_dict(replicas.state_dict())
    assert replicas.are_alike()


def test_the_cause_is_raised_even_if_replicas_cannot_be_compared():
    replicas = DataParallel(nn.LazyLinear(2), TWO)
    with pytest.raises(KeyError, match="mine") as caught:
        replicas.run_on_replicas(lambda *_: {}["mine"])
    assert any("it is unknown whether the replicas are still alike" in note for note in caught.value.__notes__)


def test_an_empty_list_runs_the_module_itself_in_the_calling_thread():
    module = network()
    replicas = DataParallel(module, [])

    def loop(model, loader, device, context):
        context.calls = context.getattr_or("calls", 0) + 1
        return model, threading.get_ident(), device, unisono.world_size(), context.calls, list(loader)

    for call in (1, 2):
        found = replicas(loop, range(3))
        assert found == [(module, threading.get_ident(), torch.device("cpu:0"), 1, call, [0, 1, 2])]
    assert replicas.models == [module]
    assert replicas.devices == ["cpu:0"]
    assert not replica_threads()


@pytest.mark.any_family
def test_a_replicas_failure_raises_with_its_place_and_leaves_all_usable():
    replicas = DataParallel(network(), TWO)

    def loop(model, loader, device, context):
        if device.index == 1:
            raise KeyError("mine")
        unisono.barrier()

    with pytest.raises(KeyError, match="mine") as caught:
        replicas(loop, [])
    assert any(note.startswith(f"rank 1 of 2, {SECOND}, pid ") for note in caught.value.__notes__)
    assert "loop" in [entry.name for entry in caught.traceback]
    assert not any("alike" in note for note in caught.value.__notes__)
    assert replicas(lambda *_: unisono.all_reduce(torch.tensor(1)).item(), []) == [2, 2]


@pytest.mark.any_family
def test_a_failing_replica_ends_the_others_loops_even_if_they_never_meet():
    replicas = DataParallel(network(), TWO)
    ended = []

    def loop(model, loader, device, context):
        if device.index == 0:
            next(loader)
            raise KeyError("mine")
        with pytest.raises(ClosedError):
            for _ in loader:
                pass
        ended.append(device.index)

    with pytest.raises(KeyError, match="mine"):
        replicas(loop, itertools.count())
    assert ended == [1]


@pytest.mark.any_family
def test_the_first_failure_is_raised_and_not_what_it_made_of_the_others():
    replicas = DataParallel(network(), TWO)
    has_failed = threading.Event()

    def loop(model, loader, device, context):
        if device.index == 1:
            try:
                raise OSError("the cause")
            finally:
                has_failed.set()
        try:
            unisono.barrier()
        except BrokenWorldError as error:
            raise RuntimeError("in my clean-up") from error

    for _ in range(5):
        with pytest.raises(OSError, match="the cause"):
            replicas(loop, [])
    assert has_failed.is_set()


def test_a_loader_that_cannot_be_iterated_raises_in_the_caller():
    class Broken:
        def __iter__(self) -> Iterator[int]:
            raise OSError("the disk is gone")

    replicas = DataParallel(network(), TWO)
    with pytest.raises(OSError, match="the disk is gone"):
        replicas(lambda *_: None, Broken())
    with pytest.raises(TypeError, match="loader=5 is of type int"):
        replicas(lambda *_: None, 5)
    assert replicas(lambda *_: 1, []) == [1, 1]


@pytest.mark.any_family
def test_an_exit_in_a_replica_is_an_exit_of_the_caller():
    replicas = DataParallel(network(), TWO)

    def loop(model, loader, device, context):
        if device.index == 1:
            sys.exit(3)
        unisono.barrier()

    with pytest.raises(SystemExit) as caught:
        replicas(loop, [])
    assert caught.value.code == 3
    assert replicas(lambda *_: 1, []) == [1, 1]


@pytest.mark.any_family
def test_a_replica_that_returns_early_leaves_the_others_their_batches():
    def loop(model, loader, device, context):
        return len([next(loader)] if device.index == 0 else list(loader))

    assert DataParallel(network(), TWO)(loop, range(200)) == [1, 100]


@pytest.mark.parametrize("devices", [TWO, ["cpu"], []], ids=str)
def test_a_call_from_within_its_own_loop_is_refused(devices):
    replicas = DataParallel(nn.Identity(), devices)

    def loop(*_):
        state = replicas.state_dict()
        for use in (
            lambda: replicas(loop, []),
            lambda: replicas.run_on_replicas(loop),
            lambda: replicas.load_state_dict(state),
        ):
            with pytest.raises(BusyError, match="runs one at a time"):
                use()
        return replicas.is_usable

    assert replicas(loop, []) == [False] * max(1, len(devices))
    assert replicas.is_usable


def test_a_worker_of_several_is_refused():
    def body() -> str:
        with pytest.raises(RuntimeError) as caught:
            DataParallel(nn.Identity(), TWO)(lambda *_: None, [])
        return str(caught.value)

    assert [message[:28] for message in PROCESSES_2.run(body)] == [
        f"DataParallel in rank {rank} of 2:" for rank in (0, 1)
    ]


def interrupted(loop: Callable[..., Any], loader: Any) -> DataParallel:
    replicas = DataParallel(network(), TWO)
    with pytest.raises(KeyboardInterrupt):
        replicas(loop, loader)
    return replicas


@pytest.mark.any_family
def test_an_interrupt_of_the_caller_ends_loops_over_the_loader():
    has_begun = threading.Barrier(2, action=interrupt_main_thread)

    def loop(model, loader, device, context):
        next(loader)
        has_begun.wait(PATIENCE_S)
        for _ in loader:
            pass

    replicas = interrupted(loop, itertools.count())
    assert replicas(lambda model, loader, *_: len(list(loader)), range(4)) == [2, 2]


def test_interrupted_replicas_in_plain_python_end_at_their_next_collective():
    is_broken, seen = threading.Event(), []

    def fn(model, device, context):
        if device.index == 0:
            interrupt_main_thread()
        while True:
            sum(range(10_000))  # plain Python, until a collective says that the world is broken
            try:
                unisono.barrier()
            except BrokenWorldError as error:
                is_broken.set()
                seen.append(type(error.__cause__))
                raise

    replicas = DataParallel(network(), TWO)
    with pytest.raises(KeyboardInterrupt) as caught:
        replicas.run_on_replicas(fn)
    assert seen == [KeyboardInterrupt] * 2
    assert not getattr(caught.value, "__notes__", [])
    assert replicas.is_usable
    assert replicas.run_on_replicas(lambda *_: unisono.world_size()) == [2, 2]


def test_a_second_interrupt_leaves_an_endless_loop_and_the_object_says_so():
    replicas, gate, once = DataParallel(network(), TWO), threading.Event(), threading.Event()

    def stay(model, device, context):
        if device.index == 1:
            return
        interrupt_main_thread()
        once.wait(0.5)  # the main thread is told, and waits again
        interrupt_main_thread()
        gate.wait(PATIENCE_S)

    try:
        with pytest.raises(KeyboardInterrupt) as caught:
            replicas.run_on_replicas(stay)
        assert caught.value.__notes__ == ["replicas [0] still run the loop; is_usable says when they have returned"]
        assert not replicas.is_usable
        for use in (lambda: replicas(lambda *_: 1, []), lambda: replicas.load_state_dict(replicas.state_dict())):
            with pytest.raises(BusyError, match=r"replicas \[0\] still run the loop of a call that was interrupted"):
                use()
    finally:
        gate.set()
    deadline = time.monotonic() + PATIENCE_S
    while not replicas.is_usable and time.monotonic() < deadline:
        threading.Event().wait(0.01)
    assert replicas.run_on_replicas(lambda *_: 1) == [1, 1]


@pytest.mark.parametrize("loader", [None, [1, 2]], ids=str)
def test_wherever_an_interrupt_strikes_the_object_is_usable_afterwards(loader):
    replicas, at, is_reached = DataParallel(network(), TWO), 0, True

    def call() -> None:
        if loader is None:
            replicas.run_on_replicas(lambda *_: unisono.barrier())
        else:
            replicas(lambda *_: unisono.barrier(), loader)

    call()
    while is_reached:
        is_reached = interrupting(at, ("threads/data_parallel.py", "threads/replicas.py"), call)
        assert replicas.is_usable
        assert replicas.run_on_replicas(lambda *_: unisono.all_reduce(torch.tensor(1)).item()) == [2, 2]
        at += 1
    assert at > 10


@pytest.mark.any_family
def test_dropping_it_ends_its_threads():
    replicas = DataParallel(network(), TWO)
    replicas(lambda *_: None, range(3))
    threads = replica_threads()
    assert len(threads) == 2
    del replicas
    gc.collect()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert not any(thread.is_alive() for thread in threads)


@pytest.mark.any_family
def test_a_failed_call_keeps_nothing_of_what_its_loops_held():
    class Batch: ...

    replicas, seen = DataParallel(nn.Linear(2, 2), TWO), []

    def fail(model, device, context):
        batch = Batch()
        seen.append(weakref.ref(batch))
        if current_world().rank == 0:
            raise ValueError("with a batch in hand")
        unisono.barrier()

    with pytest.raises(ValueError, match="with a batch in hand"):
        replicas.run_on_replicas(fail)
    replicas.run_on_replicas(lambda *_: None)  # a thread has let go of the call before when it takes the next
    gc.collect()
    assert [each() for each in seen] == [None, None]
