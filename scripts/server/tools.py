"""Tool calls in answers: where they begin in the text, and what they say."""

from __future__ import annotations

import json
import secrets
from collections.abc import Container
from dataclasses import dataclass, field
from typing import Any

from decode.requests.text import Tokenizer
from training.conversations import join_parts

BEGIN, END = "<tool_call>", "</tool_call>"  # of calls in the Hermes format, which most chat templates use
INTRODUCTION = f"""You may call tools. To call one, answer with
{BEGIN}
{{"name": NAME, "arguments": {{...}}}}
{END}
The tools are:
"""


@dataclass
class ToolReader:
    """Finds the tool calls of one answer.

    A call that was asked for by a grammar is JSON. Others are in the tokenizer's own format, if it has a response
    template, or else in the Hermes format: {"name": ..., "arguments": {...}} between tags.
    tokenizer: the model's. prompt: of the request. tools: as they were given. forced: the name of the one tool that
    must be called, so that the answer is its arguments; "" if another one may be; None if none must be. most: calls
    that are returned; None: all.
    """

    tokenizer: Tokenizer
    prompt: list[int]
    tools: list[dict[str, Any]]
    forced: str | None = None
    most: int | None = None
    held: str = field(default="", init=False)  # text that may be of a call

    @property
    def has_template(self) -> bool:
        return getattr(self.tokenizer, "response_template", None) is not None

    def push(self, text: str) -> str:
        """Take more text of the answer. Returns what is surely not of a call."""
        self.held += text
        if self.forced is not None or self.has_template:
            return ""
        begin = self.held.find(BEGIN)
        if begin < 0:  # its last characters may begin one
            sizes = range(min(len(BEGIN), len(self.held)), -1, -1)
            begin = len(self.held) - next(size for size in sizes if self.held.endswith(BEGIN[:size]))
        free, self.held = self.held[:begin], self.held[begin:]
        return free

    def read(self, text: str, tokens: list[int]) -> dict[str, Any]:
        """The message of an answer, or of the end of it that was held back: `content`, and what else it has of
        `tool_calls` and `reasoning_content`."""
        try:
            return {name: part for name, part in self._read(text, tokens).items() if part or name == "content"}
        except Exception:  # what is not as it should be is text
            return {"content": text}

    def _read(self, text: str, tokens: list[int]) -> dict[str, Any]:
        names, reasoning = {tool["function"]["name"] for tool in self.tools}, None
        if self.forced is not None:
            content, calls = "", self._read_forced(text)
        elif self.has_template:
            found = self.tokenizer.parse_response(tokens, prefix=self.prompt, tools=self.tools)
            content, reasoning = found.get("content") or "", found.get("reasoning_content") or found.get("thinking")
            made = [call["function"] for call in found.get("tool_calls") or ()]
            calls = [make_call(call["name"], call.get("arguments")) for call in made]
        else:
            content, calls = read_tagged(text, names)
        return {"content": content, "tool_calls": calls[: self.most], "reasoning_content": reasoning}

    def _read_forced(self, text: str) -> list[dict[str, Any]]:
        found = json.loads(text)
        if self.forced:
            return [make_call(self.forced, found)]
        return [make_call(**call) for call in (found if isinstance(found, list) else [found])]


def read_tagged(text: str, names: Container[str]) -> tuple[str, list[dict[str, Any]]]:
    """The content and the calls of a text in the Hermes format. Calls of other tools than those named are text."""
    content, *parts = text.split(BEGIN)
    calls = []
    for part in parts:
        inside, _, after = part.partition(END)
        try:
            call = make_call(**json.loads(inside))
        except (ValueError, TypeError, RecursionError):
            call = None
        if call is not None and call["function"]["name"] in names:
            calls.append(call)
            content += after.strip()
        else:
            content += BEGIN + part
    return (content.rstrip() if calls else content), calls


def make_call(name: str, arguments: Any = None, parameters: Any = None) -> dict[str, Any]:
    """A call as OpenAI's API has it. parameters: what some models call the arguments.

    Raises ValueError or TypeError for what is no call.
    """
    given = parameters if arguments is None else arguments
    written = given if isinstance(given, str) else json.dumps({} if given is None else given)
    if not (isinstance(name, str) and isinstance(json.loads(written), dict)):
        raise TypeError("a call needs the tool's name, and its arguments as an object")
    own_id = secrets.token_hex(5)[:9]  # the templates of Mistral's models refuse others
    return {"id": own_id, "type": "function", "function": {"name": name, "arguments": written}}


def write_tools(row: dict[str, Any]) -> dict[str, Any]:
    """A conversation for a chat template without tools: its tools and calls are text, in the Hermes format.

    Results of tools, and what the user says after them, are one message: templates want the speakers in turns.
    """
    tools, messages, after_result = row["tools"], list[dict[str, Any]](), False
    for message in row["messages"]:
        written = write_calls(_join(message))
        if after_result and written.get("role") == "user":
            written["content"] = f"{messages.pop()['content']}\n{written.get('content', '')}"
        messages.append(written)
        after_result = message.get("role") == "tool" or (after_result and written.get("role") == "user")
    if tools:
        text = INTRODUCTION + "\n".join(json.dumps(tool["function"]) for tool in tools)
        if messages[0].get("role") == "system" and isinstance(messages[0].get("content"), str):
            text = f"{messages.pop(0)['content']}\n\n{text}"
        messages.insert(0, {"role": "system", "content": text})
    return row | {"messages": messages, "tools": []}


def _join(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its content as one text, if it has one."""
    return message | {"content": join_parts(message["content"], "messages")} if "content" in message else message


def write_calls(message: dict[str, Any]) -> dict[str, Any]:
    """A message with its tool calls, or a tool's result, as text."""
    if message.get("role") == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message.get('content', '')}\n</tool_response>"}
    written = [f"{BEGIN}\n{json.dumps(call['function'])}\n{END}" for call in message.get("tool_calls", ())]
    kept = {name: value for name, value in message.items() if name != "tool_calls"}
    return kept | ({"content": "\n".join([*filter(None, [kept.get("content")]), *written])} if written else {})
