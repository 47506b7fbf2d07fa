"""A replay of a step of a recorded run with virtual ranks (`unisono replay`): what its ranks do differently.

Before its first step, a rank loads the chosen checkpoint, whatever the script names. Its digests are compared with
those of the record, and each rank ends after the step that was asked for. What the package would write goes to a
scratch directory, and what the script itself would write over is refused (`files_kept`).

*Threads:* the rank's; lines of the record also come from the thread that writes a checkpoint, and any thread that opens
a file calls the guard of `files_kept`.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NoReturn

import torch

from unisono.comm import preemption
from unisono.comm.stacks import users_frame
from unisono.report.digests import DIFFERENT, EQUAL, NOT_COMPARABLE, RunDigests, compare_settings, compare_steps
from unisono.world import World

# The audit events that are refused, and how many paths each has.
_WRITES = {"open": 1, "os.remove": 1, "os.rename": 2, "os.truncate": 1, "shutil.rmtree": 1}


@dataclass
class Replay:
    """What is replayed, and how far it has got. The instance of each rank is its own.

    Attributes:
        step, optimizer: the rank ends after this step of the optimizer with this number.
        checkpoint: what `load_state` loads before the first step; "" for none.
        scratch: the directory for what is written.
        kept: the directory whose files stay as they are.
        recorded: the digests of the run.
        has_debugger: a debugger runs in front of the step.
        replayed: on rank zero, the digests of this replay.
        first, last: the first and the last step so far; 0 if there is none.
    """

    step: int
    optimizer: int
    checkpoint: str
    scratch: str
    kept: str
    recorded: RunDigests
    has_debugger: bool = False
    replayed: RunDigests = field(default_factory=RunDigests)
    first: int = 0
    last: int = 0
    _is_loaded: bool = False
    _was_debugged: bool = False
    _has_differed: bool = False
    _world: World | None = None

    @contextmanager
    def running(self, world: World) -> Iterator[None]:
        """Let the rank of that world replay during the block."""
        world.state.part(_OfRank).replay = self
        self._world = world
        if world.rank == 0:
            world.timeline.write_digests = self._compare_line
        with files_kept(self.kept), preemption.scope():  # outside, the run has not ended early
            yield

    def in_scratch(self, path: str | os.PathLike[str]) -> str:
        """The place in the scratch directory for what would be written there."""
        absolute = os.path.abspath(path)
        return absolute if absolute.startswith(self.scratch + os.sep) else self.scratch + absolute

    def place_to_load(self, place: str) -> str:
        """Where `load_state` is to look, if the script names that place: the chosen checkpoint comes before the first
        step; later ones are those that the replay itself has saved, if any."""
        if not self.first and self.checkpoint:
            self._is_loaded = True
            return self.checkpoint
        own = self.in_scratch(place)
        if not self.first or os.path.isdir(own):
            return own
        return self.checkpoint or place if own == place else place

    def wants(self, optimizer: int, step: int) -> bool:
        """Whether the step of that optimizer is to have digests."""
        return (step, optimizer) in self.recorded.steps or (step, optimizer) == (self.step, self.optimizer)

    def begin_step(self, optimizer: int, step: int) -> None:
        """The gradients of that step are reduced."""
        if optimizer != self.optimizer:
            return
        if step > self.step:  # a debugger has continued
            _end()
        if not self.first and self.checkpoint and not self._is_loaded:
            self._say(
                "the script calls no load_state before its first step, and begins with step 1; if it has an option "
                "for that, pass it at the end: --args --resume"
            )
        self.first = self.first or step

    def end_step(self, optimizer: int, step: int) -> None:
        """That step was taken. SystemExit: it is the replayed one, and no debugger continues."""
        if optimizer == self.optimizer:
            self.last = step
            if step >= self.step and not (self._was_debugged and sys.gettrace()):
                _end()

    def debug(self, optimizer: int, step: int) -> None:
        """Run the debugger in the user's frame that asks for the replayed step. SystemExit: the user has quit."""
        if (step, optimizer) != (self.step, self.optimizer):
            return
        import pdb  # here: other runs do without

        self._was_debugged = True
        self._say(f"{self.verdict()[1]}; step {step} is next, its gradients are reduced")
        debugger, frame = pdb.Pdb(nosigint=True), users_frame()
        debugger.reset()
        each: FrameType | None = frame
        while each is not None:  # as `set_trace` does, which would stop at the next line, after the step
            each.f_trace, debugger.botframe = debugger.trace_dispatch, each
            each = each.f_back
        debugger.interaction(frame, None)
        if debugger.quitting:
            _end()
        if debugger.stopframe is not debugger.botframe or debugger.breaks:  # it does not just continue
            sys.settrace(debugger.trace_dispatch)

    def _compare_line(self, line: dict[str, Any]) -> None:
        """Take what would be a line of a record; report a difference as soon as there is one."""
        self.replayed.add(line)
        if "settings" in line:
            if text := compare_settings(self.recorded, self.replayed):
                self._say(f"{text}; bits may differ")
            if self.recorded.command["sha256"] != self.replayed.command["sha256"]:
                self._say(f"{self.recorded.command['target']} has changed since the run")
        elif "step" in line and not self._has_differed:
            key = line["step"], line["optimizer"]
            self._has_differed = self.recorded.steps.get(key, self.replayed.steps[key]) != self.replayed.steps[key]
            if self._has_differed and line["step"] < self.step:
                self._say(compare_steps(self.recorded, self.replayed)[1])

    def verdict(self) -> tuple[int, str]:
        """What rank zero has found, after an exit code: 0 if all is equal, 1 if not, 2 if the step was not reached."""
        if not self.last and self._was_debugged:
            return EQUAL, f"replayed no step on {self._devices}"
        span = f"step {self.last}" if self.first == self.last else f"steps {self.first} to {self.last}"
        if self.last < self.step and not self._was_debugged:
            ended = f"after step {self.last}" if self.last else "without a step"
            return NOT_COMPARABLE, f"the script ended {ended}, before step {self.step}"
        code, text = compare_steps(self.recorded, self.replayed)
        if code == EQUAL:
            text = self._describe_equal()
        return min(code, DIFFERENT), f"replayed {span} on {self._devices}: {text}"

    @property
    def _devices(self) -> str:
        count = self._world.world_size if self._world is not None else 1
        return f"{count} device{'s' if count > 1 else ''}"

    def _describe_equal(self) -> str:
        common = {step for step, _ in self.recorded.steps.keys() & self.replayed.steps.keys()}
        count = f"each of the {len(common)} steps" if len(common) > 1 else "the one step"
        text = f"equal at {count} with digests" if common else "no step to compare with"
        own = self.replayed.steps.get((self.step, self.optimizer))
        if own is not None and self.step not in common:  # the hash lets two replays be compared
            own_hash = hashlib.sha256(json.dumps(own).encode()).hexdigest()[:16]
            text += f"; the record has no digests of step {self.step}, and the hash of those here is {own_hash}"
        return text

    def _say(self, text: str) -> None:
        if self._world is not None and self._world.rank == 0:
            print(f"unisono replay: {text}", file=sys.stderr, flush=True)


