"""What a request asks its answer to look like, as grammars: response formats, structured outputs and tool calls."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Schema = dict[str, Any]


class Part(BaseModel):
    """A part of a body. Fields that are not listed are refused by name."""

    model_config = ConfigDict(extra="forbid", strict=True)


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
        if len(self.model_fields_set) != 1:
            raise ValueError("give one of json, regex, choice and grammar")
        return self

    def read(self) -> Any:
        """What was asked for, as `Engine.add` takes it. Raises ValueError for what cannot be read."""
        if self.json_ is not None:
            return json.loads(self.json_) if isinstance(self.json_, str) else self.json_
        if self.regex is not None:
            try:
                return re.compile(self.regex)
            except re.error as error:
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


def write_call_schema(tools: list[Tool], are_several: bool) -> Schema:
    """The schema of a call of one of these tools, or of a list of calls.

    Definitions that a schema of arguments refers to are the whole schema's: two tools with the same names must agree.
    """
    calls, definitions = [], dict[str, Schema]()
    for tool in tools:
        arguments = dict(tool.arguments)
        for name in ("$defs", "definitions"):
            definitions[name] = definitions.get(name, {}) | arguments.pop(name, {})
        fields = {"name": {"const": tool.function.name}, "arguments": arguments}
        calls.append({"type": "object", "properties": fields, "required": [*fields], "additionalProperties": False})
    call: Schema = {"anyOf": calls} if len(calls) > 1 else calls[0]
    whole: Schema = {"type": "array", "items": call, "minItems": 1} if are_several else call
    return whole | {name: each for name, each in definitions.items() if each}
