"""What the processes of a run on several machines send one another as pickles: signed with the run's secret, if it has
one, and not loaded otherwise. A pickle runs code when it is loaded, and the network may have other users.

*Threads:* any; the secret is set before the first message.
"""

from __future__ import annotations

import hmac

from unisono.errors import UnisonoError

_MARK = b"unisono signed "
_SIZE = len(_MARK) + 32
_secret = b""


class UnsignedError(UnisonoError):
    """A message is not signed with the secret of this run."""


def use_secret(secret: str) -> None:
    """Sign what this process sends from now on, and load nothing that is not signed alike; "" is no secret."""
    global _secret
    _secret = secret.encode()


def has_secret() -> bool:
    """Whether messages are signed."""
    return bool(_secret)


def tag(data: bytes) -> bytes:
    """The signature of some bytes: their HMAC, by SHA-256."""
    return hmac.digest(_secret, data, "sha256")


def seal(data: bytes) -> bytes:
    """The bytes with their signature, if there is a secret."""
    return _MARK + tag(data) + data if _secret else data


def unseal(data: bytes) -> bytes:
    """The bytes that were sealed; UnsignedError, if they are not signed with the secret of this process."""
    if not _secret and not data.startswith(_MARK):
        return data
    if not _secret:
        raise UnsignedError("the run has a secret, and this process has none; leave out --rdzv-insecure")
    if not hmac.compare_digest(_MARK + tag(data[_SIZE:]), data[:_SIZE]):
        raise UnsignedError(
            "what came by the network is not signed with the secret of this run, and was not loaded; all machines need "
            "the same --rdzv-secret-file, UNISONO_RDZV_SECRET or ~/.unisono-secret, and the same --rdzv-id"
        )
    return data[_SIZE:]
