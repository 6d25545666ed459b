"""Prompts from JSON Lines or plain text, and the tokens of conversations that grow turn by turn."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from decode import Target
from training.conversations import FORMATS, Conversation, decode_text, read_conversation, read_lines
from training.rendering import Renderer


def parse_template_option(text: str) -> tuple[str, Any]:
    """An argparse type: the name and the value of a template's option. A value that is no JSON is text."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE, such as enable_thinking=false")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


TEMPLATE_OPTION: dict[str, Any] = {
    "action": "append",
    "type": parse_template_option,
    "metavar": "NAME=VALUE",
    "help": "an option of the chat template, such as enable_thinking=false; JSON or text; repeatable",
}


def read_conversations(path: str) -> list[Conversation]:
    """The conversations to be answered in a file.

    A .jsonl file has one JSON object per line, in the formats of docs/training.md, or with "question" for "prompt", as
    GSM8K's; answers after the last question are left out. A .parquet file has the same in its rows. Any other file, or
    "-" for standard input, is one prompt, without the line break at its end.
    Raises ValueError with the line's number for a bad line, and OSError for a file that cannot be read.
    """
    if path.endswith((".jsonl", ".parquet")):
        rows = read_lines(Path(path)) if path.endswith(".jsonl") else _read_parquet(path)
        for _, row in rows:
            if "question" in row and not any(name in row for name in FORMATS):
                row["prompt"] = row["question"]
        return [replace(read_conversation(row, f"{path}, line {n}", answered=False), line=n) for n, row in rows]
    content = decode_text(sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes(), path)
    row = {"prompt": content.removesuffix("\n").removesuffix("\r")}
    return [read_conversation(row, path, answered=False)]


def _read_parquet(path: str) -> list[tuple[int, dict[str, Any]]]:
    """The rows of a table with their numbers. Raises ValueError without pyarrow."""
    try:
        from pyarrow.parquet import read_table
    except ImportError as error:
        raise ValueError(f"{path}: pip install pyarrow reads .parquet files, or give a .jsonl file") from error
    table = read_table(path).to_pylist()  # each row has all columns
    rows = ({name: value for name, value in row.items() if value is not None} for row in table)
    return [*enumerate(rows, start=1)]


def ask(turns: list[str], place: str) -> Conversation:
    """The conversation that begins with these turns. Raises ValueError, naming the place, for other than texts."""
    return read_conversation({"turns": turns}, place, answered=False)


def encode_turn(
    conversations: Sequence[Conversation], turn: int, target: Target, renderer: Renderer
) -> tuple[list[int], list[list[int]]]:
    """The indices of the conversations that have this turn, and its tokens.

    Raises ValueError if a first turn cannot be rendered or does not fit the context. A later one is reported on stderr
    and skipped.
    """
    asked, prompts = [], []
    for index, conversation in enumerate(conversations):
        if conversation.answers < turn or not conversation.is_open:
            continue
        try:
            ids = renderer.encode(conversation)
            if len(ids) >= target.context:
                raise ValueError(
                    f"{conversation.place}: turn {turn} has {len(ids)} tokens; the model's context of "
                    f"{target.context} leaves no room for an answer"
                )
        except ValueError as error:
            if turn == 0:
                raise
            print(f"{error}: it ends here", file=sys.stderr)
        else:
            asked.append(index)
            prompts.append(ids)
    return asked, prompts
