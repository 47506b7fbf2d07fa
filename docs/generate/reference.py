"""The reference: a Markdown page for each group of public names, made from signatures and docstrings.

`pages()` is all there is to call; `docs/generate/site.py` puts the pages into the site, and `tests/test_reference.py`
holds them to the package: every public name, every argument.

A docstring has text, then sections: "Args:", "Attributes:", "Returns:", "Yields:", "Raises:". An entry of a section
may name several things at once ("low, high: the bounds"); deeper lines continue it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from types import ModuleType
from typing import Any

import unisono

GROUPS: dict[str, list[str]] = {
    "Training": [
        "Accelerator",
        "Virtual",
        "find_executable_batch_size",
        "should_stop",
        "backward",
        "optimizer_step",
        "broadcast_parameters",
        "check_replicas",
    ],
    "Launching": ["spawn", "Output", "Cores", "ProcessContext", "join_world", "warm"],
    "Loading": ["DeviceLoader", "ParallelLoader", "DeviceIterator", "IndexedSampler", "SampleGenerator"],
    "Threads": ["DataParallel", "ReplicaContext"],
    "Ranks and collectives": [
        "rank",
        "world_size",
        "local_rank",
        "is_rank_zero",
        "all_reduce",
        "all_gather",
        "all_gather_samples",
        "all_gather_object",
        "broadcast",
        "barrier",
        "World",
        "current_world",
        "use_world",
        "available_devices",
    ],
    "Saving": ["Checkpointer"],
    "Reports, progress and trackers": [
        "Mean",
        "Accuracy",
        "gather_report",
        "Report",
        "phase",
        "tqdm",
        "Tracker",
    ],
}
"""The names of the package itself, by the page that each is on."""

TASKS: dict[str, dict[str, list[str]]] = {
    "unisono.Accelerator": {
        "prepare": ["prepare", "unwrap_model", "free_memory"],
        "train": [
            "backward",
            "autocast",
            "accumulate",
            "gradient_accumulation_steps",
            "sync_gradients",
            "no_sync",
            "trigger_sync_in_backward",
            "optimizer_step_was_skipped",
        ],
        "clip": ["clip_grad_norm_", "clip_grad_value_", "unscale_gradients"],
        "evaluate": ["gather_for_metrics", "gather", "reduce", "pad_across_processes", "split_between_processes"],
        "save, resume": [
            "save_state",
            "load_state",
            "register_for_checkpointing",
            "rewind",
            "save_model",
            "state_dict",
            "load_state_dict",
            "register_save_state_pre_hook",
            "register_load_state_pre_hook",
            "digest",
        ],
        "log": ["print", "init_trackers", "log", "trackers", "get_tracker", "end_training"],
        "ask for the rank": [
            "is_main_process",
            "is_local_main_process",
            "process_index",
            "local_process_index",
            "num_processes",
        ],
        "act in turn": [
            "wait_for_everyone",
            "on_main_process",
            "main_process_first",
            "local_main_process_first",
            "set_trigger",
            "check_trigger",
        ],
    }
}
"""The members of classes with many of them, by what they are for: a table that the class begins with."""

FROM_ELSEWHERE = {"DeviceIterator", "ProcessContext", "Report", "World"}
"""Classes whose objects users get, and do not make: their signatures say nothing to them."""

SECTIONS = ("Args", "Attributes", "Returns", "Yields", "Raises")
WIDTH = 100

_ENTRY = re.compile(r"(?P<names>[\w*.]+(?:, [\w*.]+)*)(?: \([^)]*\))?: (?P<text>.*)", re.DOTALL)


@dataclass
class Docstring:
    """A docstring, taken apart.

    Attributes:
        text: what comes before the first section, and paragraphs between sections; Markdown.
        entries: by section, pairs of names and text; a section without names ("Returns:") has one pair, without.
    """

    text: str
    entries: dict[str, list[tuple[str, str]]] = field(default_factory=dict)

    def described(self, section: str) -> set[str]:
        """The single names that a section has entries for."""
        pairs = self.entries.get(section, [])
        return {name.lstrip("*") for names, _ in pairs for name in names.split(", ")}


def parse(docstring: str | None) -> Docstring:
    """Take a docstring apart."""
    lines = inspect.cleandoc(docstring or "").splitlines()
    text: list[str] = []
    sections: dict[str, list[str]] = {}
    current: str | None = None
    for line in lines:
        if line.rstrip(":") in SECTIONS and line.endswith(":"):
            current = line.rstrip(":")
            sections.setdefault(current, [])
        elif current is not None and (line.startswith("    ") or not line):
            sections[current].append(line[4:])
        else:
            current = None
            text.append(line)
    return Docstring("\n".join(text).strip(), {name: list(_entries(body)) for name, body in sections.items()})


def _entries(lines: list[str]) -> Iterator[tuple[str, str]]:
    """An entry begins at the margin; lines that are deeper belong to it. Text without a name is an entry of its own."""
    whole = inspect.cleandoc("\n".join(lines))
    for block in re.split(r"\n(?=\S)", whole) if _ENTRY.match(whole) else [whole]:
        joined = re.sub(r"\s*\n\s*", " ", block).strip()
        found = _ENTRY.fullmatch(joined)
        yield (found["names"], found["text"]) if found else ("", joined)


def modules() -> list[ModuleType]:
    """The modules that have public names of their own."""
    return [import_module(f"unisono.{name}") for name in unisono._MODULES]


def names_of(module: ModuleType) -> list[str]:
    """The functions and classes that a module defines, or a package re-exports, in their order."""
    home = module.__name__
    return [
        name
        for name, value in vars(module).items()
        if (inspect.isclass(value) or inspect.isfunction(value)) and not name.startswith("_")
        if value.__module__ == home or (hasattr(module, "__path__") and value.__module__.startswith("unisono."))
    ]


def pages() -> dict[str, str]:
    """The Markdown of each page, by file name."""
    made = {_file_of(title): _page_of_group(title, names) for title, names in GROUPS.items()}
    made |= {f"{module.__name__}.md": _page_of_module(module) for module in modules()}
    return {"index.md": _index(), **made}


def titles() -> dict[str, str]:
    """The title of each page, by file name, in the order of the navigation."""
    found = {"index.md": "All names", **{_file_of(title): title for title in GROUPS}}
    return found | {f"{module.__name__}.md": module.__name__ for module in modules()}


def _file_of(title: str) -> str:
    return title.lower().replace(",", "").replace(" ", "_") + ".md"


def _index() -> str:
    rows = []
    for title, names in GROUPS.items():
        rows += [(f"unisono.{name}", _file_of(title), getattr(unisono, name)) for name in names]
    for module in modules():
        prefix = module.__name__
        rows += [(f"{prefix}.{name}", f"{prefix}.md", getattr(module, name)) for name in names_of(module)]
    lines = [f"| [`{name}`]({file}#{name}) | {_first_sentence(value)} |" for name, file, value in rows]
    table = "\n".join(["| name | |", "|---|---|", *lines])
    return f"# Reference\n\nMade from the docstrings of version {unisono.__version__}.\n\n{table}\n"


def _first_sentence(value: Any) -> str:
    text = parse(_doc_of(value)).text.partition("\n\n")[0]
    return re.split(r"(?<=\.)\s", text.replace("\n", " ") + " ")[0].strip().rstrip(":").replace("|", "\\|")


def _page_of_group(title: str, names: list[str]) -> str:
    parts = [_render(f"unisono.{name}", getattr(unisono, name)) for name in names]
    return _linked("\n".join([f"# {title}\n", *parts]))


def _page_of_module(module: ModuleType) -> str:
    name = module.__name__
    parts = [_render(f"{name}.{each}", getattr(module, each)) for each in names_of(module)]
    return _linked("\n".join([f"# {name}\n", _markdown(inspect.cleandoc(module.__doc__ or "")), "", *parts]))


def _render(name: str, value: Any) -> str:
    """A public name: its signature, its text, its sections, and its members, where it is a class."""
    lines = [f"## {name} {{ #{name} }}", ""]
    if name in TASKS:
        lines += [_table_of_members(name, value), ""]
    if name.rpartition(".")[2] not in FROM_ELSEWHERE:
        lines += [_signature(name, value), ""]
    lines.append(_body(parse(_doc_of(value))))
    if inspect.isclass(value):
        lines += [_render_member(name, each, member) for each, member in members_of(value)]
    return "\n".join(lines) + "\n"


def _table_of_members(owner: str, kind: type) -> str:
    members = dict(members_of(kind))
    rows = ["| to | call | |", "|---|---|---|"]
    for task, names in TASKS[owner].items():
        for name in names:
            text = _first_sentence(_function(members[name]))
            rows.append(f"| {task if name == names[0] else ''} | [`{name}`](#{owner}.{name}) | {text} |")
    return "\n".join(rows)


def _render_member(owner: str, name: str, member: Any) -> str:
    whole = f"{owner}.{name}"
    is_property = isinstance(member, property)
    found = parse(_doc_of(member.fget if isinstance(member, property) else member))
    head = "*property*" if is_property else _signature(whole, _function(member), is_method=True)
    return f"### {name} {{ #{whole} }}\n\n{head}\n\n{_body(found)}\n"


def members_of(kind: type) -> list[tuple[str, Any]]:
    """The public methods and properties of a class that this package documents, those of its bases included."""
    found: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        if base.__module__.startswith("unisono"):
            for name, value in vars(base).items():
                is_member = isinstance(value, property | classmethod | staticmethod) or inspect.isfunction(value)
                if is_member and not name.startswith("_"):
                    found[name] = value
    return [(name, value) for name, value in found.items() if _doc_of(_function(value))]


def _function(member: Any) -> Any:
    if isinstance(member, property):
        return member.fget
    return getattr(member, "__func__", member)


def _doc_of(value: Any) -> str | None:
    """Its docstring, unless Python has made it: that of a dataclass which has none is its signature."""
    doc: str | None = getattr(value, "__doc__", None)
    return None if doc and inspect.isclass(value) and doc.startswith(f"{value.__name__}(") else doc


def _signature(name: str, value: Callable[..., Any], is_method: bool = False) -> str:
    last = name.rpartition(".")[2]
    try:
        signature = inspect.signature(value)
    except ValueError:  # a class of C's
        return f"```python\n{last}(...)\n```"
    parameters = list(signature.parameters.values())
    if is_method and parameters and parameters[0].name in ("self", "cls"):
        parameters = parameters[1:]
    texts = []
    is_keyword_only = False
    for index, each in enumerate(parameters):
        if each.kind is each.KEYWORD_ONLY and not is_keyword_only:
            is_keyword_only = True
            if not any(before.kind is before.VAR_POSITIONAL for before in parameters[:index]):
                texts.append("*")
        texts.append(_plain(str(each)))
    returned = signature.return_annotation
    is_told = returned is not inspect.Signature.empty and not inspect.isclass(value)
    arrow = f" -> {_plain(_text_of(returned))}" if is_told else ""
    head = "class " if inspect.isclass(value) else ""
    line = f"{head}{last}({', '.join(texts)}){arrow}"
    if len(line) > WIDTH:
        line = f"{head}{last}(\n" + "".join(f"    {text},\n" for text in texts) + f"){arrow}"
    return f"```python\n{line}\n```"


def _text_of(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def _plain(text: str) -> str:
    """Without the quotes of annotations that are text, and with names for defaults that have no good text."""
    text = re.sub(r"""^([*\w]+: )(['"])(.*?)\2( = .*)?$""", r"\1\3\4", text)
    return re.sub(r"<(?:class|function) '?([\w.]+)[^>]*>", r"\1", text)


def _body(found: Docstring) -> str:
    parts = [_markdown(found.text)]
    for section, entries in found.entries.items():
        title = {"Args": "Arguments", "Attributes": "Attributes"}.get(section, section)
        parts.append(f"**{title}**\n")
        for names, text in entries:
            shown = ", ".join(f"`{name}`" for name in names.split(", ")) if names else ""
            parts.append(f"- {shown}: {text}" if shown else f"- {text}")
        parts.append("")
    return "\n".join(parts)


def _markdown(text: str) -> str:
    """Docstrings are nearly Markdown: a literal block begins with "::" in some."""
    return re.sub(r"::$", ":", text, flags=re.MULTILINE) + "\n"


def _linked(page: str) -> str:
    """Public names in the text lead to where they are described: `unisono.name`, and classes by their names alone."""
    homes = {name: _file_of(title) for title, names in GROUPS.items() for name in names}
    of_modules = {f"{module.__name__}.{name}" for module in modules() for name in names_of(module)}

    def link(found: re.Match[str]) -> str:
        whole, name = found[0], found[1]
        short = name.removeprefix("unisono.")
        if f"unisono.{short}" in of_modules:
            module = f"unisono.{short}".rpartition(".")[0]
            return f"[{whole}]({module}.md#unisono.{short})"
        is_named = name.startswith("unisono.") or name[0].isupper()
        return f"[{whole}]({homes[short]}#unisono.{short})" if is_named and short in homes else whole

    fenced = re.split(r"(```.*?```)", page, flags=re.DOTALL)
    for index in range(0, len(fenced), 2):
        lines = fenced[index].split("\n")
        fenced[index] = "\n".join(
            line if line.startswith(("#", "    ")) else re.sub(r"(?<!\[)`([\w.]+)`", link, line) for line in lines
        )
    return "".join(fenced)
