"""`draftless serve`: response formats, structured outputs, tool calls, and where streamed tokens come from."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
from pydantic import BaseModel, Field
from tokenizers import decoders

from decode import Sampling, Target, default_model, generate
from decode.requests.answer import LogProbs
from draftless_commands.server.fields import StreamOptions
from draftless_commands.server.replies import TextReply
from draftless_commands.server.tools import ToolReader, make_call, write_tools
from tests.support.serving import Place
from tests.support.tokenizers import byte_level, sentence_piece

pytest.importorskip("llguidance")
QUESTION: list[Any] = [{"role": "user", "content": "Describe Ann Lee, 31, from Berlin, who likes red and blue."}]
ASKED: dict[str, Any] = {"model": "tiny", "messages": QUESTION, "temperature": 0, "max_tokens": 100}
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "find_weather", "description": "Today's weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "tell_time"}},
]
CALL = {"id": "1", "type": "function", "function": {"name": "find_weather", "arguments": {"city": "Rome"}}}


class Person(BaseModel):
    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=120)
    colours: list[Literal["red", "green", "blue"]] = Field(max_length=3)


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    place = Place(default_model(), "--proposer", "merged", common=())
    yield place
    assert place.end() == 0


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.load(default_model())


@pytest.mark.slow
def test_a_schema_is_filled_as_generate_does(place: Place, target: Target) -> None:
    completion = place.client.chat.completions.parse(**ASKED, response_format=Person)
    (expected,) = generate(target, QUESTION, None, grammar=Person, max_new_tokens=100, text=True)
    assert completion.choices[0].message.parsed == Person.model_validate_json(expected.text)
    assert (completion.choices[0].finish_reason, expected.finish) == ("stop", "grammar")
    accepted = completion.usage.completion_tokens_details.accepted_prediction_tokens
    assert accepted > len(expected.tokens) / 4  # the names of fields, at least


@pytest.mark.slow
def test_a_seed_gives_the_same_json_in_any_company(place: Place, target: Target) -> None:
    fields = ASKED | {"temperature": 0.8, "seed": 5, "response_format": {"type": "json_object"}, "n": 3}
    completion = place.client.chat.completions.create(**fields)
    expected = generate(
        target, [QUESTION] * 3, None, grammar="json", max_new_tokens=100, text=True, sampling=Sampling(0.8, seed=5)
    )
    assert [choice.message.content for choice in completion.choices] == [answer.text for answer in expected]
    assert len({answer.text for answer in expected}) == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("outputs", "pattern"),
    [
        ({"regex": r"[0-9]{3}-[a-f]{4}"}, r"[0-9]{3}-[a-f]{4}"),
        ({"choice": ['yes, "surely"', "no"]}, r'yes, "surely"|no'),
        ({"json": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2}}, r"\[\w+, \w+\]"),
        ({"json": '{"const": 5}'}, "5"),
        ({"grammar": 'start: "a" "b"? "c"'}, "ab?c"),
    ],
)
def test_structured_outputs(place: Place, outputs: dict[str, Any], pattern: str) -> None:
    completion = place.client.chat.completions.create(**ASKED, extra_body={"structured_outputs": outputs})
    assert re.fullmatch(pattern, completion.choices[0].message.content or "")
    status, body = place.call(
        "POST", "/v1/completions", json.dumps({"prompt": "So: ", "structured_outputs": outputs, "max_tokens": 40})
    )
    assert status == 200 and re.fullmatch(pattern, body["choices"][0]["text"])


@pytest.mark.slow
@pytest.mark.parametrize("outputs", [{"grammar": "%s"}, {"json": '"%s"'}, {"json": None, "regex": None}])
def test_a_client_names_no_files(place: Place, tmp_path: Path, outputs: dict[str, Any]) -> None:
    file = tmp_path / "secret.json"
    file.write_text('{"const": "secret"}', encoding="utf-8")
    named = {name: each and each.replace("%s", str(file)) for name, each in outputs.items()}
    status, body = place.ask(structured_outputs=named)
    assert status == 400 and "secret" not in body["error"]["message"].replace(str(file), "")


@pytest.mark.slow
def test_a_tool_must_be_called(place: Place) -> None:
    (choice,) = place.client.chat.completions.create(
        **ASKED, tools=TOOLS, tool_choice="required", parallel_tool_calls=False
    ).choices
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    calls = choice.message.tool_calls or []
    assert calls and {call.function.name for call in calls} <= {"find_weather", "tell_time"}
    named: Any = {"type": "function", "function": {"name": "find_weather"}}
    (choice,) = place.client.chat.completions.create(**ASKED, tools=TOOLS, tool_choice=named).choices
    (call,) = choice.message.tool_calls or []
    assert call.function.name == "find_weather" and {*json.loads(call.function.arguments)} == {"city", "unit"}
    told = [*QUESTION, choice.message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": ""}]
    told[1]["tool_calls"][0]["function"]["arguments"] = ""  # as some programs write none
    after = place.client.chat.completions.create(**ASKED | {"messages": told, "max_tokens": 4}, tools=TOOLS)
    assert after.usage and after.usage.prompt_tokens > 100  # the tools and the call are in the prompt


@pytest.mark.slow
def test_streamed_calls(place: Place) -> None:
    one_call: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    stream = place.client.chat.completions.create(**ASKED, **one_call, stream=True)
    choices = [event.choices[0] for event in stream]
    calls = [call for choice in choices for call in choice.delta.tool_calls or ()]
    assert calls and [call.index for call in calls] == [*range(len(calls))]
    assert choices[-1].finish_reason == "tool_calls" and not any(choice.delta.content for choice in choices)
    stream = place.client.chat.completions.create(**ASKED, tools=TOOLS, stream=True)
    whole = place.client.chat.completions.create(**ASKED, tools=TOOLS).choices[0].message.content
    assert "".join(event.choices[0].delta.content or "" for event in stream) == whole


@pytest.mark.slow
def test_a_stream_tells_where_tokens_come_from(place: Place) -> None:
    fields = ASKED | {"stream": True, "stream_options": {"include_sources": True, "include_usage": True}}
    status, text = place.call(
        "POST", "/v1/chat/completions", json.dumps(fields | {"response_format": {"type": "text"}})
    )
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    choices = [event["choices"][0] for event in events if event["choices"]]
    pieces = [piece for choice in choices for piece in choice.get("pieces", ())]
    content = "".join(choice["delta"].get("content", "") for choice in choices)
    assert status == 200 and content and "".join(piece["text"] for piece in pieces) == content
    drafted = [piece["source"] for piece in pieces if piece["source"]]
    usage = events[-1]["usage"]["completion_tokens_details"]
    assert len(drafted) == usage["accepted_prediction_tokens"] > 0
    assert {*drafted} <= {"suffix", "recycling"}


@pytest.mark.slow
def test_usage_so_far(place: Place) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = [*place.client.chat.completions.create(**ASKED, stream=True, stream_options=options)]
    counts = [event.usage.completion_tokens for event in events if event.usage]
    assert len(counts) == len(events) and counts == sorted(counts) and counts[0] < counts[-1]


@pytest.mark.slow
def test_the_pages_blocks_run(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Target, "load", lambda: target)
    page = (Path(__file__).parents[2] / "docs" / "structured-output.md").read_text()
    names: dict[str, Any] = {"generate": generate}
    for block in re.findall(r"^```python\n(.*?)^```", page, re.M | re.S):
        exec(block, names)
    assert names["person"].age == 31 and re.fullmatch(r"(19|20)\d\d", names["year"].text)
    (answer,) = generate(target, "Count: ", None, grammar=lambda request_id: names["OnlyDigits"](target), text=True)
    assert answer.finish == "grammar" and len(answer.tokens) == 3 and answer.text.isdigit()


@pytest.mark.slow
def test_the_page_is_there(place: Place) -> None:
    status, text = place.call("GET", "/", key="")
    assert status == 200 and "<html" in text and not re.search(r"(src|href)=.https?:", text)


def read(text: str, pieces: int, **options: Any) -> tuple[str, str, list[dict[str, Any]]]:
    """What is streamed of a text that comes in pieces, and the content and calls at its end."""
    tokenizer: Any = None
    reader, size = ToolReader(tokenizer, [], TOOLS, **options), -(-len(text) // pieces)
    streamed = "".join(reader.push(text[place : place + size]) for place in range(0, len(text), size))
    found = reader.read(reader.held, [])
    return streamed, found["content"], [call["function"] for call in found.get("tool_calls", ())]


@pytest.mark.parametrize("pieces", [1, 7, 60])
def test_calls_in_a_text(pieces: int) -> None:
    call = '<tool_call>\n{"name": "find_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    found = {"name": "find_weather", "arguments": '{"city": "Rome"}'}
    assert read(f"Let me see.\n{call}", pieces) == ("Let me see.\n", "", [found])
    assert read(f"{call}\n{call}", pieces) == ("", "", [found, found])
    assert read("1 < 2 <tool", pieces) == ("1 < 2 ", "<tool", [])
    llama = call.replace("arguments", "parameters")
    assert read(llama, pieces) == ("", "", [found])
    other = call.replace("find_weather", "erase_disk")
    assert read(other, pieces) == ("", other, [])
    assert read("<tool_call>nothing", pieces) == ("", "<tool_call>nothing", [])
    assert read("Plain.", pieces) == ("Plain.", "", [])
    assert read('{"city": "Rome"}', pieces, forced="find_weather") == ("", "", [found])
    assert (
        read(f"[{json.dumps({'name': 'tell_time', 'arguments': {}})}]", pieces, forced="")[2][0]["name"] == "tell_time"
    )
    assert read('{"city": "Ro', pieces, forced="find_weather") == ("", '{"city": "Ro', [])
    unreadable = '<tool_call>{"name": "tell_time", "arguments": "Paris"}</tool_call>'
    assert read(unreadable, pieces) == ("", unreadable, [])
    two = '<tool_call>{"name": "tell_time"}</tool_call>' * 2
    assert len(read(two, pieces)[2]) == 2 and len(read(two, pieces, most=1)[2]) == 1
    assert re.fullmatch("[a-z0-9]{9}", make_call("tell_time")["id"])  # Mistral's templates want it


TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "assistant: ",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"\s*<call>",
            "close": "</call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close": "</s>", "content": "text"},
    },
}


def test_calls_by_the_tokenizers_response_template() -> None:
    tokenizer = byte_level()
    tokenizer.response_template = TEMPLATE
    prompt, answer = (
        tokenizer(text)["input_ids"]
        for text in (
            "user: Weather in Rome? assistant: ",
            '<think>Hm.</think>I look.\n<call>{"name": "find_weather", "arguments": {"city": "Rome"}}</call>',
        )
    )
    reader = ToolReader(tokenizer, prompt, TOOLS)
    assert reader.push("<think>Hm.") == ""  # all is held back
    found = reader.read(reader.held, answer)
    assert (found["content"], found["reasoning_content"]) == ("I look.", "Hm.")
    assert [call["function"] for call in found["tool_calls"]] == [
        {"name": "find_weather", "arguments": '{"city": "Rome"}'}
    ]


def test_tools_are_text_where_the_template_has_none() -> None:
    asked = [{"role": "system", "content": "Be brief."}, *QUESTION, {"role": "assistant", "tool_calls": [CALL]}]
    messages = write_tools({"messages": asked, "tools": TOOLS})["messages"]
    assert [message["role"] for message in messages] == ["system", "user", "assistant"]
    assert messages[0]["content"].startswith("Be brief.\n\nYou may call tools.")
    assert json.dumps(TOOLS[0]["function"]) in messages[0]["content"]
    results = [{"role": "tool", "content": text} for text in ("", "20 C")]
    *_, last = write_tools({"messages": [*asked, *results, QUESTION[0]], "tools": TOOLS})["messages"]
    assert last["content"].split("\n")[-1] == QUESTION[0]["content"] and last["content"].count("<tool_response>") == 2
    told = {"role": "tool", "tool_call_id": "1", "content": "20 C"}
    assert write_tools({"messages": [*asked, told], "tools": TOOLS})["messages"][3] == {
        "role": "user",
        "content": "<tool_response>\n20 C\n</tool_response>",
    }
    assert messages[2]["content"] == f"<tool_call>\n{json.dumps(CALL['function'])}\n</tool_call>"
    assert write_tools({"messages": QUESTION, "tools": []}) == {"messages": QUESTION, "tools": []}
    parts = [each | {"content": [{"type": "text", "text": each["content"]}]} for each in (asked[0], told)]
    written = write_tools({"messages": [parts[0], *asked[1:], parts[1]], "tools": TOOLS})["messages"]
    assert written == write_tools({"messages": [*asked, told], "tools": TOOLS})["messages"]


def test_a_token_is_named_as_it_is_within_a_text() -> None:
    """Some tokenizers leave out the space that a text begins with."""
    tokenizer = sentence_piece(["the", " the"])
    tokenizer.backend_tokenizer.decoder = decoders.Sequence(
        [tokenizer.backend_tokenizer.decoder, decoders.Strip(" ", 1, 0)]
    )
    reply = TextReply("tiny", tokenizer, [], 1, StreamOptions())
    within, alone, half = tokenizer.convert_tokens_to_ids(["\u2581the", "the", "<0xE2>"])
    assert [reply.name(token) for token in (within, alone, half)] == [" the", "the", "\ufffd"]
    told = reply.tell([within], [LogProbs(-0.1, {within: -0.1, alone: -3.0})])
    assert told is not None and told["top_logprobs"] == [{" the": -0.1, "the": -3.0}]


def test_offsets_are_those_of_characters_of_several_tokens() -> None:
    tokenizer = byte_level()
    tokens, told = tokenizer("é=x")["input_ids"], [LogProbs(-0.1, {})] * 4
    answer = SimpleNamespace(tokens=tokens, log_probs=told, text="é=x", finish="length")
    reply, request = TextReply("tiny", tokenizer, [], 1, StreamOptions()), SimpleNamespace(answer=answer)
    assert reply.choose(0, request)["logprobs"]["text_offset"] == [0, 0, 1, 2]  # type: ignore[arg-type]
