"""The secret by which the machines of a run sign what they send one another (`comm/sealing.py`): where it comes from.

A lasting secret, of a file or the environment, is not used itself: each run derives its own from it and the run id.
"""

from __future__ import annotations

import hmac
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from secrets import token_hex

from unisono.launch.hosts.endpoint import is_loopback, split_endpoint
from unisono.launch.starting.marks import SECRET

_FILE = ".unisono-secret"  # in the home directory
_MAKE = f"(umask 077; head -c 32 /dev/urandom | base64 > ~/{_FILE})"
_LEAST = 16  # characters


def secret_of_run(file: str | None, run_id: str, endpoint: str, max_nodes: int) -> str:
    """The secret of a run: that of `file`; else of the variable UNISONO_RDZV_SECRET; for one machine a new one; else
    that of `~/.unisono-secret`, which is made if the agents see the same one: on one machine, or in a SLURM job.

    ValueError: there is none; it is too short, or others may read it.
    """
    if file is not None:
        secret = secret_in(Path(file))
    elif given := os.environ.get(SECRET):
        secret = _check_length(given.strip(), SECRET)
    elif max_nodes == 1:
        secret = token_hex(32)
    else:
        secret = _secret_of_user(endpoint, max_nodes)
    return hmac.digest(secret.encode(), run_id.encode(), "sha256").hex()


def secret_in(path: Path) -> str:
    """The secret in a file. ValueError: there is none, it is too short, or others may read it."""
    try:
        secret, mode = path.read_text("latin-1").strip(), path.stat().st_mode
    except OSError as error:
        raise ValueError(f"the secret file {path} cannot be read: {error.strerror}") from None
    if mode & 0o077:
        raise ValueError(f"the secret file {path} may be read by others: chmod 600 {path}, if none has read it")
    return _check_length(secret, f"the secret file {path}")


def _check_length(secret: str, source: str) -> str:
    if len(secret) < _LEAST:
        raise ValueError(
            f"{source} has {len(secret)} characters, and needs {_LEAST}; make one by: head -c 32 /dev/urandom | base64"
        )
    return secret


def _secret_of_user(endpoint: str, max_nodes: int) -> str:
    reason = ""
    try:
        path = Path.home() / _FILE
        if not path.exists() and (is_loopback(split_endpoint(endpoint)[0]) or "SLURM_JOB_ID" in os.environ):
            _make(path)
        if path.exists():
            return secret_in(path)
    except (OSError, RuntimeError) as error:  # the latter: this user has no home directory
        reason = f" (there can be no ~/{_FILE}: {error})"
    raise ValueError(
        f"--nnodes {max_nodes} needs a secret, by which the machines sign what they send: without one, whoever reaches "
        f"{endpoint} could run code in the ranks{reason}. Make a file, and copy it to the machines that do not see "
        f"it:\n  {_MAKE}\nor name another by --rdzv-secret-file; or set {SECRET} in the environment of all agents; or "
        "pass --rdzv-insecure, if nobody else can reach their network"
    )


def _make(path: Path) -> None:
    """Make the file, complete at once: of agents that start together, all read what the first one has made."""
    descriptor, name = tempfile.mkstemp(dir=path.parent)  # which only this user can read
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(token_hex(32))
        with suppress(FileExistsError):
            os.link(name, path)
    finally:
        os.unlink(name)
