"""Compares the caller's imported modules with those of a worker, which imports them itself.

Modules are pickled by name. So workers lack what a caller has changed in a module since its import (`config.LR = 0.5`),
and see different contents of a file that was edited meanwhile. Rank zero compares the modules that it has imported for
`fn` with the caller's, and reports each that differs once. Only the user's modules are compared, not installed ones; of
their globals, plain data and functions, except for names that begin with an underscore.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.machinery import SourceFileLoader
from types import CodeType, FunctionType, ModuleType
from typing import Any
from zlib import crc32

_INSTALLED = tuple(
    {each + os.sep for path in sysconfig.get_paths().values() for each in (path, os.path.realpath(path))}
)
_NOT_USERS = (__name__.partition(".")[0], "__main__", "__mp_main__", "torch")  # the last one has most of all modules
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_MAX_ITEMS = 1000  # of a container: larger ones are not compared
_SHOWN, _WIDTH = 5, 60  # globals in one message, and characters of each value


def describe_modules() -> dict[str, dict[str, str]]:
    """The globals of the user's modules that this process has imported, as texts, by the module's name."""
    described = {}
    for name, module in list(sys.modules.items()):  # copied: other threads may import meanwhile
        if name.partition(".")[0] in _NOT_USERS:
            continue
        # A lazy module gets its names when they are used, and one with another kind of loader (such as pytest's) may
        # have been loaded from a changed source: both differ between processes.
        if type(module) is not ModuleType or type(vars(module).get("__loader__")) is not SourceFileLoader:
            continue
        space, file = vars(module), str(module.__file__)
        is_installed = file.startswith(_INSTALLED) or "site-packages" in file or "dist-packages" in file
        if module.__name__ == name and file.startswith(os.sep) and not is_installed and "__getattr__" not in space:
            described[name] = describe_module(module)
    return described


def describe_module(module: ModuleType) -> dict[str, str]:
    """Texts of a module's globals, which are equal in two processes if what is described is."""
    texts = {}
    for name, value in list(vars(module).items()):
        if not name.startswith("_"):
            with suppress(TypeError):
                texts[name] = _text_of(value)
    return texts


def compare_modules(theirs: Mapping[str, Mapping[str, str]], report: Callable[[str], None]) -> None:
    """Report each module of this process that differs from the caller's."""
    for name, texts in theirs.items():
        ours = describe_module(sys.modules[name]) if name in sys.modules else texts
        changed = [
            f"{name}.{each} is {text:.{_WIDTH}} in the calling process, and {ours.get(each, 'missing'):.{_WIDTH}} in "
            "workers"
            for each, text in texts.items()
            if ours.get(each) != text
        ]
        if changed:
            more = ["..."] if len(changed) > _SHOWN else []
            report(
                f"{'; '.join(changed[:_SHOWN] + more)}: workers import {name} themselves. Pass values to fn, or set "
                "them in fn; if the file was edited, reload the module in the calling process, or start that again"
            )


def _text_of(value: Any) -> str:
    """The text of plain data or of a function; TypeError for anything else, which is not asked for it: that may import
    a library."""
    kind = type(value)
    if kind in _PLAIN:
        return repr(value)
    if kind is FunctionType:
        return f"code {crc32(_text_of_code(value.__code__).encode(errors='surrogatepass')):x}"
    if kind not in (dict, list, tuple, set, frozenset) or len(value) > _MAX_ITEMS:
        raise TypeError(f"{kind} is no plain data, or there is too much of it")
    if kind is dict:
        return "{" + ", ".join(f"{_text_of(key)}: {_text_of(each)}" for key, each in value.items()) + "}"
    texts = [_text_of(each) for each in value]
    return f"[{', '.join(texts)}]" if kind in (list, tuple) else f"{{{', '.join(sorted(texts))}}}"


def _text_of_code(constant: Any) -> str:
    """What a function does, wherever it is in its file."""
    if isinstance(constant, CodeType):
        names = constant.co_names, constant.co_varnames, constant.co_freevars
        return repr((constant.co_code, names, [*map(_text_of_code, constant.co_consts)]))
    # The order of a frozenset depends on the process's hash seed.
    return repr(sorted(map(repr, constant))) if isinstance(constant, frozenset) else repr(constant)
