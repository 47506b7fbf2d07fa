"""The zygote: a small process that has imported torch and run nothing, and forks workers in milliseconds.

Forking the user's process would deadlock (OpenMP's pool and other threads do not survive a fork), and starting fresh
interpreters costs seconds each. At a fork, the zygote has one thread, no CUDA context and no process group, so the fork
is safe. With the start method "spawn" it imports nothing, and a worker becomes a fresh interpreter after its fork.

It is also the reaper. It makes itself the subreaper of everything that its workers start, and each worker leads its own
session. When a worker ends, the group's connection closes or the calling process dies, the sessions are killed, and
processes that escaped their session are found among the zygote's children.

Invariants:

1. A worker that has been reported as ended left nothing in its session; after the last worker of all groups, no process
   is left at all.
2. A group's socket is closed here only after its workers have ended and its directory has been removed.
3. Only the pid of a child that has not been waited for is signalled: that pid cannot have been reused.

Ownership: the calling process owns a control socket (its end of file means that the caller is gone) and one socket per
group of workers (its end of file means: kill this group). On a group's socket:

    caller -> zygote   {"op": "fork", "rank", "family"} + [job, reports, stdout, stderr]
                       {"op": "signal", "signal", "ranks", "to_sessions"}: to workers alone, or all in their sessions
    zygote -> caller   {"op": "forked", "rank", "pid"}    {"op": "exit", "rank", "status"}
                       {"op": "error", "rank", "text"}: it could not be forked

*Threads:* one; `serve` is a loop over a selector. It blocks only to wait for processes that it has killed. When the
zygote is first idle, a second thread imports what the first worker would otherwise have to import, which takes over a
second. A fork waits for that thread to end.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import selectors
import shutil
import signal
import socket
import sys
import threading
import traceback
import warnings
import weakref
from dataclasses import dataclass, field
from typing import NoReturn

import psutil

from unisono.launch.starting import wire
from unisono.launch.starting.marks import OUTER_DIRECTORY
from unisono.launch.starting.process_ends import (
    become_reaper,
    die_with_parent,
    has_children,
    interpreter_command,
    kill_children,
    kill_marked,
    kill_session,
    kill_trees,
    name_process,
    native_threads,
    reap_children,
)
from unisono.torch_private import COMPILER_MODULE

_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
# The first optimizer of a process imports torch._dynamo, which takes over a second; the first with zero1, the last one.
_FOR_OPTIMIZERS = (
    *(COMPILER_MODULE, "unisono.accelerator", "torch.distributed.optim"),
    *("unisono.training.strategies.fsdp", "unisono.training.strategies.virtual_strategy"),
)
_IDLE_S = 0.5  # without a request: by then, requested workers have their cores


@dataclass
class _Group:
    """The workers of one `spawn`, and the socket to its caller."""

    sock: socket.socket
    directory: str = ""
    ranks: dict[int, int] = field(default_factory=dict)  # pid -> rank, of running workers


class Zygote:
    """The state of the zygote process."""

    def __init__(self, control: socket.socket, caller: int, start_method: str) -> None:
        self.control = control
        self.pid = os.getpid()
        self.start_method = start_method
        self.has_idle_work = start_method == "zygote"
        self.working: threading.Thread | None = None
        self.families: set[str] = set()  # device families whose modules are imported
        self.is_frozen = False  # whether everything imported is exempt from garbage collection
        self.groups: dict[int, _Group] = {}  # by the socket's descriptor
        self.selector = selectors.DefaultSelector()
        self.children_r, self.children_w = os.pipe()
        # `signal.set_wakeup_fd` refuses a blocking descriptor.
        for end in (self.children_r, self.children_w):
            os.set_blocking(end, False)
        # A second sign of the caller's end: a process that it has forked may hold its end of the control socket open.
        self.caller_fd = os.pidfd_open(caller) if hasattr(os, "pidfd_open") else -1
        for watched in (control.fileno(), self.children_r, self.caller_fd):
            if watched >= 0:
                self.selector.register(watched, selectors.EVENT_READ)

    def serve(self) -> NoReturn:
        """Fork and reap until the caller is gone."""
        signal.set_wakeup_fd(self.children_w, warn_on_full_buffer=False)
        # Python writes to the wake-up descriptor only for signals that have a handler in Python.
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())  # undo what the caller's thread had blocked
        while True:
            # Without pending idle work there is no timeout, so an idle zygote never wakes.
            ready = self.selector.select(_IDLE_S if self.has_idle_work else None)
            if not ready:
                self.has_idle_work = False
                self.working = threading.Thread(target=import_for_optimizers, name="unisono-preload")
                self.working.start()
            for fd in (key.fd for key, _ in ready):
                if fd == self.caller_fd or (fd == self.control.fileno() and not self._accept_request()):
                    self._end_everything()
                elif fd == self.children_r:
                    self._reap_children()
                elif fd in self.groups:
                    self._answer_group(self.groups[fd])

    def _accept_request(self) -> bool:
        try:
            message, fds = wire.receive(self.control)
        except EOFError:
            return False
        if "preload" in message:
            # The caller's path may have changed since it started this process.
            sys.path[:] = message["path"]
            self._import_modules(message["preload"])
            return True
        group = _Group(socket.socket(fileno=fds[0]), message["directory"])
        self.groups[group.sock.fileno()] = group
        self.selector.register(group.sock.fileno(), selectors.EVENT_READ)
        return True

    def _import_modules(self, modules: list[str]) -> None:
        """Import modules that the user named, in this thread: some libraries set signal handlers when they are
        imported."""
        if self.working is not None:
            self.working.join()
        self.is_frozen = False  # the next fork freezes the new objects, too
        for name in modules:
            before = native_threads()
            try:
                importlib.import_module(name)
            except BaseException:
                print(f"preload: the import of {name} failed; workers try it again:", file=sys.stderr)
                traceback.print_exc()
            if native_threads() - before:
                print(
                    f"preload: the import of {name} started threads, which forked workers do not have; let the workers "
                    "import it themselves",
                    file=sys.stderr,
                )

    def _answer_group(self, group: _Group) -> None:
        try:
            message, fds = wire.receive(group.sock)
        except EOFError:
            self._close_group(group)
            return
        if message["op"] == "fork":
            self._import_backend(message["family"])
            self._fork_worker(group, message["rank"], fds)
        elif message["op"] == "signal":
            # These pids have not been waited for, so even that of a dead worker is not another process's.
            for pid in (pid for pid, rank in group.ranks.items() if rank in message["ranks"]):
                # A request to stop is for the worker alone: its loader workers must continue until it has stopped.
                send = kill_session if message["to_sessions"] else os.kill
                send(pid, message["signal"])
                if message["to_sessions"]:
                    kill_session(pid, signal.SIGCONT)  # a stopped process would take the signal only then

    def _import_backend(self, family: str) -> None:
        """Import in advance what the workers of a family import. A failure is left for the worker to report."""
        if self.start_method == "zygote" and family not in self.families:
            self.families.add(family)
            self.is_frozen = False
            with contextlib.suppress(Exception):
                from unisono.devices import get_backend

                get_backend(family).preload()

    def _fork_worker(self, group: _Group, rank: int, fds: list[int]) -> None:
        self._prepare_fork()
        # A signal to the child must neither run this process's handler nor be lost: it stays pending until the child's
        # own.
        signal.pthread_sigmask(signal.SIG_BLOCK, _STOPPING)
        try:
            pid = os.fork()
            if pid == 0:
                self._become_worker(rank, group.directory, fds)
            # A child that has already ended cannot be missed here: children are reaped only in `serve`, on this thread.
            group.ranks[pid] = rank
            _send_if_heard(group, {"op": "forked", "rank": rank, "pid": pid})
        except OSError as error:
            from unisono.launch.messages import describe_limit  # most zygotes never need it

            text = f"{error}; {describe_limit(error)}".rstrip("; ")
            _send_if_heard(group, {"op": "error", "rank": rank, "text": text})
        finally:
            # Only the parent gets here: the child leaves by `os._exit` or `exec`.
            for fd in fds:
                os.close(fd)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPPING)

    def _prepare_fork(self) -> None:
        """Prepare for a fork: no second thread, and what is imported stays shared with the workers."""
        if self.working is not None:
            self.working.join()
            self.working = None
            self.is_frozen = False  # what the thread has imported is not frozen yet
        if not self.is_frozen:
            self.is_frozen = True
            for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
                # otherwise each worker would undo these imports at its end, which takes milliseconds
                finalizer.atexit = False
            if self.start_method == "zygote":
                importlib.import_module("unisono.launch.script_group").find_holders()
            gc.freeze()  # collections never write to existing objects, so their pages stay shared
            # Imports had turned it off; workers inherit the setting.
            gc.enable()

    def _become_worker(self, rank: int, directory: str, fds: list[int]) -> NoReturn:
        """In the child: cut all ties to the zygote except the parent-death signal, then run the worker."""
        try:
            os.setsid()
            die_with_parent(signal.SIGKILL)
            if os.getppid() != self.pid:  # it died before the signal was requested
                os._exit(1)
            # The pipe is shared with the zygote, which this worker's signals would otherwise wake.
            signal.set_wakeup_fd(-1)
            for signum in (signal.SIGCHLD, *_STOPPING):
                signal.signal(signum, signal.SIG_DFL)
            # With the defaults set: a signal sent since the fork takes effect now.
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPPING)
            # Closed without unregistering anything: the epoll object is shared, and the zygote would lose its entries.
            self.selector.close()
            for fd in (self.children_r, self.children_w, self.caller_fd):
                if fd >= 0:
                    os.close(fd)
            # The caller takes the end of these streams as the zygote's end, so no worker may hold a copy.
            for sock in (self.control, *(group.sock for group in self.groups.values())):
                sock.close()
            job, reports, stdout, stderr = fds
            os.dup2(stdout, 1)
            os.dup2(stderr, 2)
            os.close(stdout)
            os.close(stderr)
            if self.start_method == "spawn":
                for fd in (job, reports):
                    os.set_inheritable(fd, True)
                arguments = rank, directory, job, reports
                command = interpreter_command(
                    f"from unisono.launch.worker import run_worker; run_worker(*{arguments!r})"
                )
                # The exec keeps the pid, the session and the parent-death signal.
                os.execv(command[0], command)
            from unisono.launch.worker import run_worker

            run_worker(rank, directory, job, reports)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)  # the child must never continue as a second zygote

    def _reap_children(self) -> None:
        with contextlib.suppress(BlockingIOError):
            # Pending SIGCHLDs merge into one, so all children that have ended are taken below.
            os.read(self.children_r, 4096)
        with contextlib.suppress(ChildProcessError):
            if hasattr(os, "waitid"):
                # WNOWAIT leaves a zombie: its pid, also its session's, is not reused before the session is killed.
                while found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                    kill_session(found.si_pid, signal.SIGKILL)
                    self._reap_child(*os.waitpid(found.si_pid, 0))
            else:  # the pid cannot be reused while its session has members
                while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.killpg(ended[0], signal.SIGKILL)
                    self._reap_child(*ended)

    def _reap_child(self, pid: int, status: int) -> None:
        group = next((group for group in self.groups.values() if pid in group.ranks), None)
        # No group: an orphan of a worker, which this process has adopted as the subreaper.
        rank = group.ranks.pop(pid) if group is not None else None
        self._kill_strays()
        if group is not None:
            _send_if_heard(group, {"op": "exit", "rank": rank, "status": os.waitstatus_to_exitcode(status)})

    def _kill_strays(self) -> None:
        """Kill what dead workers left outside their sessions: without workers, all children of this process are their
        orphans."""
        if not any(group.ranks for group in self.groups.values()):
            kill_children()

    def _close_group(self, group: _Group) -> None:
        """The caller has closed the group: kill everything that belongs to it."""
        # The tree includes what has left the session; the session includes what has lost its parent.
        kill_trees(group.ranks)
        for pid in group.ranks:
            kill_session(pid, signal.SIGKILL)
        for pid in group.ranks:
            os.waitpid(pid, 0)
        group.ranks.clear()
        self._kill_strays()
        with contextlib.suppress(psutil.Error):  # strays of this group, if another group has workers
            if has_children():
                kill_marked(psutil.Process().children(recursive=True), OUTER_DIRECTORY, group.directory)
        # No process of the group is left that could create files in it.
        shutil.rmtree(group.directory, ignore_errors=True)
        # Before the socket is closed: its `fileno()` is -1 afterwards.
        self.selector.unregister(group.sock.fileno())
        del self.groups[group.sock.fileno()]
        group.sock.close()

    def _end_everything(self) -> NoReturn:
        """Kill everything, and exit."""
        reap_children()
        for group in self.groups.values():
            shutil.rmtree(group.directory, ignore_errors=True)
        _remove_unread(self.control)
        # A normal exit would join the thread that does the idle work.
        os._exit(0)


def _send_if_heard(group: _Group, message: dict[str, object]) -> None:
    with contextlib.suppress(OSError):  # a caller that is gone is noticed by its end of file
        wire.send(group.sock, message)


def _remove_unread(control: socket.socket) -> None:
    """Remove the directories of groups that a caller requested just before its end."""
    control.setblocking(False)  # a process that it has forked may hold its end open
    with contextlib.suppress(EOFError, OSError):
        while True:
            message, _ = wire.receive(control)
            shutil.rmtree(message.get("directory", ""), ignore_errors=True)


def import_for_optimizers() -> None:
    """Import what the first optimizer of a worker would import. Turns garbage collection off until the next fork."""
    gc.disable()
    with contextlib.suppress(Exception), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own: as errors (`python -W error`), they would end the import
        for name in _FOR_OPTIMIZERS:
            importlib.import_module(name)


def main(control_fd: int, caller: int, start_method: str) -> NoReturn:
    """Run the zygote on its end of the control socket; `caller` is the pid of the calling process."""
    # Before the first fork: only later orphans are adopted.
    become_reaper()
    name_process("unisono-zygote")
    # signals sent to the whole group are meant for the workers; the zygote ends with its caller
    for signum in _STOPPING:
        signal.signal(signum, signal.SIG_IGN)
    control = socket.socket(fileno=control_fd)
    try:
        # If the caller is gone, its pid may be another process's by the time the pidfd is opened.
        if os.getppid() != caller:
            raise ProcessLookupError
        if start_method == "zygote":
            gc.disable()  # until the first fork: collections would take a fifth of the import time, without any benefit
            importlib.import_module("unisono.launch.worker")
            # Also of what is imported later; in each worker it would take 4 ms.
            importlib.import_module("unisono.devices.graphs").keep_package_out_of_graphs()
            importlib.import_module("numpy.random")  # which each worker seeds; numpy leaves it to the first use
        zygote = Zygote(control, caller, start_method)
    except ProcessLookupError:  # it ended while this process started, or imported torch
        _remove_unread(control)
        sys.exit(1)  # silently: nobody waits for it
    zygote.serve()
