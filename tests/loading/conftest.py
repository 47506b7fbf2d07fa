"""What tests of loaders share."""

from __future__ import annotations

import pytest

from unisono.loading import pipeline


@pytest.fixture
def reads_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loops read ahead from their first batch on, as they do where batches are slow."""
    monkeypatch.setattr(pipeline, "SWITCH_NS", -1)
    monkeypatch.setattr(pipeline, "LONG_NS", -1)
