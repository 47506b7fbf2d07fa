"""Preempt and kill training runs at random moments, as `python tests/soak.py --kind be_hit` does for as long as asked.

Each run (`preempted.py`) is hit twice, by SIGTERM at any moment or by SIGKILL while it saves, and started again each
time, on other ranks. The oracle reads the ranks' own ledgers: of each life, up to where the next one has resumed.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent
sys.path += [each for each in (str(TESTS), str(TESTS / "checkpoint")) if each not in sys.path]

import torch  # noqa: E402
from faults import Script  # noqa: E402
from preempted import EPOCHS, GLOBAL_BATCH, SAMPLES, SEED, Case, any_case, built, sample  # noqa: E402
from resuming import order  # noqa: E402
from torch.nn import functional as F  # noqa: E402

LIMIT_S = 60.0
Batches = dict[int, tuple[int, list[int]]]
"""By number: the epoch and the samples of a global batch."""


def hits_of(kind: str, seed: int) -> Counter[str]:
    """Run a training to its end; how many hits have landed, by place and victim.

    Raises:
        AssertionError: something was lost or repeated, has failed, or is left.
    """
    case, landed = any_case(kind, seed), Counter[str]()
    source = (TESTS / "preempted.py").read_text()
    path = f"{TESTS}:{TESTS / 'checkpoint'}"
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        for number, life in enumerate(case.lives):
            with Script(source, root, RUN=f"{kind} {seed} {number}", PYTHONPATH=path) as script:
                code, _, _ = script.end(LIMIT_S)
                assert not (left := script.survivors()), f"life {number} has left {left}"
                if is_hit := (root / f"hit-{number}").exists():
                    landed[f"{life.place} {life.victim}"] += 1
                assert code == 0 or is_hit, f"life {number} ended with exit code {code}"
                if kind == "preempt":
                    # A request after the last should_stop(), in the run's last save, stops nothing: it has ended.
                    is_early = code == 143 and not (root / "weights.pt").exists()
                    have_stopped = ['"stopped"' in each.read_text() for each in root.glob(f"{number}.?.?")]
                    assert have_stopped == [is_early] * life.ranks, f"life {number}, {code}: {have_stopped}"
            if code == 0:
                break
        check(case, history(root), torch.load(root / "weights.pt"))
    return landed


def history(root: Path) -> Batches:
    """What was trained on: of each life, up to where the next one has resumed."""
    batches: Batches = {}
    saved, stopped = 0, None
    for life in sorted({each.stem for each in root.glob("?.?.?")}):
        ledgers = [list(map(json.loads, each.read_text().splitlines())) for each in sorted(root.glob(f"{life}.?"))]
        lines = [line for ledger in ledgers for line in ledger]
        if not (begins := {number for what, number, *_ in lines if what == "began"}):
            continue
        (began,) = begins
        assert began >= saved, f"life {life} began at batch {began}, though a save of {saved} batches had ended"
        assert stopped in (None, began), f"life {life} began at batch {began}, though the stop was after {stopped}"
        batches = {number: each for number, each in batches.items() if number < began}
        saved, stopped = began, None
        for what, number, *samples in lines:
            if isinstance(what, int):
                batches.setdefault(what, (number, []))[1].extend(*samples)
            saved = max(saved, number) if what in ("saved", "stopped") else saved
            stopped = number if what == "stopped" else stopped
    return batches


def check(case: Case, batches: Batches, weights: dict[str, Any]) -> None:
    """Each sample of each epoch once, in the order of one device, which has these weights then."""
    model, optimizer, scheduler = built()
    for epoch in range(EPOCHS):
        own = [samples for _, (of, samples) in sorted(batches.items()) if of == epoch]
        times = Counter(chain(*own))
        wrong = {index: times[index] for index in range(SAMPLES) if times[index] != 1}
        assert not wrong, f"samples of epoch {epoch}, and how often each was trained on: {wrong}"
        if case.data == "map":
            whole = order(SAMPLES, SEED, epoch)
            expected = [set(whole[first : first + GLOBAL_BATCH]) for first in range(0, SAMPLES, GLOBAL_BATCH)]
            assert list(map(set, own)) == expected, f"the batches of epoch {epoch} are {own}"
        for first in range(0, len(own), case.accumulates):
            x, y, _ = zip(*map(sample, chain(*own[first : first + case.accumulates])), strict=True)
            optimizer.zero_grad()
            F.mse_loss(model(torch.stack(x)), torch.stack(y)).backward()
            optimizer.step()
        scheduler.step()
    torch.testing.assert_close(weights, dict(model.state_dict()), rtol=0, atol=1e-9)
