"""The records of a run: each number is there, also of one that was killed; shown as a page, a trace, live."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from faults import SOON_S, stand_still
from modes import HOST, by_value
from torch.utils.data import DataLoader, TensorDataset

from unisono import Accelerator, Output, spawn
from unisono.cli.main import main
from unisono.errors import WorkerDiedError
from unisono.report.as_json import as_json
from unisono.report.comparison import compare
from unisono.report.live import describe, is_alive, logged_line
from unisono.report.page import charts_of_logged, page_data
from unisono.report.record import Recorder
from unisono.report.run import Place, Run, read_run
from unisono.report.text import table_of
from unisono.report.timeline import BACKWARD, FETCH, FORWARD, LOG, REDUCE, STEP
from unisono.report.trace import write_trace
from unisono.world import solo_world, use_world

STEPS = 30


def train(directory: Path | None = None, dies: bool = False) -> None:
    accelerator = Accelerator(seed=0, split_batches=True, project_dir=directory)
    if directory is not None:
        accelerator.init_trackers("run", {"lr": 0.1, "model": {"width": 4}, "limit": float("inf")})
    model = torch.nn.Linear(4, 1)
    x = torch.randn(4 * STEPS, 4, device=HOST)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1), loader)
    for number, (inputs, labels) in enumerate(loader):
        loss = torch.nn.functional.mse_loss(model(inputs), labels)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if directory is not None:
            accelerator.log({"loss": loss.item()}, step=number)
        if dies and number == STEPS // 2 and accelerator.world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Of two workers, to its end."""
    directory = tmp_path_factory.mktemp("run")
    with by_value(train):
        spawn(lambda _: train(directory / "project"), nprocs=2, backend="cpu", output=Output(directory / "logs"))
    return read_run(directory / "logs")


@pytest.fixture
def copied(run: Run, tmp_path: Path) -> Path:
    """The directory of the run, to be changed."""
    return shutil.copytree(run.directory, tmp_path / "copy")


def test_a_run_leaves_each_step_its_phases_and_what_was_logged(run: Run) -> None:
    assert [each.rank for each in run.ranks] == [0, 1]
    assert run.missing == []
    for each in run.ranks:
        assert (each.end, each.earlier) == ("finished", [])
        assert (each.summary.steps, each.summary.samples) == (STEPS, 2 * STEPS)
        assert len(each.steps()) == STEPS
        assert sum(seconds for _, seconds in each.steps()) <= each.summary.loop_seconds
        phases = [span.phase for span in next(spans for name, spans in each.spans().items() if name.startswith("loop"))]
        assert {FETCH, FORWARD, BACKWARD, STEP} <= set(phases)
        assert phases.count(FORWARD) == phases.count(BACKWARD) == STEPS
    logged = [line for sample in run.ranks[0].samples for line in sample["logged"]]
    assert [step for _, step, _ in logged] == list(range(STEPS))
    assert run.report.samples == 4 * STEPS


def test_the_page_holds_the_numbers_of_the_run(run: Run) -> None:
    data = page_data(run)
    charts = {each["title"]: each for each in data["charts"]}
    steps = charts["Time of a step"]["series"]
    assert steps == [[f"rank {each.rank}", [round(1e3 * s, 3) for _, s in each.steps()]] for each in run.ranks]
    assert sum(charts["Distribution of step times, without the slowest 1 %"]["series"][0][1]) >= 2 * STEPS * 0.98
    assert len(charts["loss"]["x"]) == STEPS
    assert [row[0] for row in data["table"]] == ["rank", "0", "1"]
    for rank, drawn in zip(run.ranks, data["ranks"], strict=True):
        phases = (FETCH, FORWARD, BACKWARD, STEP, LOG, REDUCE, "compute")
        whole = sum(rank.summary.seconds.get(phase, 0.0) for phase in phases)
        assert sum(drawn["spans"]["length"]) == pytest.approx(whole, rel=0.01)


def test_commands_show_it_and_write_a_page_and_a_trace(run: Run, tmp_path: Path, capsys) -> None:
    page, trace = tmp_path / "there" / "page.html", tmp_path / "trace.json"
    assert main(["report", str(run.directory), "-o", str(page), "--trace", str(trace)]) == 0
    shown = capsys.readouterr().out
    assert "forward" in shown
    assert str(page) in shown
    assert "{{" not in page.read_text()
    events = json.loads(trace.read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}
    assert sum(event["name"] == "forward pass" for event in events) == 2 * STEPS
    assert main(["top", str(run.directory), "--once"]) == 0
    assert "finished" in capsys.readouterr().out
    assert main(["report", str(run.directory), str(run.directory)]) == 0
    assert "samples/s" in capsys.readouterr().out
    assert "1.000" in compare(run, run)


