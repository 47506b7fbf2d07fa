"""Runs this machine's agent: serves or finds the endpoint, agrees on names and secrets, and reports how the run ended.

*Threads:* the main one.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import platform
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous import RendezvousParameters, RendezvousTimeoutError, dynamic_rendezvous
from torch.distributed.elastic.rendezvous.api import RendezvousError

from unisono.comm.outcome import Outcome
from unisono.comm.sealing import seal, sealed_store, unseal, use_secret
from unisono.errors import UnisonoError
from unisono.launch.context import handlers_set
from unisono.launch.held_memory import held_memory, save_snapshot
from unisono.launch.hosts.agent import LOOK_S, SIGNALS, Agent, MachineOptions
from unisono.launch.hosts.endpoint import (
    address_towards,
    check_run_of,
    is_loopback,
    name_run_of,
    quieten_store,
    serve_store,
    serves_endpoint,
    silence_limited,
    split_endpoint,
    wait_served,
)
from unisono.launch.hosts.rendezvous_state import LeftOut, Missing, SealedBackend
from unisono.launch.job import Job
from unisono.launch.run_target import variables_set
from unisono.launch.starting.zygote_client import warm
from unisono.launch.watching.log_directory import make_log_directory, name_run
from unisono.torch_private import CACHE_DURATION, POLL_DELAY, STATE_HOLDER, create_backend, create_handler

_LOGGERS = ("torch.distributed.elastic", "torch.distributed.launcher")
# Otherwise the agent serves a second store, at the port that scripts assume to be free.
_VARIABLES = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

logger = logging.getLogger(__name__)


def run_agent(job: Job, options: MachineOptions) -> Outcome[list[Any]]:
    """Run this machine's agent until the run is over; the restarts of `job` are those of the whole run.

    Returns:
        The results of this machine's ranks, or an error: the first cause of the run's failure, on any machine; an
        UnisonoError, where the agents have lost contact with one another; a StoppedError, where the ranks of all
        machines have agreed to stop; SystemExit with 128 + its number, where a signal has ended this agent.

    Raises:
        OSError: `log_dir` cannot hold the files of a run; nothing was started.
        UnisonoError: no agent serves the endpoint, or one of another run.
    """
    log_dir = job.options.output.log_dir
    warm(job.options.chosen_start_method)  # the zygote starts up while the agents meet
    _quieten_agent()
    with contextlib.ExitStack() as stack, variables_set(_VARIABLES), _serve_endpoint(options) as is_host:
        stack.callback(use_secret, "")
        use_secret(options.secret)
        if is_host and not options.secret:
            logger.warning(
                "without a secret, anyone who reaches %s, or a port of a rank, can run code in the ranks; without "
                "--rdzv-insecure they sign what they send",
                options.endpoint,
            )
        parameters = _parameters(options)
        with silence_limited(options.endpoint, options.join_s):
            _, plain = create_backend(parameters)
        check_run_of(plain, options.run_id, options.endpoint, is_alone=options.max_nodes == 1 and not is_host)
        store = sealed_store(plain)
        _check_nodes(plain, options)
        log_directory = None if log_dir is None else make_log_directory(log_dir, _agreed_name(store, options))
        sealed = SealedBackend(plain, options.run_id)
        missing, left_out = Missing(parameters), LeftOut(parameters)
        sealed.on_state += [missing, left_out]
        stack.callback(sealed.close)
        handler = create_handler(store, sealed, parameters)
        _look_often(handler)
        spec = WorkerSpec(
            role="worker",
            local_world_size=job.place.local_world_size,
            entrypoint="unisono",
            rdzv_handler=handler,
            max_restarts=job.options.max_restarts,
            monitor_interval=LOOK_S,
        )
        job = replace(job, held_memory=stack.enter_context(held_memory()))
        agent = Agent(spec, job, options, log_directory)
        with agent.others.attended(is_host):
            verdict = _run(agent, options, missing, left_out)
            if verdict.error is not None:  # before the others learn that this agent leaves: they ask the store, too
                save_snapshot(job.held_memory, partial(agent.place_to_save, store))
        # A machine that was ended by a signal leaves the rendezvous open, so that others can still join.
        if not (isinstance(verdict.error, SystemExit) and agent.was_asked):
            with contextlib.suppress(RendezvousError):
                handler.shutdown()
    return verdict


def _parameters(options: MachineOptions) -> RendezvousParameters:
    """The settings of the agents' rendezvous."""
    settings = {
        # How long a rendezvous of enough agents waits for more; a machine that comes later joins by a restart. Torch:
        # 30.
        "last_call_timeout": "2",
        # The others give up on a lost machine after interval x attempts. Torch: 5 x 3, a total of 46 s until work
        # continues.
        "keep_alive_interval": "1",
        "keep_alive_max_attempt": "3",
        # How long the machine that serves the store may be silent; then the others end.
        "read_timeout": str(math.ceil(options.lost_after_s)),
    }
    return RendezvousParameters(
        backend="c10d",
        endpoint=options.endpoint,
        run_id=options.run_id,
        min_nodes=options.min_nodes,
        max_nodes=options.max_nodes,
        # The agent's default is what its host name resolves to: 127.0.1.1.
        local_addr=options.local_addr or address_towards(*split_endpoint(options.endpoint)),
        # The store is served here, see `serves_endpoint`; torch would serve it on all interfaces.
        **{**settings, **options.rdzv_conf, "is_host": "false"},
    )


