"""`unisono warm`: what starts from it is as good as a fresh start, and nothing of one run is in the next."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from faults import PATIENCE_S, Ear, Line, survivors, until

from unisono.cli.main import main
from unisono.launch.starting import warm_start

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="unisono warm needs Linux"),
    pytest.mark.timeout(300),
]

UNISONO = str(Path(sys.executable).with_name("unisono"))

# What a script can see of how it was started, as JSON; with an argument it leaves all of it changed behind itself.
SEEN = """
import json, os, resource, signal, sys, threading, warnings
import numpy, random, torch
OF_THE_RUN = {"MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "UNISONO_RENDEZVOUS", "UNISONO_TAKEN"}
FLAGS = "optimize dont_write_bytecode no_user_site no_site ignore_environment bytes_warning isolated dev_mode utf8_mode"
seen = {
    "environ": {name: value for name, value in os.environ.items() if name not in OF_THE_RUN},
    "argv": sys.argv, "path": sys.path, "flags": [getattr(sys.flags, name) for name in FLAGS.split()],
    "directory": os.getcwd(),
    "umask": [os.umask(0o22)], "nice": os.nice(0), "cores": sorted(os.sched_getaffinity(0)),
    "signals": {str(each): str(signal.getsignal(each)) for each in signal.valid_signals()},
    "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    "limits": resource.getrlimit(resource.RLIMIT_NOFILE), "groups": os.getgroups(),
    "threads": [each.name for each in threading.enumerate() if each.name.startswith("left")],
    "stdin": os.readlink("/proc/self/fd/0"), "files": len(os.listdir("/proc/self/fd")),
    "filters": [str(each) for each in warnings.filters], "is_tty": sys.stdout.isatty(), "encoding": sys.stdout.encoding,
    "grad": torch.is_grad_enabled(), "dtype": str(torch.get_default_dtype()),
    "main": sys.modules["__main__"].__file__, "left": hasattr(torch, "left_behind"),
}
os.umask(seen["umask"][0])
from pathlib import Path
Path(f"seen-{os.environ.get('RANK', '0')}.json").write_text(json.dumps(seen))
Path("drawn").write_text(f"{random.random()} {numpy.random.rand()} {torch.rand(())}")
if "leave" in sys.argv:
    os.environ["LEFT"] = "1"
    os.umask(0o077)
    torch.left_behind = True
    torch.set_default_dtype(torch.float64)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    left = open("left", "w")
    threading.Thread(target=threading.Event().wait, daemon=True, name="left").start()
    os.chdir("/")
"""


class Place:
    """A warm process with a directory of its own, and commands that could start from it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        # Short, as it names a socket; and pytest changes its variables from test to test.
        self.temporary = tempfile.mkdtemp(prefix="warm-")
        self.environ = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "SLURM_"))}
        self.environ |= {"TMPDIR": self.temporary, "PYTHONPATH": str(directory)}
        (directory / "beside.py").write_text("value = 1\n")
        (directory / "seen.py").write_text(SEEN)

    def start(self, *arguments: str, **options: object) -> subprocess.Popen[str]:
        options = {"env": self.environ, "cwd": self.directory, "stdin": subprocess.DEVNULL, **options}
        pipe = subprocess.PIPE
        return subprocess.Popen([UNISONO, *arguments], stdout=pipe, stderr=pipe, text=True, **options)

    def run(self, *arguments: str, **options: object) -> tuple[int, str, str]:
        with self.start(*arguments, **options) as process:
            output, errors = process.communicate(timeout=PATIENCE_S)
            return process.returncode, output, errors

    def warm(self, *arguments: str) -> psutil.Process:
        preload = () if "--preload" in arguments else ("--preload", "beside")
        code, output, errors = self.run("warm", *preload, *arguments)
        assert code == 0, errors
        found = re.search(r"from process (\d+)", output)
        assert found, output
        return psutil.Process(int(found[1]))

    def seen(self, rank: int = 0) -> dict[str, object]:
        """What the rank saw, with a line for each variable."""
        seen = json.loads((self.directory / f"seen-{rank}.json").read_text())
        return seen | {f"${name}": value for name, value in seen.pop("environ").items()}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """One for all tests that do not end it."""
    place = Place(tmp_path_factory.mktemp("warm"))
    place.process = place.warm()
    yield place
    assert place.run("warm", "--stop")[0] == 0
    place.process.wait(PATIENCE_S)


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path)
    yield place
    place.run("warm", "--stop")


def is_warm(errors: str) -> bool:
    return "a fresh start" not in errors


