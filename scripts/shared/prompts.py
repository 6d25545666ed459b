"""Prompts from JSON Lines or plain text, checked, and the conversations that they begin."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from decode import Target
from decode.text import Prompt, encode
from training.json_lines import decode_text, parse_lines


def read_prompts(path: str) -> list[list[str]]:
    """The turns of each prompt in a file; most have one.

    A .jsonl file has one JSON object per line, with `prompt` (a text) or `turns` (a list of texts). Any other file, or
    "-" for standard input, is one prompt, without the line break at its end.
    Raises ValueError with the line's number for a bad line, and OSError for a file that cannot be read.
    """
    prompts = []
    for number, row in read_rows(path):
        place = f"{path}, line {number}"
        if ("prompt" in row) == ("turns" in row):
            raise ValueError(f'{place}: a line is a JSON object with either "prompt" or "turns"')
        prompts.append(check_turns(row, place))
    return prompts


def read_rows(path: str) -> list[tuple[int, dict[str, Any]]]:
    """The line numbers and JSON objects of a .jsonl file, fields unchecked; any other file is one with its `prompt`.

    Raises ValueError and OSError like `read_prompts`.
    """
    raw = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    content = decode_text(raw, path)
    if path.endswith(".jsonl"):
        return parse_lines(content, path)
    return [(1, {"prompt": check_prompt(content.removesuffix("\n").removesuffix("\r"), path)})]


def check_turns(row: dict[str, Any], place: str) -> list[str]:
    """The turns of an object with `prompt` or `turns`. Raises ValueError that names the place unless all are texts."""
    turns = [row["prompt"]] if "prompt" in row else row["turns"]
    if not isinstance(turns, list) or not turns:
        raise ValueError(f'{place}: "turns" is a list of at least one prompt')
    return [check_prompt(turn, place) for turn in turns]


def check_prompt(text: object, place: str) -> str:
    """The prompt itself. Raises ValueError that names the place unless it is a text, encodable and not blank."""
    if not isinstance(text, str):
        raise ValueError(f"{place}: a prompt is text, not {json.dumps(text):.40}")
    if not text.strip():
        raise ValueError(f"{place}: the prompt is empty")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{place}: character {error.start + 1} of the prompt is half of one (a surrogate)") from error
    return text


@dataclass
class Conversation:
    """A prompt's turns, and the answers so far."""

    id: int | str
    turns: Sequence[str]
    answers: list[str] = field(default_factory=list)

    def encode(self, target: Target, chat: bool | None = None) -> list[int]:
        """The tokens of the next turn after all earlier texts, which empty lines separate if there is no chat template.

        chat as in `decode.text.encode`. Raises ValueError if the context has no room for an answer.
        """
        turn = len(self.answers)
        texts = [text for pair in zip(self.turns, self.answers, strict=False) for text in pair] + [self.turns[turn]]
        prompt: Prompt = "\n\n".join(texts)
        if turn > 0 and getattr(target.tokenizer, "chat_template", None) is not None:
            prompt = [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(texts)]
        ids = encode(prompt, target.tokenizer, chat)
        if len(ids) >= target.context:
            raise ValueError(
                f"prompt {self.id}, turn {turn}, has {len(ids)} tokens; the model's context of {target.context} "
                "leaves no room for an answer"
            )
        return ids


def encode_turn(
    conversations: Sequence[Conversation], turn: int, target: Target, chat: bool | None = None
) -> tuple[list[Conversation], list[list[int]]]:
    """The conversations that have this turn, and its tokens.

    Raises ValueError if a first turn does not fit the context. A later one is reported on stderr and skipped.
    """
    asked, prompts = [], []
    for conversation in conversations:
        if len(conversation.answers) < turn or len(conversation.turns) <= turn:
            continue
        try:
            prompts.append(conversation.encode(target, chat))
            asked.append(conversation)
        except ValueError as error:
            if turn == 0:
                raise
            print(f"{error}: it ends here", file=sys.stderr)
    return asked, prompts
