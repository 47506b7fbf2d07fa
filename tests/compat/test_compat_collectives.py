"""Collectives and meetings by the names of PyTorch/XLA: the same alone, in threads and in workers."""

from __future__ import annotations

import functools
import operator

import pytest
import torch
from families import RANKS, THREADS, mine

import unisono.compat.torch_xla.core.functions as xf
import unisono.compat.torch_xla.core.xla_model as xm
from unisono.errors import CollectiveMismatchError

needs_two = pytest.mark.skipif(RANKS < 2, reason="there is one device")
PAIRS = [[rank, rank + 1] for rank in range(0, RANKS, 2)] if RANKS % 2 == 0 else [[0], list(range(1, RANKS))]
REVERSED = [group[::-1] for group in PAIRS]


def group_of(rank):
    return next(group for group in PAIRS if rank in group)


LAWS = {}


def law(function):
    """Which gives, for a number of ranks, the part of a rank and what all ranks return."""
    LAWS[function.__name__] = function
    return function


def test_each_way_keeps_each_law(way):
    def keep():
        return {name: each(way.ranks)[0]() for name, each in LAWS.items()}

    found = way.run(keep)
    for name, each in LAWS.items():
        assert [results[name] for results in found] == each(way.ranks)[1], name


@law
def a_tensor_gives_a_new_one_and_a_list_is_reduced_in_place(size):
    def reduce():
        own = mine([1.0, 2.0]) * (xm.get_ordinal() + 1)
        result = xm.all_reduce(xm.REDUCE_SUM, own, scale=0.5)
        assert result is not own
        listed = [own.clone(), mine([3.0])]
        assert xm.all_reduce(xm.REDUCE_SUM, listed) is listed
        assert own.tolist() == [xm.get_ordinal() + 1.0, 2.0 * (xm.get_ordinal() + 1)]
        return result.tolist(), [each.tolist() for each in listed]

    total = sum(range(1, size + 1))
    expected = ([total / 2, float(total)], [[float(total), 2.0 * total], [3.0 * size]])
    return reduce, [expected] * size


@law
def every_kind_of_reduction(size):
    def reduce():
        own = mine([1 + xm.get_ordinal(), 6])
        found = {kind: xm.all_reduce(kind, own).tolist() for kind in ("sum", "mul", "and", "or", "min", "max")}
        has = mine([xm.get_ordinal() == 0, True])
        found |= {f"bool {kind}": xm.all_reduce(kind, has).tolist() for kind in (xm.REDUCE_AND, xm.REDUCE_OR)}
        return found

    ranks = range(1, size + 1)
    folds = {"sum": operator.add, "mul": operator.mul, "and": operator.and_, "or": operator.or_, "min": min, "max": max}
    expected = {
        kind: [functools.reduce(fold, ranks), functools.reduce(fold, [6] * size)] for kind, fold in folds.items()
    }
    expected |= {"bool and": [size == 1, True], "bool or": [True, True]}
    return reduce, [expected] * size


def test_groups_reduce_gather_and_meet_among_themselves(several):
    def reduce():
        rank = xm.get_ordinal()
        group = group_of(rank)
        met = xm.rendezvous(f"group of {group[0]}", bytes([rank]), replicas=group[::-1])
        assert met == [bytes([member]) for member in group]
        summed = xm.all_reduce(xm.REDUCE_SUM, mine([float(rank)]), groups=PAIRS).tolist()
        gathered = xm.all_gather(mine([[rank]]), dim=1, groups=REVERSED).tolist()
        return summed, gathered

    expected = [([float(sum(group_of(rank)))], [group_of(rank)[::-1]]) for rank in range(RANKS)]
    assert several.run(reduce) == expected


@law
def lists_are_gathered_and_scattered_one_by_one_into_what_is_given(size):
    def collect():
        rank, count = xm.get_ordinal(), size
        own = [mine([rank]), mine([[10 * rank]])]
        outputs = [torch.zeros_like(own[0]), mine([[0] * 3] * 4)]  # they take the results' shapes
        assert all(a is b for a, b in zip(xm.all_gather(own, output=outputs), outputs, strict=True))
        rows = mine([[float(rank + column) for column in range(2 * count)]])
        part = xm.reduce_scatter(xm.REDUCE_SUM, rows, 0.5, 1, count)
        assert xm.reduce_scatter_bucketized(xm.REDUCE_SUM, [rows], 0.5, -1, count)[0].equal(part)
        found = xm.all_gather_bucketized(own, bucket_cap_mb=0)
        assert [each.tolist() for each in found] == [each.tolist() for each in outputs]
        return [each.tolist() for each in outputs], part.tolist()

    ranks = range(size)
    gathered = [[*ranks], [[10 * rank] for rank in ranks]]
    totals = [(sum(ranks) + size * column) / 2 for column in range(2 * size)]
    expected = [(gathered, [totals[2 * rank : 2 * rank + 2]]) for rank in ranks]
    return collect, expected


