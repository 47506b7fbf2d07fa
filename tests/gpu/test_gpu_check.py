"""The check of GPUs, where there is none: it says so, and what it lets ranks do is right on the CPU."""

from __future__ import annotations

import sys

import gpu_check
import pytest
import torch
from resnet import resnet50


def test_without_a_gpu_each_item_is_skipped_and_says_why(monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr(sys, "argv", ["gpu_check.py"])
    assert gpu_check.main() == 0
    *lines, total = capsys.readouterr().out.splitlines()
    count = len(gpu_check.NEEDS_A_GPU)
    assert total == f"{count} skipped"
    assert lines[1::2] == ["    there is no CUDA device here"] * count


def test_an_item_for_two_gpus_is_skipped_on_one(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert gpu_check._missing(2, "cuda") == "it needs 2 GPUs, and there is 1"
    assert gpu_check._missing(1, "cuda") == gpu_check._missing(0, "cpu") == ""


@pytest.mark.slow
def test_an_item_that_needs_no_gpu_of_its_own_can_be_tried_on_the_cpu(monkeypatch, capsys):
    name = gpu_check.two_ranks_share_a_device_by_gloo.__name__
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--backend", "cpu", name])
    assert gpu_check.main() == 0
    assert "all collectives, on the device and in main memory" in capsys.readouterr().out


def test_the_network_of_the_check_is_resnet_50():
    network = resnet50()
    assert sum(each.numel() for each in network.parameters()) == 25_557_032  # as in torchvision
    assert network.eval()(torch.zeros(2, 3, 64, 64)).shape == (2, 1000)
