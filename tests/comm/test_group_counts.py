"""Collectives are counted whoever begins them, by the backends of groups, which nothing of a script's can take away."""

from __future__ import annotations

import weakref

import pytest
import torch
import torch.distributed as dist
from modes import default_group
from torch.nn.parallel import DistributedDataParallel

from unisono.comm.group_counts import count_group, forget_group, num_begun
from unisono.comm.shared_memory import process_group


@pytest.fixture(params=["gloo", "shm"], autouse=True)
def group(request, tmp_path):
    process_group.register()
    with default_group(tmp_path / "store", request.param):
        count_group(dist.group.WORLD)
        yield
        forget_group()


def test_what_torchs_reducer_begins_counts():
    model = DistributedDataParallel(torch.nn.Linear(1, 1))
    loss = model(torch.ones(1))
    before = num_begun()
    loss.backward()
    assert num_begun("cpu") > before


def test_a_subgroup_counts_and_a_forgotten_one_has_counted():
    before = num_begun()
    part = dist.new_group([0])
    count_group(part)
    assert num_begun() > before
    at_first = num_begun()
    dist.all_reduce(torch.ones(1), group=part)
    assert (after := num_begun()) > at_first
    forget_group(part)
    dist.destroy_process_group(part)
    assert num_begun() == after


def test_a_count_keeps_no_group_alive():
    alive = weakref.ref(dist.new_group([0]))
    count_group(alive())
    dist.destroy_process_group(alive())
    assert alive() is None
    assert num_begun() > 0


def test_a_group_without_this_rank_has_nothing_to_count():
    count_group(dist.GroupMember.NON_GROUP_MEMBER)
    forget_group(dist.GroupMember.NON_GROUP_MEMBER)
