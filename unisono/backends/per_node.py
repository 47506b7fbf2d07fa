"""How many workers a machine gets for torchrun's words in place of a number: `auto`, `gpu` and `cpu`."""

from __future__ import annotations

from unisono.backends import CPU, family_names, get_backend
from unisono.backends.cores import usable_cores

WORDS = ("auto", "gpu", "cpu")


def workers_per_node(word: str, family: str | None = None) -> tuple[int, str]:
    """The number of workers that one of `WORDS` means on this machine, and the family of their devices.

    "gpu" is one per accelerator, "cpu" one per core that this process may use, "auto" the former if there are
    accelerators, otherwise the latter.

    Args:
        word: one of `WORDS`.
        family: the device family, if one was named.

    Raises:
        ValueError: there is no such word; or "gpu", but there is no accelerator.
    """
    if word not in WORDS:
        raise ValueError(f"-n {word}: {word!r} is neither an integer of at least 1, nor auto, gpu or cpu")
    named = family_names() if family is None else (family,)
    if word != CPU:
        for backend in map(get_backend, named):
            if backend.is_accelerated() and backend.is_available():
                return backend.device_count(), backend.name
    if word == "gpu":
        raise ValueError(
            f"-n gpu: this machine has no accelerator of {', '.join(named)}; `cpu` is one worker per "
            "core, and a number is always possible"
        )
    return usable_cores(), CPU
