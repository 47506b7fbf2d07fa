"""What the tests and their children are given, however pytest was started.

A shell's background job ignores SIGINT and SIGQUIT, `nohup` ignores SIGHUP, a service may block signals, a login may
set any limit or variable. Children inherit all of these, so they are set here once, before torch reads any of them.
"""

from __future__ import annotations

import atexit
import os
import resource
import shutil
import signal
import sys
import tempfile
from pathlib import Path

# The rest of the environment is dropped: OMP_NUM_THREADS, RANK, SLURM_*, PYTHON*, COLUMNS, CI and their like.
_KEPT = {"HOME", "LD_LIBRARY_PATH", "LOGNAME", "PATH", "PYTEST_VERSION", "SHELL", "USER", "VIRTUAL_ENV"}
_KEPT_PREFIXES = ("COVERAGE_", "CUDA_", "HYPOTHESIS_", "NCCL_", "NVIDIA_")
_KEPT_FOR_A_FAMILY = {"CPU_NUM_DEVICES", "PJRT_DEVICE", "UNISONO_BACKEND", "XLA_FLAGS"}  # with --backend
# Of XLA's runs, most of the time is compilation, and each graph runs a few times: without optimization it takes half.
_SET_FOR_A_FAMILY = {"XLA_FLAGS": "--xla_backend_optimization_level=0"}
_SET = {"COLUMNS": "80", "LANG": "C.UTF-8", "LINES": "24"}  # readline, which pytest imports, sets sizes of its own

_IGNORED_BY_PYTHON = {signal.SIGPIPE, signal.SIGXFSZ}
_OPEN_FILES = 4096
_UMASK = 0o022
_LONGEST = 30  # of a directory for temporary files: there are sockets in it, whose paths have a limit of about 100


def normalize() -> None:
    """Give this process, and so its children, the signals, limits, environment and directory that tests expect."""
    _normalize_signals()
    _normalize_limits()
    os.umask(_UMASK)
    if "PYTEST_XDIST_WORKER" not in os.environ:  # else the controller has done it
        _normalize_environment()
        _use_own_temporary_directory()


def _normalize_signals() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    # Where SIGHUP was ignored, this process still outlives its terminal; a handler, unlike SIG_IGN, survives no exec.
    handlers = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: lambda *_: None}
    for signum in signal.valid_signals() - _IGNORED_BY_PYTHON:
        if signal.getsignal(signum) is signal.SIG_IGN:
            signal.signal(signum, handlers.get(signum, signal.SIG_DFL))
    if "PYTEST_XDIST_WORKER" in os.environ:  # it ends with its controller, which may have been told to outlive that
        signal.signal(signal.SIGHUP, handlers[signal.SIGHUP])


def _normalize_limits() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(_OPEN_FILES, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def _normalize_environment() -> None:
    has_family = any(each.startswith("--backend") for each in sys.argv)
    kept = _KEPT | _KEPT_FOR_A_FAMILY if has_family else _KEPT
    for name in [name for name in os.environ if name not in kept and not name.startswith(_KEPT_PREFIXES)]:
        del os.environ[name]
    os.environ.update(_SET)
    if has_family:
        os.environ.update({**_SET_FOR_A_FAMILY, **os.environ})


def _use_own_temporary_directory() -> None:
    """What earlier runs have left, as torch's compiled kernels, is out of sight; what this run leaves is removed."""
    directory = Path(tempfile.mkdtemp(prefix="uni-", dir=None if len(tempfile.gettempdir()) <= _LONGEST else "/tmp"))
    os.environ["TMPDIR"] = tempfile.tempdir = str(directory)
    os.environ.setdefault("HOME", str(directory))
    owner = os.getpid()

    def remove() -> None:
        if os.getpid() == owner:
            shutil.rmtree(directory, ignore_errors=True)

    atexit.register(remove)
