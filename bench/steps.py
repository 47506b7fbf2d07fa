"""The time of a step on N processes: ours against the same loop with torch's DDP, accelerate and Lightning Fabric.

    python bench/steps.py [--blocks 10] [--device cuda] [--workers 2] [--networks cnn transformer]

All loops run in the same workers, one on each accelerator; the two sides of a pair alternate epochs. On the CPU, ours
reduces in shared memory, the others over gloo, which is what their users get. Data, initial weights, optimizer and
batch size are the same, with one thread per worker and full batches only. Each variant has its own loader:
`Accelerator, DDP's loader` shows that effect. The peers are those that can be imported.
"""

from __future__ import annotations

import logging
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from blocks import interleave, options, show
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from unisono import Accelerator, DeviceLoader, barrier, current_world, optimizer_step, spawn
from unisono.devices import get_backend

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from train_digits import build_loaders, build_model

DEVICES = ("cpu", "cuda")
DDP, ACCELERATE, FABRIC = "DDP", "accelerate", "Fabric"
FACADE, BARE, PLAIN_LOADER = "Accelerator", "optimizer_step", "Accelerator, DDP's loader"
ALONE = "no reduction"  # each rank trains its own model: an upper bound for every reduction
PAIRS = [(FACADE, DDP), (FACADE, ACCELERATE), (FACADE, FABRIC), (BARE, DDP), (PLAIN_LOADER, DDP), (ALONE, DDP)]

Epoch = Callable[[], int]


def is_pinned() -> bool:
    return current_world().device.type != "cpu"


