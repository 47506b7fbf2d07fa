"""Small messages with file descriptors, between the calling process and the zygote."""

from __future__ import annotations

import array
import pickle
import socket
from typing import Any

_LIMIT = 65536
_MAX_FDS = 8


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Two connected sockets that keep message boundaries, so that a message arrives whole or not at all."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(sock: socket.socket, message: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
    """Send one message; OSError when the other end is gone."""
    data = pickle.dumps(message)
    assert len(data) <= _LIMIT, "messages are small; payloads travel in files and pipes"
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sock.sendmsg([data], rights, socket.MSG_NOSIGNAL)


def receive(sock: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """The next message and its descriptors.

    Raises:
        EOFError: the other end is gone.
    """
    try:
        data, fds, _, _ = socket.recv_fds(sock, _LIMIT, _MAX_FDS)
    except ConnectionError as error:
        raise EOFError from error
    if not data:
        raise EOFError
    message: dict[str, Any] = pickle.loads(data)
    return message, fds
