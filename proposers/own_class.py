"""A proposer or a kind of head of one's own: a class in a Python file, named as FILE.py:CLASS."""

from __future__ import annotations

import re
import sys
from importlib.util import module_from_spec, spec_from_file_location
from inspect import signature
from pathlib import Path
from traceback import extract_tb
from types import ModuleType
from typing import Any

from decode import Proposer
from decode.proposer import check_proposer

FORM = re.compile(r"(.+\.py):(\w+)")

_run: dict[Path, tuple[int, ModuleType]] = {}  # files that were run, and when they had been changed


def is_own_class(name: str | Path) -> bool:
    """Whether a name has the form FILE.py:CLASS."""
    return FORM.fullmatch(str(name)) is not None


def load_own(name: str) -> Proposer:
    """An instance of the class. Raises ValueError as `find_own` does, and for an instance that is no proposer."""
    proposer: Proposer = find_own(name)()
    try:
        check_proposer(proposer)
    except TypeError as error:
        raise ValueError(f"{name} is no proposer: {error}") from error
    return proposer


def find_own(name: str) -> type[Any]:
    """The class, which is made without arguments.

    Its file is run, once unless it changes. Raises ValueError if the file is missing or fails, has no such class, or
    the class needs arguments. Only an instance shows whether it is a proposer: `propose` may be set by `__init__`.
    """
    file, class_name = FORM.fullmatch(name).groups()  # type: ignore[union-attr]
    module = _run_file(Path(file), name)
    own = getattr(module, class_name, None)
    if not isinstance(own, type):
        values = vars(module).items()
        classes = [each for each, value in values if isinstance(value, type) and value.__module__ == module.__name__]
        raise ValueError(f"{file} has no class {class_name}; it has {', '.join(classes) or 'none'}")
    try:
        signature(own).bind()
    except TypeError as error:
        raise ValueError(f"{class_name} in {file} must be made without arguments: {error}") from error
    return own


def _run_file(file: Path, name: str) -> ModuleType:
    if not file.is_file():
        raise ValueError(f"cannot load {name!r}: there is no such file")
    changed, place = file.stat().st_mtime_ns, file.resolve()
    if place in _run and _run[place][0] == changed:
        return _run[place][1]
    spec = spec_from_file_location(f"own_class_in_{file.stem}", file)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = module_from_spec(spec)  # a dataclass looks its module up there
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        lines = [frame.lineno for frame in extract_tb(error.__traceback__) if frame.filename == spec.origin]
        line = lines[-1] if lines else getattr(error, "lineno", None)  # a syntax error's file has not run
        raise ValueError(f"{file}, line {line}: {type(error).__name__}: {error}") from error
    _run[place] = changed, module
    return module
