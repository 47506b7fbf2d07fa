"""The variables by which this package's processes recognise one another."""

from __future__ import annotations

OUTER_DIRECTORY = "UNISONO_RENDEZVOUS"
"""In the environment of a worker of `spawn`, and so of all its child processes: the directory of its group."""
