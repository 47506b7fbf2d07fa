"""What strangers meet first: the forms, the commands and the files around the code say what is true."""

from __future__ import annotations

import configparser
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.skipif(not (ROOT / ".github").is_dir(), reason="not the repository")


def load(path: str) -> Any:
    return yaml.safe_load((ROOT / path).read_text())


def version() -> str:
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    return settings["metadata"]["version"]


def targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_names_of_tests_fit_on_a_line():
    files = [*(ROOT / "tests").rglob("*.py"), *(ROOT / "contrib").rglob("*.py")]
    long = [name for path in files for name in re.findall(r"def (test_\w{66,})\(", path.read_text())]
    assert not long, "at most 70 letters: a claim that can be said aloud"


def test_continuous_integration_runs_what_a_contributor_runs():
    steps = load(".github/workflows/ci.yml")["jobs"]["run"]["steps"]
    assert [each["run"] for each in steps if "run" in each] == [".ci/run"]
    assert (ROOT / ".ci/run").stat().st_mode & 0o100


@pytest.mark.parametrize("form", ["bug", "feature"])
def test_a_form_has_the_parts_that_its_host_asks_for(form):
    found = load(f".github/ISSUE_TEMPLATE/{form}.yml")
    assert {"name", "description", "body"} <= found.keys()
    known = {each["name"] for each in load(".github/labels.yml")}
    assert set(found["labels"]) <= known
    for field in found["body"]:
        assert field["type"] in ("textarea", "input", "dropdown", "checkboxes", "markdown")
        assert {"id", "attributes"} <= field.keys()


def test_the_form_for_bugs_asks_for_what_the_command_prints():
    text = (ROOT / ".github/ISSUE_TEMPLATE/bug.yml").read_text()
    for command in re.findall(r"`unisono (\w+) [^`]*--json`", text):
        help_text = subprocess.run(
            [sys.executable, "-c", "from unisono.cli.main import main; main()", command, "--help"],
            capture_output=True,
            text=True,
        ).stdout
        assert "--json" in help_text, command
    (variable,) = re.findall(r"`(UNISONO_\w+)=full`", text)
    assert f'"{variable}"' in (ROOT / "unisono/launch/messages.py").read_text()


PAGES = ["AGENTS.md", "CONTRIBUTING.md", ".github/PULL_REQUEST_TEMPLATE.md", "changes/README.md"]


@pytest.mark.parametrize("page", PAGES)
def test_the_targets_and_files_that_a_page_names_are_there(page):
    text = (ROOT / page).read_text()
    commands = re.findall(r"^make ([a-z -]+?)(?: +#|$)|`make ([a-z -]+)", text, re.MULTILINE)
    named = {each for groups in commands for group in groups for each in group.split()}
    assert named, "a page that names no command"
    assert named <= targets(), named - targets()
    for path in re.findall(r"\]\((?!https?:|#)([^)#]+)", text):
        assert ((ROOT / page).parent / path).exists(), path


def test_the_files_that_the_tables_of_changes_name_are_there():
    named = re.findall(r"`?((?:unisono|tests|docs)/[\w/]+\.\w+)", (ROOT / "CONTRIBUTING.md").read_text())
    assert len(named) > 20
    assert [each for each in named if "/foo." not in each and not (ROOT / each).exists()] == []


def test_the_page_for_agents_fits_on_a_screen():
    assert len((ROOT / "AGENTS.md").read_text().splitlines()) <= 45


def test_owners_are_of_paths_that_exist():
    for line in (ROOT / ".github/CODEOWNERS").read_text().splitlines():
        if line and not line.startswith(("#", "*")):
            assert (ROOT / line.split()[0].lstrip("/")).exists(), line


def test_all_files_name_one_version():
    assert load("CITATION.cff")["version"] == version()
    assert f"## {version()}\n" in (ROOT / "CHANGELOG.md").read_text()


def test_the_container_prepares_what_a_contributor_needs():
    found = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text())
    assert set(re.findall(r"\.venv/\.(\w+)", found["postCreateCommand"])) == {"test", "check"}


def test_the_hooks_before_a_commit_run_tools_of_the_environment():
    (repository,) = load(".pre-commit-config.yaml")["repos"]
    for hook in repository["hooks"]:
        assert hook["entry"].split()[0] in (".venv/bin/ruff", ".venv/bin/python")
        for path in re.findall(r"tests/\S+", hook["entry"]):
            assert (ROOT / path).exists()


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A repository with the release's command in it, and one commit."""
    for name in (".ci", "changes", "setup.cfg", "CHANGELOG.md", "CITATION.cff", "towncrier.toml"):
        source = ROOT / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, tmp_path / name)
    git(tmp_path, "init", "--quiet", "--initial-branch", "main")
    commit(tmp_path)
    return tmp_path


def git(directory: Path, *arguments: str) -> str:
    who = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
    return subprocess.run(["git", *who, *arguments], cwd=directory, check=True, capture_output=True, text=True).stdout


def commit(directory: Path) -> None:
    git(directory, "add", "--all")
    git(directory, "commit", "--quiet", "--message", "A state")


@pytest.mark.parametrize(
    ("asked", "before", "message"),
    [
        ("", (), "'' is not a version such as 0.2.0; write make release VERSION=0.2.0"),
        ("v0.2.0", (), "'v0.2.0' is not a version"),
        ("0.2.0", ("tag", "v0.2.0"), "there is a v0.2.0 already"),
        ("0.2.0", ("tag", "v0.10.0"), "0.2.0 comes before v0.10.0"),
        ("0.2.0", ("checkout", "--quiet", "-b", "other"), "releases are made on main, and this is other"),
        ("0.2.0", ("mv", "CITATION.cff", "other"), "there are changes that are not committed: R  CITATION.cff"),
    ],
)
def test_a_release_that_would_be_wrong_is_refused(copy, asked, before, message):
    if before:
        git(copy, *before)
    done = subprocess.run([".ci/release", asked], cwd=copy, capture_output=True, text=True)
    assert done.returncode == 1
    assert message in done.stderr
    assert git(copy, "log", "--oneline").count("\n") == 1


def test_fragments_become_the_next_section_of_the_changes(copy):
    towncrier = Path(sys.executable).with_name("towncrier")
    if not towncrier.exists():
        pytest.skip("towncrier is not installed")
    (copy / "changes" / "loops.added.md").write_text("Loops are faster.\n")
    (copy / "changes" / "old.removed.md").write_text("`old` is gone; use `new`.\n")
    commit(copy)
    subprocess.run([towncrier, "build", "--yes", "--version", "0.2.0"], cwd=copy, check=True, capture_output=True)
    text = (copy / "CHANGELOG.md").read_text()
    section = text[text.index("## 0.2.0") : text.index("## 0.1.0")]
    assert section.index("### Added") < section.index("- Loops are faster.") < section.index("### Removed")
    assert [each.name for each in (copy / "changes").iterdir()] == ["README.md"]
