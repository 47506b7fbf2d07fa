"""The house, checked over its syntax trees: floors, cycles, the two axes, and the doors to the outside.

Each rule is a function from one module to the places that break it, so that a rule can be shown to catch what it is
there for.
"""

from __future__ import annotations

import ast
import graphlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch

import unisono
from unisono import torch_private

ROOT = Path(unisono.__file__).parent

# A part is a module or a folder directly under the package. Imports go down only.
FLOORS = (
    "errors protocols tree strategies arguments torch_private",
    "devices comm",
    "world report batches",
    "loading training launch tracking",
    "accelerator building_blocks checkpoint engines functional threads",
    "cli compat",
    "__main__",
)
FLOOR = {"": 6} | {
    part: floor for floor, parts in enumerate(FLOORS) for part in parts.split()
}  # "": the package's names
STRANGERS = (1, 3)  # floors whose parts do not see one another
DOORS = ("unisono.strategies",)  # show other packages, on first use, what is above them

DEVICE_TYPE = re.compile(r"(cpu|cuda|mps|tpu|xla|xpu|npu|hpu)(:\d*)?")
DEVICE_MODULES = ("cuda", "mps", "tpu", "xla", "xpu", "npu", "hpu")  # as in `torch.cuda`; `tensor.cpu()` is no family
MIRRORS = (
    "unisono.compat.torch_xla",
    "unisono.compat.accelerate",
)  # have the modules, and read the variables, of others
GROUP_DOORS = ("unisono.training.strategies.", "unisono.devices.accelerator")
XLA_DOORS = ("unisono.devices.xla", "unisono.devices.xla_runtime", "unisono.comm.xla")
BLOCKS = "unisono.building_blocks"
OPEN = ("unisono", BLOCKS, "unisono.protocols", *(f"unisono.{name}" for name in unisono._MODULES))
"""What a package that builds on this one may import, and `compat` therefore, too."""
RECORD = "unisono.report.run"  # the record of a run, which those beside this package may read


@dataclass(frozen=True)
class Module:
    """One file: its dotted name and its syntax tree."""

    name: str
    tree: ast.Module

    @property
    def part(self) -> str:
        return self.name.split(".")[1] if "." in self.name else ""

    def at(self, node: ast.AST, what: str) -> str:
        return f"{self.name}:{getattr(node, 'lineno', 1)} {what}"


@dataclass(frozen=True)
class Import:
    """`from target import name`, or `import target`; a lazy one runs inside a function or for type checkers only."""

    target: str
    name: str | None
    is_lazy: bool
    node: ast.AST


def read_modules(root: Path) -> dict[str, Module]:
    found = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root.parent).with_suffix("").parts
        name = ".".join(part for part in parts if part != "__init__")
        found[name] = Module(name, ast.parse(path.read_text()))
    return found


@cache
def modules() -> dict[str, Module]:
    """Of the package; read by the first test that looks at them."""
    return read_modules(ROOT)