@pytest.mark.slow
@pytest.mark.parametrize("ranks", ["1", "2"])
def test_a_script_sees_what_it_sees_after_a_fresh_start(shared, ranks):
    options = {"env": {**shared.environ, "TERM": "other"}, "umask": 0o027}
    options["preexec_fn"] = lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    command = "run", "-n", ranks, "--backend", "cpu", "seen.py", "--lr", "1"
    assert shared.run(*command, **options)[0] == 0
    warm = shared.seen(int(ranks) - 1)
    # Without a process to start from: another directory for its socket, and the same in all else.
    options["env"] = {**options["env"], "TMPDIR": "/tmp"}
    assert shared.run(*command, **options)[0] == 0
    fresh = shared.seen(int(ranks) - 1)
    for each in (warm, fresh):
        del each["$TMPDIR"], each["filters"]  # each library that is imported adds a filter of its own
    if ranks == "1":
        warm["files"] -= 1  # the pipe that ends it with its command
    assert warm == fresh
    assert warm["umask"] == [0o027]


@pytest.mark.parametrize("ranks", ["1", "2"])
def test_a_run_leaves_nothing_for_the_next(shared, ranks):
    drawn, seen = [], []
    for arguments in ([], ["leave"], []):
        code, _, errors = shared.run("run", "-n", ranks, "--backend", "cpu", "seen.py", *arguments)
        assert code == 0, errors
        assert is_warm(errors), errors
        drawn.append((shared.directory / "drawn").read_text().split())
        seen.append(shared.seen())
    assert seen[0] == seen[2]
    # Generators that nobody has seeded draw other numbers in each run.
    assert all(len(set(numbers)) == 3 for numbers in zip(*drawn, strict=True))


@pytest.mark.parametrize(
    ("line", "code"), [("sys.exit(3)", 3), ("raise ValueError(5)", 1), ("os.kill(os.getpid(), 11)", 128 + 11)]
)
def test_a_run_ends_with_the_code_of_its_script(shared, line, code):
    (shared.directory / "ends.py").write_text(f"import os, sys\n{line}\n")
    found, _, errors = shared.run("run", "-n", "2", "--backend", "cpu", "ends.py")
    assert found == code, errors
    assert is_warm(errors), errors


def test_a_single_rank_reads_the_standard_input(shared):
    (shared.directory / "reads.py").write_text("print('read', input())\n")
    with shared.start("run", "-n", "1", "reads.py", stdin=subprocess.PIPE) as process:
        output, errors = process.communicate("a line\n", timeout=PATIENCE_S)
    assert (process.returncode, output) == (0, "read a line\n"), errors


def test_a_wrong_command_line_is_refused_as_ever(shared):
    code, _, errors = shared.run("run", "-n", "2", "nowhere.py")
    assert code == 2
    assert "there is no script 'nowhere.py'" in errors