@law
def a_compiled_function_may_call_collectives(size):
    def reduce():
        compiled = torch.compile(lambda own: xm.all_reduce(xm.REDUCE_SUM, own + 1) * 2, backend="eager")
        return compiled(mine([1.0])).tolist()

    return reduce, [[4.0 * size]] * size


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda x: xm.all_reduce("median", x), ValueError, "reduce_type='median' does not exist; choose one of sum"),
        (lambda x: xm.all_reduce("and", x), TypeError, "has no 'and'; convert"),
        (lambda x: xm.all_reduce("sum", x.long(), scale=0.5), TypeError, "scale=0.5 would round"),
        (lambda x: xm.all_reduce("sum", x, groups=[[7]]), ValueError, "must hold each of the ordinals 0 to 0 once"),
        (lambda x: xm.all_gather(x, groups=[0]), TypeError, "pass lists of ordinals"),
        (lambda x: xm.all_gather(3), TypeError, "value=3 is of type int; pass a tensor or a list"),
        (lambda x: xm.all_gather([mine([1])], output=[]), ValueError, "output has 0 tensors for 1"),
        (lambda x: xm.rendezvous("tag", 3), TypeError, "payload=3 is of type int; pass bytes, or use mesh_reduce"),
        (lambda x: xm.rendezvous("tag", replicas=[0, 4]), ValueError, "must name ordinals from 0 to 0, each once"),
    ],
)
def test_bad_reductions_and_meetings_are_told(call, error, words):
    with pytest.raises(error, match=words):
        call(mine([1.0]))


@law
def a_rendezvous_returns_payloads_by_ordinal_and_tags_can_be_reused(size):
    def meet():
        payload = f"from {xm.get_ordinal()}".encode()
        assert xm.rendezvous("empty") == [b""] * size
        return [xm.rendezvous("twice", payload) for _ in range(2)]

    everyone = [f"from {rank}".encode() for rank in range(size)]
    return meet, [[everyone, everyone]] * size


def test_a_master_may_do_something_before_the_others():
    done = []

    def download():
        if not xm.is_master_ordinal():
            xm.rendezvous("download_only_once")
        done.append(xm.get_ordinal())
        if xm.is_master_ordinal():
            xm.rendezvous("download_only_once")

    THREADS.run(download)
    assert done[0] == 0
    assert sorted(done) == list(range(RANKS))


@needs_two
def test_ranks_that_wait_for_different_things_are_told(several):
    def by_tag():
        with pytest.raises(CollectiveMismatchError, match=r"rank 0 waits in rendezvous 'of 0' .* but rank 1 in 'of 1'"):
            xm.rendezvous(f"of {min(xm.get_ordinal(), 1)}")
        with pytest.raises(CollectiveMismatchError, match="must name the same tag and replicas"):
            xm.rendezvous("same", replicas=[1] if xm.get_ordinal() == 1 else [])
        with pytest.raises(CollectiveMismatchError, match="must name the same tag"):
            xm.mesh_reduce(f"of {xm.get_ordinal()}", 1, sum)
        return True

    assert several.run(by_tag) == [True] * RANKS


@law
def mesh_reduce_calls_the_function_on_every_rank_with_all_values(size):
    def reduce():
        rank = xm.get_ordinal()
        value = xm.mesh_reduce("value", float(rank), lambda values: (values, max(values)))
        tensors = xm.mesh_reduce(
            "tensors", {"x": mine([rank, 1])}, lambda each: torch.stack([part["x"] for part in each])
        )
        assert tensors.is_cpu
        loss = (mine([2.0]).requires_grad_() * 3).sum()  # travels as a value, without its graph
        return value, tensors.tolist(), xm.mesh_reduce("loss", loss, lambda losses: sum(losses).item())

    ranks = [float(rank) for rank in range(size)]
    expected = ((ranks, ranks[-1]), [[rank, 1] for rank in range(size)], 6.0 * size)
    return reduce, [expected] * size


@law
def do_on_ordinals_runs_on_those_with_tensors_in_main_memory(size):
    def run():
        return xm.do_on_ordinals(lambda x, name: (x.is_cpu, x.tolist(), name), data=(mine([1.0]), "n"))

    return run, [(True, [1.0], "n")] + [None] * (size - 1)


@law
def gradients_go_through_collectives_to_each_ranks_own_part(size):
    def gradients():
        x = mine([xm.get_ordinal() + 1.0, 2.0]).requires_grad_()
        xf.all_reduce("sum", x, scale=0.5).sum().backward()
        found = {"sum": x.grad.tolist()}
        x = mine([[1.0], [2.0]]).requires_grad_()
        (xf.all_gather(x, dim=1) * mine([[10.0 * (1 + each) for each in range(size)]])).sum().backward()
        found["gather"] = x.grad.tolist()
        with pytest.raises(ValueError, match="reduce_type='max' does not exist; choose one of sum"):
            xf.all_reduce("max", x)
        return found

    expected = [{"sum": [0.5, 0.5], "gather": [[10.0 * (1 + rank)]] * 2} for rank in range(size)]
    return gradients, expected


def test_a_distributed_product_is_the_product_and_so_are_its_gradients(way):
    def multiply(split):
        torch.manual_seed(0)
        whole, x = torch.randn(3, 2 * way.ranks, requires_grad=True), torch.randn(way.ranks, 2 * way.ranks, 4)
        rank, device = xm.get_ordinal(), xm.xla_device()
        columns = slice(2 * rank, 2 * rank + 2)
        own = whole.detach()[:, columns].to(device).requires_grad_()
        result = xf.distributed_mm(own, x[rank].to(device), split=split)
        result.sum().backward()
        (whole @ x[rank]).sum().backward()
        torch.testing.assert_close(result.detach().cpu(), (whole @ x[rank]).detach(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(own.grad.cpu(), whole.grad[:, columns], rtol=1e-4, atol=1e-4)

    way.run(lambda: [multiply(split) for split in (1, 2)])


def test_the_masters_weights_reach_all(several):
    def broadcast():
        torch.manual_seed(xm.get_ordinal())
        model = torch.nn.Linear(2, 2).to(xm.xla_device())
        xm.broadcast_master_param(model)
        return model.weight.tolist()

    assert len({str(weight) for weight in several.run(broadcast)}) == 1
