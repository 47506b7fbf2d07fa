"""The end of a process group that a reducer of torch's holds as the last."""

from __future__ import annotations

from pathlib import Path

import pytest
import warm_scripts

SCRIPT = """
import signal, sys
import torch
import torch.distributed as dist
import torch.distributed.nn  # which would hold the group, if it were imported behind it
from torch.nn.parallel import DistributedDataParallel
from unisono.comm.shutdown import free_reducers_before_groups
from unisono.parallel.strategies.ddp import _Ordered

signal.alarm(20)  # a hang holds the interpreter's lock
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
if sys.argv[1] == "torch":
    free_reducers_before_groups()
model = (DistributedDataParallel if sys.argv[1] == "torch" else _Ordered)(torch.nn.Linear(2, 2))
sent = torch.ones(1 << 24)
received = [torch.empty(1 << 24)]
sys.setswitchinterval(100)  # nobody gets the lock who is not given it
dist.all_gather(received, sent, async_op=True)  # gloo's thread frees what it has sent later, with the lock
dist.destroy_process_group()
del model
sys.setswitchinterval(0.005)
print("ended", flush=True)
"""


@pytest.mark.parametrize("whose", ["torch", "ours"])
def test_a_model_that_outlives_its_group_frees_it_while_gloo_still_works(tmp_path: Path, whose: str) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    code, output, errors = warm_scripts.complete(tmp_path / "script.py", whose)
    assert (code, output) == (0, "ended\n"), errors
