"""What a kill costs: from the SIGKILL of a rank to the end of the next step, and the time of a run in which a rank
is killed every 60 steps. With snapshots, against torch's elastic agent (torchrun), whose script loads what `torch.save`
has saved every 30 steps.

    python bench/kills.py
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
from blocks import interleave, options, show
from torch import nn
from torch.nn import functional as F

from unisono import Accelerator, spawn

DEVICES = ("cpu",)
RANKS, STEPS, KILL_EVERY, SAVE_EVERY = 2, 200, 60, 30


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 1))


def note(directory: str, what: str) -> None:
    with open(Path(directory, "times"), "a") as file:
        file.write(f"{time.time()} {what}\n")


def strike(directory: str, step: int, rank: int) -> None:
    """Kill rank 1 every so many steps, each time once."""
    mark = Path(directory, f"killed-{step}")
    if rank == 1 and step and step % KILL_EVERY == 0 and not mark.exists():
        mark.touch()
        note(directory, "kill")
        os.kill(os.getpid(), signal.SIGKILL)


def ours(rank: int, directory: str) -> None:
    accelerator = Accelerator(seed=0, snapshot_every=1, project_dir=directory)
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    rows = torch.randn(STEPS * 32 * RANKS, 64)
    data = torch.utils.data.TensorDataset(rows, rows.sum(1, keepdim=True))
    loader = torch.utils.data.DataLoader(data, 32, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    loaded = accelerator.load_state(must_exist=False)
    step = 0 if loaded is None else loaded.step
    for inputs, targets in loader:
        strike(directory, step, rank)
        optimizer.zero_grad()
        accelerator.backward(F.mse_loss(model(inputs), targets))
        optimizer.step()
        step += 1
        if rank == 0:
            note(directory, f"step {step}")


THEIRS = """
from datetime import timedelta
import os, sys, torch, torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
sys.path.insert(0, {bench!r})
from kills import RANKS, SAVE_EVERY, STEPS, network, note, strike

torch.set_num_threads(1)
dist.init_process_group("gloo", timeout=timedelta(seconds=20))  # its restarts hang at times
rank, directory = dist.get_rank(), {directory!r}
torch.manual_seed(0)
model = network()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
saved, step = os.path.join(directory, "state.pt"), 0
if os.path.exists(saved):
    state = torch.load(saved)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    step = state["step"]
replicated = DistributedDataParallel(model)
rows = torch.randn(STEPS * 32 * RANKS, 64)
data = torch.utils.data.TensorDataset(rows, rows.sum(1, keepdim=True))
sampler = torch.utils.data.DistributedSampler(data)
for number, (inputs, targets) in enumerate(torch.utils.data.DataLoader(data, 32, sampler=sampler)):
    if number < step:
        continue
    strike(directory, step, rank)
    optimizer.zero_grad()
    F.mse_loss(replicated(inputs), targets).backward()
    optimizer.step()
    step += 1
    if rank == 0:
        note(directory, f"step {{step}}")
        if step % SAVE_EVERY == 0:
            state = {{"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}}
            torch.save(state, saved + ".new")
            os.replace(saved + ".new", saved)
"""


def killed_run(which: str, waits: list[float]) -> float:
    """The seconds of a whole run; the median of those from a kill to the end of the next step is added to `waits`."""
    with TemporaryDirectory() as directory:
        began = time.time()
        kills = STEPS // KILL_EVERY
        if which == "snapshots":
            spawn(partial(ours, directory=directory), nprocs=RANKS, backend="cpu", cores=1, max_restarts=kills)
        else:
            script = Path(directory, "theirs.py")
            script.write_text(THEIRS.format(bench=str(Path(__file__).parent), directory=directory))
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
            command += [f"--max-restarts={kills + 5}", str(script)]
            subprocess.run(command, check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        took = time.time() - began
        lines = [line.split(" ", 1) for line in Path(directory, "times").read_text().splitlines()]
        found = []
        for place, (at, what) in enumerate(lines):
            if what == "kill":
                # The step that the other rank may still have noted comes before the restart's first one.
                done = max((int(each[5:]) for _, each in lines[:place] if each != "kill"), default=0)
                after = [float(when) for when, each in lines[place + 1 :] if each != "kill" and int(each[5:]) > done]
                found.append(after[0] - float(at))
        waits.append(median(found))
        return took


def main() -> None:
    given = options(__doc__, DEVICES, 3)
    waits: dict[str, list[float]] = {"snapshots": [], "torchrun": []}
    totals = interleave({name: partial(killed_run, name, waits[name]) for name in waits}, given.blocks, warm_up=0)
    show("from a kill to the end of a step that is new", waits)
    show(f"{STEPS} steps, with a kill every {KILL_EVERY}", totals)


if __name__ == "__main__":
    main()
