"""Every engine keeps what `spawn` promises: results by rank, exceptions in their own type, restarts, stops, no rest."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import psutil
import pytest
import torch.distributed as dist
import warm_scripts
from faults import Script, survivors, until
from on_engine import EPOCHS, SAMPLES

from unisono import Output, spawn
from unisono.comm.outcome import Outcome
from unisono.engines import Hosts, Local, Ray, Slurm
from unisono.engines import ray as ray_engine
from unisono.engines import slurm as slurm_engine
from unisono.engines.piped import PipedMachine, local_command
from unisono.errors import StoppedError, UnisonoError

CALLER = Path(__file__).parent / "on_engine.py"
RAY = """
import sys
import ray
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
cluster.add_node(num_cpus=2)
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""

SERVER = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
HAS_SSH = SERVER is not None and shutil.which("ssh") is not None and os.geteuid() == 0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


class Ground(NamedTuple):
    """Where a script that calls an engine runs.

    Attributes:
        engine: as an expression; "{directory}" stands for the script's.
        enter: precedes the command.
        environ: further variables.
        home: where the agents' commands start, if not in the script's directory.
    """

    engine: str
    enter: tuple[str, ...] = ()
    environ: dict[str, str] = {}  # noqa: RUF012 - never changed
    home: Path | None = None

    def start(self, directory: Path, how: str, nprocs: int = 4) -> subprocess.Popen[str] | warm_scripts.Forked:
        if self.engine == "Local(2)":
            return warm_scripts.run(CALLER, self.engine, how, str(nprocs), directory=directory, agents=2)
        command = [*self.enter, sys.executable, str(CALLER), self.engine.format(directory=directory), how, str(nprocs)]
        environ = {**os.environ, **self.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        with (directory / "errors").open("a") as errors:
            return subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=errors, text=True, errors="replace", cwd=directory, env=environ
            )

    def run(self, directory: Path, how: str, nprocs: int = 4) -> dict[str, Any]:
        return result_of(self.start(directory, how, nprocs), directory)


def result_of(process: subprocess.Popen[str] | warm_scripts.Forked, directory: Path) -> dict[str, Any]:
    try:
        output, errors = process.communicate(timeout=150)
        if errors:  # else they are there
            (directory / "errors").write_text(errors)
    finally:
        process.send_signal(signal.SIGKILL)
    lines = [line for line in output.splitlines() if line.startswith("ended ")]
    assert len(lines) == 1, output + (directory / "errors").read_text()
    return {**json.loads(lines[0].removeprefix("ended ")), "output": output}


@pytest.fixture(scope="module")
def local() -> Ground:
    return Ground("Local(2)")


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    """Two hosts: a real sshd, at two addresses of this machine."""
    assert SERVER is not None
    directory = tmp_path_factory.mktemp("ssh")
    Path("/run/sshd").mkdir(exist_ok=True)
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(directory / name)], check=True)
    (home := directory / "home").mkdir()
    path = os.pathsep.join(sys.path)
    (directory / "python").write_text(f'#!/bin/sh\ncd {home}\nPYTHONPATH={path} exec {sys.executable} "$@"\n')
    (directory / "python").chmod(0o755)
    port = 20000 + os.getpid() % 10000
    settings = ["UsePAM=no", "StrictModes=no", "PermitRootLogin=yes", f"AuthorizedKeysFile={directory}/user.pub"]
    listening = [f"ListenAddress={address}:{port}" for address in ("[::1]", "127.0.0.2")]
    options = [word for each in (*settings, *listening) for word in ("-o", each)]
    daemon = subprocess.Popen([SERVER, "-D", "-e", "-f", "/dev/null", "-h", str(directory / "host"), *options])
    known = ("-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null", "-o", "LogLevel=ERROR")
    given = ("-p", str(port), "-i", str(directory / "user"), *known)
    try:
        engine = f"Hosts(['root@::1', 'root@127.0.0.2'], python='{directory}/python', options={given})"
        yield Ground(engine, home=home)
    finally:
        daemon.kill()
        daemon.wait()


@pytest.fixture(scope="module")
def ray() -> Iterator[Ground]:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("needs Ray: make test-engines")
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    # No descendant of this process: Ray starts and ends processes at any time.
    command = ["setsid", "--fork", sys.executable, "-c", RAY]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ) as cluster:
        assert cluster.stdout is not None
        yield Ground("Ray()", environ={"RAY_ADDRESS": cluster.stdout.readline().strip()})


