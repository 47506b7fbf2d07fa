"""A training that another project's engine calls: `python called_by.py nobody|ray|submitit DIRECTORY`.

Writes the trained weight, and each step's samples, into files of the directory.
"""

import signal
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

import unisono
from unisono import Accelerator, should_stop

SAMPLES, EPOCHS = 24, 2


def train(directory: str, waits: bool = False) -> None:
    """Train; a run that `waits`, and is not resumed, stands in its second step until it is asked to stop."""
    accelerator = Accelerator(seed=0, project_dir=directory)
    model = torch.nn.Linear(1, 1)
    loader = DataLoader(TensorDataset(torch.arange(1.0, SAMPLES + 1)), 8 // unisono.world_size(), shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 1e-3), loader)
    waits = not accelerator.load_state(must_exist=False) and waits
    should_stop(asked=False)
    steps = 0
    for _ in range(loader.epoch, EPOCHS):
        for [numbers] in loader:
            accelerator.backward(model(numbers[:, None]).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
            with open(f"{directory}/ledger-{unisono.rank()}", "a") as ledger:
                ledger.writelines(f"{int(number)}\n" for number in numbers)
            while waits and steps == 2 and not should_stop(asked=False):
                Path(directory, f"waits-{unisono.rank()}").touch()
            if should_stop(asked=False):
                accelerator.save_state()
                signal.raise_signal(signal.SIGUSR2)  # submitit requeues the job
                return
    Path(directory, f"weight-{unisono.rank()}").write_text(str(model.module.weight.item()))


class Task:
    """The same, for submitit: `checkpoint` makes a job that is to be requeued."""

    def __init__(self, directory: str) -> None:
        self.directory = directory

    def __call__(self) -> None:
        unisono.join_world()
        train(self.directory, waits=True)

    def checkpoint(self) -> object:
        import submitit

        return submitit.helpers.DelayedSubmission(self)


def call_by_ray(directory: str) -> None:
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    ray.init(address="local", num_cpus=2, include_dashboard=False)
    try:
        scaling, run = ScalingConfig(num_workers=2), RunConfig(storage_path=f"{directory}/ray")
        TorchTrainer(train, train_loop_config=directory, scaling_config=scaling, run_config=run).fit()
    finally:
        ray.shutdown()


def call_by_submitit(directory: str) -> None:
    import psutil
    import submitit

    executor = submitit.LocalExecutor(folder=f"{directory}/jobs")
    executor.update_parameters(tasks_per_node=2, timeout_min=3)
    job = executor.submit(Task(directory))
    while len(list(Path(directory).glob("waits-*"))) < 2 and not job.done():
        time.sleep(0.05)
    for task in psutil.Process(int(job.job_id)).children():
        task.send_signal(signal.SIGUSR2)  # what submitit does before the job's time is over
    job.results()


if __name__ == "__main__":
    {"nobody": train, "ray": call_by_ray, "submitit": call_by_submitit}[sys.argv[1]](sys.argv[2])
