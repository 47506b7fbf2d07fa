"""The endpoint where agents, or ranks, of several machines meet, host:port: which of them serves it, and where.

What is served is a small store of torch's without authentication: anyone who can reach its port can read and write what
the ranks exchange, including pickled objects, and so, unless the run has a secret, run code in the ranks. So it listens
at the address that the others use, not at this machine's addresses in other networks.

*Threads:* the server runs in native code; calls come from the main thread; another limits its wait.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta

import psutil
import torch.distributed as dist

from unisono.errors import UnisonoError
from unisono.torch_private import read_log_level

_RUN = "unisono/run"  # the id of the run whose agent serves the store
_TOLD_S = 1.0  # after that, a store that names no run is not an agent's: it may be anyone's
_ANSWER_S = 5  # in which a store answers, also a busy one
_ANYWHERE = "192.0.2.1"  # an unassigned address, reached by the default route
_LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"


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


def is_served(host: str, port: int) -> bool:
    """Whether something listens there."""
    return not _refusal_of(host, port)


def _refusal_of(host: str, port: int) -> str:
    """Why no connection can be made; empty if one can."""
    try:
        socket.create_connection((host, port), 1).close()
    except (OSError, UnicodeError) as error:
        return str(error)
    return ""


def wait_served(endpoint: str, timeout_s: float) -> None:
    """Wait until an agent serves the endpoint: machines may start minutes apart. Torch gives up after 60 s.
    TimeoutError if no agent served it in time."""
    host, port = split_endpoint(endpoint)
    began = time.monotonic()
    has_told = False
    while refusal := _refusal_of(host, port):
        waited = time.monotonic() - began
        if waited > timeout_s:
            raise TimeoutError(
                f"nothing listens at {endpoint} after {timedelta(seconds=round(waited))} ({refusal}); start the agent "
                "of that host, check that no firewall is between, or name another host by --rdzv-endpoint"
            )
        if waited > 5 and not has_told:
            has_told = True
            print(f"unisono: waiting for the agent that serves {endpoint} ({refusal})", file=sys.stderr, flush=True)
        time.sleep(0.1)


@contextlib.contextmanager
def silence_limited(endpoint: str, timeout_s: float) -> Iterator[None]:
    """Say so if what listens there does not answer the block, which waits in native code; torch would wait forever, so
    this process ends after the time-out. Another program may have the port."""
    answered = threading.Event()
    arguments = endpoint, timeout_s, answered
    threading.Thread(target=_limit_silence, args=arguments, name="unisono-answer", daemon=True).start()
    try:
        yield
    finally:
        answered.set()


def _limit_silence(endpoint: str, timeout_s: float, answered: threading.Event) -> None:
    """The body of the thread that does so."""
    advice = "if it is no agent of this run, give the run another port by --rdzv-endpoint"
    for passed_s, wait_s in (_ANSWER_S, _ANSWER_S), (timeout_s, timeout_s - _ANSWER_S):
        if answered.wait(max(0, wait_s)):
            return
        text = f"unisono: what listens at {endpoint} has not answered for {passed_s:g} s; {advice}"
        print(text, file=sys.stderr, flush=True)
    os._exit(1)


def serve_store(host: str, port: int, timeout: timedelta, is_alone: bool = False) -> dist.TCPStore:  # type: ignore[name-defined] # torch re-exports it silently
    """Serve a store in this process, for as long as the returned object exists. The host and port are as the others
    specify them; `is_alone` says that only processes of this machine connect. OSError, for example if the port is in
    use."""
    address = listening_address(host, addresses_of(host), is_alone)
    is_six = ":" in address or (not address and socket.has_dualstack_ipv6())
    family = socket.AF_INET6 if is_six else socket.AF_INET
    is_both = is_six and not address
    listener = socket.create_server((address, port), family=family, backlog=socket.SOMAXCONN, dualstack_ipv6=is_both)
    # The store owns the descriptor from here on.
    return dist.TCPStore(  # type: ignore[attr-defined]
        host, port, None, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def name_run_of(store: dist.distributed_c10d.Store, run_id: str) -> None:
    """Write in a store that an agent of this run serves it, and ends it."""
    store.set(_RUN, run_id)


def check_run_of(store: dist.distributed_c10d.Store, run_id: str, endpoint: str, is_alone: bool = False) -> None:
    """Check that no agent of another run serves the store: for an agent that is alone in its run, any agent.
    UnisonoError: one does, and the store would end with it."""
    try:
        store.wait([_RUN], timedelta(seconds=_TOLD_S))
    except dist.DistStoreError:
        return
    if (served := store.get(_RUN).decode(errors="replace")) != run_id:
        raise UnisonoError(
            f"an agent of the run {served!r} serves {endpoint}, and this one belongs to the run {run_id!r}; give "
            "the agents of one run the same --rdzv-id, and each run a port of its own, by --rdzv-endpoint"
        )
    if is_alone:
        raise UnisonoError(
            f"an agent of the run {served!r} serves {endpoint} already, and this one has no other machines; give each "
            "run a port of its own, by --rdzv-endpoint: one that ends with :0 takes a free one"
        )


def listening_address(host: str, addresses: Sequence[str], is_alone: bool) -> str:
    """The address to listen at, of a host's addresses; "" means all of this machine.

    A literal address is where it listens. A name that resolves to a loopback address, but is meant for other machines,
    is only this machine's own view: the address that they connect to is not known.
    """
    if host in addresses and is_this_machine(host):
        return host
    own = [each for each in addresses if is_this_machine(each) and (is_alone or not is_loopback(each))]
    return own[0] if own else ""


def free_port() -> int:
    """A port that nothing listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def quieten_store() -> None:
    """Keep out of stderr the native stack traces that a store prints when its server is gone with its machine.
    TORCH_CPP_LOG_LEVEL=WARNING enables them; torch reads it when it is imported and, if its library allows it, here."""
    if _LOG_LEVEL in os.environ:
        return
    os.environ[_LOG_LEVEL] = "ERROR"
    try:
        read_log_level()
    finally:
        del os.environ[_LOG_LEVEL]


# Which of this machine's addresses and interfaces leads to another machine.


def addresses_of(host: str) -> list[str]:
    """The numeric addresses of a host; empty if its name cannot be resolved."""
    with contextlib.suppress(OSError, UnicodeError):
        return [str(found[4][0]) for found in socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)]
    return []


def is_this_machine(host: str) -> bool:
    """Whether one of that host's addresses belongs to an interface of this machine."""
    own = {_without_zone(each.address) for found in psutil.net_if_addrs().values() for each in found}
    return any(_without_zone(address) in own or address.startswith("127.") for address in addresses_of(host))


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
    """Whether it is an address, or the name, that a machine uses for itself."""
    return host == "localhost" or host.startswith("127.") or host == "::1"


def interface_of(address: str) -> str | None:
    """The name of this machine's interface that has the address; None if none has."""
    for name, found in psutil.net_if_addrs().items():
        if any(_without_zone(each.address) == _without_zone(address) for each in found):
            return name
    return None


def unknown_interfaces() -> Iterator[str]:
    """Yield the variables that would make gloo or NCCL look for an interface that this machine does not have."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        wanted = [each.strip() for each in os.environ.get(name, "").lstrip("^=").split(",") if each.strip()]
        if wanted and not any(here.startswith(each) for each in wanted for here in psutil.net_if_addrs()):
            yield f"{name}={os.environ[name]} names no network interface of this machine"


def _without_zone(address: str) -> str:
    return address.split("%")[0]  # fe80::1%eth0
