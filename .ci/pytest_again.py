"""Run pytest; where few tests fail, run those once more, alone, and list the ones that pass then as flaky.

A flaky test is a bug, often the product's: the list, in out/flaky.txt, is there to be mended.

    python .ci/pytest_again.py ARGUMENTS OF PYTEST
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

FLAKY = Path("out/flaky.txt")
MOST = 5  # more failures are no chance


def main() -> int:
    with tempfile.TemporaryDirectory() as cache:
        shown = "--durations=25"  # where the time goes
        command = [sys.executable, "-m", "pytest", *sys.argv[1:], shown, "-o", f"cache_dir={cache}"]
        exit_code = subprocess.call(command)
        if exit_code != 1:  # pytest's own: some tests failed
            return exit_code
        failed = sorted(json.loads(Path(cache, "v", "cache", "lastfailed").read_text()))
        if len(failed) > MOST:
            return exit_code
        print(f"once more, alone: {', '.join(failed)}", flush=True)
        # Whichever marks they have: those of a collection of few tests may be others.
        command += ["--last-failed", "--last-failed-no-failures=none", "--numprocesses=0", "-m", ""]
        again = subprocess.call(command)
    if again == 0:
        FLAKY.parent.mkdir(exist_ok=True)
        with FLAKY.open("a") as file:
            file.writelines(f"{test}\n" for test in failed)
    return again


if __name__ == "__main__":
    sys.exit(main())
