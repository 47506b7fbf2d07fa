"""Random training loops under virtual ranks: the same bits on any number of ranks, also where one continues on others.

`python tests/virtual_programs.py --seeds 0:1000` prints how many have the same bits in all modes, are refused in all or
in some (by reason), or differ (then the exit status is 1).
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

import surroundings

if __name__ == "__main__":
    surroundings.normalize()

import torch
from modes import PROCESSES_2, SOLO, Mode
from step_programs import LINES, LOOPS, Choose, Outcome, Program, Setup, run_programs

MODES = (SOLO, PROCESSES_2, Mode("processes", 3))
REFUSED = ("foreign", "replay", "keep", "save", "best", "zero f none; draw b", "accelerator; draw a")
OF_ROUNDS = tuple(line for line in LOOPS if not any(part in line for part in REFUSED))
"""Those that virtual ranks take."""
NOT_WITHIN = ("foreign", "hook", "freeze", "unfreeze", "zero", "zero_model", "list")
WITHIN = tuple(line for line in LINES if line.split()[0] not in NOT_WITHIN)
"""What may come in a round: no data of a rank alone, nothing that changes the model, what is zeroed, or the epoch."""
BETWEEN = ("evaluate 99", "leave a", "end a", "erase 0", "freeze 0", "unfreeze 0", "best", "load_best", "read every")
"""What a script does where a round has ended."""
OF_TORCH = ("Expected more than 1 value per channel", "modified by an inplace operation")


class Round(NamedTuple):
    """`body` is for each batch of a rank, `after` once behind them."""

    body: tuple[str, ...]
    after: tuple[str, ...]


class VirtualProgram(NamedTuple):
    """A program by rounds; after `cut` of them it may continue in another world."""

    setup: Setup
    rounds: tuple[Round, ...]
    cut: int

    def on(self, ranks: int, rounds: slice, *ends: str) -> Program:
        """What each of so many ranks runs: each one as often as a rank has batches of a round."""
        each = -(-self.setup.virtual // ranks)
        ops = [op for one in self.rounds[rounds] for op in (*one.body * each, *one.after)]
        return Program(self.setup, (*ends[:1], *ops, *ends[1:]))


def any_program(choose: Choose) -> VirtualProgram:
    """Some loops of some rounds; a third of the bodies has a line too many, or too few."""
    setup = Setup(
        samples=choose(range(3, 50)),
        others=choose(range(3, 30)),
        batch=choose([2, 1, 3]),
        layout=choose(["one", "one", "two", "halves"]),
        optimizer=choose(["sgd", "adam"]),
        net=choose(["plain", "routed", "norm", "noisy", "noisy"]),
        virtual=choose([4, 6]),
    )
    rounds: list[Round] = []
    for _ in range(choose([1, 1, 2, 3])):
        known = choose([[line for line in LOOPS if "foreign" not in line], OF_ROUNDS, OF_ROUNDS, OF_ROUNDS])
        body = choose(known if setup.layout == "two" else known[:-3]).split("; ")
        if "step g" not in body and setup.layout != "one":
            place = body.index("step f")
            body[place:place] = ["forward other", "backward plain"] * (setup.layout == "two") + [
                "step g",
                "zero g none",
            ]
        # A part of an evaluation is another one on other ranks; and what torch clips is not reduced yet.
        whole = {"evaluate 2": "evaluate 99", "evaluate 1": "evaluate 99", "clip torch": "clip accelerator"}
        if choose([False, False, True]):
            place = choose(range(len(body)))
            if choose([True, True, False]):
                body.insert(place, choose(WITHIN))
            elif len(body) > 1 and not body[place].startswith(("forward", "backward")):
                body.pop(place)
        after = [line for line in ("drop", choose(BETWEEN)) if choose([True, False, False])]
        body = [whole.get(line, line) for line in body if line not in ("save", "best", "load_best")]
        rounds += [Round(tuple(body), tuple(after))] * choose([1, 2, 3, 5])
    return VirtualProgram(setup, tuple(rounds), choose(range(len(rounds))))


class Verdict(NamedTuple):
    """`kind` is "exact", "refused", "apart" (in some modes only), "unsaid" (by torch), or
    "different" (a bug)."""

    kind: str
    reason: str = ""


def judge(of_modes: Sequence[Sequence[Outcome]]) -> Verdict:
    """Compare what a program has left on the ranks of each mode."""
    first = [next((each for each in ranks if each.error and not each.is_secondary), None) for ranks in of_modes]
    errors = [each for each in first if each is not None]
    unsaid = [each.error for each in errors if any(text in str(each.error) for text in OF_TORCH)]
    if unsaid:
        return Verdict("unsaid", str(unsaid[0]))
    if strange := [each.error for each in errors if not each.is_worded]:
        return Verdict("different", f"not worded: {strange[0]}")
    if any(each.error for ranks, cause in zip(of_modes, first, strict=True) if cause is None for each in ranks):
        return Verdict("different", "no first cause")
    ended = [each for ranks, cause in zip(of_modes, first, strict=True) if cause is None for each in ranks]
    for one in ended[1:]:
        if not all(map(torch.equal, one.state, ended[0].state)):
            return Verdict("different", f"bits of rank {one.rank}")
        if _numbers(one.seen) != _numbers(ended[0].seen):
            return Verdict("different", f"seen {_numbers(one.seen)} for {_numbers(ended[0].seen)}")
    if errors:
        return Verdict("apart" if ended else "refused", str(errors[0].error))
    return Verdict("exact")


def _numbers(seen: Sequence[Any]) -> list[float]:
    return [each for each in seen if isinstance(each, float)]


def joined(ranks: Sequence[Outcome]) -> Sequence[Outcome]:
    """The same with whole parameters, whose shards the ranks have."""
    if len(ranks) == 1 or any(each.error for each in ranks):
        return ranks
    state = [torch.cat(parts) for parts in zip(*(each.state for each in ranks), strict=True)]
    return [each._replace(state=state) for each in ranks]


def verdicts_of(
    programs: Sequence[VirtualProgram], modes: Sequence[Mode] = MODES, strategy: str = "ddp"
) -> list[Verdict]:
    """Run each in all modes, and once more on other ranks from where it was cut."""
    whole = [run_programs(mode, [each.on(mode.ranks, slice(None)) for each in programs], strategy) for mode in modes]
    with tempfile.TemporaryDirectory() as saved:
        one, other = modes[-1], modes[0]
        begins = [each.on(one.ranks, slice(each.cut), "drop", "save") for each in programs]
        ends = [each.on(other.ranks, slice(each.cut, None), "load") for each in programs]
        begun = run_programs(one, begins, strategy, saved=saved)
        ended = run_programs(other, ends, strategy, saved=saved)
    found = []
    for number, program in enumerate(programs):
        outcomes = [joined(each[number]) if strategy == "fsdp" else each[number] for each in whole]
        is_cut = not any(each.error for each in begun[number]) and _can_continue(program)
        if is_cut and not any(each.error for each in (*ended[number], *outcomes[0])):
            outcomes.append([each._replace(seen=outcomes[0][0].seen) for each in ended[number]])
        found.append(judge(outcomes))
    return found


def _can_continue(program: VirtualProgram) -> bool:
    """Whether what comes is a matter of what was saved: no line drops what is drawn ahead, or changes the model."""
    begun = {op.split()[0] for each in program.rounds[: program.cut] for op in (*each.body, *each.after)}
    return begun.isdisjoint(("ahead", "keep", "freeze", "unfreeze", "hook", "best", "list", "enter_block", "leave"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0:1000", help="FIRST:END")
    parser.add_argument("--strategy", default="ddp", choices=["ddp", "zero1", "fsdp"])
    given = parser.parse_args()
    torch.set_num_threads(1)
    first, end = map(int, given.seeds.split(":"))
    programs = [any_program(random.Random(seed).choice) for seed in range(first, end)]
    groups: dict[tuple[str, str], list[int]] = defaultdict(list)
    for number, verdict in enumerate(verdicts_of(programs, strategy=given.strategy)):
        groups[verdict.kind, re.sub(r"[-+]?\d[\d.e+-]*", "#", verdict.reason)[:150]].append(number)
    for (kind, reason), numbers in sorted(groups.items(), key=lambda item: (item[0][0], -len(item[1]))):
        print(f"{len(numbers):5} {kind} {reason}")
        if kind != "exact":
            number = min(numbers, key=lambda each: sum(len(one.body) for one in programs[each].rounds))
            print(f"        seeds {[first + each for each in numbers][:20]}")
            print(f"        {programs[number].on(programs[number].setup.virtual, slice(None))}")
    return int(any(kind == "different" for kind, _ in groups))


if __name__ == "__main__":
    sys.exit(main())
