"""`draftless serve` under bad bodies, clients that leave, load and failing steps: the others' answers do not change."""

from __future__ import annotations

import gc
import json
import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

from decode import Engine, Step, Target, Tree
from draftless_commands.server.app import Server, make_app
from draftless_commands.server.fields import ChatFields, TextFields
from tests.support.models import tiny
from tests.support.serving import ASKED, KEY, MESSAGES, Place, answer
from tests.support.tokenizers import byte_level

pytestmark = pytest.mark.slow
VALUES = some.recursive(
    some.none() | some.booleans() | some.integers() | some.floats() | some.text(max_size=8),
    lambda inner: some.lists(inner, max_size=3) | some.dictionaries(some.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
KNOWN = some.sampled_from([[], {}, "", -1, 0, 1, 2**70, 0.5, True, "text", [{}], [[1]], [5], {"type": "function"}])
SHORT = {"max_tokens": 3, "model": "tiny"}
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def target() -> Target:
    tokenizer = byte_level()  # which grammars can read
    tokenizer.chat_template = "{% for each in messages %}{{ each.role }}: {{ each.content }}\n{% endfor %}"
    return Target(tiny("llama", vocab_size=len(tokenizer), max_position_embeddings=256), tokenizer)


@pytest.fixture(scope="module")
def client(target: Target) -> Iterator[TestClient]:
    engine = Engine(target, "ngram", rows=4)
    app, local = make_app(Server(engine, "tiny", queue=40)), "http://localhost"
    with TestClient(app, local, raise_server_exceptions=False) as client:
        yield client


def ask(client: TestClient, **fields: Any) -> Any:
    return client.post("/v1/chat/completions", json=ASKED | fields)


@pytest.mark.parametrize(
    "fields",
    [
        dict.fromkeys(("reasoning_effort", "store", "metadata", "functions", "audio", "suffix")),
        {"safety_identifier": "a", "prompt_cache_key": "b", "store": False, "metadata": {"a": "b"}},
        {"service_tier": "auto", "modalities": ["text"], "top_k": -1, "stream_options": {"include_obfuscation": False}},
        {"messages": [*MESSAGES, {"role": "assistant", "content": None, "refusal": "no"}, MESSAGES[-1]]},
        {"messages": [MESSAGES[-1], {"role": "developer", "content": "Be short."}]},
    ],
)
def test_what_clients_send_besides(client: TestClient, fields: dict[str, Any]) -> None:
    made = ask(client, **SHORT, **fields)
    assert made.status_code == 200, made.text


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stop": ["a"] * 17}, "stop: Input should be a valid string; or List should have at most 16 items"),
        ({"stop": [1]}, "stop: Input should be a valid string"),
        ({"tool_choice": {"type": "function"}}, "tool_choice: .*; or function: Field required"),
        ({"reasoning_effort": "low"}, "'reasoning_effort', which this model's chat template does not take"),
    ],
)
def test_what_is_wrong_is_named(client: TestClient, fields: dict[str, Any], message: str) -> None:
    made = ask(client, **SHORT, **fields)
    assert made.status_code == 400 and re.search(message, made.json()["error"]["message"]), made.text
    assert made.json()["error"]["param"] in (None, "messages", *fields)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=some.sampled_from([*ChatFields.model_fields]), value=VALUES | KNOWN)
def test_any_value_of_a_chats_fields(client: TestClient, name: str, value: Any) -> None:
    check(client, "/v1/chat/completions", ASKED | SHORT | {name: value})


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=some.sampled_from([*TextFields.model_fields]), value=VALUES | KNOWN)
def test_any_value_of_a_texts_fields(client: TestClient, name: str, value: Any) -> None:
    check(client, "/v1/completions", SHORT | {"prompt": "abc"} | {name: value})


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(part=some.sampled_from(["messages", "tools", "response_format", "structured_outputs"]), value=VALUES)
def test_any_value_within_a_field(client: TestClient, part: str, value: Any) -> None:
    whole: Any = {
        "messages": [{"role": "user", "content": value}],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": value}}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": value}},
        "structured_outputs": {"json": value},
    }[part]
    check(client, "/v1/chat/completions", ASKED | SHORT | {part: whole})


def check(client: TestClient, path: str, body: Any) -> None:
    """An answer, or an error that is the client's, in OpenAI's form. JSON has no infinity, but Python writes it."""
    try:
        text = json.dumps(body).encode()
    except (ValueError, UnicodeEncodeError):
        return
    made = client.post(path, content=text, headers=JSON)
    assert made.status_code in (200, 400, 404), (body, made.text)
    if made.status_code != 200:
        error = made.json()["error"]
        assert error["message"] and error["type"] in ("invalid_request_error", "not_found_error")


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=some.binary(max_size=40) | some.text(max_size=40).map(lambda text: text.encode("utf-8", "replace")))
def test_any_body(client: TestClient, body: bytes) -> None:
    made = client.post("/v1/chat/completions", content=body, headers=JSON)
    assert made.status_code == 400 and made.json()["error"]["message"]


def test_deep_and_long_bodies(client: TestClient, target: Target) -> None:
    for body, status in (
        ("[" * 100_000, 400),
        ('{"messages": ' + "[" * 100_000, 400),
        (json.dumps(ASKED | {"messages": [{"role": "user", "content": "a" * (1 << 20)}]}), 400),
        (json.dumps(ASKED | {"user": "a" * (3 << 20)}), 413),
        (json.dumps(ASKED | {"structured_outputs": {"regex": "a?" * 50_000}}), 400),
        (json.dumps(ASKED | {"structured_outputs": {"regex": "a{99999999999999999999}"}}), 400),
        (json.dumps(ASKED | {"structured_outputs": {"regex": "(" * 3000 + "a" + ")" * 3000}}), 400),
        (json.dumps(ASKED | {"structured_outputs": {"choice": ["a" * 9] * 9000}}), 400),
        (json.dumps(ASKED | {"messages": [call_with("[" * 100_000), MESSAGES[1]]}), 400),
        (json.dumps(ASKED | {"messages": [{"role": "assistant", "tool_calls": 5}, MESSAGES[1]]}), 400),
        (json.dumps(ASKED | {"logit_bias": {"1" * 5000: 1}}), 400),
    ):
        assert client.post("/v1/chat/completions", content=body.encode(), headers=JSON).status_code == status
    (expected,) = answer(target)
    assert ask(client).json()["choices"][0]["message"]["content"] == expected.text


