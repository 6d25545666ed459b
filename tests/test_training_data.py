"""Training data: which tokens are answers, which prompts are held out, and clear errors for bad files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from training.data import Dataset, has_looped, load_dataset, tokenize

ENDING = (
    "{% for one in messages %}{{ one.role[0] }}:{{ one.content }}"
    "{% if one.role == 'assistant' %}</s>#{% else %} {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
TURNS = [("user", "hi"), ("assistant", "yo"), ("user", "ok"), ("assistant", "no")]
GOOD = '{"prompt": "x", "response": "y"}\n'


@pytest.fixture(scope="module")
def folder(save_model: Callable[..., Path]) -> Path:
    return save_model()


@pytest.fixture
def tokenizer(folder: Path) -> Any:
    """Each character is a token; the template always writes `u:hi a:` and no end token."""
    return AutoTokenizer.from_pretrained(folder)


def read(turns: list[tuple[str, str]], tokenizer: Any, **settings: Any) -> tuple[str, list[str]]:
    """The text of a conversation, and the texts of its answers."""
    messages = [{"role": role, "content": content} for role, content in turns]
    example = tokenize(messages, tokenizer, place="here", **{"finished": True, **settings})
    letters = tokenizer.convert_ids_to_tokens(list(example.tokens))
    return "".join(letters), ["".join(letters[begin:end]) for begin, end in example.spans]


@pytest.mark.parametrize(
    ("turns", "finished", "text", "answers"),
    [
        (TURNS[:2], True, "u:hi a:yo</s>", ["yo</s>"]),
        (TURNS[:2], False, "u:hi a:yo", ["yo"]),
        (TURNS, True, "u:hi a:yo</s>#u:ok a:no</s>", ["yo</s>", "no</s>"]),
        (TURNS, False, "u:hi a:yo</s>#u:ok a:no", ["yo</s>", "no"]),
        ([("system", "be"), *TURNS[:2]], True, "s:be u:hi a:yo</s>", ["yo</s>"]),
        ([("user", "hi"), ("assistant", "")], True, "u:hi a:</s>", ["</s>"]),
        (
            [("assistant", "hey"), *TURNS[:2]],
            True,
            "a:hey</s>#u:hi a:yo</s>",
            ["yo</s>"],
        ),  # the first message is no answer
    ],
)
def test_answers_end_with_their_end_token(
    tokenizer: Any, turns: list[tuple[str, str]], finished: bool, text: str, answers: list[str]
) -> None:
    tokenizer.chat_template = ENDING
    assert read(turns, tokenizer, finished=finished) == (text, answers)


def test_answers_may_end_with_another_token_of_the_model(tokenizer: Any) -> None:
    tokenizer.chat_template = ENDING.replace("</s>", "|")
    assert read(TURNS[:2], tokenizer)[1] == ["yo|#"]
    ends = tokenizer.convert_tokens_to_ids(["|", "#"])
    assert read(TURNS[:2], tokenizer, ends=ends)[1] == ["yo|"]
    assert read(TURNS[:2], tokenizer, ends=ends, finished=False)[1] == ["yo"]


def test_a_template_without_an_end_token(tokenizer: Any) -> None:
    """Text after an answer counts as part of it, unless another turn replaces it."""
    assert read(TURNS[:2], tokenizer) == ("u:hi a:yo a:", ["yo a:"])
    assert read(TURNS, tokenizer) == ("u:hi a:yo u:ok a:no a:", ["yo ", "no a:"])


def test_removed_text_is_no_answer(tokenizer: Any) -> None:
    """Many templates remove the thoughts of earlier answers."""
    thoughts = "{{ one.content if loop.last else one.content.split('|')[-1] }}"
    tokenizer.chat_template = ENDING.replace("{{ one.content }}", thoughts)
    turns = [("user", "hi"), ("assistant", "er|yo"), ("user", "ok"), ("assistant", "um|no")]
    assert read(turns[:2], tokenizer) == ("u:hi a:er|yo</s>", ["er|yo</s>"])
    assert read(turns, tokenizer) == ("u:hi a:yo</s>#u:ok a:um|no</s>", ["um|no</s>"])


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ messages|length }}{{ messages[0].content }}", "changes the text before an answer"),
        ("{{ raise_exception('no roles but one') }}", "cannot render this conversation (no roles but one)"),
        ("{{ messages[9].content.x }}", "cannot render this conversation"),
    ],
)
def test_a_template_that_cannot_be_masked(tokenizer: Any, template: str, message: str) -> None:
    tokenizer.chat_template = template
    with pytest.raises(ValueError) as error:
        read(TURNS[:2], tokenizer)
    assert str(error.value).startswith("here: the chat template ") and message in str(error.value)


@pytest.mark.parametrize(
    ("turns", "finished", "text", "answers"),
    [
        (TURNS[:2], True, "hiyo</s>", ["yo</s>"]),
        (TURNS[:2], False, "hiyo", ["yo"]),
        (TURNS, True, "hiyookno</s>", ["yo", "no</s>"]),
        ([("user", ""), ("assistant", "yo")], True, "yo</s>", ["o</s>"]),  # no position predicts the very first token
    ],
)
def test_plain_text(
    tokenizer: Any, turns: list[tuple[str, str]], finished: bool, text: str, answers: list[str]
) -> None:
    tokenizer.chat_template = None
    assert read(turns, tokenizer, finished=finished) == (text, answers)


def test_plain_text_whose_tokens_span_prompt_and_answer() -> None:
    backend = Tokenizer(models.BPE({"x": 0, "a": 1, "b": 2, "c": 3, "ab": 4}, [("a", "b")]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    assert read([("user", "xa"), ("assistant", "bc")], tokenizer) == ("xabc", ["abc"])


def test_loops() -> None:
    assert has_looped([*range(100), *[7, 8, 9] * 20])
    assert has_looped([5] * 60) and not has_looped([5] * 59)
    assert not has_looped([*[5] * 200, 2])
    assert not has_looped(list(range(20)) * 10)  # a period of 20 may be a table


def load(file: Path, tokenizer: Any, rows: list[Any], max_length: int = 100, prompts: int = 100) -> Dataset:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_dataset([file], tokenizer, max_length, prompts)


def test_rows_that_are_not_trained_on(tokenizer: Any, tmp_path: Path) -> None:
    tokenizer.chat_template = ENDING
    rows = [
        {"prompt": "one", "response": "yes"},
        {"prompt": "two", "dropped": "loop"},
        {"prompt": "three", "response": "no " * 30, "finished": False},
        {"prompt": "x" * 90, "response": "too late"},
        {"messages": [{"role": role, "content": content} for role, content in [*TURNS, ("user", "bye")]]},
        {"prompt": "five", "response": "12345", "finished": False},
        {"prompt": "six", "response": "no " * 30},
    ]
    dataset = load(tmp_path / "data.jsonl", tokenizer, rows, max_length=13)
    texts = ["".join(tokenizer.convert_ids_to_tokens(list(example.tokens))) for example in dataset.examples]
    assert texts == ["u:one a:yes</s>", "u:hi a:yo</s>#u:", "u:five a:1234"]
    assert [example.spans for example in dataset.examples] == [((8, 12),), ((7, 10),), ((9, 13),)]
    assert (dataset.dropped, dataset.too_long, dataset.answer_tokens) == (2, 1, 11)


def talk(prompt: str, system: str | None = None) -> dict[str, Any]:
    turns = [("user", prompt), ("assistant", "fine"), ("user", "go on"), ("assistant", "well")]
    turns = turns if system is None else [("system", system), *turns]
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


@pytest.mark.parametrize("system", [None, "be nice"])
def test_prompts_are_held_out(tokenizer: Any, tmp_path: Path, system: str | None) -> None:
    tokenizer.chat_template = ENDING
    rows = [talk(f"question {number % 500}", system) for number in range(1000)]
    dataset = load(tmp_path / "data.jsonl", tokenizer, rows)
    trained = {example.tokens[: example.spans[0][0]] for example in dataset.examples}
    held_out = set(map(tuple, dataset.prompts))
    assert len(held_out) == len(dataset.prompts) and 3 <= len(held_out) <= 25
    assert not trained & held_out and len(trained | held_out) == 500
    assert len(dataset.examples) == 2 * len(trained)

    shuffled = load(tmp_path / "data.jsonl", tokenizer, rows[::-1], prompts=3)
    assert shuffled.prompts == dataset.prompts[:3]
    assert {example.tokens for example in shuffled.examples} == {example.tokens for example in dataset.examples}


def test_prompts_that_leave_no_room_are_not_decoded(tokenizer: Any, tmp_path: Path) -> None:
    rows = [talk(f"question {number}" + "?" * (number % 2 * 50)) for number in range(500)]
    assert {len(prompt) > 50 for prompt in load(tmp_path / "data.jsonl", tokenizer, rows).prompts} == {False, True}
    dataset = load(tmp_path / "data.jsonl", tokenizer, rows, max_length=50)
    assert dataset.prompts and max(map(len, dataset.prompts)) < 50


def test_nothing_left(tokenizer: Any, tmp_path: Path) -> None:
    tokenizer.chat_template = ENDING
    loop = {"prompt": "x", "response": "a" * 70, "finished": False}
    rows = [loop, {"prompt": "y" * 40, "response": "z"}, {"prompt": "", "dropped": "context"}]
    with pytest.raises(ValueError, match=r"data.jsonl: nothing is left to train on \(1 answers were loops, 1 prompts"):
        load(tmp_path / "data.jsonl", tokenizer, rows, max_length=30)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"prompt": "x"', "this is not JSON (Expecting"),
        (b"[" * 100_000, "this JSON cannot be read (maximum recursion"),
        (b'{"prompt": "\xff", "response": "x"}', "this is not UTF-8 text"),
        (b'["x"]', "a line is a JSON object"),
        (b'{"prompt": "x"}', 'a line needs "prompt" and "response", or "messages"'),
        (b'{"prompt": "x", "response": null}', "a conversation is a list of texts with roles"),
        (b'{"prompt": 7, "response": "x"}', "a conversation is a list of texts with roles"),
        (b'{"messages": "x"}', "a conversation is a list of texts with roles"),
        (b'{"messages": []}', 'with an answer by "assistant"'),
        (b'{"messages": ["x"]}', "a conversation is a list of texts with roles"),
        (b'{"messages": [{"role": "user", "content": "x"}]}', 'with an answer by "assistant"'),
        (b'{"messages": [{"role": "assistant", "content": "x"}]}', 'with an answer by "assistant"'),
        (b'{"messages": [{"role": "assistant", "content": ["x"]}]}', "a conversation is a list of texts with roles"),
        (b'{"prompt": "x", "response": "\\ud800"}', "the text contains half a character"),
        (b'{"prompt": "x", "response": "", "finished": false}', "the answer has no tokens"),
    ],
)
def test_a_bad_line_is_named(tokenizer: Any, tmp_path: Path, line: bytes, message: str) -> None:
    tokenizer.chat_template = None
    file = tmp_path / "data.jsonl"
    file.write_bytes(GOOD.encode() + b"\n" + line + b"\n")
    with pytest.raises(ValueError) as error:
        load_dataset([file], tokenizer, 100, 1)
    assert str(error.value).startswith(f"{file}, line 3: ") and message in str(error.value)


def test_one_of_several_files_is_empty(tokenizer: Any, tmp_path: Path) -> None:
    good, empty = tmp_path / "good.jsonl", tmp_path / "empty.jsonl"
    good.write_text("\ufeff" + GOOD.replace("\n", "\r\n"))
    empty.write_text("\n \n")
    assert len(load_dataset([good, good], tokenizer, 100, 1).examples) == 2
    with pytest.raises(ValueError, match=r"empty.jsonl is empty; it needs one JSON object a line"):
        load_dataset([good, empty], tokenizer, 100, 1)
