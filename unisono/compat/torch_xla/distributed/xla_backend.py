"""`torch_xla.distributed.xla_backend`: `torch.distributed.init_process_group("xla")` joins this framework's world.

The group reduces tensors in main memory and on CUDA devices. It refuses those on XLA devices: reduce these by
`xla_model.all_reduce`, and models by `xla_model.optimizer_step` in place of DistributedDataParallel.
"""

from __future__ import annotations

from unisono.building_blocks import let_scripts_name_families

let_scripts_name_families()
