"""`unisono replay`: a step of a recorded run once more, on any number of devices, with its bits; its files stay."""

from __future__ import annotations

import os
import re
import select
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import warm_scripts

import unisono
from unisono.report.digests import read_digests

SCRIPT = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from unisono import Accelerator

class Printing:
    def log(self, values, step):
        print("logged", values, step)

    def close(self):
        pass

accelerator = Accelerator(
    seed=0, virtual_ranks=4, digest_every=2, max_grad_norm=1.0, total_limit=2, log_with=Printing(), project_dir="out"
)
x = torch.load("data.pt")
layers = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1)
model = nn.Sequential(*layers)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=2, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
accelerator.init_trackers("trackers")
loaded = None
if "--afresh" not in sys.argv:
    loaded = accelerator.load_state(must_exist=False)
steps = loaded.step if loaded else 0
while loader.epoch < 2:
    for inputs, targets in loader:
        optimizer.zero_grad()
        accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
        optimizer.step()
        if accelerator.sync_gradients:
            steps += 1
            accelerator.get_tracker("Printing").log({"step": steps}, steps)
            if steps in (3, 7, 10, 13):
                accelerator.save_state()
accelerator.save_model(model, "model")
accelerator.end_training()
"""
"""16 steps; the checkpoints after steps 10 and 13 are left."""

RUN = ("--backend", "cpu", "--log-dir", "logs")
EQUAL = "equal at each of the 2 steps with digests"


def record(directory: Path, *options: str, script: str = SCRIPT, arguments: tuple[str, ...] = ()) -> Path:
    """Record such a run, in that directory; returns it."""
    directory.mkdir(exist_ok=True)
    (directory / "train.py").write_text(script)
    if not (directory / "data.pt").exists():
        make = "import torch; torch.manual_seed(1); torch.save(torch.randn(64, 4), 'data.pt')"
        subprocess.run([sys.executable, "-c", make], cwd=directory, check=True, timeout=100)
    code, _, errors = warm_scripts.launch(directory, "run", *RUN, *options, "train.py", *arguments)
    assert code == 0, errors
    return directory


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run on three devices."""
    return record(tmp_path_factory.mktemp("run"), "-n", "3")


@pytest.fixture
def run(original: Path, tmp_path: Path) -> Path:
    """A copy of it, which a test may change."""
    copy = Path(shutil.copytree(original, tmp_path / "copy", symlinks=True))
    digests = copy / "logs" / "latest" / "digests.jsonl"
    digests.write_text(digests.read_text().replace(str(original), str(copy)))
    return copy


def replay(run: Path, *options: str, logs: str = "logs") -> tuple[int, str, str]:
    """The exit code, output and errors of a replay of the run in that directory, begun elsewhere."""
    (elsewhere := run.parent / "elsewhere").mkdir(exist_ok=True)
    return warm_scripts.launch(elsewhere, "replay", str(run / logs), *options)


def files_in(directory: Path) -> dict[str, tuple[bytes, int]]:
    """Each file's content and time."""
    found = [each for each in directory.rglob("*") if each.is_file()]
    return {str(each): (each.read_bytes(), each.stat().st_mtime_ns) for each in found}


@pytest.mark.parametrize("ranks", ["1", "2"])
def test_a_step_is_replayed_bit_for_bit_without_changing_the_run(ranks: str, run: Path) -> None:
    before = files_in(run)
    code, output, errors = replay(run, "--step", "13", "-n", ranks)
    assert (code, output) == (
        0,
        f"replayed steps 11 to 13 on {ranks} device{'s' if ranks == '2' else ''}: equal at the one step with digests; "
        "the record has no digests of step 13, and the hash of those here is " + output[-17:],
    ), errors
    assert f"to step 13 from step 11, which follows {run}/out/checkpoints/checkpoint_2" in errors
    assert files_in(run) == before


def test_a_hash_compares_replays_of_a_step_without_digests(run: Path) -> None:
    found = {replay(run, "--step", "15", "-n", ranks)[1].rpartition(" ")[2] for ranks in ("1", "3")}
    assert len(found) == 1
    assert len(found.pop().strip()) == 16


def test_a_checkpoint_that_is_gone_or_replaced_is_not_used(run: Path) -> None:
    checkpoints = run / "out" / "checkpoints"
    shutil.rmtree(checkpoints / "checkpoint_2")
    (checkpoints / "checkpoint_3").rename(checkpoints / "checkpoint_2")
    code, output, errors = replay(run, "--step", "14")
    assert (code, output) == (0, "replayed steps 1 to 14 on 1 device: equal at each of the 7 steps with digests\n")
    assert "to step 14 from the start: no checkpoint before that step is there" in errors


