"""The scripts in PyTorch/XLA's style train as plain torch on one device does, on any number of devices of any kind."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import warm_scripts
from packages import load_script
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / "examples" / "torch_xla_style"
PAGE = (ROOT / "docs" / "migrating_from_torch_xla.md").read_text()
SINGLE, THREADS, SPAWN, NOTEBOOK, LAUNCH = SCRIPTS = (
    "train_mnist_single.py",
    "train_mnist_threads.py",
    "train_mnist_spawn.py",
    "mnist_notebook.py",
    "train_mnist_launch.py",
)
COUNTED = (THREADS, SPAWN, NOTEBOOK)  # those that are told on how many

EPOCHS = 2
NUM_TEST = 384
# Float32, printed with six decimals: two epochs amplify what the order of additions makes to some 1e-6. A batch that
# one rank has not seen, or a mean over the wrong number, would show as 1e-2.
TOLERANCE: dict[str, Any] = {"rel": 0, "abs": 2e-5}

needs_torch_xla = pytest.mark.skipif(importlib.util.find_spec("torch_xla") is None, reason="torch_xla is not there")


MNIST = load_script(FOLDER / "mnist.py")  # here, since what it imports sets environment variables


@cache
def plain() -> list[tuple[float, float]]:
    """Plain torch on the CPU, with batches of 64: the mean loss of each epoch, and the accuracy behind it."""
    flags = argparse.Namespace(batch_size=64, fake_data=False)
    with torch.random.fork_rng(devices=[]):
        model = MNIST.model(flags)
        train_loader, test_loader = MNIST.loaders(flags, 1, 0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        return [epoch_of(epoch, model, optimizer, train_loader, test_loader) for epoch in range(EPOCHS)]


def epoch_of(epoch: int, model: Any, optimizer: Any, train_loader: Any, test_loader: Any) -> tuple[float, float]:
    train_loader.sampler.set_epoch(epoch)
    losses = []
    for x, y in train_loader:
        optimizer.zero_grad()
        loss = F.nll_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    right = sum(int((model(x).argmax(1) == y).sum()) for x, y in test_loader)
    return sum(losses) / len(losses), right / NUM_TEST


def run(script: str, ranks: int, family: str, *arguments: str, folder: Path = FOLDER) -> str:
    """What the script prints, on that number of devices."""
    options = [f"--batch_size={64 // ranks}", f"--num_epochs={EPOCHS}"]
    options += [f"--num_cores={ranks}"] if script in COUNTED else []
    environ = os.environ | {"UNISONO_BACKEND": family, "CPU_NUM_DEVICES": str(ranks), "PJRT_DEVICE": "CPU"}
    is_xla = family == "xla"  # whose runtime has threads at the interpreter's end
    code, output, errors = warm_scripts.complete(
        folder / script, *options, *arguments, environ=environ, takes_apart=is_xla
    )
    assert code == 0, errors
    return output


def epochs_in(output: str) -> list[tuple[float, float]]:
    """The losses and accuracies, of which each epoch tells once."""
    lines = re.findall(r"Epoch (\d+) loss (\S+) accuracy (\S+)%", output)
    assert [int(epoch) for epoch, _, _ in lines] == list(range(EPOCHS))
    return [(float(loss), float(accuracy) / 100) for _, loss, accuracy in lines]


def assert_as_plain_torch(output: str) -> None:
    found, expected = epochs_in(output), plain()
    assert [loss for loss, _ in found] == pytest.approx([loss for loss, _ in expected], **TOLERANCE)
    for (_, accuracy), (_, right) in zip(found, expected, strict=True):
        assert accuracy == pytest.approx(right, abs=1.1 / NUM_TEST)


def test_scripts_differ_from_torch_xlas_in_import_lines_only() -> None:
    for script in SCRIPTS:
        lines = (FOLDER / script).read_text().splitlines()
        named = [line for line in lines if "unisono" in line and "UNISONO_BACKEND" not in line]
        assert named
        assert all(re.fullmatch(r"import unisono\.compat\.torch_xla[.\w]* as \w+", line) for line in named)


@pytest.mark.slow
def test_on_one_device_a_script_trains_as_plain_torch_does() -> None:
    assert_as_plain_torch(run(SINGLE, 1, "cpu"))


@pytest.mark.parametrize(
    "script", [THREADS, *(pytest.param(each, marks=pytest.mark.slow) for each in (SPAWN, NOTEBOOK, LAUNCH))]
)
def test_two_devices_with_half_batches_have_the_losses_of_one(script: str) -> None:
    assert_as_plain_torch(run(script, 2, "cpu"))


@pytest.mark.slow
def test_the_native_run_trains_like_plain_torch_and_learns_fake_data_fast() -> None:
    assert_as_plain_torch(run(THREADS, 1, "cpu", "--num_cores=0"))
    assert epochs_in(run(SINGLE, 1, "cpu", "--fake_data"))[-1] == (pytest.approx(0, abs=1e-3), 1)


@pytest.mark.slow
@pytest.mark.xla
@needs_torch_xla
@pytest.mark.parametrize("script", [THREADS, SPAWN])
def test_on_xla_devices_a_script_has_the_losses_of_the_cpu(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XLA_FLAGS", raising=False)  # compiled as users compile: with optimization
    assert_as_plain_torch(run(script, 2, "xla"))


@pytest.mark.slow
@pytest.mark.xla
@needs_torch_xla
@pytest.mark.parametrize("script", [SINGLE, LAUNCH])
def test_with_the_original_import_lines_a_script_has_the_same_losses(script: str, tmp_path: Path) -> None:
    for path in FOLDER.glob("*.py"):
        (tmp_path / path.name).write_text(path.read_text().replace("unisono.compat.torch_xla", "torch_xla"))
    assert_as_plain_torch(run(script, 1, "xla", folder=tmp_path))


def test_the_migration_page_names_modules_and_names_that_exist() -> None:
    rows = re.findall(r"^\| `(torch_xla[.\w]*)` \| `\w+` \| `(unisono\.[.\w]+)` \| (.*) \|$", PAGE, re.MULTILINE)
    assert len(rows) == 13
    for original, ours, names in rows:
        module = importlib.import_module(ours)
        assert ours == f"unisono.compat.{original}"
        assert [name for name in re.findall(r"`(\w+)`", names) if not hasattr(module, name)] == []


@pytest.mark.parametrize(
    ("module", "name"),
    [
        *(("core.xla_model", name) for name in ("all_to_all", "collective_permute", "unlazy")),
        *(("core.xla_model", name) for name in ("get_memory_info", "parse_xla_device")),
        ("runtime", "use_spmd"),
        ("amp", "GradScaler"),
    ],
)
def test_what_the_migration_page_leaves_out_says_so(module: str, name: str) -> None:
    assert f"`{name}`" in PAGE or f".{name}`" in PAGE
    with pytest.raises(AttributeError, match="deliberately not supported: "):
        getattr(importlib.import_module(f"unisono.compat.torch_xla.{module}"), name)


def test_the_loop_of_the_migration_page_trains(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    with torch.random.fork_rng(devices=[]):
        model = torch.nn.Linear(4, 3)
        loader = DataLoader(TensorDataset(torch.randn(12, 4), torch.randint(3, (12,))), 4)
        exec(compile(block, "docs/migrating_from_torch_xla.md", "exec"), {"model": model, "loader": loader})
    assert capsys.readouterr().out.count("tensor(") == 3
