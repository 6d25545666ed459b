"""Training data: which tokens are answers, also of `draftless distill`, what is held out, and errors for bad files."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from decode import Answer
from draftless_commands import distill
from draftless_commands.distillation.jobs import Job
from tests.support.chat_templates import CHATML, make_tokenizer
from tests.support.commands import write_rows
from training.conversations import read_conversation
from training.data import Dataset, Example, has_looped, load_dataset, make_examples
from training.rendering import Renderer

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
    """Each character is a token; the template writes `u:hi a:yo</s>#`."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = ENDING
    return tokenizer


def chat(*turns: tuple[str, str]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def spell(example: Example, tokenizer: Any) -> list[Any]:
    """The text of an example, and the texts of its answers."""
    letters = tokenizer.convert_ids_to_tokens(list(example.tokens))
    return ["".join(letters), ["".join(letters[begin:end]) for begin, end in example.spans]]


def read(turns: list[tuple[str, str]], tokenizer: Any, finished: bool = True, **settings: Any) -> list[Any]:
    """The text of a conversation, and the texts of its answers; of several texts, one after the other."""
    row = read_conversation(chat(*turns) | {"finished": finished}, "here", answered=True)
    examples = make_examples(row, Renderer(tokenizer, **settings))
    return [part for example in examples for part in spell(example, tokenizer)]


NO_END = ENDING.replace("</s>#", " ")
THOUGHTS = ENDING.replace("{{ one.content }}", "{{ one.content if loop.last else one.content.split('|')[-1] }}")


@pytest.mark.parametrize(
    ("template", "turns", "finished", "found"),
    [
        (ENDING, TURNS[:2], False, ["u:hi a:yo", ["yo"]]),
        (ENDING, TURNS, True, ["u:hi a:yo</s>#u:ok a:no</s>", ["yo</s>", "no</s>"]]),
        (ENDING, TURNS, False, ["u:hi a:yo</s>#u:ok a:no", ["yo</s>", "no"]]),
        (ENDING, [("system", "be"), *TURNS[:2]], True, ["s:be u:hi a:yo</s>", ["yo</s>"]]),
        # The first message is no answer.
        (ENDING, [("assistant", "hey"), *TURNS[:2]], True, ["a:hey</s>#u:hi a:yo</s>", ["yo</s>"]]),
        (ENDING.replace("<", "--<"), TURNS, True, ["u:hi a:yo--</s>#u:ok a:no--</s>", ["yo--</s>", "no--</s>"]]),
        # The model ends its answers with EOS, and later prompts do not have it.
        (NO_END, TURNS, True, ["u:hi a:yo</s>", ["yo</s>"], "u:hi a:yo u:ok a:no</s>", ["no</s>"]]),
        # Thoughts that are removed later are trained as the model saw them.
        (
            *(THOUGHTS, [("user", "hi"), ("assistant", "er|yo"), ("user", "ok"), ("assistant", "um|no")], True),
            ["u:hi a:er|yo</s>", ["er|yo</s>"], "u:hi a:yo</s>#u:ok a:um|no</s>", ["um|no</s>"]],
        ),
        # Plain text; the tokenizer has no line breaks, which separate turns. No position predicts the first token.
        (None, TURNS[:2], False, ["hiyo", ["yo"]]),
        (None, TURNS, True, ["hiyo</s>", ["yo</s>"], "hiyookno</s>", ["no</s>"]]),
        (None, [("user", ""), ("assistant", "yo")], True, ["yo</s>", ["o</s>"]]),
    ],
)
def test_answers_are_found_with_their_end_tokens(
    tokenizer: Any, template: str | None, turns: list[tuple[str, str]], finished: bool, found: list[Any]
) -> None:
    tokenizer.chat_template = template
    assert read(turns, tokenizer, finished=finished) == found


@pytest.mark.parametrize("answer", [" yo", "yo ", "<think>x</think>yo", "</s>"])
@pytest.mark.parametrize(
    "change",
    [
        "{{ one.content | trim }}",
        "{{ one.content.split('</think>')[-1] }}",
        "{{ '()' if one.role == 'assistant' else '' }}{{ one.content }}",
    ],
)
def test_nothing_that_a_template_does_to_an_answer_changes_it(tokenizer: Any, answer: str, change: str) -> None:
    tokenizer.chat_template = ENDING.replace("{{ one.content }}", change)
    ended = answer if answer == "</s>" else answer + "</s>"
    assert read([("user", "hi"), ("assistant", answer)], tokenizer) == [f"u:hi a:{ended}", [ended]]


@pytest.mark.parametrize("template", ["{{ raise_exception('no roles but one') }}", "{{ messages[9].content.x }}"])
def test_a_template_that_fails(tokenizer: Any, template: str) -> None:
    tokenizer.chat_template = template
    reason = "no roles but one" if "raise" in template else ""
    with pytest.raises(ValueError, match=f"^here: the chat template cannot render this conversation .{reason}"):
        read(TURNS[:2], tokenizer)


def test_an_answer_follows_the_tokens_of_its_prompt() -> None:
    """Joined, "a" and "bc" would begin with a token of both, which no model writes after the prompt."""
    backend = Tokenizer(models.BPE({"x": 0, "a": 1, "b": 2, "c": 3, "ab": 4}, [("a", "b")]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    assert read([("user", "xa"), ("assistant", "bc")], tokenizer) == ["xabc", ["bc"]]
    assert read([("user", "x"), ("assistant", "abc")], tokenizer) == ["xabc", ["abc"]]


def test_tools_and_options_are_given_to_the_template(tokenizer: Any, tmp_path: Path) -> None:
    calls = "{{ one.content }}{% for call in one.tool_calls %}[{{ call.name }}]{% endfor %}"
    template = ENDING.replace("{{ one.content }}", calls).replace("a:{%", "a:{% if quiet %}q{% endif %}{%")
    tokenizer.chat_template = "{% if tools %}T{{ tools[0].name }} {% endif %}" + template
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    asked = [{"role": "user", "content": "hi"}, call, {"role": "tool", "content": "4"}]
    row = {"messages": [*asked, {"role": "assistant", "content": "yo"}], "tools": '[{"name": "f"}]'}
    rows = [row, {"prompt": "x", "response": "y", "chat_template_kwargs": {"quiet": True}}]
    dataset = load(tmp_path / "data.jsonl", tokenizer, rows)
    assert [spell(one, tokenizer) for one in dataset.examples] == [
        ["Tf u:hi a:[f]</s>#t:4 a:yo</s>", ["[f]</s>", "yo</s>"]],
        ["u:x a:qy</s>", ["y</s>"]],
    ]


def test_empty_lists_of_tools_and_blank_systems_are_none(tokenizer: Any) -> None:
    """Tables have the keys of all rows."""
    tokenizer.chat_template = "{% if tools is not none %}T {% endif %}" + ENDING
    row = {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}], "system": ""}
    for tools in ("[]", []):
        (example,) = make_examples(read_conversation(row | {"tools": tools}, "here", True), Renderer(tokenizer))
        assert spell(example, tokenizer) == ["u:hi a:yo</s>", ["yo</s>"]]


@pytest.mark.parametrize("more", [{"prompt": "hi"}, {"response": "yo", "instruction": "hi"}])
def test_rows_that_repeat_a_question_or_an_answer_of_their_messages(more: dict[str, Any]) -> None:
    """As UltraChat's and Magpie's do."""
    row = chat(*TURNS[:2])
    assert read_conversation(row | more, "here", True).messages == read_conversation(row, "here", True).messages
    other = dict.fromkeys(more, "other")
    reason = 'here are "prompt" and "messages"' if "prompt" in more else '"response" answers a "prompt"'
    with pytest.raises(ValueError, match=reason):
        read_conversation(row | other, "here", True)


@pytest.mark.parametrize(
    ("first", "second", "trained"),
    [
        ({}, {}, ["yo</s>", "no</s>"]),
        ({"train": False}, {}, ["no</s>"]),
        ({"weight": 1}, {"weight": 0.0}, ["yo</s>"]),
        ({"train": True}, {"train": True, "weight": None}, ["yo</s>", "no</s>"]),
    ],
)
def test_loss_flags_of_messages(tokenizer: Any, first: dict, second: dict, trained: list[str]) -> None:
    row = chat(*TURNS)
    row["messages"][1] |= first
    row["messages"][3] |= second
    (example,) = make_examples(read_conversation(row, "here", True), Renderer(tokenizer))
    assert spell(example, tokenizer)[1] == trained


def test_token_ids_are_trained_as_they_are(tokenizer: Any, tmp_path: Path) -> None:
    ids = {"token_ids": [[[5, 6], [7, 2], [8], [9, 2]], [[5], [40]]], "vocabulary": Renderer(tokenizer).vocabulary}
    rows = [chat(*TURNS, *TURNS[:2]) | ids | {"finished": False}]
    dataset = load(tmp_path / "data.jsonl", tokenizer, rows)
    assert [(one.tokens, one.spans) for one in dataset.examples] == [
        ((5, 6, 7, 2, 8, 9, 2), ((2, 4), (5, 7))),
        ((5, 40), ((1, 2),)),
    ]
    rows[0]["messages"][1]["train"] = False
    assert load(tmp_path / "data.jsonl", tokenizer, rows).examples[0].spans == ((5, 7),)
    rows[0]["vocabulary"] = "another"
    with pytest.raises(ValueError, match=r"line 1: the token ids are of another vocabulary .* give --use-text"):
        load(tmp_path / "data.jsonl", tokenizer, rows)
    assert load(tmp_path / "data.jsonl", tokenizer, rows, use_text=True).examples[0].spans != ((5, 7),)


@pytest.mark.parametrize("ids", [[], [[]], [[[1]]], [[[1], []]], [[[1], ["x"]]], [[[1], [-1]]], [[[1], [2]] * 2]])
def test_token_ids_that_are_none_are_a_bad_row(tokenizer: Any, tmp_path: Path, ids: Any) -> None:
    row = {"prompt": "x", "response": "y", "vocabulary": Renderer(tokenizer).vocabulary}
    rows = [row] * 10 + [row | {"token_ids": ids}]
    assert load(tmp_path / "data.jsonl", tokenizer, rows).bad.startswith("1 of 11 rows cannot be trained on: ")


def test_bad_rows_are_skipped_and_named(tokenizer: Any, tmp_path: Path) -> None:
    rows: list[Any] = [{"prompt": str(number), "response": " y"} for number in range(38)]
    rows[4:4] = [{"prompt": "x", "response": 7}, ["x"]]
    dataset = load(tmp_path / "data.jsonl", tokenizer, rows)
    assert len(dataset.examples) + len(dataset.prompts) == 38
    place = tmp_path / "data.jsonl"
    faults = f'{place}, line 6: a line is a JSON object, not ["x"]; {place}, line 5: an answer is text, not 7'
    assert dataset.bad == f"2 of 40 rows cannot be trained on: {faults}"
    with pytest.raises(ValueError, match=r"2 of 40 rows cannot be trained on: .*line 6.*; that is more than --max-bad"):
        load(tmp_path / "data.jsonl", tokenizer, rows, max_bad=0.04)


def test_loops() -> None:
    assert has_looped([*range(100), *[7, 8, 9] * 20])
    assert has_looped([5] * 60) and not has_looped([5] * 59)
    assert not has_looped([*[5] * 200, 2])
    assert not has_looped(list(range(20)) * 10)  # a period of 20 may be a table


@pytest.mark.parametrize("after", ["", " ", "\n", " \n ", "</s>", " </s>", "\n</s>"])
@pytest.mark.parametrize("loop", ["no " * 30, "." * 60, "\n" * 60, " \n." * 20])
def test_a_loop_may_end_in_blanks_and_in_any_answer(tmp_path: Path, loop: str, after: str) -> None:
    tokenizer = make_tokenizer(CHATML)
    rows: list[Any] = [{"prompt": "x", "response": "well " + loop + after.removesuffix("</s>")}]
    if not after.endswith("</s>"):
        rows[0]["finished"] = False
    rows.append({"prompt": "." * 70, "response": "." * 9})  # the prompt's own repetition
    talk = chat(("user", "one"), ("assistant", "yes"), ("user", "two"), ("assistant", "so " + loop), ("user", "three"))
    rows += [talk | {"messages": [*talk["messages"], {"role": "assistant", "content": "good"}]}]
    dataset = load(tmp_path / "data.jsonl", tokenizer, rows, max_length=400)
    found = [[tokenizer.decode(one.tokens[begin:end]) for begin, end in one.spans] for one in dataset.examples]
    assert found == [["." * 9 + "<|im_end|>"], ["yes<|im_end|>", "good<|im_end|>"]]
    assert dataset.dropped == 2 and not dataset.bad
    assert dataset.examples[1].tokens[-1] == tokenizer.eos_token_id


def test_what_comes_after_the_last_answer_that_is_no_loop_is_left_out(tokenizer: Any, tmp_path: Path) -> None:
    rows = [chat(*TURNS[:3], ("assistant", "no " * 30))]
    dataset = load(tmp_path / "data.jsonl", tokenizer, rows, max_length=400)
    assert [spell(one, tokenizer) for one in dataset.examples] == [["u:hi a:yo</s>", ["yo</s>"]]]
    assert dataset.dropped == 1


def test_empty_answers_are_counted_and_not_trained_on(tokenizer: Any, tmp_path: Path) -> None:
    """Unless they are token ids that the model wrote."""
    row = chat(("user", "hi"), ("assistant", ""), ("user", "ok"), ("assistant", "no"), ("user", "so"))
    row["messages"].append({"role": "assistant", "content": " \n"})
    good = [{"prompt": "x", "response": "y"}] * 30
    rows = [*good, row, {"prompt": "one", "response": ""}, {"prompt": "two", "response": "  "}]
    dataset = load(tmp_path / "data.jsonl", tokenizer, rows)
    assert [spell(one, tokenizer) for one in dataset.examples[30:]] == [["u:hi a:</s>#u:ok a:no</s>", ["no</s>"]]]
    place = tmp_path / "data.jsonl"
    faults = f"{place}, line 32: the answer is empty; {place}, line 33: the answer is empty"
    assert dataset.bad == f"2 of 33 rows cannot be trained on: {faults}; empty answers in other rows: 2"
    dataset = load(tmp_path / "data.jsonl", tokenizer, [*good, row])
    assert dataset.bad == "empty answers in other rows: 2"

    ids = {"token_ids": [[[5, 6], [2]]], "vocabulary": Renderer(tokenizer).vocabulary}
    dataset = load(tmp_path / "data.jsonl", tokenizer, [*good, {"prompt": "one", "response": ""} | ids])
    assert dataset.examples[-1] == Example((5, 6, 2), ((2, 3),)) and not dataset.bad
    with pytest.raises(ValueError, match=r"1 of 1 rows cannot be trained on: .* line 1: the answer is empty; that is"):
        load(tmp_path / "data.jsonl", tokenizer, [{"prompt": "one", "response": " "}])


def load(
    file: Path, tokenizer: Any, rows: list[Any], max_length: int = 100, prompts: int = 100, **settings: Any
) -> Dataset:
    write_rows(file, rows)
    return load_dataset([file], Renderer(tokenizer), max_length, prompts, **settings)


def test_rows_that_are_not_trained_on(tokenizer: Any, tmp_path: Path) -> None:
    rows = [
        {"prompt": "one", "response": "yes"} | dict.fromkeys(("dropped", "token_ids", "finished")),  # null: not given
        {"prompt": "two", "dropped": "loop"},
        {"prompt": "three", "response": "no " * 30, "finished": False},
        {"prompt": "x" * 90, "response": "too late"},
        chat(*TURNS, ("user", "bye")),
        {"prompt": "five", "response": "12345", "finished": False},
        {"prompt": "six", "response": "no " * 30},
    ]
    dataset = load(tmp_path / "data.jsonl", tokenizer, rows, max_length=13)
    assert [spell(one, tokenizer) for one in dataset.examples] == [
        ["u:one a:yes</s>", ["yes</s>"]],
        ["u:hi a:yo</s>#u:", ["yo</s>"]],
        ["u:five a:1234", ["1234"]],
    ]
    assert (dataset.dropped, dataset.too_long, dataset.answer_tokens) == (2, 1, 11)


def talk(prompt: str, system: str | None = None) -> dict[str, Any]:
    turns = [("user", prompt), ("assistant", "fine"), ("user", "go on"), ("assistant", "well")]
    return chat(*turns) if system is None else chat(("system", system), *turns)


@pytest.mark.parametrize("system", [None, "be nice"])
def test_prompts_are_held_out(tokenizer: Any, tmp_path: Path, system: str | None) -> None:
    rows = [talk(f"question {number % 500}", system) for number in range(1000)]
    dataset = load(tmp_path / "data.jsonl", tokenizer, rows)
    trained = {example.tokens[: example.spans[0][0]] for example in dataset.examples}
    held_out = set(map(tuple, dataset.prompts))
    assert len(held_out) == len(dataset.prompts) and 3 <= len(held_out) <= 25
    assert not trained & held_out and len(trained | held_out) == 500
    assert len(dataset.examples) == 2 * len(trained)

    shuffled = load(tmp_path / "data.jsonl", tokenizer, rows[::-1], prompts=3)
    assert shuffled.prompts == dataset.prompts[:3] and shuffled.held_out == dataset.held_out == len(held_out)
    assert {example.tokens for example in shuffled.examples} == {example.tokens for example in dataset.examples}


def test_prompts_that_leave_no_room_are_not_decoded(tokenizer: Any, tmp_path: Path) -> None:
    rows = [talk(f"question {number}" + "?" * (number % 2 * 50)) for number in range(500)]
    assert {len(prompt) > 50 for prompt in load(tmp_path / "data.jsonl", tokenizer, rows).prompts} == {False, True}
    dataset = load(tmp_path / "data.jsonl", tokenizer, rows, max_length=50)
    assert dataset.prompts and max(map(len, dataset.prompts)) < 50
    few = [{"prompt": f"question {number}" + "?" * 50, "response": "fine"} for number in range(20)]
    for short in range(20):  # whichever it is: a prompt that fits is held out
        mixed = [*few, {"prompt": f"q {short}", "response": "fine"}, {"prompt": "r", "response": "fine"}]
        assert len(load(tmp_path / "data.jsonl", tokenizer, mixed, max_length=50).prompts) == 1


def test_nothing_left(tokenizer: Any, tmp_path: Path) -> None:
    loop = {"prompt": "x", "response": "a" * 70, "finished": False}
    rows = [loop, {"prompt": "y" * 40, "response": "z"}, {"prompt": "", "dropped": "context"}]
    with pytest.raises(ValueError, match=r"data.jsonl: nothing is left to train on \(1 answers were loops, 1 prompts"):
        load(tmp_path / "data.jsonl", tokenizer, rows, max_length=30)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"prompt": "x"', "this is not JSON (Expecting"),
        (b"[" * 100_000, "this JSON cannot be read"),
        (b'{"prompt": "\xff", "response": "x"}', "this is not UTF-8 text"),
        (b'{"prompt": "x"}', 'there is no answer to train on: give "prompt" with "response"'),
        (b'{"prompt": "x", "response": null}', "there is no answer to train on"),
        (b'{"messages": [], "response": "x"}', '"response" answers a "prompt"; here it must be the last message'),
        (b'{"prompt": "x", "response": "y", "finished": "false"}', '"finished" is true or false, not "false"'),
        (b'{"messages": "x"}', 'messages are a list of objects with "role"'),
        (b'{"messages": ["x"]}', "messages are a list of objects"),
        (b'{"messages": [{"role": "assistant", "content": "x"}]}', "there is no answer to train on"),
        (b'{"prompt": "x", "response": [{"role": "assistant", "content": [7]}]}', "are of type text, not 7"),
        (b'{"prompt": "x", "response": "", "finished": false}', "the answer is empty"),
    ],
)
def test_a_bad_line_is_named(tokenizer: Any, tmp_path: Path, line: bytes, message: str) -> None:
    tokenizer.chat_template = None
    file = tmp_path / "data.jsonl"
    file.write_bytes(GOOD.encode() + b"\n" + line + b"\n")
    with pytest.raises(ValueError) as error:
        load_dataset([file], Renderer(tokenizer), 100, 1)
    assert f"1 of 2 rows cannot be trained on: {file}, line 3: " in str(error.value) or "not UTF-8" in message
    assert message in str(error.value)


