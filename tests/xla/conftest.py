"""What only the XLA family does. Without torch_xla these tests are skipped; `make test-xla` runs them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import warm_scripts

from unisono.devices import get_backend

ROOT = Path(__file__).parent.parent.parent
LIMIT_S = 110


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker(pytest.mark.xla)
    if reason := get_backend("xla").unavailable_reason():
        item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def devices() -> list[str]:
    """All XLA devices of this process."""
    return [f"xla:{index}" for index in range(get_backend("xla").device_count())]


Script = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def script(tmp_path: Path) -> Script:
    """Run lines in a process of their own, whose runtime starts as its environment says."""

    def run(lines: str, **environ: str) -> subprocess.CompletedProcess[str]:
        path = tmp_path / "script.py"
        path.write_text(lines)
        dropped = {name for name in os.environ if name.startswith(("XLA_", "PJRT_", "CPU_NUM"))} - {"XLA_FLAGS"}
        kept = {name: value for name, value in os.environ.items() if name not in dropped}
        environ = {**kept, "PYTHONPATH": str(ROOT), "PJRT_DEVICE": "CPU", "UNISONO_BACKEND": "xla", **environ}
        code, output, errors = warm_scripts.complete(path, environ=environ, timeout=LIMIT_S)
        return subprocess.CompletedProcess([str(path)], code, output, errors)

    return run
