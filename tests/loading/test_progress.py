"""`unisono.tqdm`: rank zero's bar, right on a terminal, through the pipe of a worker, and in a log."""

from __future__ import annotations

import io
import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import warm_scripts
from modes import by_value
from torch.utils.data import DataLoader, TensorDataset

import unisono
from unisono import DeviceLoader
from unisono.report import terminal
from unisono.report.run import read_run
from unisono.report.timeline import COMPUTE, REDUCE

PATIENCE_S = 60
LATE_S = 0.04  # of rank 1, in each of its 60 steps
FORMAT = "{desc} {n_fmt}/{total_fmt}"

SCRIPT = f"""
import sys
import unisono

def work(*_):
    def bar(count, name, **options):
        return unisono.tqdm(range(count), desc=name, bar_format={FORMAT!r}, **options)
    for epoch in bar(2, "epochs", mininterval=MININTERVAL):
        for _ in bar(3, "batches", leave=False, mininterval=MININTERVAL):
            pass
        if unisono.rank():
            print("a line of another rank", file=sys.stderr)
        unisono.barrier()
    for _ in bar(4, "again", mininterval=MININTERVAL):
        pass

if __name__ == "__main__":
    START
    print("the caller is done", file=sys.stderr)
"""
PLAIN, MARKED = (
    "work()",
    "unisono.spawn(work, nprocs=2, backend='cpu', cores=1, output=unisono.Output(prefix=True))",
)
THREADS = (
    "import torch; unisono.DataParallel(torch.nn.Identity(), ['cpu:0', 'cpu:1']).run_on_replicas(lambda *_: work())"
)
RUN = ["-m", "unisono", "run", "-n", "2", "--backend", "cpu"]


def command(directory: Path, start: str | list[str], mininterval: float | None) -> list[str]:
    """What runs the script; a list is the command in front of it."""
    begin = start if isinstance(start, str) else PLAIN
    text = SCRIPT.replace("START", begin)
    text = text.replace(", mininterval=MININTERVAL", "" if mininterval is None else f", mininterval={mininterval}")
    path = directory / "script.py"
    path.write_text(text)
    return [sys.executable, *([] if isinstance(start, str) else start), str(path)]


def environ() -> dict[str, str]:
    """With the package that is tested, wherever the script lies."""
    return {**os.environ, "PYTHONPATH": str(Path(unisono.__file__).parent.parent)}


def on_terminal(arguments: list[str]) -> str:
    """What a command writes to a terminal of 60 columns."""
    import fcntl
    import pty
    import struct
    import termios

    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
    process = subprocess.Popen(
        arguments, stdin=slave, stdout=slave, stderr=slave, start_new_session=True, env=environ()
    )
    os.close(slave)
    found, deadline = b"", time.monotonic() + PATIENCE_S
    try:
        while time.monotonic() < deadline:
            if not select.select([master], [], [], 1.0)[0]:
                continue
            try:
                data = os.read(master, 65536)
            except OSError:  # the last one has closed it
                break
            found += data
        assert process.wait(PATIENCE_S) == 0, found
    finally:
        process.kill()
        process.wait()
        os.close(master)
    return found.decode()


def in_log(directory: Path, start: str | list[str]) -> list[str]:
    """The lines that the script writes to a pipe."""
    _, *options, script = command(directory, start, None)
    file, arguments = Path(script), []
    if options:
        file, arguments = directory / "launch.py", [*options[2:], script]
        file.write_text(warm_scripts.COMMAND)
    code, output, errors = warm_scripts.complete(file, *arguments, environ=environ())
    assert (code, output) == (0, ""), errors
    return errors.splitlines(keepends=True)


def screen(written: str) -> list[str]:
    """The lines that a terminal shows of what was written to it; it has room for all."""
    lines, row, column = [""], 0, 0
    for piece in re.findall(r"\x1b\[A|\n|\r|[^\x1b\n\r]+", written):
        if piece == "\n":
            row += 1
            lines += [""] * (row == len(lines))
        elif piece == "\r":
            column = 0
        elif piece == "\x1b[A":
            row -= 1
        else:
            lines[row] = lines[row].ljust(column)[:column] + piece + lines[row][column + len(piece) :]
            column += len(piece)
    return [line.rstrip() for line in lines if line.strip()]


