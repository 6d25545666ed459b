"""What is taken as a prompt and as a setting of a stream: the right answer, or an error that names what came."""

from __future__ import annotations

import re
import tomllib
import warnings
from array import array
from collections.abc import Callable
from importlib.metadata import EntryPoint, EntryPoints
from inspect import signature
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import BatchEncoding, PreTrainedTokenizerFast, StoppingCriteriaList

from decode import Answer, Engine, PlainProposer, Sampling, Target, generate, speculate, stream
from decode.engine import SETTINGS
from decode.requests.text import as_list, encode
from proposers import MergedProposer, NGramProposer, load_proposer
from tests.decode.requests.test_text import TEMPLATE, build_tokenizer, merge_of
from tests.support.models import tiny

TOKENIZER = build_tokenizer([*merge_of("abab", 0, 3)], TEMPLATE)
CHAT = [{"role": "system", "content": "é"}, {"role": "user", "content": "ab"}]
PARTS = [{"role": "system", "content": "é"}, {"role": "user", "content": [{"type": "text", "text": "a"}] * 2}]
PIXELS = {"type": "image", "url": "cat.png"}
A, B = [5, 6, 7, 8], [9, 10]
LEFT, RIGHT = [[0, 0, *B], A], [[*B, 0, 0], A]
LEFT_MASK, RIGHT_MASK = [[0, 0, 1, 1], [1] * 4], [[1, 1, 0, 0], [1] * 4]
NEW = 6


def spell(text: str) -> list[int]:
    return TOKENIZER(text)["input_ids"]


def render(**settings: Any) -> Any:
    return TOKENIZER.apply_chat_template(CHAT, add_generation_prompt=True, **settings)


def pad(side: str) -> Any:
    return TOKENIZER(["ab", render(tokenize=False)], padding=True, padding_side=side, return_tensors="pt")


def tensors(**lists: Any) -> BatchEncoding:
    return BatchEncoding({name: torch.tensor(values) for name, values in lists.items()})


