"""One step of a fleet: what it computes, what it waits for, what it holds in memory, and what failures cost.

A step waits for the slowest device. Gradients and parameters are sent beside the computing, one part of the model after
the other; the parts are taken as equal, in bytes and in work.

Collectives follow the alpha-beta model: to send n bytes takes latency + n / bandwidth (Hockney, 1994). An all-reduce is
a reduce-scatter and an all-gather, which cost the same: `half_s` is the time of either. "ring": p - 1 messages of n / p
bytes (Patarasuk and Yuan, 2009). "tree": two trees, log2(p) levels deep, through which the bytes flow in a pipeline
(Sanders, Speck and Träff, 2009). "auto": the faster of these two, as NCCL chooses. "hierarchical": a ring within each
machine, then recursive halving between machines (Rabenseifner, 2004; Goyal et al., 2017), where each device sends its
share, and all those of a machine its one link. A ring or tree of all devices lies so that one of its edges leaves each
machine: that is its slowest link.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy
import numpy.typing

from unisono.strategies import DDP, FSDP
from unisono_simulate.description import DescriptionError, Fleet, Model

_POINTS = (numpy.arange(4096) + 0.5) / 4096  # of (0, 1), at which an integral is taken


@dataclass(frozen=True)
class Prediction:
    """What is predicted of a number of devices.

    Attributes:
        devices, step_s: their number, and the time of a step.
        compute_s: the slowest device's computing in it; the rest is waiting, for other devices or for data.
        samples_per_s: of all devices, without failures.
        efficiency: their throughput by that of as many single devices.
        memory_bytes: of each device.
        checkpoint_s: the best time from one checkpoint to the next; None if nothing fails.
        useful: the fraction of the time that is left after checkpoints, restarts and repeated steps.
    """

    devices: int
    step_s: float
    compute_s: float
    samples_per_s: float
    efficiency: float
    memory_bytes: float
    checkpoint_s: float | None
    useful: float


def predict(model: Model, fleet: Fleet, devices: int) -> Prediction:
    """Predict a step on the first `devices` devices of a fleet.

    Raises:
        DescriptionError: they are on several machines, and the description has no link between machines.
    """
    step_s, compute_s = _step_s(model, fleet, devices)
    rate, efficiency = devices * model.batch / step_s, _step_s(model, fleet, 1)[0] / step_s
    held = memory_bytes(model, fleet.strategy, devices)
    if not math.isfinite(step_s + held) or not rate * efficiency:
        raise DescriptionError(f"the numbers are too large or too small: on {devices} devices a step takes {step_s} s")
    return Prediction(devices, step_s, compute_s, rate, efficiency, held, *_restarts(fleet, devices))


def _step_s(model: Model, fleet: Fleet, devices: int) -> tuple[float, float]:
    """Seconds of a step, and of the computing in it."""
    slowest, is_whole = slowdown(model, devices), fleet.strategy == DDP.name
    forward_s, backward_s = slowest * model.forward_s, slowest * model.backward_s
    optimizer_s = slowest * model.optimizer_s / (1 if is_whole else devices)
    compute_s = forward_s + backward_s + optimizer_s
    parameters, gradients = model.parameters * model.parameter_bytes, model.parameters * model.gradient_bytes
    if devices == 1:
        step_s = compute_s
    elif fleet.strategy == FSDP.name:  # gathers each unit for either pass, and reduces its gradients
        units = model.units
        gather_s, reduce_s = half_s(parameters / units, devices, fleet), half_s(gradients / units, devices, fleet)
        step_s = _beside(forward_s, gather_s, units, fleet.overlaps)
        step_s += _beside(backward_s, gather_s + reduce_s, units, fleet.overlaps) + optimizer_s
    else:
        buckets = max(math.ceil(gradients / model.bucket_bytes), 1)
        reduce_s = 2 * half_s(gradients / buckets, devices, fleet)
        step_s = forward_s + _beside(backward_s, reduce_s, buckets, fleet.overlaps) + optimizer_s
        # After a step under "zero1", each device sends the parameters that it has stepped.
        step_s += 0.0 if is_whole else half_s(parameters, devices, fleet)
    # Batches are loaded ahead: by each device's loader, from one storage.
    loading_s = model.batch / (fleet.loader_samples_per_s or math.inf)
    reading_s = devices * model.batch * model.sample_bytes / (fleet.storage_bytes_per_s or math.inf)
    return max(step_s, loading_s, reading_s), compute_s


def _beside(compute_s: float, sending_s: float, parts: int, overlaps: bool) -> float:
    """Seconds of a pass over equal parts, and of sending each after it (or before it), one at a time.

    Part i is ready at (i + 1) / parts of the pass. So what is longer decides: the sending of all, after the first part,
    or the pass, after which the last is sent (Li et al., 2020, on gradients in buckets).
    """
    if not overlaps:
        return compute_s + parts * sending_s
    return max(compute_s / parts + parts * sending_s, compute_s + sending_s)


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


def slowdown(model: Model, devices: int) -> float:
    """The expected time of the slowest of independent devices by that of a mean one.

    The mean of the largest of n numbers with quantile function q is the integral of q(u ** (1 / n)) over (0, 1) (David
    and Nagaraja, Order Statistics, 2003). Steps of a run are their own distribution, in which none is slower than the
    slowest that was seen; otherwise it is the lognormal one.
    """
    if devices == 1:
        return 1.0
    if model.steps_s:
        times, ranks = numpy.sort(model.steps_s), numpy.arange(len(model.steps_s) + 1) / len(model.steps_s)
        return float((times * numpy.diff(ranks**devices)).sum() / times.mean())
    sigma = math.sqrt(math.log1p(model.jitter**2))
    return float(numpy.exp(sigma * _largest_of(devices) - sigma**2 / 2).mean())


@lru_cache
def _largest_of(devices: int) -> numpy.typing.NDArray[numpy.float64]:
    tail = -numpy.expm1(numpy.log(_POINTS) / devices)  # 1 - u ** (1 / n), where that power is nearly 1
    return numpy.array([-NormalDist().inv_cdf(each) for each in tail])


def memory_bytes(model: Model, strategy: str, devices: int) -> float:
    """Bytes of each device: parameters, gradients and the optimizer's state (Rajbhandari et al., ZeRO, 2020).

    "ddp" and "zero1" hold gradients twice, in the buckets too; "fsdp" holds two whole units besides its shards, the one
    that runs and the next, and the gradients of one.
    """
    parameter, gradient, state = model.parameter_bytes, model.gradient_bytes, model.state_bytes
    if devices == 1:
        each = parameter + gradient + state
    elif strategy == FSDP.name:
        each = (parameter + gradient + state) / devices + (2 * parameter + gradient) / model.units
    else:
        each = parameter + 2 * gradient + state / (1 if strategy == DDP.name else devices)
    return model.parameters * each + model.activation_bytes


def _restarts(fleet: Fleet, devices: int) -> tuple[float | None, float]:
    """The best time between checkpoints, and the fraction of useful time, with exponential failures.

    The time is Daly's higher-order estimate (2006): Young's (1974), sqrt(2 * save_s * mtbf), and two terms more. The
    fraction is that of Daly's model of the whole run.
    """
    if not fleet.mtbf_s:
        return None, 1.0
    mtbf_s, ratio = fleet.mtbf_s / devices, fleet.save_s * devices / (2 * fleet.mtbf_s)
    young_s = math.sqrt(2 * fleet.save_s * mtbf_s)
    interval_s = young_s * (1 + math.sqrt(ratio) / 3 + ratio / 9) if ratio < 1 else mtbf_s + fleet.save_s
    # Beyond e ** 700 nothing is left.
    restarting, repeating = (min(each / mtbf_s, 700) for each in (fleet.restart_s, interval_s))
    return interval_s, (interval_s - fleet.save_s) / mtbf_s / math.exp(restarting) / math.expm1(repeating)
