"""What a request asks its answer to look like, as grammars: response formats, structured outputs and tool calls."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from decode.grammars.grammar import SPACING, parse

Schema = dict[str, Any]
LONGEST, LONGEST_PATTERN = 1 << 16, 1 << 13  # characters of a grammar: compiling takes their square


def check_size(grammar: Any) -> Any:
    """The grammar. Raises ValueError for one that would take seconds to compile."""
    is_pattern = isinstance(grammar, re.Pattern)
    text = grammar.pattern if is_pattern else grammar if isinstance(grammar, str) else json.dumps(grammar)
    if len(text) > (most := LONGEST_PATTERN if is_pattern else LONGEST):
        kind = "regular expression" if is_pattern else "grammar"
        raise ValueError(f"the {kind} has {len(text)} characters; at most {most} are compiled here")
    return grammar


class Part(BaseModel):
    """A part of a body. Fields that are not listed are refused by name, unless they are null."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def drop_nulls(cls, given: Any) -> Any:
        return {name: value for name, value in given.items() if value is not None} if isinstance(given, dict) else given


class JsonSchema(Part):
    name: str
    schema_: Annotated[Schema, Field(alias="schema")] = {}
    description: str | None = None
    strict: bool | None = None  # the answer always fits the schema


class ResponseFormat(Part):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @property
    def grammar(self) -> Any:
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError("response_format of type json_schema needs json_schema")
        return {"text": None, "json_object": "json"}.get(self.type, self.json_schema and self.json_schema.schema_)


class StructuredOutputs(Part):
    """vLLM's `structured_outputs`: one of these."""

    json_: Annotated[Schema | str | None, Field(alias="json")] = None
    regex: str | None = None
    choice: Annotated[list[str], Field(min_length=1)] | None = None
    grammar: str | None = None

    @model_validator(mode="after")
    def check(self) -> StructuredOutputs:
        if sum(each is not None for each in (self.json_, self.regex, self.choice, self.grammar)) != 1:
            raise ValueError("give one of json, regex, choice and grammar")
        return self

    def read(self) -> Any:
        """What was asked for, as `Engine.add` takes it. Raises ValueError for what cannot be read."""
        if self.json_ is not None:
            schema = parse(self.json_, "structured_outputs.json") if isinstance(self.json_, str) else self.json_
            if not isinstance(schema, dict):
                raise ValueError("structured_outputs.json is a schema, which is a JSON object")
            return schema
        if self.regex is not None:
            try:
                return re.compile(self.regex)
            except (re.error, OverflowError, RecursionError) as error:
                raise ValueError(f"structured_outputs.regex: {error}") from error
        return self.grammar if self.choice is None else f"start: {' | '.join(map(json.dumps, self.choice))}"


class Function(Part):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.:-]{1,64}$")]
    description: str | None = None
    parameters: Schema | None = None
    strict: bool | None = None


class Tool(Part):
    """A tool that the model may call."""

    type: Literal["function"]
    function: Function

    @property
    def arguments(self) -> Schema:
        """The schema of its arguments."""
        return self.function.parameters or {"type": "object", "properties": {}, "additionalProperties": False}


class FunctionName(Part):
    name: str


class ToolChoice(Part):
    type: Literal["function"]
    function: FunctionName


def write_call_grammar(tools: list[Tool], are_several: bool) -> str:
    """A Lark grammar of a call of one of these tools as JSON, or of a list of calls. Each schema is one of its own."""
    names = [f"call{number}" for number in range(len(tools))]
    rules = [f"call: {' | '.join(names)}"]
    for name, tool in zip(names, tools, strict=True):
        begin = json.dumps(f'{{"name": "{tool.function.name}", "arguments": ')
        rules.append(f'{name}: {begin} {name}_arguments "}}"')
        rules.append(f"{name}_arguments: %json {json.dumps({'x-guidance': SPACING, **tool.arguments})}")
    start = 'start: "[" call (", " call)* "]"' if are_several else "start: call"
    return "\n".join([start, *rules])
