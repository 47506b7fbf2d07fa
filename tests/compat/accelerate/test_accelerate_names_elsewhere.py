"""What else Accelerate's users import: where it is, and what it means on any ranks."""

from __future__ import annotations

import logging
from importlib import import_module
from typing import Any

import pytest
import torch
from modes import PROCESSES_2, SOLO, THREADS_2, Mode, fitting, hearing
from torch import nn

from unisono.compat.accelerate import (
    DistributedType,
    PartialState,
    debug_launcher,
    init_empty_weights,
    notebook_launcher,
    utils,
)
from unisono.compat.accelerate.logging import get_logger
from unisono.compat.accelerate.state import AcceleratorState

ALL = pytest.mark.parametrize("mode", fitting(SOLO, THREADS_2, PROCESSES_2), ids=str)
SEVERAL = pytest.mark.parametrize("mode", fitting(THREADS_2, PROCESSES_2), ids=str)

IMPORTS = """
accelerate: Accelerator PartialState DistributedType DataLoaderConfiguration DistributedDataParallelKwargs
accelerate: GradScalerKwargs InitProcessGroupKwargs ProfileKwargs AutocastKwargs FullyShardedDataParallelPlugin
accelerate: DDPCommunicationHookType find_executable_batch_size init_empty_weights notebook_launcher
accelerate: skip_first_batches synchronize_rng_states __version__
accelerate.accelerator: Accelerator DataLoaderConfiguration GradientAccumulationPlugin
accelerate.state: PartialState AcceleratorState
accelerate.data_loader: prepare_data_loader skip_first_batches SeedableRandomSampler DataLoaderDispatcher
accelerate.local_sgd: LocalSGD
accelerate.logging: get_logger
accelerate.big_modeling: init_empty_weights
accelerate.utils: set_seed tqdm gather gather_object broadcast broadcast_object_list reduce pad_across_processes
accelerate.utils: ProjectConfiguration LoggerType TorchDynamoPlugin release_memory is_xpu_available
accelerate.utils: is_bf16_available is_wandb_available is_deepspeed_available extract_model_from_parallel
accelerate.utils.dataclasses: DistributedType
accelerate.utils.operations: DistributedOperationException
accelerate.utils.memory: find_executable_batch_size clear_device_cache
accelerate.memory_utils: find_executable_batch_size
accelerate.utils.versions: compare_versions is_torch_version
accelerate.utils.environment: str_to_bool parse_flag_from_env patch_environment
accelerate.utils: recursively_apply find_batch_size find_device slice_tensors listify convert_to_fp32 wait_for_everyone
accelerate.utils: DynamoBackend PrecisionType RNGType ComputeEnvironment synchronize_rng_state
accelerate.launchers: notebook_launcher debug_launcher
accelerate.big_modeling: init_on_device
accelerate.scheduler: AcceleratedScheduler
accelerate.tracking: GeneralTracker
"""
ABSENT = [
    ("accelerate", "ParallelismConfig", "there is one axis"),
    ("accelerate", "prepare_pippy", "pipelines are not supported"),
    ("accelerate", "DeepSpeedPlugin", "DeepSpeed, Megatron-LM, pipelines"),
    ("accelerate", "load_checkpoint_and_dispatch", "each device holds a whole replica"),
    ("accelerate.utils", "MegatronLMPlugin", "DeepSpeed, Megatron-LM, pipelines"),
    ("accelerate.utils", "AORecipeKwargs", "mixed_precision is"),
    ("accelerate", "GeneralTracker", "pass log_with="),
    ("accelerate.utils", "concatenate", "map over a batch by"),
    ("accelerate.utils", "save_fsdp_model", "accelerator.save_state and load_state take sharded models"),
    ("accelerate.utils.modeling", "get_max_memory", "each device holds a whole replica"),
    ("accelerate.utils.deepspeed", "DummyOptim", "DeepSpeed, Megatron-LM"),
    ("accelerate.utils.constants", "SAFE_WEIGHTS_NAME", "accelerator.save_state"),
    ("accelerate.hooks", "CpuOffload", "each device holds a whole replica"),
    ("accelerate.checkpointing", "save_accelerator_state", "accelerator.save_state"),
    ("accelerate.optimizer", "AcceleratedOptimizer", "prepare\\(\\) returns the optimizer itself"),
    ("accelerate.inference", "prepare_pippy", "pipelines are not supported"),
    ("accelerate.parallelism_config", "ParallelismConfig", "there is one axis"),
    ("accelerate.commands.launch", "launch_command", "`unisono run -n 2 script.py` starts a script"),
    ("accelerate.tracking", "TensorBoardTracker", "pass log_with="),
    ("accelerate.test_utils", "training", "examples/accelerate_style.py"),
    ("accelerate.data_loader", "BatchSamplerShard", "shards by itself"),
]