OTHERS = "[rank 1] a line of another rank"


@pytest.mark.slow
def test_a_workers_bar_moves_on_one_line_of_the_callers_terminal(tmp_path: Path) -> None:
    written = on_terminal(command(tmp_path, RUN, 0))
    assert "\x1b" not in written, "the cursor leaves no line: others write there"
    bars = re.findall(r"\[rank 0\] (\w+ \d/\d) *\r", written)
    for number in range(3):
        assert f"batches {number + 1}/3" in bars
    assert bars.count("batches 0/3") == 2
    shown = screen(written)
    of_bars = [line for line in shown if line.startswith("[rank 0]") and "done" not in line]
    assert of_bars[-1] == "[rank 0] again 4/4"
    assert "[rank 0] epochs 2/2" in of_bars
    assert shown.count(OTHERS) == 2
    assert not [line for line in shown if re.fullmatch(r"\[rank \d\]", line)], "a mark with nothing behind it"
    assert not any("[rank 1] epochs" in line or "[rank 1] batches" in line for line in shown)


@pytest.mark.slow
def test_a_plain_scripts_bars_are_tqdms_own_on_a_terminal(tmp_path: Path) -> None:
    written = on_terminal(command(tmp_path, PLAIN, 0))
    assert screen(written) == ["epochs 2/2", "again 4/4", "the caller is done"]
    assert "\x1b[A" in written, "a nested bar has a line of its own"


@pytest.mark.slow
@pytest.mark.parametrize(("start", "mark"), [(PLAIN, ""), (THREADS, ""), (MARKED, "[rank 0] ")], ids=repr)
def test_a_log_gets_one_line_per_lasting_bar_of_rank_zero_and_no_other(
    start: str | list[str], mark: str, tmp_path: Path
) -> None:
    lines = in_log(tmp_path, start)
    assert [line for line in lines if line.startswith(mark) and "/" in line] == [
        f"{mark}epochs 2/2\n",
        f"{mark}again 4/4\n",
    ]
    assert [line for line in lines if re.fullmatch(r"(\[rank \d\])?\s*", line)] == []
    assert len([line for line in lines if "a line of another rank" in line]) == 2 * (start != PLAIN)


@pytest.fixture
def written(capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[[], str]]:
    yield lambda: capsys.readouterr().err
    terminal.set_columns(0)


def test_a_log_tells_of_progress_when_it_is_time(written: Callable[[], str]) -> None:
    for number in unisono.tqdm(range(3), desc="often", mininterval=0, bar_format=FORMAT):
        assert number < 3
    bar = unisono.tqdm(total=1000, desc="rarely", bar_format=FORMAT + "{postfix}")
    for number in range(1000):
        bar.update()
        bar.set_postfix(loss=number)  # which draws each time, where bars move
    bar.close()
    assert written() == "often 0/3\noften 1/3\noften 2/3\noften 3/3\noften 3/3\nrarely 1000/1000, loss=999\n"


@pytest.mark.parametrize("columns", [30, 200])
def test_a_bar_in_a_pipe_fits_the_callers_terminal(columns: int, written: Callable[[], str]) -> None:
    terminal.set_columns(columns)
    list(unisono.tqdm(range(2)))
    widths = {len(line.rstrip()) + len("[rank 0] ") for line in re.split(r"[\r\n]", written()) if line.strip()}
    assert max(widths) < columns
    assert max(widths) > columns - 4


