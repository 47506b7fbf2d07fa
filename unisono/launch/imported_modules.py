"""Compares the caller's imported modules with those of a worker, which imports them itself.

Modules are pickled by name. So what a caller has changed in a module since its import (`config.LR = 0.5`) is missing in
its workers, and a file that was edited meanwhile has different contents there. Neither can be detected from one side,
so the caller describes its modules, and rank zero compares those that it has imported for `fn` with that. Each module
that differs is reported once.

Only the user's modules are compared, not installed ones; of their globals, plain data, objects of plain data, functions
and classes, except for names that begin with an underscore.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Callable, Mapping
from contextlib import suppress
from enum import Enum
from functools import cache
from hashlib import blake2b
from importlib.machinery import SourceFileLoader
from pathlib import PurePath
from types import CodeType, FunctionType, ModuleType
from typing import Any

_INSTALLED = tuple(
    {each + os.sep for path in sysconfig.get_paths().values() for each in (path, os.path.realpath(path))}
)
_PACKAGES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_OURS = __name__.partition(".")[0]
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_MAX_ITEMS = 10_000  # the most items of plain data to visit in one global
_SHOWN = 5  # names in one message
_WIDTH = 60  # the longest text of a value in it


def describe_modules() -> dict[str, dict[str, str]]:
    """The globals of the user's modules that this process has imported, as texts, by the module's name."""
    modules = list(sys.modules.items())  # copied: other threads may import meanwhile
    return {name: describe_module(module) for name, module in modules if _is_users(name, module)}


def describe_module(module: ModuleType) -> dict[str, str]:
    """Texts of a module's globals, which are equal in two processes if what is described is."""
    texts = {}
    for name, value in list(vars(module).items()):
        kind = type(value)  # `isinstance` would ask a proxy for its object's class
        if name.startswith("_") or issubclass(kind, ModuleType):
            continue
        with suppress(Exception):  # TypeError for other than plain data, and whatever a proxy raises for its attributes
            if not issubclass(kind, FunctionType | type):
                texts[name] = _text_of(value, [_MAX_ITEMS])
            elif value.__module__ == module.__name__:
                texts[name] = f"code {_digest_of(value)}"
            else:  # imported from another module, which is compared itself: here only its name counts
                texts[name] = f"{value.__module__}.{value.__qualname__}"
    return texts


def compare_modules(theirs: Mapping[str, Mapping[str, str]], report: Callable[[str], None]) -> None:
    """Report each module of this process that differs from the caller's."""
    for name, texts in theirs.items():
        ours = describe_module(sys.modules[name]) if name in sys.modules else texts
        changed = [each for each, text in texts.items() if ours.get(each) != text]
        shown = "; ".join(
            f"{name}.{each} is {texts[each]:.{_WIDTH}} in the calling process, and "
            f"{ours.get(each, 'missing'):.{_WIDTH}} in workers"
            for each in changed[:_SHOWN]
        )
        more = f"; {len(changed) - _SHOWN} further globals of it differ" if len(changed) > _SHOWN else ""
        if changed:
            report(
                f"{shown}{more}: workers import {name} themselves. Pass values to fn, or set them in fn; if the file "
                "was edited, reload the module in the calling process, or start that again"
            )


def _is_users(name: str, module: object) -> bool:
    # A lazy module gets its names when they are used, and one with another kind of loader (such as pytest's) may have
    # been loaded from a changed source: both differ between processes.
    if type(module) is not ModuleType or "__getattr__" in vars(module):
        return False
    file = getattr(module, "__file__", None)
    is_own_name = module.__name__ == name and name.partition(".")[0] not in (_OURS, "__main__", "__mp_main__")
    return is_own_name and type(module.__loader__) is SourceFileLoader and is_users_file(str(file))


@cache
def is_users_file(file: str) -> bool:
    """Whether a file is part of the program rather than of an installed package."""
    return os.path.isabs(file) and not file.startswith(_INSTALLED) and not any(each in file for each in _PACKAGES)


def _text_of(value: Any, left: list[int]) -> str:
    """The text of plain data; `left` counts the items that may still be visited.

    The values' own methods are not called: those of a lazy mapping may import a whole library.

    Raises:
        TypeError: it is, or holds, other than plain data, or too much of it.
    """
    kind = type(value)
    left[0] -= 1
    if left[0] < 0 or issubclass(kind, type | Enum):  # members of an Enum also hold what Python has computed of them
        raise TypeError(f"{kind} is no plain data, or there is too much of it")
    if kind in _PLAIN or issubclass(kind, PurePath):
        return repr(value)
    if issubclass(kind, dict):
        items = dict.items(value)
        return "{" + ", ".join(f"{_text_of(key, left)}: {_text_of(each, left)}" for key, each in items) + "}"
    if kind in (list, tuple, set, frozenset):
        texts = [_text_of(each, left) for each in value]
        return f"[{', '.join(texts)}]" if kind in (list, tuple) else f"{{{', '.join(sorted(texts))}}}"
    held = getattr(value, "__dict__", None)
    if not isinstance(held, dict) or not held:
        raise TypeError(f"{kind} is no plain data")
    return f"{kind.__qualname__}({', '.join(f'{name}={_text_of(each, left)}' for name, each in held.items())})"


def _digest_of(value: FunctionType | type) -> str:
    """A digest of what a function or the methods of a class do, independent of the position in the file."""
    functions = [value] if isinstance(value, FunctionType) else vars(value).values()
    texts = [_text_of_constant(each.__code__) for each in functions if isinstance(each, FunctionType)]
    return blake2b("".join(texts).encode(errors="surrogatepass"), digest_size=4).hexdigest()


def _text_of_constant(constant: Any) -> str:
    if isinstance(constant, CodeType):
        names = constant.co_names, constant.co_varnames, constant.co_freevars
        return repr((constant.co_code, names, [*map(_text_of_constant, constant.co_consts)]))
    # The order of a frozenset depends on the process's hash seed.
    return repr(sorted(map(repr, constant))) if isinstance(constant, frozenset) else repr(constant)
