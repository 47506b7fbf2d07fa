"""A family of devices that another package brings, by an entry point."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from packages import run_installed

FAMILY = """
import torch

from unisono.devices.cpu import CpuBackend

torch.utils.rename_privateuse1_backend("mirage")


class MirageBackend(CpuBackend):
    name = "mirage"

    def device_count(self):
        return 2

    def is_accelerated(self):
        return True

    def device(self, index):
        if not 0 <= index < 2:
            raise ValueError(f"device mirage:{index} does not exist")
        return torch.device("mirage", index)


class Half:
    name = "half"
"""

SCRIPT = """
from unisono import available_devices
from unisono.cli.checks import check_devices
from unisono.devices import get_backend, pick_backend, resolve_device

print(end="".join(each.text for each in check_devices() if each.state == "warning"))
print(resolve_device("mirage:1")[1], pick_backend().name, available_devices()[:2])
"""


def run(directory: Path, entries: str) -> subprocess.CompletedProcess[str]:
    return run_installed(SCRIPT, directory, "mirages", FAMILY, f"[unisono.devices]\n{entries}\n")


@pytest.mark.slow
def test_it_is_found_and_comes_before_the_cpu(tmp_path: Path) -> None:
    done = run(tmp_path, "mirage = mirages:MirageBackend\ncpu = mirages:MirageBackend")
    assert done.stdout == "mirage:1 mirage ['mirage:0', 'mirage:1']\n", done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("mirage = mirages:Nothing", "backend 'mirage' of the package mirages cannot be loaded, AttributeError"),
        ("mirage = mirages:Half", "backend 'mirage' of the package mirages cannot be loaded, TypeError: mirages"),
    ],
)
def test_a_broken_one_is_an_error_that_names_the_package_or_what_it_lacks(
    entry: str, words: str, tmp_path: Path
) -> None:
    done = run(tmp_path, entry)
    assert done.returncode == 1
    assert f"ImportError: {words}" in done.stderr
    assert done.stdout.startswith(words), "doctor goes on"
