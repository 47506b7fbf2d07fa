"""Run thousands of random training loops: `python tests/programs.py --mode threads-2 --seeds 0:1000`.

Prints how many train the weights of one device, are refused (by reason), or train others (the smallest ones, in full;
the exit status is 1 then). `--strategy` is for processes. `--reduce` makes what differs smaller, line by line.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import surroundings

surroundings.normalize()

import torch  # noqa: E402
from modes import Mode  # noqa: E402
from plain_steps import Verdict, judge  # noqa: E402
from step_programs import Program, Setup, any_program, run_programs  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", default="threads-2", help="solo, threads-N or processes-N")
    parser.add_argument("--strategy", default="ddp")
    parser.add_argument("--seeds", default="0:1000", help="FIRST:END")
    parser.add_argument("--show", type=int, default=5, help="examples of what differs")
    parser.add_argument("--reduce", action="store_true", help="look for smaller programs that differ alike")
    given = parser.parse_args()
    torch.set_num_threads(1)
    name, _, ranks = given.mode.partition("-")
    mode = Mode(name, int(ranks or 1))
    first, end = map(int, given.seeds.split(":"))
    programs = [any_program(random.Random(seed).choice) for seed in range(first, end)]
    began = time.monotonic()
    verdicts = verdicts_on(programs, mode, given.strategy, is_sized=True)
    groups: dict[tuple[str, str], list[int]] = defaultdict(list)
    for number, verdict in enumerate(verdicts):
        groups[verdict.kind, _kind_of(verdict.reason)].append(number)
    print(f"{given.mode} {given.strategy}, seeds {given.seeds}: {time.monotonic() - began:.0f} s")
    for (kind, reason), numbers in sorted(groups.items(), key=lambda item: (item[0][0], -len(item[1]))):
        print(f"{len(numbers):5} {kind} {reason}")
        if kind == "exact":
            continue
        for number in sorted(numbers, key=lambda each: len(programs[each].ops))[
            : given.show if kind == "different" else 1
        ]:
            program, verdict = programs[number], verdicts[number]
            if given.reduce and kind in ("different", "refused"):
                program, verdict = smaller(program, verdict, mode, given.strategy)
            print(f"        seed {first + number}: {program}\n            {verdict.reason[:700]}")
    return int(any(kind == "different" for kind, _ in groups))


def verdicts_on(programs: Sequence[Program], mode: Mode, strategy: str, is_sized: bool = False) -> list[Verdict]:
    outcomes = run_programs(mode, programs, strategy, _tell if is_sized else lambda _: None)
    is_sharded = strategy == "fsdp" and mode.name == "processes"
    return [judge(each, mode.ranks, found, is_sharded) for each, found in zip(programs, outcomes, strict=True)]


def smaller(program: Program, verdict: Verdict, mode: Mode, strategy: str) -> tuple[Program, Verdict]:
    """The program without each line, and each setting, that its verdict does not depend on."""

    def is_alike(one: Program) -> Verdict | None:
        (found,) = verdicts_on([one], mode, strategy)
        return found if (found.kind, _kind_of(found.reason)) == (verdict.kind, _kind_of(verdict.reason)) else None

    size = max(len(program.ops) // 2, 1)
    while size:
        place = 0
        while place < len(program.ops):
            cut = Program(program.setup, program.ops[:place] + program.ops[place + size :])
            if (found := is_alike(cut)) is not None:
                program, verdict = cut, found
            else:
                place += size
        size //= 2
    for name, value in Setup._field_defaults.items():
        plainer = Program(program.setup._replace(**{name: value}), program.ops)
        if plainer != program and (found := is_alike(plainer)) is not None:
            program, verdict = plainer, found
    return program, verdict


def _kind_of(reason: str) -> str:
    return re.sub(r"[-+]?\d[\d.e+-]*", "#", reason)[:150]


def _tell(count: int) -> None:
    print(f"\r{count}", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