@contextlib.contextmanager
def waiting(place: Place, ear: Ear) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A run whose two ranks say their pids, and stand still: its command, and the pids of all its processes."""
    text = "import os\nfrom pathlib import Path\nfrom faults import Line, stand_still\n"
    (place.directory / "waits.py").write_text(
        f"{text}Line(Path('line').absolute()).say(os.getpid(), os.getppid())\nstand_still()\n"
    )
    with place.start("run", "-n", "2", "--backend", "cpu", "waits.py") as process:
        try:
            pids = {int(pid) for words in ear.hear_all(2) for pid in words}
            zygote = next(psutil.Process(pid) for pid in pids if "zygote" in psutil.Process(pid).name())
            yield process, [*pids, zygote.ppid()]
        finally:
            process.kill()


@pytest.fixture
def ear(request: pytest.FixtureRequest) -> Iterator[Ear]:
    place = request.getfixturevalue("own" if "own" in request.fixturenames else "shared")
    (place.directory / "faults.py").unlink(missing_ok=True)
    (place.directory / "faults.py").symlink_to(Path(__file__).parent.parent / "faults.py")
    (place.directory / "warm_scripts.py").unlink(missing_ok=True)
    (place.directory / "warm_scripts.py").symlink_to(Path(__file__).parent.parent / "warm_scripts.py")
    (place.directory / "line").unlink(missing_ok=True)
    with Line.at(place.directory / "line").hearing() as ear:
        yield ear


def test_an_interrupt_of_the_command_reaches_the_run(shared, ear):  # SIGTERM is in the test of a pause
    with waiting(shared, ear) as (process, pids):
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert not survivors(pids)


def test_a_killed_command_leaves_no_process(shared, ear):
    with waiting(shared, ear) as (process, pids):
        process.kill()
        process.wait(PATIENCE_S)
        assert not survivors(pids)
    assert shared.process.is_running()


@pytest.mark.slow
def test_a_killed_warm_process_does_not_end_a_run(own, ear):
    warm = own.warm()
    with waiting(own, ear) as (process, pids):
        warm.kill()
        warm.wait(PATIENCE_S)
        assert all(psutil.pid_exists(pid) for pid in pids)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert "was killed, and the exit code is lost" in errors
    assert not survivors(pids)


@pytest.mark.slow
def test_stopping_lets_runs_end_with_their_own_code(own, ear):
    warm = own.warm()
    with waiting(own, ear) as (process, _):
        code, output, _ = own.run("warm", "--stop")
        assert (code, output) == (0, f"unisono warm: process {warm.pid} ends after the runs that started from it\n")
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=PATIENCE_S)
        assert process.returncode == -signal.SIGTERM
    warm.wait(PATIENCE_S)
    assert own.run("warm", "--stop")[1] == "unisono warm: there was none\n"


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"env": {"HF_HOME": "/elsewhere"}}, "HF_HOME"),
        ({"ulimit": (1000, 1000)}, "the limit RLIMIT_NOFILE"),
        ({"cores": {0}}, "the set of cores"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.slow
def test_a_command_that_began_otherwise_starts_afresh(shared, options, name):
    def change() -> None:
        import resource

        if "ulimit" in options:
            resource.setrlimit(resource.RLIMIT_NOFILE, options["ulimit"])
        if "cores" in options:
            os.sched_setaffinity(0, options["cores"])

    environ = {**shared.environ, **options.get("env", {})}
    code, _, errors = shared.run("run", "-n", "1", "seen.py", env=environ, preexec_fn=change)
    assert code == 0, errors
    assert f"a fresh start, not one from `unisono warm`: {name} is not what it was there" in errors


@pytest.mark.slow
def test_a_changed_file_ends_the_warm_process(own):
    warm = own.warm()
    (own.directory / "uses.py").write_text("import beside\nprint(beside.value)\n")
    assert own.run("run", "-n", "1", "uses.py") == (0, "1\n", "")
    (own.directory / "beside.py").write_text("value = 22\n")
    code, output, errors = own.run("run", "-n", "1", "uses.py")
    assert (code, output) == (0, "22\n")
    assert re.search(r"a fresh start.*beside.py has changed since", errors)
    warm.wait(PATIENCE_S)


@pytest.mark.slow
def test_a_library_with_an_allocator_thread_is_imported_once(own):
    pytest.importorskip("pyarrow")  # which pandas, datasets and trl import
    own.warm("--preload", "pyarrow")
    (own.directory / "counts.py").write_text(
        "import pyarrow as pa, pyarrow.compute as pc\nprint(pc.sum(pa.array(range(100_000))).as_py())\n"
    )
    code, output, errors = own.run("run", "-n", "2", "--backend", "cpu", "counts.py")
    assert code == 0, errors
    assert output.count("4999950000") == 2


@pytest.mark.slow
def test_a_second_one_replaces_the_first_and_ends_when_it_has_been_idle(own):
    first = own.warm()
    second = own.warm("--for", "0.2s")
    for each in (first, second):
        each.wait(PATIENCE_S)
    assert own.run("warm", "--stop")[1] == "unisono warm: there was none\n"


@pytest.mark.slow
def test_a_directory_that_others_can_enter_is_refused(own):
    directory = Path(own.temporary, f"unisono-warm-{os.getuid()}")
    directory.mkdir(mode=0o755)
    code, _, errors = own.run("warm")
    assert code == 1
    assert f"{directory} is not a directory of yours that others cannot enter" in errors


@pytest.mark.skipif(os.getuid() != 0, reason="needs a second user, which only root can be")
def test_another_user_is_not_served(shared):
    path = next(Path(shared.temporary).glob("unisono-warm-*/*"))
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(str(path))  # before it becomes another user, whom the directory keeps out
            os.setresuid(65534, 65534, 65534)
            theirs.send(str(warm_start.peer_uid(sock)).encode())
            with socket.socket(socket.AF_UNIX) as second:
                try:
                    second.connect(str(path))
                    theirs.send(b" connected")
                except PermissionError:
                    theirs.send(b" kept out")
        os._exit(0)
    os.waitpid(pid, 0)
    assert ours.recv(100) == b"0 kept out"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("starts", "the import of starts starts threads (unisono-warm)"),
        ("breaks", "ZeroDivisionError"),
    ],
)
@pytest.mark.slow
def test_what_cannot_be_imported_once_is_refused(own, name, message):
    (own.directory / "starts.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    (own.directory / "breaks.py").write_text("1 / 0\n")
    found, output, errors = own.run("warm", "--preload", name)
    assert (found, output) == (1, "")
    assert message in errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preload", "nowhere"], "there is no module nowhere in the import path"),
        (["--for", "soon"], "'soon' is not a time such as 90s, 30m or 2h"),
    ],
)
def test_an_option_that_cannot_be_kept_is_refused(capsys, arguments, message):
    with pytest.raises(SystemExit) as stop:
        sys.exit(main(["warm", *arguments]))
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_a_descriptor_that_the_script_would_inherit_is_there(shared):
    (shared.directory / "opens.py").write_text("import sys\nprint(open(sys.argv[1]).read())\n")
    reading, writing = os.pipe()
    os.write(writing, b"data")
    os.close(writing)
    code, output, errors = shared.run("run", "-n", "1", "opens.py", f"/dev/fd/{reading}", pass_fds=[reading])
    os.close(reading)
    assert (code, output) == (0, "data\n"), errors
    assert f"it would not have the open descriptors [{reading}]" in errors


def test_a_module_beside_the_script_wins_over_a_preloaded_one(shared):
    directory = shared.directory / "other"
    directory.mkdir()
    (directory / "beside.py").write_text("value = 'own'\n")
    (directory / "uses.py").write_text("import beside\nprint(beside.value)\n")
    code, output, errors = shared.run("run", "-n", "1", "other/uses.py")
    assert (code, output) == (0, "own\n"), errors
    assert f"{directory / 'beside.py'} is not the beside that was imported there" in errors


def test_a_directory_of_data_beside_the_script_hides_no_module(shared):
    directory = shared.directory / "third"
    (directory / "beside").mkdir(parents=True)
    (directory / "uses.py").write_text("import beside\nprint(beside.value)\n")
    assert shared.run("run", "-n", "1", "third/uses.py") == (0, "1\n", "")


def test_a_command_that_is_paused_pauses_its_run(shared, ear):
    with waiting(shared, ear) as (process, pids):
        launcher = psutil.Process(pids[-1])
        process.send_signal(signal.SIGTSTP)
        until(lambda: launcher.status() == psutil.STATUS_STOPPED)
        until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED)
        process.send_signal(signal.SIGCONT)
        until(lambda: launcher.status() != psutil.STATUS_STOPPED)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=PATIENCE_S)
    assert process.returncode == -signal.SIGTERM
    assert not survivors(pids)


LEFT = """
import atexit, csv, gc, gzip, io, sys
where = sys.argv[1] + "-" + __import__("os").environ.get("RANK", "0")
plain = open(where + ".txt", "w"); plain.write("last line")
early = open(where + ".csv", "w"); csv.writer(early).writerow([1, 2])
packed = io.TextIOWrapper(gzip.open(where + ".gz", "wb")); packed.write("packed")
sys.left = plain, early, packed
if "freeze" in sys.argv:
    gc.freeze()
