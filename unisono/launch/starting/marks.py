"""The variables by which this package's processes know one another."""

from __future__ import annotations

OUTER_DIRECTORY = "UNISONO_RENDEZVOUS"
"""In the environment of a worker of `spawn`, and so of all that it starts: the directory of its group."""