def test_each_rate_says_which_time_it_is_over(run: Run, tmp_path: Path, capsys) -> None:
    seconds = max(each.loop_seconds for each in run.report.ranks)
    assert f" samples/s over 2 rank(s), in the {seconds:,.2f} s that" in table_of(run.report)
    assert page_data(run)["facts"][3].endswith(" per second in loops")
    assert "samples/s in loops" in page_data(run)["table"][0]
    assert "rates: of the last second; for a rank that has ended, all its time, also outside loops" in describe(run)
    going_on = replace(run, ranks=[replace(each, end=None) for each in run.ranks])
    assert "rates: of the last second" in describe(going_on)


def test_the_end_of_a_rank_is_beside_it_in_the_page_and_short(run: Run) -> None:
    failed = replace(run.ranks[1], end="CollectiveMismatchError: rank 0 called barrier() while rank 1 ...")
    table = page_data(replace(run, ranks=[run.ranks[0], failed]))["table"]
    ends = [["rank", "end"], ["0", "finished"], ["1", "CollectiveMismatchError"]]
    assert [row[:2] for row in table] == ends
    assert len({*map(len, table)}) == 1


def test_page_and_json_begin_with_settings_versions_and_the_last_logged(run: Run) -> None:
    facts = page_data(run)["facts"]
    assert {"lr=0.1", "model.width=4", "project=run", f"torch {torch.__version__}"} <= {*facts}
    assert any(each.startswith(f"logged at step {STEPS - 1}: loss=") for each in facts)
    found = json.loads(json.dumps(as_json(run), allow_nan=False))
    assert found["settings"] == {"project": "run", "lr": 0.1, "model.width": 4, "limit": "inf"}
    assert found["versions"].keys() == {"unisono", "torch", "python"}
    assert found["last_logged"].keys() == {"loss"}
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    assert found["commit"] == head.stdout.strip()


def test_train_and_validation_are_in_one_chart(run: Run) -> None:
    record = replace(run.ranks[0], earlier=[], samples=[{**run.ranks[0].samples[-1], "logged": LOGGED}])
    charts = {each["title"]: each for each in charts_of_logged(Run(run.directory, [record], run.attempts))}
    assert [*charts] == ["loss", "test"]
    assert charts["loss"]["x"] == [1, 2, 3]
    assert charts["loss"]["series"] == [["train_loss", [4.0, 3.0, None]], ["val/loss", [None, 5.0, 4.5]]]
    assert charts["test"]["series"] == [["test", [0.5]]]


LOGGED = [[0, 1, {"train_loss": 4.0}], [0, 2, {"train_loss": 3.0, "val/loss": 5.0}], [0, 3, {"val/loss": 4.5}]]
LOGGED += [[0, 4, {"test": 0.5, "text": "no number"}]]


def test_top_shows_time_shares_and_the_last_log_without_empty_columns(run: Run) -> None:
    lines = describe(run)
    assert "device MB" not in lines[2], "CPUs do not count it"
    (rank, *_) = run.ranks
    bar = lines[3].split()[-1]
    assert len(bar) == 16
    assert rank.summary is not None
    letters = {"w": FETCH, "c": "compute", "f": FORWARD, "b": BACKWARD, "r": REDUCE, "s": STEP, "o": LOG}
    for letter, phase in letters.items():
        assert bar.count(letter) / 16 == pytest.approx(rank.summary.share(phase), abs=1 / 16)
    legend = next(line for line in lines if line.startswith("time: "))
    assert {each.split()[0] for each in legend.removeprefix("time: ").split(", ")} == {*bar, *lines[4].split()[-1]}
    assert any(line.startswith(f"logged at step {STEPS - 1}: loss=") for line in lines)