def test_one_of_several_files_is_empty(tokenizer: Any, tmp_path: Path) -> None:
    good, empty = tmp_path / "good.jsonl", tmp_path / "empty.jsonl"
    good.write_text("\ufeff" + GOOD.replace("\n", "\r\n"))
    empty.write_text("\n \n")
    assert len(load_dataset([good, good], Renderer(tokenizer), 100, 1).examples) == 2
    with pytest.raises(ValueError, match=r"empty.jsonl is empty; it needs one JSON object a line"):
        load_dataset([good, empty], Renderer(tokenizer), 100, 1)


# From answers to training


def write_template(content: str = "{{ one.content }}", begin: str = "", after: str = "a:") -> str:
    """A chat template with the content of each message as given, `begin`, and `after` before an answer."""
    end = "{% if one.role == 'assistant' %}</s>{% endif %} {% endfor %}{% if add_generation_prompt %}"
    return begin + "{% for one in messages %}{{ one.role[0] }}:" + content + end + after + "{% endif %}"


TEMPLATES = {
    "plain": write_template(),
    # An empty thought is put before an answer without one.
    "thinking": write_template("{% if one.role == 'assistant' %}(){% endif %}{{ one.content }}"),
    # Thoughts, up to an "e", are stripped from earlier answers; the prompt opens a thought.
    "reasoning": write_template("{{ one.content.split('e')[-1] }}", after="a:("),
    "tools": write_template("{{ one.content | trim }}", "{% if tools %}{{ tools[0].name }} {% endif %}"),
}
ROWS: list[dict[str, Any]] = [
    *({"prompt": f"question {number}"} for number in range(8)),
    *({"turns": [f"{number}", "and?", "why?"]} for number in range(8)),
    chat(("user", "a"), ("assistant", " b "), ("user", "c")),
]


