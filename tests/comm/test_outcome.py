"""What crosses a boundary arrives: a value, or the error itself, in its own type, with the place it came from."""

from __future__ import annotations

import contextlib
import inspect
import io
import re
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from unisono import errors
from unisono.comm.outcome import Outcome, copy_error, first_cause
from unisono.errors import (
    BrokenWorldError,
    CollectiveMismatchError,
    RemoteError,
    RemoteTraceback,
    UnisonoError,
    UnpicklableError,
    WorkerDiedError,
    describe_exit,
)


def raising(error: BaseException) -> Any:
    raise error


def captured(error: BaseException) -> Outcome[Any]:
    return Outcome.capture(raising, error)


def travelled(error: BaseException) -> BaseException:
    """The error after a journey to another process."""
    arrived = Outcome.from_bytes(captured(error).to_bytes()).error
    assert arrived is not None
    return arrived


class TwistedError(Exception):
    """Its constructor takes other arguments than it passes on, in another number."""

    def __init__(self, code: int, where: str) -> None:
        super().__init__(f"code {code} at {where}")
        self.code = code


class RewordedError(Exception):
    """Its constructor takes as many arguments as it passes on, and would word the message twice."""

    def __init__(self, status: object) -> None:
        super().__init__(f"status {status}")
        self.status = status


class ToldError(Exception):
    """Its text is not made from its arguments."""

    def __init__(self, missing: str) -> None:
        self.missing = missing

    def __str__(self) -> str:
        return f"{self.missing} is missing"


class UnreadableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class Unshowable:
    """Neither pickled nor shown."""

    def __reduce__(self) -> Any:
        raise TypeError("not this one")

    def __repr__(self) -> str:
        raise RuntimeError("nor its repr")


class SlottedError(Exception):
    __slots__ = ("detail",)

    def __init__(self, detail: str) -> None:
        super().__init__(detail)
        self.detail = detail


class DeafError(Exception):
    """As empty as a container can be, and yet an error."""

    def __len__(self) -> int:
        return 0


AWKWARD: dict[str, Any] = {
    "plain": lambda: ValueError("bad", 7),
    "key": lambda: KeyError("name"),
    "file": lambda: FileNotFoundError(2, "No such file or directory", "/nowhere"),
    "decoding": lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
    "import": lambda: ModuleNotFoundError("No module named 'x'", name="x"),
    "stop": lambda: StopIteration(5),
    "exit": lambda: SystemExit(3),
    "group": lambda: ExceptionGroup("several", [ValueError("one"), KeyError("two")]),
    "memory": lambda: torch.OutOfMemoryError("CUDA out of memory"),
    "ours": lambda: WorkerDiedError("rank 1 was killed", 1, -9),
    "twisted": lambda: TwistedError(5, "home"),
    "reworded": lambda: RewordedError(404),
    "told": lambda: ToldError("label"),
    "slotted": lambda: SlottedError("small"),
    "deaf": lambda: DeafError("hm"),
}


def failed_at(at: float) -> Outcome[Any]:
    return Outcome(error=ValueError("bad"), at=at)


def facts(error: BaseException) -> tuple[Any, ...]:
    """What a handler may look at."""
    attributes = ("errno", "filename", "name", "code", "value", "status", "missing", "rank", "exit_code")
    found = {name: getattr(error, name) for name in (*attributes, "detail", "start") if hasattr(error, name)}
    return type(error), str(error), repr(error.args), repr(found), getattr(error, "__notes__", [])


def test_a_value_is_captured_and_unwrapped():
    outcome = Outcome.capture(divmod, 7, 2)
    assert (outcome.unwrap(), outcome.error) == ((3, 1), None)
    assert outcome.at > 0


@pytest.mark.parametrize("error", [ValueError("bad"), KeyboardInterrupt(), SystemExit(1), GeneratorExit()], ids=repr)
def test_a_captured_error_is_reraised_as_itself_with_its_place_noted_once(error):
    outcome = Outcome.failure(captured(error).error, "rank 1 of 4")
    for _ in range(2):
        with pytest.raises(type(error)) as raised:
            outcome.unwrap()
    assert raised.value is error
    assert error.__notes__ == ["rank 1 of 4"]


@pytest.mark.parametrize("name", AWKWARD)
def test_an_exception_travels_and_copies_with_type_text_and_attributes(name):
    error = captured(AWKWARD[name]()).error
    error.__cause__, error.status = KeyError("why"), {"a": [1, (None, b"x")]}
    error.add_note("in reader, round 17")
    before, twin = facts(error), copy_error(error)
    assert twin is not error
    assert (twin.__cause__, twin.__traceback__) == (error.__cause__, error.__traceback__)
    assert facts(travelled(error)) == facts(twin) == before


STATE_BESIDE_ARGUMENTS = {"file", "decoding", "import", "stop", "exit", "group"}


