"""JSON Lines, the form of all files of prompts, questions and answers: one object a line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_lines(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """The objects of a file, as `parse_lines` gives them. Raises ValueError as it and `decode_text` do."""
    return parse_lines(decode_text(path.read_bytes(), str(path)), str(path))


def parse_lines(text: str, name: str) -> list[tuple[int, dict[str, Any]]]:
    """The objects of a file called `name`, with the numbers of their lines; empty lines are passed over.

    Raises ValueError, naming the line, for one that is no JSON object, and where there is none at all.
    """
    # Not splitlines: JSON may hold other line breaks than \n as they are.
    lines = enumerate(text.split("\n"), start=1)
    rows = [(number, _parse(line, f"{name}, line {number}")) for number, line in lines if line.strip()]
    if not rows:
        raise ValueError(f"{name} is empty; it needs one JSON object a line")
    return rows


def decode_text(raw: bytes, name: str) -> str:
    """The text of a file called `name`. Raises ValueError, naming the line, where it is not UTF-8."""
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
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, thousands of brackets
        raise ValueError(f"{place}: this JSON cannot be read ({error})") from error
    if not isinstance(row, dict):
        raise ValueError(f"{place}: a line is a JSON object, not {json.dumps(row):.40}")
    return row
