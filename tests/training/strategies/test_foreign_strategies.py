"""A strategy that another package brings, by an entry point: the one that CONTRIBUTING.md shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from modes import PROCESSES_2, THREADS_2, Mode
from packages import install, run_installed
from torch.utils.data import DataLoader

from unisono import Accelerator
from unisono.strategies import Engine, Options, Strategy
from unisono.training.strategies import lookup

ROOT = Path(__file__).parent.parent.parent.parent
SECTION = (ROOT / "CONTRIBUTING.md").read_text().partition("\n## A strategy\n")[2].partition("\n## ")[0]
(WIDE,) = re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)
ENTRIES = "[unisono.strategies]\n"

SCRIPT = """
import torch
from unisono import Accelerator, rank, spawn

def train(index, strategy):
    accelerator = Accelerator(strategy=strategy)
    torch.manual_seed(rank())
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    rows = torch.arange(24.0, device="cpu").view(8, 3) / 24
    model, optimizer, loader = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(rows, 2))
    for x in loader:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return type(model.engine).__name__, accelerator.state_dict(model)["weight"]

wide, ddp = (spawn(train, (name,), nprocs=2, backend="cpu") for name in ("wide", "ddp"))
torch.testing.assert_close(wide[0][1], ddp[0][1])
print([name for name, _ in wide])
"""


@pytest.mark.slow
def test_two_processes_train_by_it(tmp_path: Path) -> None:
    done = run_installed(SCRIPT, tmp_path, "wide", WIDE, f"{ENTRIES}wide = wide:Wide\n")
    assert done.stdout == "['WideEngine', 'WideEngine']\n", done.stderr


@pytest.mark.slow
def test_a_script_brings_one_of_its_own() -> None:
    script = WIDE + SCRIPT.replace('("wide", "ddp")', '(Wide(), "ddp")')
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
    assert done.stdout == "['WideEngine', 'WideEngine']\n", done.stderr


class Unreduced(Engine):
    def add_up(self, flat: torch.Tensor) -> None:
        pass


class NoReduction(Strategy):
    def engine_of(self, module: torch.nn.Module) -> Engine:
        return Unreduced(module, self.world, self.steps)


@dataclass(frozen=True)
class Nothing(Options):
    name = "nothing"
    strategy = NoReduction


def unreduced_step() -> None:
    accelerator, model = Accelerator(strategy=Nothing()), torch.nn.Linear(1, 1)
    torch.nn.init.ones_(model.weight), torch.nn.init.ones_(model.bias)
    rows = DataLoader(torch.arange(8.0).view(8, 1), 2)
    model, optimizer, rows = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1), rows)
    for x in rows:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("mode", [THREADS_2, PROCESSES_2], ids=str)
def test_one_that_reduces_nothing_is_an_error_at_the_first_step(mode: Mode) -> None:
    for said in mode.told(unreduced_step):
        assert "the ranks train different models: the parameter 'weight' of the Linear is float32[1, 1]" in said
        assert "after step 1, and its gradients differ" in said
        assert "the engine of a strategy leaves the sum over the ranks in it" in said


@pytest.mark.slow
def test_the_contract_runs_on_it(tmp_path: Path) -> None:
    install(tmp_path, "wide", WIDE, f"{ENTRIES}wide = wide:Wide\n")
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "wide and what_one_device"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    environment = {name: value for name, value in environment.items() if not name.startswith("PYTEST_XDIST")}
    done = subprocess.run(
        [*command, "tests/contract/test_strategy.py"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert re.search(r"^3 passed", done.stdout.splitlines()[-1]), done.stdout + done.stderr


CALL = "from unisono import Accelerator\nAccelerator(strategy='wide')"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import nothing_here", "ModuleNotFoundError: No module named 'nothing_here'"),
        (WIDE.replace('"wide"', '"other"'), "TypeError: wide:Wide is no subclass .* of the name 'wide'"),
        (WIDE.replace("= WideStrategy", "= WideEngine"), "TypeError: Wide.strategy=.*Strategy"),
        (f"{WIDE}    size: int\n", "TypeError: .*missing 1 required positional argument: 'size'"),
    ],
    ids=["import", "another name", "no strategy", "no default"],
)
def test_a_broken_one_is_an_error_that_names_the_package(code: str, words: str, tmp_path: Path) -> None:
    done = run_installed(CALL, tmp_path, "wide", code, f"{ENTRIES}wide = wide:Wide\n")
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert "strategy 'wide' of the package wide cannot be loaded, " in last
    assert re.search(f"{words}.*; repair or uninstall that package$", last), last


@pytest.mark.slow
def test_an_unknown_name_is_an_error_that_names_those_of_other_packages(tmp_path: Path) -> None:
    done = run_installed(CALL.replace("wide", "wade"), tmp_path, "wide", WIDE, f"{ENTRIES}wide = wide:Wide\n")
    assert re.search("strategy='wade' does not exist; choose one of ddp,.* fsdp, spmd, wide, zero1", done.stderr)


def test_one_that_is_beside_the_package_is_an_error_that_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "foreign", dict)
    with pytest.raises(ImportError, match="unisono-diloco, which is not installed; pip install contrib/unisono-diloco"):
        Accelerator(strategy="diloco")
    assert (ROOT / "contrib" / "unisono-diloco" / "pyproject.toml").exists()


@pytest.mark.slow
def test_the_seam_is_reached_from_one_module() -> None:
    script = """
import sys
from unisono.strategies import Options
assert "torch" not in sys.modules
from unisono.strategies import Engine, Strategy, buckets
assert all(each.__doc__ for each in (Engine, Strategy, Options, buckets))
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_options_without_a_name_or_a_strategy_are_refused() -> None:
    class Nameless(Options):
        strategy = "nowhere:Nothing"

    with pytest.raises(TypeError, match="Nameless lacks what names it; give the class a name and a strategy"):
        Accelerator(strategy=Nameless())


def test_each_own_strategy_is_where_its_options_say() -> None:
    for name, options in lookup.OWN.items():
        assert issubclass(options, Options)
        assert options.name == name
        assert options.strategy.startswith(lookup.strategy_class(options()).__module__ + ":")  # type: ignore[union-attr]
