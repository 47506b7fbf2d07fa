"""muon-optimizer: MuonWithAuxAdam, which divides the matrices among the ranks itself, under torch's DDP."""

import os

import torch
import torch.distributed as dist
from muon import MuonWithAuxAdam
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), int(os.environ["WORLD_SIZE"])
torch.manual_seed(0)
inputs, labels = torch.randn(64, 16), torch.randint(4, (64,))
network = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))
model = DistributedDataParallel(network)
hidden = [network[1].weight, network[3].weight]  # of one shape, as its all_gather needs with gloo
others = [each for each in network.parameters() if all(each is not one for one in hidden)]
optimizer = MuonWithAuxAdam([{"params": hidden, "use_muon": True}, {"params": others, "use_muon": False, "lr": 0.01}])
for start in range(0, 64, 8):
    rows = slice(start + rank * 8 // ranks, start + (rank + 1) * 8 // ranks)
    optimizer.zero_grad()
    loss = cross_entropy(model(inputs[rows]), labels[rows])
    loss.backward()
    optimizer.step()
loss = loss.detach()
dist.all_reduce(loss)
if rank == 0:
    weights = float(sum(each.detach().double().abs().sum() for each in network.parameters()))
    print("loss", float(loss) / ranks, weights, ranks)
dist.destroy_process_group()
