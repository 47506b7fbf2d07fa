"""The commands' side of `unisono warm`: hands `unisono run` to a process that has already imported its modules.

That process forks, and its child becomes the command: with this one's arguments, environment, directory, umask, signals
and standard streams. What was imported is shared; nothing else is, as each command has its own fork. The original
process stays, passes signals on, and ends as its stand-in does; if it is killed, so is the stand-in.

A fork is as good as a fresh start only if the two would have begun alike. So everything that an import may have
depended on is compared; where there is a difference, the command starts by itself, with a line that says why.

Invariant: both sides belong to one user. The socket is in a directory that only this user can enter, and each side asks
the system who the other is.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import socket
import stat
import struct
import sys
import zlib
from pathlib import Path
from typing import Any

from unisono.launch.starting import wire

_FREE = {  # of a terminal or a session: no import depends on them
    *("_", "PWD", "OLDPWD", "SHLVL", "TERM", "COLUMNS", "LINES", "WINDOWID", "STY", "WINDOW", "TMUX", "TMUX_PANE"),
    *("SSH_CLIENT", "SSH_CONNECTION", "SSH_TTY", "SSH_AUTH_SOCK", "XDG_SESSION_ID", "DBUS_SESSION_BUS_ADDRESS"),
    *("TERM_SESSION_ID", "GNOME_TERMINAL_SCREEN", "VSCODE_IPC_HOOK_CLI"),
}
_PASSED = ("SIGHUP", "SIGINT", "SIGQUIT", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGWINCH", "SIGTSTP", "SIGCONT")
_MOST = 100  # bytes of the path of a socket, which the system limits
_ANSWER_S = 10.0  # for the warm process to check its files and fork, even on a busy machine


def socket_path() -> Path:
    """Where the warm process of this user and this environment of Python listens."""
    own = f"{zlib.crc32(f'{sys.prefix}:{sys.executable}'.encode()):08x}"
    path = Path(os.environ.get("TMPDIR") or "/tmp", f"unisono-warm-{os.getuid()}", own)
    return path if len(os.fsencode(path)) <= _MOST else Path("/tmp", *path.parts[-2:])


def check_directory(directory: Path) -> None:
    """PermissionError: others could put their own socket there."""
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise PermissionError(f"{directory} is not a directory of yours that others cannot enter; remove it")


def connect() -> socket.socket | None:
    """A connection to the warm process, or None if there is none. PermissionError: it belongs to another user."""
    path = socket_path()
    with contextlib.ExitStack() as unused:
        sock = unused.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        try:
            check_directory(path.parent)
            sock.settimeout(_ANSWER_S)
            sock.connect(str(path))
        except (FileNotFoundError, NotADirectoryError, ConnectionError):
            return None
        if peer_uid(sock) != os.getuid():
            raise PermissionError(f"{path} is listened to by another user")
        unused.pop_all()
    return sock


def peer_uid(sock: socket.socket) -> int:
    """The user of the process at the other end, according to the system."""
    size = struct.calcsize("3i")
    return int(struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))[1])


def circumstances() -> dict[str, Any]:
    """What a process and its imports may depend on, by name; comparable between processes of one machine."""
    import resource

    limits = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    return {
        **{name: value for name, value in os.environ.items() if name not in _FREE},
        "the interpreter": (sys.executable, sys.version, __file__),
        "an option of the interpreter": (tuple(sys.flags), sys.warnoptions, sys._xoptions),
        "sys.path": list(sys.path),
        "the user": (os.getresuid(), os.getresgid(), sorted(os.getgroups())),
        "the control group": _read("/proc/self/cgroup"),
        "a namespace": [os.readlink(f"/proc/self/ns/{name}") for name in sorted(os.listdir("/proc/self/ns"))],
        "the root directory": tuple(os.stat("/"))[1:3],
        "the set of cores": sorted(os.sched_getaffinity(0)),
        "the priority": (os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0)),
        "the priority when memory is short": _read("/proc/self/oom_score_adj"),
        "the place of its memory": _read("/proc/self/numa_maps").partition("\n")[0].split(" ")[1:2],
        "a privilege": re.findall(r"^(?:Cap|NoNew|Secc).*", _read("/proc/self/status"), re.MULTILINE),
        **{f"the limit {name}": resource.getrlimit(getattr(resource, name)) for name in limits},
    }


def difference(ours: dict[str, Any], theirs: dict[str, Any]) -> str:
    """The name of something that differs; empty if nothing does."""
    return next((name for name in sorted({*ours, *theirs}) if ours.get(name) != theirs.get(name)), "")


def start(code: str, modules: list[str], idle_s: float) -> int | None:
    """Start a warm process, and wait until it has imported these modules: its pid, or None if it has ended. It runs the
    code, where "{control}" stands for the descriptor of a socket, and ends after `idle_s` seconds without a command."""
    import subprocess

    from unisono.launch.starting.process_ends import interpreter_command

    ours, theirs = wire.socket_pair()
    with theirs:
        process = subprocess.Popen(
            interpreter_command(code.format(control=theirs.fileno())),
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # its threads would start when NumPy is imported
            start_new_session=True,
        )
    try:
        # Not on its command line, which everyone can read.
        wire.send(ours, {"circumstances": circumstances(), "modules": modules, "idle_s": idle_s})
        wire.receive(ours)
    except KeyboardInterrupt:
        process.kill()
        raise
    except (OSError, EOFError):
        process.wait()
        return None
    return process.pid


def hand_over(arguments: list[str]) -> int | None:
    """Let a fork of the warm process run `unisono` with these arguments, and return its exit code. None: there is no
    warm process, or its fork would not be as good as a fresh start; in the latter case a line on stderr says why."""
    try:
        sock = connect()
        if sock is None:
            return None
        with sock:
            code, reason = _ask_for_fork(sock, arguments)
        if not reason:
            return code
    except (OSError, EOFError) as error:
        reason = str(error) or "it does not answer"
    print(f"unisono {arguments[0]}: a fresh start, not one from `unisono warm`: {reason}", file=sys.stderr)
    return None


def _ask_for_fork(sock: socket.socket, arguments: list[str]) -> tuple[int, str]:
    """The exit code of the stand-in, or why there is none."""
    if open_here := _inheritable_descriptors():
        return 0, f"it would not have the open descriptors {open_here}"
    passed = [signum for name in _PASSED if not _is_ignored(signum := getattr(signal, name))]
    # Blocked until there is a process to pass them on to.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, passed)
    try:
        life, ours = os.pipe()  # `ours` is closed when this process ends, however it does
        try:
            wire.send(sock, {"op": "run", **_request(arguments, before)}, (0, 1, 2, life))
        finally:
            os.close(life)
        answer, fds = wire.receive(sock)
        if answer["cold"]:
            os.close(ours)
            return 0, answer["cold"]
        for signum in passed:
            signal.signal(signum, lambda each, _: _pass_on(fds[0], each))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return _end_as(sock, fds[0]), ""


def _request(arguments: list[str], blocked: set[Any]) -> dict[str, Any]:
    mask = os.umask(0o077)
    os.umask(mask)
    return {
        "arguments": arguments,
        "environ": dict(os.environ),
        "directory": os.getcwd(),
        "umask": mask,
        "ignored": [int(each) for each in signal.valid_signals() if _is_ignored(each)],
        "blocked": [int(each) for each in blocked],
        "circumstances": circumstances(),
    }


def _pass_on(stand_in: int, signum: int) -> None:
    is_pause = signum == signal.SIGTSTP  # which stops no process without a terminal
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(stand_in, signal.SIGSTOP if is_pause else signum)
    if is_pause:
        os.kill(os.getpid(), signal.SIGSTOP)


def _inheritable_descriptors() -> list[int]:
    """The descriptors that a script would inherit besides its standard streams, as from `<(command)`."""
    found = []
    for each in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # that of the listing is closed
            if each > 2 and os.get_inheritable(each):
                found.append(each)
    return found


def _end_as(sock: socket.socket, stand_in: int) -> int:
    """Wait until the stand-in, given by its pidfd, has ended, and end as it did."""
    sock.settimeout(None)
    try:
        status = wire.receive(sock)[0]["status"]
    except (OSError, EOFError):
        select.select([stand_in], [], [])
        print("unisono: the process of `unisono warm` was killed, and the exit code is lost", file=sys.stderr)
        return 1
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


def _is_ignored(signum: int) -> bool:
    # Python ignores these two in each of its processes.
    return signum not in (signal.SIGPIPE, signal.SIGXFSZ) and signal.getsignal(signum) == signal.SIG_IGN


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
