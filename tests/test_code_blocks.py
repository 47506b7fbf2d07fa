"""Each Python block of the documents runs.

The blocks of a page run in their order, in one namespace and an empty directory, so that a later one may use what an
earlier one has made. What a page may take for granted is in `given`. A block that cannot run here is marked where a
reader sees it: its title begins with "needs" and says what; it is compiled.

Some pages have tests of their own, which compare what their blocks do; `ELSEWHERE` names these.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, get_args

import pytest
import torch
import warm_scripts
from modes import preload
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import unisono
from unisono import ParallelLoader
from unisono.cli.main import COMMANDS
from unisono.comm import preemption
from unisono.devices import OWN
from unisono.loading.sharding import Tail
from unisono.tracking.libraries import LIBRARIES
from unisono.training.strategies.lookup import OWN as STRATEGIES

ROOT = Path(__file__).parent.parent
FOLDERS = ("docs", "examples", "contrib")
PAGES = sorted([*ROOT.glob("*.md"), *(page for each in FOLDERS for page in (ROOT / each).rglob("*.md"))])

ELSEWHERE = {
    "README.md": "test_quickstart.py",
    "docs/training.md": "test_training_page.py",
    "docs/strategies.md": "test_training_page.py",
    "docs/checkpoints.md": "test_checkpoints_page.py",
    "docs/quickstart.md": "test_quickstart.py",
}


class Block(NamedTuple):
    """A fenced block: its language, its title and its text; and the line of the page that it begins in."""

    language: str
    title: str
    text: str
    line: int

    @property
    def needs(self) -> str:
        """What it cannot run without; "" where it runs."""
        return self.title if self.title.startswith("needs ") else ""


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks_of(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for found in re.finditer(r'^```(\w+)(?: title="([^"]*)")?\n(.*?)^```$', text, re.DOTALL | re.MULTILINE):
        yield Block(found[1], found[2] or "", found[3], text.count("\n", 0, found.start()) + 2)


def python_blocks(page: Path) -> list[Block]:
    return [block for block in blocks_of(page) if block.language == "python"]


WITH_PYTHON = [name_of(page) for page in PAGES if python_blocks(page)]
WITH_DIFFS = [name_of(page) for page in PAGES if any(block.language == "diff" for block in blocks_of(page))]


def given(path: Path) -> dict[str, Any]:
    """What a page takes for granted: torch, this package, a classifier of 60 points, and its loaders."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(60, 8), torch.randint(3, (60,)))
    model, net, small = (nn.Linear(8, 3) for _ in range(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(batch[0]), batch[1]).backward()
        optimizer.step()

    names = {name: getattr(unisono, name) for name in unisono.__all__}
    return names | {
        "__name__": "page",  # no module, so that workers get its functions by value
        "F": F,
        "data": data,
        "device": torch.device("cpu"),
        "epochs": 2,
        "loader": DataLoader(data, batch_size=10, shuffle=True),
        "losses": [0.7, 0.5],
        "model": model,
        "net": net,
        "nn": nn,
        "optimizer": optimizer,
        "path": path,
        "build": lambda: (model, optimizer, DataLoader(data, batch_size=10, shuffle=True)),
        "save": lambda *states: None,
        "sgd": torch.optim.SGD(small.parameters(), lr=0.1),
        "small": small,
        "step": lambda *batch: None,
        "test_loader": DataLoader(data, batch_size=10),
        "torch": torch,
        "train": lambda index: index,
        "train_step": train_step,
        "x": data.tensors[0],
        "y": data.tensors[1],
    }


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_block(page: str, block: Block, scope: dict[str, Any]) -> None:
    """The lines of a traceback are those of the page."""
    exec(compile("\n" * (block.line - 1) + block.text, ROOT / page, "exec"), scope)


@pytest.mark.usefixtures("fonts")
@pytest.mark.parametrize("page", [page for page in WITH_PYTHON if page not in ELSEWHERE])
def test_the_blocks_of_a_page_run(page: str, directory: Path) -> None:
    blocks = [block for block in python_blocks(ROOT / page) if not block.needs]
    if any("spawn(" in block.text for block in blocks):
        preload()
    scope = given(directory)
    with preemption.scope():  # a block may call should_stop(), which takes SIGTERM from then on
        for block in blocks:
            run_block(page, block, scope)


def test_the_script_of_the_page_on_hangs_says_what_the_page_shows(directory: Path) -> None:
    script, shown = (each.text for each in blocks_of(ROOT / "docs" / "hangs.md"))
    (directory / "hang.py").write_text(script)
    code, output, errors = warm_scripts.complete(directory / "hang.py")
    assert code == 0, errors
    assert output.splitlines()[0].replace(str(directory), "/home/me") == " ".join(shown.split())


NEEDED = "two machines|torchrun|submitit|a GPU|a TPU|an account"


def test_what_does_not_run_says_what_it_needs_and_compiles() -> None:
    for page in WITH_PYTHON:
        for block in python_blocks(ROOT / page):
            if block.needs:
                assert re.fullmatch(rf"needs ({NEEDED})(: .+)?", block.needs), block
                compile(block.text, page, "exec")


def sides(diff: str) -> tuple[str, str]:
    """The script before and after the change."""
    before, after = ([line[1:] for line in diff.splitlines() if line[:1] in (" ", sign, "")] for sign in "-+")
    return "\n".join(before) + "\n", "\n".join(after) + "\n"


def test_the_scripts_after_and_before_a_change_compile() -> None:
    blocks = [(page, block) for page in WITH_DIFFS for block in blocks_of(ROOT / page)]
    for page, block in blocks:
        if block.language == "diff" and "\n ..." not in block.text:
            before, after = sides(block.text)
            compile(after, page, "exec")
            if "<-" not in before:  # R
                compile(before, page, "exec")


COMING_FROM = ROOT / "docs" / "coming_from.md"
DIFFS = {
    title: sides(diff)
    for title, diff in re.findall(
        r"^## (.*?)\n+.*?```diff\n(.*?)```", COMING_FROM.read_text(), re.DOTALL | re.MULTILINE
    )
}


@pytest.mark.parametrize("title", DIFFS)
def test_what_a_script_of_another_framework_becomes_trains(title: str, directory: Path) -> None:
    scope = given(directory)
    first = {name: weight.clone() for name, weight in scope["model"].state_dict().items()}
    exec(compile(DIFFS[title][1], f"coming from {title}", "exec"), scope)
    trained = scope["replicas"].state_dict() if "replicas" in scope else scope["model"].state_dict()
    assert any(not torch.equal(trained[name], weight) for name, weight in first.items())
    assert {path.name for path in directory.iterdir()} & {"model.pt", "model", "state"}, "it saves what it has trained"


@pytest.mark.slow
def test_the_script_for_torchs_own_ddp_runs_as_it_is(directory: Path) -> None:
    prelude = (
        "import torch\nfrom torch.nn import functional as F\nfrom torch.utils.data import TensorDataset\n"
        "data = TensorDataset(torch.randn(60, 8), torch.randint(3, (60,)))\nmodel = torch.nn.Linear(8, 3)\n"
    )
    script = prelude + DIFFS["DistributedDataParallel"][0]
    (directory / "train.py").write_text(script)
    code, _, errors = warm_scripts.launch(directory, "run", "-n", "2", "--backend", "cpu", "train.py")
    assert code == 0, errors
    assert (directory / "model.pt").exists()


def commands() -> list[tuple[str, str]]:
    """Each line in a shell block that calls `unisono`, by itself or below srun."""
    found = []
    for page in PAGES:
        for block in blocks_of(page):
            if block.language == "sh":
                lines = [line.partition(" #")[0].strip() for line in block.text.replace("\\\n", " ").splitlines()]
                found += [(name_of(page), line[line.index("unisono ") :]) for line in lines if _calls(line)]
    return found


def _calls(line: str) -> bool:
    return re.match(r"(srun .*)?unisono [a-z]", line) is not None


def test_a_command_line_is_one_that_unisono_takes() -> None:
    parser = argparse.ArgumentParser(exit_on_error=False)
    subparsers = parser.add_subparsers()
    for name in COMMANDS:
        import_module(f"unisono.cli.{name}").add_parser(subparsers)
    for page, command in commands():
        parsed, unknown = parser.parse_known_args(shlex.split(command)[1:])
        assert not unknown, (page, command)
        assert callable(parsed.run), (page, command)


# What the documents link to exists, and what can be chosen is in their tables.


def test_every_relative_link_leads_somewhere() -> None:
    links = [(page, link) for page in PAGES for link in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text())]
    assert [each for each in links if not (each[0].parent / each[1]).exists()] == []