def test_the_first_difference_is_named_when_it_comes_and_at_the_end(run: Path) -> None:
    (run / "train.py").write_text(SCRIPT.replace("optimizer.step()", "optimizer.step(); optimizer.defaults", 1))
    assert "train.py has changed since the run" in replay(run, "--step", "12")[2]
    shutil.rmtree(run / "out" / "checkpoints" / "checkpoint_3")
    (run / "train.py").write_text(
        SCRIPT.replace("steps = loaded", "optimizer.param_groups[0]['lr'] = 0.2\nsteps = loaded")
    )
    code, output, errors = replay(run, "--step", "14", "-n", "2")
    said = "no earlier step has digests in both; at step 12 the gradient of 0.weight differs first, and 5 more of 6; "
    assert code == 1
    assert output.startswith(f"replayed steps 11 to 14 on 2 devices: {said}")
    assert f"unisono replay: {said}" in errors


def test_other_settings_are_said_once_and_the_replay_goes_on(run: Path) -> None:
    digests = run / "logs" / "latest" / "digests.jsonl"
    digests.write_text(digests.read_text().replace('"torch": "', '"torch": "1'))
    code, output, errors = replay(run, "--step", "12", "-n", "2")
    assert code == 0, output
    assert errors.count("configurations differ: torch 12") == 1


def test_a_copy_is_replayed_where_the_directory_of_the_run_is_not(original: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(original, tmp_path / "copy", symlinks=True))
    digests = copy / "logs" / "latest" / "digests.jsonl"
    digests.write_text(digests.read_text().replace(str(original), "/no/such/directory"))
    code, output, errors = warm_scripts.launch(copy, "replay", "logs", "--step", "16")
    assert (code, output) == (0, f"replayed steps 14 to 16 on 1 device: {EQUAL}\n"), errors


def test_a_replay_starts_at_step_1_unless_the_script_loads_a_checkpoint(run: Path) -> None:
    code, output, errors = replay(run, "--step", "12", "-n", "2", "--args", "--afresh")
    assert (code, output) == (0, "replayed steps 1 to 12 on 2 devices: equal at each of the 6 steps with digests\n")
    assert errors.count("calls no load_state before its first step") == 1
    assert "--args --resume" in errors
    (run / "train.py").write_text(SCRIPT.replace('"--afresh" not in', '"--resume" in'))
    code, output, _ = replay(run, "--step", "12", "--args", "--resume")
    assert (code, output) == (0, "replayed steps 11 to 12 on 1 device: equal at the one step with digests\n")


def test_a_run_that_was_resumed_is_replayed_from_what_it_has_loaded(run: Path) -> None:
    for each in ("out/checkpoints/checkpoint_2", "logs"):
        shutil.rmtree(run / each)
    record(run, "-n", "2")
    code, output, errors = replay(run, "--step", "16", "-n", "3")
    assert (code, output) == (0, f"replayed steps 14 to 16 on 3 devices: {EQUAL}\n"), errors
    place = f"the run begins with step 14, after {run}/out/checkpoints/checkpoint_3"
    code, _, errors = replay(run, "--step", "13")
    assert (code, errors) == (2, f"unisono replay: {place}; replay the run that has saved it\n")
    shutil.rmtree(run / "out")
    code, _, errors = replay(run, "--step", "16")
    assert code == 2
    assert f"{place}; no checkpoint before step 16 is there any more; put one of them back" in errors


def test_a_step_past_the_end_of_the_run_is_refused_before_starting(run: Path) -> None:
    code, output, errors = replay(run, "--step", "17")
    advice = "pass one up to that, or let the script train longer by --args"
    assert (code, output) == (2, "")
    assert errors == f"unisono replay: --step 17: the run has finished with step 16; {advice}\n"


def test_a_script_that_ends_before_the_step_is_no_replay(run: Path) -> None:
    record = run / "logs" / "latest" / "rank-0.jsonl"
    record.write_text("".join(line for line in record.open() if '"end"' not in line))  # as of one that was killed
    before = files_in(run)
    code, output, errors = replay(run, "--step", "20", "-n", "2")
    assert (code, output.splitlines()[-1]) == (2, "the script ended after step 16, before step 20")
    assert "the record has digests up to step 16" in errors
    assert files_in(run) == before, "what save_model writes is elsewhere"


