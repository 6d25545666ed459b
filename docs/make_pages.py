"""Writes the generated pages and parts of pages in docs/.

python-api.md is made from signatures, cli.md from parsers, the file tree of architecture.md from docstrings, and the
tables of generate.md from tests/support/generate_arguments.py.

    python docs/make_pages.py

A test compares the pages with what this script would write.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
sys.path.insert(0, str(ROOT))

PACKAGES = ("decode", "proposers", "heads")
COMMANDS = ("generate", "bench", "distill", "train", "calibrate", "check", "demo")
FOLDERS = ("decode", "heads", "proposers", "training", "scripts", "examples", "tests")
NOTE = "<!-- Written by docs/make_pages.py. Do not edit. -->\n"
WIDTH = 100  # of a signature that stays on one line
COLUMN = 26  # of the descriptions in the file tree


def main() -> None:
    for name, text in make_pages().items():
        (DOCS / name).write_text(text, encoding="utf-8")


def make_pages() -> dict[str, str]:
    """The text of each generated page, by its name in docs/."""
    tables = importlib.import_module("tests.support.generate_arguments").make_tables()
    return {
        "python-api.md": describe_api(),
        "cli.md": describe_commands(),
        "architecture.md": fill("architecture.md", "tree", describe_tree()),
        "generate.md": fill("generate.md", "arguments", f"\n{tables}\n"),
    }


def fill(page: str, mark: str, text: str) -> str:
    """A page of docs/ with a text between its marks."""
    begin, end = f"<!-- {mark} -->\n", f"<!-- /{mark} -->"
    before, _, rest = (DOCS / page).read_text(encoding="utf-8").partition(begin)
    return f"{before}{begin}{text}{end}{rest.partition(end)[2]}"


# The Python API


def describe_api() -> str:
    """Every public name of the packages: signature, first paragraph of the docstring, members."""
    parts = [f"{NOTE}\n# Python API\n", "Every public name with its arguments and defaults. `help(name)` says more.\n"]
    modules = {package: importlib.import_module(package) for package in PACKAGES}
    rows = [f"[`{name}`](#{anchor(f'{package}.{name}')})" for package, name in list_names(modules)]
    parts.append(" · ".join(rows) + "\n")
    for package, module in modules.items():
        parts.append(f"## {package}\n\n{first_paragraph(module)}\n")
        for name in (name for owner, name in list_names(modules) if owner == package):
            parts.append(describe_name(f"{package}.{name}", getattr(module, name)))
    return "\n".join(parts)


def list_names(modules: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Package and name of everything public, each object once."""
    seen: list[Any] = []
    for package, module in modules.items():
        for name in sorted(module.__all__, key=str.lower):
            value = getattr(module, name)
            if not any(value is other for other in seen):
                seen.append(value)
                yield package, name


def describe_name(name: str, value: Any) -> str:
    """One public name: a class, a function or a constant."""
    heading = f"### {name}\n"
    if inspect.isclass(value):
        return (
            f"{heading}\n{code(describe_class(name.split('.')[-1], value))}\n{first_paragraph(value)}\n{members(value)}"
        )
    if callable(value):
        return f"{heading}\n{code(format_call(name.split('.')[-1], value))}\n{first_paragraph(value)}\n"
    if isinstance(value, dict):
        return f"{heading}\nA dict with the keys {', '.join(f'`{key}`' for key in value)}.\n"
    return f"{heading}\nA `{'Path' if isinstance(value, Path) else type(value).__name__}`.\n"


def describe_class(name: str, value: type) -> str:
    """The constructor's call; a protocol or an abstract class without one is its name alone."""
    if getattr(value, "_is_protocol", False) or value.__init__ is object.__init__:
        return name
    return format_call(name, value)


def members(value: type) -> str:
    """A table of the class's own public methods and properties."""
    rows = []
    for base in reversed([base for base in value.__mro__ if base.__module__.split(".")[0] in PACKAGES]):
        for name, member in vars(base).items():
            if name.startswith("_") or any(name == row[0] for row in rows):
                continue
            member = inspect.getattr_static(value, name)
            inner = (
                getattr(member, "__func__", None) or getattr(member, "fget", None) or getattr(member, "func", member)
            )
            if not inspect.isfunction(inner):
                continue
            is_call = inspect.isfunction(member) or hasattr(member, "__func__")
            shown = (
                format_call(name, inner, bound=not isinstance(member, staticmethod), wrap=False) if is_call else name
            )
            rows.append((name, f"| `{shown}` | {first_sentence(inner)} |".replace(" | None", " \\| None")))
    lines = [line for _, line in sorted(rows)]
    return "\n".join(["", "| member | |", "|---|---|", *lines, ""]) if lines else ""