def test_a_reader_of_their_output_that_has_ended_is_no_error(run: Run, tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    for command in (["report", run.directory, "-o", tmp_path / "page.html"], ["top", run.directory, "--once"]):
        done = subprocess.run([sys.executable, "-m", "unisono", *command], stdout=writing, stderr=subprocess.PIPE)
        assert (done.returncode, done.stderr) == (1, b"")
    os.close(writing)


@pytest.mark.parametrize(
    "command", [["report"], ["report", "--output", "page.html"], ["report", "--json"], ["top", "--once"]]
)
def test_who_reads_a_record_need_not_wait_for_torch(run: Run, tmp_path: Path, command: list[str]) -> None:
    code = "import sys; from unisono.cli.main import run_command; code = run_command(sys.argv[1:]); "
    code += "print('torch' in sys.modules); sys.exit(code)"
    called = [sys.executable, "-P", "-c", code, command[0], str(run.directory), *command[1:]]
    shown = subprocess.run(called, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert shown.splitlines()[-1] == "False"


def test_without_a_name_top_shows_the_runs_that_go_on(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    running = spawn(lambda _: stand_still(), nprocs=2, backend="cpu", output=Output(tmp_path / "mine"), join=False)
    try:
        deadline = time.monotonic() + SOON_S
        while len([*tmp_path.glob("mine/latest/rank-?.jsonl")]) < 2:
            assert time.monotonic() < deadline
        assert main(["top", "--once"]) == 0
    finally:
        running.stop()
    shown = capsys.readouterr().out
    assert str((tmp_path / "mine" / "latest").resolve()) in shown
    assert shown.count("outside loops") + shown.count("begins") >= 2


def test_without_a_name_report_is_of_the_run_that_goes_on_else_of_logs(copied: Path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(copied.parent)
    (copied.parent / "logs").symlink_to(copied)
    for runs, directory in (([copied], copied), ([], Path("logs"))):
        monkeypatch.setattr("unisono.cli.report.running_runs", lambda runs=runs: runs)
        assert main(["report"]) == 0
        assert capsys.readouterr().out.splitlines()[-1] == f"page: {directory.absolute() / 'report.html'}"
    monkeypatch.setattr("unisono.cli.report.running_runs", lambda: [copied, copied.parent])
    with pytest.raises(SystemExit, match="2"):
        main(["report"])
    assert f"{copied}, {copied.parent}; pass one of them as RUN" in capsys.readouterr().err


def test_a_killed_rank_leaves_what_it_did_and_is_named(tmp_path: Path) -> None:
    with by_value(train), pytest.raises(WorkerDiedError):
        spawn(lambda _: train(dies=True), nprocs=2, backend="cpu", output=Output(tmp_path))
    found = read_run(tmp_path)
    (killed,) = [each for each in found.ranks if each.rank == 1]
    os.utime(killed.path)  # as if it were soon after, however long the end of the run has taken
    assert "gone" in "\n".join(describe(found))
    os.utime(killed.path, (0, 0))
    assert killed.end is None
    assert any("rank 1: it has not recorded its end" in text for text in found.missing)
    assert "silent for" in "\n".join(describe(found))
    assert page_data(found)["missing"] == found.missing


def test_a_restart_counts_and_what_is_cut_off_is_said(copied: Path) -> None:
    file = copied / "rank-0.jsonl"
    first = file.read_text().splitlines()[0]
    whole = file.read_text()
    file.write_text(whole.removeprefix(first))
    assert read_run(copied).missing == ["rank 0: rank-0.jsonl does not say when the rank began"]
    file.write_text(f"{whole}cut\ncut\n")
    (missing,) = read_run(copied).missing
    assert missing.endswith("of rank-0.jsonl, and 1 others are cut off")
    file.write_text(f'{whole}{{"t": 1, "rank": 0}}\n')
    assert read_run(copied).missing == ["rank 0: rank-0.jsonl has lines of another version of Unisono"]
    assert main(["report", str(copied)]) == 0
    file.write_text(whole + first + "\n" + '{"t": 1')
    assert read_run(copied).missing == [], "the line may be being written"
    os.utime(file, (0, 0))
    found = read_run(copied).ranks[0]
    assert (len(found.earlier), found.samples, found.summary) == (1, [], None)
    assert "rank-0.jsonl is cut off" in found.cut[0]
    (copied / "rank-1.jsonl").unlink()
    assert "rank 1 has left no record of the last attempt" in read_run(copied).missing


def test_a_rank_whose_process_is_gone_is_not_writing_its_last_line(copied: Path) -> None:
    file = copied / "rank-0.jsonl"
    *lines, last, _ = file.read_text().splitlines()
    for text, missing in ((last[:50], 2), (f"{last}\n", 1)):
        file.write_text("\n".join([*lines, last, text]))
        assert len(read_run(copied).missing) == missing
    file.write_text("\n".join([*lines, json.dumps(json.loads(last) | {"pid": os.getpid()}), "{"]))
    assert read_run(copied).missing == [], "it is here, and may be writing"


def test_what_is_cut_off_of_spans_and_of_the_profile_is_left_out_and_said(copied: Path, tmp_path: Path, capsys) -> None:
    spans = copied / "rank-0.spans.jsonl"
    spans.write_text(spans.read_text()[:100])
    (copied / "rank-1.trace.json").write_text('{"traceEvents": [')
    assert main(["report", str(copied), "--trace", str(tmp_path / "trace.json")]) == 0
    said = capsys.readouterr().err.splitlines()
    names = ["rank-0.spans.jsonl", "rank-1.trace.json"]
    assert said == [f"missing: rank {rank}: {name} is cut off" for rank, name in enumerate(names)]
    assert {each["pid"] for each in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]} == {0, 1}
    assert main(["report", str(copied), "-o", "/dev/full"]) == 1
    full = capsys.readouterr().err
    assert "-o FILE" in full
    assert "rank-0.spans.jsonl is cut off" in full


def test_a_restart_after_a_kill_in_the_middle_of_a_line_is_read(tmp_path: Path) -> None:
    file = tmp_path / "rank-0.jsonl"
    file.write_text('{"began": 1.0, "rank": 0}\n{"t": 1')
    Recorder(replace(solo_world(), restart_count=1), tmp_path)
    found = read_run(tmp_path).ranks[0]
    assert (len(found.earlier), found.facts["restart"], found.cut) == (1, 1, ["line 2 of rank-0.jsonl is cut off"])


def test_ranks_of_an_attempt_that_was_repeated_without_them_are_left_out(run: Run, copied: Path) -> None:
    with (copied / "rank-0.jsonl").open("a") as file:
        facts = run.ranks[0].facts | {"restart": 1, "world_size": 1}
        for line in [facts, run.ranks[0].samples[-1], {"end": "finished"}]:
            file.write(json.dumps(line) + "\n")
    found = read_run(copied)
    assert [each.rank for each in found.ranks] == [0]
    assert found.report.samples == 2 * STEPS
    assert found.missing == []


def test_the_ranks_of_a_machine_whose_clock_is_wrong_begin_with_the_others(run: Run, copied: Path) -> None:
    beside = run.offset(run.ranks[1]) - run.offset(run.ranks[0])
    for host, (late, offset) in {"vm": (0.0, beside), "other": (3600.0, 0.0), "third": (-3600.0, 0.0)}.items():
        facts = run.ranks[1].facts | {"host": host, "began": run.ranks[1].facts["began"] + late}
        facts["host"] = run.ranks[0].facts["host"] if host == "vm" else host
        lines = (run.directory / "rank-1.jsonl").read_text().splitlines()
        (copied / "rank-1.jsonl").write_text("\n".join([json.dumps(facts), *lines[1:]]) + "\n")
        found = read_run(copied)
        assert found.offset(found.ranks[1]) - found.offset(found.ranks[0]) == pytest.approx(offset, abs=0.5)
        assert found.seconds < 600
        assert (f"{host} cpu:1" in "\n".join(describe(found))) == (host != "vm")


def test_a_long_run_that_writes_a_line_each_minute_is_not_silent(copied: Path) -> None:
    file = copied / "rank-0.jsonl"
    *lines, last, _ = file.read_text().splitlines()
    file.write_text("\n".join([*lines, json.dumps(json.loads(last) | {"t": 600_000.0, "pid": os.getpid()})]) + "\n")
    os.utime(file, (time.time() - 55, time.time() - 55))
    found = read_run(copied)
    assert found.missing == []
    assert is_alive(found.ranks[0])
    os.utime(file, (time.time() - 90, time.time() - 90))
    assert not is_alive(found.ranks[0])


def test_the_page_draws_what_was_logged_that_is_a_number(copied: Path) -> None:
    file = copied / "rank-0.jsonl"
    values = [1.5, float("nan"), float("inf"), 10**400, "</script>", True]
    logged = [[0.0, step, {"loss é": value}] for step, value in enumerate(values)]
    facts, *samples = map(json.loads, file.read_text().splitlines())
    lines = [facts, *({**each, "logged": logged} if "t" in each else each for each in samples[-2:])]
    file.write_text("".join(json.dumps(each) + "\n" for each in lines))
    for count, shown in enumerate(["1.5", "nan", "inf", "", "", "1"], 1):
        cut = replace(read_run(copied).ranks[0], earlier=[], samples=[{**samples[-2], "logged": logged[:count]}])
        assert logged_line(Run(copied, [cut], [])) == (f"logged at step {count - 1}: loss é={shown}" if shown else "")
    data = json.loads(json.dumps(page_data(read_run(copied)), allow_nan=False))
    assert data["charts"][0]["series"] == [["loss é", [1.5, None, None, None, None, None]]]


def test_training_goes_on_where_the_record_cannot_be_written(tmp_path: Path, caplog) -> None:
    directory = tmp_path / "gone"
    directory.mkdir()
    with use_world(solo_world()) as world, caplog.at_level(logging.WARNING):
        recorder = Recorder(world, directory)
        shutil.rmtree(directory)
        train()
        recorder.sample()
        recorder.end(None)
        other = Recorder(world, tmp_path)
        world.timeline.logged.append((0, None, {("no", "text"): 1}))
        other.end(None)
        other.end(None)
        (tmp_path / "full").mkdir()
        (tmp_path / "full" / "rank-0.jsonl").symlink_to("/dev/full")
        Recorder(world, tmp_path / "full").end(None)
    assert caplog.text.count("is incomplete from here on, the run continues") == 3


def test_a_ranks_final_error_is_in_the_report_and_in_one_line_of_top(copied: Path, capsys) -> None:
    with (copied / "rank-1.jsonl").open("a") as file:
        file.write(json.dumps({"end": "ValueError: of\nmany lines"}) + "\n")
    assert main(["report", str(copied)]) == main(["top", "--once", str(copied)]) == 0
    shown = capsys.readouterr().out
    assert "rank 1 ended by ValueError: of\nmany lines\n" in shown
    assert "  ValueError: of many lines  " in shown


def test_a_directory_without_records_is_an_error_saying_what_writes_them(tmp_path: Path, capsys) -> None:
    assert main(["report", str(tmp_path)]) == main(["top", str(tmp_path)]) == 1
    assert "unisono run --log-dir" in capsys.readouterr().err


@pytest.mark.parametrize("busy", [0.5, 1.0])
def test_what_helps_comes_before_the_cores_that_others_take(run: Run, tmp_path: Path, busy: float) -> None:
    for record in run.ranks:
        last = record.samples[-1]
        seconds, waits = dict.fromkeys(last["seconds"], 0.0) | {"compute": 9.0}, dict.fromkeys(last["waits"], 0.0)
        made = {**last, "seconds": seconds, "waits": waits, "machine_cpu": busy, "cpu_s": 0.1}
        lines = [record.facts, {**made, "t": 0.0, "cpu_s": 0.0}, {**made, "t": 10.0}, {"end": "finished"}]
        (tmp_path / record.path.name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    verdict = read_run(tmp_path).verdict
    assert verdict.startswith("compute-bound")
    assert ("Other processes take 9" in verdict) is (busy == 1.0)


def test_chosen_steps_of_chosen_ranks_are_profiled_and_join_the_trace(tmp_path: Path) -> None:
    with by_value(train):
        spawn(lambda _: train(), nprocs=2, backend="cpu", output=Output(tmp_path, profile="10:13@1"))
    found = read_run(tmp_path)
    assert [each.path.with_suffix(".trace.json").exists() for each in found.ranks] == [False, True]
    events = json.loads(write_trace(found, tmp_path / "trace.json").read_text())["traceEvents"]
    seen = [event for event in events if str(event["pid"]).startswith("rank 1: ") and "Optimizer.step" in event["name"]]
    assert len(seen) == 3
    spans = next(spans for name, spans in found.ranks[1].spans().items() if name.startswith("loop"))
    ends = [span.stop / 1e3 + 1e6 * found.offset(found.ranks[1]) for span in spans if span.phase == STEP]
    assert ends[8] < min(event["ts"] for event in seen)
    assert max(event["ts"] for event in seen) < ends[12]


@pytest.mark.parametrize("profile", ["13:10", "0:3", "10", "10:13@a", ""])
def test_steps_that_are_none_are_refused(tmp_path: Path, profile: str) -> None:
    with pytest.raises(ValueError, match="names no steps"):
        Output(tmp_path, profile=profile)
    with pytest.raises(ValueError, match="pass log_dir as well"):
        Output(profile="1:2")


def test_top_shows_the_epoch_and_time_left_only_if_recorded(run: Run) -> None:
    record, last = run.ranks[0], run.ranks[0].samples[-1]

    def going_on(*places: tuple[float, int, int, int | None] | None) -> Run:
        lines = [
            {
                **last,
                "pid": os.getpid(),
                "t": each[0],
                "place": dict(zip(("epoch", "batch", "length"), each[1:], strict=True)),
            }
            if each
            else {**last, "place": None}
            for each in places
        ]
        return Run(run.directory, [replace(record, samples=lines, end=None)], run.attempts)

    os.utime(record.path)
    epoch = going_on((1.0, 1, 90, 100), (11.0, 2, 10, 100), (13.0, 2, 40, 100))
    assert epoch.place == Place(2, 40, 100, pytest.approx(2 / 30 * 60))
    assert "epoch 2: batch 40 of 100, about 0:00:04 to the end of the epoch" in describe(epoch)
    found = json.loads(json.dumps(as_json(epoch)["ranks"][0]["place"]))
    assert found == {"epoch": 2, "batch": 40, "length": 100, "seconds_left": pytest.approx(4)}
    assert "epoch 2: batch 40" in describe(going_on((1.0, 2, 10, None), (2.0, 2, 40, None))), "it has no length"
    assert "epoch 2: batch 10 of 100" in describe(going_on((1.0, 1, 90, 100), (2.0, 2, 10, 100))), "it begins"
    for other in (going_on((1.0, 1, 90, 100), None), Run(run.directory, [record], run.attempts)):
        assert not any("epoch" in line for line in describe(other))
    ended = replace(epoch.ranks[0], end="ValueError")
    assert Run(run.directory, [ended], run.attempts).place == Place(2, 40, 100, None)
    older = [{name: value for name, value in last.items() if name != "place"}]
    assert Run(run.directory, [replace(record, samples=older)], run.attempts).place is None


def read_places(directory: Path) -> list[dict[str, int]]:
    """The place at each batch of two epochs, each with an evaluation in it; the second is resumed in its middle."""
    with use_world(solo_world()) as world:
        recorder = Recorder(world, directory)
        data = DataLoader(TensorDataset(torch.zeros(24, 1, device=HOST)), batch_size=4)
        model = torch.nn.Linear(1, 1)
        made = Accelerator().prepare(model, torch.optim.SGD(model.parameters(), 0.1), data, DataLoader([1.0, 2.0]))
        network, optimizer, loader, other = made
        found = []
        for epoch in range(2):
            for number, (batch,) in enumerate(loader):
                network(batch).sum().backward()
                optimizer.step()
                with torch.no_grad():
                    found += [recorder._numbers()["place"] for _ in other]
                if epoch == 0 and number == 3:
                    state = loader.state_dict()
        assert recorder._numbers()["place"] is None, "outside a loop"
        with torch.no_grad():
            for _ in other:
                assert recorder._numbers()["place"] is None, "no loop that trains"
        loader.load_state_dict(state)
        resumed = iter(loader)
        next(resumed)
        found.append(recorder._numbers()["place"])
    return found


def test_the_record_has_the_outermost_training_loops_place_in_the_epoch(tmp_path: Path) -> None:
    *passes, resumed = read_places(tmp_path)
    assert passes == [
        {"epoch": epoch, "batch": batch, "length": 6} for epoch in range(2) for batch in range(1, 7) for _ in range(2)
    ]
    assert resumed["batch"] == 5, "four came before it"


@pytest.mark.parametrize(
    ("variables", "is_coloured"),
    [({"NO_COLOR": ""}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)],
)
def test_top_has_colours_on_a_terminal_unless_they_are_not_wanted(
    run: Run, variables: dict[str, str], is_coloured: bool
) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"} | {"TERM": "xterm"}
    command = [sys.executable, "-m", "unisono", "top", str(run.directory)]
    for options in ([], ["--once"]):
        own, theirs = pty.openpty()
        with subprocess.Popen([*command, *options], stdout=theirs, env=environment | variables) as shown:
            os.close(theirs)
            text = b""
            with contextlib.suppress(OSError):  # it has closed the terminal
                while part := os.read(own, 4096):
                    text += part
        os.close(own)
        assert shown.returncode == 0
        assert (b"\x1b[7;" in text) is is_coloured
        assert (b"\x1b" in text) is (is_coloured or (not options and variables.get("TERM") != "dumb"))
    piped = subprocess.run(command, capture_output=True, check=True, env=environment | variables).stdout
    assert b"\x1b" not in piped
    codes = re.compile(r"\x1b\[[\d;]*m")
    assert [codes.sub("", line) for line in describe(run, is_coloured=True)] == describe(run)
    assert max(len(codes.sub("", line)) for line in describe(run, 40, is_coloured=True)) <= 40
