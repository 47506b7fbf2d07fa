"""The threads' `DataParallel` by its name in PyTorch/XLA: replicas, contexts, plain batches, failures that are told."""

from __future__ import annotations

import pytest
import torch
from families import DEVICES, FAMILY, RANKS
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import unisono.compat.torch_xla.core.xla_model as xm
import unisono.compat.torch_xla.distributed.data_parallel as dp


def numbered(count):
    return [(torch.full((3,), float(number)), number) for number in range(count)]


def test_a_factory_is_called_once_and_all_replicas_begin_alike():
    made = []

    def factory():
        made.append(nn.Linear(2, 2))
        return made[-1]

    replicas = dp.DataParallel(factory, DEVICES)
    assert len(made) == 1
    assert replicas.devices == DEVICES
    assert all(torch.equal(model.weight.cpu(), made[0].weight) for model in replicas.models)


def test_no_devices_named_are_all_devices(monkeypatch):
    if FAMILY == "cpu":
        monkeypatch.setenv("CPU_NUM_DEVICES", str(RANKS))
    assert dp.DataParallel(nn.Linear(2, 2)).devices == xm.get_xla_supported_devices() == DEVICES


def test_results_come_in_device_order_of_loops_over_plain_batches():
    def loop(model, loader, device, context):
        numbers = []
        for data, number in loader:
            assert data.device.type == device.type
            numbers.append(number)
        return str(device), numbers

    count = 2 * RANKS
    expected = [(device, list(range(rank, count, RANKS))) for rank, device in enumerate(DEVICES)]
    replicas = dp.DataParallel(nn.Linear(2, 2), DEVICES)
    assert replicas(loop, numbered(count)) == expected
    assert replicas(loop, numbered(count + RANKS - 1)) == expected, "an incomplete last group is dropped"


def test_a_native_run_has_the_very_module_this_thread_and_plain_batches_too():
    module = nn.Linear(2, 2)
    seen = []

    def loop(model, loader, device, context):
        seen.append(model)
        return [number for _, number in loader]

    assert dp.DataParallel(module, [])(loop, numbered(3)) == [[0, 1, 2]]
    assert seen == [module]


def test_any_one_device_will_do():
    device = DEVICES[-1]
    found = dp.DataParallel(nn.Linear(2, 2), [device])(lambda model, loader, *_: len(list(loader)), numbered(3))
    assert found == [3]


def test_contexts_live_from_call_to_call():
    replicas = dp.DataParallel(nn.Linear(2, 2), DEVICES)

    def loop(model, loader, device, context):
        context.calls = context.getattr_or("calls", 0) + 1
        assert context.device == device
        return context.calls

    assert [replicas(loop, []) for _ in range(3)] == [[number] * RANKS for number in (1, 2, 3)]


def test_getattr_or_computes_what_is_missing_or_none_and_keeps_it():
    context = dp.Context(torch.device("cpu"))
    assert context.getattr_or("made", lambda: [1]) is context.made
    assert context.getattr_or("made", 2) == [1]
    assert (context.getattr_or("zero", 0), context.getattr_or("zero", 5)) == (0, 0)
    context.nothing = None
    assert context.getattr_or("nothing", 7) == context.nothing == 7
    assert context.getattr_or("device", None) == torch.device("cpu")


def test_a_failing_replica_raises_in_the_caller_and_the_object_goes_on():
    replicas = dp.DataParallel(nn.Linear(2, 2), DEVICES)

    def loop(model, loader, device, context):
        for _, number in loader:
            if number == RANKS - 1:
                raise LookupError(f"number {number}")
            xm.rendezvous("together")
        return True

    with pytest.raises(LookupError, match=f"number {RANKS - 1}") as caught:
        replicas(loop, numbered(4 * RANKS))
    assert any(DEVICES[-1] in note for note in caught.value.__notes__)
    assert replicas(lambda *_: True, numbered(RANKS)) == [True] * RANKS


def test_a_replica_that_leaves_early_does_not_starve_the_others():
    def loop(model, loader, device, context):
        taken = 0
        for _ in loader:
            taken += 1
            if xm.get_ordinal() == 0:
                break
        return taken

    assert dp.DataParallel(nn.Linear(2, 2), DEVICES)(loop, numbered(50 * RANKS)) == [1] + [50] * (RANKS - 1)


def test_a_step_closure_belongs_to_its_replica():
    def loop(model, loader, device, context):
        heard = []
        for data, number in loader:
            xm.add_step_closure(lambda data, number: heard.append((data[0].item(), number)), args=(data, number))
        return heard

    found = dp.DataParallel(nn.Linear(2, 2), DEVICES)(loop, numbered(2 * RANKS))
    assert found == [[(float(number), number) for number in (rank, rank + RANKS)] for rank in range(RANKS)]


def test_a_loader_that_fails_fails_the_call():
    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return 100

        def __getitem__(self, index):
            if index == 50:
                raise FileNotFoundError("sample 50")
            return index

    replicas = dp.DataParallel(nn.Linear(2, 2), DEVICES)
    with pytest.raises(FileNotFoundError, match="sample 50"):
        replicas(lambda model, loader, *_: list(loader), DataLoader(Data(), batch_size=2))


def test_an_epoch_covers_every_sample_where_the_batches_divide():
    data = DataLoader(TensorDataset(torch.arange(8 * RANKS)), batch_size=4, shuffle=True)
    replicas = dp.DataParallel(nn.Linear(2, 2), DEVICES)

    def loop(model, loader, device, context):
        return [value for (batch,) in loader for value in batch.tolist()]

    epochs = [[value for part in replicas(loop, data) for value in part] for _ in range(2)]
    assert epochs[0] != epochs[1]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(8 * RANKS))


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: dp.DataParallel(3, DEVICES), TypeError, "network=3 gives a int"),
        (lambda: dp.DataParallel(nn.Linear(1, 1), [DEVICES[0]] * 2), ValueError, "repeats"),
        (lambda: dp.DataParallel(nn.Linear(1, 1), ["warp:9"]), ValueError, "does not exist; there are"),
        (lambda: dp.DataParallel(nn.Linear(1, 1), DEVICES)(3, []), TypeError, "loop_fn=3 is of type int"),
        (lambda: dp.DataParallel(nn.Linear(1, 1), DEVICES)(print, 3), TypeError, "loader=3 is of type int"),
    ],
)
def test_bad_input_is_told_with_its_value(call, error, words):
    with pytest.raises(error, match=words):
        call()
