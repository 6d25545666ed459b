"""`draftless serve`: OpenAI's own client, the same answers as `generate`, refusals, and clients that go away."""

from __future__ import annotations

import http.client
import json
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from shutil import which
from typing import Any

import openai
import pytest
import torch
from huggingface_hub import InferenceClient

from decode import Sampling, Target, generate
from draftless_commands.serve import main
from tests.support.commands import Call
from tests.support.serving import ASKED, KEY, MESSAGES, Place, answer

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(save_model: Callable[..., Path]) -> Path:
    return save_model()


@pytest.fixture(scope="module")
def target(folder: Path) -> Target:
    return Target.load(folder, dtype="float64", accelerate="off")


@pytest.fixture(scope="module")
def place(folder: Path) -> Iterator[Place]:
    place = Place(folder, "--rows", "4", "--queue", "12")
    yield place
    assert place.end() == 0


def test_a_chat_is_answered_as_generate_does(place: Place, target: Target) -> None:
    (expected,) = answer(target)
    whole = place.client.chat.completions.create(**ASKED)
    assert whole.choices[0].message.content == expected.text
    assert whole.choices[0].finish_reason == {"eos": "stop", "length": "length"}[expected.finish]
    assert whole.usage is not None and whole.usage.completion_tokens == len(expected.tokens)
    assert whole.usage.prompt_tokens == len(expected.prompt)
    details = whole.usage.completion_tokens_details
    assert details is not None and details.accepted_prediction_tokens is not None
    again = place.client.chat.completions.create(**ASKED)
    assert again.usage is not None and again.usage.prompt_tokens_details is not None
    assert again.usage.prompt_tokens_details.cached_tokens
    assert again.choices[0].message.content == expected.text


def test_a_stream_has_the_same_text(place: Place, target: Target) -> None:
    (expected,) = answer(target)
    pieces = [*place.client.chat.completions.create(**ASKED, stream=True, stream_options={"include_usage": True})]
    assert pieces[0].choices[0].delta.role == "assistant"
    assert "".join(each.choices[0].delta.content or "" for each in pieces if each.choices) == expected.text
    assert [each.choices[0].finish_reason for each in pieces if each.choices][-1] is not None
    assert not pieces[-1].choices and pieces[-1].usage is not None
    assert pieces[-1].usage.completion_tokens == len(expected.tokens)


def test_a_seed_gives_the_text_of_generate_in_any_company(place: Place, target: Target) -> None:
    """Choice i has the noise of request i."""
    sampling = Sampling(temperature=0.9, top_p=0.95, seed=5)
    expected = [
        each.text for each in generate(target, [MESSAGES] * 3, None, sampling=sampling, max_new_tokens=40, text=True)
    ]
    settings = {**ASKED, "temperature": 0.9, "top_p": 0.95, "seed": 5}
    with ThreadPoolExecutor(6) as pool:
        calls = [pool.submit(place.client.chat.completions.create, **settings, n=3) for _ in range(3)]
        calls += [pool.submit(place.client.chat.completions.create, **{**settings, "seed": 6}) for _ in range(3)]
        found = [[choice.message.content for choice in call.result().choices] for call in calls]
    assert found[:3] == [expected] * 3 and found[3] == found[4] == found[5] != [expected[0]]
    assert len({*expected}) > 1


def test_log_probabilities(place: Place, target: Target) -> None:
    (expected,) = answer(target, log_probs=3)
    choice = place.client.chat.completions.create(**ASKED, logprobs=True, top_logprobs=3).choices[0]
    assert choice.logprobs is not None and choice.logprobs.content is not None
    told = choice.logprobs.content
    assert [each.logprob for each in told] == pytest.approx([each.chosen for each in expected.log_probs])
    assert all(len(each.top_logprobs) == 3 and each.top_logprobs[0].logprob >= each.logprob - 1e-9 for each in told)
    whole = place.client.completions.create(model="tiny", prompt="ab", temperature=0, max_tokens=6, logprobs=2)
    lists = whole.choices[0].logprobs
    assert lists is not None and lists.tokens is not None and lists.token_logprobs is not None
    assert "".join(lists.tokens) == whole.choices[0].text and len(lists.token_logprobs) == 6


def test_texts_go_on(place: Place, target: Target) -> None:
    prompts = ["The sky is", "One, two,"]
    expected = [each.text for each in generate(target, prompts, None, chat=False, max_new_tokens=16, text=True)]
    whole = place.client.completions.create(model="tiny", prompt=prompts, temperature=0)
    assert [choice.text for choice in whole.choices] == expected
    pieces = place.client.completions.create(model="tiny", prompt=prompts, temperature=0, stream=True)
    texts = ["", ""]
    for piece in pieces:
        texts[piece.choices[0].index] += piece.choices[0].text
    assert texts == expected
    ids = target.tokenizer(prompts[0])["input_ids"]
    given = place.client.completions.create(model="tiny", prompt=ids, temperature=0)
    assert given.choices[0].text == expected[0]


