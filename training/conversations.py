"""Conversations: the one reader of prompt, question and training rows. docs/training.md has the table of formats.

All these files are JSON Lines: one JSON object per line.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Message = dict[str, Any]

FORMATS = ("prompt", "turns", "messages", "conversations")
ANSWERS = ("response", "completion")
TEMPLATE_KEYS = ("tools", "documents")  # of a row, given to the chat template under the same names
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
STRUCTURED = ("tool_calls", "function_call", *THOUGHTS)  # keys of text outside of content
UNREADABLE = ("images", "image", "videos", "video", "audios", "audio", "functions", "suffix")
SPEAKERS = {
    **{name: name for name in ("system", "developer", "user", "assistant", "tool")},
    **{"human": "user", "gpt": "assistant", "model": "assistant", "observation": "tool", "function": "tool"},
}
FLAGS = ("train", "weight")  # of a message: whether to train on it


@dataclass
class Conversation:
    """The messages of a row, the questions to ask after them, and what its chat template is given."""

    messages: list[Message]
    later: list[str] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)  # arguments of the chat template: tools, enable_thinking, ...
    fields: Mapping[str, Any] = field(default_factory=dict)  # the whole row, for id, source, finished, ...
    place: str = "the conversation"  # file and line, for errors
    line: int = 1
    answers: int = 0  # that were added

    @property
    def is_open(self) -> bool:
        """Whether the last message is to be answered."""
        return bool(self.messages[-1]["role"] != "assistant")

    def add(self, answer: str, go_on: bool = True) -> None:
        """Add the model's answer and, to go on, the next question if there is one."""
        self.messages.append({"role": "assistant", "content": answer})
        self.answers += 1
        if go_on and self.later:
            self.messages.append({"role": "user", "content": self.later.pop(0)})


