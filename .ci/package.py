"""Make the sdist and the wheel, and try both as their users would.

The wheel is made from the sdist. It is installed alone into a clean environment, which sees torch and the other
dependencies of the environment that runs this, but not the repository; there the quickstart runs, and then what the
packages in contrib/ add. The sdist has every file of the repository, and its tests run.
"""

from __future__ import annotations

import email
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
QUICK_TESTS = ["tests/test_tree.py", "tests/test_public_names.py"]


def run(*command: str | Path, directory: Path) -> str:
    """What it prints; SystemExit where it fails."""
    print("+", *command, flush=True)
    done = subprocess.run(list(map(str, command)), cwd=directory, text=True, capture_output=True)
    if done.returncode:
        raise SystemExit(f"{done.stdout}{done.stderr}\nexit code {done.returncode}: {' '.join(map(str, command))}")
    return done.stdout


def build(into: Path) -> tuple[Path, Path]:
    """The sdist, and the wheel that is made from it."""
    shutil.rmtree(into, ignore_errors=True)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", into, ROOT, directory=ROOT)
    ((sdist,), (wheel,)) = into.glob("*.tar.gz"), into.glob("*.whl")
    return sdist, wheel


def check_wheel(wheel: Path) -> None:
    """It has the package and nothing else, and its description needs no repository."""
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        (metadata,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        fields = email.message_from_bytes(archive.read(metadata))
    own = {path.relative_to(ROOT).as_posix() for path in (ROOT / "unisono").rglob("*.*") if path.suffix != ".pyc"}
    assert names == own, f"the wheel and the tree differ: {sorted(names ^ own)}"
    assert fields["License-Expression"] == "Apache-2.0"
    assert fields.get_all("Project-URL")
    relative = re.findall(r"\]\((?!https://|#)[^)]*\)", str(fields.get_payload()))
    assert not relative, f"links of the description that lead nowhere: {relative}"


def check_sdist(sdist: Path, python: Path, directory: Path) -> None:
    """It has every file under version control, and its tests run."""
    with tarfile.open(sdist) as archive:
        archive.extractall(directory, filter="data")
    (tree,) = directory.iterdir()
    if (ROOT / ".git").exists():
        tracked = run("git", "ls-files", directory=ROOT).splitlines()
        missing = [name for name in tracked if not (tree / name).exists() and name != ".gitignore"]
        assert not missing, f"the sdist lacks {missing}"
    run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", *QUICK_TESTS, directory=tree)


def check_quickstart(environment: Path, directory: Path) -> None:
    """The first script of the quickstart, on two processes, prints what the page shows."""
    page = (ROOT / "docs" / "quickstart.md").read_text()
    (script,) = re.findall(r'```python title="train.py"\n(.*?)```', page, re.DOTALL)
    (shown,) = re.findall(r"```text\n(.*?)```", page, re.DOTALL)
    (directory / "train.py").write_text(script)
    where = run(environment / "bin/python", "-c", "import unisono; print(unisono.__file__)", directory=directory)
    assert where.startswith(str(environment)), where
    command = environment / "bin/unisono"
    printed = run(command, "run", "-n", "2", "--backend", "cpu", "train.py", directory=directory)
    print(printed, end="")
    assert len(printed.splitlines()) == len(shown.splitlines())
    assert "test points are right" in printed


def check_contrib(environment: Path, directory: Path) -> None:
    """Each package beside this one is installed, and found by the name of its strategy or command."""
    for package in sorted((ROOT / "contrib").glob("*/pyproject.toml")):
        shutil.copytree(package.parent, directory / package.parent.name)  # setuptools builds in the folder
        install(environment / "bin/python", "--no-build-isolation", directory / package.parent.name)
    script = "from unisono import Accelerator; print(Accelerator(strategy='diloco', cpu=True))"
    assert "strategy='diloco'" in run(environment / "bin/python", "-P", "-c", script, directory=directory)
    assert "--devices" in run(environment / "bin/unisono-simulate", "--help", directory=directory)


def install(python: Path, *what: str | Path) -> None:
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", *what, directory=ROOT)


def make_environment(wheel: Path, directory: Path) -> Path:
    """An environment with the wheel, which finds its dependencies where this interpreter does."""
    venv.create(directory, with_pip=False)
    (packages,) = directory.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    install(directory / "bin/python", wheel)
    return directory


def main() -> None:
    sdist, wheel = build(ROOT / "dist")
    check_wheel(wheel)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name).resolve()
        for each in ("environment", "quickstart", "contrib", "sdist"):
            (directory / each).mkdir()
        environment = make_environment(wheel, directory / "environment")
        check_quickstart(environment, directory / "quickstart")
        check_contrib(environment, directory / "contrib")
        check_sdist(sdist, environment / "bin/python", directory / "sdist")
    print(f"{sdist.name} and {wheel.name} are complete")


if __name__ == "__main__":
    main()