USER, WRAPPED = spell("<|user|>ab<|a|>"), spell("<|system|>é<|user|>ab<|a|>")
MIXED: Any = ["ab", CHAT, A, {"input_ids": B}]
TAKEN: dict[str, tuple[Any, list[list[int]]]] = {  # the prompts, and the token ids of each
    "text": ("ab", [USER]),
    "texts": (["ab", "é"], [USER, spell("<|user|>é<|a|>")]),
    "messages": (CHAT, [WRAPPED]),
    "a list of messages": ([CHAT, CHAT[1:]], [WRAPPED, USER]),
    "parts of type text": (PARTS, [spell("<|system|>é<|user|>aa<|a|>")]),
    "a tool call": ([*CHAT, {"role": "t", "tool_calls": [1]}], [spell("<|system|>é<|user|>ab<|t|><|a|>")]),
    "ids": (A, [A]),
    "lists of ids": ([A, B], [A, B]),
    "a range": (range(5, 9), [A]),
    "an array of the standard library": (array("q", A), [A]),
    "a tensor": (torch.tensor(A), [A]),
    "rows of a tensor": (torch.tensor([A, A[::-1]]), [A, A[::-1]]),
    "numbers of numpy": ([*np.array(A)], [A]),
    "tensors": ([torch.tensor(A), torch.tensor([B])], [A, B]),
    "a rendered chat": (render(return_tensors="pt"), [WRAPPED]),
    "rendered chats": ([render(return_tensors="pt"), render()], [WRAPPED, WRAPPED]),
    "texts padded left": (pad("left"), [spell("ab"), WRAPPED]),
    "ids padded left": (tensors(input_ids=LEFT, attention_mask=LEFT_MASK), [B, A]),
    "ids padded right": (dict(tensors(input_ids=RIGHT, attention_mask=RIGHT_MASK)), [B, A]),
    "a mask of fractions": ({"input_ids": np.array(LEFT), "attention_mask": np.array(LEFT_MASK, float)}, [B, A]),
    "rows of several lengths": ({"input_ids": [A, B], "attention_mask": None}, [A, B]),
    "what repeats the ids": (TOKENIZER("ab", return_length=True, return_special_tokens_mask=True), [spell("ab")]),
    "token types of one kind": (tensors(input_ids=[A], token_type_ids=[[0] * 4]), [A]),
    "one of each kind": (MIXED, [USER, WRAPPED, A, B]),
}
REFUSED: dict[str, tuple[Any, str]] = {
    "bytes": (b"ab", "not b'ab' \\(bytes\\)"),
    "a generator": ((each for each in A), "generator"),
    "nothing": (None, "not None"),
    "a fraction": ([1.5, 2.0], "not 1.5 \\(float\\)"),
    "a text among ids": ([5, "a"], "whole numbers, not 'a'"),
    "an empty list": ([], "the prompt is empty"),
    "empty text among texts": (["ab", ""], "prompt 1 is empty"),
    "half a character": ("ab\ud800", "surrogates not allowed"),
    "lists of lists of ids": ([[A, B]], "whole numbers, not \\[5, 6, 7, 8\\]"),
    "one message": (CHAT[0], "not a dict with 'role', 'content'"),
    "a row of a file": ([{"from": "human", "value": "ab"}], "message 0 of the prompt"),
    "an image": ([{"role": "user", "content": [PIXELS]}], "a part of message 0"),
    "no content": ([{"role": "user", "content": None}], "the content of message 0"),
    "a mask with a hole": ({"input_ids": A, "attention_mask": [1, 0, 1, 1]}, "hides tokens inside"),
    "a mask of other rows": (tensors(input_ids=[A, A], attention_mask=[[1] * 4]), "another shape"),
    "a mask of biases": ({"input_ids": A, "attention_mask": [0, 0, 0, -1e9]}, "other than 0 and 1"),
    "pixels": ({"input_ids": A, "pixel_values": torch.zeros(3)}, "pixel_values of the prompt would be ignored"),
    "token types": (tensors(input_ids=[A], token_type_ids=[[0, 0, 1, 1]]), "token_type_ids of the prompt"),
    "a mask without ids": ({"attention_mask": [1, 1]}, "not a dict with 'attention_mask'"),
    "a negative id": ([5, -100], "prompt 0 has token -100"),
    "an id past the vocabulary": ([A, [5, 4000]], "prompt 1 has token 4000"),
}


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny("llama", vocab_size=len(TOKENIZER)), TOKENIZER)


def ask(target: Target, prompts: Any, **settings: Any) -> list[Answer]:
    return generate(target, prompts, **{"proposer": None, "max_new_tokens": NEW, **settings})


@pytest.mark.parametrize("name", TAKEN)
def test_every_form_of_a_prompt_becomes_its_tokens(name: str) -> None:
    prompts, ids = TAKEN[name]
    assert [encode(prompt, TOKENIZER, None) for prompt in as_list(prompts)] == ids


def test_answers_are_those_to_the_tokens(target: Target) -> None:
    ids = TAKEN["one of each kind"][1]
    answers = ask(target, MIXED)
    assert [answer.prompt for answer in answers] == ids
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in ask(target, ids)]


@pytest.mark.parametrize("name", REFUSED)
def test_other_prompts_are_refused_by_name(target: Target, name: str) -> None:
    prompts, message = REFUSED[name]
    with pytest.raises((TypeError, ValueError), match=message):
        stream(target, prompts, None)


@pytest.mark.parametrize(
    ("prompt", "template", "chat", "text"),
    [
        ("ab", None, None, "ab"),
        ("ab", None, False, "ab"),
        ("ab", TEMPLATE, True, "<|user|>ab<|a|>"),
        ("ab", TEMPLATE, False, "ab"),
        (CHAT, TEMPLATE, False, "<|system|>é<|user|>ab<|a|>"),
        (A, TEMPLATE, True, TOKENIZER.decode(A)),
    ],
)
def test_the_chat_template_wraps_text_and_messages(prompt: Any, template: Any, chat: bool | None, text: str) -> None:
    tokenizer = build_tokenizer(template=template)
    assert encode(prompt, tokenizer, chat) == tokenizer(text)["input_ids"]


