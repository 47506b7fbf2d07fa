"""The processes that workers of this one are forked from."""

from __future__ import annotations

from unisono.launch.starting import zygote_client


def zygote_pid(start_method: str = "zygote") -> int | None:
    """The pid of the running zygote for that start method; None if there is none."""
    client = zygote_client.clients.get(start_method)
    return client.process.pid if client is not None and client.is_alive() else None
