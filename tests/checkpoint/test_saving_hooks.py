"""Hooks before a save and a load, and a model in a file of its own: the same on one rank, threads and processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from file_faults import PowerCuts, at_each_operation, write_tree
from modes import PROCESSES_2, SOLO, THREADS_2, Mode, fitting
from resumable import filled
from torch import nn

from unisono import Accelerator
from unisono.errors import DamagedCheckpointError

ALL = pytest.mark.parametrize("mode", fitting(SOLO, THREADS_2, PROCESSES_2), ids=str)


def files_of(checkpoint: Path) -> Path:
    (directory,) = [each for each in checkpoint.iterdir() if each.is_dir()]
    return directory


@ALL
@pytest.mark.parametrize("is_async", [False, True])
def test_a_hook_saves_a_model_its_own_way_and_another_loads_it(mode: Mode, is_async: bool, tmp_path: Path) -> None:
    def body() -> list[Any]:
        accelerator = Accelerator()
        own, usual = accelerator.prepare(filled(1.0), filled(2.0))
        met: list[Any] = []

        def save(models: list[nn.Module], weights: list[dict[str, Any]], output_dir: str) -> None:
            met.append([len(models), [len(each) for each in weights]])
            if accelerator.is_main_process:
                assert models[0] is own
                folder = Path(output_dir) / "own"
                folder.mkdir()
                torch.save(weights.pop(0), folder / "model.pt")

        def load(models: list[nn.Module], input_dir: str) -> None:
            model = models.pop(0)
            model.load_state_dict(torch.load(Path(input_dir) / "own" / "model.pt"))
            nn.init.constant_(model.bias, 5.0)

        handle = accelerator.register_save_state_pre_hook(save)
        accelerator.register_load_state_pre_hook(load)
        for _ in range(2):  # the second replaces the first
            accelerator.save_state(tmp_path / "one", is_async=is_async)
        handle.remove()
        accelerator.end_training()
        for each in (*own.parameters(), *usual.parameters()):
            nn.init.zeros_(each)
        accelerator.load_state(tmp_path / "one")
        return [met, own.weight[0].tolist(), own.bias.tolist(), usual.weight[0].tolist()]

    found = mode.run(body)
    for met, *values in found:
        assert met == [[2, [2, 2]]] * 2
        assert values == [[1.0, 1.0], [5.0], [2.0, 2.0]]
    assert [each.name for each in tmp_path.iterdir()] == ["one"], "nothing is left beside the checkpoint"
    assert sorted(each.name for each in files_of(tmp_path / "one").iterdir()) == ["own", "state.pt"]


def test_files_from_hooks_are_verified_and_dropped_with_their_checkpoint(
    tmp_path: Path,
) -> None:
    accelerator, own = Accelerator(project_dir=tmp_path), filled(1.0)
    accelerator.prepare(own)
    accelerator.register_save_state_pre_hook(lambda models, weights, there: (Path(there) / "x").write_text("text"))
    for number in range(2):
        assert accelerator.save_state() == tmp_path / "checkpoints" / f"checkpoint_{number}"
    for number in range(2):
        (files_of(tmp_path / "checkpoints" / f"checkpoint_{number}") / "x").write_text("tixt")
    with pytest.raises(DamagedCheckpointError, match=r"0.*x has other contents"):
        accelerator.load_state()
    for score in (1.0, 0.5):
        accelerator.save_state(tmp_path / "best", score=score)
    assert len(list((tmp_path / "best").iterdir())) == 2, "the manifest, and the files of the better one"


def test_files_of_hooks_are_on_disk_when_the_save_returns(tmp_path: Path) -> None:
    accelerator = Accelerator()
    model = accelerator.prepare(filled(1.0))

    def write(models: list[nn.Module], weights: list[dict[str, Any]], output_dir: str) -> None:
        (Path(output_dir) / "folder").mkdir()
        (Path(output_dir) / "folder" / "x").write_text("text")

    accelerator.register_save_state_pre_hook(write)
    (tmp_path / "root").mkdir()
    cuts = PowerCuts(tmp_path / "root")
    with at_each_operation(cuts.act):
        accelerator.save_state(tmp_path / "root" / "one")
    write_tree(tmp_path / "cut", cuts.states[-1])
    accelerator.load_state(tmp_path / "cut" / "one")
    assert model.weight.sum() == 2


def test_what_a_hook_may_not_do_is_refused_and_nothing_is_saved(tmp_path: Path) -> None:
    accelerator = Accelerator()
    model = accelerator.prepare(filled(1.0))

    def changes(models: list[nn.Module], weights: list[dict[str, Any]], output_dir: str) -> None:
        weights[0]["weight"] = torch.zeros(1, 2)

    def takes_a_name(models: list[nn.Module], weights: list[dict[str, Any]], output_dir: str) -> None:
        (Path(output_dir) / "state.pt").write_text("mine")

    for hook, error, words in [
        (changes, ValueError, "a hook has changed the state of model 0"),
        (takes_a_name, FileExistsError, r"File exists: .*state\.pt"),
    ]:
        handle = accelerator.register_save_state_pre_hook(hook)
        with pytest.raises(error, match=words):
            accelerator.save_state(tmp_path / "one")
        handle.remove()
    assert not list(tmp_path.iterdir())
    assert model.weight.sum() == 2


def test_hooks_may_keep_files_in_a_store() -> None:
    fsspec = pytest.importorskip("fsspec")
    accelerator, own, found = Accelerator(), filled(1.0), []
    accelerator.prepare(own)
    accelerator.register_save_state_pre_hook(lambda models, weights, there: (Path(there) / "x").write_text("text"))
    accelerator.save_state("memory://hooks/one")

    def load(models: list[nn.Module], input_dir: str) -> None:
        with fsspec.open(f"{input_dir}/x", "rt") as file:
            found.append(file.read())

    accelerator.register_load_state_pre_hook(load)
    accelerator.load_state("memory://hooks/one")
    assert found == ["text"]


@ALL
@pytest.mark.parametrize("is_safe", [True, False])
def test_a_model_is_saved_for_use_elsewhere_or_an_error_on_all_ranks(mode: Mode, is_safe: bool, tmp_path: Path) -> None:
    name = "model.safetensors" if is_safe else "pytorch_model.bin"
    load = pytest.importorskip("safetensors.torch").load_file if is_safe else torch.load

    (tmp_path / "file").write_text("no folder")

    def body() -> bool:
        accelerator = Accelerator()
        model = accelerator.prepare(filled(3.0))
        with pytest.raises(FileExistsError):  # on all ranks
            accelerator.save_model(model, tmp_path / "file", safe_serialization=is_safe)
        accelerator.save_model(model, tmp_path / "new" / "folder", safe_serialization=is_safe)
        return (tmp_path / "new" / "folder" / name).exists()

    assert mode.run(body) == [True] * mode.ranks
    path = tmp_path / "new" / "folder" / name
    plain = nn.Linear(2, 1)
    plain.load_state_dict(load(path))
    assert plain.weight[0].tolist() == [3.0, 3.0]
    assert [each.name for each in path.parent.iterdir()] == [name]
