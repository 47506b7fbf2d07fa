"""`torch_xla.distributed.xla_backend`: `torch.distributed.init_process_group("xla")` joins this framework's world.

What the group reduces is tensors in main memory and, on CUDA, there. It refuses those on XLA devices: reduce these by
`xla_model.all_reduce`, and models by `xla_model.optimizer_step` in the place of DistributedDataParallel.
"""

from __future__ import annotations

from unisono.launch.hosts.join_world import let_scripts_name_families

let_scripts_name_families()
