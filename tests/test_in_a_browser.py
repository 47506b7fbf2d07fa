"""What people look at, in a real browser: the search of the site, and the page of a large run."""

from __future__ import annotations

import functools
import http.server
import json
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from unisono.report.comparison import write_comparison
from unisono.report.page import write_page
from unisono.report.run import read_run

ROOT = Path(__file__).parent.parent
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
RANKS, STEPS = 8, 10_000

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt install chromium"),
]

SEARCHES = {
    "learning rate": "schedules",
    "save best model": "checkpoints",
    "fp16": "training",
    "nccl": "troubleshooting",
    "gradient clipping": "training",
    "resume": "quickstart",
    "oom": "troubleshooting",
    "early stopping": "evaluation",
    "slurm": "several_machines",
    "tensorboard": "quickstart",
    "hang": "hangs",
    "batchnorm": "virtual_ranks",
    "model.module": "coming_from",
    "state_dict": "reference/training",
    "batch size": "training",
    "multi gpu": "quickstart",
    "cuda out of memory": "troubleshooting",
    "deterministic": "faq",
    "validation": "evaluation",
    "jupyter": "notebooks",
}
"""Words, and the page that is among the first two."""


@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    with sync_api.sync_playwright() as started:
        yield started


@pytest.fixture
def browser(driver: Any) -> Iterator[Any]:
    started = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
    yield started
    started.close()


class Silent(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    pytest.importorskip("mkdocs", reason="make docs installs it")
    directory = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(directory)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=200, capture_output=True)
    handler = functools.partial(Silent, directory=str(directory))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


def test_the_search_finds_the_right_page_among_the_first_two(browser: Any, site: str) -> None:
    page, wrong = browser.new_page(), {}
    for words, expected in SEARCHES.items():
        page.goto(site)
        page.click("input.md-search__input")
        page.keyboard.insert_text(words)  # whole: typed, there is a search for each letter, and a result of each
        page.keyboard.press("Shift")  # the search listens to keys that are let go
        first = "document.querySelector('.md-search-result__meta')?.textContent.match(/[0-9]+ match|No match/)"
        page.wait_for_function(first, timeout=60_000)
        page.wait_for_function("document.querySelectorAll('.md-search-result__link').length > 0", timeout=60_000)
        links = page.eval_on_selector_all(".md-search-result__link", "all => all.map(one => one.getAttribute('href'))")
        pages = list(dict.fromkeys(each.split("?")[0].removeprefix(site).strip("/.") for each in links))
        if expected not in pages[:2]:
            wrong[words] = pages[:3]
    assert wrong == {}


