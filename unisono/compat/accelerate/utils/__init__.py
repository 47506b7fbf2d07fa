"""`accelerate.utils`: the names that scripts use of it, and `is_..._available()` of device families and packages."""

from __future__ import annotations

import re
from typing import Any

from unisono.compat.accelerate.utils import dataclasses as _dataclasses
from unisono.compat.accelerate.utils import imports as _imports
from unisono.compat.accelerate.utils.dataclasses import AutocastKwargs as AutocastKwargs
from unisono.compat.accelerate.utils.dataclasses import DataLoaderConfiguration as DataLoaderConfiguration
from unisono.compat.accelerate.utils.dataclasses import DDPCommunicationHookType as DDPCommunicationHookType
from unisono.compat.accelerate.utils.dataclasses import DistributedDataParallelKwargs as DistributedDataParallelKwargs
from unisono.compat.accelerate.utils.dataclasses import DistributedType as DistributedType
from unisono.compat.accelerate.utils.dataclasses import DynamoBackend as DynamoBackend
from unisono.compat.accelerate.utils.dataclasses import FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin
from unisono.compat.accelerate.utils.dataclasses import GradientAccumulationPlugin as GradientAccumulationPlugin
from unisono.compat.accelerate.utils.dataclasses import GradScalerKwargs as GradScalerKwargs
from unisono.compat.accelerate.utils.dataclasses import InitProcessGroupKwargs as InitProcessGroupKwargs
from unisono.compat.accelerate.utils.dataclasses import KwargsHandler as KwargsHandler
from unisono.compat.accelerate.utils.dataclasses import LoggerType as LoggerType
from unisono.compat.accelerate.utils.dataclasses import PrecisionType as PrecisionType
from unisono.compat.accelerate.utils.dataclasses import ProfileKwargs as ProfileKwargs
from unisono.compat.accelerate.utils.dataclasses import ProjectConfiguration as ProjectConfiguration
from unisono.compat.accelerate.utils.dataclasses import RNGType as RNGType
from unisono.compat.accelerate.utils.dataclasses import TorchDynamoPlugin as TorchDynamoPlugin
from unisono.compat.accelerate.utils.imports import is_bf16_available as is_bf16_available
from unisono.compat.accelerate.utils.imports import is_fp16_available as is_fp16_available
from unisono.compat.accelerate.utils.memory import clear_device_cache as clear_device_cache
from unisono.compat.accelerate.utils.memory import find_executable_batch_size as find_executable_batch_size
from unisono.compat.accelerate.utils.memory import release_memory as release_memory
from unisono.compat.accelerate.utils.operations import DistributedOperationException as DistributedOperationException
from unisono.compat.accelerate.utils.operations import broadcast as broadcast
from unisono.compat.accelerate.utils.operations import broadcast_object_list as broadcast_object_list
from unisono.compat.accelerate.utils.operations import concatenate as concatenate
from unisono.compat.accelerate.utils.operations import convert_outputs_to_fp32 as convert_outputs_to_fp32
from unisono.compat.accelerate.utils.operations import convert_to_fp32 as convert_to_fp32
from unisono.compat.accelerate.utils.operations import copy_tensor_to_devices as copy_tensor_to_devices
from unisono.compat.accelerate.utils.operations import find_batch_size as find_batch_size
from unisono.compat.accelerate.utils.operations import find_device as find_device
from unisono.compat.accelerate.utils.operations import gather as gather
from unisono.compat.accelerate.utils.operations import gather_object as gather_object
from unisono.compat.accelerate.utils.operations import honor_type as honor_type
from unisono.compat.accelerate.utils.operations import is_torch_tensor as is_torch_tensor
from unisono.compat.accelerate.utils.operations import listify as listify
from unisono.compat.accelerate.utils.operations import pad_across_processes as pad_across_processes
from unisono.compat.accelerate.utils.operations import recursively_apply as recursively_apply
from unisono.compat.accelerate.utils.operations import reduce as reduce
from unisono.compat.accelerate.utils.operations import send_to_device as send_to_device
from unisono.compat.accelerate.utils.operations import slice_tensors as slice_tensors
from unisono.compat.accelerate.utils.other import extract_model_from_parallel as extract_model_from_parallel
from unisono.compat.accelerate.utils.other import is_compiled_module as is_compiled_module
from unisono.compat.accelerate.utils.other import load as load
from unisono.compat.accelerate.utils.other import merge_dicts as merge_dicts
from unisono.compat.accelerate.utils.other import parse_flag_from_env as parse_flag_from_env
from unisono.compat.accelerate.utils.other import patch_environment as patch_environment
from unisono.compat.accelerate.utils.other import save as save
from unisono.compat.accelerate.utils.other import str_to_bool as str_to_bool
from unisono.compat.accelerate.utils.other import wait_for_everyone as wait_for_everyone
from unisono.compat.accelerate.utils.random import set_seed as set_seed
from unisono.compat.accelerate.utils.random import synchronize_rng_state as synchronize_rng_state
from unisono.compat.accelerate.utils.random import synchronize_rng_states as synchronize_rng_states
from unisono.compat.accelerate.utils.tqdm import tqdm as tqdm


def __getattr__(name: str) -> Any:
    """Look the name up in the submodules, which raise an error with advice for names that are left out."""
    return getattr(_imports if re.fullmatch(r"is_\w+_available", name) else _dataclasses, name)