@pytest.fixture(scope="module")
def slurm(slurm_entry: tuple[tuple[str, ...], dict[str, str]]) -> Ground:
    enter, environ = slurm_entry
    return Ground("Slurm(2, '{directory}/jobs')", enter, environ)


# `Local` starts and ends agents as `Hosts` does, without ssh.
@pytest.fixture(scope="module", params=["hosts" if HAS_SSH else "local", "ray", "slurm"])
def ground(request: pytest.FixtureRequest) -> Ground:
    found: Ground = request.getfixturevalue(request.param)
    return found


def plant(directory: Path) -> None:
    """Put modules there that another user has written."""
    for name in ("json", "multiprocessing", "pickle", "sitecustomize", "torch", "unisono"):
        (directory / f"{name}.py").write_text("raise SystemExit('the code of another user has run')")


def test_results_come_by_rank_and_no_agent_imports_from_where_it_starts(ground: Ground, tmp_path: Path) -> None:
    for directory in filter(None, (tmp_path, ground.home)):
        plant(directory)
    try:
        found = ground.run(tmp_path, "return")
    finally:
        for each in ground.home.iterdir() if ground.home is not None else ():
            each.unlink()
    assert [[each[0], each[1], each[4]] for each in found["results"]] == [[rank, 4, 10.0] for rank in range(4)]
    assert [each[2] for each in found["results"]] == [0, 0, 1, 1]
    assert {each[6] for each in found["results"]} == {64}, "each has a secret"
    if "Ray" not in ground.engine:  # which shows each line of its own accord, and some of them later
        assert all(f"rank {rank} is here \ufffd\n" in found["output"] for rank in range(4))
    for directory in tmp_path.glob("jobs/*"):  # where SLURM's job has the secret of the run
        assert directory.stat().st_mode & 0o077 == 0


def test_an_actor_of_ray_imports_nothing_from_its_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(tmp_path)
    monkeypatch.chdir(tmp_path)
    actor = ray_engine._Machine()  # which needs no Ray
    assert actor.begin(b"", 0, 1, 1, "127.0.0.1:0").startswith("127.0.0.1:")  # it has imported all, and nothing to run
    actor.kill()


def test_an_exception_comes_in_its_own_type_with_its_place(ground: Ground, tmp_path: Path) -> None:
    found = ground.run(tmp_path, "raise")
    assert (found["type"], found["text"], found["is_own"]) == ("Mine", "not today", True)
    assert 'raise Mine("not today")' in found["traceback"]
    assert any("rank 3 of 4" in note for note in found["notes"])


def test_a_failed_group_is_restarted_on_all_machines(local: Ground, tmp_path: Path) -> None:
    found = local.run(tmp_path, "restart")
    assert [each[3] for each in found["results"]] == [1] * 4


def test_a_lost_machine_is_an_error_that_says_so(ground: Ground, tmp_path: Path) -> None:
    began = time.monotonic()
    found = ground.run(tmp_path, "lose")
    assert found["type"] == "UnisonoError", found
    assert any(words in found["text"] for words in ("has sent no result", "has been silent", "have lost each other"))
    assert time.monotonic() - began < 150  # 20 s alone


def test_an_agent_that_a_scheduler_ends_is_an_error_that_says_so(local: Ground, tmp_path: Path) -> None:
    found = local.run(tmp_path, "end")
    assert found["type"] == "UnisonoError", found
    assert found["text"].endswith("was stopped by SIGTERM")


def start_waiting(ground: Ground, directory: Path, how: str = "wait") -> subprocess.Popen[str] | warm_scripts.Forked:
    """A caller whose ranks all wait."""
    process = ground.start(directory, how)
    deadline = time.monotonic() + 100
    while len(list(directory.glob("waits-*"))) < 4:
        assert time.monotonic() < deadline, process.stderr
        assert process.poll() is None, result_of(process, directory)
        time.sleep(0.1)
    return process


def test_no_agent_outlives_a_killed_caller_even_if_its_child_lives_on(local: Ground, tmp_path: Path) -> None:
    process = start_waiting(local, tmp_path, "wait beside a child")
    caller = psutil.Process(process.pid)
    until(lambda: len(caller.children()) == 3)
    first, second, child = sorted(caller.children(), key=psutil.Process.create_time)
    try:
        first.suspend()  # it serves the store
        others = [second.pid, *(each.pid for each in second.children(recursive=True))]
        process.send_signal(signal.SIGKILL)
        assert survivors(others, within_s=35) == []  # the machine that is silent is given up after 60
    finally:
        rest = [first.pid, *(each.pid for each in first.children(recursive=True))]
        for each in (process, first, child):
            each.send_signal(signal.SIGKILL)
        process.communicate()
    assert survivors(rest) == []


