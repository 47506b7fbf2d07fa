"""What the failures of a run have cost: known to the step, though the ranks that failed were killed."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from agents import agent, free_port, kill_all
from faults import Line, Script
from modes import HOST, by_value
from torch.utils.data import DataLoader, TensorDataset

from unisono import Accelerator, Checkpointer, DeviceLoader, Output, optimizer_step, spawn
from unisono.cli.main import main
from unisono.errors import WorkerDiedError
from unisono.report.live import describe
from unisono.report.page import page_data
from unisono.report.record import Recorder, write_fault
from unisono.report.restarts import Restart
from unisono.report.run import Run, read_run
from unisono.report.steps import StepsDone
from unisono.world import solo_world, use_world

STEPS, SAVED, DIED = 12, 5, 8
KILLED = "rank 1 was killed by SIGKILL"


def train(directory: Path, before: Callable[[Accelerator], None], after: Callable[[Accelerator, int], None]) -> None:
    """Train for `STEPS` steps, from the checkpoint that is saved after `SAVED` of them."""
    accelerator = Accelerator(seed=0, split_batches=True, project_dir=directory)
    model = torch.nn.Linear(4, 1)
    x = torch.randn(4 * STEPS, 4, device=HOST)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1), loader)
    before(accelerator)
    accelerator.load_state(must_exist=False)
    for step, (inputs, labels) in enumerate(loader, loader.num_skipped() + 1):
        accelerator.backward(torch.nn.functional.mse_loss(model(inputs), labels))
        optimizer.step()
        optimizer.zero_grad()
        if step == SAVED:
            accelerator.save_state()
        after(accelerator, step)


def once(directory: Path) -> bool:
    """Whether it is the first time, also of processes that were killed."""
    is_first = not directory.exists()
    directory.mkdir(exist_ok=True)
    return is_first


def kill_itself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def train_and_die(directory: Path, is_always: bool = False, fails_before: bool = False) -> None:
    """Rank 1 is killed after `DIED` steps, once or always; then rank 0 may fail before its first step, once."""

    def before(accelerator: Accelerator) -> None:
        if fails_before and accelerator.world.restart_count == 1 and accelerator.world.rank == 0:
            raise ValueError("not yet\nas it says")

    def after(accelerator: Accelerator, step: int) -> None:
        if step == DIED and accelerator.world.rank == 1 and (is_always or once(directory / "died")):
            kill_itself()

    train(directory / "project", before, after)


def run_of(directory: Path, max_restarts: int = 3, **how: bool) -> Run:
    """The run of two workers that train and die, as it is recorded."""
    with by_value(train):
        spawn(
            lambda _: train_and_die(directory, **how),
            nprocs=2,
            backend="cpu",
            max_restarts=max_restarts,
            output=Output(directory / "logs"),
        )
    return read_run(directory / "logs")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Of two workers, one of which was killed once."""
    return run_of(tmp_path_factory.mktemp("run"))


def facts_of(found: Restart) -> tuple[Any, ...]:
    return found.what, found.ranks, found.step, found.continued, found.repeated


def test_the_record_reaches_the_last_step_of_a_group_with_a_killed_rank(run: Run) -> None:
    (found,) = run.restarts.all
    assert facts_of(found) == (KILLED, (2, 2), DIED, SAVED, DIED - SAVED)
    assert run.restarts.repeated == DIED - SAVED
    assert found.noticed_s is not None
    assert found.seconds is not None
    assert 0 < found.noticed_s < found.noticed_s + found.seconds < run.seconds
    assert 0 < run.restarts.goodput < 1
    (fault,) = [fault for rank in run.ranks for fault in rank.faults]
    assert (fault["restart"], fault["world_size"], fault["what"]) == (0, 2, KILLED)
    assert (fault["done"], fault["loaded"]) == (DIED, None)
    assert [rank.samples[-1]["done"] for rank in run.ranks] == [STEPS, STEPS]
    assert [rank.samples[-1]["loaded"] for rank in run.ranks] == [SAVED, SAVED]
    assert run.missing == []


def test_the_texts_and_the_page_say_what_it_has_cost(run: Run, tmp_path: Path, capsys) -> None:
    (found,) = run.restarts.all
    summary = (
        f"1 restart(s), {DIED - SAVED} steps repeated, {found.seconds:,.1f} s from a fault to the end of the next "
        f"step, {run.restarts.goodput:.1%} of the time made progress"
    )
    assert run.restarts.summary == summary
    assert main(["report", str(run.directory), "-o", str(tmp_path / "page.html")]) == 0
    assert (
        f"{summary}\nrestart 1: {KILLED} after {found.noticed_s:,.1f} s, at step {DIED}; continued from step {SAVED}, "
        f"{DIED - SAVED} repeated, {found.seconds:,.1f} s to the end of the next step\n"
        "the other numbers are those of the last attempt\n"
    ) in capsys.readouterr().out
    assert summary in describe(run)
    data = page_data(run)
    assert summary in data["facts"]
    heads, row = data["restarts"]
    assert dict(zip(heads, row, strict=True)) == {
        "restart": "1",
        "after": f"{found.noticed_s:,.1f} s",
        "step": str(DIED),
        "ranks": "2",
        "from step": str(SAVED),
        "repeated": str(DIED - SAVED),
        "to the next step": f"{found.seconds:,.1f} s",
        "what failed": KILLED,
    }
    for drawn in data["ranks"]:
        assert drawn["seconds"][0][0] < found.noticed_s, "the first attempt is in the timeline, too"
        assert drawn["seconds"][-1][1] == pytest.approx(run.seconds, abs=2)


