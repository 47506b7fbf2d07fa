"""The workers' streams: real processes write, to files, pipes and terminals that work, block and break."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from faults import PATIENCE_S, SOON_S, many_open_files

from unisono.launch import options
from unisono.launch.watching.log_directory import log_file, make_log_directory, name_run
from unisono.launch.watching.output import WorkerOutput

PLAIN = options.Output(prefix=False)

FLOOD = "import os\nwhile True:\n    os.write(2, b'flood\\n' * 1000)"


@dataclass
class Shown:
    """The caller's stdout and stderr, as files."""

    directory: Path

    def __post_init__(self) -> None:
        self.fds = [os.open(self.directory / name, os.O_WRONLY | os.O_CREAT) for name in ("stdout", "stderr")]

    @property
    def stdout(self) -> bytes:
        return (self.directory / "stdout").read_bytes()

    @property
    def stderr(self) -> bytes:
        return (self.directory / "stderr").read_bytes()


@pytest.fixture
def shown(tmp_path: Path) -> Iterator[Shown]:
    shown = Shown(tmp_path)
    yield shown
    for fd in shown.fds:
        os.close(fd)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_log_directory(tmp_path / "logs")


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        with contextlib.suppress(OSError):
            os.close(end)


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    ends = os.openpty()
    yield ends
    for end in ends:
        os.close(end)


