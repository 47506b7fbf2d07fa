"""Where the time went: counted exactly, tiling the loop, shown in words and as a picture."""

from __future__ import annotations

import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from matplotlib import image
from modes import PROCESSES_2, SOLO, THREADS_3, Mode
from torch.utils.data import DataLoader

from unisono import DeviceLoader, Report, barrier, current_world, gather_report, optimizer_step, print_report
from unisono.report.picture import save_picture
from unisono.report.summary import LABELS, LOOP_PHASES, RankSummary, summarise
from unisono.timeline import COMPUTE, FETCH, MOVE, PHASES, REDUCE, STEP
from unisono.world import solo_world, use_world


def train_and_report() -> tuple[Report | None, float]:
    """Two epochs over 33 samples, and the wall time around them in seconds."""
    model = torch.nn.Linear(1, 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DeviceLoader(DataLoader(torch.arange(33.0).unsqueeze(1), batch_size=4))
    barrier()
    start = time.perf_counter()
    for _ in range(2):
        for batch in loader:
            model(batch).mean().backward()
            optimizer_step(optimizer)
    return gather_report(), time.perf_counter() - start


@pytest.mark.parametrize("mode", [SOLO, THREADS_3, PROCESSES_2], ids=str)
def test_rank_zero_gets_every_ranks_numbers_and_each_sample_counts_once(mode: Mode) -> None:
    with use_world(solo_world()):
        results = mode.run(train_and_report)
    report, wall = results[0]
    assert [each for each, _ in results[1:]] == [None] * (mode.ranks - 1)
    assert report is not None
    assert [each.rank for each in report.ranks] == list(range(mode.ranks))
    assert report.samples == 2 * 33
    rounds = -(-33 // (4 * mode.ranks))
    for each in report.ranks:
        assert each.steps == each.batches == 2 * rounds
        assert each.device == f"cpu:{each.rank}"
        assert each.memory > 2**20
        assert 0 < each.loop_seconds <= wall * 1.5 + 1
        assert sum(each.share(phase) for phase in LOOP_PHASES) == pytest.approx(1)
        assert {name for name, _ in each.spans} == {"loop", "transfer"}
    assert report.samples_per_second == pytest.approx(66 / max(each.loop_seconds for each in report.ranks))


def test_the_phases_tile_the_time_of_a_loop_without_gaps_or_overlaps() -> None:
    with use_world(solo_world()):
        train_and_report()
        (spans,) = [spans for name, spans in summarise().spans if name == "loop"]
    first = next(place for place, span in enumerate(spans) if span.phase == FETCH)
    step = [FETCH, COMPUTE, REDUCE, COMPUTE, STEP, COMPUTE, FETCH]
    assert [span.phase for span in spans[first : first + 7]] == step
    gaps = [later.start - earlier.stop for earlier, later in pairwise(spans[first:])]
    assert all(gap >= 0 for gap in gaps)
    assert sum(gap > 0 for gap in gaps) <= 3, "only between the loops, and before what follows them"


def test_a_long_run_keeps_the_latest_spans_only() -> None:
    with use_world(solo_world()) as world:
        track = world.timeline.loop()
        for _ in range(40_000):
            track.switch(FETCH)
            track.switch(COMPUTE)
        assert len(track.spans) <= 16384
        assert track.totals.keys() <= {FETCH, COMPUTE}


def a_report() -> Report:
    seconds = {FETCH: 1.0, COMPUTE: 2.0, REDUCE: 0.5, STEP: 0.5, MOVE: 0.25}
    return Report([RankSummary(rank, f"cpu:{rank}", 1, seconds, 400, 10, 10, 2**20, []) for rank in range(2)])


def test_the_table_names_every_phase_and_the_rate(capsys: pytest.CaptureFixture[str]) -> None:
    print_report(a_report())
    output = capsys.readouterr().out
    words = output.split()
    for phase in PHASES:
        assert set(LABELS[phase].split()) <= set(words)
    assert "50.0%" in words
    assert "200 samples/s over 2 rank(s)" in output
    assert max(map(len, output.splitlines())) <= 80


@pytest.fixture(scope="module")
def _fonts(tmp_path_factory: pytest.TempPathFactory) -> None:
    """matplotlib keeps the files of its fonts open."""
    save_picture(a_report(), [2.0, 1.0, 0.5], tmp_path_factory.mktemp("fonts") / "picture.png")


@pytest.mark.usefixtures("_fonts")
def test_the_picture_can_be_opened_and_is_not_empty(tmp_path: Path) -> None:
    path = save_picture(a_report(), [2.0, 1.0, 0.5], tmp_path / "new" / "picture.png")
    assert path.is_absolute()
    pixels = image.imread(path)
    assert pixels.shape[0] > 300
    assert pixels.std() > 0.05


@pytest.mark.usefixtures("_fonts")
@pytest.mark.parametrize("name", ["picture", "picture.v2", "picture.jpg"])
def test_the_picture_is_a_png_under_the_very_name_that_is_returned(tmp_path: Path, name: str) -> None:
    path = save_picture(a_report(), [2.0, 1.0], str(tmp_path / name))
    assert path == tmp_path / name
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("_fonts")
@pytest.mark.parametrize("losses", [[], [0.0], [float("nan"), 1.0]], ids=str)
def test_losses_that_no_curve_shows_still_give_a_picture(tmp_path: Path, losses: list[float]) -> None:
    assert save_picture(a_report(), losses, tmp_path / "picture.png").stat().st_size > 1000


def test_a_report_of_a_run_without_loops_divides_nothing_by_zero() -> None:
    with use_world(solo_world()):
        report = gather_report()
    assert report is not None
    assert report.samples_per_second == 0
    assert report.ranks[0].share(COMPUTE) == 0


@pytest.mark.parametrize(
    ("missing", "call"), [("rich", "print_report(report)"), ("matplotlib", "save_picture(report, [1.0], 'x.png')")]
)
def test_a_missing_extra_is_told_with_the_pip_line(missing: str, call: str, tmp_path: Path) -> None:
    script = f"""
import sys
sys.modules[{missing!r}] = None
from unisono import Report, print_report, save_picture
report = Report([])
try:
    {call}
except ImportError as error:
    assert "pip install 'unisono[report]'" in str(error), error
else:
    sys.exit("no error")
"""
    subprocess.run([sys.executable, "-c", script], check=True, cwd=tmp_path, timeout=60)


def test_the_world_of_the_calling_thread_is_summarised() -> None:
    with use_world(solo_world()):
        assert summarise().device == str(current_world().device)
