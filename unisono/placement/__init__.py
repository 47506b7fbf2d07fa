"""Where tensors are, and when they are computed: copies, errors for mixed placement, barriers, programs."""

from unisono.backends.device import Device as Device
from unisono.placement.copying import copy_to as copy_to
from unisono.placement.copying import scalar_like as scalar_like
from unisono.placement.lazy_steps import compiled as compiled
from unisono.placement.lazy_steps import lazy_barrier as lazy_barrier
from unisono.placement.strict_mode import strict as strict