def test_stop_strings_penalties_and_biases(place: Place, target: Target) -> None:
    (expected,) = answer(target)
    stop = expected.text[5]
    cut = place.client.chat.completions.create(**ASKED, stop=stop).choices[0]
    assert cut.message.content == expected.text.partition(stop)[0] and cut.finish_reason == "stop"
    token = expected.tokens[0]
    banned = place.client.chat.completions.create(**ASKED, logit_bias={str(token): -100})
    assert banned.choices[0].message.content != expected.text
    told = place.client.chat.completions.create(**{**ASKED, "max_tokens": 30}, presence_penalty=2, frequency_penalty=2)
    text = told.choices[0].message.content or ""
    assert len({*text}) > len({*expected.text[:30]}) or len({*text}) == len(text)


def test_models(place: Place) -> None:
    assert [each.id for each in place.client.models.list()] == ["tiny"]
    assert place.client.models.retrieve("tiny").owned_by == "draftless"
    with pytest.raises(openai.NotFoundError, match="'tiny' is served"):
        place.client.models.retrieve("large")
    assert place.call("GET", "/health", key="")[0] == 200


@pytest.mark.parametrize(
    ("fields", "status", "named"),
    [
        ({"tools": [{}]}, 400, "tools"),
        ({"temperature": "hot"}, 400, "temperature"),
        ({"temperature": -1}, 400, "temperature"),
        ({"n": 0}, 400, "n: "),
        ({"max_tokens": True}, 400, "max_tokens"),
        ({"messages": "hello"}, 400, "messages"),
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, 400, "messages"),
        ({"messages": [{"role": "user", "content": "a" * 5000}]}, 400, "context"),
        ({"messages": [*MESSAGES, {"role": "assistant", "content": "Because"}]}, 400, "assistant"),
        ({"logit_bias": {"x": 1}}, 400, "logit_bias"),
        ({"logit_bias": {"100000": 1}}, 400, "logit_bias"),
        ({"top_logprobs": 2}, 400, "logprobs"),
        ({"response_format": {"type": "json_object"}}, 400, "llguidance cannot read this tokenizer"),
        ({"response_format": {"type": "json_schema"}}, 400, "response_format"),
        ({"structured_outputs": {"regex": "("}}, 400, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, 400, "structured_outputs: give one of"),
        ({"tool_choice": "required"}, 400, "tool_choice needs tools"),
        ({"nodes": 10**9}, 400, "nodes"),
        ({"stop": [""]}, 400, "stop"),
        ({"model": "large"}, 404, "large"),
        ({"n": 99}, 400, "room for 16"),
        ({"messages": [{"role": "user", "content": "a" * (3 << 20)}]}, 413, "bytes"),
    ],
)
def test_refusals_name_the_field(place: Place, fields: dict[str, Any], status: int, named: str) -> None:
    found, body = place.ask(**fields)
    assert found == status and named in body["error"]["message"], body


@pytest.mark.parametrize(
    ("prompt", "named"),
    [
        ([], "prompt"),
        ([[]], "prompt"),
        ("", "no tokens"),
        ([[3], [100_000]], "none of 0 to"),
        ([-1], "none of 0 to"),
        ([0.5] * 100_000, "prompt"),
        (["a"] * 100_000, "room for 16"),
        ({"a": 1}, "prompt"),
    ],
)
def test_refused_prompts(place: Place, prompt: Any, named: str) -> None:
    found, body = place.call("POST", "/v1/completions", json.dumps({"prompt": prompt}))
    assert found == 400 and named in body["error"]["message"], body


def test_other_refusals(place: Place) -> None:
    for body in ("{", "[]", "5", b"\xff"):
        status, told = place.call("POST", "/v1/chat/completions", body)
        assert status == 400 and told["error"]["message"], told
    assert place.call("POST", "/v1/chat/completions", json.dumps(ASKED), key="wrong")[0] == 401
    assert place.call("GET", "/v1/nothing")[0] == 404 and place.call("GET", "/v1/completions")[0] == 405
    assert place.ask()[0] == 200
    assert place.read_metric("num_requests_waiting") == 0


