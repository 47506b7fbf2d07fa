"""The digests of a run (`training/digests.py`), and the first step in which those of two runs differ; and what else the
run has recorded to replay a step: its command and its checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from unisono.report.run import lines_of, parsed
from unisono.report.summary import DIGESTS

EQUAL, DIFFERENT, NOT_COMPARABLE = range(3)
_SHOWN = 5
_KINDS = {"gradients": "the gradient of {} differs", "weights": "no gradient differs, but after the step {} does"}

Step = tuple[int, int]
"""The number of an optimizer's step, and that of the optimizer."""


class Checkpoint(NamedTuple):
    """A checkpoint that a run has saved or loaded."""

    path: str  # absolute, or a URL
    mark: str  # the unique name of that save, since another save may have taken its place
    steps: list[int]  # how many each optimizer had taken

    def step_of(self, optimizer: int) -> int:
        return self.steps[optimizer] if optimizer < len(self.steps) else 0


@dataclass
class RunDigests:
    """What the bits of a run depend on, besides the script and the data, and the digests of its steps."""

    settings: dict[str, Any] = field(default_factory=dict)  # arguments of the Accelerator, and what computes
    # For each step with digests: those of gradients and of weights, by kind, and by the names of parameters.
    steps: dict[Step, dict[str, dict[str, str]]] = field(default_factory=dict)
    weights: str = ""  # the SHA-256 at the end; "" if `end_training()` was not called
    command: dict[str, Any] = field(default_factory=dict)  # of `unisono run`, as `describe_command` returns it
    backend: str = ""  # the device family
    checkpoints: list[Checkpoint] = field(default_factory=list)  # that were saved or loaded, in that order
    origin: Checkpoint | None = None  # that was loaded before the first step
    _names: dict[int, dict[str, list[str]]] = field(default_factory=dict)

    @property
    def last(self) -> int:
        """The last step; 0 if there is none."""
        return max((step for step, _ in self.steps), default=0)

    def add(self, line: dict[str, Any]) -> None:
        """Add what one line of the record says; a step that is repeated replaces the earlier one."""
        if "settings" in line:
            self.settings, self.weights = line["settings"], ""
            self.command, self.backend = line.get("command") or {}, line.get("backend", "")
        elif "sha256" in line:
            self.weights = line["sha256"]
        elif "saved" in line or "loaded" in line:
            found = Checkpoint(line.get("saved") or line["loaded"], line["mark"], line["steps"])
            if "loaded" in line and not (self.steps or self.checkpoints):
                self.origin = found
            self.checkpoints.append(found)
        elif "step" not in line:
            self._names[line["optimizer"]] = {kind: line[f"{kind}_of"] for kind in _KINDS}
        else:
            of = self._names[line["optimizer"]]
            digests = {kind: dict(zip(of[kind], line[kind], strict=True)) for kind in _KINDS}
            self.steps[line["step"], line["optimizer"]] = digests


def run_in(path: str | Path) -> Path:
    """The directory of the run that is meant: this one, or the latest in a log directory."""
    places = (Path(path), Path(path, "latest"))
    found = (each for name in (DIGESTS, "rank-0.jsonl") for each in places if (each / name).exists())
    return next(found, Path(path)).resolve()


def has_digests(path: str | Path) -> bool:
    """Whether the run has a file of digests, which may lack those of steps."""
    return (run_in(path) / DIGESTS).exists()


def check_two(one: str | Path, other: str | Path) -> None:
    """ValueError: both are the same run, which would be equal to itself."""
    if (run := run_in(one)) == run_in(other):
        others = sorted({each.parent.resolve() for each in run.parent.glob(f"*/{DIGESTS}")} - {run})
        way = f"name the other one: {', '.join(map(str, others[-_SHOWN:]))}" if others else "pass another one"
        raise ValueError(f"both are the run {run}; {way}")


def read_digests(path: str | Path, needs_steps: bool = True) -> RunDigests:
    """Read the digests of a run, given by its directory or a log directory. What a restart has repeated counts once.
    FileNotFoundError: it has none; with `needs_steps`, also if it ended before the first step with digests."""
    found, file = RunDigests(), run_in(path) / DIGESTS
    for line in filter(None, map(parsed, lines_of(file) if file.exists() else ())):
        found.add(line)
    if not (found.steps if needs_steps else found.settings):
        advice = (
            "pass the directory that unisono run --log-dir, or spawn(output=Output(log_dir)), has written, of a run "
            "with Accelerator(virtual_ranks=...)"
        )
        if not Path(path).is_dir():
            raise FileNotFoundError(f"{path} is no directory: {advice}")
        if found.settings:
            advice = "it ended before the first step with some; digest_every=1 writes those of each step, 0 none"
        elif list(Path(path).glob("**/rank-0.jsonl")):
            advice = "Accelerator(virtual_ranks=...) writes them"
        raise FileNotFoundError(f"{path} has no digests: {advice}")
    return found


