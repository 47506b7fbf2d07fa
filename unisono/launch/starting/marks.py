"""The variables that let this package's processes recognise one another."""

from __future__ import annotations

OUTER_DIRECTORY = "UNISONO_RENDEZVOUS"
"""In the environment of a worker of `spawn`, and so of all its child processes: the directory of its group."""

SECRET = "UNISONO_RDZV_SECRET"
"""The variable with the secret that signs what the machines of a run send one another."""