@cache
def imports_of(module: Module) -> tuple[Import, ...]:
    def visit(node: ast.AST, is_lazy: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from (Import(alias.name, None, is_lazy, child) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, module.at(child, "imports relatively; write the whole name")
                yield from (Import(child.module or "", alias.name, is_lazy, child) for alias in child.names)
            elif isinstance(child, ast.Call) and _callee(child).endswith("import_module") and child.args:
                yield Import(_text_at_the_start(child.args[0]).rstrip("."), None, True, child)
            is_for_types = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            is_body = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from visit(child, is_lazy or is_for_types or is_body)

    return tuple(visit(module.tree, False))


def own_imports(module: Module) -> Iterator[tuple[Import, str]]:
    """The imports of modules of this package, with the module that each comes from."""
    for each in imports_of(module):
        if each.target == "unisono" or each.target.startswith("unisono."):
            submodule = f"{each.target}.{each.name}"
            yield each, submodule if submodule in modules() else each.target


def _callee(call: ast.Call) -> str:
    return ast.unparse(call.func)


def _text_at_the_start(node: ast.AST | None) -> str:
    """The constant text that a string or an f-string begins with."""
    if isinstance(node, ast.JoinedStr) and node.values:
        node = node.values[0]
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _docstrings(tree: ast.Module) -> set[int]:
    bare = (node.value for node in ast.walk(tree) if isinstance(node, ast.Expr))
    return {id(value) for value in bare if isinstance(value, ast.Constant)}


# The rules.


def upward_imports(module: Module) -> list[str]:
    found = []
    floor = FLOOR[module.part]
    if module.part == "compat":  # stands on the names at the top, as other packages do: `private_imports`
        return []
    for each, target in own_imports(module):
        part = target.split(".")[1] if "." in target else ""
        if FLOOR[part] > floor and not (each.is_lazy and module.name in DOORS):
            found.append(module.at(each.node, f"imports {target}, which is above it"))
        if part != module.part and FLOOR[part] == floor and floor in STRANGERS:
            found.append(module.at(each.node, f"imports {target}, which is a stranger on its own floor"))
    return found


def private_imports(module: Module) -> list[str]:
    """What `compat` takes from inside the package, and any other package could not."""
    if module.part != "compat":
        return []
    found = [
        module.at(each.node, f"imports {target}, which is not public")
        for each, target in own_imports(module)
        if target not in OPEN and not f"{target}.".startswith("unisono.compat.")
    ]
    attributes = [node for node in ast.walk(module.tree) if isinstance(node, ast.Attribute)]
    return found + [
        module.at(node, f"uses {ast.unparse(node)}, which is not public")
        for node in attributes
        if ast.unparse(node.value) == "unisono" and node.attr not in {*unisono.__all__, *unisono._MODULES}
    ]


def borrowed_names(module: Module) -> list[str]:
    """Names taken from a package that does not define them itself."""
    found = []
    for each, target in own_imports(module):
        if module.part == "compat" and target in OPEN:  # which pass names on
            continue
        if each.name == "*" and module.name.startswith(MIRRORS):  # a mirror's module that has the names of several
            continue
        if each.name is not None and target == each.target and each.name not in _defined_in(modules()[target]):
            found.append(module.at(each.node, f"imports {each.name} from {target}, which only passes it on"))
    return found


def _defined_in(module: Module) -> set[str]:
    found = set()
    for node in module.tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
    return found | torch_private.NAMES.keys() if module.name == torch_private.__name__ else found


def named_devices(module: Module) -> list[str]:
    """A device type as a string or part of a name, outside `devices/`."""
    if module.part == "devices":
        return []
    documentation = _docstrings(module.tree)
    found = []
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
            if DEVICE_TYPE.fullmatch(node.value):
                found.append(module.at(node, f"names the device type {node.value!r}"))
        elif isinstance(node, ast.Attribute) and node.attr.removeprefix("is_") in DEVICE_MODULES:
            found.append(module.at(node, f"names a device family in {ast.unparse(node)}"))
    for each in imports_of(module):
        words = f"{each.target}.{each.name}".split(".")
        if words[0] == "torch" and set(words) & set(DEVICE_MODULES):
            found.append(module.at(each.node, f"imports {each.target}"))
    return found


def named_modes(module: Module) -> list[str]:
    """An execution mode, outside `comm/`, `launch/` and the world that joins one with a backend."""
    if module.part in ("comm", "launch", "world"):
        return []
    modes = {f"unisono.comm.{mode}" for mode in ("solo", "meeting", "threads", "processes")}
    return [module.at(each.node, f"imports {target}") for each, target in own_imports(module) if target in modes]


def process_groups(module: Module) -> list[str]:
    """torch.distributed, outside the worlds of processes, the room that joins its strategies, and the family that looks
    up which transport is a device type's."""
    if module.part in ("comm", "launch", "world") or module.name.startswith(GROUP_DOORS):
        return []
    found = [
        module.at(each.node, "imports torch.distributed")
        for each in imports_of(module)
        if f"{each.target}.{each.name}.".startswith("torch.distributed.")
    ]
    attributes = (node for node in ast.walk(module.tree) if isinstance(node, ast.Attribute))
    found += [
        module.at(node, "uses torch.distributed") for node in attributes if ast.unparse(node) == "torch.distributed"
    ]
    return found


def environment_reads(module: Module) -> list[str]:
    if module.part in ("launch", "devices", "world") or module.name.startswith(MIRRORS):
        return []
    doors = ("os.environ", "os.environb", "os.getenv", "os.putenv")
    attributes = (node for node in ast.walk(module.tree) if isinstance(node, ast.Attribute))
    found = [module.at(node, f"uses {ast.unparse(node)}") for node in attributes if ast.unparse(node) in doors]
    found += [
        module.at(each.node, f"imports os.{each.name}")
        for each in imports_of(module)
        if each.target == "os" and f"os.{each.name}" in doors
    ]
    return found


def careless_threads(module: Module) -> list[str]:
    """Threads without a name of ours, or whose body is no function of the module."""
    found = []
    functions = {node.name for node in module.tree.body if isinstance(node, ast.FunctionDef)}
    assigned: dict[str, ast.AST] = {}
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            assigned[node.targets[0].id] = node.value
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.Call):
            continue
        given: dict[str | None, ast.AST] = {keyword.arg: keyword.value for keyword in node.keywords}
        callee = _callee(node).split(".")[-1]
        if callee == "Timer":
            found.append(module.at(node, "starts a Timer, which has no name"))
        if callee not in ("Thread", "ThreadPoolExecutor"):
            continue
        name = given.get("name" if callee == "Thread" else "thread_name_prefix")
        if isinstance(name, ast.Name):
            name = assigned.get(name.id)
        if not _text_at_the_start(name).startswith("unisono-"):
            found.append(module.at(node, "starts a thread whose name does not begin with unisono-"))
        body = given.get("target")
        if callee == "Thread" and not (isinstance(body, ast.Name) and body.id in functions):
            found.append(module.at(node, "starts a thread whose body is no function of the module"))
    return found


def xla_imports(module: Module) -> list[str]:
    """torch_xla is to have a successor, which two files can then follow."""
    taken = [each for each in imports_of(module) if each.target.split(".")[0] == "torch_xla"]
    return [module.at(each.node, f"imports {each.target}") for each in taken if module.name not in XLA_DOORS]


def unsafe_interpreters(module: Module) -> list[str]:
    """Interpreters that look for modules in their working directory first, where others may have put some."""
    found = []
    for node in ast.walk(module.tree):
        words = [ast.unparse(each) for each in node.elts] if isinstance(node, ast.List | ast.Tuple) else []
        for before, word in zip(["", *words], words, strict=False):
            if word in ("'-c'", "'-m'") and before != "'-P'":
                found.append(module.at(node, "starts an interpreter without -P"))
    return found


def tensors_of_no_device(module: Module) -> list[str]:
    """Tensors that lie where `torch.set_default_device` or `with torch.device(...)` of the program has them."""
    made = {f"torch.{each.__name__}" for each in torch.utils._device._device_constructors()}
    return [
        module.at(node, f"calls {_callee(node)} without a device")
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call) and _callee(node) in made and "device" not in {each.arg for each in node.keywords}
    ]


