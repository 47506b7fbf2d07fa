"""What the processes of a run on several machines send one another by a store or as pickles: signed with the run's
secret, if it has one, and otherwise not trusted. The network may have other users, who reach the store; a pickle runs
code when it is loaded, and anyone may listen at an address.

A signature covers the place, too: the key of a store, or the sender, the number and the world of a message. So what was
sent once is not trusted in another place.

*Threads:* any; the secret is set before the first message.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import math
import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from datetime import timedelta
from secrets import token_hex
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from unisono.comm.operations import HOST
from unisono.errors import UnisonoError
from unisono.torch_private import OBJECT_TO_TENSOR, TENSOR_TO_OBJECT

logger = logging.getLogger(__name__)

_MARK = b"unisono signed "
_SIZE = len(_MARK) + 32
_QUIET_S = 5.0  # between two attacks
_HEAD = 8  # bytes of a number
_LATE = 1024  # how many numbers older than the newest a message may be
_secret = b""


class UnsignedError(UnisonoError):
    """A message is not signed with the secret of this run."""


class Overwriting:
    """A process without the secret overwrites what this one reads: reported in one line until that stops."""

    def __init__(self) -> None:
        self._began = self._last = -math.inf

    def note(self, error: UnsignedError, what: str) -> float:
        """Note what was found; returns for how many seconds that has continued."""
        now = time.monotonic()
        if now - self._last > _QUIET_S:
            self._began = now
            logger.warning("%s: %s", what, error)
        self._last = now
        return now - self._began


def use_secret(secret: str) -> None:
    """Sign what this process sends from now on, and load nothing that is not signed alike; "" is no secret."""
    global _secret
    _secret = secret.encode()


def has_secret() -> bool:
    """Whether messages are signed."""
    return bool(_secret)


def tag(data: bytes, place: str) -> bytes:
    """The signature of some bytes in a place: their HMAC, by SHA-256."""
    return hmac.digest(_secret, place.encode() + b"\0" + data, "sha256")


def seal(data: bytes, place: str) -> bytes:
    """The bytes with their signature, if there is a secret."""
    return _MARK + tag(data, place) + data if _secret else data


def unseal(data: bytes, place: str) -> bytes:
    """The bytes that were sealed; UnsignedError if they are not signed for that place with the secret of this
    process."""
    if not _secret and not data.startswith(_MARK):
        return data
    if not _secret:
        raise UnsignedError("the run has a secret, and this process has none; leave out --rdzv-insecure")
    if not hmac.compare_digest(_MARK + tag(data[_SIZE:], place), data[:_SIZE]):
        raise UnsignedError(
            f"what came by the network ({place}) is not signed with the secret of this run, and was not loaded; all "
            "machines need the same --rdzv-secret-file, UNISONO_RDZV_SECRET or ~/.unisono-secret, and the same "
            "--rdzv-id; if they have, somebody else writes to the ports of this run"
        )
    return data[_SIZE:]


def sealed_store(store: Any) -> Any:
    """The store, if there is no secret; else one that signs its values. Keep it as long as any group that uses it: the
    groups hold only its C++ part."""
    return SealedStore(store) if _secret else store


class SealedStore(Store):
    """Signs the values of another store, each for its key, those of torch's groups among them: the addresses at which
    ranks connect. A key is written once, or by one process; the numbers of `add` are not signed."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store
        self._clones: list[Store] = []

    def set(self, key: str, value: str | bytes) -> None:
        self._store.set(key, seal(_bytes_of(value), key))  # type: ignore[arg-type]  # annotated as str, takes bytes

    def get(self, key: str) -> bytes:
        return unseal(self._store.get(key), key)

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        expected, desired = (seal(_bytes_of(each), key) if each else b"" for each in (expected_value, desired_value))
        return unseal(self._store.compare_set(key, expected, desired), key)  # type: ignore[arg-type]

    # Functions of this class, since torch calls no others from C++.

    def add(self, key: str, value: int) -> int:
        return self._store.add(key, value)

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)

    def wait(self, keys: list[str], *timeout: timedelta) -> None:
        self._store.wait(keys, *timeout)

    def delete_key(self, key: str) -> bool:
        return self._store.delete_key(key)

    def num_keys(self) -> int:
        return self._store.num_keys()

    deleteKey, getNumKeys = delete_key, num_keys  # noqa: N815 # as C++ calls them

    def set_timeout(self, timeout: timedelta) -> None:
        self._store.set_timeout(timeout)

    def clone(self) -> Store:
        """Another connection to it, as a split group has."""
        found = SealedStore(self._store.clone())  # type: ignore[attr-defined]  # its stub has none
        self._clones.append(found)  # the group would keep only the C++ part
        return found