def test_other_programs_get_it_as_json(run: Run, capsys) -> None:
    assert main(["report", "--json", str(run.directory)]) == 0
    found = json.loads(capsys.readouterr().out)
    (restart,) = found["restarts"]
    assert (restart["what"], restart["repeated"], found["steps_repeated"]) == (KILLED, DIED - SAVED, DIED - SAVED)
    assert (found["goodput"], found["verdict"]) == (run.restarts.goodput, run.verdict)
    assert [(each["rank"], each["end"], each["steps_done"]) for each in found["ranks"]] == [
        (rank, "finished", STEPS) for rank in (0, 1)
    ]
    for each, record in zip(found["ranks"], run.ranks, strict=True):
        assert record.summary is not None
        assert (each["seconds"], each["steps"]) == (record.summary.seconds, record.summary.steps)
    documented = Path("docs/profiling.md").read_text().partition("## As JSON")[2].partition("\n## ")[0]
    for name in {*found, *found["ranks"][0], *restart}:
        assert f"`{name}`" in documented, name
    assert main(["top", "--once", "--json", str(run.directory)]) == 0
    assert json.loads(capsys.readouterr().out) == [found]
    for refused in (["report", "--json", "-o", "page", "run"], ["report", "--json", "one", "two"], ["top", "--json"]):
        with pytest.raises(SystemExit):
            main(refused)


def test_a_run_without_a_restart_shows_nothing_of_it(tmp_path: Path, capsys) -> None:
    (tmp_path / "died").mkdir()
    found = run_of(tmp_path)
    assert (found.restarts.all, found.restarts.summary) == ([], "")
    data = page_data(found)
    assert data["restarts"] == []
    assert main(["report", str(found.directory)]) == main(["top", "--once", str(found.directory)]) == 0
    shown = capsys.readouterr().out
    for text in (shown, *data["facts"]):
        assert not any(words in text for words in ("restart(", "steps repeated", "made progress"))


def test_a_failure_before_the_first_step_repeats_none_and_steps_count_once(tmp_path: Path) -> None:
    found = run_of(tmp_path, fails_before=True)
    first, second = found.restarts.all
    assert facts_of(first) == (KILLED, (2, 2), DIED, None, 0)
    assert facts_of(second) == ("rank 0: ValueError: not yet", (2, 2), DIED, SAVED, DIED - SAVED)
    assert first.seconds is not None
    assert second.seconds is not None
    assert first.seconds > second.seconds, "its next step is the same one"
    assert f"restart 1: {KILLED} after" in str(first)
    assert str(first).endswith(f"at step {DIED}; no step followed")
    assert found.restarts.repeated == DIED - SAVED


def test_where_restarts_are_used_up_the_last_failure_is_said(tmp_path: Path, capsys) -> None:
    with pytest.raises(WorkerDiedError, match="SIGKILL"):
        run_of(tmp_path, max_restarts=2, is_always=True)
    found = read_run(tmp_path / "logs")
    assert [facts_of(each) for each in found.restarts.all] == [(KILLED, (2, 2), DIED, SAVED, DIED - SAVED)] * 2
    assert found.restarts.repeated == 2 * (DIED - SAVED)
    assert " s at most), " in found.restarts.summary
    assert main(["report", str(tmp_path / "logs")]) == 0
    assert f"\nended at step {DIED}: {KILLED}\n" in capsys.readouterr().out


def test_what_its_caller_stops_is_no_failure(tmp_path: Path) -> None:
    line = Line.at(tmp_path / "line")

    def wait(_: int) -> None:
        from faults import stand_still

        line.say("here")
        stand_still()

    with line.hearing() as ear:
        context = spawn(wait, nprocs=2, backend="cpu", join=False, max_restarts=1, output=Output(tmp_path / "logs"))
        ear.hear_all(2)
        context.stop()
        with pytest.raises(Exception, match="were stopped"):
            context.join()
    assert [rank.faults for rank in read_run(tmp_path / "logs").ranks] == [[], []]


CHANGING = """
import sys
from pathlib import Path
directory, line, size, tests = sys.argv[1:]
sys.path.insert(0, tests)
from faults import Line, stand_still
from report.test_cost_of_failures import DIED, train

def after(accelerator, step):
    if step == DIED and accelerator.world.world_size == int(size):
        Line(Path(line)).say("there")
        stand_still()

train(Path(directory), lambda accelerator: None, after)
"""


