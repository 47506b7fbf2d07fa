"""A loop that waits long for what its own process reads says where it is; of loader workers see test_loader_workers."""

from __future__ import annotations

import logging
import threading

import pytest
from epochs import PATIENCE_S
from torch.utils.data import DataLoader, Dataset

from unisono import DeviceLoader, spawn
from unisono.loading import silence, unthreaded


class Blocking(Dataset[int]):
    """Blocks in one sample until somebody has said so."""

    def __init__(self) -> None:
        self.is_said = threading.Event()

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> int:
        if index in (8, 10):  # one for each rank
            assert self.is_said.wait(PATIENCE_S)
        return index


class Hearing(logging.Handler):
    def __init__(self, is_said: threading.Event) -> None:
        super().__init__()
        self.texts: list[str] = []
        self._is_said = is_said

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())
        self._is_said.set()


@pytest.mark.parametrize("reads_ahead", [False, True])
def test_a_dataset_that_blocks_in_its_own_process_is_named(reads_ahead: bool) -> None:
    def body(index: int) -> tuple[int, list[str]]:
        silence.LONG_NS = 200_000_000
        if reads_ahead:
            unthreaded.SWITCH_NS = unthreaded.LONG_NS = -1
        data = Blocking()
        hearing = Hearing(data.is_said)
        silence.logger.addHandler(hearing)
        silence.logger.propagate = False
        return len([*DeviceLoader(DataLoader(data, batch_size=2))]), hearing.texts

    for count, texts in spawn(body, nprocs=2):
        assert count == 8 // 2
        for text in texts:
            first, *stack = text.splitlines()
            assert "no batch has come for " in first
            assert "the loop reads the samples with indices " in first
            assert "; it is in __getitem__ (" in first
            assert all("threading.py" in line or "__getitem__" in line for line in stack)
        assert 1 <= len(texts) <= 2  # once for each wait, of which one may be that for the ranks' comparison
