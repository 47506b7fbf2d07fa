"""Small messages with file descriptors, between the calling process and the zygote."""

from __future__ import annotations

import array
import pickle
import socket
import struct
from typing import Any

_HEADER = struct.Struct("!I")  # the length of the message that follows
_MAX_FDS = 8
_TO_ITSELF = getattr(socket, "MSG_CMSG_CLOEXEC", 0)  # descriptors are for the receiver, not for what it executes
_QUIET = getattr(socket, "MSG_NOSIGNAL", 0)  # Python ignores SIGPIPE, unless the program has changed that


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Two connected, blocking sockets of the only kind that exists on every Unix and reports when its peer is gone."""
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    for each in pair:
        each.setblocking(True)  # `socket.setdefaulttimeout` in the caller leaves O_NONBLOCK on the zygote's end, too
    return pair


def send(sock: socket.socket, message: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
    """Send one message; OSError if the other end is closed."""
    data = pickle.dumps(message)
    # The descriptors travel with the header's bytes, and are received with them.
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sock.sendmsg([_HEADER.pack(len(data))], rights, _QUIET)
    sock.sendall(data, _QUIET)


def receive(sock: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Receive the next message and its descriptors; once its beginning has arrived, waits for all of it. EOFError if
    the other end is closed."""
    try:
        header, fds, _, _ = socket.recv_fds(sock, _HEADER.size, _MAX_FDS, _TO_ITSELF)
        data = sock.recv(_HEADER.unpack(header)[0], socket.MSG_WAITALL) if len(header) == _HEADER.size else b""
    except ConnectionError as error:
        raise EOFError from error
    if not data:
        raise EOFError
    message: dict[str, Any] = pickle.loads(data)
    return message, fds
