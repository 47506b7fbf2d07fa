"""timm: a ResNet by its distributed helpers, as in its train.py."""

import argparse

import timm
import torch
from timm.utils import distribute_bn, init_distributed_device, reduce_tensor
from torch.nn.parallel import DistributedDataParallel

arguments = argparse.Namespace(device="cpu", dist_backend=None, dist_url=None, no_ddp=False, local_rank=0)
device = init_distributed_device(arguments)
torch.manual_seed(0)
model = DistributedDataParallel(timm.create_model("resnet10t", num_classes=4).to(device))
optimizer = torch.optim.SGD(model.parameters(), 0.05)
for step in range(3):
    generator = torch.Generator().manual_seed(10 * step + arguments.rank)
    images, labels = torch.randn(4, 3, 32, 32, generator=generator), torch.randint(4, (4,), generator=generator)
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
distribute_bn(model, arguments.world_size, True)
loss = float(reduce_tensor(loss.detach(), arguments.world_size))
if arguments.rank == 0:
    print(
        "loss",
        loss,
        float(sum(each.detach().double().sum() for each in model.state_dict().values())),
        arguments.world_size,
    )
