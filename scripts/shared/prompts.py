"""Prompts from files: JSON Lines, or plain text."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from training.json_lines import decode_text, parse_lines


def read_prompts(path: str) -> list[list[str]]:
    """The turns of each prompt in a file; most have one.

    A file whose name ends in .jsonl has one JSON object a line, with `prompt`, a text, or `turns`, a list of them.
    Any other file, or "-" for standard input, is one prompt as it stands, without the line break at its end.
    Raises ValueError, with the number of the line, where that is not so, and OSError for a file that cannot be read.
    """
    prompts = []
    for number, row in read_rows(path):
        place = f"{path}, line {number}"
        if ("prompt" in row) == ("turns" in row):
            raise ValueError(f'{place}: a line is a JSON object with either "prompt" or "turns"')
        prompts.append(check_turns(row, place))
    return prompts


def read_rows(path: str) -> list[tuple[int, dict[str, Any]]]:
    """The JSON objects of a .jsonl file with the numbers of their lines; any other file is one with its `prompt`.

    Raises ValueError and OSError like `read_prompts`; what is in the objects is not looked at.
    """
    raw = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    content = decode_text(raw, path)
    if path.endswith(".jsonl"):
        return parse_lines(content, path)
    return [(1, {"prompt": check_prompt(content.removesuffix("\n").removesuffix("\r"), path)})]


def check_turns(row: dict[str, Any], place: str) -> list[str]:
    """The turns of an object with `prompt` or `turns`. Raises ValueError, naming its place, unless they are texts."""
    turns = [row["prompt"]] if "prompt" in row else row["turns"]
    if not isinstance(turns, list) or not turns:
        raise ValueError(f'{place}: "turns" is a list of at least one prompt')
    return [check_prompt(turn, place) for turn in turns]


def check_prompt(text: object, place: str) -> str:
    """The prompt itself. Raises ValueError, naming its place, unless it is text and not empty."""
    if not isinstance(text, str):
        raise ValueError(f"{place}: a prompt is text, not {json.dumps(text):.40}")
    if not text.strip():
        raise ValueError(f"{place}: the prompt is empty")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{place}: character {error.start + 1} of the prompt is half of one (a surrogate)") from error
    return text
