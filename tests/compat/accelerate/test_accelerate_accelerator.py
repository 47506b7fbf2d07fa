"""Accelerate's Accelerator over the native one: its arguments, its defaults, what it refuses."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from modes import PROCESSES_2, SOLO, THREADS_2, Mode, fitting, hearing
from torch import nn
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy, ShardingStrategy
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from unisono import DeviceLoader, current_world
from unisono.compat.accelerate import Accelerator, DistributedType, PartialState, utils
from unisono.compat.accelerate.local_sgd import LocalSGD
from unisono.compat.accelerate.scheduler import AcceleratedScheduler
from unisono.compat.accelerate.state import AcceleratorState, GradientState
from unisono.strategies import FSDP

ALL = pytest.mark.parametrize("mode", fitting(SOLO, THREADS_2), ids=str)
SEVERAL = pytest.mark.parametrize("mode", fitting(THREADS_2, PROCESSES_2), ids=str)


def rows(count: int) -> TensorDataset:
    return TensorDataset(torch.arange(float(count)).unsqueeze(1))


BATCHED = utils.DistributedDataParallelKwargs(comm_hook=utils.DDPCommunicationHookType.BATCHED_POWER_SGD)
LEFT_OVER = utils.GradientAccumulationPlugin(2, sync_with_dataloader=False)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"deepspeed_plugin": 1}, "no argument 'deepspeed_plugin'; DeepSpeed is not supported"),
        ({"parallelism_config": 1}, "no argument 'parallelism_config'; there is one axis"),
        ({"mixed_precision": "fp8"}, "mixed_precision='fp8' does not exist; choose one of no, bf16, fp16"),
        ({"kwargs_handlers": [utils.KwargsHandler()]}, "1 KwargsHandler; pass one at most of each"),
        ({"kwargs_handlers": [utils.ProfileKwargs(), utils.ProfileKwargs()]}, "2 ProfileKwargs; pass one"),
        ({"kwargs_handlers": [BATCHED]}, "comm_hook=.*batched_power_sgd.* does not exist; choose one of no, fp16"),
        ({"gradient_accumulation_plugin": LEFT_OVER}, r"\(sync_with_dataloader=...\) .*: a loop's last step uses"),
        ({"gradient_accumulation_steps": 2, "gradient_accumulation_plugin": LEFT_OVER}, "both given; pass one"),
        ({"fsdp_plugin": utils.FullyShardedDataParallelPlugin(activation_checkpointing=True)}, "has no counterpart"),
        ({"dynamo_backend": "inductor", "dynamo_plugin": utils.TorchDynamoPlugin()}, "both given; pass one"),
        (
            {"log_with": "tensorboard"},
            "log_with='tensorboard' writes files, and no directory is given; pass project_dir",
        ),
    ],
)
def test_what_has_no_counterpart_is_refused_in_words(given: dict[str, Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        Accelerator(**given)


def test_none_is_no_mixed_precision_unless_the_environment_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Accelerator(mixed_precision=None).mixed_precision == "no"
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert Accelerator().mixed_precision == AcceleratorState().mixed_precision == "bf16"


def test_what_accelerate_launch_sets_has_its_meaning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "3")
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "EAGER")
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_FULLGRAPH", "true")
    monkeypatch.setenv("FSDP_RESHARD_AFTER_FORWARD", "SHARD_GRAD_OP")
    monkeypatch.setenv("FSDP_OFFLOAD_PARAMS", "yes")
    assert Accelerator(gradient_accumulation_steps=2).gradient_accumulation_steps == 3
    assert utils.TorchDynamoPlugin().to_native() == {"backend": "eager", "fullgraph": True}
    assert utils.FullyShardedDataParallelPlugin().to_native() == FSDP(reshard_after_forward=False, offload=True)
    monkeypatch.setenv("FSDP_ACTIVATION_CHECKPOINTING", "true")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(
        ValueError, match=r"FullyShardedDataParallelPlugin\(activation_checkpointing=...\) has no count"
    ):
        Accelerator()
    monkeypatch.delenv("ACCELERATE_USE_FSDP")
    for engine in ("DEEPSPEED", "MEGATRON_LM", "PARALLELISM_CONFIG"):
        with monkeypatch.context() as patch:
            patch.setenv(f"ACCELERATE_USE_{engine}", "true")
            with pytest.raises(
                ValueError, match=f"ACCELERATE_USE_{engine} is set, but there is one axis, .*; unset it"
            ):
                Accelerator()
    Accelerator()


@pytest.mark.parametrize("name", ["ACCELERATE_TORCH_DEVICE", "ACCELERATE_USE_CPU", None])
def test_a_device_is_asked_for_by_the_environment_or_by_an_argument(
    name: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name is not None:
        monkeypatch.setenv(name, "cpu" if name.endswith("DEVICE") else "true")
    assert PartialState(cpu=name is None).device.type == "cpu"
    accelerator = Accelerator(cpu=name is None, mixed_precision="bf16", gradient_accumulation_steps=2)
    assert accelerator.device.type == "cpu"
    # The views find the Accelerator, whose world has that device.
    assert (AcceleratorState().mixed_precision, PartialState().world) == ("bf16", accelerator.world)
    model, loader = accelerator.prepare(nn.Linear(1, 1), DataLoader(rows(4), batch_size=2))
    found = []
    for (x,) in loader:
        accelerator.backward(model(x).sum())
        state = GradientState()
        found.append((state.sync_gradients, state.end_of_dataloader, state.in_dataloader, state.num_steps))
    assert found == [(False, False, True, 2), (True, True, True, 2)]


@ALL
@pytest.mark.parametrize(("splits", "steps"), [(False, 2), (True, 1)])
def test_a_schedule_counts_the_steps_of_one_device_and_waits_for_steps(mode: Mode, splits: bool, steps: int) -> None:
    def body() -> list[int]:
        accelerator = Accelerator(split_batches=splits, gradient_accumulation_steps=steps)
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
        model, optimizer, loader, scheduler = accelerator.prepare(
            model, optimizer, DataLoader(rows(16), batch_size=2), scheduler
        )
        assert isinstance(scheduler, AcceleratedScheduler)
        rates = []
        for (x,) in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(x).mean())
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            rates.append(round(1 / scheduler.get_last_lr()[0]) - 1)
        return rates

    rounds, each = (8, 1) if splits else (8 // mode.ranks, mode.ranks)
    assert mode.run(body) == [[(number // steps) * each for number in range(1, rounds + 1)]] * mode.ranks


def test_an_independent_scheduler_counts_each_call_and_is_saved(tmp_path: Path) -> None:
    def make() -> tuple[Accelerator, Any, Any]:
        accelerator = Accelerator(step_scheduler_with_optimizer=False, gradient_accumulation_steps=4)
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        return accelerator, *accelerator.prepare(model, optimizer, scheduler)[1:]

    accelerator, _, scheduler = make()
    for _ in range(3):
        scheduler.step()
    accelerator.save_state(str(tmp_path / "state"))
    other, _, restored = make()
    other.load_state(str(tmp_path / "state"))
    assert restored.last_epoch == 3
    assert restored.get_last_lr() == [0.125]


def test_wrappers_of_torch_are_unwrapped_as_well() -> None:
    accelerator, inner = Accelerator(), nn.Linear(1, 1)
    assert accelerator.unwrap_model(nn.DataParallel(inner)) is inner
    assert accelerator.unwrap_model(inner) is inner
    for wrapped in (inner, nn.DataParallel(inner), accelerator.prepare(inner)):
        compiled = cast(nn.Module, torch.compile(wrapped, backend="eager"))
        assert accelerator.unwrap_model(compiled, keep_torch_compile=False) is inner


def test_a_placement_of_single_objects_is_refused_with_a_way_out() -> None:
    accelerator = Accelerator()
    model, loader = accelerator.prepare(nn.Linear(1, 1), DataLoader(rows(2)), device_placement=[True, True])
    with pytest.raises(
        ValueError, match=r"\[True, False\] differs from Accelerator\(device_placement=True\); prepare what"
    ):
        accelerator.prepare(nn.Linear(1, 1), DataLoader(rows(2)), device_placement=[True, False])
    there = Accelerator(device_placement=False)  # an Accelerator of its own
    assert there.prepare_data_loader(DataLoader(rows(2)), device_placement=False) is not loader
    assert accelerator.prepare_model(model, True, evaluation_mode=True) is model


def test_automatic_mixed_precision_is_reported_and_not_switched_off() -> None:
    accelerator = Accelerator(mixed_precision="bf16")
    assert accelerator.native_amp
    with pytest.raises(ValueError, match=r"native_amp=False, .* mixed_precision='bf16'; pass mixed_precision='no'"):
        accelerator.native_amp = False
    plain = Accelerator(mixed_precision="no")
    plain.native_amp = False  # as scripts of diffusers do on MPS
    assert not plain.native_amp


def test_what_an_accelerator_has_been_given_is_found_on_it() -> None:
    handlers = [utils.AutocastKwargs(enabled=False), utils.ProfileKwargs()]
    accelerator = Accelerator(kwargs_handlers=handlers, rng_types=["generator"], log_with=[])
    assert [accelerator.autocast_handler, accelerator.profile_handler] == handlers
    assert accelerator.ddp_handler is accelerator.parallelism_config is accelerator.deepspeed_plugin is None
    assert (accelerator.rng_types, accelerator.log_with, accelerator.device_placement) == (["generator"], [], True)
    assert handlers[0].to_kwargs() == {"enabled": False}
    absent = {"tensor_parallel_rank": "one axis", "deepspeed_engine_wrapped": "DeepSpeed, Megatron"}
    for name, words in {**absent, "step": "accelerator.sync_gradients says"}.items():
        with pytest.raises(AttributeError, match=f"Accelerator.{name} is deliberately not supported: .*{words}"):
            getattr(accelerator, name)
    with pytest.raises(AttributeError, match="'Accelerator' object has no attribute 'prepair'"):
        accelerator.prepair  # noqa: B018


def test_handlers_and_plugins_reach_what_they_are_of() -> None:
    accelerator = Accelerator(
        mixed_precision="fp16",
        gradient_accumulation_plugin=utils.GradientAccumulationPlugin(num_steps=3),
        kwargs_handlers=[
            utils.GradScalerKwargs(init_scale=8.0, growth_interval=5),
            utils.DistributedDataParallelKwargs(comm_hook=utils.DDPCommunicationHookType.FP16),
            utils.InitProcessGroupKwargs(),
            utils.AutocastKwargs(enabled=False),
        ],
        dynamo_backend="NO",
    )
    assert accelerator.scaler is not None
    assert accelerator.scaler.get_scale() == 8
    assert accelerator.scaler.get_growth_interval() == 5
    assert accelerator.gradient_accumulation_steps == 3
    with accelerator.autocast():
        assert (torch.ones(2, 2, device=accelerator.device) @ torch.ones(2, 2, device=accelerator.device)).dtype == (
            torch.float32
        )
    with accelerator.autocast(utils.AutocastKwargs(cache_enabled=False)):
        assert torch.is_autocast_enabled(accelerator.device.type)
        assert not torch.is_autocast_cache_enabled()


@ALL
def test_reduce_is_the_sum_and_gather_takes_what_requires_grad(mode: Mode) -> None:
    def body() -> tuple[float, list[float]]:
        accelerator = Accelerator()
        weight = torch.full((2,), accelerator.process_index + 1.0, requires_grad=True, device=accelerator.device)
        gathered = accelerator.gather(weight * 2)
        if mode.ranks == 1:
            gathered.sum().backward()
            assert weight.grad is not None
            assert weight.grad.tolist() == [2, 2], "nothing has crossed ranks"
        else:
            with pytest.raises(RuntimeError, match=r"has come to what gather\(\) returned, which has no gradient"):
                gathered.sum().backward()
        large = torch.tensor(2**24 + 1, device=accelerator.device)  # which float32 does not have
        assert accelerator.reduce(large, "max").equal(large)
        assert accelerator.reduce(large, "none").equal(large)
        return accelerator.reduce(torch.ones(())).item(), gathered.tolist()

    assert mode.run(body) == [(mode.ranks, [2.0, 2.0, 4.0, 4.0][: 2 * mode.ranks])] * mode.ranks


@ALL
def test_rows_are_padded_by_the_names_of_accelerates_arguments(mode: Mode) -> None:
    def body() -> list[int]:
        accelerator = Accelerator()
        own = torch.ones(accelerator.process_index + 1, dtype=torch.int64, device=accelerator.device)
        padded = accelerator.pad_across_processes(tensor=own, dim=0, pad_index=7, pad_first=True)
        found: list[int] = padded.tolist()
        return found

    assert mode.run(body) == ([[1]] if mode.ranks == 1 else [[7, 1], [1, 1]])


@ALL
def test_gathering_rows_of_no_prepared_batch_takes_all_and_says_so_once(mode: Mode) -> None:
    def body() -> tuple[list[list[int]], int]:
        accelerator = Accelerator()
        accelerator.wait_for_everyone()
        is_main = accelerator.is_main_process  # of threads, who share a logger, one listens
        with hearing("unisono.compat.accelerate.accelerator" if is_main else "nobody") as lines:
            found = [accelerator.gather_for_metrics(torch.full((3,), accelerator.process_index)) for _ in range(2)]
        return [each.tolist() for each in found], len([each for each in lines if "takes all rows" in each])

    gathered = [0, 0, 0, 1, 1, 1][: 3 * mode.ranks]
    zero, *others = mode.run(body)
    assert zero == ([gathered] * 2, 1)
    assert others == [([gathered] * 2, 0)] * (mode.ranks - 1)


@ALL
def test_prepare_hands_back_what_it_does_not_know_and_what_it_has_prepared(mode: Mode) -> None:
    def body() -> None:
        accelerator = Accelerator(step_scheduler_with_optimizer=False)
        model, batches = nn.Linear(1, 1), [torch.ones(1)]
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        found = accelerator.prepare("text", model, batches, optimizer, None, scheduler)
        assert (found[0], found[2], found[4]) == ("text", batches, None)
        assert found[2] is batches
        assert found[3] is optimizer
        assert found[5] is scheduler
        assert accelerator.prepare(found[1]) is found[1]
        again = accelerator.prepare(*found)
        assert all(one is other for one, other in zip(found, again, strict=True))
        assert accelerator.unwrap_model(found[1]) is model
        model, optimizer = accelerator.free_memory(found[1], optimizer)
        assert (model, optimizer) == (None, None)

    mode.run(body)


@ALL
def test_split_batches_are_those_of_all_ranks(mode: Mode) -> None:
    def body() -> tuple[list[int], list[int], int]:
        config = utils.DataLoaderConfiguration(split_batches=True, dispatch_batches=True, use_stateful_dataloader=True)
        accelerator = Accelerator(dataloader_config=config)
        loader = accelerator.prepare(DataLoader(rows(10), batch_size=4))
        assert isinstance(loader, DeviceLoader)
        gathered = [accelerator.gather_for_metrics(x).flatten().int().tolist() for (x,) in loader]
        later = accelerator.skip_first_batches(loader, 2)
        left = [accelerator.gather_for_metrics(x).flatten().int().tolist() for (x,) in later]
        return [*chain(*gathered)], [*chain(*left)], len(later)

    assert mode.run(body) == [(list(range(10)), [8, 9], 1)] * mode.ranks


@SEVERAL
def test_the_order_follows_set_seed_and_data_seed_on_all_ranks(mode: Mode) -> None:
    def body() -> list[list[int]]:
        found = []
        for seed, data_seed in ((1, None), (1, None), (2, None), (2, 7), (3, 7)):
            utils.set_seed(seed)
            accelerator = Accelerator(dataloader_config=utils.DataLoaderConfiguration(data_seed=data_seed))
            loader = accelerator.prepare(DataLoader(rows(12), batch_size=3, shuffle=True))
            batches = [accelerator.gather(x) for (x,) in loader]
            found.append(torch.cat(batches).flatten().int().tolist())
        return found

    for first, again, other, data, data_again in mode.run(body):
        assert first == again != other != data == data_again
        assert sorted(first) == list(range(12))


def test_an_fsdp_plugin_shards() -> None:
    def body() -> tuple[Any, ...]:
        accelerator = Accelerator(fsdp_plugin=utils.FullyShardedDataParallelPlugin())
        model = accelerator.prepare(nn.Linear(2, 2))
        state = accelerator.get_state_dict(model)
        # As save_pretrained(state_dict=..., is_main_process=...) reads it on every rank.
        return accelerator.distributed_type, accelerator.is_fsdp2, len({**state}), "bias" in state

    assert PROCESSES_2.run(body) == [(DistributedType.FSDP, True, 2, True), (DistributedType.FSDP, True, 0, False)]


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({}, FSDP()),
        ({"reshard_after_forward": False}, FSDP(reshard_after_forward=False)),
        (
            {"mixed_precision_policy": MixedPrecisionPolicy(output_dtype=torch.float32, cast_forward_inputs=False)},
            FSDP(output_dtype=torch.float32, cast_forward_inputs=False),
        ),
        ({"mixed_precision_policy": MixedPrecision(torch.bfloat16)}, FSDP(param_dtype=torch.bfloat16)),
        ({"sharding_strategy": ShardingStrategy.FULL_SHARD}, FSDP()),
    ],
    ids=str,
)
def test_fields_of_an_fsdp_plugin_have_their_counterpart(fields: dict[str, Any], options: FSDP) -> None:
    assert utils.FullyShardedDataParallelPlugin(**fields).to_native() == options


@pytest.mark.parametrize("mode", fitting(THREADS_2), ids=str)
def test_local_sgd_averages_what_each_rank_has_made_of_its_own_batches(mode: Mode) -> None:
    data = torch.arange(1.0, 17.0).reshape(16, 1) / 8

    def body() -> tuple[list[float], bool]:
        accelerator = Accelerator()
        model = nn.Linear(1, 1, bias=False)
        nn.init.ones_(model.weight)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(TensorDataset(data), 2))
        with LocalSGD(accelerator, model, local_sgd_steps=2) as local_sgd:
            for (x,) in loader:
                optimizer.zero_grad()
                accelerator.backward(F.mse_loss(model(x), -x))
                optimizer.step()
                local_sgd.step()
        return model.weight.flatten().tolist(), local_sgd.enabled

    assert mode.run(body) == [([pytest.approx(local_twin(data))], True)] * 2


def local_twin(data: torch.Tensor) -> float:
    """Two models of plain torch, side by side, whose weights are averaged at every second step."""
    models = [nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)]
    for model in models:
        nn.init.ones_(model.weight)
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.1) for model in models]
    parts = [torch.cat([data[start : start + 2] for start in range(2 * rank, 16, 4)]) for rank in range(2)]
    for step, start in enumerate(range(0, 8, 2), 1):
        for model, optimizer, part in zip(models, optimizers, parts, strict=True):
            optimizer.zero_grad()
            x = part[start : start + 2]
            F.mse_loss(model(x), -x).backward()
            optimizer.step()
        if step % 2 == 0:
            mean = sum(model.weight.detach() for model in models) / 2
            for model in models:
                model.weight.data.copy_(mean)
    return float(models[0].weight.detach() + models[1].weight.detach()) / 2


def test_the_gradient_state_is_that_of_the_last_accelerator() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model, loader = accelerator.prepare(nn.Linear(1, 1), DataLoader(rows(6), batch_size=2))
    found = []
    assert not accelerator.gradient_state.in_dataloader
    for (x,) in loader:
        accelerator.backward(model(x).sum())
        state = GradientState()
        found.append((state.sync_gradients, state.end_of_dataloader, state.in_dataloader, state.num_steps))
    assert found == [(False, False, True, 2), (True, False, True, 2), (True, True, True, 2)]
    with pytest.raises(AttributeError, match="active_dataloader is deliberately not supported: a loader's own loop"):
        accelerator.gradient_state.active_dataloader  # noqa: B018


@SEVERAL
def test_a_profile_is_exported_by_process(mode: Mode, tmp_path: Path) -> None:
    def body() -> bool:
        accelerator = Accelerator(kwargs_handlers=[utils.ProfileKwargs(output_trace_dir=str(tmp_path / "traces"))])
        with accelerator.profile() as profiler:
            torch.ones(3) + 1
        return "aten::add" in profiler.key_averages().table()

    assert mode.run(body) == [True] * mode.ranks
    count = 2 if mode.name == "processes" else 1
    assert sorted(each.name for each in tmp_path.rglob("*.json")) == ["profile_0.json", "profile_1.json"][:count]


@pytest.mark.parametrize(("mode", "stateful"), [*zip(fitting(SOLO, THREADS_2), (True, False), strict=False)], ids=str)
def test_a_script_goes_on_from_its_state_and_skips_what_was_seen(mode: Mode, stateful: bool, tmp_path: Path) -> None:
    def train(stop: int | None) -> tuple[list[float], list[str]]:
        configuration = utils.ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True, total_limit=1)
        loading = utils.DataLoaderConfiguration(use_stateful_dataloader=stateful)
        accelerator = Accelerator(project_config=configuration, dataloader_config=loading)
        model = nn.Linear(1, 1)
        data = DataLoader(TensorDataset(torch.arange(24.0)[:, None]), 12 // accelerator.num_processes, shuffle=True)
        model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.0), data)
        seen, batches = [], loader
        if stop is None:
            accelerator.load_state()
            batches = loader if stateful else accelerator.skip_first_batches(loader, 1)
        for (values,) in batches:
            model(values).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            seen += accelerator.gather(values).flatten().tolist()
            accelerator.save_state("not looked at")
            if stop:
                break
        return seen, sorted(each.name for each in (tmp_path / "checkpoints").iterdir())

    seen, _ = mode.run(lambda: train(1))[0]
    rest, names = mode.run(lambda: train(None))[0]
    assert sorted(seen + rest) == list(range(24))
    assert names == ["checkpoint_1", "latest"]


def digest_on_virtual_ranks() -> str:
    utils.set_seed(3)
    accelerator = Accelerator(virtual_ranks=4)
    inputs = torch.randn(48, 3)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), 4, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for found, wanted in loader:
        with accelerator.accumulate(model):
            accelerator.backward(F.mse_loss(model(found), wanted))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return accelerator.digest()


def test_virtual_ranks_have_the_same_bits_on_one_and_two_ranks() -> None:
    assert len({*SOLO.run(digest_on_virtual_ranks), *PROCESSES_2.run(digest_on_virtual_ranks)}) == 1


def test_snapshots_that_the_launcher_asks_for_need_loaders_that_continue() -> None:
    def body() -> None:
        current_world().state.snapshot_every = 1  # as `unisono run --snapshot-every 1` does
        Accelerator(dataloader_config=utils.DataLoaderConfiguration(use_stateful_dataloader=True))
        Accelerator()

    assert all("use_stateful_dataloader=True" in each for each in PROCESSES_2.told(body, ValueError))