def test_import_lines_change_by_a_prefix() -> None:
    for module, names in (line.split(": ") for line in IMPORTS.split("\n")[1:-1]):
        for name in names.split():
            assert getattr(import_module(f"unisono.compat.{module}"), name) is not None


@pytest.mark.parametrize(("module", "name", "words"), ABSENT)
def test_an_import_of_what_is_left_out_says_what_to_do(module: str, name: str, words: str) -> None:
    with pytest.raises(ImportError, match=f"deliberately not supported: .*{words}"):
        exec(f"from unisono.compat.{module} import {name}", {})


@pytest.mark.parametrize(
    ("module", "name"), [("accelerate.utils", "concatenate"), ("torch_xla.core.xla_model", "unlazy")]
)
def test_what_is_left_out_is_no_attribute_and_says_what_to_do(module: str, name: str) -> None:
    with pytest.raises(AttributeError, match=f"{name} is deliberately not supported: "):
        getattr(import_module(f"unisono.compat.{module}"), name)


def test_importing_an_unknown_name_or_module_is_an_ordinary_import_error() -> None:
    with pytest.raises(ImportError, match="cannot import name 'gahter' from "):
        exec("from unisono.compat.accelerate.utils.operations import gahter", {})
    with pytest.raises(AttributeError, match="has no attribute 'gahter'"):
        utils.gahter  # noqa: B018
    with pytest.raises(ModuleNotFoundError, match="operatoins"):
        import_module("unisono.compat.accelerate.operatoins")


@ALL
def test_the_state_is_the_ranks_own(mode: Mode) -> None:
    def body() -> tuple[Any, ...]:
        state = PartialState()
        kind = DistributedType.NO if mode.ranks == 1 else state.distributed_type
        assert AcceleratorState().distributed_type == state.distributed_type == kind
        assert state.distributed_type in DistributedType
        on = [state.on_process(lambda: True, rank)() for rank in range(2)]
        last = state.on_last_process(lambda: state.process_index)()
        main = state.on_local_main_process(lambda: state.process_index)()
        with state.split_between_processes([1, 2, 3], apply_padding=True) as part:
            return on, last, main, utils.gather_object(part)[:3]

    everything = [1, 2, 3]
    if mode.ranks == 1:
        assert mode.run(body) == [([True, True], 0, 0, everything)]
    else:
        zero, one = mode.run(body)
        assert zero == ([True, None], None, 0, everything)
        assert one == ([None, True], 1, None, everything)


@pytest.mark.parametrize("mode", fitting(SOLO, THREADS_2), ids=str)
def test_values_of_a_rank_reach_the_others(mode: Mode) -> None:
    def body() -> tuple[Any, ...]:
        state = PartialState()
        own, last = state.process_index, state.num_processes - 1
        objects = utils.broadcast_object_list([own, {"rank": own}], from_process=last)
        tensors = utils.broadcast({"x": torch.full((2,), float(own), device=state.device)}, from_process=last)
        copied = utils.copy_tensor_to_devices(torch.ones(1) if own == 0 else None)
        return objects, tensors["x"].tolist(), copied.tolist()

    last = mode.ranks - 1
    assert mode.run(body) == [([last, {"rank": last}], [last] * 2, [1.0])] * mode.ranks


@SEVERAL
def test_seeds_can_differ_by_rank_and_generators_can_be_synchronized(mode: Mode) -> None:
    def body() -> tuple[float, float, float, float]:
        utils.set_seed(5)
        same = torch.rand(()).item()
        utils.set_seed(5, device_specific=True)
        own = torch.rand(()).item()
        generator = torch.Generator().manual_seed(PartialState().process_index)
        utils.synchronize_rng_states(["torch", "generator", PartialState().device.type], generator)
        with pytest.raises(ValueError, match="trch"):
            utils.synchronize_rng_states(["trch"])
        return same, own, torch.rand(()).item(), torch.rand((), generator=generator).item()

    (same, own, torchs, generators), other = mode.run(body)
    assert (same, torchs, generators) == (other[0], other[2], other[3])
    assert own != other[1]


