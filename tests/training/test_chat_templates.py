"""Conversations in the templates of published models: the text is the template's own, and the answers are exact."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest

from tests.support.chat_templates import CHATML, GEMMA, HEADERS, LLAMA3, MISTRAL, QWEN3, ZEPHYR, make_tokenizer
from tests.support.tokenizers import byte_level
from training.conversations import read_conversation
from training.data import make_examples
from training.rendering import Renderer

NAMES = {
    **{"chatml": CHATML, "llama3": LLAMA3, "gemma": GEMMA, "qwen3": QWEN3, "mistral": MISTRAL},
    **{"headers": HEADERS, "zephyr": ZEPHYR},
}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
WRITTEN_CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "f"}}]


def user(text: str = "hi", role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": text}


def answer(text: Any = "yo", **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def call(text: Any = None, **more: Any) -> dict[str, Any]:
    return answer(text, tool_calls=[CALL], **more)


RESULT = user('{"y": "4"}', "tool")
EARLIER = [user(), answer()]


def read(template: str, messages: list[Any], **row: Any) -> tuple[list[str], list[list[str]]]:
    tokenizer: Any = make_tokenizer(template)
    examples = make_examples(read_conversation({"messages": messages, **row}, "here", True), Renderer(tokenizer))
    return [tokenizer.decode(one.tokens) for one in examples], [
        [tokenizer.decode(one.tokens[begin:end]) for begin, end in one.spans] for one in examples
    ]


def render(template: str, messages: list[Any], tools: Any = None) -> str:
    """What the template writes, up to its last end token."""
    tokenizer: Any = make_tokenizer(template)
    text = str(tokenizer.apply_chat_template(messages, tools=tools, tokenize=False))
    return text[: text.rindex(tokenizer.eos_token) + len(tokenizer.eos_token)]


@pytest.mark.parametrize(
    ("name", "messages", "answers"),
    [
        (
            *("chatml", [*EARLIER, answer("no"), answer("so"), user("ok"), answer("oh")]),
            ["yo<|im_end|>", "no<|im_end|>", "so<|im_end|>", "oh<|im_end|>"],
        ),
        ("chatml", [*EARLIER, user("be", "system"), user("ok"), answer("no")], ["yo<|im_end|>", "no<|im_end|>"]),
        ("chatml", [user(), user("there"), answer()], ["yo<|im_end|>"]),
        ("chatml", [answer("hey"), answer("you"), user(), answer()], ["you<|im_end|>", "yo<|im_end|>"]),
        (
            *("llama3", [user(), answer(), call(), RESULT, answer("no")]),
            ["yo<|eot_id|>", '{"name": "f"}<|eot_id|>', "no<|eot_id|>"],
        ),
        ("gemma", [*EARLIER, user("ok"), answer("no")], ["yo<end_of_turn>", "no<end_of_turn>"]),
        ("mistral", [*EARLIER, user("ok"), answer("no")], [" yo</s>", " no</s>"]),
        ("mistral", [*EARLIER, answer("no")], [" yo</s>", " no</s>"]),
        ("mistral", [*EARLIER, call(), RESULT, answer()], [" yo</s>", " [TOOL_CALLS] [f]</s>", " yo</s>"]),
        ("headers", [*EARLIER, user("ok"), answer("no")], ["yo</s>", "no</s>"]),
        ("zephyr", [*EARLIER, answer("no"), user("ok"), answer("so")], ["yo</s>", "no</s>", "so</s>"]),
        # Qwen3 puts an empty thought before a last answer, which the model did not write.
        ("qwen3", [*EARLIER, answer("no"), user("ok"), answer("<think>\nt\n</think>\n\nso")], None),
        ("qwen3", [user(), answer(), call(), RESULT, answer(reasoning_content="t")], None),
        (
            "qwen3",
            [user(), call(reasoning_content="r"), RESULT, call("so"), RESULT, answer(reasoning_content="t")],
            None,
        ),
    ],
)
def test_the_text_is_what_the_template_writes(name: str, messages: list[Any], answers: list[str] | None) -> None:
    tools = TOOLS if name == "qwen3" else None
    texts, found = read(NAMES[name], messages, **({"tools": tools} if tools else {}))
    assert texts == [render(NAMES[name], messages, tools)]
    if answers is not None:
        assert found == [answers]
        return
    thoughts, expected = "<think>\n{}\n</think>\n\n", []
    for message in messages:
        if message["role"] == "assistant":
            thought = thoughts.format(message["reasoning_content"]) if "reasoning_content" in message else ""
            calls = WRITTEN_CALL if "tool_calls" in message else ""
            expected.append(f"{thought}{message['content'] or ''}{calls}<|im_end|>")
    assert found == [expected]


@pytest.mark.parametrize("end", ["text", "call"])
def test_a_last_answer_that_was_cut_off(end: str) -> None:
    messages = [*EARLIER, answer("no") if end == "text" else call()]
    whole = render(LLAMA3, messages)
    texts, (answers,) = read(LLAMA3, messages, finished=False)
    assert texts == [whole.removesuffix("<|eot_id|>")]
    assert answers == ["yo<|eot_id|>", "no" if end == "text" else '{"name": "f"}']


def test_thoughts_that_later_prompts_do_not_have() -> None:
    """Each answer is trained after what the model saw, also the thoughts of a tool call before its result."""
    messages = [user(), call(reasoning_content="r"), RESULT, answer("yo", reasoning_content="t"), user("ok"), answer()]
    texts, answers = read(QWEN3, messages)
    thought = "<think>\n{}\n</think>\n\n"
    assert texts == [render(QWEN3, messages[:4]), render(QWEN3, messages).replace(thought.format(""), "")]
    seen = [f"{thought.format('r')}{WRITTEN_CALL}<|im_end|>", f"{thought.format('t')}yo<|im_end|>"]
    assert answers == [seen, ["yo<|im_end|>"]]
    messages = [user(), answer(), answer("no")]
    texts, answers = read(QWEN3, messages, chat_template_kwargs={"enable_thinking": False})
    assert texts == [render(QWEN3, messages[:2]), render(QWEN3, messages)]
    assert answers == [["yo<|im_end|>"], ["no<|im_end|>"]]


def test_a_template_may_end_a_tool_call_with_another_token() -> None:
    template = LLAMA3.replace("<|eot_id|>", "{{ '<|eom_id|>' if m.tool_calls else '<|eot_id|>' }}")
    tokenizer: Any = make_tokenizer(LLAMA3)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|eom_id|>"]})
    tokenizer.chat_template = template
    ends = tokenizer.convert_tokens_to_ids(["<|eom_id|>"])
    row = read_conversation({"messages": [*EARLIER, call(), RESULT, answer("no")]}, "here", True)
    for finished in (True, False):
        texts = Renderer(tokenizer, ends=ends).encode_answers(row, finished)
        expected = ["yo<|eot_id|>", '{"name": "f"}<|eom_id|>', "no" + "<|eot_id|>" * finished]
        assert [[tokenizer.decode(part) for part in text[1::2]] for text in texts] == [expected]


def test_tool_calls_of_a_template_without_an_end_token() -> None:
    """The model ends them with EOS, as it ends other answers."""
    template = MISTRAL.replace("{{ eos_token }}", "\n")
    tokenizer: Any = make_tokenizer(MISTRAL)
    tokenizer.chat_template = template
    row = read_conversation({"messages": [user(), call(), RESULT, answer()]}, "here", True)
    texts = Renderer(tokenizer).encode_answers(row, True)
    assert [tokenizer.decode(text[-1]) for text in texts] == [" [TOOL_CALLS] [f]</s>", " yo</s>"]


@pytest.mark.parametrize("absent", [None, []])
def test_a_key_without_a_value_is_none(absent: Any) -> None:
    """As in data sets whose rows all have the same keys."""
    messages = [user(), answer(tool_calls=absent), user("ok"), answer("no", tool_calls=absent)]
    assert read(LLAMA3, messages) == read(LLAMA3, [*EARLIER, user("ok"), answer("no")])


@pytest.mark.parametrize("key", ["tool_calls", "function_call", "reasoning_content", "reasoning", "thinking"])
def test_content_may_be_null_where_another_key_has_the_text(key: str) -> None:
    tokenizer: Any = make_tokenizer(CHATML)
    tokenizer.chat_template = CHATML.replace("{{ m.content }}", f"{{{{ m.content }}}}{{{{ m.{key} or '' }}}}")
    row = read_conversation({"messages": [user(), answer(None, **{key: ["x"]})]}, "here", True)
    (text,) = Renderer(tokenizer).encode_answers(row, True)
    assert tokenizer.decode(text[-1]) == "['x']<|im_end|>"


@pytest.mark.parametrize(
    ("name", "messages", "row", "reason"),
    [
        ("llama3", [user(), call("so"), RESULT, answer()], {}, "leaves out the content of an answer$"),
        ("gemma", [*EARLIER, answer("no")], {}, r"cannot render this conversation \(Conversation roles must"),
        ("mistral", [user("be", "system"), *EARLIER], {}, "Only user and assistant roles are supported!"),
        ("chatml", [user(), call(), RESULT, answer()], {}, "gives 'tool_calls', which this model's chat template"),
        ("chatml", EARLIER, {"chat_template_kwargs": {"continue_final_message": True}}, "no option of a chat template"),
    ],
)
def test_what_a_template_does_not_write_is_refused(name: str, messages: list, row: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=f"^here: .*{reason}"):
        read(NAMES[name], messages, **row)


def test_thoughts_that_the_template_mentions_and_leaves_out_are_refused() -> None:
    tokenizer: Any = make_tokenizer(CHATML)
    tokenizer.chat_template = CHATML.replace("{{ m.content }}", "{{ m.content }}{% if m.reasoning %}!{% endif %}")
    row = read_conversation({"messages": [user(), answer(reasoning="why")]}, "here", True)
    with pytest.raises(ValueError, match=r"^here: the chat template leaves out the reasoning of an answer$"):
        make_examples(row, Renderer(tokenizer))


@pytest.mark.parametrize("role", ["system", "user", "tool"])
def test_a_message_that_the_template_leaves_out_is_refused(role: str) -> None:
    """Wherever it stands. One that is written in another form is not left out."""
    messages = [user(), answer(), user("be\n", role), user("ok"), answer("no")]
    tokenizer: Any = make_tokenizer(CHATML)
    for content, is_refused in (("''", True), ("m.content | tojson", False), ("m.content | upper", False)):
        written = f"{{{{ {content} if m.role == '{role}' and not loop.first else m.content }}}}"
        tokenizer.chat_template = CHATML.replace("{{ m.content }}", written)
        row = read_conversation({"messages": messages}, "here", True)
        if is_refused:
            with pytest.raises(ValueError, match=f"here: the chat template leaves out the {role} message"):
                make_examples(row, Renderer(tokenizer))
        else:
            assert make_examples(row, Renderer(tokenizer))


def test_answers_without_a_template_are_apart() -> None:
    tokenizer: Any = make_tokenizer(CHATML)
    tokenizer.chat_template = None
    row = read_conversation({"messages": [*EARLIER, answer("no"), user("ok"), answer("so")]}, "here", True)
    texts = Renderer(tokenizer).encode_answers(row, True)
    assert [tokenizer.decode([*chain(*text)]) for text in texts] == [
        "hiyo<|im_end|>",
        "hiyo\n\nno<|im_end|>",
        "hiyo\n\nno\n\nokso<|im_end|>",
    ]


BEGINS = (
    "{% for m in messages %}{% if m.role == 'user' %}<user>{{ m.content }}{% elif m.role == 'tool' %}{{ m.content }}"
)
HEADED = (  # gpt-oss's headers: the model chooses a channel itself
    BEGINS + "{% else %}<start>assistant<channel>final<message>{{ m.content }}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<start>assistant{% endif %}"
)
OPENING = (  # Qwen3.5's: prompts open a thought, and answers without one have an empty one
    BEGINS + "{% else %}<bot>\n{% if '</think>' not in m.content %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content }}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<bot>\n<think>\n{% if closed %}{{ '\n</think>\n\n' }}{% endif %}{% endif %}"
)
STRIPPING = OPENING.replace("<think>\n\n</think>\n\n", "", 1)  # R1's: earlier answers have no thought at all


def split(template: str, content: str, **row: Any) -> list[str]:
    """The prompt and the answer of a conversation of one question."""
    tokenizer: Any = byte_level()
    tokenizer.add_special_tokens({"eos_token": "</s>"})
    tokenizer.chat_template = template
    read = read_conversation({"messages": [user(), answer(content)], **row}, "here", answered=True)
    (text,) = Renderer(tokenizer).encode_answers(read, finished=True)
    return [tokenizer.decode(part) for part in text]


@pytest.mark.parametrize(
    ("template", "content", "prompt", "written"),
    [
        (HEADED, "yo", "<user>hi<start>assistant", "<channel>final<message>yo</s>"),
        (HEADED, "<channel>other<message>yo", "<user>hi<start>assistant", "<channel>other<message>yo</s>"),
        (OPENING, "yo", "<user>hi<bot>\n<think>\n\n</think>\n\n", "yo</s>"),
        (OPENING, "<think>\nHm\n</think>\n\nyo", "<user>hi<bot>\n<think>\n", "Hm\n</think>\n\nyo</s>"),
        (OPENING, "Hm\n</think>\n\nyo", "<user>hi<bot>\n<think>\n", "Hm\n</think>\n\nyo</s>"),
        (STRIPPING, "yo", "<user>hi<bot>\n", "yo</s>"),
        (STRIPPING, "<think>Hm</think>yo", "<user>hi<bot>\n<think>\n", "Hm</think>yo</s>"),
    ],
)
def test_headers_and_thoughts_that_a_prompt_does_not_have(
    template: str, content: str, prompt: str, written: str
) -> None:
    assert split(template, content) == [prompt, written]


def test_a_thought_after_a_closed_one_is_refused() -> None:
    with pytest.raises(ValueError, match=r"here: the answer has a thought, and its prompt has closed it"):
        split(OPENING, "<think>\nHm\n</think>\n\nyo", chat_template_kwargs={"closed": True})
    assert split(OPENING, "yo", chat_template_kwargs={"closed": True})[0].endswith("<think>\n\n</think>\n\n")


def test_arguments_of_calls_may_be_json_text() -> None:
    """As OpenAI's API has them. What is no object stays text."""
    written = {"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [user(), answer(None, tool_calls=[written]), RESULT, answer()]
    assert read(QWEN3, messages) == read(QWEN3, [user(), call(), RESULT, answer()])
    for text, expected in (("", {}), ("[1]", "[1]"), ('{"x"', '{"x"')):
        row = {"messages": [user(), answer(None, tool_calls=[{"name": "f", "arguments": text}])]}
        (found,) = read_conversation(row, "here", answered=True).messages[1]["tool_calls"]
        assert found["arguments"] == expected


def test_a_template_that_leaves_out_the_system_message_of_an_answered_question() -> None:
    """Mistral Nemo's writes it before a question that is to be answered only."""
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}[INST]{% if loop.last and messages[0].role == 'system' %}"
        "{{ messages[0].content }}\n\n{% endif %}{{ m.content }}[/INST]{% elif m.role == 'assistant' %}"
        "{{ m.content }}</s>{% endif %}{% endfor %}"
    )
    assert split(template, "yo", system="Be brief.") == ["[INST]Be brief.\n\nhi[/INST]", "yo</s>"]
