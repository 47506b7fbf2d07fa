"""Workers on more than one machine: torch's elastic agent, one per machine, started with settings that work.

The agents meet at an endpoint (host:port), agree on ranks, start the workers, and start all of them again when one
fails or machines come and go. All of that is torch's. Its workers are started by way of `entry`, which tells how they
end. What the agent gets wrong by default is put right here by settings; `_agent_variables` and `rendezvous_settings`
say why each is there.

*Threads:* the main one, or the agent could not handle signals.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous.api import RendezvousError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from unisono.errors import STOP_EXIT_CODE, describe_exit
from unisono.launch.hosts.addresses import interface_of
from unisono.launch.hosts.agent_settings import agent_settings
from unisono.launch.hosts.asking import StopWish, kill_workers
from unisono.launch.hosts.endpoint import local_address, serves_endpoint, split_endpoint, wait_served
from unisono.launch.hosts.entry import SETTINGS, Settings
from unisono.launch.hosts.failure_file import Failure, read_failure, write_failure
from unisono.launch.hosts.neighbours import Neighbours
from unisono.launch.hosts.store_server import quieten_store, serve_store
from unisono.launch.starting.marks import OUTER_DIRECTORY
from unisono.launch.target import Target

_HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_AGENT_LOGGERS = ("torch.distributed.elastic", "torch.distributed.launcher")


@dataclass(frozen=True)
class ElasticOptions:
    """How a run on several machines is started here, on one of them.

    Attributes:
        nproc: workers on this machine.
        min_nodes, max_nodes: with how many machines the run goes on.
        endpoint: host:port where the agents meet; the host is one of the machines.
        run_id: the same for all agents of a run.
        node_rank: if the machines are numbered; none but number 0 may serve the endpoint then.
        rdzv_conf: the agent's rendezvous settings, above those chosen here.
        local_addr: this machine's address for the others; None takes the one on the way to the endpoint.
        max_restarts: how often the workers are started again after a failure.
        log_dir: where each worker's output is kept, too; None keeps none.
        log_ranks: whose output is shown; None shows all.
        prefix: whether each line of output begins with its rank.
        backend: the device family; None picks one.
        timeout_s: of a collective, a last resort.
        grace_s: what workers have between SIGTERM and SIGKILL, when the agent or another worker has ended.
        is_checked: whether collectives are compared before they run.
        num_threads: of each worker; None leaves that to the worker.
        cores: the logical cores of each worker of this machine; None leaves them where the system puts them.
        lost_after_s: how long a machine may be silent before the others go on without it.
    """

    nproc: int
    min_nodes: int
    max_nodes: int
    endpoint: str
    run_id: str
    node_rank: int | None = None
    rdzv_conf: Mapping[str, str] = field(default_factory=dict)
    local_addr: str | None = None
    max_restarts: int = 0
    log_dir: str | None = None
    log_ranks: tuple[int, ...] | None = None
    prefix: bool = True
    backend: str | None = None
    timeout_s: float = 1800.0
    grace_s: float = 25.0
    is_checked: bool = False
    num_threads: int | None = None
    cores: list[set[int]] | None = None
    lost_after_s: float = 60.0


def run_elastic(options: ElasticOptions, target: Target) -> int:
    """Be this machine's agent until the run is over.

    Returns:
        0, or what the first failed worker here ended with (128 + n for signal n), or 128 + n when signal n has stopped
        this agent, or 143 when the ranks of all machines have agreed to stop. What went wrong is on stderr.
    """
    with (
        _directory(options) as directory,
        _kept_handlers(),
        _variables(_agent_variables(options, target, directory)),
        (wish := StopWish(options.grace_s)).heard(),
        (logs := _Logs(options, directory, wish)).neighbours.attended(),
    ):
        _quieten()
        quieten_store()
        sys.stdout.flush()
        with contextlib.suppress(AttributeError):
            sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr] # the agent writes lines to it
        try:
            _launch(options, logs, target)
        except ChildFailedError as error:
            return _report(error.failures, options)
        except SignalException as stop:
            _say(f"stopped by {stop.sigval.name}")
            return 128 + stop.sigval
        except KeyboardInterrupt:  # while it waited for the other agents
            return 128 + signal.SIGINT
        except (RendezvousError, TimeoutError) as error:
            _say(
                f"the agents could not meet at {options.endpoint}, or have lost one another: {type(error).__name__}: "
                f"{error}{f' ({error.__cause__})' if error.__cause__ else ''}"
            )
            return 1
        if wish.is_granted:
            _say("the ranks stopped early, as they were asked to")
            return STOP_EXIT_CODE
    return 0


def rendezvous_settings(options: ElasticOptions) -> dict[str, str]:
    """What the agents' meeting needs to be told."""
    chosen = {
        # How long a meeting of enough agents waits for more; a machine that comes later joins by a restart. Torch: 30.
        "last_call_timeout": "2",
        # A machine that is gone is given up after interval x attempts. Torch: 5 x 3, so 46 s in all until work goes on.
        "keep_alive_interval": "1",
        "keep_alive_max_attempt": "3",
        # How long the machine of the store may be silent; the others end then.
        "read_timeout": str(math.ceil(options.lost_after_s)),
    }
    # The store is served here, see `serves_endpoint`; torch would do so on all interfaces.
    return {**chosen, **options.rdzv_conf, "is_host": "false"}


