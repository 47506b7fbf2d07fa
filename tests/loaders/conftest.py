"""What tests of loaders share."""

from __future__ import annotations

import pytest

from unisono.loaders import unthreaded


@pytest.fixture
def reads_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loops read ahead from their first batch on, as they do where batches are slow."""
    monkeypatch.setattr(unthreaded, "_SWITCH_NS", -1)
    monkeypatch.setattr(unthreaded, "_LONG_NS", -1)
