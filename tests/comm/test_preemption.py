"""SIGTERM becomes a flag, for a process that handles it and for its loader workers, and for nobody else.

Each test runs in a process of its own, since what a signal does to a process is the whole process's.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from textwrap import dedent

import pytest
import warm_scripts

PATIENCE_S = 60
TERM = """
import os, signal, sys, threading, time
from unisono.comm import preemption

def term():
    os.kill(os.getpid(), signal.SIGTERM)
"""
LOADERS = TERM + dedent(
    """
    import gc, warnings
    import psutil, torch
    from torch.utils.data import DataLoader, Dataset

    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)  # from Python 3.12 on

    class Numbers(Dataset):
        def __len__(self):
            return 32
        def __getitem__(self, index):
            return index

    def children():
        gc.collect()
        return psutil.Process().children()

    def let_a_stranger_term(*pids):
        if not (stranger := os.fork()):
            for pid in pids * 3:
                os.kill(pid, signal.SIGTERM)
            os._exit(0)
        os.waitpid(stranger, 0)
    """
)


def run(source: str, beginning: str = TERM) -> tuple[int, list[str], str]:
    """Run a program: how it ended, the lines that it printed, and what it complained of."""
    with tempfile.TemporaryDirectory() as directory:
        program = Path(directory) / "program.py"
        program.write_text(beginning + dedent(source))
        code, output, errors = warm_scripts.complete(program)
    return code, output.splitlines(), errors


def test_unhandled_sigterm_ends_the_process_with_or_without_shielding():
    assert run("term()")[0] == -15
    assert run("preemption.shield_loader_workers(); term()")[0] == -15


ASKED_BY_CTRL_C = "\nunisono: asked by SIGINT, this process stops at its next should_stop(); Ctrl-C again ends it now\n"
HANDLED = {
    "nothing else happens, however often it comes": (
        """
        preemption.handle()
        print(preemption.is_requested())
        for _ in range(3):
            term()
            preemption.handle()
            print(preemption.is_requested())
        """,
        ["False", "True", "True", "True"],
    ),
    "a handler that was there is called too": (
        """
        signal.signal(15, lambda signum, frame: print("the user's", signum))
        preemption.handle()
        term()
        print(preemption.is_requested())
        """,
        ["the user's 15", "True"],
    ),
    "the first Ctrl-C is, too; the second interrupts": (
        """
        preemption.handle()
        for _ in range(2):
            try:
                signal.raise_signal(signal.SIGINT)
                print(preemption.is_requested())
            except KeyboardInterrupt:
                print("interrupted")
        """,
        ["True", "interrupted"],
    ),
    "Ctrl-C goes to the handler that was there": (
        """
        signal.signal(2, lambda signum, frame: print("the user's", signum))
        preemption.handle()
        signal.raise_signal(signal.SIGINT)
        print(preemption.is_requested())
        """,
        ["the user's 2", "False"],
    ),
    "Ctrl-C interrupts where the caller takes it": (
        """
        preemption.leave_interrupts()
        preemption.handle()
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            print("interrupted", preemption.is_requested())
        """,
        ["interrupted False"],
    ),
    "one that comes before a fork knows what it is is not lost": (
        """
        os.register_at_fork(after_in_child=term)  # before the hooks that handling installs, so it runs first
        preemption.handle()
        if (pid := os.fork()) == 0:
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), preemption.is_requested())
        term()
        print(preemption.is_requested())
        """,
        ["-15 False", "True"],
    ),
}


@pytest.mark.parametrize("what", HANDLED)
def test_sigterm_is_noted_and(what):
    source, lines = HANDLED[what]
    code, output, errors = run(source)
    assert (code, output) == (0, lines)
    assert errors == (ASKED_BY_CTRL_C if "the first Ctrl-C" in what else "")


def test_the_first_call_from_another_thread_is_refused_and_later_ones_work():
    code, lines, _ = run(
        """
        def handle():
            try:
                preemption.handle()
                print("handled")
            except RuntimeError as error:
                print(type(error).__name__, error)
        for turn in range(2):
            thread = threading.Thread(target=handle, name="replica")
            thread.start(); thread.join()
            preemption.handle()
        """
    )
    assert code == 0
    assert lines[0].startswith("UnisonoError SIGTERM cannot be handled from thread 'replica': ")
    assert "; call should_stop() once in the main thread before, or DataParallel in the main thread; " in lines[0]
    assert lines[1:] == ["handled"]


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_other_children_are_ended_by_sigterm_as_ever(context, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        TERM
        + dedent(
            f"""
            import multiprocessing, subprocess
            if __name__ == "__main__":
                preemption.handle()
                process = multiprocessing.get_context({context!r}).Process(target=time.sleep, args=(1000,))
                process.start(); process.terminate(); process.join()
                print(process.exitcode)
                for options in ({{}}, {{"preexec_fn": os.setsid}}, {{"start_new_session": True}}):
                    child = subprocess.Popen(["sleep", "1000"], **options)
                    child.terminate()
                    print(child.wait())
            """
        )
    )
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stdout.split()) == (0, ["-15"] * 4), done.stderr


@pytest.mark.parametrize("begin", ["preemption.handle()", "preemption.shield_loader_workers()"])
def test_loader_workers_outlive_sigterm_and_leave_nothing_behind(begin):
    code, lines, errors = run(
        f"""
        {begin}
        for is_persistent in (False, True):
            loader = DataLoader(Numbers(), 2, num_workers=2, persistent_workers=is_persistent)
            for epoch in range(2):
                found = []
                for batch in loader:
                    if len(found) == 4:
                        preemption.handle()  # where only the workers were shielded, it is handled while they run
                        let_a_stranger_term(os.getpid(), *(child.pid for child in children()))
                    found += batch.tolist()
                print(found == list(range(32)), preemption.is_requested(), len(children()))
            del loader
            print(len(children()))
        values = iter(DataLoader(Numbers(), 2, num_workers=2))
        next(values)
        del values
        print(len(children()))
        """,
        LOADERS,
    )
    assert (code, errors) == (0, "")
    assert lines == ["True True 0", "True True 0", "0", "True True 2", "True True 2", "0", "0"]


def test_a_loader_worker_that_is_stuck_is_ended_by_its_parent():
    code, lines, errors = run(
        """
        class Stuck(Numbers):
            def __getitem__(self, index):
                if index == 2:
                    time.sleep(1000)
                return index
        preemption.handle()
        values = iter(DataLoader(Stuck(), 2, num_workers=1))
        next(values)
        worker, = values._workers
        let_a_stranger_term(worker.pid)
        worker.join(0.2)
        print(worker.exitcode, flush=True)
        worker.terminate()
        worker.join()
        print(worker.exitcode, flush=True)
        os._exit(0)
        """,
        LOADERS,
    )
    assert (code, lines, errors) == (0, ["None", "0"], "")


def test_what_a_loader_worker_forks_is_ended_by_sigterm_as_ever():
    code, lines, errors = run(
        """
        class Forking(Numbers):
            def __getitem__(self, index):
                if (pid := os.fork()) == 0:
                    term()
                    os._exit(0)
                return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        preemption.handle()
        print(next(iter(DataLoader(Forking(), 2, num_workers=1))).tolist())
        """,
        LOADERS,
    )
    assert (code, lines, errors) == (0, ["[-15, -15]"], "")
