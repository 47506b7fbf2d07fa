"""How processes of this machine, and of others, reach one another."""

from __future__ import annotations

import errno
import ipaddress
import socket
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import psutil

from unisono.cli.findings import Finding
from unisono.launch.hosts.addresses import interface_of

SLOW_LOOKUP_S = 1.0
CONNECT_S = 3.0
RESOLVER_ADVICE = (
    "one machine needs no name service; for more than one, each connection to the store resolves a name and waits as "
    "long (5 s for each lost answer): fix /etc/resolv.conf, or list the hosts in /etc/hosts"
)

T = TypeVar("T")
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def loopback() -> Iterator[Finding]:
    """Whether two processes of this machine can connect by a port."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        with socket.create_connection(address, CONNECT_S):
            yield Finding("ports", "ok", f"a free port of 127.0.0.1 ({address[1]}) is bound and reached")


def interfaces() -> Iterator[Finding]:
    """The interfaces that lead to other machines."""
    found: dict[str, list[str]] = {}
    for name, address in _own_addresses():
        found.setdefault(name, []).append(str(address))
    text = "; ".join(f"{name} {' '.join(addresses)}" for name, addresses in found.items())
    yield Finding("interfaces", "ok" if text else "problem", text or "none is up", "" if text else "ip link set lo up")


def _own_addresses() -> Iterator[tuple[str, Address]]:
    """Yield the interfaces that are up with their addresses, except link-local ones."""
    states = psutil.net_if_stats()
    for name, found in psutil.net_if_addrs().items():
        for each in found:
            if each.family in (socket.AF_INET, socket.AF_INET6) and name in states and states[name].isup:
                address = ipaddress.ip_address(each.address.split("%")[0])
                if not address.is_link_local:
                    yield name, address


def names() -> Iterator[Finding]:
    """Whether this machine's name resolves to an address and back, how fast, and which address gloo then announces."""
    host = socket.gethostname()
    try:
        forward_s, addresses = _time(lambda: _addresses(host))
    except OSError as error:
        yield Finding("names", "note", f"{host} has no address: {error}", f"add it to /etc/hosts: 127.0.1.1 {host}")
        return
    backward_s, name = _time(lambda: socket.getnameinfo((addresses[0], 0), 0)[0])
    text = f"{host} is {' '.join(addresses)} ({forward_s * 1e3:.0f} ms), which is {name} ({backward_s * 1e3:.0f} ms)"
    if max(forward_s, backward_s) > SLOW_LOOKUP_S:
        yield Finding("names", "warning", text, RESOLVER_ADVICE)
    else:
        yield Finding("names", "ok", text)
    yield _check_interface(addresses[0])


def _check_interface(text: str) -> Finding:
    """The interface that gloo uses by default: that of the host name's address."""
    address, owner = ipaddress.ip_address(text), interface_of(text)
    if address.is_loopback:
        others = [name for name, each in _own_addresses() if not each.is_loopback]
        advice = f"for more than one machine: GLOO_SOCKET_IFNAME={others[0]}" if others else ""
        return Finding("gloo", "note", f"announces {address}, which no other machine reaches", advice)
    if owner is None:
        advice = "for more than one machine: set GLOO_SOCKET_IFNAME, or correct the host name's address"
        return Finding("gloo", "warning", f"the host name's address, {address}, belongs to no interface", advice)
    return Finding("gloo", "ok", f"announces {address} ({owner}) to other machines")


def endpoint(host: str, port: int) -> Iterator[Finding]:
    """Whether a rendezvous at `host:port` can be served by this machine, or reached from it."""
    place = f"{host}:{port}"
    try:
        address = _addresses(host)[0]
    except OSError as error:
        yield Finding("endpoint", "problem", f"{place}: the name has no address: {error}", "name a host that is known")
        return
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.create_server((address, port), family=family) as server:
            with socket.create_connection((address, server.getsockname()[1]), CONNECT_S):
                yield Finding("endpoint", "ok", f"{place} is free here, is bound and reached")
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            yield _report_reached(address, port, f"{place}, which is not this machine,")
        elif error.errno == errno.EADDRINUSE:
            yield _report_reached(address, port, f"{place}, which is in use here,")
        else:
            yield Finding("endpoint", "problem", f"{place} cannot be bound: {error}", "choose a port above 1023")


def _report_reached(address: str, port: int, what: str) -> Finding:
    try:
        socket.create_connection((address, port), CONNECT_S).close()
    except ConnectionRefusedError:
        advice = "the host is reached, but nothing listens there (yet): start the agent of that machine"
        return Finding("endpoint", "warning", f"{what} refuses the connection", advice)
    except OSError as error:
        advice = "the host is down, or a firewall drops what comes to that port: open it, or choose another"
        return Finding("endpoint", "problem", f"{what} does not answer ({error})", advice)
    return Finding("endpoint", "ok", f"{what} answers; whatever listens there should be your rendezvous")


def _addresses(host: str) -> list[str]:
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(each[4][0]) for each in found))


def _time(question: Callable[[], T]) -> tuple[float, T]:
    began = time.monotonic()
    answer = question()
    return time.monotonic() - began, answer