def test_a_language_model_is_told_of_every_page_and_for_whom_it_is(site: str) -> None:
    with urlopen(f"{site}llms.txt", timeout=60) as answer:
        told = dict(re.findall(r"^- \[.+\]\((.+?)\)(.*)$", answer.read().decode(), re.MULTILINE))
    for page in set((ROOT / "docs").glob("*.md")) - {ROOT / "docs" / "index.md"}:
        assert told[f"{page.stem}/"].startswith(": For "), page
    for link in told:
        with urlopen(site + link, timeout=60) as answer:
            assert answer.read()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_the_first_page_shows_a_command_and_its_outputs_above_the_fold(
    browser: Any, site: str, width: int, scheme: str
) -> None:
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page.goto(site)
    command, outputs = page.locator(".tabbed-block:visible pre").all()
    assert command.inner_text().strip() == "unisono run -n 2 train.py"
    assert "CollectiveMismatchError: rank 0 called barrier()" in outputs.inner_text()
    assert outputs.bounding_box()["y"] + outputs.bounding_box()["height"] < 900
    page.click("text=Five lines more")
    code, outputs = page.locator(".tabbed-block:visible pre").all()
    assert "virtual_ranks=8" in code.inner_text()
    hashes = [line for line in outputs.inner_text().splitlines() if line.startswith("weights sha256 ")]
    assert len(hashes) == 3
    assert len({*hashes}) == 1
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_a_large_runs_page_opens_within_two_seconds_and_has_its_numbers(browser: Any, tmp_path: Path) -> None:
    for rank in range(RANKS):
        facts = {"began": 1e9, "rank": rank, "world_size": RANKS, "restart": 0, "command": ["train.py"], "cores": 8}
        lines: list[dict[str, Any]] = [facts]
        for second in range(STEPS // 200):
            done = 200 * (second + 1)
            seconds = {"fetch": 0.1 * second, "compute": 0.7 * second, "reduce": 0.1 * second, "step": 0.1 * second}
            lines.append(
                {"t": second + 1.0, "phase": "compute", "doing": "", "step_seconds": [0.005] * 200, "logged": []}
                | {
                    "machine_cpu": 0.5,
                    "cpu_s": second,
                    "rss": 10**9,
                    "rank": rank,
                    "device": f"cpu:{rank}",
                    "pid": 1,
                    "host": "here",
                }
                | {"seconds": seconds, "samples": 4 * done, "batches": done, "steps": done, "memory": 0, "spans": []}
            )
        lines.append({"end": "finished"})
        (tmp_path / f"rank-{rank}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        spans = [[("fetch", "compute", "reduce", "step")[n % 4], 0.00125 * n, 0.00125] for n in range(16_384)]
        (tmp_path / f"rank-{rank}.spans.jsonl").write_text(json.dumps({"restart": 0, "loop 0": spans}) + "\n")
    path = write_page(read_run(tmp_path), tmp_path / "page.html")
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})  # the clock measures the machine, too
    page.goto(path.as_uri())
    page.wait_for_function("document.body.dataset.ready")
    measured = {each["name"]: each["value"] for each in session.send("Performance.getMetrics")["metrics"]}
    assert 0 < measured["TaskDuration"] < 2
    assert errors == []
    assert page.locator("#ranks tr").count() == RANKS + 1
    assert page.locator("#charts canvas").count() >= 4
    drawn = page.evaluate("charts.map(([chart]) => [chart.root.querySelector('.u-title').textContent, chart.data[1]])")
    assert dict(drawn)["Time of a step"] == [5.0] * STEPS
    painted = page.evaluate("[...canvas.getContext('2d').getImageData(LEFT, 9, canvas.width - LEFT, 1).data]")
    pixels = list(zip(*[iter(painted)] * 4, strict=True))
    assert pixels.count((0x2E, 0x86, 0xAB, 255)) > 0.6 * len(pixels), "the loop body, in its own colour"
    page.click("[data-zoom='0.5']")
    assert page.inner_text("#range").startswith("12.50 to 37.50 s")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1200])
def test_the_page_of_two_runs_fits_a_phone_in_two_colours_without_requests(
    browser: Any, tmp_path: Path, width: int, scheme: str
) -> None:
    paths = []
    for name, top in (("one", 1e33), ("other", 2.0)):  # the first has diverged
        facts = {"began": 1e9, "rank": 0, "world_size": 1, "restart": 0, "command": ["a" * 200], "cores": 8}
        logged = [[0.0, step, {"train_loss": top ** (step / 10), "val_loss": 1.0}] for step in range(1, 11)]
        line = {"t": 1.0, "phase": "", "doing": "", "step_seconds": [0.1] * 10, "logged": logged, "machine_cpu": 0.5}
        line |= {"cpu_s": 1, "rss": 10**9, "rank": 0, "device": "cpu:0", "pid": 1, "host": "here", "samples": 40}
        line |= {
            "seconds": {"fetch": 0.25, "compute": 0.75, "reduce": 0, "step": 0},
            "batches": 10,
            "steps": 10,
            "memory": 0,
            "spans": [],
        }
        paths.append(tmp_path / name)
        paths[-1].mkdir()
        lines = [facts, line, {"settings": {"name": name}, "commit": ""}, {"end": "finished"}]
        (paths[-1] / "rank-0.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    both = read_run(paths[0]), read_run(paths[1])
    path = write_comparison(both, ["one", "other"], "their bits differ", tmp_path / "page.html")
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda request: errors.append(request.url) if request.url != path.as_uri() else None)
    page.goto(path.as_uri())
    page.wait_for_function("document.body.dataset.ready")
    assert errors == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    strokes = page.evaluate("charts[0][0].series.slice(1).map(each => [each.label, each._stroke, each.dash.length])")
    first, second = "#2e86ab", "#d1495b"
    assert strokes == [
        ["first train_loss", first, 0],
        ["first val_loss - -", first, 2],
        ["second train_loss", second, 0],
        ["second val_loss - -", second, 2],
    ]
    assert page.evaluate("charts[0][0].axes[1]._values.length") >= 3, "an axis of 33 decades has its numbers"
    assert page.inner_text("#differing tr.differs").split() == ["name", "one", "other"]
    widths = page.eval_on_selector_all(".bar i", "all => all.map(one => one.style.width)")
    assert widths == ["25%", "75%", "0%", "0%"] * 2
