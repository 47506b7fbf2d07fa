"""Workers on more than one machine: torch's elastic agent, one per machine, with one of our groups as its workers.

The agents meet at an endpoint (host:port), agree on ranks, start the workers, and restart all of them when one fails or
machines join or leave. All of that is torch's. What an agent starts is a `Supervisor` with this machine's part of the
group. Unsuitable defaults of the agent are corrected by settings; `run_agent.py` says why.

SIGTERM, and the first Ctrl-C, are passed on to the workers if they handle it. The workers of all machines agree to
stop, and end normally everywhere, so this agent then does what it does at any normal end: it meets the others, and
exits; immediately, if the group has failed, or has not ended when the grace period is over.

*Threads:* the main one, which receives signals; methods named `on_*` are called in other threads, and in the main one
by signal handlers.
"""

from __future__ import annotations

import logging
import math
import os
import platform
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.multiprocessing import SignalException

from unisono.comm.outcome import Outcome
from unisono.comm.sealing import agree
from unisono.errors import StoppedError, UnisonoError
from unisono.launch.context import say_asked
from unisono.launch.group import Group
from unisono.launch.held_memory import save_snapshot
from unisono.launch.hosts.agent_round import MachineReport
from unisono.launch.hosts.endpoint import interface_of, split_endpoint
from unisono.launch.hosts.other_machines import OtherMachines
from unisono.launch.job import Job
from unisono.launch.starting.marks import SECRET
from unisono.launch.supervisor import Supervisor, tell_restart
from unisono.torch_private import MONITOR_WORKERS, REMAINING_RESTARTS, SHUTDOWN, START_WORKERS, STOP_WORKERS, overrides

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
LOOK_S = 0.1  # between two checks of the group, and of whether machines have joined
_MARGIN_S = 2.0  # after the grace period in which workers may stop early

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class MachineOptions:
    """How machines meet, and when they continue without one another."""

    min_nodes: int  # that the run continues with
    max_nodes: int
    endpoint: str  # host:port where the agents meet; the host is one of the machines
    run_id: str  # the same for all agents of a run
    node_rank: int | None = None  # if the machines are numbered; then only number 0 may serve the endpoint
    rdzv_conf: Mapping[str, str] = field(default_factory=dict)  # of torch's rendezvous; overrides what is chosen here
    local_addr: str | None = None  # this machine's for the others; None uses that of the route to the endpoint
    lost_after_s: float = 60.0  # that a machine may be silent before the others continue without it
    secret: str = field(default="", repr=False)  # signs what they send one another; "" for none

    @property
    def join_s(self) -> float:
        """How long agents wait for one another: torch's own default, unless the settings have another one."""
        return float(self.rdzv_conf.get("join_timeout", 600))


