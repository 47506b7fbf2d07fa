"""`optimizer_step` and its kin: the mean over the replicas, and equal weights on all."""

from __future__ import annotations

import pytest
import torch
from families import mine
from torch import nn

import unisono.compat.torch_xla.core.xla_model as xm


def linear():
    torch.manual_seed(0)
    return nn.Linear(2, 1, bias=False).to(xm.xla_device())


def own_step(step):
    """One step of SGD with rate 1 on the replica's own sample (rank + 1, 1): how far the weight moved."""
    model = linear()
    before = model.weight.detach().cpu().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(mine([[xm.get_ordinal() + 1.0, 1.0]])).sum().backward()
    step(optimizer)
    return (before - model.weight.detach().cpu()).round(decimals=4).tolist()


def mean_of(ranks):
    return round(sum(rank + 1.0 for rank in ranks) / len(ranks), 4)


def test_the_step_takes_the_mean_of_the_gradients(way):
    expected = [[mean_of(range(way.ranks)), 1.0]]
    assert way.run(lambda: own_step(xm.optimizer_step)) == [expected] * way.ranks


def test_reduced_gradients_can_be_clipped_before_a_plain_step(way):
    def step(optimizer):
        xm.reduce_gradients(optimizer)
        torch.nn.utils.clip_grad_value_(optimizer.param_groups[0]["params"], 0.5)
        optimizer.step()

    assert way.run(lambda: own_step(step)) == [[[0.5, 0.5]]] * way.ranks


def test_a_barrier_ends_the_step_and_runs_its_closures(way):
    def step(optimizer):
        heard = []
        xm.add_step_closure(heard.append, args=("closure",))
        xm.optimizer_step(optimizer)
        assert heard == []
        xm.optimizer_step(optimizer, barrier=True)
        assert heard == ["closure"]

    way.run(lambda: own_step(step))


def test_a_closure_added_by_a_closure_waits_for_the_next_step():
    heard = []

    def first():
        heard.append("first")
        xm.add_step_closure(heard.append, args=("second",))

    xm.add_step_closure(first)
    xm.mark_step()
    assert heard == ["first"]
    xm.mark_step()
    xm.mark_step()
    assert heard == ["first", "second"]


def test_groups_of_gradients_are_refused():
    optimizer = torch.optim.SGD(linear().parameters(), lr=1.0)
    for step in (xm.optimizer_step, xm.reduce_gradients):
        with pytest.raises(ValueError, match=r"groups=\[\[0\]\]: gradients are those of all replicas"):
            step(optimizer, groups=[[0]])
