"""The private names of torch: one file has them, the installed torch has them, and a lack of one is told in words."""

from __future__ import annotations

import ast
import pkgutil
import re
import subprocess
import sys
import types
from functools import cache
from pathlib import Path

import pytest
import torch
from test_architecture import XLA_DOORS, Module, imports_of, modules
from torch import nn

from unisono import torch_private

PRIVATE_OF_XLA = re.compile("_XLAC|_xla_.*|_set_all_reduce_token")
PRIVATE_OF_OTHERS = {
    *("_fields", "_replace", "_make", "_value_", "_config", "_target", "_is_owned"),  # of Python
    *("_distributed", "_ex_iterable"),  # of HuggingFace's datasets
    *("_output_order", "_resume_shm"),  # of spdl, mosaicml-streaming
}


def is_private(name: object) -> bool:
    return isinstance(name, str) and name.startswith("_") and not name.startswith("__")


def has_private(path: str) -> bool:
    return any(map(is_private, path.split(".")))


@cache
def known_private() -> set[str]:
    """The private attributes of torch's most used objects, and those in the table."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    objects = [model, model.weight, model.weight.untyped_storage(), optimizer, torch.Generator()]
    objects += [torch.optim.lr_scheduler.StepLR(optimizer, 1), torch.utils.data.DataLoader([1])]
    names = {name for each in objects for name in dir(each)}
    return set(filter(is_private, names | {path.split(".")[-1] for path, _ in torch_private.NAMES.values()}))


@cache
def given_names(tree: ast.Module) -> set[str]:
    """What a module defines, and the attributes that it gives to its own objects."""
    found = set()
    changed = {id(node.target) for node in ast.walk(tree) if isinstance(node, ast.AugAssign)}
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                found.add(name)
            case ast.Attribute(value=ast.Name(id="self" | "cls"), ctx=ast.Store()) if id(node) not in changed:
                found.add(node.attr)
    return found


@cache
def own_names() -> set[str]:
    return {name for module in modules().values() for name in given_names(module.tree)}


def imported_paths(module: Module) -> dict[str, str]:
    """What each imported name stands for: a dotted path, of torch for a name in the table."""
    found = {}
    for node in ast.walk(module.tree):
        for each in node.names if isinstance(node, ast.Import | ast.ImportFrom) else ():
            if isinstance(node, ast.Import):
                found[each.asname or each.name.split(".")[0]] = each.name if each.asname else each.name.split(".")[0]
            elif node.module == torch_private.__name__ and each.name in torch_private.NAMES:
                found[each.asname or each.name] = torch_private.NAMES[each.name][0]
            else:
                found[each.asname or each.name] = f"{node.module}.{each.name}"
    return found


def path_of(node: ast.AST, paths: dict[str, str]) -> str:
    """The dotted path that an expression stands for, if it begins at an imported name; else nothing."""
    first, *rest = ast.unparse(node).split(".")
    return ".".join([paths[first], *rest]) if first in paths and all(map(str.isidentifier, rest)) else ""


def is_of_torch(node: ast.Attribute, module: Module, paths: dict[str, str]) -> bool:
    """Whether a private attribute belongs to an object of torch, or to one that no module of ours has given it to."""
    root = path_of(node.value, paths).split(".")[0]
    if root not in ("", "torch", "unisono") or node.attr in PRIVATE_OF_OTHERS:
        return root == "torch_xla" and module.name not in XLA_DOORS
    if module.name in XLA_DOORS and PRIVATE_OF_XLA.fullmatch(node.attr):
        return False
    given = given_names(module.tree)
    if ast.unparse(node.value) in ("self", "cls", "super()") and node.attr in given:
        return False
    return root == "torch" or node.attr in known_private() or node.attr not in own_names() | given


def private_names(module: Module) -> list[str]:
    """The places where a module names what is private in torch: imports, paths, attributes of any object, their names
    as texts, private arguments, and methods in the place of private ones."""
    if module.name == torch_private.__name__:
        return []
    paths, own = imported_paths(module), own_names() | given_names(module.tree) | PRIVATE_OF_OTHERS
    described = {id(node.value) for node in ast.walk(module.tree) if isinstance(node, ast.Expr)}
    found = [
        module.at(each.node, f"imports {each.target}.{each.name}")
        for each in imports_of(module)
        if each.target.split(".")[0] == "torch" and has_private(f"{each.target}.{each.name or ''}")
    ]
    for node in ast.walk(module.tree):
        match node:
            case ast.Attribute(attr=name) if is_private(name) and is_of_torch(node, module, paths):
                found.append(module.at(node, f"uses {ast.unparse(node)}"))
            case ast.Constant(value=str(text)) if id(node) not in described:
                is_path = re.fullmatch(r"torch(\.\w+)+", text) and has_private(text)
                if is_path or text in known_private():
                    found.append(module.at(node, f"has the text {text!r}"))
            case ast.Call(
                func=ast.Name(id="getattr" | "setattr" | "hasattr" | "delattr"), args=[_, ast.Constant(value=name), *_]
            ):
                if is_private(name) and name not in own:
                    found.append(module.at(node, f"has the text {name!r}"))
            case ast.Call(keywords=keywords) if path_of(node.func, paths).startswith("torch."):
                found += [module.at(node, f"passes {each.arg}") for each in keywords if is_private(each.arg)]
            case ast.ClassDef():
                bases = [path_of(base, paths) for base in node.bases]
                bases = [pkgutil.resolve_name(base) for base in bases if base.startswith("torch.")]
                for each in node.body:
                    name, marks = getattr(each, "name", ""), map(ast.unparse, getattr(each, "decorator_list", ()))
                    is_marked = any(mark.startswith("overrides(") for mark in marks)
                    if is_private(name) and not is_marked and any(hasattr(base, name) for base in bases):
                        found.append(module.at(each, f"overrides {name}"))
    return found


def test_no_other_module_names_what_is_private_in_torch():
    found = [place for module in modules().values() for place in private_names(module)]
    assert not found, "\n".join(found)


def test_the_installed_torch_has_each():
    absent = [name for name in torch_private.NAMES if getattr(torch_private, name) is None]
    assert {*absent} <= torch_private.INSTEAD.keys()


def test_each_name_is_used():
    used = {
        each.name
        for module in modules().values()
        for each in imports_of(module)
        if each.target == torch_private.__name__
    }
    assert torch_private.NAMES.keys() <= used
    assert torch_private.INSTEAD.keys() <= torch_private.NAMES.keys()


def test_the_names_for_processes_without_torch_are_those_of_torch():
    assert f"{torch.__name__}._dynamo" == torch_private.COMPILER_MODULE
    assert torch_private.loader_worker.__name__ == torch_private.LOADER_WORKER_MODULE
    for name in torch_private.WRAPPING_FRAMES:
        assert isinstance(getattr(nn.Module, name), types.FunctionType)


def run(code: str) -> str:
    command = [sys.executable, "-c", code]
    ran = subprocess.run(
        command, capture_output=True, text=True, timeout=60, cwd=Path(torch_private.__file__).parents[1]
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


WITHOUT = """
import importlib, pkgutil
import torch, torch.distributed, torch.utils.data
owner, _, name = {path!r}.rpartition(".")
delattr(pkgutil.resolve_name(owner), name)
try:
    importlib.import_module({module!r})
except ImportError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("current_graph_task_id", "unisono.training.claims"),
        pytest.param("BUILD_PARAMETERS", "unisono.training.strategies.ddp", marks=pytest.mark.slow),
    ],
    ids=["a function", "a method overridden"],
)
def test_without_it_the_feature_is_missing_and_the_error_says_why(name, module):
    path, purpose = torch_private.NAMES[name]
    said = run(WITHOUT.format(path=path, module=module))
    assert said.strip() == (
        f"torch {torch.__version__} has no {path}, a private name with which Unisono {purpose}; Unisono was tried with "
        f"torch {', '.join(torch_private.TRIED)}: install one of these, or a later Unisono"
    )


def test_the_names_cost_nothing_until_they_are_used():
    code = "import sys, unisono.torch_private, unisono.comm.stacks; print('torch' in sys.modules)"
    assert run(code).strip() == "False"