@pytest.mark.skipif(not HAS_SSH, reason="needs sshd, and root")
def test_no_ssh_outlives_a_killed_caller_even_if_its_child_lives_on(hosts: Ground, tmp_path: Path) -> None:
    process = start_waiting(hosts, tmp_path, "wait beside a child")
    caller = psutil.Process(process.pid)
    until(lambda: len(caller.children()) == 3)
    *connections, child = sorted(caller.children(), key=psutil.Process.create_time)
    try:
        process.send_signal(signal.SIGKILL)
        assert survivors([each.pid for each in connections], within_s=35) == []
    finally:
        for each in (*connections, child):
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        process.communicate()


DYING = """
import json, os, signal, subprocess, sys
from unisono.engines.piped import local_command
how = {how!r}
agent = subprocess.Popen(local_command(), stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)
if how == "reads":
    size = 1 << 24
    head = json.dumps(dict(number=0, count=2, per_machine=1, endpoint="127.0.0.1:0", size=size)).encode()
    agent.stdin.write(head + b"\\n" + bytes(size // 2))  # all but what fits into the pipe has been read
    agent.stdin.flush()
if (child := os.fork()) == 0:
    signal.pause()
print(agent.pid, child, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("how", ["imports", "reads"])
def test_no_agent_outlives_a_caller_that_is_killed_while_it(how: str, tmp_path: Path) -> None:
    with Script(DYING.format(how=how), tmp_path, "file") as caller:
        assert caller.process.stdout is not None
        agent, child = map(int, caller.process.stdout.readline().split())
        assert survivors([agent], within_s=35) == []
        assert psutil.Process(child).is_running()  # which holds the pipe


@pytest.mark.skipif(not HAS_SSH, reason="needs sshd, and root")
def test_a_host_that_takes_nothing_is_an_error_that_names_it(
    hosts: Ground, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unisono.engines.piped._ENDPOINT_S", 2.0)
    (stuck := tmp_path / "stuck").write_text("#!/bin/sh\nexec tail --pid=$PPID -f /dev/null\n")
    stuck.chmod(0o755)
    engine = replace(eval(hosts.engine), python=str(stuck))
    with pytest.raises(UnisonoError, match=r"root@::1 has taken \d+ of \d+ bytes of what it runs, and nothing more"):
        engine.start(bytes(1 << 24), 1, 1)  # more than the pipes and ssh's window hold


class Begun(Exception):  # noqa: N818 - of an engine that starts nothing
    variables = ()

    def machines_for(self, nprocs: int) -> int:
        return nprocs

    def start(self, *bundle: Any) -> Any:
        raise Begun(*bundle)


def bundle_of_spawn() -> bytes:
    """What the machines of a call are sent."""
    with pytest.raises(Begun) as begun:
        spawn(print, engine=Begun(), nprocs=2, backend="cpu", grace_s=0.0)
    bundle: bytes = begun.value.args[0]
    return bundle


def test_the_machines_of_each_call_get_a_secret_of_their_own() -> None:
    secrets = {pickle.loads(bundle_of_spawn()).secret for _ in range(2)}
    assert [len(each) for each in secrets] == [64, 64]


def forward(source: socket.socket, target: socket.socket, stalls: threading.Event, has_asked: threading.Event) -> None:
    """Body of a thread: what comes from one to the other, until it stalls; says whether more has come since."""
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            if stalls.is_set():
                has_asked.set()
            else:
                target.sendall(data)


@pytest.fixture(scope="module")
def store() -> Any:
    """Served by this process; the first one opens a pipe that its library keeps."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True)


