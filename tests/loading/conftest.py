"""What tests of loaders share."""

from __future__ import annotations

import pytest

from unisono.loading import unthreaded


@pytest.fixture
def reads_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loops read ahead from their first batch on, as they do where batches are slow."""
    monkeypatch.setattr(unthreaded, "SWITCH_NS", -1)
    monkeypatch.setattr(unthreaded, "LONG_NS", -1)