def test_a_file_of_ones_own_and_disable_are_as_in_tqdm() -> None:
    stream = io.StringIO()
    list(unisono.tqdm(range(2), "named", file=stream, bar_format=FORMAT))
    list(unisono.tqdm(range(2), file=stream, disable=True))
    list(unisono.tqdm(range(2), file=stream, disable=None))  # which is True where there is no terminal
    assert stream.getvalue() == "named 2/2\n"


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("kind", ["log", "pipe", "terminal", "disabled"])
def test_a_bar_over_a_loader_begins_one_epoch(kind: str, written: Callable[[], str]) -> None:
    if kind == "pipe":
        terminal.set_columns(60)
    options = {"terminal": {"file": _Terminal()}, "disabled": {"disable": True}}.get(kind, {})
    data = TensorDataset(torch.arange(20))
    plain, shown = (DeviceLoader(DataLoader(data, batch_size=5, shuffle=True)) for _ in range(2))
    for epoch in range(2):
        expected = [batch.tolist() for (batch,) in plain]
        bar = unisono.tqdm(shown, **options)
        assert shown.epoch == epoch
        assert [batch.tolist() for (batch,) in bar] == expected
        assert len(bar) == 4


def train(directory: Path) -> None:
    """With a bar in a log of its own; rank 1 is slow."""
    accelerator = unisono.Accelerator(seed=0, split_batches=True, project_dir=directory)
    accelerator.init_trackers("run")
    model = torch.nn.Linear(4, 1)
    loader = DataLoader(TensorDataset(torch.randn(240, 4)), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1), loader)
    with (directory / f"bar-{accelerator.world.rank}").open("w") as file:
        for (x,) in unisono.tqdm(loader, file=file, mininterval=0):
            accelerator.backward(loss := model(x).square().mean())
            time.sleep(LATE_S * accelerator.world.rank)
            optimizer.step()
            optimizer.zero_grad()
            accelerator.log({"loss": loss.item()})


def test_a_loader_bar_shows_what_the_run_does_and_which_rank_it_waits_for(tmp_path: Path) -> None:
    with by_value(train):
        unisono.spawn(lambda _: train(tmp_path), nprocs=2, backend="cpu", output=unisono.Output(tmp_path / "logs"))
    *lines, last = (tmp_path / "bar-0").read_text().splitlines()
    assert any("% for rank 1" in line for line in lines)
    assert re.search(r"^epoch 0: 100%.*60/60 .*, loss=[\d.e-]+, waits \d\d%.*samples/s, step 60\]", last)
    assert (tmp_path / "bar-1").read_text() == ""
    report = read_run(tmp_path / "logs").report
    assert report.slowest == 1
    assert report.ranks[0].seconds[REDUCE] > 30 * LATE_S, "DDP's waiting is no computing"
    assert report.ranks[1].seconds[COMPUTE] >= 60 * LATE_S


@pytest.mark.parametrize(("columns", "live", "figures"), [(90, None, {1, 2}), (200, None, {3}), (200, False, {0})])
def test_a_bar_shows_the_figures_that_fit_unless_they_are_turned_off(
    columns: int, live: bool | None, figures: set[int], written: Callable[[], str]
) -> None:
    terminal.set_columns(columns)
    loader = DeviceLoader(DataLoader(range(20), batch_size=5))
    with unisono.tqdm(loader, live=live) as bar:
        for _ in bar:
            bar.set_postfix_str("own")
    last = re.split(r"[\r\n]+", written())[-2]
    found = re.findall(r"waits \d+%|samples/s|step 0", last)
    assert ", own" in last
    assert len(found) in figures
    assert len(last) < columns


@pytest.mark.parametrize("source", [DataLoader(range(22), batch_size=3, shuffle=True), list(torch.arange(22).split(3))])
def test_a_bar_over_a_resumed_epoch_begins_at_its_position(source: Any) -> None:
    loader, resumed = DeviceLoader(source), DeviceLoader(source)
    batches = iter(loader)
    next(batches), next(batches)
    resumed.load_state_dict(loader.state_dict())
    for began in (2, 0):
        bar = unisono.tqdm(resumed, file=io.StringIO())
        assert bar.n == began
        list(bar)
        assert bar.n == len(resumed)
