"""Programs of other libraries train under `unisono run` what they train by torchrun, digit by digit."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest
from launches import PROGRAMS, launch

pytestmark = [pytest.mark.programs, pytest.mark.timeout(480)]

NEEDED = {
    "ddp_loop": [],
    "diffusers_unet": ["diffusers", "accelerate"],
    "geometric_graphs": ["torch_geometric"],
    "hf_trainer": ["transformers", "accelerate"],
    "lightning_fabric": ["lightning"],
    "lightning_trainer": ["lightning"],
    "muon_ddp": ["muon"],
    "sentence_transformers_trainer": ["sentence_transformers", "datasets", "accelerate"],
    "timm_resnet": ["timm"],
    "trl_grpo": ["trl"],
    "trl_sft": ["trl"],
}
# Why others do not train the same on one device.
DIFFERENT_ON_ONE_DEVICE = {
    "lightning_trainer": "the Trainer shuffles where ranks are several, also a loader that does not",
    "muon_ddp": "its optimizer needs a process group",
    "timm_resnet": "batch norm of each rank's batches",
    "trl_grpo": "each rank draws its completions",
}

Launch = Callable[[str, str], str]


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """The line of results of a program by a launcher. It runs once, for all tests."""
    found: dict[tuple[str, str], str] = {}

    def run(launcher: str, name: str) -> str:
        for each in NEEDED[name]:  # not imported here, where some set variables
            if importlib.util.find_spec(each) is None:
                pytest.skip(f"needs {each}: make test-programs")
        if (launcher, name) not in found:
            found[launcher, name] = launch(launcher, PROGRAMS / f"{name}.py", tmp_path_factory.mktemp(name))
        return found[launcher, name]

    return run


def loss_of(line: str) -> float:
    return float(line.split()[1])


def weights_of(line: str) -> float:
    return float(line.split()[2])


def test_each_program_is_listed() -> None:
    assert sorted(NEEDED) == sorted(each.stem for each in PROGRAMS.glob("*.py"))


@pytest.mark.parametrize("name", NEEDED)
def test_a_program_prints_what_it_prints_by_torchrun(launched: Launch, name: str) -> None:
    assert launched("unisono", name) == launched("torchrun", name)


@pytest.mark.parametrize("name", sorted(NEEDED.keys() - DIFFERENT_ON_ONE_DEVICE.keys()))
def test_a_program_trains_what_it_trains_on_one_device(launched: Launch, name: str) -> None:
    alone, both = launched("python", name), launched("unisono", name)
    assert weights_of(both) == pytest.approx(weights_of(alone), rel=1e-4)
    assert loss_of(both) == pytest.approx(loss_of(alone), rel=1e-4)


def test_a_script_of_accelerate_trains_the_same_with_other_import_lines(launched: Launch, tmp_path: Path) -> None:
    theirs = launched("torchrun", "diffusers_unet")
    lines = (PROGRAMS / "diffusers_unet.py").read_text()
    program = tmp_path / "diffusers_unet.py"
    program.write_text(lines.replace("from accelerate import", "from unisono.compat.accelerate import"))
    assert program.read_text() != lines
    ours = launch("unisono", program, tmp_path)
    assert loss_of(ours) == pytest.approx(loss_of(theirs), rel=1e-5)
    assert weights_of(ours) == pytest.approx(weights_of(theirs), rel=1e-5)