atexit.register(lambda: plain.write(", and one at the exit"))
if "raise" in sys.argv:
    raise ValueError
"""


@pytest.mark.parametrize(
    ("ranks", "how", "is_fresh"),
    [
        *(("1", "freeze", False), ("2", "raise", False)),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in (("2", "end", False), ("1", "raise", True))),
    ],
)
def test_what_a_script_leaves_open_is_written_to_its_end(shared, ranks, how, is_fresh):
    (shared.directory / "leaves.py").write_text(LEFT)
    place = shared.directory / f"left-{ranks}-{how}"
    options = {"env": {**shared.environ, "TMPDIR": "/var/tmp"}} if is_fresh else {}
    code, _, errors = shared.run("run", "-n", ranks, "--backend", "cpu", "leaves.py", str(place), how, **options)
    assert code == int(how == "raise"), errors
    # Others are killed when the first has failed.
    failed = re.search(r"rank (\d) of", errors)
    for rank in [int(failed[1])] if failed else range(int(ranks)):
        end = "" if failed and ranks == "2" else ", and one at the exit"
        assert Path(f"{place}-{rank}.txt").read_text() == f"last line{end}"
        assert Path(f"{place}-{rank}.csv").read_text() == "1,2\n"
        assert gzip.decompress(Path(f"{place}-{rank}.gz").read_bytes()) == b"packed"
