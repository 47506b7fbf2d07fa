"""The endpoint where agents meet, host:port, as seen from this machine: which agent serves it, and whether it is
served."""

from __future__ import annotations

import contextlib
import socket
import sys
import time
from datetime import timedelta

from unisono.launch.hosts.addresses import address_towards, addresses_of, is_this_machine


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """Split `host:port` or `[address]:port`; ValueError if it is neither."""
    host, colon, port = endpoint.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (colon and host and port.isdecimal() and 0 < int(port) < 65536):
        raise ValueError(f"{endpoint!r} is not an endpoint; pass host:port, where the agents meet, like node1:29400")
    return host, int(port)


def serves_endpoint(endpoint: str, node_rank: int | None = None) -> bool:
    """Whether this machine's agent has to serve the store where the agents meet.

    It has to if the host is this machine. Torch compares host *names*, and then often none of the agents serves it.
    """
    host, port = split_endpoint(endpoint)
    if node_rank is not None and node_rank > 0:
        return False
    if node_rank == 0 and not addresses_of(host):
        return True  # a name that cannot be resolved yet, such as that of a pod that is just starting: this one
    return is_this_machine(host) and not is_served(host, port)


def local_address(endpoint: str) -> str | None:
    """This machine's address for the others. The agent's default is what its host name resolves to: 127.0.1.1."""
    return address_towards(*split_endpoint(endpoint))


def is_served(host: str, port: int) -> bool:
    """Whether something listens there."""
    with contextlib.suppress(OSError), socket.create_connection((host, port), 1):
        return True
    return False


def wait_served(endpoint: str, timeout_s: float) -> None:
    """Wait until an agent serves the endpoint: machines may start minutes apart. Torch gives up after 60 s.
    TimeoutError if no agent served it in time."""
    host, port = split_endpoint(endpoint)
    began = time.monotonic()
    has_told = False
    while not is_served(host, port):
        waited = time.monotonic() - began
        if waited > timeout_s:
            raise TimeoutError(
                f"nothing listens at {endpoint} after {timedelta(seconds=round(waited))}; start the agent of that "
                "host, check that no firewall is between, or name another host by --rdzv-endpoint"
            )
        if waited > 5 and not has_told:
            has_told = True
            print(f"unisono: waiting for the agent that serves {endpoint}", file=sys.stderr, flush=True)
        time.sleep(0.1)
