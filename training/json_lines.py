"""Reading JSON Lines, the format of all prompt, question and answer files: one JSON object per line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_lines(path: Path, faults: list[str] | None = None) -> list[tuple[int, dict[str, Any]]]:
    """The objects of a file with their line numbers; see `parse_lines`."""
    return parse_lines(decode_text(path.read_bytes(), str(path)), str(path), faults)


def parse_lines(text: str, name: str, faults: list[str] | None = None) -> list[tuple[int, dict[str, Any]]]:
    """The objects in the text of file `name` with their line numbers; empty lines are skipped.

    Raises ValueError, naming the line, if a line is not a JSON object, and if there is no line at all. With `faults`,
    lines that are no objects are skipped, and the errors are added to it.
    """
    # Not splitlines: JSON strings may contain other line breaks than \n.
    lines = [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if not lines:
        raise ValueError(f"{name} is empty; it needs one JSON object a line")
    rows = []
    for number, line in lines:
        try:
            rows.append((number, _parse(line, f"{name}, line {number}")))
        except ValueError as error:
            if faults is None:
                raise
            faults.append(str(error))
    return rows


def decode_text(raw: bytes, name: str) -> str:
    """The text of file `name`. Raises ValueError, naming the line, if it is not UTF-8."""
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        number = raw.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{name}, line {number}: this is not UTF-8 text") from error


def _parse(line: str, place: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place}: this is not JSON ({error.msg}, column {error.colno})") from error
    except (ValueError, RecursionError) as error:  # thousands of digits or brackets
        raise ValueError(f"{place}: this JSON cannot be read ({error})") from error
    if not isinstance(row, dict):
        raise ValueError(f"{place}: a line is a JSON object, not {json.dumps(row):.40}")
    return row