def test_an_agent_waiting_in_native_code_ends_soon_after_its_caller(store: Any) -> None:
    bundle = bundle_of_spawn()
    ended: SimpleQueue[bytes] = SimpleQueue()
    machine = PipedMachine(local_command(), "machine 1", ended.put)
    stalls, has_asked = threading.Event(), threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server, contextlib.ExitStack() as stack:
        machine.begin(bundle, 1, 2, 1, f"127.0.0.1:{server.getsockname()[1]}")
        for _ in range(2):  # it looks whether anybody listens, and connects
            one = stack.enter_context(server.accept()[0])
            other = stack.enter_context(socket.create_connection(("127.0.0.1", store.port)))
            stack.callback(other.shutdown, socket.SHUT_RDWR)  # which its thread notices, unlike that it is closed
            for pair in ((one, other), (other, one)):
                threading.Thread(target=forward, args=(*pair, stalls, has_asked), daemon=True).start()
        key = f"torch.rendezvous.{pickle.loads(bundle).run_id}"
        until(lambda: store.check([key]) and len(store.get(key)) > 100)  # it has joined
        stalls.set()
        assert has_asked.wait(30)  # the agent looks for the other one every second
        machine.kill()  # as the end of the caller; the store's client would wait for an answer for a minute
        outcome = Outcome.from_bytes(ended.get(timeout=35))
    machine.wait()
    assert "machine 1 exited with code 1, and has sent no result" in str(outcome.error)


def test_ctrl_c_and_sigterm_ask_the_workers_to_stop_and_they_return(ground: Ground, tmp_path: Path) -> None:
    process = start_waiting(ground, tmp_path)
    # `nsenter --pid` forks: the caller is its child.
    caller = psutil.Process(process.pid).children()[0] if ground.enter else process
    caller.send_signal(signal.SIGTERM if "Hosts" in ground.engine or ground.enter else signal.SIGINT)
    found = result_of(process, tmp_path)
    assert found["type"] == "StoppedError", found
    assert [each[5] for each in found["results"]] == [0] * 4


def test_a_terminal_that_closes_ends_the_workers_with_a_line(local: Ground, tmp_path: Path) -> None:
    process = start_waiting(local, tmp_path)
    others = [each.pid for each in psutil.Process(process.pid).children(recursive=True)]
    process.send_signal(signal.SIGHUP)
    assert result_of(process, tmp_path)["text"] == str(128 + signal.SIGHUP)  # of a SystemExit
    assert "unisono: asked by SIGHUP, the workers have " in (tmp_path / "errors").read_text()
    assert survivors(others) == []


def test_a_killed_rank_is_named_and_other_ranks_count_each_sample_once(ground: Ground, tmp_path: Path) -> None:
    found = ground.run(tmp_path, "train and die")
    assert (found["type"], found["text"].partition("(")[0]) == ("WorkerDiedError", "rank 3 ")
    found = ground.run(tmp_path, "train", 2)
    assert len(found["results"]) == 2, found
    ledger = [line for path in tmp_path.glob("ledger-*") for line in path.read_text().splitlines()]
    counts = Counter(ledger)
    assert counts.keys() == {f"{epoch} {each}" for epoch in range(EPOCHS) for each in range(SAMPLES)}
    assert sum(counts.values()) - len(counts) <= 8  # of the step that was killed between saving and writing


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: spawn(print, engine="kubernetes", nprocs=2), "engine='kubernetes' does not exist; there are 'local'"),
        (lambda: spawn(print, engine=Local(2)), "needs nprocs"),
        (lambda: spawn(print, engine=Local, nprocs=2), "is no engine; pass a name"),
        (lambda: Ray(2, "CPU"), "resources='CPU' is of type str; pass amounts by name"),
        (lambda: spawn(print, engine=Local(2), nprocs="4"), "nprocs='4' is of type str"),
        (lambda: spawn(print, engine=Local(2), nprocs=2, output=Output(ranks=[2])), "names rank 2"),
        (lambda: spawn(print, engine=Local(2), nprocs=3), "nprocs=3 workers cannot be divided evenly between 2"),
        (lambda: spawn(print, engine=Local(2), nprocs=2, join=False), "join=False"),
        (lambda: Hosts("node1"), "names no machines"),
        (lambda: Local(0), "machines=0 is too small"),
        (lambda: Slurm("2"), "nodes='2'"),
    ],
)
def test_what_cannot_run_is_refused_at_the_door(call: Callable[[], Any], words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=words):
        call()


class Late:
    """An engine and its run, both machines of which have stopped; the second is late."""

    variables = ()
    data = iter([(0, b""), None, None, (1, b"")])

    def machines_for(self, nprocs: int) -> int:
        return 2

    def start(self, *_: object) -> Late:
        return self

    def outcomes(self, timeout_s: float) -> Iterator[tuple[int, bytes]]:
        if found := next(self.data):
            results = [(found[0], Outcome(value="late").to_bytes())]
            yield found[0], Outcome[None].failure(StoppedError(results)).to_bytes()

    def kill(self) -> None:
        pass