def format_call(name: str, value: Any, *, bound: bool = False, wrap: bool = True) -> str:
    """The call with annotations and defaults, the same on every version of Python."""
    signature = inspect.signature(value)
    parts, kinds = [], [parameter.kind for parameter in signature.parameters.values()]
    for place, parameter in enumerate(list(signature.parameters.values())):
        if (bound and place == 0) or parameter.name == "unknown":  # `stream` catches misspelt arguments in it
            continue
        if parameter.kind == parameter.KEYWORD_ONLY and parameter.VAR_POSITIONAL not in kinds and "*" not in parts:
            parts.append("*")
        parts.append(format_parameter(parameter))
    returned = "" if inspect.isclass(value) else format_annotation(signature.return_annotation, " -> ")
    line = f"{name}({', '.join(parts)}){returned}"
    if not wrap or len(line) <= WIDTH:
        return line
    return f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){returned}"


def format_parameter(parameter: inspect.Parameter) -> str:
    stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    text = stars + parameter.name + format_annotation(parameter.annotation, ": ")
    if parameter.default is parameter.empty:
        return text
    default = repr(parameter.default)
    if default.startswith("<"):
        default = "..." if default == "<factory>" else getattr(parameter.default, "__name__", "...")
    return f"{text} = {default}"


def format_annotation(annotation: Any, before: str) -> str:
    if annotation is inspect.Parameter.empty:
        return ""
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return before + re.sub(rf"\b(?:{'|'.join(PACKAGES)})\.(?:\w+\.)*", "", text).strip("'")


def first_paragraph(value: Any) -> str:
    """The docstring's first paragraph on one line; empty for none, and for the one that dataclasses write."""
    text = inspect.getdoc(value) if not inspect.isclass(value) else value.__doc__
    if not text or (dataclasses.is_dataclass(value) and text.startswith(f"{value.__name__}(")):
        return ""
    return " ".join(inspect.cleandoc(text).split("\n\n")[0].split())


def first_sentence(value: Any) -> str:
    return re.split(r"(?<=[.;!?])\s", first_paragraph(value), maxsplit=1)[0].rstrip(".;").replace("|", "\\|")


def code(text: str) -> str:
    return f"```text\n{text}\n```\n"


def anchor(heading: str) -> str:
    """GitHub's anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


# The commands


class Found(Exception):
    """Carries a parser out of a command's `main`."""


def find_parser(command: str) -> argparse.ArgumentParser:
    """The parser of a command, as its `main` would use it."""

    def catch(parser: argparse.ArgumentParser, *_: Any) -> Any:
        raise Found(parser)

    run: Callable[[list[str]], None] = importlib.import_module(f"scripts.{command}").main
    with patch.object(argparse.ArgumentParser, "parse_known_args", catch):
        try:
            run([])
        except Found as found:
            return found.args[0]
    raise ValueError(f"scripts/{command}.py has no parser")


def describe_commands() -> str:
    """Every option of every command."""
    parts = [f"{NOTE}\n# Commands\n", "Every command has `--help` with the same text.\n"]
    for command in COMMANDS:
        parser = find_parser(command)
        parts.append(f"## scripts/{command}.py\n\n{' '.join((parser.description or '').split())}\n")
        for group in parser._action_groups:
            actions = [action for action in group._group_actions if "--help" not in action.option_strings]
            if actions:
                rows = [f"| {name_action(action)} | {explain(parser, action)} |" for action in actions]
                parts.append("\n".join([f"| {group.title} | |", "|---|---|", *rows, ""]))
        if parser.epilog:
            parts.append(code(parser.epilog.strip()))
    return "\n".join(parts)


def name_action(action: argparse.Action) -> str:
    """The option with what it takes, as a user types it."""
    value = action.metavar or ("" if action.nargs == 0 else (action.dest if not action.option_strings else None))
    if value is None:
        value = "" if action.choices is not None else action.dest.upper().replace("_", "-")
    shown = " ".join(value) if isinstance(value, tuple) else value
    return " ".join(
        filter(None, (", ".join(f"`{option}`" for option in action.option_strings), f"`{shown}`" * bool(shown)))
    )


def explain(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    text = parser._get_formatter()._expand_help(action) if action.help else ""
    if action.choices is not None and action.metavar is None:
        text = f"{', '.join(f'`{choice}`' for choice in action.choices)}: {text}".rstrip(": ")
    return " ".join(text.split()).replace("|", "\\|")


# The file tree


def list_files() -> list[Path]:
    """Every Python file of the project, relative to its root."""
    return [path.relative_to(ROOT) for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]


def describe_tree() -> str:
    """The annotated tree: each folder and file with the first sentence of its docstring."""
    lines = []
    for folder in sorted({path.parent for path in list_files()}, key=lambda path: (FOLDERS.index(path.parts[0]), path)):
        init = ROOT / folder / "__init__.py"
        lines.append(f"{folder}/ ".ljust(COLUMN) + (describe_file(init) if init.exists() else ""))
        for path in (path for path in list_files() if path.parent == folder and path.name != "__init__.py"):
            lines.append(f"  {path.name} ".ljust(COLUMN) + describe_file(ROOT / path))
        lines.append("")
    return code("\n".join(line.rstrip() for line in lines).rstrip())


def describe_file(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return re.split(r"(?<=[.;])\s", " ".join(text.split("\n\n")[0].split()), maxsplit=1)[0].rstrip(".;")


if __name__ == "__main__":
    main()