@pytest.mark.parametrize("name", AWKWARD)
def test_an_exception_holding_what_cannot_travel_is_still_told_in_full(name):
    error = AWKWARD[name]()
    error.lock, error.batch = threading.Lock(), [1, 2]
    arrived = travelled(error)
    assert f"{type(error).__name__}: {error}".removesuffix(": ") in arrived.__cause__.text
    if name not in STATE_BESIDE_ARGUMENTS:
        assert (type(arrived), str(arrived)) == (type(error), str(error))
        assert (arrived.lock, arrived.batch) == (repr(error.lock), [1, 2])


def test_the_traceback_of_the_other_side_is_the_cause():
    arrived = travelled(ValueError("bad"))
    assert isinstance(arrived.__cause__, RemoteTraceback)
    text = arrived.__cause__.text
    assert "Traceback (most recent call last)" in text
    assert "in raising" in text
    assert "ValueError: bad" in text
    # Python shows the message after it, so it is not shown twice; nor are the frames of the package shown.
    shown = str(arrived.__cause__)
    assert "in raising" in shown
    assert "ValueError: bad" not in shown
    assert "outcome.py" in text
    assert "outcome.py" not in shown.replace("test_outcome.py", "")


def misspell(kind: str) -> Any:
    learning_rate = 1.0
    if kind == "name":
        return lerning_rate + learning_rate  # type: ignore[name-defined] # noqa: F821
    return pytest.aprox  # type: ignore[attr-defined]


@pytest.mark.parametrize(("kind", "meant"), [("name", "learning_rate"), ("attribute", "approx")])
def test_what_python_suggests_arrives_and_is_copied_and_is_told_once(kind, meant):
    outcome = Outcome.capture(misspell, kind)
    outcome.error.add_note("rank 0 of 2")
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        sys.__excepthook__(type(outcome.error), copy_error(outcome.error), outcome.error.__traceback__)
    assert f"Did you mean: '{meant}'?\n" in printed.getvalue()
    arrived = Outcome.from_bytes(outcome.to_bytes()).error
    assert arrived.__notes__ == ["rank 0 of 2", f"Did you mean: '{meant}'?"]
    assert arrived.__cause__.text.count("Did you mean") == 1
    assert str(arrived) not in arrived.__cause__.shown  # Python shows it, after its cause
    again = Outcome.from_bytes(Outcome.failure(arrived).to_bytes()).error
    assert again.__notes__ == arrived.__notes__


def test_an_unraised_error_ends_its_traceback_with_that_of_its_cause():
    died = WorkerDiedError("rank 1 called sys.exit(3)", 1, 3)
    died.__cause__ = captured(SystemExit(3)).error
    arrived = Outcome.from_bytes(Outcome.failure(died).to_bytes()).error
    assert str(arrived.__cause__).endswith("SystemExit: 3\n")


def test_a_forwarded_error_keeps_its_original_traceback():
    first = travelled(ValueError("bad"))
    passed_on = Outcome.from_bytes(Outcome.failure(first).to_bytes()).error
    assert passed_on.__cause__.text == first.__cause__.text
    never_raised = Outcome.failure(WorkerDiedError("rank 1 was killed", 1, -9))
    assert Outcome.from_bytes(never_raised.to_bytes()).error.__cause__ is None


def test_the_causes_of_an_error_are_told_in_the_remote_traceback():
    try:
        try:
            raise KeyError("label")
        except KeyError as error:
            raise ValueError("bad sample") from error
    except ValueError as error:
        arrived = Outcome.from_bytes(Outcome.failure(error).to_bytes()).error
    assert arrived is not None
    text = arrived.__cause__.text
    assert text.index("KeyError: 'label'") < text.index("direct cause") < text.index("ValueError: bad sample")


@pytest.fixture
def script() -> Iterator[types.ModuleType]:
    """A module that only this side can import, as `__main__` or a notebook is."""
    module = types.ModuleType("somebody_s_script")
    sys.modules[module.__name__] = module
    exec(
        "class ScriptError(Exception):\n"
        "    def __init__(self, status, hint):\n"
        "        super().__init__(f'{status}: {hint}')\n"
        "        self.status = status\n"
        "class Result:\n"
        "    score = 1.0\n",
        module.__dict__,
    )
    yield module
    sys.modules.pop(module.__name__, None)


def test_a_missing_exception_class_becomes_a_remote_error_with_its_text(script):
    data = captured(script.ScriptError(404, "not there")).to_bytes()
    del sys.modules[script.__name__]
    arrived = Outcome.from_bytes(data).error
    assert type(arrived) is RemoteError
    assert str(arrived) == "somebody_s_script.ScriptError: 404: not there"
    assert "ScriptError: 404: not there" in str(arrived.__cause__)


