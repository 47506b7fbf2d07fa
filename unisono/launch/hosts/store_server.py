"""The store in which ranks, or agents, of several machines meet, served only on the interface that is needed.

The store is a small server of torch's without authentication: anyone who can reach its port can read and write what the
ranks exchange, including pickled objects, and so, unless the run has a secret, run code in the ranks. So it listens at
the address that the others use, not at this machine's addresses in other networks.

*Threads:* the server runs in native code; calls come from the main thread.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from unisono.launch.hosts.addresses import addresses_of, is_loopback, is_this_machine
from unisono.torch_private import read_log_level

_LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"


def serve_store(host: str, port: int, timeout: timedelta, is_alone: bool = False) -> dist.TCPStore:  # type: ignore[name-defined] # torch re-exports it silently
    """Serve a store in this process, for as long as the returned object exists. The host and port are as the others
    specify them; `is_alone` says that only processes of this machine connect. OSError, for example if the port is in
    use."""
    address = listening_address(host, addresses_of(host), is_alone)
    is_six = ":" in address or (not address and socket.has_dualstack_ipv6())
    listener = socket.create_server(
        (address, port),
        family=socket.AF_INET6 if is_six else socket.AF_INET,
        backlog=socket.SOMAXCONN,
        dualstack_ipv6=not address and is_six,
    )
    # The store owns the descriptor from here on.
    return dist.TCPStore(  # type: ignore[attr-defined]
        host, port, None, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def listening_address(host: str, addresses: Sequence[str], is_alone: bool) -> str:
    """The address to listen at, of a host's addresses; "" means all of this machine.

    A literal address is where it listens. A name whose loopback address other machines are meant to use is only this
    machine's own view: the address by which they connect is not known.
    """
    if host in addresses and is_this_machine(host):
        return host
    own = [each for each in addresses if is_this_machine(each) and (is_alone or not is_loopback(each))]
    return own[0] if own else ""


def quieten_store() -> None:
    """Keep native stack traces out of stderr, which a store prints when its server is gone with its machine.

    The first cause is what this process reports about a failure; TORCH_CPP_LOG_LEVEL=WARNING enables the stack traces.
    Torch reads that when it is imported and, if its library allows it, once more here.
    """
    if _LOG_LEVEL in os.environ:
        return
    os.environ[_LOG_LEVEL] = "ERROR"
    try:
        read_log_level()
    finally:
        del os.environ[_LOG_LEVEL]
