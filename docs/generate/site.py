"""What mkdocs is told of this site: pages that are generated, and links that lead out of `docs/`.

The changelog, the examples and the reference are pages, too; the home page is docs/index.md, to which links to the
README lead. So a relative link that is right in the repository (`../examples/resume.py`) is right in the site, where it
leads to the page of that file.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import json
import os
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Navigation
from mkdocs.structure.pages import Page

from unisono.cli.main import COMMANDS

sys.path.insert(0, str(Path(__file__).parent))
import reference

ROOT = Path(__file__).parent.parent.parent

COPIED = {
    "CONTRIBUTING.md": "project/contributing.md",
    "CHANGELOG.md": "project/changelog.md",
    "SECURITY.md": "project/security.md",
    "LICENSE": "project/license.md",
    "contrib/unisono-diloco/README.md": "project/unisono-diloco.md",
    "contrib/unisono-simulate/README.md": "project/unisono-simulate.md",
}
"""Files of the repository that are pages, by where the site has them."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fill in the parts of the navigation that are generated."""
    parts: dict[str, list[Any]] = {
        "Reference": [
            *({title: f"reference/{name}"} for name, title in reference.titles().items()),
            {"Command line": "reference/command_line.md"},
        ],
        "Examples": [page for _, page in sorted(_examples().items())],
        "Decisions": ["decisions/index.md", *(f"decisions/{path.name}" for path in _decisions())],
    }
    config.nav = _filled(config.nav or [], parts)
    return config


def _filled(nav: list[Any], parts: dict[str, list[Any]]) -> list[Any]:
    """`- Title: generated` becomes the part of that title."""
    made = []
    for entry in nav:
        if isinstance(entry, dict):
            ((title, content),) = entry.items()
            content = parts[title] if content == "generated" else content
            entry = {title: _filled(content, parts) if isinstance(content, list) else content}
        made.append(entry)
    return made


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    made = {page: (ROOT / path).read_text() for path, page in COPIED.items()}
    made["project/license.md"] = f"# Licence\n\n```text\n{made['project/license.md']}```\n"
    made["decisions/index.md"] = _index_of_decisions()
    made |= {page: _page_of_example(path) for path, page in _examples().items()}
    made |= {f"reference/{name}": text for name, text in reference.pages().items()}
    made["reference/command_line.md"] = _page_of_commands()
    for path, text in made.items():
        files.append(File.generated(config, path, content=text))
    return files


_BOOSTS = {
    **dict.fromkeys(["decisions/", "project/"], 0),
    **dict.fromkeys(["architecture", "performance", "glossary", "limits", "examples/", "reference/"], 0.2),
}
"""How much a page counts in a search, by the begin of its name; 0 leaves it out. Others say how to do something: 3."""


_INTROS: dict[str, str] = {}
"""For whom each page is, by its file: its line in italics."""


def on_nav(nav: Navigation, config: MkDocsConfig, files: Files) -> Navigation:
    """Keep the pages for `on_post_build`."""
    _PAGES[:] = nav.pages
    return nav


_PAGES: list[Page] = []