def test_decisions_are_numbered_without_a_gap_and_are_short() -> None:
    decisions = sorted((ROOT / "docs" / "decisions").glob("*.md"))
    assert [page.name[:4] for page in decisions] == [f"{number:04}" for number in range(1, len(decisions) + 1)]
    assert [page.read_text().partition(".")[0] for page in decisions] == [
        f"# {int(page.name[:4])}" for page in decisions
    ]
    assert [page.name for page in decisions if len(page.read_text().splitlines()) > 60] == []


def test_every_decision_that_is_referred_to_exists() -> None:
    numbers = {page.name[:4] for page in (ROOT / "docs" / "decisions").glob("*.md")}
    named = [(page, each) for page in PAGES for each in re.findall(r"[Dd]ecision (\d+)", page.read_text())]
    assert [each for each in named if f"{int(each[1]):04}" not in numbers] == []


def rows(page: str) -> str:
    """The first cells of all tables of a page."""
    lines = (ROOT / "docs" / page).read_text().splitlines()
    return "\n".join(line.split("|")[1] for line in lines if line.startswith("|"))


def test_each_choice_is_in_its_table_and_each_tail_in_the_docstring() -> None:
    tables = {"loading.md": get_args(Tail), "strategies.md": STRATEGIES, "tracking.md": LIBRARIES}
    for page, choices in tables.items():
        assert [each for each in choices if f'`"{each}"`' not in rows(page)] == [], page
    assert [each for each in get_args(Tail) if f'"{each}":' not in (ParallelLoader.__doc__ or "")] == []


def test_each_family_and_each_command_is_in_the_documents() -> None:
    text = "".join(page.read_text() for page in PAGES)
    assert [name for name in OWN if f'"{name}:0"' not in text and f'"{name}"' not in text] == []
    assert [name for name in COMMANDS if f"unisono {name}" not in text] == []