def compare_digests(one: RunDigests, other: RunDigests) -> tuple[int, str]:
    """Whether two runs have the same bits, in words, after an exit code: 0 if they do, 1 if not, 2 if they cannot be
    compared."""
    code, text = _compare_runs(one, other)
    unseeded = ""
    if code == DIFFERENT and all(each.settings.get("seed", 0) is None for each in (one, other)):
        unseeded = "neither run has a seed, so each draws its own weights; pass Accelerator(seed=0) to both"
    return code, "\n".join(filter(None, [compare_settings(one, other), unseeded, text]))


def compare_settings(one: RunDigests, other: RunDigests) -> str:
    """What the bits depend on that differs, in words; "" if nothing does."""
    both = [(name, one.settings.get(name), other.settings.get(name)) for name in {**one.settings, **other.settings}]
    differing = [f"{name} {mine}, {others}" for name, mine, others in both if mine != others]
    text = f"configurations differ: {'; '.join(differing)}" if differing else ""
    is_other = one.settings.get("virtual_ranks") != other.settings.get("virtual_ranks")
    return f"{text} (so steps have other samples)" if is_other else text


def _compare_runs(one: RunDigests, other: RunDigests) -> tuple[int, str]:
    if not one.steps.keys() & other.steps.keys():
        spans = [f"{min(each.steps)[0]} to {each.last}" for each in (one, other)]
        return NOT_COMPARABLE, (
            f"no step has digests in both: the first run has some of the steps {spans[0]}, the second of {spans[1]}; "
            "give both the same digest_every; one that was resumed has the steps from there on"
        )
    code, equal = compare_steps(one, other)
    if code != EQUAL:
        return code, equal
    if one.last != other.last:
        return DIFFERENT, f"{equal}; the first run ends with step {one.last}, the second one with {other.last}"
    if not (one.weights and other.weights):
        lacking = " and ".join(text for text, run in (("the first", one), ("the second", other)) if not run.weights)
        return EQUAL, f"{equal}, the last with digests; {lacking} did not come to accelerator.end_training()"
    if one.weights != other.weights:
        return DIFFERENT, f"{equal}; then weights differ: sha256 {one.weights}, {other.weights}"
    return EQUAL, f"{equal}, the last; weights sha256 {one.weights}"


def compare_steps(one: RunDigests, other: RunDigests) -> tuple[int, str]:
    """Compare the steps that have digests in both; the exit code, and the first that differs, in words."""
    common = sorted(one.steps.keys() & other.steps.keys())
    equal, before = "", 0
    if common and (first := common[0][0]) > min([*one.steps, *other.steps])[0]:
        equal = "no earlier step has digests in both; "
    elif common and first > 1:
        equal = f"{'step 1 has' if first == 2 else f'steps 1 to {first - 1} have'} no digests; "
    for each in common:
        mine, others = one.steps[each], other.steps[each]
        if names := {name for kind in _KINDS for name in mine[kind].keys() ^ others[kind].keys()}:
            shown = ", ".join(sorted(names)[:_SHOWN])
            return NOT_COMPARABLE, f"at step {each[0]} they do not train the same parameters: {shown}"
        if mine != others:
            between = "" if each[0] - before <= 1 else "; digest_every=1 looks at the steps between, too"
            return DIFFERENT, f"{equal}at step {each[0]} {_describe(mine, others)}{between}"
        equal, before = f"equal up to step {each[0]}; ", each[0]
    return EQUAL, equal.removesuffix("; ")


def _describe(mine: dict[str, dict[str, str]], others: dict[str, dict[str, str]]) -> str:
    """What differs first, in the order of the parameters."""
    kind = next(kind for kind in _KINDS if mine[kind] != others[kind])
    first, *more = [name for name, value in mine[kind].items() if value != others[kind][name]]
    also = f" first, and {len(more)} more of {len(mine[kind])}" if more else ""
    return _KINDS[kind].format(first) + also
