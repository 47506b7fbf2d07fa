"""The store in which ranks, or agents, of several machines meet: served on the interface that is needed.

The store is a small server of torch's that asks nobody who he is: whoever reaches its port can read and write what the
ranks exchange, pickled objects among it, and so run code in them. So it listens at the address by which the
others come, and not at those of other networks that this machine is in; within that one network nothing protects it.

*Threads:* the server is native code's; calls come from the main thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from unisono.launch.hosts.addresses import addresses_of, is_loopback, is_this_machine

_LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"


def serve_store(host: str, port: int, timeout: timedelta, is_alone: bool = False) -> dist.TCPStore:  # type: ignore[name-defined] # torch re-exports it silently
    """Serve a store in this process, for as long as it is kept.

    Args:
        host, port: as the others name it.
        timeout: of this process's own requests.
        is_alone: whether only processes of this machine come.

    Raises:
        OSError: the port is taken, say.
    """
    address = listening_address(addresses_of(host), is_alone)
    is_six = ":" in address or (not address and socket.has_dualstack_ipv6())
    listener = socket.create_server(
        (address, port),
        family=socket.AF_INET6 if is_six else socket.AF_INET,
        backlog=socket.SOMAXCONN,
        dualstack_ipv6=not address and is_six,
    )
    return dist.TCPStore(  # type: ignore[attr-defined]
        host, port, None, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def listening_address(addresses: Sequence[str], is_alone: bool) -> str:
    """Of a host's addresses the one to listen at; "" is all of this machine.

    A loopback address by which others are to come is a machine's own idea of its name: how they come is not known.
    """
    own = [each for each in addresses if is_this_machine(each) and (is_alone or not is_loopback(each))]
    return own[0] if own else ""


def quieten_store() -> None:
    """Keep the stacks of native code out of stderr that a store prints when its server is gone with its machine.

    What this process says of a failure is the first cause; TORCH_CPP_LOG_LEVEL=WARNING brings the stacks back. Torch
    reads that when it is imported and, where its library lets it, here once more.
    """
    if _LOG_LEVEL in os.environ:
        return
    os.environ[_LOG_LEVEL] = "ERROR"
    try:
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))._ZN3c1011initLoggingEv()
    finally:
        del os.environ[_LOG_LEVEL]
