"""The job file of docs/several_machines.md on a real SLURM: two nodes, in namespaces of this machine."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from slurm_cluster import Entry, wait_until

ROOT = Path(__file__).parents[2]
LIMIT_S = 90.0
SAMPLES, EPOCHS = 40, 2

TRAIN = f"""
import os, sys, time
from pathlib import Path
import torch, unisono
from torch.utils.data import DataLoader, TensorDataset
from unisono import Accelerator, should_stop

how = Path("how").read_text()
is_first = "SLURM_RESTART_COUNT" not in os.environ
accelerator = Accelerator(seed=0, project_dir="checkpoints")
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.001)
loader = DataLoader(TensorDataset(torch.arange({SAMPLES})), batch_size=4, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
accelerator.load_state(must_exist=False)
should_stop()
step = 0
for epoch in range(loader.epoch, {EPOCHS}):
    for [ids] in loader:
        accelerator.backward(model(ids.float()[:, None]).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        with open(f"ledger-{{unisono.rank()}}", "a") as ledger:
            ledger.writelines(f"{{epoch}} {{each}}\\n" for each in ids.tolist())
        step += 1
        if how == "raise" and unisono.rank() == 1 and step == 3:
            raise LookupError("not here")
        while how == "stand" and is_first and step == 3 and not should_stop():
            time.sleep(0.05)
        if should_stop():
            accelerator.save_state()
            sys.exit(143)
print("done", unisono.rank(), unisono.world_size(), unisono.current_world().node_rank, flush=True)
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(LIMIT_S + 60)]


@pytest.fixture(scope="module")
def slurm(slurm_entry: Entry) -> Callable[..., str]:
    """Run a command in the cluster's namespaces; its output."""
    enter, variables = slurm_entry
    environ = {name: value for name, value in {**os.environ, **variables}.items() if name != "MASTER_ADDR"}

    def run(*arguments: str, cwd: Path = ROOT) -> str:
        path = f"{cwd}:{os.environ['PATH']}"
        found = subprocess.run(
            [*enter, *arguments],
            env={**environ, "PATH": path, "HOME": str(cwd)},
            capture_output=True,
            text=True,
            timeout=60,
            cwd=cwd,
        )
        assert found.returncode == 0, found.stderr
        return found.stdout

    return run


class Job:
    """The job of the page's file, in a directory."""

    def __init__(self, slurm: Callable[..., str], directory: Path, how: str, *options: str) -> None:
        self._slurm, self._directory = slurm, directory
        page = (ROOT / "docs" / "several_machines.md").read_text()
        found = re.search(r"```sh\n(#!/bin/bash\n.*?)```", page, re.DOTALL)
        assert found is not None
        text = re.sub(r"#SBATCH --(gpus-per-node|cpus-per-task)=.*\n", "", found[1])
        (directory / "job.sh").write_text(text.replace("unisono run", "unisono run -n 1 --backend cpu"))
        (directory / "train.py").write_text(TRAIN)
        (directory / "how").write_text(how)
        (directory / "unisono").write_text(f'#!/bin/sh\nexec {sys.executable} -m unisono "$@"\n')
        (directory / "unisono").chmod(0o755)
        self.id = slurm("sbatch", "--parsable", "--output=out", *options, "job.sh", cwd=directory).strip()

    def facts(self) -> dict[str, str]:
        text = self._slurm("scontrol", "show", "job", self.id, cwd=self._directory)
        return dict(re.findall(r"(\S+?)=(\S*)", text))

    @property
    def output(self) -> str:
        path = self._directory / "out"
        return path.read_text() if path.exists() else ""

    @property
    def ledger(self) -> list[str]:
        paths = self._directory.glob("ledger-*")
        return [line for path in paths for line in path.read_text().splitlines()]

    def end(self) -> dict[str, str]:
        """Wait for its end; its last state."""
        ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        wait_until(lambda: self.facts()["JobState"] in ended, lambda: f"{self.facts()}\n{self.output}")
        return self.facts()


def test_a_job_trains_one_model_on_both_nodes(slurm, tmp_path):
    job = Job(slurm, tmp_path, "")
    facts = job.end()
    assert (facts["JobState"], facts["ExitCode"]) == ("COMPLETED", "0:0"), job.output
    assert sorted(re.findall("done .*", job.output)) == ["done 0 2 0", "done 1 2 1"]
    assert Counter(job.ledger) == {f"{epoch} {each}": 1 for epoch in range(EPOCHS) for each in range(SAMPLES)}


def test_an_exception_is_the_job_s_failure_and_the_job_is_not_requeued(slurm, tmp_path):
    job = Job(slurm, tmp_path, "raise")
    facts = job.end()
    assert (facts["JobState"], facts["ExitCode"], facts["Restarts"]) == ("FAILED", "1:0", "0"), job.output
    assert "LookupError: not here" in job.output


def test_a_job_at_its_time_limit_is_requeued_and_counts_each_sample_once(slurm, tmp_path):
    job = Job(slurm, tmp_path, "stand", "--time=60", "--signal=TERM@45")
    wait_until(lambda: len(job.ledger) >= 12, lambda: job.output)  # before that, SIGTERM would end it without a save
    slurm("scontrol", "update", f"JobId={job.id}", "TimeLimit=1")
    waiting = ("PENDING", "1")
    wait_until(lambda: (job.facts()["JobState"], job.facts()["Restarts"]) == waiting, lambda: job.output)
    slurm("scontrol", "update", f"JobId={job.id}", "TimeLimit=60")  # or the next life may be too short to begin
    facts = job.end()
    assert (facts["JobState"], facts["Restarts"]) == ("COMPLETED", "1"), job.output
    assert job.output.count("stopped early as asked, after 3 steps; run again to resume") == 1
    assert Counter(job.ledger) == {f"{epoch} {each}": 1 for epoch in range(EPOCHS) for each in range(SAMPLES)}


def test_a_job_that_is_cancelled_saves_and_is_not_requeued(slurm, tmp_path):
    job = Job(slurm, tmp_path, "stand")
    wait_until(lambda: len(job.ledger) >= 12, lambda: job.output)
    slurm("scancel", job.id)
    facts = job.end()
    assert (facts["JobState"], facts["Restarts"]) == ("CANCELLED", "0"), job.output
    wait_until(lambda: any(tmp_path.glob("checkpoints/**/manifest.json")), lambda: job.output, limit_s=30.0)
    assert job.output.count("stopped early as asked, after 3 steps; run again to resume") == 1
