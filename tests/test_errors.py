"""The tree of exceptions says who is to blame."""

from __future__ import annotations

import inspect
import re

import pytest

from unisono import errors
from unisono.errors import StoppedError, UnisonoError, describe_exit

CLASSES = {
    name: kind for name, kind in vars(errors).items() if inspect.isclass(kind) and issubclass(kind, BaseException)
}


@pytest.mark.parametrize("name", sorted(CLASSES.keys() - {"UnisonoError", "RemoteTraceback", "StoppedError"}))
def test_our_errors_are_runtime_errors_with_one_base(name):
    assert issubclass(CLASSES[name], UnisonoError)
    assert issubclass(CLASSES[name], RuntimeError)
    assert CLASSES[name].__doc__


def test_an_agreed_stop_ends_a_script_as_sigterm_would():
    with pytest.raises(SystemExit) as caught:
        raise StoppedError([1, 2])
    assert (caught.value.code, caught.value.results) == (143, [1, 2])


def test_the_tree_in_the_docstring_draws_every_class_and_no_other():
    drawn = re.findall(r"\b(\w+(?:Error|Traceback))\b(?= \(|  )", errors.__doc__)
    assert sorted(drawn) == sorted(CLASSES)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (None, "ended for an unknown reason"),
        (0, "exited with code 0"),
        (3, "exited with code 3"),
        (-9, "was killed by SIGKILL"),
        (-11, "was killed by SIGSEGV"),
        (-200, "was killed by signal 200"),
    ],
)
def test_an_exit_is_told_in_words(code, words):
    assert describe_exit(code) == words
