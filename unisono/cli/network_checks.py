"""How processes of this machine, and of others, reach one another."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import psutil

from unisono.cli.findings import Finding, warning_if
from unisono.launch.hosts.addresses import interface_of, is_loopback

SLOW_LOOKUP_S = 1.0
CONNECT_S = 3.0
RESOLVER_ADVICE = (
    "one machine needs no name service; for more than one, each connection to the store resolves a name and waits as "
    "long (5 s for each lost answer): fix /etc/resolv.conf, or list the hosts in /etc/hosts"
)

T = TypeVar("T")


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
    yield warning_if(max(forward_s, backward_s) > SLOW_LOOKUP_S, "names", text, RESOLVER_ADVICE)
    yield _check_interface(addresses[0])


def _check_interface(address: str) -> Finding:
    """The interface that gloo uses by default: that of the host name's address."""
    owner = interface_of(address)
    up = [name for name, found in psutil.net_if_stats().items() if found.isup and not name.startswith("lo")]
    advice = f"for more than one machine: set GLOO_SOCKET_IFNAME to one of {', '.join(up)}" if up else ""
    if is_loopback(address):
        return Finding("gloo", "note", f"announces {address}, which no other machine reaches", advice)
    if owner is None:
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
