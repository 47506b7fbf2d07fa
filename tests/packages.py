"""Packages that are installed for a test alone, and scripts that are modules for it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import unisono


def load_script(path: Path) -> Any:
    """A script as a module, which workers find by its name where its folder is in their path."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def install(directory: Path, name: str, code: str, entry_points: str) -> None:
    """Make the directory one where this module, and its entry points, are installed."""
    (directory / f"{name}.py").write_text(code)
    facts = directory / f"{name}-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text(entry_points)


def run_installed(
    script: str, directory: Path, name: str, code: str, entry_points: str
) -> subprocess.CompletedProcess[str]:
    """Run a script where that package is installed."""
    install(directory, name, code, entry_points)
    paths = os.pathsep.join([str(directory), str(Path(unisono.__file__).parent.parent)])
    environ = {name: value for name, value in os.environ.items() if name != "UNISONO_BACKEND"} | {"PYTHONPATH": paths}
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environ, timeout=100)