class Agent(SimpleElasticAgent):
    """Torch's agent, whose workers are one of our groups."""

    def __init__(self, spec: WorkerSpec, job: Job, options: MachineOptions, log_directory: Path | None) -> None:
        # Agents enter the final barrier once they know that all are done: only a lost one is not there soon.
        super().__init__(spec, exit_barrier_timeout=options.lost_after_s)
        # How this machine's last group ended; if it was a victim, the first cause that another machine reported.
        self.verdict: Outcome[Any] = Outcome()
        self.was_asked = False  # by a signal, to end
        # Torch's agents restart the workers of all machines; a supervisor would restart only its own.
        self._job = replace(job, options=replace(job.options, max_restarts=0))
        self._options = options
        self._log_directory = log_directory
        self._supervisor: Supervisor | None = None
        self._num_groups = 0  # that were started, as far as this machine knows
        self._patience_until: float | None = None  # the deadline of a requested early end
        beat_s = (job.options.hang_timeout_s or math.inf) / 5
        heard = self.on_report, self.on_lost, self.on_cut_off
        self.others = OtherMachines(options.endpoint, options.lost_after_s, *heard, beat_s)

    def on_signal(self, signum: int, frame: FrameType | None) -> None:
        is_repeated, self.was_asked = self.was_asked, True
        may_wish = signum in (signal.SIGTERM, signal.SIGINT) and not is_repeated
        if may_wish and self._supervisor is not None and self._supervisor.handles_stop():
            self._patience_until = time.monotonic() + self._job.options.grace_s + _MARGIN_S
            self._supervisor.request(Group.ask_to_stop)
            say_asked(signum)
        elif signum != signal.SIGTERM or self._patience_until is None:  # otherwise it merely repeats
            say_asked(signum, self._job.options.grace_s)
            raise SignalException(f"pid {os.getpid()} got {signal.Signals(signum).name}", signal.Signals(signum))

    def on_report(self, report: MachineReport) -> None:
        if self._supervisor is not None:
            self._supervisor.hear(report)

    def on_lost(self, reason: str, is_first: bool) -> None:
        """End the workers of this machine, which may be waiting for a lost machine."""
        if is_first:
            logger.info("%s; the workers of this machine, which may wait for it, are ended", reason)
        if self._supervisor is not None:
            self._supervisor.give_up(UnisonoError(reason))

    def on_cut_off(self, reason: str) -> None:
        """End this agent, whose main thread is blocked in native code; its workers end with it."""
        way = "start it again when the link is back, and the whole run if the others have ended"
        logger.warning("%s; this agent and its workers end: %s", reason, way)
        self._shutdown()
        save_snapshot(self._job.held_memory, lambda: self.others.round.own.machine + 1)
        os._exit(1)

    def place_to_save(self, store: Any) -> int | None:
        """Where this machine saves the last snapshot of the last group, as for `save_snapshot`: only the first to ask
        does, or each one if none answers."""
        own, key = f"{platform.node()} {os.getpid()}", f"unisono/saves/{self._options.run_id}/{self._num_groups}"
        try:
            return 0 if store.compare_set(key, "", own) == own.encode() else None
        except (RuntimeError, UnisonoError):  # the endpoint's machine is gone
            return self.others.round.own.machine + 1

    # The methods that torch's agent requires.

    @overrides(START_WORKERS)
    def _start_workers(self, group: Any) -> dict[int, Any]:  # torch annotates its numbers as None
        first = group.workers[0]
        # Torch's agents count the restarts that they have begun themselves.
        own = group.spec.max_restarts - getattr(self, REMAINING_RESTARTS)
        seen = group.master_addr, group.master_port
        # A machine that joins also ends a group, without a restart, and knows nothing of earlier ones.
        done = 0 if self._supervisor is None else self._supervisor.done
        facts = f"{own} {self._num_groups} {done}"
        texts, name = agree(group.store, group.group_rank, group.group_world_size, facts, seen)
        count, groups, done = map(max, zip(*(map(int, each.split()) for each in texts), strict=True))
        self._num_groups = groups + 1
        host, port = split_endpoint(self._options.endpoint)
        caller = self._job.caller
        place = replace(
            self._job.place,
            restart_count=count,
            rank=first.global_rank,
            world_size=first.world_size,
            node_rank=group.group_rank,
            address=host,
            port=port,
            store=f"unisono/ranks/{name}",
        )
        caller = replace(caller, environ={**caller.environ, **_variables_of_group(group, self._options)})
        job = replace(self._job, place=place, caller=caller, groups_before=groups, done_before=done)
        # set before reports can arrive
        self._supervisor = Supervisor(job, self._log_directory, self.others)
        # Before the workers start: their first report must belong to this round.
        self.others.begin_round(name, group.group_rank, group.group_world_size)
        self._supervisor.start()
        return dict(enumerate(self._supervisor.pids()))

    @overrides(MONITOR_WORKERS)
    def _monitor_workers(self, group: WorkerGroup) -> RunResult:
        assert self._supervisor is not None
        if not self._supervisor.wait(0):
            return self._wait()
        verdict = self._supervisor.verdict
        is_well = verdict.error is None or isinstance(verdict.error, StoppedError)
        # Before anything that waits: the other machines end their workers on a failure.
        self.others.say(**({"is_done": True} if is_well else {"verdict": verdict.to_bytes()}))
        while (found := self.others.round.decide(verdict, time.monotonic())) is None:
            if is_well:  # torch's agent would wait minutes for the others, ignoring their reports
                return self._wait()
            self.others.listen_now()  # for the cause
            time.sleep(LOOK_S)
        self.verdict = found
        if is_well and found is verdict:
            return RunResult(WorkerState.SUCCEEDED, {each.global_rank: None for each in group.workers})
        # A restart would undo the request.
        if self.was_asked:
            raise SignalException("the workers failed while stopping early", signal.SIGTERM)
        # False sets it to 0, which makes torch's agent fail instead of restarting.
        remaining = getattr(self, REMAINING_RESTARTS) * self._supervisor.may_restart(self.verdict.error)
        setattr(self, REMAINING_RESTARTS, remaining)
        if remaining > 0:
            restart_count = group.spec.max_restarts - remaining + 1
            tell_restart(self.verdict, restart_count, group.spec.max_restarts)
            if self.others.round.describe_loss(time.monotonic()) and self.others.count + 1 == self._options.min_nodes:
                logger.warning(
                    "waiting for the agent of that machine to be started again, for %d s", self._options.join_s
                )
        return RunResult(WorkerState.FAILED)

    def _wait(self) -> RunResult:
        if self._patience_until is not None and time.monotonic() > self._patience_until:
            raise SignalException("the workers have not stopped early", signal.SIGTERM)
        return RunResult(WorkerState.HEALTHY)

    @overrides(STOP_WORKERS)
    def _stop_workers(self, worker_group: WorkerGroup, *_: Any, **__: Any) -> None:
        if self._supervisor is not None:  # if its workers have not ended, torch's agent lets a machine join
            self._supervisor.restarts_for = "another machine has joined"
        self._shutdown()

    @overrides(SHUTDOWN)
    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, *_: Any, **__: Any) -> None:
        if self._supervisor is not None:
            self._supervisor.end(Group.interrupt if death_sig == signal.SIGINT else Group.stop)


def _variables_of_group(group: Any, options: MachineOptions) -> dict[str, str]:
    """The workers' environment variables, besides those that each rank gets individually."""
    found = {
        "MASTER_ADDR": group.master_addr,
        "MASTER_PORT": str(group.master_port),
        "GROUP_WORLD_SIZE": str(group.group_world_size),
        SECRET: options.secret,
    }
    if options.local_addr and (interface := interface_of(options.local_addr)) is not None:
        found["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", interface)
    return found
