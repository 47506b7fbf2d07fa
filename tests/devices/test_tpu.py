"""TorchTPU, of which a stand-in is installed: what it sets for workers is theirs alone, and who is asked for a TPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from packages import run_installed

PACKAGE = """
import os
from types import SimpleNamespace

def load():
    import torch

    def set_tpu_launch_env(*, nproc_per_node):
        if nproc_per_node == 3:
            raise ValueError("3 is no topology")
        os.environ.setdefault("TORCH_TPU_SLICEBUILDER_ADDRESSES", ",".join(["localhost:1"] * nproc_per_node))

    torch.utils.rename_privateuse1_backend("tpu")
    distributed = SimpleNamespace(set_tpu_launch_env=set_tpu_launch_env)
    torch._register_device_module("tpu", SimpleNamespace(distributed=distributed))
    torch.accelerator.current_accelerator = lambda check_available=False: torch.device("tpu")
"""

SCRIPT = """
import os

from unisono.devices import family_names, get_backend
from unisono.devices.device import Device

tpu = get_backend("tpu")
print([len(tpu.worker_environment(count)["TORCH_TPU_SLICEBUILDER_ADDRESSES"].split(",")) for count in (2, 4)])
print([name for name in os.environ if name.startswith("TORCH_TPU_")])
try:
    tpu.worker_environment(3)
except Exception as error:
    print(error)
print(Device("TPU", 1), Device("TPU").torch_device, family_names()[0])
"""


ELSEWHERE = """
import os

from unisono.devices import get_backend

tpu = get_backend("tpu")
os.chdir(os.environ["PYTHONPATH"].split(os.pathsep)[0] + "/theirs")
print(len(tpu.worker_environment(2)))
"""


@pytest.mark.slow
def test_the_process_that_is_asked_imports_nothing_from_its_directory(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    for name in ("json", "sitecustomize", "torch"):
        (tmp_path / "theirs" / f"{name}.py").write_text("raise SystemExit('the code of another user has run')")
    done = run_installed(ELSEWHERE, tmp_path, "torch_tpu", PACKAGE, "[torch.backends]\ntorch_tpu = torch_tpu:load\n")
    assert done.stdout == "1\n", done.stderr


@pytest.mark.slow
def test_worker_variables_stay_with_workers_and_torch_tpu_owns_the_tpu(tmp_path: Path) -> None:
    done = run_installed(SCRIPT, tmp_path, "torch_tpu", PACKAGE, "[torch.backends]\ntorch_tpu = torch_tpu:load\n")
    two_and_four, here, refusal, names = done.stdout.splitlines()
    assert (two_and_four, here) == ("[2, 4]", "[]"), done.stderr
    assert refusal == "torch_tpu cannot prepare 3 workers: ValueError: 3 is no topology"
    assert names == "tpu:1 tpu:0 tpu"
