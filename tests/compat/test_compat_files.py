"""Saving by the names of PyTorch/XLA: by the master, in main memory, with every structure as it was."""

from __future__ import annotations

import io
from collections import OrderedDict, namedtuple

import pytest
import torch
from families import RANKS, mine
from torch import nn

import unisono.compat.torch_xla.core.xla_model as xm
import unisono.compat.torch_xla.utils.serialization as xser

Pair = namedtuple("Pair", "a b")


def tied():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module = module.to(xm.xla_device())
    module[1].weight = module[0].weight
    return module


def test_all_call_the_master_writes_and_the_file_is_there_when_they_return(way, tmp_path):
    path = tmp_path / "state.pt"

    def save():
        state = {"value": mine([xm.get_ordinal() + 1.0]), "deep": [(mine([2]), "name")]}
        xm.save(state, str(path))
        return torch.load(path, weights_only=True)

    for found in way.run(save):
        assert found["value"].tolist() == [1.0]
        assert found["value"].is_cpu
        assert type(found["deep"][0]) is tuple
    assert way.ranks in (1, RANKS)


def test_every_rank_may_write_a_file_of_its_own(several, tmp_path):
    def save():
        rank = xm.get_ordinal()
        xm.save(mine([rank]), tmp_path / f"{rank}.pt", master_only=False)

    several.run(save)
    assert [torch.load(tmp_path / f"{rank}.pt").tolist() for rank in range(RANKS)] == [[rank] for rank in range(RANKS)]


def test_a_state_dict_keeps_its_type_its_order_and_its_ties():
    module, file = tied(), io.BytesIO()
    xm.save({"model": module.state_dict(), "pair": Pair(mine([1.0]), None), "step": 3}, file)
    file.seek(0)
    found = torch.load(file, weights_only=False)
    assert type(found["model"]) is OrderedDict
    assert list(found["model"]) == list(module.state_dict())
    assert found["model"]._metadata == module.state_dict()._metadata
    assert type(found["pair"]) is Pair
    assert all(value.is_cpu for value in found["model"].values())
    twin = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    twin.load_state_dict(found["model"])
    assert torch.equal(twin[1].weight, module[0].weight.cpu())


def test_parameters_and_modules_arrive_in_main_memory_as_what_they_are():
    file = io.BytesIO()
    xm.save([nn.Parameter(mine([1.0])), nn.Linear(2, 2).to(xm.xla_device())], file)
    file.seek(0)
    parameter, module = torch.load(file, weights_only=False)
    assert isinstance(parameter, nn.Parameter)
    assert parameter.is_cpu
    assert module.weight.is_cpu


def test_what_is_saved_is_not_moved():
    value = mine([1.0])
    xm.save({"value": value}, io.BytesIO())
    assert value.device.type == xm.xla_device().type


def test_a_structure_is_read_back_whole(way, tmp_path):
    path = tmp_path / "large.pt"

    def save():
        shared = mine([1.0, 2.0])
        xser.save({"a": shared, "b": [shared, (mine([3]), "name")]}, str(path))
        found = xser.load(str(path))
        return found["a"].tolist(), found["a"] is found["b"][0], found["b"][1][0].tolist(), found["b"][1][1]

    assert way.run(save) == [([1.0, 2.0], True, [3], "name")] * way.ranks


def test_a_file_that_is_not_there_is_an_error_of_the_system():
    with pytest.raises(FileNotFoundError):
        xser.load("/nowhere/file.pt")
