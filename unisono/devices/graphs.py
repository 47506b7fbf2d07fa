"""What torch.compile leaves out of its graphs: the functions of this package, even those that torch itself calls."""

from __future__ import annotations

import sys
from functools import cache
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from unisono.torch_private import GRAPH_RULES


@cache
def keep_package_out_of_graphs() -> None:
    """Have torch.compile leave this package's functions out of its graphs, now or once the compiler is imported."""
    if GRAPH_RULES in sys.modules:
        _leave_out()
    else:
        sys.meta_path.insert(0, _Compiler())


def _leave_out() -> None:
    from unisono.torch_private import leave_out_of_graphs

    leave_out_of_graphs(__package__.partition(".")[0])  # with all of its rooms


class _Compiler(MetaPathFinder):
    """Waits for torch's compiler, whose import takes seconds that most scripts need not spend."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name != GRAPH_RULES:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        assert spec is not None, "the import would fail"
        assert spec.loader is not None, "it is a file"
        execute = spec.loader.exec_module

        def execute_and_add(module: ModuleType) -> None:
            execute(module)
            _leave_out()

        spec.loader.exec_module = execute_and_add  # type: ignore[method-assign]
        return spec