@pytest.mark.slow
@pytest.mark.waits_long
@pytest.mark.parametrize(
    ("sizes", "what"), [((2, 1), r"node 1 .*|the agents .*"), ((1, 2), "another machine has joined")], ids=str
)
def test_a_run_continued_on_other_machines_says_with_how_many_ranks(
    tmp_path: Path, sizes: tuple[int, int], what: str
) -> None:
    (tmp_path / "changing.py").write_text(CHANGING)
    line, tests = Line.at(tmp_path / "line"), Path(__file__).parent.parent
    command = ["run", "-n", "1", "--backend", "cpu", "--nnodes", "1:2", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    command += ["--max-restarts", "1", "--lost-after", "4", "--log-dir", str(tmp_path / "logs")]
    script = [str(tmp_path / "changing.py"), str(tmp_path / "project"), str(line.path), str(sizes[0]), str(tests)]
    conf = f"last_call_timeout={10 if sizes[0] == 2 else 1}"

    def start(name: str, is_host: str) -> Script:
        return agent(tmp_path / name, *command, "--rdzv-conf", f"is_host={is_host},{conf}", *script)

    with contextlib.ExitStack() as stack, line.hearing() as ear:
        one = stack.enter_context(start("one", "true"))
        if sizes[0] == 2:
            two = stack.enter_context(start("two", "false"))
            ear.hear_all(2)
            kill_all(two)
        else:
            ear.hear()
            two = stack.enter_context(start("two", "false"))
            assert two.end()[0] == 0
        code, _, errors = one.end()
        assert code == 0, errors
    found = read_run(tmp_path / "logs")
    (restart,) = found.restarts.all
    assert facts_of(restart)[1:] == (sizes, DIED, SAVED, DIED - SAVED)
    assert re.fullmatch(what, restart.what)
    ranks = f"{sizes[1]} rank(s) instead of {sizes[0]}"
    assert f"at step {DIED}, {ranks}; continued from step {SAVED}" in str(restart)
    assert page_data(found)["restarts"][1][3] == f"{sizes[0]} to {sizes[1]}"
    assert found.restarts.summary in errors


def test_a_manual_loops_steps_count_from_what_its_checkpointer_loaded(tmp_path: Path) -> None:
    found = []
    for continues in (False, True):
        with use_world(solo_world()) as world:
            steps = StepsDone()
            Recorder(world, tmp_path, steps=steps)
            model = torch.nn.Linear(4, 1)
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            with Checkpointer(tmp_path / "saved", model=model) as checkpointer:
                if continues:
                    checkpointer.load()
                for x in DeviceLoader(DataLoader(torch.randn(12, 4), batch_size=4)):
                    model(x).sum().backward()
                    optimizer_step(optimizer)
                    checkpointer.step()
                checkpointer.save()
            found.append((steps.loaded, steps.done, steps.first_ns is not None))
    assert found == [(None, 3, True), (3, 6, True)]


def test_goodput_is_the_time_of_the_steps_that_were_kept(run: Run, tmp_path: Path) -> None:
    """Steps of a second: 10 to a fault at 22 s, of which 6 are kept; again 10, from 6, of which 4 are kept since a
    third attempt continues from 10; and 10 to the end, at 70 s."""
    sample = run.ranks[0].samples[-1]
    begun = [(0, 0, 10.0), (30, 6, 5.0), (50, 10, 10.0)]  # when, the steps that were loaded, the begin of the first one
    path = tmp_path / "rank-0.jsonl"
    with path.open("a") as file:
        for restart, (at, loaded, first_s) in enumerate(begun):
            facts = {**run.ranks[0].facts, "began": 1000.0 + at, "restart": restart, "world_size": 1}
            lines: list[dict[str, Any]] = [facts]
            for done in range(11):
                numbers = {"t": first_s + done, "done": loaded + done, "loaded": loaded or None}
                numbers |= {"first_step": first_s + 1 if done else None, "step_seconds": [1.0] * bool(done)}
                lines.append({**sample, **numbers})
            file.writelines(json.dumps(line) + "\n" for line in lines)
            if restart < 2:
                file.flush()
                fault = {
                    "restart": restart,
                    "world_size": 1,
                    "what": "it",
                    "host": facts["host"],
                    "is_secondary": False,
                }
                fault |= {"at": 1000.0 + at + first_s + 12, "done": loaded + 10, "loaded": loaded or None}
                write_fault(tmp_path, 0, **fault, first_step=None)
    found = read_run(tmp_path).restarts
    assert [(each.step, each.continued, each.repeated, each.seconds) for each in found.all] == [
        (10, 6, 4, 14.0),
        (16, 10, 6, 14.0),
    ]
    assert found.goodput == pytest.approx((6 + 4 + 10) / 70)
    assert "14.0 s from a fault to the end of the next step (median; 14.0 s at most), 28.6% of" in found.summary