def unpromised_imports(module: Module) -> list[str]:
    """For packages beside this one: names that are neither public nor building blocks."""
    found = []
    for each in (one for one in imports_of(module) if one.target.split(".")[0] == "unisono"):
        names = {"unisono": [*unisono.__all__, *unisono._MODULES]}.get(each.target)
        is_open = f"{each.target}.".startswith(tuple(f"{one}." for one in (*OPEN[1:], RECORD)))
        if (each.name or "").startswith("_") or not (is_open if names is None else each.name in names):
            found.append(module.at(each.node, f"imports {each.target}.{each.name or '*'}, which may change"))
    return found


def undocumented_modules(module: Module) -> list[str]:
    return [] if ast.get_docstring(module.tree) else [f"{module.name} does not say what it is for"]


RULES: dict[str, Callable[[Module], list[str]]] = {
    "imports go down only": upward_imports,
    "compat imports public names, and the building blocks": private_imports,
    "names come from the module that defines them": borrowed_names,
    "only devices names device types": named_devices,
    "only comm and launch name execution modes": named_modes,
    "only comm, launch and world know process groups": process_groups,
    "only launch, devices and world read the environment": environment_reads,
    "only its backend and its communicator know torch_xla": xla_imports,
    "threads have our names and module functions as bodies": careless_threads,
    "no interpreter imports from its working directory": unsafe_interpreters,
    "tensors are made on a named device": tensors_of_no_device,
    "every module says what it is for": undocumented_modules,
}


@pytest.mark.parametrize("rule", RULES)
def test_the_house_keeps_its_rule_that(rule):
    broken = [place for module in modules().values() for place in RULES[rule](module)]
    assert not broken, "\n".join([rule, *broken])


def test_packages_beside_this_one_import_public_names_and_building_blocks():
    beside = [read_modules(folder) for folder in (ROOT.parent / "contrib").glob("*/unisono_*/")]
    assert beside
    assert [
        place
        for each in beside
        for module in each.values()
        for place in (*unpromised_imports(module), *undocumented_modules(module))
    ] == []


