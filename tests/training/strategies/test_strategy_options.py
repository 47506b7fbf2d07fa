"""The options of the strategies: each does what it says, or is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
import torch.testing._internal.distributed.fake_pg  # makes the backend "fake" known
from modes import PROCESSES_2, THREADS_2, Mode
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from twin import Plain, State, assert_all_are, loader_of, seeded, sgd, steps, straight, train

from unisono import Accelerator
from unisono.strategies import DDP, FSDP, ZeRO1
from unisono.training.strategies.sharded import shard
from unisono.world import World, solo_world


def wide() -> nn.Module:
    return nn.Sequential(*(seeded(nn.Linear(5, 5).double(), number) for number in range(4)), nn.Linear(5, 2).double())


def test_what_changes_the_way_only_changes_no_weight() -> None:
    def learn(accelerator: Any, network: Any, batch: Any) -> None:
        outputs = network(batch[0])
        accelerator.backward(F.mse_loss(outputs, batch[1].to(outputs.dtype)))
        with torch.no_grad():  # which leaves no parameters of before the step
            network(batch[0])

    ways = [
        DDP(bucket_cap_mb=1e-4),
        ZeRO1(bucket_cap_mb=1e-4),
        FSDP(units=(nn.Linear,), reshard_after_forward=False),
        FSDP(units=()),
        FSDP(offload=True),
        FSDP(reduce_dtype=torch.float64),
    ]
    lines = steps(learn, lambda: seeded(wide()))
    found = PROCESSES_2.run(lambda: [lines(Accelerator(strategy=each), loader_of(23, 3)) for each in ways])
    for way, *states in zip(ways, *found, strict=True):
        print(way)
        assert_all_are(states, lines(Plain(), loader_of(23, 6)))


def test_gradients_travel_in_pieces_of_the_size_that_was_asked_for() -> None:
    def body(size_mb: float) -> int:
        accelerator = Accelerator(strategy=DDP(gradient_as_bucket_view=True, bucket_cap_mb=size_mb))
        network = seeded(wide())
        network, _ = accelerator.prepare(network, sgd(network.parameters()))
        accelerator.backward(network(torch.ones(2, 5, dtype=torch.float64)).sum())
        return len({each.grad.untyped_storage().data_ptr() for each in network.parameters()})

    assert PROCESSES_2.run(lambda: [body(25), body(1e-4)]) == [[1, 5]] * 2  # a layer has 240 bytes, the last one 96


def clipped_by_one(size: int) -> State:
    def clipped(plain: Plain, network: nn.Module, batch: Any) -> None:
        straight(plain, network, batch)
        plain.clip_grad_norm_(network.parameters(), 0.1)

    return train(Plain(), loader_of(22, size), clipped, seeded(wide()))


def test_gradients_in_buckets_are_those_of_the_step_and_stay_there() -> None:
    accumulate = 2

    def body() -> tuple[State, list[int]]:
        accelerator = Accelerator(
            strategy=DDP(gradient_as_bucket_view=True), gradient_accumulation_steps=accumulate, max_grad_norm=0.1
        )
        places: list[int] = []

        def learn(accelerator: Any, network: Any, batch: Any) -> None:
            straight(accelerator, network, batch)
            if accelerator.sync_gradients:
                places.append(len({each.grad.untyped_storage().data_ptr() for each in network.parameters()}))

        return train(accelerator, loader_of(22, 3), learn, seeded(wide())), places

    ranks = PROCESSES_2.run(body)
    assert all(set(places) == {1} for _, places in ranks)
    assert_all_are([state for state, _ in ranks], clipped_by_one(6 * accumulate))


@pytest.mark.slow
def test_replica_groups_train_as_one_and_clip_by_one_norm() -> None:
    def body() -> tuple[State, State, tuple[int, ...]]:
        chosen = FSDP(units=(nn.Linear,), replicas=2)
        accelerator = Accelerator(strategy=chosen, max_grad_norm=0.1)
        models: list[Any] = []
        learn = lambda *given: (models.append(given[1]), straight(*given))  # noqa: E731
        state = train(accelerator, loader_of(22, 3), learn, seeded(wide()))
        accelerator.load_state_dict(models[0], accelerator.state_dict(models[0]))
        return state, accelerator.state_dict(models[0]), tuple(models[0].module[0].weight.to_local().shape)

    ranks = Mode("processes", 4).run(body)
    assert_all_are([ranks[0][0], ranks[0][1]], clipped_by_one(12))
    assert [shape for _, _, shape in ranks] == [(3, 5), (2, 5)] * 2


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        (FSDP(replicas=3), "replicas=3.* cannot divide the 2 ranks into equal groups of several"),
        (FSDP(replicas=2), "use strategy='ddp'"),
    ],
    ids=str,
)
def test_groups_that_the_ranks_do_not_make_are_refused_on_all_of_them(chosen: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        PROCESSES_2.run(lambda: Accelerator(strategy=chosen).prepare(wide()))


@pytest.fixture
def world_of_four() -> Iterator[World]:
    """Rank zero of four, in a group that sends nothing."""
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=4)
    yield dataclasses.replace(solo_world(), world_size=4)
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("kept", "of_unit", "of_model"),
    [(None, 2, 8), (True, 2, 2), (False, 8, 8), (2, 4, 4)],  # of eight rows
)
def test_a_unit_gives_back_after_its_forward_pass_what_it_should(
    world_of_four: World, kept: Any, of_unit: int, of_model: int
) -> None:
    chosen = FSDP(units=(nn.Sequential,), reshard_after_forward=kept)
    network: Any = shard(nn.Sequential(nn.Sequential(nn.Linear(8, 8)), nn.Linear(8, 8)), world_of_four, chosen)
    network(torch.ones(2, 8))
    weights = [getattr(each.weight, "_local_tensor", each.weight) for each in (network[0][0], network[1])]
    assert [len(each) for each in weights] == [of_unit, of_model]


def test_units_of_fsdp_may_compute_in_a_narrower_type() -> None:
    def body() -> tuple[list[torch.dtype], State]:
        types = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32, "output_dtype": torch.float64}
        seen: list[torch.dtype] = []
        for casts in (False, True):
            accelerator = Accelerator(strategy=FSDP(cast_forward_inputs=casts, **types))
            network = seeded(wide()).float()
            network[0].register_forward_hook(lambda _, inputs, output: seen.append(output.dtype))
            network, optimizer = accelerator.prepare(network, sgd(network.parameters()))
            if not casts:
                with pytest.raises(RuntimeError, match="same dtype"):
                    network(torch.ones(2, 5))
            outputs = network(torch.ones(2, 5, dtype=torch.float32 if casts else torch.bfloat16))
            seen.append(outputs.dtype)
            outputs.sum().backward()
            optimizer.step()
        return seen, accelerator.state_dict(network)

    (types, state), _ = PROCESSES_2.run(body)
    assert types == [torch.bfloat16, torch.float64] * 2
    assert {each.dtype for each in state.values()} == {torch.float32}


@pytest.mark.parametrize(("mode", "strategies"), [(THREADS_2, [DDP]), (PROCESSES_2, [DDP, ZeRO1, FSDP])], ids=str)
def test_running_statistics_stay_each_ranks_own_where_they_are_not_shared(mode: Mode, strategies: list[Any]) -> None:
    def body(strategy: Any) -> torch.Tensor:
        accelerator = Accelerator(strategy=strategy(broadcast_buffers=False))
        network = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3)).double()
        network, optimizer, loader = accelerator.prepare(network, sgd(network.parameters()), loader_of(8, 2))
        for inputs, _, _ in loader:
            accelerator.backward(network(inputs).sum())
            optimizer.step()
        network.eval()
        network(torch.zeros(1, 5, dtype=torch.float64))
        return accelerator.unwrap_model(network)[1].running_mean.clone()

    for one, other in zip(*mode.run(lambda: [body(each) for each in strategies]), strict=True):
        assert not torch.equal(one, other)


BAD: list[tuple[Any, dict[str, Any], str]] = [
    (DDP, {"bucket_cap_mb": 0}, "bucket_cap_mb=0 is not a size; pass a positive number of MiB"),
    (DDP, {"comm_hook": "fp4"}, "comm_hook='fp4' does not exist; pass None, 'fp16', 'bf16', or a function"),
    (FSDP, {"replicas": 0}, "replicas=0 is too small; pass a number of groups"),
    (FSDP, {"replicas": True}, "replicas=True is of type bool"),
    (FSDP, {"reshard_after_forward": "yes"}, "reshard_after_forward='yes' is of type str"),
    (Accelerator, {"scaler_options": {"init_scale": 2.0}}, "are for mixed_precision='fp16', and it is 'no'"),
    (Accelerator, {"mixed_precision": "fp16", "scaler_options": {"scale": 2.0}}, "have no 'scale'; torch's GradScaler"),
]


@pytest.mark.parametrize(("make", "options", "words"), BAD, ids=[str(options) for _, options, _ in BAD])
def test_bad_options_are_refused(make: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        make(**options)


class Gathers(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket.__name__ == "all_gather_copy_in"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("ahead", "counts"), [(None, [1, 2, 3, 4]), (1, [2, 3, 4, 4]), (2, [3, 4, 4, 4])])
def test_so_many_units_are_gathered_ahead(world_of_four: World, ahead: int | None, counts: list[int]) -> None:
    layers = (nn.Linear(8, 8) for _ in range(4))
    network: Any = shard(nn.Sequential(*layers), world_of_four, FSDP(units=(nn.Linear,), prefetch=ahead))
    seen: list[int] = []
    with Gathers() as gathers:
        for each in network:
            each.register_forward_hook(lambda *_: seen.append(gathers.count))
        outputs = network(torch.ones(2, 8))
        assert seen == counts
        outputs.sum().backward()
    assert gathers.count == 8  # each once more
