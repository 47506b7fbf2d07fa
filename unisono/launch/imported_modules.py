"""The caller's imported modules against those of a worker, which imports them itself: are they alike?

Modules travel by name. So what a caller has changed in one since (`config.LR = 0.5`) is not in its workers, and a file
that was edited meanwhile is another text there. Neither can be seen from one side, so the caller describes its modules,
and rank zero compares each of its own with that when it has been imported. What differs is reported; what is listed
in `spawn(..., carry=[config])` is handed over.

Looked at are modules of the user's, not those that are installed; of their globals plain data, objects of plain data,
functions and classes, but for names that begin with an underscore.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from types import CodeType, FunctionType, ModuleType
from typing import Any

from unisono.launch.unpicklable import is_picklable

_INSTALLED = tuple(
    {each + os.sep for path in sysconfig.get_paths().values() for each in (path, os.path.realpath(path))}
)
_PACKAGES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_OURS = __name__.partition(".")[0]
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_MAX_ITEMS = 10_000  # of plain data that are looked at, in one global
_MAX_DEPTH = 5
_SHOWN = 5  # names in one message
_WIDTH = 60  # of a value in it
_digests: dict[int, tuple[CodeType, str]] = {}  # by the code's id; it is held, so nobody else gets that


class _NotPlainError(Exception):
    """A value that cannot be compared between processes."""


@dataclass(frozen=True)
class ModuleFacts:
    """What can be compared of a module.

    Attributes:
        values: the text of each global of plain data.
        codes: the digest of each function and class.
    """

    values: dict[str, str]
    codes: dict[str, str]


def describe_modules() -> dict[str, ModuleFacts]:
    """The user's modules that this process has imported, by name."""
    modules = [(name, module) for name, module in list(sys.modules.items()) if _is_users(name, module)]
    return {name: describe_module(module) for name, module in modules}


def describe_module(module: ModuleType) -> ModuleFacts:
    values, codes = {}, {}
    # A loader of another kind (pytest's, say) changes the text that it loads, in this process only.
    has_own_text = type(getattr(module, "__loader__", None)) is importlib.machinery.SourceFileLoader
    for name, value in list(vars(module).items()):
        if name.startswith("_") or isinstance(value, ModuleType):
            continue
        if isinstance(value, FunctionType | type):
            if value.__module__ != module.__name__:
                values[name] = f"{value.__module__}.{value.__qualname__}"
            elif has_own_text:
                codes[name] = _digest_of(value)
            continue
        try:
            values[name] = _text_of(value, [_MAX_ITEMS], _MAX_DEPTH)
        except _NotPlainError:
            continue
    return ModuleFacts(values, codes)


def compare_modules(theirs: Mapping[str, ModuleFacts], report: Callable[[str], None]) -> None:
    """Report how this process's modules differ from the caller's: those that are imported, and others when they are."""
    waiting = set()
    for name, facts in theirs.items():
        if (module := sys.modules.get(name)) is not None:
            _compare(name, facts, describe_module(module), report)
        else:
            waiting.add(name)
    if waiting:
        sys.meta_path.insert(0, _Comparing({name: theirs[name] for name in waiting}, report))


def check_carried(modules: Iterable[ModuleType]) -> list[ModuleType]:
    """The modules of `spawn(carry=...)`."""
    if isinstance(modules, str | bytes | ModuleType) or not isinstance(modules, Iterable):
        raise TypeError(f"carry={modules!r} is a {type(modules).__name__}; pass modules, as in [config]")
    found = list(modules)
    for each in found:
        if not isinstance(each, ModuleType):
            raise TypeError(f"carry has {each!r}, a {type(each).__name__}; pass modules, as in [config]")
        if sys.modules.get(each.__name__) is not each or each.__name__ == "__main__":
            raise ValueError(f"carry has {each.__name__!r}, which workers cannot import; pass what is needed to fn")
    return found


def globals_of(module: ModuleType) -> dict[str, Any]:
    """Those of its globals that can be sent."""
    return {name: each for name, each in vars(module).items() if not name.startswith("__") and is_picklable(each)}


def adopt_globals(carried: Mapping[str, Mapping[str, Any]]) -> None:
    """Give modules the globals that they have in the caller."""
    for name, values in carried.items():
        vars(importlib.import_module(name)).update(values)


