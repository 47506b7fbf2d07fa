"""Where the machines of a run get the secret that signs what they send one another (`comm/sealing.py`)."""

from __future__ import annotations

import hmac
import os
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from tempfile import NamedTemporaryFile

from unisono.launch.hosts.endpoint import is_loopback, split_endpoint
from unisono.launch.starting.marks import SECRET

_FILE = ".unisono-secret"  # in the home directory
_LEAST = 16  # characters


def secret_of_run(file: str | None, run_id: str, endpoint: str, max_nodes: int) -> str:
    """The secret of a run, derived from its id and that of `file`, of the variable UNISONO_RDZV_SECRET, or of
    `~/.unisono-secret`; the latter is created where the agents see the same file: on one machine, and in a SLURM job.
    One machine alone gets a new secret; `file=""` means none. ValueError: there is none, it is too short, or others may
    read it."""
    if file == "":
        return ""
    given = os.environ.get(SECRET, "").strip()
    if file is None and not given and max_nodes == 1:
        return token_hex(32)
    source = SECRET
    if file is not None or not given:
        path = _file_of_user(endpoint, max_nodes) if file is None else Path(file)
        source = f"the secret file {path}"
        try:
            given, mode = path.read_text("latin-1").strip(), path.stat().st_mode
        except OSError as error:
            raise ValueError(f"{source} cannot be read: {error.strerror}") from None
        if mode & 0o077:
            raise ValueError(f"{source} may be read by others: chmod 600 {path}, if none has read it")
    if len(given) < _LEAST:
        raise ValueError(
            f"{source} has {len(given)} characters, and needs {_LEAST}; make one by: head -c 32 /dev/urandom | base64"
        )
    return hmac.digest(given.encode(), run_id.encode(), "sha256").hex()


def _file_of_user(endpoint: str, max_nodes: int) -> Path:
    reason = ""
    try:
        path = Path.home() / _FILE
        if not path.exists() and (is_loopback(split_endpoint(endpoint)[0]) or "SLURM_JOB_ID" in os.environ):
            # Linked once it is complete: agents that start together all read what the first one has made.
            with NamedTemporaryFile("w", dir=path.parent) as file, suppress(FileExistsError):
                file.write(token_hex(32))
                file.flush()
                os.fsync(file.fileno())  # before another node reads it
                os.link(file.name, path)
        if path.exists():
            return path
    except (OSError, RuntimeError) as error:  # the latter: this user has no home directory
        reason = f" (there can be no ~/{_FILE}: {error})"
    raise ValueError(
        f"--nnodes {max_nodes} needs a secret, with which the machines sign what they send: without one, "
        f"anyone who reaches {endpoint} could run code in the ranks{reason}. Make a file, and copy it to the machines "
        f"that do not see it:\n  (umask 077; head -c 32 /dev/urandom | base64 > ~/{_FILE})\nor name another by "
        f"--rdzv-secret-file; or set {SECRET} in the environment of all agents; or pass --rdzv-insecure, if nobody "
        "else can reach their network"
    )
