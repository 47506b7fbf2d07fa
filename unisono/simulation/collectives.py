"""The time of collectives by the alpha-beta model: to send n bytes takes latency + n / bandwidth (Hockney, 1994).

An all-reduce is a reduce-scatter and an all-gather, which cost the same: `half_s` is the time of either. "ring": p - 1
messages of n / p bytes (Patarasuk and Yuan, 2009). "tree": two trees, log2(p) levels deep, through which the bytes flow
in a pipeline (Sanders, Speck and Träff, 2009). "auto": the faster of these two, as NCCL chooses. "hierarchical": a ring
within each machine, then recursive halving between machines (Rabenseifner, 2004; Goyal et al., 2017), where each device
sends its share, and all those of a machine its one link. A ring or tree of all devices lies so that one of its edges
leaves each machine: that is its slowest link.
"""

from __future__ import annotations

import math

from unisono.simulation.description import Fleet


def half_s(nbytes: float, devices: int, fleet: Fleet) -> float:
    """Seconds of a reduce-scatter, or an all-gather, of this many bytes over the first `devices` devices of a fleet."""
    within, machines = min(devices, fleet.per_machine), math.ceil(devices / fleet.per_machine)
    bytes_per_s, latency_s = fleet.link(machines > 1)
    levels = math.ceil(math.log2(machines if fleet.algorithm == "hierarchical" else devices))
    if fleet.algorithm == "hierarchical":
        within_s = _ring_s(nbytes, within, *fleet.link(False))
        return within_s + levels * latency_s + (1 - 1 / machines) * nbytes / bytes_per_s
    found = {
        "ring": _ring_s(nbytes, devices, bytes_per_s, latency_s),
        "tree": levels * latency_s + nbytes / bytes_per_s,
    }
    return min(found.values()) if fleet.algorithm == "auto" else found[fleet.algorithm]


def _ring_s(nbytes: float, devices: int, bytes_per_s: float, latency_s: float) -> float:
    return (devices - 1) * (latency_s + nbytes / devices / bytes_per_s)