def _look_often(handler: Any) -> None:
    """Let an agent that waits for others look for them as often as it looks at its workers; torch: once a second, so
    that each start of the workers takes one or two seconds more."""
    if POLL_DELAY and STATE_HOLDER and CACHE_DURATION:
        setattr(dynamic_rendezvous, POLL_DELAY, lambda seconds: time.sleep(LOOK_S))
        setattr(getattr(handler, STATE_HOLDER), CACHE_DURATION, LOOK_S)


def _run(agent: Agent, options: MachineOptions, missing: Missing, left_out: LeftOut) -> Outcome[Any]:
    try:
        with handlers_set(dict.fromkeys(SIGNALS, agent.on_signal)):
            ended = agent.run()
    except SignalException as stop:
        logger.warning("stopped by %s", stop.sigval.name)
        its_end = UnisonoError(f"the agent on {platform.node()} was stopped by {stop.sigval.name}")
        # The workers of the other machines wait for ours in collectives.
        agent.others.say(verdict=Outcome.failure(its_end).to_bytes())
        return Outcome(error=SystemExit(128 + stop.sigval))
    except (RendezvousError, TimeoutError, dist.DistError) as error:
        # A machine that has failed no longer serves the endpoint.
        if (known := agent.others.round.trouble()) is not None:
            return known
        if left_out.reason:
            return left_out.end()
        if missing.reason and isinstance(error, RendezvousTimeoutError):
            what = f"{missing.reason} within {options.join_s:g} s; start the same command on each, in that time"
            return Outcome(error=UnisonoError(what))
        lost = UnisonoError(
            f"the agents could not meet at {options.endpoint}, or have lost each other: {type(error).__name__}: "
            f"{error}{f' ({error.__cause__})' if error.__cause__ else ''}"
        )
        return Outcome(error=lost)
    return agent.verdict if ended is not None else left_out.end()


@contextmanager
def _serve_endpoint(options: MachineOptions) -> Iterator[bool]:
    """Serve the endpoint during the block, or wait until another process serves it. Yields whether it is this
    process."""
    is_host = serves_endpoint(options.endpoint, options.node_rank)
    if "is_host" in options.rdzv_conf:
        is_host = options.rdzv_conf["is_host"].lower() in ("1", "true", "t", "yes", "y")  # parsed as torch does
    store = None
    if is_host:
        host, port = split_endpoint(options.endpoint)
        with contextlib.suppress(OSError):  # another agent of this machine was faster
            is_alone = options.max_nodes == 1 or is_loopback(host)
            store = serve_store(host, port, timedelta(seconds=options.lost_after_s), is_alone)
            name_run_of(store, options.run_id)
    if store is None:
        try:
            wait_served(options.endpoint, options.join_s)
        except TimeoutError as error:
            raise UnisonoError(str(error)) from None
    yield store is not None
    del store  # the store is served until here


def _check_nodes(plain: Any, options: MachineOptions) -> None:
    """Check that the agents of the run ask for the same machines: otherwise some wait, and others begin. UnisonoError:
    the first one to ask has other numbers."""
    own = ":".join(map(str, sorted({options.min_nodes, options.max_nodes})))
    # Sealed here: a sealed store of a process without a secret is the plain one, and takes signed bytes for plain ones.
    key = f"unisono/nodes/{options.run_id}"
    agreed = unseal(plain.compare_set(key, "", seal(own.encode(), key)), key).decode()
    if agreed != own:
        raise UnisonoError(
            f"an agent of the run {options.run_id!r} at {options.endpoint} has --nnodes {agreed}, and this one {own}; "
            "give all agents the same"
        )


def _agreed_name(store: Any, options: MachineOptions) -> str:
    """The name of the run's log directory: that of the first agent to ask."""
    own = name_run(platform.node())
    agreed = store.compare_set(f"unisono/logs/{options.run_id}", "", own).decode()
    # Nothing is signed where there is no secret: this must not be a path to anywhere else.
    return agreed if re.fullmatch(r"[\w.-]+_\d+", agreed) else own


def _quieten_agent() -> None:
    """Silence the agent's own logging: we report failures once ourselves, and its first such line would import
    torch._dynamo, which takes two seconds, before anything is restarted. LOGLEVEL enables it again."""
    quieten_store()
    if "LOGLEVEL" not in os.environ:
        for name in logging.root.manager.loggerDict:
            if name.startswith(_LOGGERS):
                logging.getLogger(name).setLevel(logging.CRITICAL)
