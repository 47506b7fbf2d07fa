"""torchmetrics: a prepared metric is that of all ranks, in every mode, with equal or different states."""

from __future__ import annotations

import pytest
import torch
from modes import PROCESSES_2, SOLO, THREADS_2, THREADS_3, Mode
from torch.utils.data import DataLoader, TensorDataset

from unisono import Accelerator, Virtual

torchmetrics = pytest.importorskip("torchmetrics")

MODES = pytest.mark.parametrize("mode", [SOLO, THREADS_3, PROCESSES_2], ids=str)


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(43, generator=generator, dtype=torch.float64)
    return TensorDataset(scores, (torch.rand(43, generator=generator) < scores).long())


def measured(witness_every: int | None) -> list[float]:
    accelerator = Accelerator(seed=0, virtual_ranks=Virtual(3, witness_every=witness_every))
    model, rows = torch.nn.Linear(3, 1), TensorDataset(torch.randn(36, 3))
    optimizer, metric = torch.optim.SGD(model.parameters(), 0.1), torchmetrics.CatMetric()
    model, optimizer, metric, loader = accelerator.prepare(model, optimizer, metric, DataLoader(rows, 3))
    for (inputs,) in loader:
        accelerator.backward(model(inputs).mean())
        metric.update(inputs[:, 0].detach())
        metric.update(inputs[:0, 0])
        optimizer.step()
        optimizer.zero_grad()
    return sorted(metric.compute().tolist())


@MODES
def test_a_metric_is_that_of_all_samples_once_on_each_rank(mode: Mode) -> None:
    def body() -> list[float]:
        accelerator = Accelerator()
        auroc, mean, loader = accelerator.prepare(
            torchmetrics.classification.BinaryAUROC(), torchmetrics.SumMetric(), DataLoader(data(), batch_size=4)
        )
        for scores, labels in loader:
            count = loader.valid_samples
            if count:
                auroc.update(scores[:count], labels[:count])
                mean.update(scores[:count])
        return [float(auroc.compute()), float(mean.compute())]

    scores, labels = data().tensors
    auroc = torchmetrics.classification.BinaryAUROC()
    auroc.update(scores, labels)
    expected = [float(auroc.compute()), float(scores.sum())]
    assert mode.run(body) == [pytest.approx(expected, rel=1e-6)] * mode.ranks


@pytest.mark.parametrize("mode", [SOLO, THREADS_3], ids=str)
def test_metrics_of_a_collection_gather_states_of_different_sizes(mode: Mode) -> None:
    def body() -> list[float]:
        accelerator = Accelerator()
        collection = accelerator.prepare(torchmetrics.MetricCollection({"rows": torchmetrics.CatMetric()}))
        if accelerator.process_index or mode.ranks == 1:  # rank zero has nothing
            collection.update(torch.arange(accelerator.process_index + 1.0))
        return sorted(collection.compute()["rows"].flatten().tolist())

    expected = sorted(float(each) for rank in range(mode.ranks > 1, mode.ranks) for each in range(rank + 1))
    assert mode.run(body) == [expected] * mode.ranks


@pytest.mark.parametrize(("mode", "call"), [(SOLO, "update"), (THREADS_2, "forward"), (THREADS_2, "update")], ids=str)
def test_a_metric_refuses_gathered_rows_unless_it_does_not_gather_itself(mode: Mode, call: str) -> None:
    def body() -> float:
        accelerator = Accelerator()
        loader, own, apart = accelerator.prepare(
            DataLoader(data(), 4), torchmetrics.SumMetric(), torchmetrics.SumMetric(sync_on_compute=False)
        )
        for scores, _ in loader:
            gathered = accelerator.gather_for_metrics(scores)
            if mode.ranks > 1:
                with pytest.raises(ValueError, match=f"SumMetric is updated .* each sample would count {mode.ranks} t"):
                    getattr(own, call)(gathered[:3])
            getattr(apart, call)(gathered)
        return float(apart.compute())

    expected = float(data().tensors[0].sum())
    assert mode.run(body) == [pytest.approx(expected, rel=1e-6)] * mode.ranks


@pytest.mark.parametrize("mode", [SOLO, pytest.param(PROCESSES_2, marks=pytest.mark.slow)], ids=str)
def test_batches_of_virtual_ranks_that_count_nowhere_update_nothing(mode: Mode) -> None:
    def body() -> list[list[float]]:
        return [measured(witness_every) for witness_every in (None, 1)]

    alone = measured(None)
    assert len(alone) == len({*alone}) == 36
    assert mode.run(body) == [[alone, alone]] * mode.ranks  # a rank gets batches again