@pytest.mark.parametrize(
    "error",
    [UnreadableError("x"), ValueError(Unshowable()), UnreadableError(Unshowable())],
    ids=["unreadable", "unshowable argument", "both"],
)
def test_sending_an_error_never_raises_whatever_it_holds(error):
    error.holds = Unshowable()
    arrived = travelled(error)
    assert type(arrived) in (type(error), RemoteError)


def test_a_result_that_cannot_be_pickled_becomes_an_error_that_names_it():
    error = Outcome.from_bytes(Outcome(value=threading.Lock(), where="rank 1").to_bytes()).error
    assert type(error) is UnpicklableError
    assert str(error).startswith("the result, a lock, cannot be sent to the calling process (TypeError: cannot pickle")
    assert str(error).endswith("return tensors, numbers or other picklable data")


def test_a_result_with_a_missing_class_is_an_error_naming_the_way_out(script):
    data = Outcome(value=script.Result(), where="rank 1").to_bytes()
    del sys.modules[script.__name__]
    outcome = Outcome.from_bytes(data)
    assert type(outcome.error) is UnpicklableError
    assert "No module named 'somebody_s_script'" in str(outcome.error)
    assert "its class must be importable there" in str(outcome.error)
    assert isinstance(outcome.error.__cause__, ModuleNotFoundError)
    assert outcome.where == "rank 1"


def test_a_broken_world_error_is_secondary_directly_or_as_a_cause():
    broken = BrokenWorldError("rank 1 is gone")
    caused, handled, unrelated = ValueError("a"), ValueError("b"), ValueError("c")
    caused.__cause__ = broken
    handled.__context__ = broken
    unrelated.__context__ = broken
    unrelated.__suppress_context__ = True
    for error, is_secondary in ((broken, True), (caused, True), (handled, True), (unrelated, False)):
        sent = Outcome.failure(error, "rank 0 of 2")
        arrived = Outcome.from_bytes(sent.to_bytes())
        assert (arrived.where, arrived.at, arrived.is_secondary) == ("rank 0 of 2", sent.at, is_secondary)


@pytest.mark.parametrize("link", ["__cause__", "__context__"])
def test_an_error_that_is_its_own_cause_is_judged_all_the_same(link):
    first, second = ValueError("first"), ValueError("second")
    setattr(first, link, second)
    second.__cause__ = first  # Python allows it: `raise first from second` while handling the other way round
    assert not Outcome.failure(first).is_secondary


def test_of_ranks_that_called_different_collectives_the_odd_one_is_shown():
    mismatch = CollectiveMismatchError("rank 2 called barrier() while ranks [0, 1] called all_reduce()", [2])
    failures = {rank: Outcome(error=copy_error(mismatch), at=float(rank)) for rank in range(3)}
    assert first_cause(failures) == 2
    assert Outcome.from_bytes(failures[0].to_bytes()).error.odd_ranks == [2]


@pytest.mark.parametrize(
    ("failures", "first"),
    [
        ([Outcome(error=BrokenWorldError("x"), at=1.0, is_secondary=True), failed_at(3.0), failed_at(2.0)], 2),
        ([failed_at(2.0), Outcome(error=WorkerDiedError("", 1, -9), at=2.5)], 1),  # peers notice it sooner
        ([failed_at(2.0), Outcome(error=WorkerDiedError("", 1, -9), at=4.0)], 0),
    ],
    ids=["the earliest that is not secondary", "a rank that was killed", "but not one that was killed later"],
)
def test_the_first_cause_is(failures, first):
    assert first_cause(dict(enumerate(failures))) == first


def test_an_error_that_cannot_be_copied_is_itself_rather_than_another():
    class ImpostorError(Exception):
        def __reduce__(self) -> Any:
            return ValueError, ("someone else",)

    error = ImpostorError("me")
    twin = copy_error(error)
    assert type(twin) is ImpostorError
    assert str(twin) == "me"


# The tree of exceptions says who is to blame.


CLASSES = {
    name: kind for name, kind in vars(errors).items() if inspect.isclass(kind) and issubclass(kind, BaseException)
}


def test_our_errors_are_runtime_errors_with_one_base():
    for name in CLASSES.keys() - {"UnisonoError", "RemoteTraceback", "StoppedError"}:
        assert issubclass(CLASSES[name], UnisonoError), name
        assert issubclass(CLASSES[name], RuntimeError), name
        assert CLASSES[name].__doc__, name


def test_the_tree_in_the_docstring_draws_every_class_and_no_other():
    drawn = re.findall(r"\b(\w+(?:Error|Traceback))\b(?= \(|  )", errors.__doc__)
    assert sorted(drawn) == sorted(CLASSES)


def test_an_exit_is_told_in_words():
    assert describe_exit(None) == "ended for an unknown reason"
    assert describe_exit(3) == "exited with code 3"
    assert [describe_exit(code) for code in (-9, -200)] == ["was killed by SIGKILL", "was killed by signal 200"]
