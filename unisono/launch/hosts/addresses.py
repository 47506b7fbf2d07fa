"""Which of this machine's addresses and interfaces leads to another machine."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

import psutil

_ANYWHERE = "192.0.2.1"  # an unassigned address, reached by the default route


def addresses_of(host: str) -> list[str]:
    """The numeric addresses of a host; empty if its name cannot be resolved."""
    with contextlib.suppress(OSError, UnicodeError):
        return [str(found[4][0]) for found in socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)]
    return []


def is_this_machine(host: str) -> bool:
    """Whether one of that host's addresses belongs to an interface of this machine."""
    own = {_bare(each.address) for found in psutil.net_if_addrs().values() for each in found}
    return any(_bare(address) in own or address.startswith("127.") for address in addresses_of(host))


def address_towards(host: str, port: int) -> str | None:
    """This machine's address on the route to a host, as others see it; None if there is no route. Sends nothing.

    A machine often resolves its own name to 127.0.1.1, which is useless to others: then it is the address of the
    default route.
    """
    for address in addresses_of(host):
        found = _source_towards(address, port)
        if found is not None and is_loopback(found) and not is_loopback(host):
            return _source_towards(_ANYWHERE, port) or found
        if found is not None:
            return found
    return None


def _source_towards(address: str, port: int) -> str | None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, port))  # of a datagram socket: the kernel only picks the route
        return str(probe.getsockname()[0])
    return None


def is_loopback(host: str) -> bool:
    """Whether it is an address, or the name, by which a machine refers to itself."""
    return host == "localhost" or host.startswith("127.") or host == "::1"


def interface_of(address: str) -> str | None:
    """The name of this machine's interface that has the address; None if none has."""
    for name, found in psutil.net_if_addrs().items():
        if any(_bare(each.address) == _bare(address) for each in found):
            return name
    return None


def unknown_interfaces() -> Iterator[str]:
    """Yield the variables by which gloo or NCCL would look for an interface that this machine does not have."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        wanted = [each.strip() for each in os.environ.get(name, "").lstrip("^=").split(",") if each.strip()]
        if wanted and not any(here.startswith(each) for each in wanted for here in psutil.net_if_addrs()):
            yield f"{name}={os.environ[name]} names no network interface of this machine"


def _bare(address: str) -> str:
    return address.split("%")[0]  # fe80::1%eth0
