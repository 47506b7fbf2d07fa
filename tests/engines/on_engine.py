"""A caller of `spawn(engine=)`, as a script: `python on_engine.py ENGINE HOW NPROCS`; prints how it ended, as JSON.

ENGINE is an expression over `unisono.engines`.
"""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import psutil
import torch

import unisono
import unisono.engines
from unisono import Accelerator, should_stop
from unisono.comm import sealing

SAMPLES, EPOCHS = 24, 2


class Mine(Exception):  # noqa: N818 - of this script
    """Known to the script alone."""


class Place:
    """Likewise."""

    def __init__(self, *values: object) -> None:
        self.values = values


def program(index: int, how: str) -> Place:
    world = unisono.current_world()
    total = unisono.all_reduce(torch.tensor(index + 1.0), "sum").item()
    sys.stdout.buffer.write(f"rank {index} is here ".encode() + b"\xff\n")  # no UTF-8
    sys.stdout.flush()
    is_last = index == world.world_size - 1
    if how == "raise" and is_last:
        raise Mine("not today")
    if how == "restart" and is_last and world.restart_count == 0:
        raise Mine("not at first")
    if how in ("lose", "end") and is_last:
        _, agent, *_ = psutil.Process().parents()  # as if its machine were gone
        agent.send_signal(signal.SIGKILL if how == "lose" else signal.SIGTERM)
        signal.pause()
    steps = 0
    if how.startswith("wait"):
        should_stop()
        Path(f"waits-{index}").touch()
        while not should_stop():
            steps += 1
        steps = 0
    if how.startswith("train"):
        steps = train(how)
    return Place(index, world.world_size, world.node_rank, world.restart_count, total, steps, len(sealing._secret))


def train(how: str) -> int:
    accelerator = Accelerator(seed=0, project_dir="checkpoints")
    model, numbers = torch.nn.Linear(1, 1), torch.utils.data.TensorDataset(torch.arange(SAMPLES))
    loader = torch.utils.data.DataLoader(numbers, batch_size=8 // unisono.world_size(), shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.01), loader)
    accelerator.load_state(must_exist=False)
    steps = 0
    for epoch in range(loader.epoch, EPOCHS):
        for [ids] in loader:
            accelerator.backward(model(ids.float()[:, None]).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
            if how == "train and die" and epoch == 1 and steps == 5 and unisono.rank() == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            accelerator.save_state()
            with open(f"ledger-{unisono.rank()}", "a") as ledger:
                ledger.writelines(f"{epoch} {each}\n" for each in ids.tolist())
    return steps


def fork_child() -> None:
    while not Path("waits-0").exists():
        time.sleep(0.1)
    if os.fork() == 0:
        time.sleep(1000)
        os._exit(0)


if __name__ == "__main__":
    engine, how, nprocs = eval(sys.argv[1], vars(unisono.engines)), sys.argv[2], int(sys.argv[3])
    ended: dict[str, object] = {}
    if how == "wait beside a child":
        threading.Thread(target=fork_child, daemon=True).start()
    try:
        found = unisono.spawn(
            program, (how,), nprocs, engine=engine, backend="cpu", max_restarts=int(how == "restart"), timeout=60
        )
        ended["results"] = [each.values for each in found]
    except BaseException as error:
        ended |= {"type": type(error).__name__, "text": str(error), "notes": getattr(error, "__notes__", [])}
        ended["is_own"] = isinstance(error, Mine)
        ended["traceback"] = str(error.__cause__ or "")
        if isinstance(error, unisono.errors.StoppedError):
            ended["results"] = [each.values for each in error.results]
    print("\nended " + json.dumps(ended), flush=True)