def on_post_build(config: MkDocsConfig) -> None:
    """Write what a language model is to read first, https://llmstxt.org: each page, and for whom it is."""
    lines = [f"# {config.site_name}\n\n> {config.site_description}\n\n## Docs\n"]
    for page in _PAGES:
        intro = _INTROS.get(page.file.src_uri)
        lines.append(f"- [{page.title}]({page.url or 'index.html'}){f': {intro}' if intro else ''}")
    Path(config.site_dir, "llms.txt").write_text("\n".join(lines) + "\n")


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links between files of the repository lead from page to page; and weigh pages for the search."""
    intro = re.search(r"^\*([^*]+)\*", markdown, re.MULTILINE)
    _INTROS[page.file.src_uri] = "" if intro is None else " ".join(intro[1].split())
    boosts = [boost for name, boost in _BOOSTS.items() if page.file.src_uri.startswith(name)]
    page.meta["search"] = {"boost": boosts[0] if boosts else 3, "exclude": 0 in boosts}
    pages = COPIED | _examples() | {"README.md": "index.md"}
    pages |= {f"docs/{each.src_uri}": each.src_uri for each in files if (ROOT / "docs" / each.src_uri).exists()}
    pages |= {"docs/decisions": "decisions/index.md", "examples": "examples/train_digits.py.md"}
    here = page.file.src_uri
    source = next((path for path, name in pages.items() if name == here), None)
    if source is None:
        return markdown

    def link(found: re.Match[str]) -> str:
        path, anchor = found[1], found[2] or ""
        target = os.path.normpath(os.path.join(os.path.dirname(source), path))
        if target not in pages:
            return found[0]
        return f"]({os.path.relpath(pages[target], os.path.dirname(here) or '.')}{anchor})"

    return re.sub(r"\]\((?![a-z]+:|#)([^)#\s]+)(#[^)]*)?\)", link, markdown)


def _page_of_commands() -> str:
    """What each command says of itself."""
    parts = ["# Command line\n"]
    for name, parser in _parsers().items():
        parts.append(f"## {name} {{ #{name.replace(' ', '-')} }}\n\n```text\n{parser.format_help()}```\n")
    return "\n".join(parts)


def _parsers() -> dict[str, argparse.ArgumentParser]:
    """Each command, and what is below it."""
    root = argparse.ArgumentParser(prog="unisono")
    subparsers = root.add_subparsers()
    for name in COMMANDS:
        import_module(f"unisono.cli.{name}").add_parser(subparsers)
    found: dict[str, argparse.ArgumentParser] = {}
    waiting = [subparsers]
    while waiting:
        for parser in waiting.pop(0).choices.values():
            found[parser.prog] = parser
            waiting += [each for each in parser._actions if isinstance(each, argparse._SubParsersAction)]
    return found


def _decisions() -> list[Path]:
    return sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md"))


def _index_of_decisions() -> str:
    lines = [f"- [{path.read_text().partition(chr(10))[0].lstrip('# ')}]({path.name})" for path in _decisions()]
    return "# Decisions\n\nWhat was decided, and why, in the order in which it was.\n\n" + "\n".join(lines) + "\n"


def _examples() -> dict[str, str]:
    """The page of each example, by the file's path; a plain twin is on the page of the example that it is of."""
    paths = [path for path in (ROOT / "examples").rglob("*") if path.suffix in (".py", ".md", ".ipynb")]
    names = [path.relative_to(ROOT).as_posix() for path in paths if not path.stem.endswith("_plain")]
    return {name: name if name.endswith(".md") else f"{name}.md" for name in names}


def _page_of_example(path: str) -> str:
    source = (ROOT / path).read_text()
    if path.endswith(".md"):
        return source
    if path.endswith(".ipynb"):
        return _page_of_notebook(source)
    tree = ast.parse(source)
    doc = ast.get_docstring(tree) or ""
    code = source.split('"""', 2)[2].lstrip() if doc else source
    name = path.removeprefix("examples/")
    return f"# {name}\n\n{doc}\n\n````python\n{code}````\n{_difference_from_twin(path, source)}"


def _difference_from_twin(path: str, source: str) -> str:
    twin = (ROOT / path).with_name(f"{Path(path).stem}_plain.py")
    if not twin.exists():
        return ""
    before, after = (_body_of(text).splitlines() for text in (twin.read_text(), source))
    lines = difflib.unified_diff(before, after, n=2, lineterm="")
    changes = "\n".join(line for line in lines if not line.startswith(("---", "+++", "@@")))
    return f"\n## What differs from the script for one device\n\n````diff\n{changes}\n````\n"


def _body_of(source: str) -> str:
    """Without the docstring, and without what reads the command line."""
    return source[source.index("from __future__") : source.index("if __name__")]


def _page_of_notebook(source: str) -> str:
    parts = []
    for cell in json.loads(source)["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
    return "\n\n".join(parts) + "\n"