@pytest.mark.parametrize(
    "source",
    [
        "import unisono",
        "from unisono import training",
        "def f():\n    from unisono.training.steps import Steps",
        "from unisono.strategies import _HOMES",
        "import_module('unisono.training.gradients')",
    ],
)
def test_what_is_not_public_is_noticed_there(source):
    assert unpromised_imports(Module("unisono_diloco.engine", ast.parse(source)))


def test_every_part_has_a_floor():
    assert {module.part for module in modules().values()} <= FLOOR.keys()


def test_modules_import_one_another_in_no_circle():
    graph = {
        name: {target for each, target in own_imports(module) if not each.is_lazy} for name, module in modules().items()
    }
    graphlib.TopologicalSorter(graph).prepare()  # CycleError shows the circle


# Each rule catches what it is there for.

CULPRITS: dict[str, list[tuple[str, str]]] = {
    "imports go down only": [
        ("unisono.tree", "from unisono.devices import get_backend"),
        ("unisono.comm.threads", "def f():\n    from unisono.world import World"),
        ("unisono.training.optimizer", "from unisono.loading.channel import Channel"),
        ("unisono.tree", "import_module('unisono.launch.spawn')"),
        ("unisono.tree", "if TYPE_CHECKING:\n    from unisono.world import World"),
        ("unisono.world", "from unisono import spawn"),
    ],
    "compat imports public names, and the building blocks": [
        ("unisono.compat.precision", "from unisono.tree import tree_map"),
        ("unisono.compat.accelerate.state", "def f():\n    from unisono.world import World"),
        ("unisono.compat.torch_xla.runtime", "import unisono.devices.xla"),
        ("unisono.compat.torch_xla.runtime", "import unisono\nunisono.world.solo_world()"),
        ("unisono.compat.torch_xla.runtime", "from unisono import world"),
        ("unisono.compat.placement", "import_module('unisono.torch_private')"),
    ],
    "names come from the module that defines them": [
        ("unisono.world", "from unisono.devices import torch"),
        ("unisono.world", "from unisono.building_blocks import tree_map"),
        ("unisono.compat.precision", "from unisono.compat.placement import tensors"),
    ],
    "only devices names device types": [
        ("unisono.world", "device = torch.device('cuda')"),
        ("unisono.world", "f'cuda:{index}'"),
        ("unisono.world", "torch.cuda.synchronize()"),
        ("unisono.world", "tensor.is_cuda"),
        ("unisono.world", "from torch.cuda import Stream"),
        ("unisono.world", "from torch import mps"),
    ],
    "only comm and launch name execution modes": [
        ("unisono.training.optimizer", "from unisono.comm.threads import ThreadCommunicator"),
        ("unisono.training.optimizer", "from unisono.comm import processes"),
    ],
    "only comm, launch and world know process groups": [
        ("unisono.training.optimizer", "import torch.distributed as dist"),
        ("unisono.training.optimizer", "from torch import distributed"),
        ("unisono.training.optimizer", "torch.distributed.barrier()"),
    ],
    "only launch, devices and world read the environment": [
        ("unisono.report.text", "os.environ.get('HOME')"),
        ("unisono.report.text", "from os import environ"),
    ],
    "only its backend and its communicator know torch_xla": [
        ("unisono.devices.cuda", "def f():\n    from torch_xla.core import xla_model")
    ],
    "threads have our names and module functions as bodies": [
        ("unisono.loading.pipeline", "def body(): ...\nThread(target=body)"),
        ("unisono.loading.pipeline", "def body(): ...\nthreading.Thread(target=body, name='reader')"),
        ("unisono.loading.pipeline", "threading.Thread(target=self.body, name='unisono-reader')"),
        ("unisono.loading.pipeline", "threading.Timer(1, body)"),
        ("unisono.loading.pipeline", "ThreadPoolExecutor(2)"),
    ],
    "no interpreter imports from its working directory": [
        ("unisono.launch.spawn", "[sys.executable, '-c', code]"),
        ("unisono.launch.spawn", "program = ('-m', 'unisono.engines.machine')"),
    ],
    "tensors are made on a named device": [("unisono.world", "torch.zeros(1, dtype=torch.int64)")],
    "every module says what it is for": [("unisono.tree", "import torch")],
}


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_catches_what_breaks_it(rule):
    for name, source in CULPRITS[rule]:
        assert RULES[rule](Module(name, ast.parse(source))), f"not caught: {source}"