def test_no_machine_is_left_out_of_the_results_of_an_agreed_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unisono.launch.engines._MARGIN_S", 0.0)
    with pytest.raises(StoppedError) as stopped:
        spawn(print, nprocs=2, engine=Late(), grace_s=0)
    assert stopped.value.results == ["late"] * 2


class Closing(io.StringIO):
    """As a notebook's, it takes text only; its reader ends in the middle."""

    def write(self, text: str) -> int:
        if text == "there\n":
            raise BrokenPipeError
        return super().write(text)


def test_output_also_goes_to_text_streams_and_a_closed_one_is_an_error() -> None:
    with redirect_stdout(Closing()) as notebook, pytest.raises(BrokenPipeError):
        spawn(lambda index: print("here\nthere"), nprocs=1, engine=Local(1), backend="cpu")
    assert notebook.getvalue() == "here\n"


def test_no_other_user_can_read_or_replace_a_jobs_files_whatever_the_umask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    before = os.umask(0)
    try:
        with pytest.raises(FileNotFoundError, match="sbatch"):
            Slurm(1, str(tmp_path / "jobs")).start(b"bundle", 1, 1)
    finally:
        os.umask(before)
    [bundle] = (tmp_path / "jobs").glob("*/bundle")
    assert [f"{each.stat().st_mode:o}" for each in (bundle.parent, bundle.parent.parent)] == ["40700", "40700"]


@pytest.mark.parametrize(
    ("mode", "owner", "above", "refusal"),
    [
        (0o755, 0, 0o775, None),
        (0o1777, 0, 0o1777, None),  # others can add to it, and take nothing away
        (0o777, 0, 0o755, r"/jobs has mode 0777, .* chmod go-w \S+/jobs, or pass a directory of your own"),
        (0o775, 0, 0o755, r"/jobs has mode 0775, "),
        (0o755, 0, 0o777, r"/above has mode 0777, "),
        (0o1777, 12345, 0o755, r"/jobs belongs to user 12345, .* run; pass a directory of your own"),
    ],
)
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory to another user")
def test_a_directory_in_which_others_can_replace_a_job_s_files_is_refused(
    mode: int, owner: int, above: int, refusal: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    (directory := tmp_path / "above" / "jobs").mkdir(parents=True)
    for each, its in (directory, mode), (directory.parent, above):
        each.chmod(its)
    os.chown(directory, owner, -1)
    with pytest.raises(FileNotFoundError if refusal is None else UnisonoError, match=refusal or "sbatch"):
        Slurm(1, str(directory)).start(b"bundle", 1, 1)
    assert len([*directory.iterdir()]) == (refusal is None)


def test_a_controller_of_slurm_that_hangs_is_waited_for_within_bounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("sbatch", "squeue", "scancel"):
        (tmp_path / name).write_text("#!/bin/sh\nexec sleep 1000\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for limit in ("_SUBMIT_S", "_ANSWER_S", "_WRITTEN_S"):
        monkeypatch.setattr(slurm_engine, limit, 0.1)
    with pytest.raises(UnisonoError, match="sbatch has not answered within 0 s; `scontrol ping` says whether"):
        Slurm(1, str(tmp_path / "jobs")).start(b"bundle", 1, 1)
    assert [*tmp_path.glob("jobs/*/bundle")] == []  # the job may be queued, and must not begin later
    run = slurm_engine._SlurmRun("7", tmp_path, 1)
    assert [*run.outcomes(0), *run.outcomes(0)] == []  # as of one that is away
    run.ask_to_stop()
    assert [each.message for each in caplog.records] == [
        "SLURM's job 7 may run on: scancel has not answered within 0.1 s; cancel it when the controller is up"
    ]


def test_slurms_controller_may_be_away_but_a_forgotten_job_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "squeue").write_text(f"#!/bin/sh\ncat {tmp_path}/says >&2; exit 1\n")
    (tmp_path / "scancel").write_text(f'#!/bin/sh\necho "$@" >{tmp_path}/cancelled\n')
    for name in ("squeue", "scancel"):
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(slurm_engine, "_WRITTEN_S", 0.0)
    run = slurm_engine._SlurmRun("7", tmp_path, 1)
    run.ask_to_stop()  # of a job that waits for its nodes, and has nobody to ask
    assert (tmp_path / "cancelled").read_text() == "7\n"
    for says, number_of_outcomes in ("Unable to contact slurm controller", 0), ("Invalid job id specified", 1):
        (tmp_path / "says").write_text(f"slurm_load_jobs error: {says}\n")
        assert len([*run.outcomes(0), *run.outcomes(0)]) == number_of_outcomes
