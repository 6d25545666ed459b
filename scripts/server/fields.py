"""The fields of requests, as OpenAI's client library sends them, and a few more. Others are refused by name."""

from __future__ import annotations

import secrets
from typing import Annotated, Any, Literal, TypeVar

from pydantic import ConfigDict, Field

from decode import Sampling
from draftless_commands.server.grammars import (
    Part,
    ResponseFormat,
    StructuredOutputs,
    Tool,
    ToolChoice,
    write_call_grammar,
)
from draftless_commands.server.penalties import make_processors

Count = Annotated[int, Field(ge=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Choices = Annotated[int, Field(ge=1, le=128)]
Stops = str | Annotated[list[str], Field(max_length=16)] | None
MOST_LOG_PROBS = 20
Item = TypeVar("Item")
Listed = Annotated[list[Item], Field(fail_fast=True, min_length=1)]  # the first bad item is told, not each


class StreamOptions(Part):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # nothing is added to events
    continuous_usage_stats: bool | None = None  # as vLLM's: every event has the usage so far
    include_sources: bool | None = None  # beyond OpenAI's: each token's text, and the source that drafted it


class Fields(Part):
    """What a request for chat and one for text have in common. None stands for a default."""

    model_config = ConfigDict(allow_inf_nan=False)

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Choices | None = None
    seed: int | None = None
    stop: Stops = None
    max_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    # They say who asks, what is kept and how it is sent. They change no answer.
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    store: Literal[False] | None = None
    metadata: dict[str, str] | None = None
    service_tier: Literal["auto", "default"] | None = None
    # Beyond OpenAI's.
    top_k: Annotated[int, Field(ge=-1)] | None = None  # 0, and vLLM's -1: all tokens
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    nodes: Count | None = None
    structured_outputs: StructuredOutputs | None = None  # as vLLM's

    def read_settings(self, prompt: int, vocabulary: int) -> dict[str, Any]:
        """What `Engine.add` is given besides a prompt of so many tokens. OpenAI's default temperature is 1.

        Raises ValueError for fields that do not fit each other or the model.
        """
        sampling = Sampling(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=self.top_k and max(self.top_k, 0),
            top_p=self.top_p,
            min_p=self.min_p,
            processors=make_processors(self, prompt, vocabulary),
            seed=secrets.randbits(62) if self.seed is None else self.seed,
        )
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        limits = {"max_new_tokens": self.max_tokens, "stop": stop, "nodes": self.nodes}
        return {"sampling": sampling, **limits}

    def find_grammar(self) -> Any:
        """What the answer must look like; None: anything. Raises ValueError for what cannot be read."""
        return self.structured_outputs and self.structured_outputs.read()

    @property
    def streamed(self) -> StreamOptions:
        """What a stream has besides the text."""
        return self.stream_options or StreamOptions()


def check_call(call: Any) -> None:
    """Raises ValueError for what is no tool call of a message."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not {"name", "arguments"} <= {*function}:
        raise ValueError('messages: a tool call is {"function": {"name": ..., "arguments": "{...}"}}')


class ChatFields(Fields):
    """The body of /v1/chat/completions."""

    messages: Listed[dict[str, Any]]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOG_PROBS)] | None = None
    response_format: ResponseFormat | None = None
    tools: Listed[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    modalities: list[Literal["text"]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # as vLLM's: options of the model's chat template
    reasoning_effort: str | None = None  # one of these

    def read_settings(self, prompt: int, vocabulary: int) -> dict[str, Any]:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        most = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        told = (self.top_logprobs or 0) if self.logprobs else None
        return super().read_settings(prompt, vocabulary) | {"max_new_tokens": most, "log_probs": told}

    def find_grammar(self) -> Any:
        asked = {
            "structured_outputs": super().find_grammar(),
            "response_format": self.response_format and self.response_format.grammar,
            "tool_choice": self._write_call_grammar(),
        }
        given = {name: grammar for name, grammar in asked.items() if grammar is not None}
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} are given; an answer can fit one of them")
        return next(iter(given.values()), None)

    def _write_call_grammar(self) -> Any:
        """The grammar of the calls that must be made; None if none must be."""
        if self.tools is None:
            if self.tool_choice not in (None, "none"):
                raise ValueError("tool_choice needs tools")
            return None
        if isinstance(self.tool_choice, ToolChoice):
            tools = {tool.function.name: tool for tool in self.tools}
            if self.forced not in tools:
                raise ValueError(f"tool_choice is {self.forced!r}, which is none of the tools")
            return tools[self.forced].arguments
        return write_call_grammar(self.tools, self.parallel_tool_calls is not False) if self.forced == "" else None

    @property
    def forced(self) -> str | None:
        """The tool that must be called; "": any one; None: none must be."""
        if isinstance(self.tool_choice, ToolChoice):
            return self.tool_choice.function.name
        return "" if self.tool_choice == "required" else None

    @property
    def given_tools(self) -> list[dict[str, Any]]:
        """The tools that the model is told of."""
        tools = self.tools if self.tools is not None and self.tool_choice != "none" else []
        return [tool.model_dump(exclude_none=True) for tool in tools]

    @property
    def prompts(self) -> list[Any]:
        """The one prompt, as the others have it."""
        return [self.messages]

    @property
    def conversation(self) -> dict[str, Any]:
        """The messages as a row of `training.conversations`."""
        row: dict[str, Any] = {"messages": [self._read(each) for each in self.messages], "tools": self.given_tools}
        options = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        options |= self.chat_template_kwargs or {}
        return row | ({"chat_template_kwargs": options} if options else {})

    @staticmethod
    def _read(message: dict[str, Any]) -> dict[str, Any]:
        """A message as chat templates read it: without keys that are None.

        "developer" is OpenAI's newer word for "system".
        """
        kept = {name: value for name, value in message.items() if value is not None}
        if kept.get("role") == "developer":
            kept["role"] = "system"
        if kept.get("role") == "assistant" and not kept.get("tool_calls"):
            kept.setdefault("content", "")
        if calls := kept.get("tool_calls"):
            if not isinstance(calls, list):
                raise ValueError("messages: tool_calls are a list")
            for call in calls:
                check_call(call)
        return kept


class TextFields(Fields):
    """The body of /v1/completions."""

    prompt: str | Listed[str] | Listed[int] | Listed[Listed[int]]
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOG_PROBS)] | None = None
    echo: bool | None = None

    def read_settings(self, prompt: int, vocabulary: int) -> dict[str, Any]:
        if self.echo:
            raise ValueError("echo is not supported")
        return super().read_settings(prompt, vocabulary) | {"log_probs": self.logprobs}

    @property
    def prompts(self) -> list[str | list[int]]:
        """One prompt or several: each is text or token ids."""
        is_one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        prompts: Any = [self.prompt] if is_one else self.prompt
        return list(prompts)
