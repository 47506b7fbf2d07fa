"""The programs of this folder by each launcher, unchanged. `python tests/libraries/launches.py` times them in pairs.

The programs, in `programs/`, are in the style of their libraries' documents. The last line of each has the loss, a
sum of the weights, and the number of ranks.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).with_name("programs")
LIMIT_S = 150  # of one launch

LAUNCHERS = {
    "torchrun": ["-m", "torch.distributed.run", "--nproc-per-node", "2"],
    "unisono": ["-m", "unisono", "run", "-n", "2", "--backend", "cpu"],
    "python": [],  # one device
}


def launch(launcher: str, program: Path, directory: Path) -> str:
    """The line of results, of a run on CPUs that leaves its files in `directory`."""
    environ = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HOME": str(directory / "cache"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "TOKENIZERS_PARALLELISM": "false",
    }
    command = [sys.executable, *LAUNCHERS[launcher], str(program)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=directory, env=environ, **pipes) as process:
        try:
            output, errors = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            process.terminate()  # a launcher ends its ranks
            output, errors = process.communicate()
            raise AssertionError(f"{launcher} {program.name} takes longer than {LIMIT_S} s\n{errors}") from None
    results = [line for line in output.splitlines() if line.startswith("loss ")]
    # By torchrun, a rank that has done all is at times aborted by a thread of torch's when its interpreter ends.
    is_aborted_at_end = launcher == "torchrun" and "terminate called without an active exception" in errors
    assert process.returncode == 0 or is_aborted_at_end, f"{launcher} {program.name}\n{output}{errors}"
    assert len(results) == 1, f"{launcher} {program.name}\n{output}{errors}"
    return results[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("programs", nargs="*", default=sorted(each.stem for each in PROGRAMS.glob("*.py")))
    parser.add_argument("--pairs", type=int, default=3)
    given = parser.parse_args()
    for name in given.programs:
        seconds: dict[str, list[float]] = {"unisono": [], "torchrun": []}
        results = set()
        for pair in range(given.pairs):
            for launcher in sorted(seconds, reverse=pair % 2 == 0):
                with tempfile.TemporaryDirectory() as directory:
                    began = time.perf_counter()
                    results.add(launch(launcher, PROGRAMS / f"{name}.py", Path(directory)))
                    seconds[launcher].append(time.perf_counter() - began)
        ratios = [ours / theirs for ours, theirs in zip(*seconds.values(), strict=True)]
        print(
            f"{name}: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) of torchrun's "
            f"{statistics.median(seconds['torchrun']):.1f} s, load {os.getloadavg()[0]:.1f}, "
            f"{'equal' if len(results) == 1 else f'different: {sorted(results)}'}",
            flush=True,
        )


if __name__ == "__main__":
    main()
