"""torch_geometric: a classification of graphs with its own DataLoader, a DistributedSampler and torch's DDP."""

import os

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data.distributed import DistributedSampler
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GCNConv, global_mean_pool


class Graphs(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = GCNConv(4, 16), GCNConv(16, 16), torch.nn.Linear(16, 2)

    def forward(self, batch):
        nodes = self.first(batch.x, batch.edge_index).relu()
        return self.head(global_mean_pool(self.second(nodes, batch.edge_index), batch.batch))


def graph(number):
    generator = torch.Generator().manual_seed(number)
    nodes = 3 + number % 4
    edges = torch.randint(nodes, (2, 2 * nodes), generator=generator)
    return Data(x=torch.randn(nodes, 4, generator=generator), edge_index=edges, y=torch.tensor([number % 2]))


ranks = int(os.environ.get("WORLD_SIZE", "1"))
graphs = [graph(number) for number in range(64)]
torch.manual_seed(0)
model = Graphs()
if ranks > 1:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(model)
rank = dist.get_rank() if ranks > 1 else 0
sampler = DistributedSampler(graphs, ranks, rank, shuffle=True, seed=0)
loader = DataLoader(graphs, batch_size=8 // ranks, sampler=sampler)
optimizer = torch.optim.Adam(model.parameters(), 0.01)
for epoch in range(2):
    sampler.set_epoch(epoch)
    total = torch.zeros(())
    for batch in loader:
        optimizer.zero_grad()
        loss = cross_entropy(model(batch), batch.y)
        loss.backward()
        optimizer.step()
        total += loss.detach()
if ranks > 1:
    dist.all_reduce(total)
if rank == 0:
    weights = float(sum(each.detach().double().sum() for each in model.parameters()))
    print("loss", float(total) / ranks / len(loader), weights, ranks)
if ranks > 1:
    dist.destroy_process_group()
