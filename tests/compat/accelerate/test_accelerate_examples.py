"""Scripts of the form of Accelerate's nlp_example and cv_example, in one process and in two."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import warm_scripts

SCRIPTS = Path(__file__).parent / "example_scripts"
TRANSFORMERS = pytest.mark.skipif(not find_spec("transformers"), reason="absent")


def ran(directory: Path, processes: int, script: str, *arguments: str, parts: str = "own") -> dict[str, list[str]]:
    """The words after the first of each line of the output, by the line's name."""
    start = ["run", "-n", str(processes), "--backend", "cpu", "--no-prefix"] if processes > 1 else ["run", "-n", "1"]
    code, output, errors = warm_scripts.launch(
        directory,
        *start,
        str(SCRIPTS / script),
        *arguments,
        environ={**os.environ, "EXAMPLE_PARTS": parts, "OMP_NUM_THREADS": "1"},
    )
    assert code == 0, errors
    return {name: words.split() for name, _, words in (line.partition(":") for line in output.splitlines())}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parts", "accumulate", "precision"),
    [
        ("own", 2, ("--mixed_precision", "bf16")),
        ("own", 1, ()),
        pytest.param("transformers", 2, ("--mixed_precision", "no"), marks=TRANSFORMERS),
    ],
    ids=str,
)
def test_pairs_of_sentences_train_as_in_one_process(
    parts: str, accumulate: int, precision: tuple[str, ...], tmp_path: Path
) -> None:
    def run(processes: int) -> dict[str, list[str]]:
        # The warm-up counts batches of one device, which are smaller where more of them make the same step.
        sizes = [16 * accumulate // processes, 16 // processes, 4 * processes]
        options = zip(("--batch_size", "--max_batch_size", "--num_warmup_steps"), map(str, sizes), strict=True)
        return ran(
            tmp_path, processes, "nlp_example.py", *(w for pair in options for w in pair), *precision, parts=parts
        )

    one, two = run(1), run(2)
    assert "75}" in one["epoch 0"], "each row is seen once"
    assert [one[f"rate {epoch}"] for epoch in range(3)] == [two[f"rate {epoch}"] for epoch in range(3)]
    assert float(one["rate 1"][0]) > float(one["rate 2"][0]) == 0, "the schedule ends with the training"
    for name in ("epoch 0", "epoch 1", "epoch 2", "norms"):
        tolerance = 0.1 if "bf16" in precision else 1e-3
        assert numbers(two[name]) == pytest.approx(numbers(one[name]), abs=tolerance), name


@pytest.mark.slow
def test_images_train_in_two_processes_about_as_in_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("PIL")
    monkeypatch.syspath_prepend(str(SCRIPTS))
    from parts_cv import write_images

    (images := tmp_path / "pets").mkdir()
    write_images(images, 161)
    one, two = (
        ran(
            tmp_path,
            processes,
            "cv_example.py",
            *("--data_dir", str(images), "--workers", "2", "--batch_size", str(16 // processes)),
        )
        for processes in (1, 2)
    )
    assert one["epoch 2"] == two["epoch 2"] == ["100.00", "of", "33"]
    # Each rank's batch norm has the means of its own, smaller batches; and 48 steps of OneCycleLR are no 2 x 24.
    assert numbers(two["norms"]) == pytest.approx(numbers(one["norms"]), rel=0.1, abs=0.05)


def numbers(words: list[str]) -> list[float]:
    return [float(word.strip(",}")) for word in words if word.strip(",}").replace(".", "", 1).isdigit()]