def call_with(arguments: str) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"function": {"name": "x", "arguments": arguments}}]}


@pytest.mark.parametrize("host", ["evil.example:8000", "localhost.evil.example", "[::2]:8000", ""])
def test_a_name_that_leads_to_this_machine_is_refused(client: TestClient, host: str) -> None:
    """As of a web page whose name leads to 127.0.0.1 (DNS rebinding)."""
    made = client.post("/v1/chat/completions", content=json.dumps(ASKED), headers=JSON | {"Host": host})
    assert made.status_code == 403 and "this server is for this machine" in made.json()["error"]["message"]
    for own in ("127.0.0.1:8000", "[::1]:8000", "localhost"):
        assert client.get("/health", headers={"Host": own}).status_code == 200


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", None])
def test_what_a_web_page_of_others_could_send(client: TestClient, kind: str | None) -> None:
    """Without asking first, as browsers must before they send JSON to another place."""
    headers = {} if kind is None else {"Content-Type": kind}
    made = client.post("/v1/chat/completions", content=json.dumps(ASKED), headers=headers)
    assert made.status_code == 415 and "Content-Type: application/json" in made.json()["error"]["message"]
    with_charset = {"Content-Type": "Application/JSON; charset=utf-8"}
    made = client.post("/v1/chat/completions", content=json.dumps(ASKED | SHORT), headers=with_charset)
    assert made.status_code == 200


class Failing:
    """Drafts nothing, and fails while it is told to."""

    layers = ()
    fails = False

    def propose(self, step: Step, budget: int) -> Tree:
        if self.fails:
            raise RuntimeError("out of luck")
        return Tree.chain([[root] for root in step.bonus])


def test_a_step_that_fails(target: Target, capsys: pytest.CaptureFixture[str]) -> None:
    proposer = Failing()
    (expected,) = answer(target)
    app, local = make_app(Server(Engine(target, proposer), "tiny")), "http://localhost"
    with TestClient(app, local, raise_server_exceptions=False) as client:
        proposer.fails = True
        made = ask(client)
        assert made.status_code == 500 and "out of luck" in made.json()["error"]["message"]
        assert 'data: {"error": {"message": "' in ask(client, stream=True).text
        proposer.fails = False
        assert ask(client).json()["choices"][0]["message"]["content"] == expected.text
    assert "a step failed: RuntimeError: out of luck" in capsys.readouterr().err


def test_a_hundred_at_once(save_model: Callable[..., Path], target: Target) -> None:
    place = Place(save_model(), "--rows", "8", "--queue", "92")
    seeds = range(100)
    expected = {seed: place.ask(temperature=1, seed=seed, max_tokens=12)[1]["choices"] for seed in seeds[:10]}
    with ThreadPoolExecutor(100) as pool:
        made = [*pool.map(lambda seed: place.ask(temperature=1, seed=seed, max_tokens=12), seeds)]
    assert [status for status, _ in made] == [200] * 100
    assert all(made[seed][1]["choices"] == choices for seed, choices in expected.items())
    assert place.end() == 0


STAGES = ("connects", "sends a head", "sends half a body", "sends all", "reads a little", "reads some events")


def leave(port: int, stage: str, number: int) -> None:
    """A client that goes away at some stage."""
    fields = ASKED | {"stream": number % 2 == 0, "max_tokens": 200, "seed": number, "temperature": 1}
    body = json.dumps(fields).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    head += f"Authorization: Bearer {KEY}\r\nContent-Type: application/json\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=60) as link:
        if stage != "connects":
            link.sendall(head.encode())
        if stage == "sends half a body":
            link.sendall(body[: len(body) // 2])
        if STAGES.index(stage) >= STAGES.index("sends all"):
            link.sendall(body)
        if stage == "sends all":
            time.sleep(0.001 * (number % 30))
        if stage == "reads a little":
            link.recv(20)
        if stage == "reads some events":
            link.recv(900)


def test_five_hundred_clients_that_leave(save_model: Callable[..., Path]) -> None:
    place = Place(save_model(), "--rows", "4", "--queue", "600")
    fields = {"temperature": 1, "seed": 3, "max_tokens": 40}
    expected = place.ask(**fields)[1]["choices"]
    with ThreadPoolExecutor(16) as pool:
        gone = [pool.submit(leave, place.port, STAGES[number % len(STAGES)], number) for number in range(500)]
        stayed = [pool.submit(place.ask, **fields) for _ in range(10)]
        assert [each.result()[1]["choices"] for each in stayed] == [expected] * 10
        for each in gone:
            each.result()
    place.wait_until_idle()
    assert len(os.listdir(f"/proc/{place.process.pid}/fd")) < 60
    assert place.ask(**fields)[1]["choices"] == expected
    assert place.end() == 0


def test_nothing_is_left_of_requests(client: TestClient) -> None:
    def count() -> int:
        for number in range(150):
            ask(client, max_tokens=2, seed=number, temperature=1, stream=number % 2 == 0, n=1 + number % 3)
        gc.collect()
        return len(gc.get_objects())

    count()
    assert abs(count() - count()) < 60
