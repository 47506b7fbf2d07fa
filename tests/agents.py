"""Agents of a run on several machines, as processes of this one, and networks for them to be machines in."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import psutil
from faults import Script

_AGENT = """
import ctypes, os, signal, sys
if {is_apart}:
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open("/run/netns/{network}", os.O_RDONLY)
    assert libc.setns(descriptor, 0x40000000) == 0
    os.close(descriptor)
    assert libc.unshare(0x20020000) == 0, "CLONE_NEWNS, CLONE_NEWPID"
    if (child := os.fork()):
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    libc.prctl(1, signal.SIGKILL)
    assert os.system("mount --make-rprivate / && mount -t proc proc /proc") == 0
from unisono.cli.main import main
if __name__ == "__main__":
    sys.exit(main({arguments!r}))
"""


def agent(directory: Path, *arguments: str, network: str = "", is_apart: bool = False, **environ: str) -> Script:
    """`unisono` with these arguments, in a process of its own, with a directory of its own, in a network; `is_apart`:
    there as in a container, which sees no process of others. The agents of a directory see the same home."""
    directory.mkdir(exist_ok=True)
    source = _AGENT.format(arguments=list(arguments), network=network, is_apart=is_apart)
    environ.setdefault("HOME", str(directory.parent))
    # A zygote that was forked beside the agent would not be in the container.
    way = "file" if is_apart else "warm"
    return Script(source, directory, way, 1, network, **environ)


@contextlib.contextmanager
def two_ranks(source: str, directory: Path, **environ: str) -> Iterator[list[Script]]:
    """A script as both ranks of another launcher, each of which takes its own for another machine."""
    shared = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    shared |= {"MASTER_PORT": str(free_port()), **environ}
    with contextlib.ExitStack() as stack:
        scripts = []
        for rank in ("0", "1"):
            (directory / rank).mkdir()
            script = Script(source, directory / rank, "warm", 1, "", RANK=rank, GROUP_RANK=rank, **shared)
            scripts.append(stack.enter_context(script))
        yield scripts


def free_port() -> int:
    """Below those that the system gives to others, who could get it before it is used."""
    while True:
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("", port := random.SystemRandom().randrange(10_000, 20_000)))
            return port


def kill_all(script: Script) -> None:
    """SIGKILL every process of a run at the same moment, as a power cut does: stopped first, none can tell another."""
    living = script.living()
    for signum in (signal.SIGSTOP, signal.SIGKILL):
        for process in living:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signum)


@contextlib.contextmanager
def two_networks() -> Iterator[tuple[str, str]]:
    """Two network namespaces joined by a cable: 10.77.0.1 on `eth0` in the first, 10.77.0.2 in the second.

    Raises:
        PermissionError: this process may not make them.
    """
    names = tuple(f"unisono-{os.getpid()}-{uuid4().hex[:6]}-{number}" for number in (1, 2))
    cables = [f"uni{uuid4().hex[:10]}" for _ in names]
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip("link", "add", cables[0], "type", "veth", "peer", "name", cables[1])
        for number, (name, cable) in enumerate(zip(names, cables, strict=True), 1):
            _ip("link", "set", cable, "netns", name, "name", "eth0")
            _ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            _ip("-n", name, "link", "set", "lo", "up")
        yield names[0], names[1]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
        subprocess.run(["ip", "link", "del", cables[0]], capture_output=True)


def pull_cable(network: str, state: str = "down") -> None:
    """Take the link of a network down: what is sent is lost, and nobody is told; or "up" again."""
    _ip("-n", network, "link", "set", "eth0", state)


def close_ports(network: str, but: int) -> None:
    """Drop what comes from other machines by TCP, but for one port, as a firewall does."""
    _ip("-n", network, "rule", "add", "pref", "100", "lookup", "local")
    _ip("-n", network, "rule", "del", "pref", "0")
    rule = ["-n", network, "rule", "add", "iif", "eth0", "ipproto", "tcp"]
    for place in ("sport", "dport"):
        _ip(*rule, "pref", "10", place, str(but), "lookup", "local")
    _ip(*rule, "pref", "20", "sport", "1024-65534", "blackhole")


def _ip(*arguments: str) -> None:
    try:
        found = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    except FileNotFoundError:
        raise PermissionError("there is no command `ip`") from None
    if found.returncode != 0:
        raise PermissionError(f"ip {' '.join(arguments)}: {found.stderr.strip()}")
