"""Checkpoints by hand: what is kept, what is raised and when, and what does not fit."""

from __future__ import annotations

import collections
import json
import logging
import os
import pickle
import random
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from file_faults import at_each_operation, end_save, fail_at
from modes import HOST, PROCESSES_2, SOLO, THREADS_2, THREADS_3, Mode, fitting
from resumable import Anything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from unisono import Accelerator, Checkpointer, DataParallel, ParallelLoader, current_world
from unisono.checkpoint.checkpointer import load, save
from unisono.checkpoint.contents import export
from unisono.checkpoint.directory import Manifest
from unisono.checkpoint.folders import checksum_of, folder_at
from unisono.cli.main import main
from unisono.errors import (
    BrokenWorldError,
    CheckpointError,
    CheckpointMismatchError,
    CheckpointVersionError,
    CollectiveMismatchError,
    DamagedCheckpointError,
)

SEVERAL = pytest.mark.parametrize("mode", fitting(THREADS_3, PROCESSES_2), ids=str)


@pytest.fixture(params=["a directory", "a store"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    if request.param == "a directory":
        yield tmp_path / "run"
        return
    yield "memory://unisono-run"
    with suppress(FileNotFoundError):
        pytest.importorskip("fsspec").filesystem("memory").rm("/unisono-run", recursive=True)


def names_in(root: Path | str) -> list[str]:
    return sorted(folder_at(root).entries())


def below(root: Path | str, name: str) -> Any:
    return folder_at(root).location / name if isinstance(root, Path) else f"{root}/{name}"


def test_the_last_few_are_kept_and_latest_says_which_one_is_taken(root: Any) -> None:
    thing = Anything()
    with Checkpointer(root, keep=2, every=3, thing=thing) as checkpointer:
        for number in range(1, 11):
            thing.state = number
            assert checkpointer.step() == (number % 3 == 0)
    assert names_in(root) == ["checkpoint_6", "checkpoint_9", "latest"]
    assert (load(root, thing=thing).step, thing.state) == (9, 9)
    folder_at(root).write("latest", b"checkpoint_6")
    assert (load(root, thing=thing).step, thing.state) == (6, 6)
    folder_at(root).remove("latest")
    assert load(root, thing=thing).step == 9


def test_after_a_return_to_an_earlier_one_the_abandoned_ones_go_first(root: Any) -> None:
    checkpointer = Checkpointer(root, keep=2, is_async=False, thing=Anything(0))
    for checkpointer.num_steps in (10, 20, 30):
        checkpointer.save()
    assert checkpointer.load(below(root, "checkpoint_20")).step == 20
    for checkpointer.num_steps, kept in ((4, 30), (5, 4)):
        checkpointer.save()
        assert names_in(root) == [*sorted([f"checkpoint_{kept}", f"checkpoint_{checkpointer.num_steps}"]), "latest"]


def test_an_asynchronous_save_holds_what_was_there_when_it_was_called(tmp_path: Path) -> None:
    model = nn.Linear(300, 300)
    before = model.weight.detach().clone()
    gate = threading.Event()
    with Checkpointer(tmp_path, model=model) as checkpointer:
        checkpointer.step()
        with at_each_operation(lambda n, name, operation, args, kwargs: (gate.wait(), operation(*args, **kwargs))[1]):
            checkpointer.save()
            with torch.no_grad():
                model.weight.zero_()
            gate.set()
            checkpointer.wait()
    again = nn.Linear(300, 300)
    load(tmp_path, model=again)
    assert torch.equal(again.weight, before)


@pytest.mark.parametrize("ask", ["step", "save", "wait", "close", "load"])
def test_what_an_asynchronous_save_fails_with_is_raised_by_the_next_call(tmp_path: Path, ask: str) -> None:
    checkpointer = Checkpointer(tmp_path, model=nn.Linear(2, 2))
    with at_each_operation(fail_at(4)):
        checkpointer.save()
        end_save()
    with pytest.raises(OSError, match="Input/output error"):
        getattr(checkpointer, ask)()
    if ask != "close":
        checkpointer.save()
        checkpointer.close()
        assert names_in(tmp_path) == [f"checkpoint_{checkpointer.num_steps}", "latest"]


class OwnError(Exception):
    """Of a user: it cannot be pickled as it is."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")
        self.lock = threading.Lock()


@SEVERAL
@pytest.mark.parametrize("failing", [0, 1])
def test_what_a_state_dict_raises_on_one_rank_keeps_its_type(tmp_path: Path, mode: Mode, failing: int) -> None:
    class Failing(Anything):
        def state_dict(self) -> Any:
            if current_world().rank == failing:
                raise OwnError(1, 2)
            return {}

    def body() -> str:
        with pytest.raises(OwnError) as caught:
            save(tmp_path / "one", thing=Failing())
        return str(caught.value)

    assert mode.run(body) == ["1 and 2"] * mode.ranks


@pytest.mark.parametrize(
    ("mode", "others"),
    [  # of processes it takes five seconds until one that has left is named
        (THREADS_3, "leave"),
        *((mode, others) for mode in fitting(THREADS_3, PROCESSES_2) for others in ("meet", "save another step")),
    ],
    ids=str,
)
def test_saving_on_one_rank_only_is_an_error_that_names_the_others(tmp_path: Path, mode: Mode, others: str) -> None:
    def body() -> None:
        rank = current_world().rank
        if rank == 0 or others == "save another step":
            save(tmp_path / "one", step=rank, model=nn.Linear(2, 2))
        elif others == "meet":
            current_world().comm.barrier()

    words = r"ranks? [12].* ha(s|ve) left" if others == "leave" else "save_state at step 0"
    with pytest.raises((BrokenWorldError, CollectiveMismatchError), match=words):
        mode.run(body)
    assert not (tmp_path / "one").exists()


@pytest.mark.any_family
@pytest.mark.parametrize("mode", fitting(SOLO, THREADS_3), ids=str)
def test_the_best_is_kept(root: Any, mode: Mode) -> None:
    def body() -> list[bool]:
        kept = Anything()
        found = []
        with Checkpointer(below(root, "all"), kept=kept) as checkpointer:
            for score in (1.0, 0.5, torch.tensor(2.0), float("nan"), numpy.float32(2.0)):
                kept.state = float(score)
                found.append(checkpointer.save(below(root, "best"), score=score) is not None)
            assert checkpointer.load(below(root, "best")).score == 2.0
            with pytest.raises(TypeError, match="list"):
                checkpointer.save(below(root, "best"), score=[1])  # type: ignore[arg-type]
        return found

    assert mode.run(body) == [[True, False, True, False, False]] * mode.ranks
    assert names_in(root) == ["best"]


def test_what_is_no_checkpoint_stays_and_does_not_count(root: Any) -> None:
    folder_at(below(root, "thesis")).write("chapter.tex", b"years of work")
    with pytest.raises(FileExistsError, match=r"is no checkpoint.*thesis/best"):
        save(below(root, "thesis"), model=nn.Linear(2, 2))
    folder_at(below(root, "checkpoint_5/0123456789ab")).write("precious.txt", b"a commit's")
    folder_at(below(root, "checkpoint_1")).write("model.safetensors", b"of another framework")
    folder_at(below(root, "checkpoint_9/save-0123456789ab")).write("state.pt", b"a save that was killed")
    checkpointer = Checkpointer(root, keep=2, is_async=False, model=nn.Linear(2, 2))
    for checkpointer.num_steps in (2, 3, 4):
        checkpointer.save()
    assert names_in(root) == ["checkpoint_1", "checkpoint_3", "checkpoint_4", "checkpoint_5", "latest", "thesis"]
    checkpointer.num_steps = 1
    with pytest.raises(FileExistsError, match="checkpoint_1 is no checkpoint"):
        checkpointer.save()
    with pytest.raises(FileExistsError, match=r"is no checkpoint.*/best"):
        save(root, model=nn.Linear(2, 2))


def test_a_link_stays_a_link_and_what_it_points_to_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "best").symlink_to(tmp_path / "disk" / "best")
    for number in (1, 2):
        save(tmp_path / "best", step=number, model=nn.Linear(2, 2))
    assert (tmp_path / "best").is_symlink()
    assert load(tmp_path / "best", model=nn.Linear(2, 2)).step == 2
    assert names_in(tmp_path) == ["best", "disk"]
    (tmp_path / "checkpoint_0").symlink_to(tmp_path / "disk" / "best")
    with Checkpointer(tmp_path, keep=1, every=1, model=nn.Linear(2, 2)) as checkpointer:
        checkpointer.step()
    assert names_in(tmp_path) == ["best", "checkpoint_1", "disk", "latest"]
    assert load(tmp_path / "best", model=nn.Linear(2, 2)).step == 2


@pytest.mark.parametrize("is_async", [False, True])
def test_states_keep_types_layout_and_values(tmp_path: Path, is_async: bool) -> None:
    tensors = {
        "empty": torch.zeros(0, 3),
        "flags": torch.tensor([True, False]),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "transposed": torch.arange(6).view(2, 3).T,
        "channels last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "part": torch.arange(1000)[3:5],
        "sparse": torch.eye(3).to_sparse(),
    }
    plain = [(1, 2), {3}, collections.OrderedDict(a=1), collections.Counter("aab"), {(1, "b"): None}]
    plain += [True, 1, 2.5, 1j, b"bytes", float("inf")]
    state = {"tensors": tensors, "plain": plain, "numpy": numpy.float64(0.5)}
    with Checkpointer(tmp_path, is_async=is_async, thing=Anything(state)) as checkpointer:
        checkpointer.save()
    found = Anything()
    load(tmp_path, thing=found)
    for name, each in found.state["tensors"].items():
        torch.testing.assert_close(each, tensors[name], check_stride=True, rtol=0, atol=0)
        assert each.is_sparse or each.untyped_storage().nbytes() < 1000
    assert [(type(each), each) for each in found.state["plain"]] == [(type(each), each) for each in plain]
    assert found.state["numpy"] == 0.5
    (file,) = tmp_path.rglob("state.pt")
    assert file.stat().st_size < 30_000


@pytest.mark.parametrize("mode", fitting(SOLO, PROCESSES_2), ids=str)
def test_a_line_of_rank_zero_says_where_a_run_continues(tmp_path: Path, mode: Mode, capfd) -> None:
    def body() -> None:
        accelerator = Accelerator(project_dir=tmp_path)
        model = nn.Linear(1, 1)
        loader = DataLoader(TensorDataset(torch.ones(8, 1)), batch_size=2)
        model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1), loader)
        checkpointer = Checkpointer(tmp_path / "own", is_async=False, model=model, loader=loader)
        accelerator.load_state(must_exist=False)
        for (inputs,) in loader:
            accelerator.backward(model(inputs).mean())
            optimizer.step()
            checkpointer.step()
        for each in (accelerator.save_state, accelerator.load_state, checkpointer.save, checkpointer.load):
            each()

    mode.run(body)
    steps, shown = 4 // mode.ranks, capfd.readouterr()
    found = [line.removeprefix("[rank 0] ") for line in shown.err.splitlines() if "resumed" in line]
    assert found == [
        f"resumed from {tmp_path}/checkpoints/checkpoint_0: epoch 1, step {steps}",
        f"resumed from {tmp_path}/own/checkpoint_{steps}: epoch 1, step {steps}",
    ]
    assert shown.out == ""


def test_another_model_is_named_by_its_first_differences(tmp_path: Path) -> None:
    saved = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    save(tmp_path / "one", model=saved, optimizer=torch.optim.SGD(saved.parameters()))
    other = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4))
    before = other[0].weight.detach().clone()
    with pytest.raises(CheckpointMismatchError) as caught:
        load(tmp_path / "one", model=other)
    assert "7 names differ, 0.weight (saved: shape [3, 2], here: shape [4, 2])" in str(caught.value)
    assert "1.running_mean (saved: missing, here: shape [4])" in str(caught.value)
    assert torch.equal(other[0].weight, before)
    with pytest.raises(CheckpointMismatchError, match=r"has no network: it holds model, optimizer"):
        load(tmp_path / "one", network=saved)
    with pytest.raises(CheckpointMismatchError, match=r"model is an? optimizer"):
        load(tmp_path / "one", model=torch.optim.SGD(saved.parameters()))
    with pytest.raises(CheckpointMismatchError, match=r"groups of \[4\] parameters.*groups of \[2\]"):
        load(tmp_path / "one", model=saved, optimizer=torch.optim.SGD(saved[0].parameters()))


def rewritten(path: Path, monkeypatch: pytest.MonkeyPatch, version: int, files: dict[str, list[int]]) -> None:
    """Replace a manifest by one of that version that names those files."""
    manifest = Manifest(1, None, 1, {}, 0.0, {}, files)
    with monkeypatch.context() as patched:
        patched.setattr("unisono.checkpoint.directory.VERSION", version)
        (path / "manifest.json").write_bytes(manifest.to_bytes())


def test_a_newer_manifest_or_a_forged_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "one", thing=Anything(1))
    rewritten(tmp_path / "one", monkeypatch, 3, {})
    with pytest.raises(CheckpointVersionError, match=r"version 3 of the format.*reads up to version 2"):
        load(tmp_path / "one", thing=Anything())
    for name in ("../elsewhere", "/etc/passwd", "shards/../../x"):
        rewritten(tmp_path / "one", monkeypatch, 2, {name: [1, 1]})
        with pytest.raises(DamagedCheckpointError, match="which is not in the checkpoint"):
            load(tmp_path / "one", thing=Anything())


@pytest.mark.parametrize(
    "change",
    [
        {"files": [1, 2]},
        {"files": {"x": "x"}},
        {"version": "9"},
        {"version": None},
        {"world_size": "many"},
        {"step": None},
        {"created": 1e300},
        {"objects": {"a\x1b[31m": ["model", "x"]}},
        {"objects": {"a": ["model"]}},
    ],
    ids=str,
)
def test_a_manifest_with_the_right_checksum_and_other_values_is_damaged(tmp_path: Path, change: dict[str, Any]) -> None:
    save(tmp_path / "one", thing=Anything(1))
    known = {**json.loads((tmp_path / "one" / "manifest.json").read_bytes()), **change}
    del known["crc"]
    known = {**known, "crc": zlib.crc32(json.dumps(known, sort_keys=True).encode())}
    (tmp_path / "one" / "manifest.json").write_text(json.dumps(known))
    with pytest.raises(DamagedCheckpointError, match=r"manifest\.json is not what was written \([A-Z]\w+Error: "):
        load(tmp_path / "one", thing=Anything())


def blow_up(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 42)  # sparse: to read it would take an hour, or all memory


@pytest.mark.parametrize("name", ["manifest.json", "state.pt"])
@pytest.mark.parametrize(
    "make", [os.mkfifo, lambda path: os.symlink("/dev/zero", path), blow_up], ids=["pipe", "device", "blown up"]
)
def test_what_is_no_file_of_its_size_is_not_read(tmp_path: Path, name: str, make: Any, capsys: Any) -> None:
    save(tmp_path / "one", thing=Anything(1))
    (path,) = (tmp_path / "one").rglob(name)
    path.unlink()
    make(path)
    with pytest.raises(DamagedCheckpointError):
        load(tmp_path / "one", thing=Anything())
    assert main(["checkpoint", "show", str(tmp_path / "one")]) == 1
    assert "damaged" in capsys.readouterr().out


@pytest.mark.parametrize("data", [b"[" * 200_000, b"[1]", b'"text"'], ids=["nested", "list", "text"])
def test_a_manifest_that_is_none_is_damaged(tmp_path: Path, data: bytes) -> None:
    save(tmp_path / "one", thing=Anything(1))
    (tmp_path / "one" / "manifest.json").write_bytes(data)
    with pytest.raises(DamagedCheckpointError, match="is not what was written"):
        load(tmp_path / "one", thing=Anything())


def test_what_a_terminal_would_obey_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    save(tmp_path / "bad", model=nn.Linear(2, 2))
    rewritten(tmp_path / "bad", monkeypatch, 2, {"\x1b]0;title\x07": [1, 1]})
    for command in (["show"], ["export", str(tmp_path / "out")]):
        assert main(["checkpoint", command[0], str(tmp_path / "bad"), *command[1:]]) == 1
        shown = "".join(capsys.readouterr())
        assert r"\x1b]0;title\x07 cannot be read" in shown
        assert "\x1b" not in shown


GOOD: dict[str, Any] = {"states": {}, "held": None, "kinds": {}, "ranks": [], "is_divided": False}


@pytest.mark.parametrize(
    "content",
    [
        {"x": 1},
        [1],
        {**GOOD, "kinds": [1]},
        {**GOOD, "kinds": {"model": 1}},
        {**GOOD, "states": 1},
        {**GOOD, "ranks": 1},
    ],
    ids=str,
)
def test_a_state_without_what_it_should_hold_is_damaged(
    tmp_path: Path, content: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "bad", model=nn.Linear(2, 2))
    (file,) = (tmp_path / "bad").rglob("state.pt")
    torch.save(content, file)
    rewritten(tmp_path / "bad", monkeypatch, 2, {f"{file.parent.name}/state.pt": list(checksum_of(file))})
    with pytest.raises(DamagedCheckpointError, match=r"has a state\.pt that holds something else"):
        load(tmp_path / "bad", model=nn.Linear(2, 2))


class Evil:
    """What an unpickler that trusts its input would run."""

    def __init__(self, owned: Path) -> None:
        self.owned = owned

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.owned),)


def _load_state(path: Path) -> None:
    accelerator = Accelerator()
    accelerator.register_for_checkpointing(nn.Linear(2, 2))
    accelerator.load_state(path)


def _call(action: str, path: Path, *others: str) -> None:
    if main(["checkpoint", action, str(path), *others]):
        raise DamagedCheckpointError("data that is not plain, as it has printed")


READERS: dict[str, Callable[[Path], Any]] = {
    "load": lambda path: load(path, model=nn.Linear(2, 2)),
    "load_state": _load_state,
    "export": lambda path: export(folder_at(path), path.parent / "out.pt"),
    "the command export": lambda path: _call("export", path, str(path.parent / "out.pt")),
    "the command show": lambda path: _call("show", path),
}


@pytest.mark.parametrize(
    ("reader", "form"),
    [("load", "pickle"), ("load", "torch"), *((name, "torch, in a tensor's place") for name in READERS)],
)
def test_a_file_that_would_run_code_runs_none(
    reader: str, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = READERS[reader]
    save(tmp_path / "bad", model=nn.Linear(2, 2))
    (file,) = (tmp_path / "bad").rglob("state.pt")
    evil: Any = Evil(owned := tmp_path / "owned")
    if "place" in form:
        saved = torch.load(file, weights_only=True)
        saved["states"]["model"]["weight"] = evil
        evil = saved
    file.write_bytes(pickle.dumps(evil)) if form == "pickle" else torch.save(evil, file)
    rewritten(tmp_path / "bad", monkeypatch, 2, {f"{file.parent.name}/state.pt": list(checksum_of(file))})
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    if "show" in reader:  # it opens none of the files
        read(tmp_path / "bad")
    else:
        with pytest.raises(DamagedCheckpointError, match="data that is not plain"):
            read(tmp_path / "bad")
    assert not (tmp_path / "out.pt").exists()
    assert not owned.exists()
    (pickle.load(file.open("rb")) if form == "pickle" else torch.load(file, weights_only=False))
    assert owned.exists(), "it would have run"


def test_objects_without_a_plain_state_and_bad_counts_are_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"thing.state_dict\(\)\['a'\]\[1\]\[2\] is a numpy\.ndarray"):
        save(tmp_path / "one", thing=Anything({"a": [1, {2: numpy.ones(3)}]}))
    assert not (tmp_path / "one").exists()
    for wrong in (3, "text", object()):
        with pytest.raises(TypeError, match=r"thing is of type .* which has no state_dict"):
            Checkpointer(tmp_path, thing=wrong)
        with pytest.raises(TypeError, match="object 0 is of type"):
            Accelerator().register_for_checkpointing(wrong)
    for name, count in (("keep", 0), ("every", -1), ("keep", True), ("every", 1.5)):
        with pytest.raises((TypeError, ValueError), match=f"{name}={count}"):
            Checkpointer(tmp_path, **{name: count})  # type: ignore[arg-type]


def draw() -> list[float]:
    device = current_world().device
    own = [torch.rand(()).item(), torch.rand((), device=device).item()]
    return own if current_world().rank else [*own, random.random(), numpy.random.random()]


@pytest.mark.any_family
@pytest.mark.parametrize("mode", fitting(SOLO, THREADS_3, PROCESSES_2), ids=str)
def test_each_ranks_generators_go_on_where_they_stood(tmp_path: Path, mode: Mode) -> None:
    def body() -> tuple[Any, Any]:
        extra = torch.Generator().manual_seed(current_world().rank)
        save(tmp_path / "one", extra=extra)
        first = [*draw(), torch.rand((), generator=extra, device=HOST).item()]
        load(tmp_path / "one", extra=extra)
        return first, [*draw(), torch.rand((), generator=extra, device=HOST).item()]

    found = mode.run(body)
    for first, second in found:
        assert first == second
    assert len({tuple(first) for first, _ in found}) == mode.ranks


def test_generators_that_cannot_mean_the_same_are_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    THREADS_3.run(lambda: save(tmp_path / "one", thing=Anything(1)))
    with caplog.at_level(logging.WARNING):
        load(tmp_path / "one", thing=Anything())
    assert "saved by 3 ranks on cpu, loaded by 1 on cpu: random numbers (dropout) will differ" in caplog.text
    save(tmp_path / "two", thing=Anything(1))

    def drawn() -> float:
        load(tmp_path / "two", thing=Anything())
        return torch.rand(()).item()

    first, second = THREADS_2.run(drawn), THREADS_2.run(drawn)
    assert first == second, "the new seeds are the same each time"
    assert len(set(first)) == 2


def test_on_threads_each_replica_saves_in_its_loop(tmp_path: Path) -> None:
    data = DataLoader(TensorDataset(torch.arange(24.0)[:, None]), 2, shuffle=True)
    replicas = DataParallel(nn.Linear(1, 1), ["cpu:0", "cpu:1"])
    loader = ParallelLoader(data, replicas.devices, seed=0)

    def first(model: nn.Module, batches: Any, device: Any, context: Any) -> list[float]:
        seen = []
        for number, (values,) in enumerate(batches):
            seen += values.flatten().tolist()
            if number == 2:
                save(tmp_path / "one", model=model, loader=batches)
                break
        return seen

    seen = [each for found in replicas(first, loader) for each in found]
    again = ParallelLoader(data, replicas.devices, seed=0)
    load(tmp_path / "one", loader=again)
    rest = replicas(lambda model, batches, *_: [values.flatten().tolist() for (values,) in batches], again)
    seen += [each for found in rest for values in found for each in values]
    assert sorted(seen) == list(range(24))


def test_a_reduced_gradient_that_was_not_stepped_on_is_refused(tmp_path: Path) -> None:
    accelerator = Accelerator(project_dir=tmp_path)
    model = nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    accelerator.backward(model(torch.ones(3, 2)).mean())
    with pytest.raises(CheckpointError, match=r"between the last backward\(\) of a step and optimizer.step\(\)"):
        accelerator.save_state()
    optimizer.step()
    assert accelerator.save_state() == tmp_path / "checkpoints" / "checkpoint_0"


def test_loading_amid_an_accumulation_drops_what_it_has_so_far(tmp_path: Path) -> None:
    accelerator = Accelerator(project_dir=tmp_path, gradient_accumulation_steps=2)
    model = nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    accelerator.save_state()

    def step() -> torch.Tensor:
        for number in (1, 2):
            with accelerator.accumulate():
                accelerator.backward(model(torch.full((3, 2), float(number))).mean())
                optimizer.step()
        return model.weight.detach().clone()

    expected = step()
    accelerator.load_state()
    with accelerator.accumulate():
        accelerator.backward(model(torch.full((3, 2), 100.0)).mean())
        optimizer.step()
    accelerator.load_state()
    assert torch.equal(step(), expected)


@pytest.mark.parametrize("other", [torch.optim.SGD, torch.optim.Adam])
def test_the_state_of_an_optimizer_of_another_class_is_refused(other: Any, tmp_path: Path) -> None:
    model, accelerator = torch.nn.Linear(2, 1), Accelerator()
    model(torch.ones(1, 2)).sum().backward()
    saved, made = torch.optim.AdamW(model.parameters(), lr=0.5), other(model.parameters(), lr=0.1)
    saved.step()
    save(tmp_path / "one", model=model, optimizer=saved)
    with pytest.raises(CheckpointMismatchError, match=rf"the state of AdamW, and this is {other.__name__}; make AdamW"):
        load(tmp_path / "one", model=model, optimizer=made)
    assert made.param_groups[0]["lr"] == 0.1
    _, prepared = accelerator.prepare(model, made)
    with pytest.raises(CheckpointMismatchError, match="to an optimizer of another class than"):
        accelerator.load_state_dict(prepared, saved.state_dict())