def read_lines(path: Path, faults: list[str] | None = None) -> list[tuple[int, dict[str, Any]]]:
    """The objects of a JSON Lines file with their line numbers; empty lines are skipped.

    Raises ValueError, naming the line, if a line is not a JSON object, and if there is no line at all. With `faults`,
    lines that are no objects are skipped, and the errors are added to it.
    """
    # Not splitlines: JSON strings may contain other line breaks than \n.
    text = decode_text(path.read_bytes(), str(path))
    lines = [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if not lines:
        raise ValueError(f"{path} is empty; it needs one JSON object a line")
    rows = []
    for number, line in lines:
        try:
            rows.append((number, _parse(line, f"{path}, line {number}")))
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


def read_conversation(row: Mapping[str, Any], place: str, answered: bool) -> Conversation:
    """The conversation of a row: up to its last answer to train on, or else without answers at its end, to be
    asked.

    Raises ValueError, naming the place, if the row is no such conversation or has text that nothing here can honour.
    """
    row = _drop_repetitions(row)
    _refuse_unreadable(row, place)
    messages, later = _list_messages(row, place)
    if answered:
        end = max(list_answers(messages), default=-1) + 1
        if not end:
            raise ValueError(
                f'{place}: there is no answer to train on: give "prompt" with "response" or "completion", or messages '
                'with one by "assistant" after the first'
            )
        messages = messages[:end]
    else:
        while messages and messages[-1]["role"] == "assistant":
            messages.pop()
        if not any(message["role"] in ("user", "tool") for message in messages):
            raise ValueError(f"{place}: there is no question to answer: messages need one by user")
    read = [_read_content(message, place) for message in messages]
    asked = next((each for each in reversed(read) if each["role"] != "system"), read[-1])
    if not answered and asked["role"] == "user":  # a tool may have nothing to say
        check_prompt(asked["content"], place)
    return Conversation(read, later, _read_options(row, place), row, place)


def list_answers(messages: Sequence[Message]) -> list[int]:
    """The indices of the model's answers; a first message is never an answer."""
    return [turn for turn, message in enumerate(messages) if turn > 0 and message["role"] == "assistant"]


def is_blank(answer: Message) -> bool:
    """Whether an answer has no text but blanks, and no tool calls or thoughts in keys of their own."""
    return not answer["content"].strip() and not any(answer.get(name) for name in STRUCTURED)


def check_prompt(text: object, place: str) -> str:
    """The prompt itself. Raises ValueError that names the place unless it is a text, encodable and not blank."""
    if not isinstance(text, str):
        raise ValueError(f"{place}: a prompt is text, not {json.dumps(text):.40}")
    if not text.strip():
        raise ValueError(f"{place}: the prompt is empty")
    _check_characters(text, place)
    return text


def _drop_repetitions(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """The row without a "prompt" or an answer that are also among its messages, as public sets have them."""
    messages = row.get("messages", row.get("conversations"))
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        return row
    texts = [message.get("content", message.get("value")) for message in messages]
    return {name: value for name, value in row.items() if name not in ("prompt", *ANSWERS) or value not in texts}


def _refuse_unreadable(row: Mapping[str, Any], place: str) -> None:
    given = [name for name in FORMATS if name in row]
    if len(given) != 1:
        listed = ", ".join(f'"{name}"' for name in FORMATS[:-1]) + f' and "{FORMATS[-1]}"'
        found = "; here are " + " and ".join(f'"{name}"' for name in given) if given else ""
        raise ValueError(f"{place}: a line is a JSON object with one of {listed}{found}")
    if refused := [name for name in UNREADABLE if row.get(name) not in (None, "", [], {})]:
        raise ValueError(f"{place}: {refused[0]!r} would change the text, and only text and tools can be given")
    if all(name in row for name in ANSWERS):
        raise ValueError(f'{place}: a line has "response" or "completion", not both')
    if "prompt" not in row and (others := [name for name in ANSWERS if name in row]):
        raise ValueError(f'{place}: "{others[0]}" answers a "prompt"; here it must be the last message by "assistant"')


def _list_messages(row: Mapping[str, Any], place: str) -> tuple[list[Message], list[str]]:
    """The messages of any format, their contents still unchecked, and the turns after the first."""
    later: list[str] = []
    if "turns" in row:
        turns = row["turns"]
        if not isinstance(turns, list) or not turns:
            raise ValueError(f'{place}: "turns" is a list of at least one prompt')
        first, *later = (check_prompt(turn, place) for turn in turns)
        messages = [{"role": "user", "content": first}]
    elif "prompt" in row:
        messages = _read_part(row["prompt"], "user", place)
        messages += [part for name in ANSWERS if name in row for part in _read_part(row[name], "assistant", place)]
    else:
        messages = _read_part(row.get("messages", row.get("conversations")), "", place)
    if row.get("system") not in (None, ""):
        if messages and messages[0]["role"] == "system":
            raise ValueError(f'{place}: the row has "system", and its messages begin with another system message')
        messages.insert(0, {"role": "system", "content": row["system"]})
    return messages, later


def _read_part(part: Any, role: str, place: str) -> list[Message]:
    """Messages with their roles from a list of them, or the message of this role with a text."""
    if role and not isinstance(part, list):
        return [{"role": role, "content": part}]
    if not isinstance(part, list) or not part or not all(isinstance(message, dict) for message in part):
        raise ValueError(f'{place}: messages are a list of objects with "role" and "content", or "from" and "value"')
    return [_read_message(message, place) for message in part]


def _read_message(message: Message, place: str) -> Message:
    """The message with `role` and `content`, and its other keys as they are."""
    rest = {name: value for name, value in message.items() if name not in ("role", "content", "from", "value")}
    said = message.get("role", message.get("from"))
    role = SPEAKERS.get(said) if isinstance(said, str) else None
    if role is None:
        raise ValueError(f"{place}: a message is by one of {', '.join(SPEAKERS)}, not by {json.dumps(said):.40}")
    for name in FLAGS:
        if (flag := message.get(name)) not in (None, 0, 1):
            raise ValueError(f"{place}: {name!r} of a message is true or false, or 1 or 0, not {json.dumps(flag):.40}")
    return {"role": role, "content": message.get("content", message.get("value")), **rest}


def _read_content(message: Message, place: str) -> Message:
    """The message with its content as one text. Raises ValueError for content that is no text."""
    content = join_parts(message["content"], place)
    if content is None and any(message.get(name) for name in STRUCTURED):
        content = ""
    if not isinstance(content, str):
        what = {"user": "a prompt", "assistant": "an answer"}.get(message["role"], f"a {message['role']} message")
        raise ValueError(f"{place}: {what} is text, not {json.dumps(content):.40}")
    _check_characters(content, place)
    _check_characters(json.dumps(message, ensure_ascii=False), place)
    read = {**message, "content": content}
    if isinstance(calls := message.get("tool_calls"), list):
        read["tool_calls"] = [_read_call(call) for call in calls]
    if "function_call" in message:
        read["function_call"] = _read_call(message["function_call"])
    return read


def _read_call(call: Any) -> Any:
    """A tool call with its arguments as an object where they are the JSON text of one, as OpenAI's API has them.

    Chat templates write an object as JSON, and most of them a text as JSON within JSON.
    """
    if not isinstance(call, dict):
        return call
    if "function" in call:
        return {**call, "function": _read_call(call["function"])}
    arguments = call.get("arguments")
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):  # a model may have written what is no JSON
            found = json.loads(arguments or "{}")
            return {**call, "arguments": found} if isinstance(found, dict) else call
    return call


def join_parts(content: Any, place: str) -> Any:
    """The text of a content that is a list of parts; any other content as it is. Raises ValueError for other parts."""
    if not isinstance(content, list):
        return content
    parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in content]
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else part
            raise ValueError(f"{place}: the parts of a content are of type text, not {json.dumps(kind):.40}")
    return "".join(part["text"] for part in parts)


def _read_options(row: Mapping[str, Any], place: str) -> dict[str, Any]:
    """The arguments of the row for its chat template."""
    options = row.get("chat_template_kwargs") or {}
    if not isinstance(options, dict):
        raise ValueError(f'{place}: "chat_template_kwargs" is an object, not {json.dumps(options):.40}')
    lists = {name: _read_list(row[name], name, place) for name in TEMPLATE_KEYS if row.get(name)}
    return options | {name: value for name, value in lists.items() if value}


def _read_list(value: Any, name: str, place: str) -> list[Any]:
    """A list of objects, which may be written as JSON text."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ValueError(f'{place}: "{name}" is text, and no JSON ({error})') from error
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise ValueError(f'{place}: "{name}" is a list of objects, not {json.dumps(value):.40}')
    return value


def _check_characters(text: str, place: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{place}: character {error.start + 1} of the text is half of one (a surrogate)") from error


def _parse(line: str, place: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place}: this is not JSON ({error.msg}, column {error.colno})") from error
    except (ValueError, RecursionError) as error:  # thousands of digits or brackets
        raise ValueError(f"{place}: this JSON cannot be read ({error})") from error
    if not isinstance(row, dict):
        raise ValueError(f"{place}: a line is a JSON object, not {json.dumps(row):.40}")
    return {name: value for name, value in row.items() if value is not None}  # as other programs write missing ones