@contextlib.contextmanager
def worker(output: WorkerOutput, rank: int, code: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that runs some code as a worker, killed at the block's end; its stdin and a pipe speak to the test."""
    stdout, stderr = output.open(rank)
    command = [sys.executable, "-S", "-E", "-c", textwrap.dedent(code)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=stdout, stderr=stderr)
    output.handed_over(rank)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def write(output: WorkerOutput, rank: int, code: str) -> None:
    """Let a worker run some code to its end."""
    with worker(output, rank, code) as process:
        assert process.wait(PATIENCE_S) == 0


def read_until(fd: int, wanted: bytes) -> bytes:
    """Read until something has been seen, and give all that came."""
    seen = b""
    while wanted not in seen:
        assert select.select([fd], [], [], PATIENCE_S)[0], f"{wanted!r} did not come, but {seen!r}"
        seen += os.read(fd, 65536)
    return seen


def seconds(call: Callable[[], None]) -> float:
    start = time.monotonic()
    call()
    return time.monotonic() - start


# What is shown.

SPEAK = """
    import sys
    print("to stdout", flush=True)
    print("to stderr", file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("prefix", "stdout", "stderr"),
    [
        (None, b"to stdout\n", b"[rank 1] to stderr\n"),
        (True, b"[rank 1] to stdout\n", b"[rank 1] to stderr\n"),
        (False, b"to stdout\n", b"to stderr\n"),
    ],
)
@pytest.mark.parametrize("is_kept", [False, True])
def test_lines_are_marked_as_asked(shown, run, prefix, stdout, stderr, is_kept):
    output = WorkerOutput(options.Output(prefix=prefix), run if is_kept else None, *shown.fds)
    write(output, 1, SPEAK)
    output.close()
    assert (shown.stdout, shown.stderr) == (stdout, stderr)
    assert output.tail(1) == ["to stderr"]


def test_several_marks_all_lines_where_two_ranks_write_at_once(shown, monkeypatch):
    monkeypatch.setattr("unisono.launch.watching.output._HOLD_S", 1000.0)
    output = WorkerOutput(options.Output(prefix="several"), None, *shown.fds)
    for rank in (0, 0, 1):
        write(output, rank, "print('line', flush=True)")
    output.close()
    assert sorted(shown.stdout.splitlines()) == [b"[rank 0] line", b"[rank 0] line", b"[rank 1] line"]


def test_several_marks_nothing_of_a_rank_that_writes_alone(shown, monkeypatch):
    monkeypatch.setattr("unisono.launch.watching.output._HOLD_S", 1000.0)
    output = WorkerOutput(options.Output(prefix="several"), None, *shown.fds)
    write(output, 0, "print('line', flush=True); print('unfinished', end='')")
    output.close()
    assert shown.stdout == b"line\nunfinished"


def test_several_marks_stdout_from_the_line_on_that_a_second_rank_writes(shown, monkeypatch):
    monkeypatch.setattr("unisono.launch.watching.output._HOLD_S", 0.0)
    output = WorkerOutput(options.Output(prefix="several"), None, *shown.fds)
    write(output, 2, "")  # which ends without a line
    for rank in (0, 0, 1, 0):
        write(output, rank, "print('line', flush=True)")
    output.close()
    lines = shown.stdout.splitlines()
    assert lines[:2] == [b"line", b"line"]
    assert sorted(lines[2:]) == [b"[rank 0] line", b"[rank 1] line"]


@pytest.mark.parametrize("is_kept", [False, True])
def test_only_the_ranks_that_were_asked_for_are_shown_and_all_are_kept(shown, run, is_kept):
    output = WorkerOutput(options.Output(ranks=(1,)), run if is_kept else None, *shown.fds)
    for rank in range(3):
        write(output, rank, SPEAK)
    output.close()
    assert (shown.stdout, shown.stderr) == (b"to stdout\n", b"[rank 1] to stderr\n")
    assert [output.tail(rank) for rank in range(3)] == [["to stderr"]] * 3
    if is_kept:
        assert [log_file(run, rank, "stdout").read_bytes() for rank in range(3)] == [b"to stdout\n"] * 3


def test_lines_of_many_workers_are_never_mixed(shown, run):
    output = WorkerOutput(options.Output(prefix=True), run, *shown.fds)
    code = """
        import os, random
        dice = random.Random({rank})
        text = b"".join(b"%d says {rank} %s\\n" % (n, b"." * dice.randrange(200)) for n in range(3000))
        while text:
            text = text[os.write(2, text[: dice.randrange(1, 5000)]) :]
    """
    with contextlib.ExitStack() as stack:
        workers = [stack.enter_context(worker(output, rank, code.format(rank=rank))) for rank in range(4)]
        assert [process.wait(PATIENCE_S) for process in workers] == [0] * 4
    output.close()
    lines = shown.stderr.splitlines(keepends=True)
    for rank in range(4):
        own = b"".join(line for line in lines if line.startswith(b"[rank %d] " % rank))
        assert own.replace(b"[rank %d] " % rank, b"") == log_file(run, rank, "stderr").read_bytes()
        assert own.count(b"says %d" % rank) == 3000
    assert len(lines) == 4 * 3000


def test_progress_bars_move_and_the_last_state_is_remembered_and_saved(shown, run):
    output = WorkerOutput(options.Output(), run, *shown.fds)
    code = """
        import os
        for percent in range(0, 101, 50):
            os.write(2, b"\\r%3d%%" % percent)
        os.write(2, b"\\ndone\\r\\n")
    """
    write(output, 0, code)
    output.close()
    mark = b"[rank 0] "
    assert shown.stderr == mark + b"  0%\r" + mark + b" 50%\r" + mark + b"100%\n" + mark + b"done\r\n"
    assert output.tail(0) == ["100%", "done"]
    assert log_file(run, 0, "stderr").read_bytes() == b"100%\ndone\n"


def test_a_question_is_shown_before_its_line_is_over(pipe, shown):
    reading, writing = pipe
    output = WorkerOutput(options.Output(), None, shown.fds[0], writing)
    code = """
        import os, sys
        os.write(2, b"Password: ")
        sys.stdin.readline()
        os.write(2, b"thanks\\n")
    """
    with worker(output, 0, code) as process:
        assert read_until(reading, b": ") == b"[rank 0] Password: "
        process.stdin.write(b"\n")
        process.stdin.flush()
        assert read_until(reading, b"\n") == b"thanks\n"
        assert process.wait(PATIENCE_S) == 0
    output.close()


def test_a_killed_workers_last_words_are_complete_on_their_own_line(shown, run):
    output = WorkerOutput(options.Output(), run, *shown.fds)
    code = """
        import os, signal
        os.write(1, b"half")
        os.write(2, b"whole\\npart")
        os.kill(os.getpid(), signal.SIGKILL)
    """
    with worker(output, 0, code) as process:
        assert process.wait(PATIENCE_S) == -signal.SIGKILL
    output.close()
    assert output.tail(0) == ["whole", "part"]
    assert shown.stderr == b"[rank 0] whole\n[rank 0] part\n"
    assert shown.stdout == b"half"
    assert log_file(run, 0, "stderr").read_bytes() == b"whole\npart"


def test_the_tail_is_the_last_lines_and_bounded(shown):
    output = WorkerOutput(options.Output(ranks=()), None, *shown.fds)
    write(output, 0, "import sys\nfor n in range(10_000): print('line', n, file=sys.stderr)")
    write(output, 1, "import os; os.write(2, b'x' * 1_000_000)")
    output.close()
    assert output.tail(0, 3) == ["line 9997", "line 9998", "line 9999"]
    assert len(output.tail(0)) == 20
    assert set(output.tail(1)[0]) == {"x"}
    assert len(output.tail(1)[0]) <= 16384
    assert output.tail(7) == []
    assert shown.stderr == b""


# What blocks and breaks.


def wait_until_still(pid: int) -> int:
    """Wait until a process writes no more, and give the number of bytes that it has written."""
    before, deadline = 0, time.monotonic() + PATIENCE_S
    while (now := psutil.Process(pid).io_counters().write_chars) == 0 or now != before:
        assert time.monotonic() < deadline, "it continues"
        before = now
        time.sleep(0.1)
    return now


@pytest.mark.parametrize("kind", ["pipe", "terminal"])
@pytest.mark.slow
def test_a_stopped_terminal_stops_who_writes_to_it_and_not_the_end(kind, request, shown):
    ours, theirs = request.getfixturevalue(kind)
    output = WorkerOutput(options.Output(), None, shown.fds[0], theirs)
    with worker(output, 0, FLOOD) as process:
        assert wait_until_still(process.pid) < 2_000_000  # bytes that are somewhere on the way
    assert seconds(lambda: output.close(0.2)) < SOON_S
    assert output.tail(0)[-2] == "flood"
    assert read_until(ours, b"flood")


def test_a_full_nonblocking_stream_is_waited_for_even_with_many_open_files(pipe, shown):
    reading, writing = pipe
    os.set_blocking(writing, False)
    with many_open_files():
        output = WorkerOutput(PLAIN, None, shown.fds[0], writing)
        with worker(output, 0, "import os; os.write(2, b'x' * 1_000_000 + b'\\n')"):
            assert len(read_until(reading, b"\n")) == 1_000_001
        output.close()


def test_a_broken_pipe_is_silent_and_the_files_go_on(pipe, shown, run):
    output = WorkerOutput(options.Output(), run, shown.fds[0], pipe[1])
    os.close(pipe[0])
    write(output, 0, "import os\nfor n in range(100): os.write(2, b'x' * 9999 + b'\\n')")
    output.close()
    assert log_file(run, 0, "stderr").stat().st_size == 1_000_000


def test_a_descriptor_the_caller_closed_is_not_written_to_as_another_file(tmp_path, shown, run):
    output = WorkerOutput(options.Output(), run, *shown.fds)
    os.close(shown.fds[1])
    shown.fds[1] = os.open(tmp_path / "precious", os.O_WRONLY | os.O_CREAT)  # gets the number
    write(output, 0, SPEAK)
    output.close()
    assert (tmp_path / "precious").read_bytes() == b""
    assert shown.stderr == b"[rank 0] to stderr\n"


def test_a_full_disk_is_told_once_and_the_run_goes_on(shown, run, caplog):
    for rank in range(2):
        log_file(run, rank, "stdout").symlink_to("/dev/full")
    log_file(run, 1, "stderr").mkdir()
    output = WorkerOutput(options.Output(), run, *shown.fds)
    for rank in range(2):
        write(output, rank, SPEAK + "    print('and more')")
    output.close()
    assert shown.stdout == b"to stdout\nand more\n" * 2
    (told,) = [record.getMessage() for record in caplog.records]
    assert re.fullmatch(r"/\S+/rank-0.stdout does not keep all .* \(No space left on device\); the run continues", told)
    assert log_file(run, 0, "stderr").read_bytes() == b"to stderr\n"
    assert output.tail(1) == ["to stderr"]


def test_what_can_no_longer_be_shown_is_told_once(shown, run, caplog, monkeypatch):
    monkeypatch.setattr("unisono.launch.messages._said", set())
    with open("/dev/full", "wb") as full:
        output = WorkerOutput(options.Output(prefix=True), run, full.fileno(), shown.fds[1])
        for rank in range(2):
            write(output, rank, SPEAK)
        output.close()
    (told,) = [record.getMessage() for record in caplog.records]
    assert told == "what workers write is not shown any more (No space left on device); the run continues"
    assert [log_file(run, rank, "stdout").read_bytes() for rank in range(2)] == [b"to stdout\n"] * 2


@pytest.mark.parametrize("stray", [["sleep", "1000"], ["yes"]])
def test_a_stray_that_holds_a_pipe_does_not_hold_the_end(shown, stray):
    output = WorkerOutput(options.Output(), None, *shown.fds)
    code = f"""
        import subprocess, sys
        print("last words", file=sys.stderr)
        print(subprocess.Popen({stray!r}, stdout=2, start_new_session=True).pid)
    """
    write(output, 0, code)
    pid = int(shown.stdout)
    try:
        assert seconds(lambda: output.close(0.3)) < SOON_S
        assert shown.stderr.startswith(b"[rank 0] last words\n")
        assert not [thread for thread in threading.enumerate() if thread.name == "unisono-output"]
    finally:
        os.kill(pid, signal.SIGKILL)


def test_output_before_the_end_is_passed_on_even_after_the_time_is_up(shown):
    output = WorkerOutput(options.Output(), None, *shown.fds)
    os.write(output.open(0)[1], b"last words\n")
    output.close(0.0)
    assert output.tail(0) == ["last words"]
    assert shown.stderr == b"[rank 0] last words\n"


# What is left behind.


def test_no_other_process_inherits_a_descriptor(shown, run):
    def num_inherited() -> int:
        code = "import os; print(len(os.listdir('/proc/self/fd')))"
        command = [sys.executable, "-S", "-E", "-c", code]
        return int(subprocess.run(command, close_fds=False, stdout=subprocess.PIPE, timeout=PATIENCE_S).stdout)

    before = num_inherited()
    output = WorkerOutput(options.Output(prefix=True), run, *shown.fds)
    output.open(0)
    assert num_inherited() == before
    output.close()


def test_the_end_comes_at_once_and_leaves_nothing_whatever_was_opened(shown, run):
    before = os.listdir("/proc/self/fd")
    unused, half = (WorkerOutput(options.Output(), run, *shown.fds) for _ in range(2))
    half.open(0)  # and never handed over
    for output in (unused, half):
        assert seconds(lambda: output.close(PATIENCE_S)) < SOON_S  # noqa: B023
        output.close()
    assert os.listdir("/proc/self/fd") == before
    assert log_file(run, 0, "stdout").read_bytes() == b""


# The directory of a run.


def test_runs_are_named_by_time_and_process_and_latest_links_to_the_last(tmp_path):
    paths = [make_log_directory(tmp_path / "logs" / "here", name) for name in ("", name_run("a"), "")]
    assert make_log_directory(tmp_path / "logs" / "here", paths[2].name) == paths[2], "of another machine of the run"
    assert len({*paths}) == 3
    assert re.fullmatch(rf"\d{{4}}-\d\d-\d\d_\d{{6}}\.\d{{6}}_a_{os.getpid()}", paths[1].name)
    assert {path.parent for path in paths} == {tmp_path / "logs" / "here"}
    assert os.readlink(tmp_path / "logs" / "here" / "latest") == paths[2].name
    assert log_file(paths[0], 3, "stderr") == paths[0] / "rank-3.stderr"


def test_an_impossible_log_dir_is_refused_with_its_own_error_and_a_way_out(tmp_path):
    (tmp_path / "file").write_text("")
    for log_dir in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(NotADirectoryError, match=rf"log_dir='{log_dir}' cannot hold .* pass a directory"):
            make_log_directory(log_dir)
    with pytest.raises(PermissionError, match=r"log_dir='/sys/logs' cannot hold .*; pass a directory"):
        make_log_directory("/sys/logs")


def test_something_else_by_the_name_of_latest_is_left_alone(tmp_path):
    (tmp_path / "latest").mkdir()
    path = make_log_directory(tmp_path)
    assert sorted(each.name for each in tmp_path.iterdir()) == [path.name, "latest"]
    assert not (tmp_path / "latest").is_symlink()