def _bytes_of(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def agree(store: Any, number: int, count: int, text: str = "", seen: object = None) -> tuple[list[str], str]:
    """The texts of the `count` processes that begin something together in a store, and a name for it: the same for
    those that have read and `seen` the same. Each adds random bytes, and takes its own from nowhere else. So the name
    is not one of an earlier run with the same secret, whose signed values someone may have written again."""
    own = f"{token_hex(16)} {text}"
    store.set(f"unisono/agreed/{number}", own)
    texts = [own if each == number else store.get(f"unisono/agreed/{each}").decode() for each in range(count)]
    return [each[33:] for each in texts], hashlib.sha256(repr((texts, seen)).encode()).hexdigest()[:32]


def check_peers(gather: Callable[[bytes], list[bytes]], rank: int) -> bytes:
    """Check that each process connected as a rank knows the secret: each signs what all of them have just made up;
    return that. UnsignedError: a rank does not. `gather` returns the bytes of all ranks."""
    asked = b"".join(gather(os.urandom(16)))
    for number, answer in enumerate(gather(tag(asked, f"rank {rank}"))):
        if answer != tag(asked, f"rank {number}"):
            raise UnsignedError(f"rank {number} does not know the secret of this run")
    return asked


def check_members(group: Any) -> None:
    """The same for a group that the script has created: a reader of the store can connect to it before a rank does. Not
    for a group of a device alone, whose transport connects when it is used."""
    if _secret and isinstance(group, dist.ProcessGroup) and f"{HOST.type}:" in dist.get_backend_config(group):

        def gather(data: bytes) -> list[bytes]:
            found = [b""] * dist.get_world_size(group)
            dist.all_gather_object(found, data, group=group)
            return found

        check_peers(gather, dist.get_rank(group))


def seal_objects(world: str) -> None:
    """Sign what torch's collectives of objects send in this world, for its group, and load nothing else, and nothing
    twice. Once in a process."""
    to_tensor, to_object = (getattr(dist.distributed_c10d, name) for name in (OBJECT_TO_TENSOR, TENSOR_TO_OBJECT))
    sent: Counter[str] = Counter()
    taken: defaultdict[tuple[str, bytes], _Taken] = defaultdict(_Taken)

    def place_of(group: Any) -> str:
        default: Any = dist.group.WORLD
        return f"objects of group {getattr(group or default, 'group_name', 'of a backend')} in world {world}"

    def encode(value: Any, device: torch.device, group: Any, *others: Any) -> tuple[torch.Tensor, torch.Tensor]:
        data, _ = to_tensor(value, device, group, *others)
        place = place_of(group)
        sent[place] += 1
        head = dist.get_rank().to_bytes(_HEAD) + sent[place].to_bytes(_HEAD)
        sealed = tensor_of(seal(head + data.cpu().numpy().tobytes(), place)).clone()  # torch resizes it
        return sealed.to(device), torch.tensor([len(sealed)], device=device)

    def decode(data: torch.Tensor, size: Any, group: Any, *others: Any) -> Any:
        place = place_of(group)
        opened = unseal(data.cpu().numpy().tobytes()[: int(size)], place)
        sender, number = opened[:_HEAD], int.from_bytes(opened[_HEAD : 2 * _HEAD])
        if not taken[place, sender].take(number):
            raise UnsignedError(f"what came by the network ({place}) has come before: somebody else has sent it again")
        opened = opened[2 * _HEAD :]
        return to_object(tensor_of(opened), len(opened), group, *others)

    setattr(dist.distributed_c10d, OBJECT_TO_TENSOR, encode)
    setattr(dist.distributed_c10d, TENSOR_TO_OBJECT, decode)


class _Taken:
    """The numbers of messages that have come from a sender. Some come only to others, and a few in another order."""

    def __init__(self) -> None:
        self._newest, self._seen = 0, 0  # bit k of the latter: number `newest - k` has come

    def take(self, number: int) -> bool:
        """Note that this one has come; False if it has before, or is so old that it may have."""
        if number > self._newest:
            self._seen = (self._seen << min(number - self._newest, _LATE)) % (1 << _LATE)
            self._newest = number
        bit = 1 << (self._newest - number)
        if bit >> _LATE or self._seen & bit:
            return False
        self._seen |= bit
        return True


def tensor_of(data: bytes) -> torch.Tensor:
    """The bytes as a tensor in main memory."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