def test_a_run_that_failed_before_its_first_digest_is_replayed(run: Path) -> None:
    digests = run / "logs" / "latest" / "digests.jsonl"
    kept = [line for line in digests.read_text().splitlines() if '"optimizer"' not in line]
    digests.write_text("\n".join(kept))
    code, output, errors = replay(run, "--step", "12")
    assert code == 0
    assert output.startswith(
        "replayed steps 11 to 12 on 1 device: no step to compare with; the record has no digests of"
    )
    assert "unisono replay: the record has no digests\n" in errors


def test_an_error_of_the_script_is_shown_and_is_no_difference(run: Path) -> None:
    (run / "train.py").write_text(SCRIPT.replace("steps += 1", "1 / (steps - 13)"))
    code, _, errors = replay(run, "--step", "15")
    assert code == 2
    assert "ZeroDivisionError" in errors


def test_a_replay_overwrites_no_file_and_can_write_to_another_directory(run: Path) -> None:
    writes = 'open("steps.txt", "a").write(f"{steps}\\n"); torch.save(steps, "steps.pt"); steps += 1'
    record(run, "-n", "2", script=SCRIPT.replace("steps += 1", writes), arguments=("--afresh",))
    before = files_in(run)
    code, _, errors = replay(run, "--step", "16")
    assert code == 2
    assert "PermissionError: a replay overwrites no file of the run, and the script would change steps.txt" in errors
    other = run.parent / "other"
    other.mkdir()
    (other / "data.pt").symlink_to(run / "data.pt")
    code, _, errors = replay(run, "--step", "3", "-n", "2", "--cwd", str(other))
    assert code == 0, errors
    assert sorted((other / "steps.txt").read_text()) == sorted("0\n1\n" * 2)
    assert files_in(run) == before


TWO = """
import torch, torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from unisono import Accelerator, spawn

def main(index):
    accelerator = Accelerator(seed=1, virtual_ranks=3, digest_every=2)
    models = nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.2), nn.Linear(4, 1))
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.01) for each in models]
    rows = DataLoader(TensorDataset(torch.randn(72, 2)), 3, shuffle=True, num_workers=1)
    (first, second), (one, other), rows = accelerator.prepare(models, optimizers, rows)
    accelerator.load_state(must_exist=False)
    for number, (inputs,) in enumerate(rows):
        accelerator.backward(second(first(inputs)).square().mean())
        for each in (one, other):
            each.step()
            each.zero_grad()
        if accelerator.sync_gradients:
            accelerator.save_state(is_async=True)
    accelerator.end_training()

if __name__ == "__main__":
    spawn(main, nprocs=None)
"""


@pytest.mark.slow
def test_a_module_with_two_optimizers_and_background_saves_is_replayed(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "two.py").write_text(TWO)
    code, _, errors = warm_scripts.launch(tmp_path, "run", *RUN, "-n", "3", "-m", "package.two")
    assert code == 0, errors
    for optimizer, ranks in (("0", "1"), ("1", "2")):
        code, output, errors = replay(tmp_path, "--step", "6", "-n", ranks, "--optimizer", optimizer)
        assert output.startswith("replayed step 6 on "), errors
        assert (code, output.rpartition(": ")[2]) == (0, "equal at the one step with digests\n")


def talk(run: Path, commands: list[str]) -> tuple[int, str]:
    """The exit code of a replay to step 14 on a terminal, and what it shows, with these answers to its debugger."""
    import fcntl
    import pty
    import struct
    import termios

    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 200, 0, 0))  # the lines of the test fit
    words = [sys.executable, "-m", "unisono", "replay", str(run / "logs"), "--step", "14", "--pdb"]
    environ = {**os.environ, "PYTHONPATH": str(Path(unisono.__file__).parent.parent), "TERM": "dumb"}
    process = subprocess.Popen(words, stdin=slave, stdout=slave, stderr=slave, start_new_session=True, env=environ)
    os.close(slave)
    found, seen, left = b"", 0, list(commands)
    try:
        while True:
            assert select.select([master], [], [], 100.0)[0], found
            try:
                found += os.read(master, 65536)
            except OSError:  # the last one has closed it
                break
            if found[seen:].endswith(b"(Pdb) ") and left:
                seen = len(found)
                os.write(master, f"{left.pop(0)}\n".encode())
        return process.wait(100), found.decode().replace("\r\n", "\n")
    finally:
        process.kill()
        process.wait()
        os.close(master)


