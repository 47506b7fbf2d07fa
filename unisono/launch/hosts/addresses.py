"""Which of this machine's addresses and interfaces leads to another machine."""

from __future__ import annotations

import contextlib
import socket

import psutil

_ANYWHERE = "192.0.2.1"  # an address that nobody has, behind the default route


def addresses_of(host: str) -> list[str]:
    """The numeric addresses of a host; empty where its name cannot be resolved."""
    with contextlib.suppress(OSError, UnicodeError):
        return [str(found[4][0]) for found in socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)]
    return []


def is_this_machine(host: str) -> bool:
    """Whether an address of that host is one of this machine's interfaces'."""
    own = {_bare(each.address) for found in psutil.net_if_addrs().values() for each in found}
    return any(_bare(address) in own or address.startswith("127.") for address in addresses_of(host))


def address_towards(host: str, port: int) -> str | None:
    """This machine's address on the way to a host, as others see it; None where there is no way. Nothing is sent.

    A machine often knows its own name as 127.0.1.1, of no use to others: then it is the address on the way out.
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
    """Whether it is an address, or the name, by which a machine means itself."""
    return host == "localhost" or host.startswith("127.") or host == "::1"


def interface_of(address: str) -> str | None:
    """The name of this machine's interface that has the address."""
    for name, found in psutil.net_if_addrs().items():
        if any(_bare(each.address) == _bare(address) for each in found):
            return name
    return None


def _bare(address: str) -> str:
    return address.split("%")[0]  # fe80::1%eth0
