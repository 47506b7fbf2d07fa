"""Device: one device as a value, whether or not it exists here: a `torch.device`, and what executes: torch itself,
immediately ("eager"), or the XLA runtime, which records a step and compiles it ("xla")."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from unisono.arguments import check_choice, check_integer, check_type
from unisono.devices import available_devices, family_names, get_backend, pick_backend
from unisono.devices.accelerator import current_accelerator

# What serves the devices of a kind, the usual one first; all other kinds are eager.
_RUNTIMES = {"cpu": ("eager", "xla"), "cuda": ("eager", "xla"), "xla": ("xla",)}


@dataclass(frozen=True)
class Device:
    """A device of one kind, served by one runtime. The machine is not accessed until the device is used.

    Args:
        kind: the name of a family, such as "cpu", "cuda" or "npu", in upper or lower case; also "GPU" for cuda, and
            "TPU" for xla where TorchTPU is not in use.
        ordinal: the device's index among those of its kind, from 0.
        backend: "eager" or "xla"; None is "xla" for the kind xla, and "eager" for the others.

    Raises:
        TypeError: the kind is not a string, or the ordinal not an integer.
        ValueError: there is no such kind or backend, the ordinal is negative, or the backend does not serve the kind.
    """

    kind: str
    ordinal: int = 0
    backend: str | None = None

    def __post_init__(self) -> None:
        check_type(self.kind, "kind", "pass a string", str)
        check_integer(self.ordinal, "ordinal", 0)
        kind = self.kind.lower()
        if kind in ("gpu", "tpu") and current_accelerator() != kind:
            kind = "cuda" if kind == "gpu" else "xla"
        check_choice(kind, "kind", *sorted(family_names()))
        runtimes = _RUNTIMES.get(kind, ("eager",))
        backend = str(self.backend or runtimes[0]).lower()
        check_choice(backend, "backend", *runtimes)
        object.__setattr__(self, "kind", kind)
        object.__setattr__(self, "backend", backend)

    @classmethod
    def of(cls, device: DeviceLike) -> Device:
        """Convert a `torch.device`, a string such as "cuda:1" or "GPU:1", an index of the picked family, or a `Device`.
        TypeError if it is none of these; ValueError if its kind is unknown, or its ordinal is not a number."""
        if isinstance(device, Device):
            return device
        check_type(device, "device", "pass a string, an index or a torch.device", str, int, torch.device)
        if isinstance(device, int):
            device = pick_backend().device(device)
        kind, colon, ordinal = str(device).partition(":")
        if colon and not ordinal.isdecimal():
            raise ValueError(f"device {device!r} is not written as a kind, a colon and a number, such as 'cpu:1'")
        return cls(kind, int(ordinal or 0))

    @classmethod
    def all(cls) -> list[Device]:
        """Every device here, of every family: accelerators first, and the CPU's last."""
        return [cls.of(device) for device in available_devices()]

    @classmethod
    def default(cls) -> Device:
        """The first device of the first available family: an accelerator if there is one, otherwise the CPU."""
        return cls.of(0)

    @classmethod
    def default_xla(cls) -> Device:
        """The first device that the XLA runtime serves: of a TPU, or else of the CPU. Starts the runtime; ValueError,
        with how to install it, where it is missing."""
        backend = pick_backend("xla")
        device = backend.device(0)
        backend.start(device)
        return cls.of(device)

    @property
    def torch_device(self) -> torch.device:
        """The corresponding `torch.device`; torch has one type for all devices that the XLA runtime serves."""
        kind = "xla" if self.backend == "xla" else self.kind
        get_backend(kind)  # one of another package registers its type with torch
        return torch.device(kind, self.ordinal)

    def __str__(self) -> str:
        return f"{self.kind}:{self.ordinal}" + (" by xla" if self.kind != "xla" == self.backend else "")


DeviceLike = str | int | torch.device | Device