@dataclass(frozen=True)
class Job:
    """A network to train; each call creates another one, equal to the first.

    Attributes:
        batch_size: that of all ranks together.
    """

    network: Callable[[], nn.Module]
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer]
    data: TensorDataset
    batch_size: int

    def steps(self) -> int:
        return len(self.data) // self.batch_size

    def parts(self) -> tuple[nn.Module, Optimizer]:
        torch.manual_seed(0)
        model = self.network()
        return model, self.optimizer(model.parameters())

    def loader(self, ranks: int) -> DataLoader[Any]:
        return DataLoader(self.data, batch_size=self.batch_size // ranks, shuffle=True, pin_memory=is_pinned())

    def split_loader(self, ranks: int) -> DataLoader[Any]:
        sampler: DistributedSampler[Any] = DistributedSampler(self.data)
        return DataLoader(self.data, batch_size=self.batch_size // ranks, sampler=sampler, pin_memory=is_pinned())


class Transformer(nn.Module):
    """Predicts the next byte of a sequence of 64, with three layers of width 128."""

    def __init__(self, rows: int = 64, width: int = 128, layers: int = 3) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(256, width), nn.Parameter(torch.zeros(rows, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(rows))

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        hidden = self.layers(self.embed(text) + self.place, mask=self.mask, is_causal=True)
        return self.head(hidden)  # type: ignore[no-any-return]


def small_cnn() -> Job:
    """The network of the example: 0.15 million parameters, images of 8 x 8."""

    def sgd(parameters: Iterable[nn.Parameter]) -> Optimizer:
        return torch.optim.SGD(parameters, lr=0.01, momentum=0.9, weight_decay=1e-4)

    digits: Any = build_loaders(1)[0].dataset
    inputs, labels = (torch.stack(column) for column in zip(*(digits[row] for row in range(22 * 64)), strict=True))
    return Job(build_model, sgd, TensorDataset(inputs, labels), 64)


def small_transformer() -> Job:
    """0.7 million parameters, on the text of this project."""

    def adam_w(parameters: Iterable[nn.Parameter]) -> Optimizer:
        return torch.optim.AdamW(parameters, lr=3e-4)

    pages = sorted((Path(__file__).parent.parent / "docs").rglob("*.md"))
    text = torch.frombuffer(bytearray(b"".join(page.read_bytes() for page in pages)), dtype=torch.uint8)
    rows = text[: 8 * 16 * 65].view(-1, 65).long()
    return Job(Transformer, adam_w, TensorDataset(rows[:, :-1].clone(), rows[:, 1:].clone()), 16)


JOBS = {"cnn": small_cnn, "transformer": small_transformer}


def epochs(
    model: nn.Module,
    optimizer: Optimizer,
    loader: Iterable[Any],
    backward: Callable[[torch.Tensor], None] = torch.Tensor.backward,
    step: Callable[[Optimizer], Any] = lambda optimizer: optimizer.step(),
) -> Epoch:
    """The loop, the same for all variants."""
    sampler, device = getattr(loader, "sampler", None), current_world().device
    number = 0

    def epoch() -> int:
        nonlocal number
        if isinstance(sampler, DistributedSampler):
            sampler.set_epoch(number)
        number, steps = number + 1, 0
        for inputs, targets in loader:
            inputs, targets = (each.to(device, non_blocking=True) for each in (inputs, targets))
            optimizer.zero_grad()
            backward(F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten()))
            step(optimizer)
            steps += 1
        return steps

    return epoch


def alone(job: Job, ranks: int) -> Epoch:
    model, _ = job.parts()
    model.to(current_world().device)
    return epochs(model, job.optimizer(model.parameters()), job.split_loader(ranks))


def by_ddp(job: Job, ranks: int) -> Epoch:
    model, _ = job.parts()
    model = DistributedDataParallel(model.to(current_world().device))
    return epochs(model, job.optimizer(model.parameters()), job.split_loader(ranks))


def by_accelerator(job: Job, ranks: int) -> Epoch:
    accelerator = Accelerator()
    model, optimizer, loader = accelerator.prepare(*job.parts(), job.loader(ranks))
    return epochs(model, optimizer, loader, accelerator.backward)


def by_accelerator_without_loader(job: Job, ranks: int) -> Epoch:
    accelerator = Accelerator()
    model, optimizer = accelerator.prepare(*job.parts())
    return epochs(model, optimizer, job.split_loader(ranks), accelerator.backward)


def by_optimizer_step(job: Job, ranks: int) -> Epoch:
    model, _ = job.parts()
    model.to(current_world().device)
    return epochs(model, job.optimizer(model.parameters()), DeviceLoader(job.loader(ranks)), step=optimizer_step)


def by_accelerate(job: Job, ranks: int) -> Epoch:
    accelerator = import_module("accelerate").Accelerator(cpu=not is_pinned())
    model, optimizer, loader = accelerator.prepare(*job.parts(), job.loader(ranks))
    return epochs(model, optimizer, loader, accelerator.backward)


def by_fabric(job: Job, ranks: int) -> Epoch:
    fabric = import_module("lightning_fabric").Fabric(
        accelerator=current_world().device.type, devices=ranks, strategy="ddp"
    )
    fabric.launch()
    model, optimizer = fabric.setup(*job.parts())
    return epochs(model, optimizer, fabric.setup_dataloaders(job.loader(ranks)), fabric.backward)


def over(group: Any, way: Callable[[Job, int], Epoch], job: Job, ranks: int) -> Epoch:
    """The epochs of a variant, with this group in place of the default one."""
    with as_default(group):
        epoch = way(job, ranks)

    def run() -> int:
        with as_default(group):
            return epoch()

    return run


@contextmanager
def as_default(group: Any) -> Iterator[None]:
    usual = dist.group.WORLD
    dist.distributed_c10d._update_default_pg(group)
    try:
        yield
    finally:
        dist.distributed_c10d._update_default_pg(usual)


OURS = (FACADE, BARE, PLAIN_LOADER)
WAYS = {
    ALONE: alone,
    FACADE: by_accelerator,
    BARE: by_optimizer_step,
    PLAIN_LOADER: by_accelerator_without_loader,
    DDP: by_ddp,
    **({ACCELERATE: by_accelerate} if find_spec("accelerate") else {}),
    **({FABRIC: by_fabric} if find_spec("lightning_fabric") else {}),
}


def measure(index: int, ranks: int, blocks: int, network: str) -> list[dict[str, list[float]]]:
    """The seconds of a step of each pair, block by block."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    job = JOBS[network]()
    if not dist.is_initialized():  # one rank, for which DDP asks for a group, too
        dist.init_process_group("nccl" if is_pinned() else "gloo", store=HashStore(), rank=0, world_size=1)
    gloo = dist.group.WORLD if is_pinned() else dist.new_group(backend="gloo")
    world = current_world()
    loops = {name: way(job, ranks) if name in OURS else over(gloo, way, job, ranks) for name, way in WAYS.items()}
    torch.set_num_threads(1)  # accelerate sets its own number
    steps = job.steps()

    def timed(epoch: Epoch) -> Callable[[], float]:
        def run() -> float:
            barrier()
            start = time.perf_counter()
            taken = epoch()
            world.backend.synchronize(world.device)
            barrier()
            assert taken == steps, f"{taken} steps instead of {steps}"
            return (time.perf_counter() - start) / taken

        return run

    pairs = [{name: timed(loops[name]) for name in pair} for pair in PAIRS if pair[1] in loops]
    return [interleave(pair, blocks, warm_up=2) for pair in pairs]


def main() -> None:
    arguments = options(__doc__, DEVICES, blocks=10, workers=2, networks=[*JOBS])
    workers = arguments.workers if arguments.device == "cpu" else get_backend(arguments.device).device_count()
    for network in arguments.networks:
        for pair in spawn(measure, args=(workers, arguments.blocks, network), nprocs=workers)[0]:
            show(f"{network}, {workers} rank{'s' * (workers > 1)}", pair)


if __name__ == "__main__":
    main()