class _Comparing:
    """In `sys.meta_path`: has a module compared as soon as it is imported."""

    def __init__(self, waiting: dict[str, ModuleFacts], report: Callable[[str], None]) -> None:
        self._waiting = waiting
        self._report = report

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        facts = self._waiting.pop(name, None)  # so that the other finders answer the question below
        spec = importlib.util.find_spec(name) if facts is not None else None
        if facts is None or spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_compare(module: ModuleType) -> None:
            execute(module)
            _compare(name, facts, describe_module(module), self._report)

        spec.loader.exec_module = execute_and_compare  # type: ignore[method-assign]
        return spec


def _compare(name: str, theirs: ModuleFacts, ours: ModuleFacts, report: Callable[[str], None]) -> None:
    changed = [each for each, text in theirs.values.items() if ours.values.get(each) != text]
    if changed:
        shown = [
            f"{name}.{each} is {_cut(theirs.values[each])} in the calling process, and {_own(each, ours)} in workers"
            for each in changed[:_SHOWN]
        ]
        more = f"; {len(changed) - _SHOWN} further globals of it differ" if len(changed) > _SHOWN else ""
        report(
            f"{'; '.join(shown)}{more}: workers import {name} themselves. Pass the values to fn, or "
            f"spawn(..., carry=[{name}]), which hands over the module's globals"
        )
    edited = sorted(each for each, digest in theirs.codes.items() if ours.codes.get(each) != digest)
    if edited:
        report(
            f"the text of {name} that workers import is not the one that the calling process runs (it differs in "
            f"{', '.join(edited[:_SHOWN])}): reload it there, or start that process again"
        )


def _own(name: str, ours: ModuleFacts) -> str:
    return "its own" if name in ours.codes else _cut(ours.values.get(name, "another"))


def _cut(text: str) -> str:
    return text if len(text) <= _WIDTH else text[: _WIDTH - 3] + "..."


def _is_users(name: str, module: object) -> bool:
    file = getattr(module, "__file__", None)
    if not isinstance(module, ModuleType) or not isinstance(file, str) or name in ("__main__", "__mp_main__"):
        return False
    return is_users_file(file) and name.partition(".")[0] != _OURS and module.__name__ == name


@cache
def is_users_file(file: str) -> bool:
    """Whether it is part of the program, and not of what is installed."""
    return os.path.isabs(file) and not file.startswith(_INSTALLED) and not any(each in file for each in _PACKAGES)


def _text_of(value: Any, left: list[int], depth: int) -> str:
    """A text that is the same in two processes where the value is; `left` counts what may still be looked at."""
    left[0] -= 1
    if left[0] < 0 or depth < 0:
        raise _NotPlainError
    if type(value) in _PLAIN:
        return repr(value)
    if isinstance(value, os.PathLike):
        return repr(os.fspath(value))
    if isinstance(value, Mapping):
        items = [(_text_of(key, left, depth - 1), _text_of(each, left, depth - 1)) for key, each in value.items()]
        return "{" + ", ".join(f"{key}: {each}" for key, each in items) + "}"
    if type(value) in (list, tuple):
        return "[" + ", ".join(_text_of(each, left, depth - 1) for each in value) + "]"
    if type(value) in (set, frozenset):
        return "{" + ", ".join(sorted(_text_of(each, left, depth - 1) for each in value)) + "}"
    held = getattr(value, "__dict__", None)
    if not isinstance(held, dict) or not held or isinstance(value, type):
        raise _NotPlainError
    inner = ", ".join(f"{name}={_text_of(each, left, depth - 1)}" for name, each in held.items())
    return f"{type(value).__qualname__}({inner})"


def _digest_of(value: FunctionType | type) -> str:
    if isinstance(value, FunctionType):
        return _digest_of_code(value.__code__)
    parts = [f"{name}:{_digest_of(each)}" for name, each in vars(value).items() if isinstance(each, FunctionType)]
    return _digest("".join(parts))


def _digest_of_code(code: CodeType) -> str:
    """Of what it does; where it stands in its file does not matter."""
    known = _digests.get(id(code))
    if known is None:
        constants = [_digest_of_code(each) if isinstance(each, CodeType) else _repr_of(each) for each in code.co_consts]
        text = repr((code.co_code, code.co_names, code.co_varnames, code.co_freevars, constants))
        known = _digests[id(code)] = code, _digest(text)
    return known[1]


def _repr_of(constant: Any) -> str:
    return repr(sorted(map(repr, constant))) if isinstance(constant, frozenset) else repr(constant)


def _digest(text: str) -> str:
    return blake2b(text.encode(errors="surrogatepass"), digest_size=12).hexdigest()