@pytest.mark.parametrize("mode", fitting(SOLO, THREADS_2), ids=str)
def test_a_logger_writes_on_rank_zero_or_in_order(mode: Mode) -> None:
    def body() -> list[str]:
        own = PartialState().process_index
        logger = get_logger(name := f"tests.ranks.{own}")
        logging.getLogger(name).setLevel("INFO")
        with hearing(name) as lines:
            logger.info("of rank %d", own)
            logger.info("of all", main_process_only=False)
            logger.info("one by one", in_order=True)
            logger.debug("too fine", main_process_only=False)
        return lines

    for rank, lines in enumerate(mode.run(body)):
        own = [f"[RANK {rank}] of all", f"[RANK {rank}] one by one"]
        assert lines == (["[RANK 0] of rank 0", *own] if rank == 0 else own)


def work(factor: int) -> tuple[int, int, str]:
    state = AcceleratorState()
    from unisono.compat.accelerate import Accelerator

    return state.process_index * factor, state.num_processes, Accelerator().mixed_precision


def test_a_launcher_calls_the_function_on_each_rank() -> None:
    assert notebook_launcher(work, (3,), num_processes=2, mixed_precision="bf16") == [(0, 2, "bf16"), (3, 2, "bf16")]


def test_batch_sizes_shrink_as_there() -> None:
    tried: list[int] = []

    @utils.find_executable_batch_size(starting_batch_size=100)
    def train(batch_size: int, *, least: int = 60) -> int:
        tried.append(batch_size)
        if batch_size > least:
            raise torch.OutOfMemoryError
        return batch_size

    assert train() == 57
    assert tried == [100, 90, 81, 72, 64, 57]


def test_empty_weights_have_no_memory() -> None:
    with init_empty_weights():
        model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    assert {each.device.type for each in model.parameters()} == {"meta"}
    assert {each.device.type for each in model.buffers()} == {"cpu"}
    with init_empty_weights(include_buffers=True):
        assert nn.BatchNorm1d(2).running_mean.is_meta
    assert not nn.Linear(1, 1).weight.is_meta


def test_a_structure_is_sent() -> None:
    sent = utils.send_to_device({"x": [torch.zeros(2), "text"]}, "meta")["x"]
    assert sent[0].is_meta
    assert sent[1] == "text"


def test_what_is_not_joined_is_not_available() -> None:
    assert not utils.is_deepspeed_available()
    assert utils.is_cuda_available() == torch.cuda.is_available()
    assert isinstance(utils.is_torch_xla_available(), bool)


def test_versions_are_compared_as_numbers() -> None:
    assert utils.is_torch_version(">=", "2.9")
    assert not utils.is_torch_version("<", "2.9.1")
    assert utils.compare_versions("numpy", ">", "1.3")
    with pytest.raises(ValueError, match=r"operation='=>' does not exist; choose one of <, <=, ==, !=, >=, >"):
        utils.compare_versions("numpy", "=>", "1.3")


def test_a_structure_is_searched_cut_and_converted() -> None:
    data = {"x": [torch.ones(3, 2, dtype=torch.bfloat16), "text"], "y": torch.arange(3)}
    assert (utils.find_batch_size(data), utils.find_device(data)) == (3, torch.device("cpu"))
    assert (utils.find_batch_size("text"), utils.find_device([])) == (None, None)
    cut = utils.slice_tensors(data, slice(0, 1))
    assert [cut["x"][0].shape[0], cut["x"][1], *cut["y"]] == [1, "text", 0]
    assert utils.listify(data["y"]) == [0, 1, 2]
    assert [utils.convert_to_fp32(data)[key] for key in "y"] == [data["y"]]
    assert utils.convert_to_fp32(data)["x"][0].dtype == torch.float32
    with pytest.raises(TypeError, match="double cannot take a str; pass tensors"):
        _double("text")


def _double(data: Any) -> Any:
    def double(each: torch.Tensor) -> torch.Tensor:
        return each * 2

    return utils.recursively_apply(double, data, error_on_other_type=True)


def test_a_debug_launcher_runs_processes_on_the_cpu() -> None:
    def work(least: int) -> None:
        state = PartialState()
        assert (state.num_processes, state.device.type) == (2, "cpu")
        assert state.process_index >= least

    debug_launcher(work, (0,))
    with pytest.raises(AssertionError):
        debug_launcher(work, (1,))
