"""Compares the caller's imported modules with those of a worker, which imports them itself.

Modules are pickled by name. So what a caller has changed in a module since its import (`config.LR = 0.5`) is missing in
its workers, and a file that was edited meanwhile has different contents there. Neither can be detected from one side,
so the caller describes its modules, and rank zero compares each of its own with that once it is imported. Differences
are reported; modules listed in `spawn(..., carry=[config])` are copied over.

Only the user's modules are compared, not installed ones; of their globals, plain data, objects of plain data, functions
and classes, except for names that begin with an underscore.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import cache
from hashlib import blake2b
from pathlib import Path, PurePath
from types import CodeType, FunctionType, ModuleType
from typing import Any

from unisono.launch.unpicklable import is_picklable

_INSTALLED = tuple(
    {each + os.sep for path in sysconfig.get_paths().values() for each in (path, os.path.realpath(path))}
)
_PACKAGES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_OURS = __name__.partition(".")[0]
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_MAX_ITEMS = 10_000  # the most items of plain data to visit in one global
_MAX_DEPTH = 5
_SHOWN = 5  # names in one message
_WIDTH = 60  # the longest text of a value in it
_digests: dict[int, tuple[CodeType, str]] = {}  # by the code's id; holding the code keeps its id from being reused


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
    # Copied: other threads may import meanwhile.
    modules = [(name, module) for name, module in list(sys.modules.items()) if _is_users(name, module)]
    return {name: describe_module(module) for name, module in modules}


def describe_module(module: ModuleType) -> ModuleFacts:
    values, codes = {}, {}
    # A lazy module gets its names when they are used, in each process others.
    is_lazy = type(module) is not ModuleType or "__getattr__" in vars(module)
    # Another kind of loader (such as pytest's) changes the source that it loads, in this process only.
    has_own_text = type(getattr(module, "__loader__", None)) is importlib.machinery.SourceFileLoader
    for name, value in list(vars(module).items()):
        kind = type(value)  # `isinstance` would ask a proxy for its object's class
        if name.startswith("_") or issubclass(kind, ModuleType):
            continue
        if issubclass(kind, FunctionType | type):
            # Imported from another module, which is compared itself: here only its name counts.
            if value.__module__ != module.__name__:
                if not is_lazy:
                    values[name] = f"{value.__module__}.{value.__qualname__}"
            elif has_own_text:
                codes[name] = _digest_of(value)
            continue
        with suppress(Exception):  # `_NotPlainError`, and whatever a proxy raises for its attributes
            values[name] = _text_of(value, [_MAX_ITEMS], _MAX_DEPTH)
    return ModuleFacts(values, codes)


def compare_modules(theirs: Mapping[str, ModuleFacts], report: Callable[[str], None]) -> None:
    """Report how this process's modules differ from the caller's: those already imported now, others once imported."""
    waiting = set()
    for name, facts in theirs.items():
        if (module := sys.modules.get(name)) is not None:
            _compare(name, facts, describe_module(module), report)
        else:
            waiting.add(name)
    if waiting:
        sys.meta_path.insert(0, _Comparing({name: theirs[name] for name in waiting}, report))


def check_carried(modules: Iterable[ModuleType]) -> list[ModuleType]:
    """Check the modules of `spawn(carry=...)`."""
    if isinstance(modules, str | bytes | ModuleType) or not isinstance(modules, Iterable):
        raise TypeError(f"carry={modules!r} is of type {type(modules).__name__}; pass modules, as in [config]")
    found = list(modules)
    for each in found:
        if not isinstance(each, ModuleType):
            raise TypeError(f"carry has {each!r}, a {type(each).__name__}; pass modules, as in [config]")
        if sys.modules.get(each.__name__) is not each or each.__name__ == "__main__":
            raise ValueError(f"carry has {each.__name__!r}, which workers cannot import; pass what is needed to fn")
    return found


def globals_of(module: ModuleType) -> dict[str, Any]:
    """Those of its globals that can be pickled."""
    return {name: each for name, each in vars(module).items() if not name.startswith("__") and is_picklable(each)}


def adopt_globals(carried: Mapping[str, Mapping[str, Any]]) -> None:
    """Set the modules' globals to the caller's values."""
    for name, values in carried.items():
        vars(importlib.import_module(name)).update(values)


class _Comparing:
    """A finder for `sys.meta_path` that has a module compared as soon as it is imported."""

    def __init__(self, waiting: dict[str, ModuleFacts], report: Callable[[str], None]) -> None:
        self._waiting = waiting
        self._report = report

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        # removed first, so that the find_spec call below goes to the other finders
        facts = self._waiting.pop(name, None)
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
            f"{'; '.join(shown)}{more}: workers import {name} themselves. Pass the values to fn, or spawn(..., "
            f"carry=[{name}]), which sends the module's globals"
        )
    edited = sorted(each for each, digest in theirs.codes.items() if ours.codes.get(each) != digest)
    if edited:
        report(
            f"the source of {name} that workers import differs from the one that the calling process runs (it differs "
            f"in {', '.join(edited[:_SHOWN])}): reload it there, or start that process again"
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
    """Whether a file is part of the program rather than of an installed package."""
    if not os.path.isabs(file) or file.startswith(_INSTALLED) or any(each in file for each in _PACKAGES):
        return False
    return not any(
        file.startswith(each + os.sep) and _holds_packages(each) for each in sys.path if isinstance(each, str) and each
    )


@cache
def _holds_packages(directory: str) -> bool:
    """Whether pip has installed packages there (`pip install --target`)."""
    return next(Path(directory).glob("*.dist-info"), None) is not None


def _text_of(value: Any, left: list[int], depth: int) -> str:
    """A text that is equal in two processes if the value is; `left` counts the items that may still be visited.

    The values' own methods are not called: those of a lazy mapping may import a whole library.
    """
    kind = type(value)
    left[0] -= 1
    if left[0] < 0 or depth < 0:
        raise _NotPlainError
    if kind in _PLAIN or issubclass(kind, PurePath):
        return repr(value)
    if issubclass(kind, dict):
        items = [(_text_of(key, left, depth - 1), _text_of(each, left, depth - 1)) for key, each in dict.items(value)]
        return "{" + ", ".join(f"{key}: {each}" for key, each in items) + "}"
    if kind in (list, tuple):
        return "[" + ", ".join(_text_of(each, left, depth - 1) for each in value) + "]"
    if kind in (set, frozenset):
        return "{" + ", ".join(sorted(_text_of(each, left, depth - 1) for each in value)) + "}"
    if issubclass(kind, Enum):  # whose members also hold what Python has computed of them
        return f"{kind.__qualname__}({_text_of(value._value_, left, depth - 1)})"
    held = getattr(value, "__dict__", None)
    if not isinstance(held, dict) or not held or issubclass(kind, type):
        raise _NotPlainError
    inner = ", ".join(f"{name}={_text_of(each, left, depth - 1)}" for name, each in held.items())
    return f"{kind.__qualname__}({inner})"


def _digest_of(value: FunctionType | type) -> str:
    if isinstance(value, FunctionType):
        return _digest_of_code(value.__code__)
    parts = [f"{name}:{_digest_of(each)}" for name, each in vars(value).items() if isinstance(each, FunctionType)]
    return _digest("".join(parts))


def _digest_of_code(code: CodeType) -> str:
    """A digest of what the code does, independent of its position in the file."""
    known = _digests.get(id(code))
    if known is None:
        constants = [_digest_of_code(each) if isinstance(each, CodeType) else _repr_of(each) for each in code.co_consts]
        text = repr((code.co_code, code.co_names, code.co_varnames, code.co_freevars, constants))
        known = _digests[id(code)] = code, _digest(text)
    return known[1]


def _repr_of(constant: Any) -> str:
    # The order of a frozenset depends on the process's hash seed.
    return repr(sorted(map(repr, constant))) if isinstance(constant, frozenset) else repr(constant)


def _digest(text: str) -> str:
    return blake2b(text.encode(errors="surrogatepass"), digest_size=12).hexdigest()
