"""A checkpoint's model as one file for plain torch, and the command that writes it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from modes import PROCESSES_2
from torch import nn

from unisono import Accelerator
from unisono.checkpoint import saver
from unisono.checkpoint.checkpointer import save
from unisono.cli.main import main


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.last.weight = self.first.weight


@pytest.mark.parametrize("name", ["torch", "safetensors"])
def test_the_file_is_the_models_state_dict(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = Tied()
    save(tmp_path / "one", model=model, optimizer=torch.optim.SGD(model.parameters()))
    out = tmp_path / "out"
    assert main(["checkpoint", "export", str(tmp_path / "one"), str(out), "--format", name]) == 0
    assert capsys.readouterr().out == f"{out}: model of {tmp_path / 'one'}\n"
    state = torch.load(out) if name == "torch" else pytest.importorskip("safetensors.torch").load_file(out)
    assert state.keys() == model.state_dict().keys()
    Tied().load_state_dict(state)
    assert torch.equal(state["last.weight"], model.first.weight)
    assert [each.name for each in tmp_path.iterdir() if each.name.startswith(".")] == []


@pytest.mark.parametrize("is_sharded", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_what_fsdp_has_saved_is_exported_whole(tmp_path: Path, is_sharded: bool) -> None:
    def body() -> None:
        torch.manual_seed(0)
        accelerator = Accelerator(strategy="fsdp", project_dir=tmp_path)
        model = accelerator.prepare(nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3)))
        saver.SMALL = -1 if is_sharded else saver.SMALL
        accelerator.register_for_checkpointing(torch.Generator())
        accelerator.save_state()
        assert model is not None

    PROCESSES_2.run(body)
    assert bool(list((tmp_path / "checkpoints").rglob("shards"))) == is_sharded
    assert main(["checkpoint", "export", str(tmp_path / "checkpoints"), str(tmp_path / "model.pt")]) == 0
    torch.manual_seed(0)
    expected = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3)).state_dict()
    torch.testing.assert_close(torch.load(tmp_path / "model.pt"), dict(expected), rtol=0, atol=0)


def test_what_cannot_be_exported_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(*arguments: str) -> str:
        assert main(["checkpoint", "export", str(tmp_path / "one"), str(tmp_path / "out"), *arguments]) == 1
        assert not (tmp_path / "out").exists()
        return capsys.readouterr().err

    assert "there is no checkpoint at" in refused()
    model = nn.Linear(2, 2)
    save(tmp_path / "one", model=model, second=nn.Linear(1, 1), optimizer=torch.optim.SGD(model.parameters()))
    assert "holds 2 models; name the object that you mean: model, second, optimizer" in refused()
    assert "has no 'third' with one state; name the object that you mean: model," in refused("--object", "third")
    pytest.importorskip("safetensors")
    assert "safetensors files hold tensors only" in refused("--object", "optimizer", "--format", "safetensors")


def test_show_lists_them_and_finds_the_damaged_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in (1, 2):
        save(tmp_path / f"checkpoint_{number}", step=number, model=nn.Linear(2, 2))
    assert main(["checkpoint", "show", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "checkpoint_1  step 1, by 1 ranks" in shown
    assert "model            model (Linear)" in shown
    (file,) = (tmp_path / "checkpoint_2").rglob("state.pt")
    data = bytearray(file.read_bytes())
    data[random.Random(0).randrange(len(data))] ^= 1
    file.write_bytes(data)
    assert main(["checkpoint", "show", str(tmp_path)]) == 1
    assert "damaged: " in capsys.readouterr().out


def test_show_says_what_is_no_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "show", str(tmp_path / "nowhere")]) == 1
    assert f"there is no checkpoint at {tmp_path / 'nowhere'}" in capsys.readouterr().err
    (tmp_path / "checkpoints" / "checkpoint_1" / "save-0123456789ab").mkdir(parents=True)
    assert main(["checkpoint", "show", str(tmp_path / "checkpoints")]) == 0
    assert "checkpoint_1  unfinished: its save was interrupted" in capsys.readouterr().out


def test_a_project_dir_stands_for_its_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    accelerator, own = Accelerator(project_dir=tmp_path), nn.Linear(2, 2)
    model = accelerator.prepare(own)
    saved = accelerator.save_state()
    assert main(["checkpoint", "show", str(tmp_path)]) == 0
    assert f"{saved}  step 0, by 1 ranks" in capsys.readouterr().out
    assert main(["checkpoint", "export", str(tmp_path), str(tmp_path / "model.pt")]) == 0
    assert f"model_0 of {saved}" in capsys.readouterr().out
    expected = {name: each.clone() for name, each in model.state_dict().items()}
    torch.testing.assert_close(torch.load(tmp_path / "model.pt"), expected, rtol=0, atol=0)
    nn.init.zeros_(own.weight)
    assert accelerator.load_state(tmp_path).path == saved
    torch.testing.assert_close(dict(own.state_dict()), expected, rtol=0, atol=0)
    save(tmp_path / "checkpoint_7", step=7, model=own)  # what lies in the directory itself comes first
    assert main(["checkpoint", "show", str(tmp_path)]) == 0
    assert "checkpoint_7  step 7" in capsys.readouterr().out