@pytest.mark.slow
def test_a_debugger_is_in_front_of_the_step_and_the_replay_ends_after_it(run: Path) -> None:
    shutil.rmtree(run / "out" / "checkpoints" / "checkpoint_3")
    norm = "p round(sum(float(each.grad.square().sum()) for each in model.parameters()) ** 0.5, 4) <= 1"
    code, shown = talk(
        run, [norm, "before = layers[0].weight.clone()", "n", "p (layers[0].weight != before).any()", "c"]
    )
    assert code == 0, shown
    assert "on 1 device: equal at the one step with digests; step 14 is next, its gradients are reduced\n> " in shown
    assert re.search(r"train\.py\(\d+\)<module>\(\)\n-> optimizer\.step\(\)\n\(Pdb\) ", shown)
    assert f"{norm}\nTrue\n" in shown, "they are clipped"
    assert "-> if accelerator.sync_gradients:\n(Pdb) p (layers[0].weight != before).any()\ntensor(True)\n" in shown
    assert shown.endswith(f"(Pdb) c\nreplayed steps 11 to 14 on 1 device: {EQUAL}\n")


NOT_TAKEN = "replayed steps 11 to 13 on 1 device: equal at the one step with digests\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("commands", "end"),
    [(["q"], NOT_TAKEN), (["s", "q"], NOT_TAKEN)],
    ids=["quit", "step and quit"],
)
def test_a_debugger_that_quits_ends_the_replay(commands: list[str], end: str, run: Path) -> None:
    shutil.rmtree(run / "out" / "checkpoints" / "checkpoint_3")  # else step 14 alone
    code, shown = talk(run, commands)
    assert code == 0
    assert shown.endswith(f"(Pdb) {commands[-1]}\n{end}")


def without_command(run: Path) -> None:
    digests = run / "logs" / "latest" / "digests.jsonl"
    digests.write_text(digests.read_text().replace('"command"', '"other"'))


BAD: dict[str, tuple[list[str], str]] = {
    "step": (["--step", "0"], "--step 0: steps are numbered from 1"),
    "none": (["--step", "3", "-n", "0"], "-n 0: the run has virtual_ranks=4; pass a number from 1 to 4"),
    "more": (["--step", "3", "-n", "5"], "-n 5: the run has virtual_ranks=4; pass a number from 1 to 4"),
    "pdb": (["--step", "3", "-n", "2", "--pdb"], "--pdb needs the terminal, which one device has; leave out -n 2"),
    "optimizer": (["--step", "3", "--optimizer", "1"], "and the record has the steps of 0; pass one of these"),
    "backend": (["--step", "3", "--backend", "tpu9"], "backend 'tpu9' does not exist; choose one of"),
    "no backend": (["--step", "3", "--backend", "mps"], "backend 'mps' has no device on this machine"),
    "cwd": (["--step", "3", "--cwd", "/no/such"], "--cwd /no/such is no directory; pass the one to start the script"),
    "command": (
        ["--step", "3"],
        "does not say how the run was started: only unisono run records that; start the script by",
    ),
    "script": (["--step", "3"], "the script train.py is neither in "),
}


@pytest.mark.parametrize("what", BAD)
def test_what_cannot_be_replayed_is_said_with_the_way_out(what: str, run: Path) -> None:
    options, said = BAD[what]
    if what == "command":
        without_command(run)
    if what == "script":
        (run / "train.py").unlink()
    code, output, errors = replay(run, *options)
    assert (code, output) == (2, "")
    assert said in errors
    assert len(errors.splitlines()) == 1


def test_a_copy_is_replayed_even_if_the_original_script_is_gone(run: Path) -> None:
    away = Path(shutil.copytree(run, run.parent / "away", symlinks=True))
    (run / "train.py").unlink()
    code, output, errors = replay(away, "--step", "3", "--cwd", str(away))
    assert (code, output.startswith("replayed steps 1 to 3 on 1 device: equal")) == (0, True), errors


def test_a_directory_without_digests_is_refused_as_by_compare(run: Path) -> None:
    (run / "logs" / "latest" / "digests.jsonl").unlink()
    code, _, errors = replay(run, "--step", "3")
    assert code == 2
    assert "has no digests: Accelerator(virtual_ranks=...) writes them" in errors
    assert "nowhere is no directory: " in replay(run, "--step", "3", logs="nowhere")[2]


def test_the_record_has_the_command_and_each_checkpoint(original: Path) -> None:
    found = read_digests(original / "logs")
    assert found.command | {"target": "train.py", "argv": [], "directory": str(original)} == found.command
    places = [(f"{original}/out/checkpoints/checkpoint_{number}", [step]) for number, step in enumerate((3, 7, 10, 13))]
    assert [(each.path, each.steps) for each in found.checkpoints] == places
    assert found.origin is None
