"""The loop of nanoGPT's train.py: DDP, and microbatches that reduce with the last one (require_backward_grad_sync)."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

gradient_accumulation_steps = 4
ddp = int(os.environ.get("RANK", "-1")) != -1
if ddp:
    dist.init_process_group(backend="gloo")
    ddp_rank = int(os.environ["RANK"])
    ddp_world_size = int(os.environ["WORLD_SIZE"])
    assert gradient_accumulation_steps % ddp_world_size == 0
    gradient_accumulation_steps //= ddp_world_size
else:
    ddp_rank, ddp_world_size = 0, 1
torch.manual_seed(0)
text = torch.randint(50, (4096,), generator=torch.Generator().manual_seed(1))


def get_batch(step, micro_step):
    number = 4 * step + micro_step * ddp_world_size + ddp_rank
    starts = torch.randint(len(text) - 17, (4,), generator=torch.Generator().manual_seed(number))
    rows = torch.stack([text[start : start + 17] for start in starts])
    return rows[:, :-1], rows[:, 1:]


model = nn.Sequential(nn.Embedding(50, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 50))
raw_model = model
if ddp:
    model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(10):
    lossf = torch.zeros(())
    for micro_step in range(gradient_accumulation_steps):
        if ddp:
            model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
        x, y = get_batch(step, micro_step)
        loss = cross_entropy(model(x).flatten(0, 1), y.flatten()) / gradient_accumulation_steps
        loss.backward()
        lossf += loss.detach()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
if ddp:
    dist.all_reduce(lossf)
if ddp_rank == 0:
    weights = float(sum(each.detach().double().sum() for each in raw_model.parameters()))
    print("loss", float(lossf) / ddp_world_size, weights, ddp_world_size)
if ddp:
    dist.destroy_process_group()
