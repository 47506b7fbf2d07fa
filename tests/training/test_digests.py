"""Digests: every bit and its place counts; the record of a run holds them, the same for any number of ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from modes import by_value
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from unisono import Accelerator, Output, spawn
from unisono.training import digests
from unisono.training.digests import digest_of


def test_a_swap_and_each_bit_changes_the_digest() -> None:
    plain, few = torch.randn(101), torch.tensor([1.0, 2.0, 3.0, 4.0])
    changed = [few, few.flip(0), plain, *(few * (1 - 2 * torch.eye(4)[place]) for place in range(4))]
    for place in (0, 1, 57, 100):
        swapped, negative, near = plain.clone(), plain.clone(), plain.clone()
        swapped[[place, 3]] = plain[[3, place]]
        negative[place] = -plain[place]
        near[place] = torch.nextafter(plain[place], torch.tensor(9.0))
        changed += [swapped, negative, near]
    assert len({int(digest_of(each)) for each in changed}) == len(changed) == 7 + 3 * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.cfloat])
def test_it_is_of_the_values_wherever_they_lie(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "_CHUNK", 8)
    whole = torch.randint(0, 2, (3, 41)).to(dtype)
    expected = digest_of(whole)
    assert digest_of(whole.T.contiguous().T) == expected
    assert digest_of(torch.cat([whole.new_zeros(3), whole.reshape(-1)])[3:]) == expected
    assert digest_of(whole.flatten()[:0]) == 0
    assert digest_of(whole[0, 0]).dtype == torch.int64


def train(
    count: int | None = 4, every: int = 4, is_one: bool = False, state: tuple[str, int] | None = None, **options: Any
) -> None:
    """Two epochs of nine steps, with two optimizers: of a model each, or of parts of one. With a state: save it after
    so many steps, and end; or, with a negative number, go on from it."""
    directory, at = state or (None, 0)
    accelerator = Accelerator(seed=1, virtual_ranks=count, digest_every=every, project_dir=directory, **options)
    parts = [nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.3)), nn.Linear(8, 2)]
    optimizers = [torch.optim.SGD(each.parameters(), 0.1, momentum=0.9) for each in parts]
    rows = TensorDataset(torch.randn(72, 3), torch.randint(2, (72,)))
    models = [nn.Sequential(*parts)] if is_one else parts
    models, optimizers, loader = accelerator.prepare(models, optimizers, DataLoader(rows, batch_size=2, shuffle=True))
    if at < 0:
        accelerator.load_state()
    taken = 0
    for _ in range(loader.epoch, 2):
        for inputs, targets in loader:
            for model in models:
                inputs = model(inputs)
            accelerator.backward(nn.functional.cross_entropy(inputs, targets))
            for each in optimizers:
                each.step()
                each.zero_grad()
            taken += accelerator.sync_gradients
            if taken == at > 0:
                accelerator.save_state()
                return


def recorded(directory: Path, ranks: int, **options: Any) -> list[dict[str, Any]]:
    """The lines of the digests of such a run."""
    with by_value(train):
        spawn(lambda _: train(**options), nprocs=ranks, backend="cpu", output=Output(directory))
    path = directory / "latest" / "digests.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_any_number_of_ranks_records_the_same(tmp_path: Path) -> None:
    (first, *lines), *others = (recorded(tmp_path / str(ranks), ranks) for ranks in (1, 3))
    assert first["settings"] | {"virtual_ranks": 4, "seed": 1, "threads": 1} == first["settings"]
    assert [each for each, *_ in others] == [first | {"ranks": 3}]
    assert all(each[1:] == lines for each in others)
    steps = [(each["optimizer"], each["step"]) for each in lines if "step" in each]
    assert steps == [(optimizer, step) for step in (4, 8, 9, 12, 16, 18) for optimizer in (0, 1)]
    names, digests = lines[0], lines[1]
    assert names["gradients_of"] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert {"0.weight", "1.running_mean"} < {*names["weights_of"]}
    assert [len(digests[kind]) for kind in ("gradients", "weights")] == [4, 7]
    assert all(len(each) == 16 for each in digests["weights"])
    # They go on after a resume in mid-epoch, on another number of ranks.
    recorded(tmp_path / "before", 2, state=(str(tmp_path / "project"), 13))
    after = recorded(tmp_path / "after", 3, state=(str(tmp_path / "project"), -1))
    steps = [each for each in after if "step" in each]
    assert {each["step"] for each in steps} == {16, 18}
    assert all(each in lines for each in steps)


@pytest.mark.slow
def test_so_it_is_with_two_optimizers_of_one_model_and_with_shards(tmp_path: Path) -> None:
    (_, *lines), *others = (
        recorded(tmp_path / f"{ranks} {strategy}", ranks, is_one=True, strategy=strategy)
        for ranks, strategy in ((1, "ddp"), (3, "fsdp"))
    )
    assert all(each[1:] == lines for each in others)
    names = [(each["gradients_of"], each["weights_of"]) for each in lines if "step" not in each]
    assert [each for each, _ in names] == [["0.0.weight", "0.0.bias", "0.1.weight", "0.1.bias"], ["1.weight", "1.bias"]]
    assert all("0.1.running_var" in each for _, each in names)


def test_gradients_are_digested_before_they_are_clipped(tmp_path: Path) -> None:
    plain, clipped = (recorded(tmp_path / str(norm), 1, every=1, max_grad_norm=norm) for norm in (None, 0.01))
    (one, other) = (next(each for each in lines if "step" in each) for lines in (plain, clipped))
    assert one["gradients"] == other["gradients"]
    assert one["weights"] != other["weights"]


def test_there_are_none_without_virtual_ranks_or_if_none_are_wanted(tmp_path: Path) -> None:
    assert [each for each in recorded(tmp_path / "off", 1, every=0) if "step" in each] == []
    assert recorded(tmp_path / "without", 1, count=None) == []
    with pytest.raises(ValueError, match="digest_every=-1 is too small"):
        Accelerator(digest_every=-1)
