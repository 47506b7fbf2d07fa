"""The engines that `spawn(..., engine=)` knows: `Local`, `Hosts` (SSH), `Slurm`, `Ray`.

Each starts `machine.py` once per machine. Others can be added as entry points "unisono.engines".
"""

from unisono.engines.hosts import Hosts as Hosts
from unisono.engines.hosts import Local as Local
from unisono.engines.ray import Ray as Ray
from unisono.engines.slurm import Slurm as Slurm