def test_a_client_that_goes_away_ends_its_request_alone(place: Place, target: Target) -> None:
    endless = {**ASKED, "max_tokens": 200, "logit_bias": {"2": -100}}
    (expected,) = answer(target)
    ended = 'request_success_total{finished_reason="%s",model_name="tiny"}'
    for stream in (True, False):
        connections, before = [], [place.read_metric(ended % each) for each in ("abort", "stop", "length")]
        for _ in range(3):
            connection = http.client.HTTPConnection("127.0.0.1", place.port)
            headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
            connection.request("POST", "/v1/chat/completions", json.dumps(endless | {"stream": stream}), headers)
            connections.append(connection)
        assert place.client.chat.completions.create(**ASKED).choices[0].message.content == expected.text
        for connection in connections:
            connection.close()
        place.wait_until_idle()
        aborted, *finished = (place.read_metric(ended % each) for each in ("abort", "stop", "length"))
        assert (aborted, sum(finished)) == (before[0] + 3, sum(before[1:]) + 1)


def test_the_pages_example_runs(place: Place, target: Target, capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "serve.md").read_text()
    code = page.partition("```python\n")[2].partition("```")[0]
    for given, own in (("http://127.0.0.1:8000/v1", place.url), ('"none"', repr(KEY)), ("my-model", "tiny")):
        assert given in code
        code = code.replace(given, own)
    exec(code)
    question = [{"role": "user", "content": "Why is the sky blue?"}]
    (expected,) = generate(target, question, None, max_new_tokens=target.context, text=True)
    assert capsys.readouterr().out == expected.text


def test_the_pages_custom_generate_runs(target: Target) -> None:
    page = (Path(__file__).parents[2] / "docs" / "serve.md").read_text()
    names: dict[str, Any] = {}
    exec(page.rpartition("```python\n")[2].partition("```")[0], names)
    prompt = torch.tensor([[28, 35, 28, 35, 28]])
    made = names["generate"](target.model, prompt, max_new_tokens=8, do_sample=False)
    assert torch.equal(made, target.model.generate(prompt, max_new_tokens=8, do_sample=False))


def test_hugging_face_client(place: Place, target: Target) -> None:
    client = InferenceClient(base_url=place.url, api_key=KEY)
    fields: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "temperature": 0.0, "max_tokens": 40}
    (expected,) = answer(target)
    whole = client.chat_completion(**fields, logprobs=True, top_logprobs=2)
    assert whole.choices[0].message.content == expected.text
    assert whole.usage.completion_tokens == len(expected.tokens)
    assert len(whole.choices[0].logprobs.content[0].top_logprobs) == 2
    pieces = client.chat_completion(**fields, stream=True)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == expected.text


@pytest.mark.skipif(which("curl") is None, reason="this needs curl")
def test_curl(place: Place, target: Target) -> None:
    command = ["curl", "--silent", "--no-buffer", f"{place.url}/chat/completions", "--json", "@-"]
    command += ["--header", f"Authorization: Bearer {KEY}"]
    (expected,) = answer(target)
    for fields in ({}, {"stream": True, "stream_options": {"include_usage": True}}):
        made = subprocess.run(command, input=json.dumps(ASKED | fields), capture_output=True, text=True, check=True)
        if fields:
            lines = [line.removeprefix("data: ") for line in made.stdout.split("\n\n") if line]
            *events, last, end = [json.loads(line) if line.startswith("{") else line for line in lines]
            text = "".join(event["choices"][0]["delta"].get("content", "") for event in events)
            assert end == "[DONE]" and last["usage"]["completion_tokens"] == len(expected.tokens)
        else:
            text = json.loads(made.stdout)["choices"][0]["message"]["content"]
        assert text == expected.text


def test_metrics(place: Place) -> None:
    before = place.read_metric("generation_tokens_total")
    whole = place.client.chat.completions.create(**ASKED)
    assert whole.usage is not None
    assert place.read_metric("generation_tokens_total") - before == whole.usage.completion_tokens
    assert place.read_metric("time_to_first_token_seconds_count") > 0
    drafted, accepted = (place.read_metric(f"spec_decode_num_{name}_tokens_total") for name in ("draft", "accepted"))
    assert drafted >= accepted == place.read_metric("spec_decode_num_accepted_tokens_per_pos_total")


def test_running_answers_finish_after_sigterm(folder: Path, target: Target) -> None:
    (expected,) = answer(target)
    place = Place(folder)
    pieces = place.client.chat.completions.create(**ASKED, stream=True)
    text = next(iter(pieces)).choices[0].delta.content or ""
    assert place.end() == 0
    assert text + "".join(piece.choices[0].delta.content or "" for piece in pieces) == expected.text


def test_bad_options(run_main: Call, folder: Path, place: Place) -> None:
    run_main(main, "--model", folder, "--port", str(place.port)).refused(f"--port {place.port}", "in use")
    run_main(main, "--model", folder, "--proposer", "merged", "--store", "kept").refused("there is no option --store")
    run_main(main, "--model", folder, "--rows", "0").refused("'0' is not a whole number from 1 on")