def _launch(options: ElasticOptions, logs: _Logs, target: Target) -> None:
    is_host = serves_endpoint(options.endpoint, options.node_rank)
    if "is_host" in options.rdzv_conf:
        is_host = options.rdzv_conf["is_host"].lower() in ("1", "true", "t", "yes", "y")  # as torch reads it
    settings = rendezvous_settings(options)
    store = None
    if is_host:
        host, port = split_endpoint(options.endpoint)
        with contextlib.suppress(OSError):  # another agent of this machine was faster
            store = serve_store(host, port, timedelta(seconds=options.lost_after_s), options.max_nodes == 1)
    if store is None:
        wait_served(options.endpoint, float(settings.get("join_timeout", 600)))
    try:
        _launch_agent(options, settings, logs, target)
    finally:
        del store  # until here it is served


def _launch_agent(options: ElasticOptions, settings: Mapping[str, str], logs: _Logs, target: Target) -> None:
    command = [
        "-m",
        "unisono.launch.hosts.entry",
        *(text.replace("$", "$$") for text in [target.name, *target.argv]),
    ]  # it fills in ${}
    ending = [signum for signum in _HANDLED if signum != signal.SIGTERM]
    patience_s = math.ceil(options.grace_s) + 2  # the guard of each worker sees to the grace itself
    with agent_settings(signal.SIGTERM, ending, patience_s) as told:
        config = LaunchConfig(
            min_nodes=options.min_nodes,
            max_nodes=options.max_nodes,
            nproc_per_node=options.nproc,
            run_id=options.run_id,
            role="" if options.log_dir and not options.prefix else "worker",
            rdzv_backend="c10d",
            rdzv_endpoint=options.endpoint,
            rdzv_configs=dict(settings),
            local_addr=options.local_addr or local_address(options.endpoint),
            max_restarts=options.max_restarts,
            monitor_interval=0.1,
            logs_specs=logs,
            log_line_prefix_template="[rank ${rank}] " if options.prefix else "${role_name}",
            **told,
        )
        elastic_launch(config, sys.executable)(*command)


class _Logs(DefaultLogsSpecs):
    """Where the workers' files go. Torch filters by local rank; the ranks themselves are known here only.

    It is asked at each start of the workers, and so the one who knows of it.
    """

    def __init__(self, options: ElasticOptions, directory: str, wish: StopWish) -> None:
        is_captured = options.prefix or options.log_dir is not None
        super().__init__(directory, tee=Std.ALL if is_captured else Std.NONE)
        self._ranks = options.log_ranks
        self._wish = wish
        self._workers: list[tuple[Mapping[str, str], str]] = []  # variables, and where a failure is told
        self._told = ""
        self.neighbours = Neighbours(options.endpoint, options.lost_after_s, self._give_up, _end_alone)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        if self._ranks is not None:
            shown = {local for local, environ in envs.items() if int(environ["RANK"]) in self._ranks}
            self._local_ranks_filter = shown or {-1}  # an empty filter would show all
        found = super().reify(envs)
        self._wish.of(found.error_files.values())
        self._workers = [(environ, found.error_files[local]) for local, environ in envs.items()]
        self.neighbours.begin_round(envs[0])
        return found

    def _give_up(self, reason: str) -> None:
        """End the workers of this machine, which wait for one that is lost."""
        if reason != self._told:
            self._told = reason
            _say(f"{reason}; the workers of this machine, which may wait for it, are ended")
        for environ, path in self._workers:
            write_failure(Failure.of(environ, os.getpid(), reason), path)
        kill_workers()