@pytest.fixture(scope="module")
def distilled(save_model: Callable[..., Path]) -> Path:
    """A model that often ends its answers, and writes special tokens in them."""
    folder = save_model()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["x", "y", "[", "]"]})  # as of tool calls
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("temperature", ["0", "1.2"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_distilled_answers_are_trained_token_for_token(
    distilled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, temperature: str
) -> None:
    (distilled / "chat_template.jinja").write_text(TEMPLATES[name])
    written: list[tuple[list[int], list[int]]] = []
    real = Job.take

    def take(job: Job, answer: Answer, renderer: Renderer) -> Any:
        if answer.finish != "criterion":
            written.append((answer.prompt, answer.tokens))
        return real(job, answer, renderer)

    monkeypatch.setattr(Job, "take", take)
    out = tmp_path / "answers.jsonl"
    rows = [row | {"tools": [{"name": "f"}]} for row in ROWS] if name == "tools" else ROWS
    prompts = write_rows(tmp_path / "prompts.jsonl", rows)
    options = ["--dtype", "float64", "--max-new-tokens", "24", "--batch-size", "8", "--temperature", temperature]
    distill.main([prompts, "--out", str(out), "--model", str(distilled), *options])
    monkeypatch.setattr("training.data.MIN_PROMPTS", 100)
    monkeypatch.setattr("training.data.VALIDATION_SHARE", 1 << 40)
    dataset = load_dataset([out], Renderer(AutoTokenizer.from_pretrained(distilled)), 256, 9)
    trained = [
        (list(one.tokens[:begin]), list(one.tokens[begin:end])) for one in dataset.examples for begin, end in one.spans
    ]
    assert sorted(trained) == sorted(written) and len(written) > len(ROWS) and not dataset.bad
    counted = re.findall(r'"response_tokens":(\d+)', out.read_text())
    assert sum(map(int, counted)) == dataset.answer_tokens