class _OfRank:
    replay: Replay | None = None


def replay_of(world: World) -> Replay | None:
    """What the rank replays; None in any other run."""
    return world.state.part(_OfRank).replay


def in_scratch(path: str | os.PathLike[str], world: World) -> str | os.PathLike[str]:
    """Where to write what is meant for that path: there, unless the run is a replay."""
    replay = replay_of(world)
    return path if replay is None else replay.in_scratch(path)


def _end() -> NoReturn:
    """End the script early, on all ranks at the same place, like one that has asked `should_stop`."""
    preemption.agree()
    sys.exit(0)


@contextmanager
def files_kept(directory: str) -> Iterator[None]:
    """During the block, this process and its forks cannot change, rename or remove files that are in the directory now,
    or below: PermissionError names the file. Hidden ones, such as caches, may be changed; what native code writes is
    not seen, except for torch.save."""
    began, is_over = time.time(), False

    def guard(event: str, args: tuple[Any, ...]) -> None:
        if is_over or event not in _WRITES or (event == "open" and not (args[2] or 0) & (os.O_WRONLY | os.O_RDWR)):
            return
        for path in args[: _WRITES[event]]:
            if isinstance(path, str | bytes | os.PathLike) and _is_kept(path):
                raise PermissionError(
                    f"a replay overwrites no file of the run, and the script would change {os.fsdecode(path)}; start "
                    "it in another directory, which has links to what it reads: --cwd DIR"
                )

    def _is_kept(path: Any) -> bool:
        try:
            found = os.stat(path)
        except (OSError, ValueError):
            return False
        is_old = found.st_size > 0 and found.st_ctime < began  # an empty one may be a lock
        real = os.path.realpath(os.fsdecode(path))
        return is_old and real.startswith(directory + os.sep) and not real.startswith(os.path.join(directory, "."))

    def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(f, str | os.PathLike):  # C++ writes it
            guard("open", (f, "wb", os.O_WRONLY))
        plain_save(obj, f, *args, **kwargs)

    sys.addaudithook(guard)  # which stays
    plain_save, torch.save = torch.save, save
    try:
        yield
    finally:
        is_over, torch.save = True, plain_save
