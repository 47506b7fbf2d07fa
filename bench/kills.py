"""What a kill costs: from the SIGKILL of a rank to the end of the next step, and the time of a run in which a rank
is killed every 60 steps. With snapshots, against torch's elastic agent (torchrun), whose script loads what `torch.save`
has saved every 30 steps; and against torchft, if it is installed, whose other rank goes on alone, with half of the
batch, until the killed one is back, and which takes a rank for dead after half a second without a heartbeat (by default
5 s).

    python bench/kills.py
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from importlib.util import find_spec
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
        note(directory, f"kill {step}")
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

TORCHFT = """
from datetime import timedelta
import os, sys, torch
from torch.nn import functional as F
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
sys.path.insert(0, {bench!r})
from kills import RANKS, STEPS, network, note, strike

torch.set_num_threads(1)
rank, directory = int(os.environ["REPLICA_GROUP_ID"]), {directory!r}
model = network()
plain = torch.optim.Adam(model.parameters(), lr=1e-3)


def load(state):
    model.load_state_dict(state["model"])
    plain.load_state_dict(state["optimizer"])


manager = Manager(
    pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
    min_replica_size=1,
    load_state_dict=load,
    state_dict=lambda: {{"model": model.state_dict(), "optimizer": plain.state_dict()}},
    replica_id=f"rank{{rank}}",
)
replicated, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, plain)
rows = torch.randn(STEPS * RANKS, 32, 64)
while (step := manager.current_step()) < STEPS:
    strike(directory, step, rank)
    inputs = rows[step * RANKS + rank]
    optimizer.zero_grad()
    F.mse_loss(replicated(inputs), inputs.sum(1, keepdim=True)).backward()
    optimizer.step()
    if rank == 0:
        note(directory, f"step {{manager.current_step()}}")
os._exit(0)
"""


def run_torchft(script: Path, kills: int) -> None:
    """Run a script in one replica group per rank; until that of rank zero, which is not killed, ends."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    lighthouse = [Path(sys.executable).with_name("torchft_lighthouse"), "--bind", f"127.0.0.1:{port}"]
    lighthouse += ["--min_replicas", "1", "--join_timeout_ms", "1000", "--heartbeat_timeout_ms", "500"]
    given = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    command += [f"--max-restarts={kills + 5}", str(script)]
    start = partial(subprocess.Popen, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    started = [start(lighthouse)]
    try:
        started += [start(command, env={**given, "REPLICA_GROUP_ID": str(rank)}) for rank in range(RANKS)]
        if started[1].wait():
            raise subprocess.CalledProcessError(started[1].returncode, command)
    finally:
        for each in started:
            each.terminate()  # an agent ends its rank
        for each in started:
            each.wait()


def killed_run(which: str, waits: list[float]) -> float:
    """The seconds of a whole run; the median of those from a kill to the end of the next step is added to `waits`."""
    with TemporaryDirectory() as directory:
        began = time.time()
        kills = STEPS // KILL_EVERY
        if which == "snapshots":
            spawn(partial(ours, directory=directory), nprocs=RANKS, backend="cpu", cores=1, max_restarts=kills)
        else:
            script, source = Path(directory, "theirs.py"), THEIRS if which == "torchrun" else TORCHFT
            script.write_text(source.format(bench=str(Path(__file__).parent), directory=directory))
        if which == "torchft":
            run_torchft(script, kills)
        elif which == "torchrun":
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
            command += [f"--max-restarts={kills + 5}", str(script)]
            subprocess.run(command, check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        took = time.time() - began
        lines = [line.split() for line in Path(directory, "times").read_text().splitlines()]
        steps = [(float(at), int(step)) for at, what, step in lines if what == "step"]
        found = [
            next(when for when, done in steps if when > float(at) and done > int(step)) - float(at)
            for at, what, step in lines
            if what == "kill"
        ]
        waits.append(median(found))
        return took


def main() -> None:
    given = options(__doc__, DEVICES, 3)
    names = ["snapshots", "torchrun", *(["torchft"] if find_spec("torchft") else [])]
    waits: dict[str, list[float]] = {name: [] for name in names}
    totals = interleave({name: partial(killed_run, name, waits[name]) for name in waits}, given.blocks, warm_up=0)
    show("from a kill to the end of a step that is new", waits)
    show(f"{STEPS} steps, with a kill every {KILL_EVERY}", totals)


if __name__ == "__main__":
    main()
