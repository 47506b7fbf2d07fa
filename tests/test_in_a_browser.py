"""The page of a large run, in a real browser."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from unisono.report.page import write_page
from unisono.report.run import read_run

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
RANKS, STEPS = 8, 10_000

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt install chromium"),
]


@pytest.fixture
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    with sync_api.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


def test_the_page_of_a_large_run_opens_within_two_seconds_and_holds_its_numbers(browser: Any, tmp_path: Path) -> None:
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
    page.goto(path.as_uri())
    assert int(page.evaluate("document.body.dataset.ready")) < 2000, "milliseconds"
    assert errors == []
    assert page.locator("#ranks tr").count() == RANKS + 1
    assert page.locator("#charts canvas").count() >= 4
    drawn = page.evaluate("charts.map(([chart]) => [chart.root.querySelector('.u-title').textContent, chart.data[1]])")
    assert dict(drawn)["Time of a step"] == [5.0] * STEPS
    page.click("[data-zoom='0.5']")
    assert page.inner_text("#range").startswith("12.50 to 37.50 s")