def _agent_variables(options: ElasticOptions, target: Target, directory: str) -> dict[str, str | None]:
    """The agent's environment, which its workers inherit; None unsets."""
    address = options.local_addr or local_address(options.endpoint)
    interface = interface_of(address) if address is not None else None
    settings = Settings(
        agent=os.getpid(),
        directory="" if options.log_dir else directory,
        timeout_s=options.timeout_s,
        grace_s=options.grace_s,
        backend=options.backend,
        is_checked=options.is_checked,
        is_module=target.is_module,
        cores=None if options.cores is None else [sorted(each) for each in options.cores],
    )
    return {
        "OMP_NUM_THREADS": str(options.num_threads) if options.num_threads else os.environ.get("OMP_NUM_THREADS"),
        # Else the store lives from start to restart, and the new workers read the addresses of the dead in it.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        # Else gloo takes the interface that the host's name resolves to, often the loopback.
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME") or interface,
        # Else each worker whose peer was killed prints pages about sockets, and more about hosts that have no name.
        "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
        "TORCHELASTIC_SIGNALS_TO_HANDLE": None,  # the agent sets it, and leaves it behind
        SETTINGS: settings.to_text(),
        OUTER_DIRECTORY: None,
    }


@contextlib.contextmanager
def _variables(wanted: Mapping[str, str | None]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in wanted}
    _set_variables(wanted)
    try:
        yield
    finally:
        _set_variables(before)


def _set_variables(wanted: Mapping[str, str | None]) -> None:
    for name, value in wanted.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@contextlib.contextmanager
def _kept_handlers() -> Iterator[None]:
    """The agent leaves its signal handlers behind, in which a later Ctrl-C is an `Exception`."""
    before = {signum: signal.getsignal(signum) for signum in _HANDLED}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


@contextlib.contextmanager
def _directory(options: ElasticOptions) -> Iterator[str]:
    """Where the workers' files go; without one of ours, each launch leaves a torchelastic_* behind."""
    if options.log_dir is not None:
        yield options.log_dir
        return
    with tempfile.TemporaryDirectory(prefix="unisono-agent-", ignore_cleanup_errors=True) as directory:
        yield directory


def _quieten() -> None:
    """What the agent logs about failures is told by us, once; and its first such line would import torch._dynamo, for
    two seconds, before anything is restarted. LOGLEVEL brings it back."""
    if "LOGLEVEL" not in os.environ:
        for name in logging.root.manager.loggerDict:
            if name.startswith(_AGENT_LOGGERS):
                logging.getLogger(name).setLevel(logging.CRITICAL)


def root_cause(failures: Mapping[int, ProcessFailure]) -> Failure:
    """The first failure on this machine that does not only follow from another one, else the first."""
    found = [_failure_of(rank, failure) for rank, failure in failures.items()]
    return min(found, key=lambda failure: (failure.is_secondary, failure.at))


def _failure_of(rank: int, failure: ProcessFailure) -> Failure:
    told = read_failure(failure.error_file_data)
    if told is not None:
        return told
    return Failure(
        rank, -1, -1, failure.pid, describe_exit(failure.exitcode), exit_code=failure.exitcode, at=failure.timestamp
    )


def _report(failures: Mapping[int, ProcessFailure], options: ElasticOptions) -> int:
    cause = root_cause(failures)
    others = sorted(failures.keys() - {cause.rank})
    lines = [f"failed: {cause.where}: {cause.message}"]
    if cause.is_secondary:
        lines.append("no worker of this machine failed first; the machine of the one that did tells more")
    elif others:
        lines.append(f"ranks {others} of this machine were stopped because of it, or followed")
    if options.log_ranks is not None and cause.rank not in options.log_ranks and cause.traceback:
        lines.append(cause.traceback.rstrip())
    path = failures[cause.rank].error_file
    if options.log_dir is not None and os.path.isfile(path):
        lines.append(f"its output is in {os.path.dirname(path)}")
    _say("\n  ".join(lines))
    return 128 - cause.exit_code if cause.exit_code < 0 else cause.exit_code


def _end_alone(reason: str) -> None:
    """End this agent, whose main thread waits in native code for an answer; the guards of its workers end with it."""
    _say(f"{reason}; this agent and its workers end")
    os._exit(1)


def _say(text: str) -> None:
    print(f"unisono: {text}", file=sys.stderr, flush=True)