NO_ROLES = "{{ raise_exception('roles must alternate') }}"


@pytest.mark.parametrize(
    ("prompt", "tokenizer", "chat", "message"),
    [
        ("ab", None, None, "has no tokenizer"),
        ("ab", build_tokenizer(), True, "no chat template"),
        (CHAT, build_tokenizer(), None, "no chat template"),
        ("ab", build_tokenizer(template="{{ '' }}"), None, "has no tokens"),
        (["ab", "c"], build_tokenizer(), None, "one prompt is expected, and 2 are given"),
        (CHAT, build_tokenizer(template=NO_ROLES), None, "cannot render these messages: roles must alternate"),
    ],
)
def test_text_without_its_tokenizer_or_template_is_refused(
    prompt: Any, tokenizer: Any, chat: bool | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        encode(prompt, tokenizer, chat)


# Text that was rendered before


def with_bos() -> PreTrainedTokenizerFast:
    """A tokenizer that adds a first token to a text."""
    tokenizer = build_tokenizer(template=TEMPLATE)
    tokenizer.bos_token, ends = tokenizer.eos_token, [(tokenizer.eos_token, tokenizer.eos_token_id)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<end> $A", special_tokens=ends)
    return tokenizer


@pytest.mark.parametrize(
    ("text", "chat", "message"),
    [
        ("<|user|>ab<|a|>", None, "begins with '<|user|>', as if the chat template had been applied"),
        ("\n<end><|system|>ab", True, "begins with '<end>', as if"),
        ("<end>ab", False, "begins with '<end>', which the tokenizer adds too"),
        ("<|user|>ab<|a|>", False, None),
        ("ab <|user|>", None, None),
        (" ", None, None),
    ],
)
def test_text_that_was_rendered_before_is_warned_of_once(
    target: Target, text: str, chat: bool | None, message: str | None
) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        stream(Target(target.model, with_bos()), [text] * 3, None, chat=chat)
    found = [text for each in caught if (text := str(each.message)).startswith("the prompt begins")]
    assert len(found) == (message is not None) and (message or "") in "".join(found)


# Settings


@pytest.mark.parametrize("make", [lambda ids: torch.tensor(ids), np.array, set, lambda ids: np.int64(ids[0])])
def test_stop_ids_end_an_answer_in_every_form(target: Target, make: Callable[[list[int]], Any]) -> None:
    whole = ask(target, A)[0].tokens
    stop = next(token for token in whole[1:] if token != whole[0])
    [answer] = ask(target, A, stop_ids=make([stop]))
    assert (answer.tokens, answer.finish) == (whole[: whole.index(stop) + 1], "eos")


@pytest.mark.parametrize("make", [np.array, torch.tensor, tuple])
def test_request_ids_are_taken_in_every_form(target: Target, make: Callable[[list[int]], Any]) -> None:
    settings: dict[str, Any] = {"sampling": Sampling(temperature=np.float32(2), seed=3)}
    whole = ask(target, [A] * 8, **settings)
    answers = ask(target, [A, A], request_ids=make([7, 2]), **settings)
    assert [answer.tokens for answer in answers] == [whole[7].tokens, whole[2].tokens]
    assert whole[7].tokens != whole[2].tokens


@pytest.mark.parametrize(
    "settings",
    [
        {"max_new_tokens": np.int64(NEW), "batch_size": torch.tensor(2), "nodes": torch.tensor(8)},
        {"stop": None},
        {"stop": ("never said",)},
        {"request_ids": np.int64(0)},
    ],
)
def test_other_settings_are_taken(target: Target, settings: dict[str, Any]) -> None:
    assert ask(target, A, **settings)[0].tokens == ask(target, A)[0].tokens


class Layerless:
    """A proposer that is not finished."""

    propose = PlainProposer.propose


class Silent:
    layers = ()


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "stop ids as texts": ({"stop_ids": ["11"]}, "stop_ids are whole numbers, not '11'"),
    "a negative stop id": ({"stop_ids": [-1]}, "stop_ids have -1"),
    "too many": ({"request_ids": torch.tensor([1, 2])}, "1 prompts need as many different request_ids"),
    "one of them twice": ({"prompts": [A, B], "request_ids": [4, 4]}, "2 prompts need as many"),
    "a negative one": ({"request_ids": [np.int64(-1)]}, "request_ids are numbers from 0 to"),
    "a fraction of tokens": ({"max_new_tokens": 10.0}, "max_new_tokens is 10.0; it must be a whole number"),
    "no tokens": ({"max_new_tokens": 0}, "max_new_tokens is 0; it must be at least 1"),
    "log probabilities or not": ({"log_probs": True}, "log_probs is True"),
    "too many nodes": ({"nodes": np.int64(4000)}, "nodes is 4000"),
    "an empty stop text": ({"stop": ["a", ""]}, "stop string is empty"),
    "a stop text of bytes": ({"stop": b"ab"}, "not b'ab'"),
    "an array of stop texts": ({"stop": np.array(["ab", "c"])}, "stop is a string or a list of strings"),
    "a temperature": ({"sampling": 0.7}, "Sampling\\(temperature=0.7\\)"),
    "chat as text": ({"chat": "no"}, "chat is 'no'"),
    "criteria of transformers": ({"criterion": StoppingCriteriaList()}, "criterion is a function"),
    "a class": ({"proposer": NGramProposer}, "give NGramProposer\\(\\)"),
    "sampling as a proposer": ({"proposer": Sampling()}, "give sampling="),
    "a function": ({"proposer": load_proposer}, "give load_proposer\\(name, target\\)"),
    "no layers": ({"proposer": Layerless()}, "^Layerless has no layers; write `layers = \\(\\)` in it if it reads no"),
    "no method": ({"proposer": Silent()}, "^Silent has no propose; write `def propose\\(self, step, budget\\)` in it"),
}


@pytest.mark.parametrize("name", WRONG)
def test_other_settings_are_refused_by_name(target: Target, name: str) -> None:
    settings, message = WRONG[name]
    with pytest.raises((TypeError, ValueError), match=message):
        stream(**{"target": target, "prompts": A, "proposer": None, **settings})


def add(target: Target, **given: Any) -> Any:
    return Engine(target, None).add(A, **given)


def build(target: Target, **given: Any) -> Any:
    return Target(target.model, **given)


def load_model(target: Target, **given: Any) -> Any:
    return Target.load(**given)


def draft(target: Target, **given: Any) -> Any:
    return load_proposer("ngram", target, **given)


UNKNOWN: list[tuple[Callable[..., Any], str, str]] = [  # call, an argument that it does not have, message
    (generate, "max_tokens", "generate has no argument 'max_tokens'; did you mean max_new_tokens=...?"),
    (stream, "max_new_token", "stream has no argument 'max_new_token'; did you mean max_new_tokens=...?"),
    (generate, "temprature", "sampling=Sampling(temperature=...)?"),
    (generate, "eos_token_id", "did you mean stop_ids=...?"),
    (generate, "device", "did you mean Target.load(name, device=...)?"),
    (generate, "zebra", "generate has no argument 'zebra'; it has target, prompts, proposer, batch_size, request"),
    (Engine, "batch_size", "Engine has no argument 'batch_size'; did you mean rows=...?"),
    (add, "temperature", "Engine.add has no argument 'temperature'; did you mean sampling=Sampling"),
    (load_model, "torch_dtype", "Target.load has no argument 'torch_dtype'"),
    (build, "accelerated", "Target has no argument 'accelerated'"),
    (draft, "draft", "load_proposer has no argument 'draft'"),
]


@pytest.mark.parametrize(("call", "name", "message"), UNKNOWN)
def test_an_unknown_argument_is_refused_with_the_one_that_was_meant(
    target: Target, call: Callable[..., Any], name: str, message: str
) -> None:
    prompts = [A] if call in (generate, stream) else []
    with pytest.raises(TypeError, match=re.escape(message)):
        call(target, *prompts, **{name: 10})


def test_every_argument_of_the_signature_is_taken(target: Target) -> None:
    """The defaults that `help` shows, each given by its name."""
    for call in (generate, stream):
        named = signature(call).parameters.items()
        given = {name: each.default for name, each in named if each.default is not each.empty}
        assert call(target, A, **{**given, "proposer": None}), call
    settings = {name: each for name, each in given.items() if name in SETTINGS}
    assert len(settings) == len(SETTINGS)
    assert Engine(target, None).add(A, **settings).limits.max_new_tokens == 256


def test_arguments_in_the_wrong_place_get_the_right_call(target: Target) -> None:
    for call, arguments, right in (
        (generate, (target.model, A, None), "the target is a LlamaForCausalLM; give Target(model, tokenizer)"),
        (load_proposer, ("ngram", (target.model, TOKENIZER)), "the target is a tuple; give Target(model, tokenizer)"),
        (generate, (Target, A, None), "the target is the class Target; give Target.load(name) or Target"),
        (load_proposer, ("ngram", "folder"), "the target is a str; give Target.load('folder')"),
        (stream, (target, A, target), 'give load_proposer("draft", target, draft_model=...)'),
        (stream, (target, A, target.model), 'give load_proposer("draft", target, draft_model=...)'),
        (generate, ("Hi", target), "; give generate(target, 'Hi')"),
        (stream, ("Hi", target, "ngram"), "; give stream(target, 'Hi')"),
        (generate, (["Hi"], target), "; give generate(target, prompts)"),
        (load_proposer, (target, Path("head")), "; give load_proposer('head', target)"),
    ):
        with pytest.raises(TypeError, match=re.escape(right)):
            call(*arguments)


# Proposers by name


def find_points(**chosen: str) -> EntryPoints:
    """The entry points of pyproject.toml, as where the package is installed."""
    content = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8"))
    named = content["project"]["entry-points"]["draftless"].items()
    return EntryPoints(EntryPoint(name, value, "draftless") for name, value in named).select(**chosen)


def test_a_name_is_taken_as_load_proposer_takes_it(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decode.proposer.entry_points", find_points)
    monkeypatch.setattr(MergedProposer, "propose", propose := Mock(side_effect=PlainProposer().propose))
    assert ask(target, A, proposer="suffix")[0].tokens == ask(target, A)[0].tokens
    assert propose.call_count == NEW - 1
    ids, settings = torch.tensor([A]), {"max_new_tokens": NEW, "do_sample": False}
    expected = target.model.generate(ids, **settings)
    assert target.model.generate(ids, custom_generate=speculate, proposer="ngram", **settings).equal(expected)
    with pytest.raises(ValueError, match="unknown proposer 'n-gram'; choose from none, ngram"):
        ask(target, A, proposer="n-gram")
    monkeypatch.setattr("decode.proposer.entry_points", lambda **chosen: EntryPoints())
    with pytest.raises(TypeError, match="the proposer is 'ngram'; give load_proposer\\('ngram', target\\)"):
        ask(target, A, proposer="ngram")


def test_end_tokens_outside_the_vocabulary_are_left_to_transformers(target: Target) -> None:
    settings = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": [-1, 4000], "pad_token_id": 0}
    ids = torch.tensor([A])
    expected = target.model.generate(ids, **settings)
    assert target.model.generate(ids, custom_generate=speculate, proposer=None, **settings).equal(expected)
