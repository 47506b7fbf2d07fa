"""A Ray cluster as an engine: an actor per machine runs our agent in its own process.

Not Ray Train: the workers are this package's, and their results, exceptions and restarts are those of `spawn`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from types import NoneType
from typing import Any

from unisono.arguments import check_integer, check_type
from unisono.comm.outcome import Outcome
from unisono.engines.piped import PipedMachine, local_command
from unisono.errors import UnisonoError
from unisono.protocols import Run


class _Machine:
    """The actor. Its methods run side by side: `run` waits for the end."""

    def __init__(self) -> None:
        self._ended: SimpleQueue[bytes] = SimpleQueue()
        self._machine = PipedMachine(local_command(), "the agent", self._ended.put)

    def begin(self, bundle: bytes, number: int, count: int, per_machine: int, endpoint: str) -> str:
        return self._machine.begin(bundle, number, count, per_machine, endpoint or f"{_address()}:0")

    def run(self) -> bytes:
        return self._ended.get()

    def ask_to_stop(self) -> None:
        self._machine.ask_to_stop()

    def kill(self) -> None:
        self._machine.kill()
        self._machine.wait()


def _address() -> str:
    import ray

    return str(ray.util.get_node_ip_address())


@dataclass(frozen=True)
class Ray:
    """The machines of a Ray cluster: that of `ray.init()`, if this process is not connected to one.

    Attributes:
        machines: how many of them; None takes all that are alive.
        resources: what each worker needs there, as Ray names it: {"CPU": 1}, {"GPU": 1, "CPU": 4}.
        variables: the environment variables that are sent.
    """

    machines: int | None = None
    resources: Mapping[str, float] | None = None
    variables: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.machines is not None:
            check_integer(self.machines, "machines", 1, "pass a number of machines, or None for all")
        check_type(self.resources, "resources", 'pass amounts by name, such as {"CPU": 1}', Mapping, NoneType)

    def machines_for(self, nprocs: int) -> int:
        import ray

        if not ray.is_initialized():
            ray.init()
        return self.machines or sum(node["Alive"] for node in ray.nodes())

    def start(self, bundle: bytes, machines: int, per_machine: int) -> Run:
        import ray
        from ray.util.placement_group import placement_group, remove_placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        each = {name: amount * per_machine for name, amount in (self.resources or {"CPU": 1}).items()}
        group = placement_group([each] * machines, strategy="STRICT_SPREAD")
        if not group.wait(60):
            remove_placement_group(group)
            raise UnisonoError(f"Ray has no {machines} machines with {each} each for {per_machine} workers")
        started = _RayRun(group)
        try:
            needs = {"num_cpus": each.get("CPU", 0), "num_gpus": each.get("GPU", 0)}
            actor: Any = ray.remote(max_concurrency=4, **needs)(_Machine)
            for number in range(machines):
                strategy = PlacementGroupSchedulingStrategy(group, number)
                started.actors.append(actor.options(scheduling_strategy=strategy).remote())
            endpoint = ""
            for number, one in enumerate(started.actors):
                endpoint = ray.get(one.begin.remote(bundle, number, machines, per_machine, endpoint))
                started.waited[one.run.remote()] = number
        except BaseException:
            started.kill()
            raise
        return started


class _RayRun:
    """The actors of a run; a `Run`."""

    def __init__(self, group: Any) -> None:
        self.actors: list[Any] = []
        self.waited: dict[Any, int] = {}  # the outcome to come, and the machine's number
        self._group = group

    def outcomes(self, timeout_s: float) -> Iterator[tuple[int, bytes]]:
        import ray

        if not self.waited:
            time.sleep(timeout_s)
            return
        for done in ray.wait(list(self.waited), num_returns=1, timeout=timeout_s)[0]:
            number = self.waited.pop(done)
            try:
                yield number, ray.get(done)
            except ray.exceptions.RayError as error:
                lost = UnisonoError(f"machine {number} has sent no result: {str(error).strip().splitlines()[0]}")
                yield number, Outcome[None].failure(lost).to_bytes()

    def ask_to_stop(self) -> None:
        for actor in self.actors:
            actor.ask_to_stop.remote()

    def kill(self) -> None:
        import ray
        from ray.util.placement_group import remove_placement_group

        with suppress(ray.exceptions.RayError):
            ray.get([actor.kill.remote() for actor in self.actors], timeout=15)
        for actor in self.actors:
            ray.kill(actor)
        remove_placement_group(self._group)
