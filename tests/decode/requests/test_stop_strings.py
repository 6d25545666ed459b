"""Stop strings end an answer where transformers' criterion does, and its text ends before them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tokenizers import AddedToken
from transformers import PreTrainedModel, StopStringCriteria

from decode import Engine, Target, generate, speculate, stream
from decode.request import Request
from decode.requests.answer import Limits
from decode.requests.detokenizer import BROKEN, TextStream, find_special, read_stop
from tests.decode.requests.test_detokenizer import LLAMA, build, unigram
from tests.support.models import tiny

NAMES = [*"abcdef.", "▁user", "▁a", "\n", "<", ">", "|", "end"]
CHAT = unigram(LLAMA, NAMES)
CHAT.add_special_tokens({"extra_special_tokens": [AddedToken("<|start|>", special=True)]})
CHAT.add_special_tokens({"extra_special_tokens": [AddedToken("<|end|>", special=True)]})


def follow(ids: Sequence[int], stop: Sequence[str], tokenizer: Any = CHAT) -> tuple[str, int | None]:
    """The text up to a stop string, and after how many tokens it was complete, if it was before the end."""
    text, shown = TextStream(tokenizer, stop), ""
    for count, token in enumerate(ids, 1):
        shown += text.push(token)
        if text.stopped:
            return shown + text.finish(), count
    return shown + text.finish(), None


MIXED: dict[str, tuple[list[str], list[str], str, int | None]] = {  # tokens, stop strings, text, number of tokens
    "special, then text": (["a", "<|end|>", "\n", "b"], ["<|end|>\n"], "a", 3),
    "text, then special": (["a", ".", "<|end|>", "b"], [".<|end|>"], "a", 3),
    "between text": (["a", "\n", "<|start|>", "▁user", "b"], ["\n<|start|> user"], "a", 4),
    "within a token after it": (["a", "<|start|>", "▁user"], ["<|start|> u"], "a", 3),
    "two special tokens": (["a", "<|end|>", "<|start|>", "b"], ["<|end|><|start|>"], "a", 3),
    "one, whose name begins so": (["a", "<|end|>"], ["<|en"], "a", 2),
    "the end of a name": (["a", "<|end|>", "b", "c"], ["end|>b"], "a", 3),
    "not across one": (["a", "\n", "<|start|>", "b", "c"], ["\nb"], "a\nbc", None),
    "after others": (["<|start|>", "a", "<|end|>", "b", "<|end|>", "c"], ["b<|end|>c"], "a", 6),
    "only a part": (["a", ".", "<|end|>", "b"], [".<|end|>\n"], "a.b", None),
    "a part at the end": (["a", ".", "<|end|>"], [".<|end|>\n"], "a.", None),
    "as plain text": (["a", *"<|", "end", *"|>", "b"], ["<|end|>"], "a", 6),
    "plain and special": (["a", *"<|", "end", *"|>", "<|end|>", "b"], ["|><|end|>"], "a<|end", 7),
    "a space at the beginning": (["▁user", "a"], [" user"], "", 1),
    "a space that is not there": (["a", "b"], [" a"], "ab", None),
    "the one that ends first": (["a", "b", "<|end|>", "c"], ["ab<|end|>c", "b<|end|>"], "a", 3),
    "longer than the answer": (["a", "b"], ["ab" * 500], "ab", None),
}


@pytest.mark.parametrize("name", MIXED)
def test_stop_strings_of_text_and_special_tokens(name: str) -> None:
    names, stop, *expected = MIXED[name]
    ids = CHAT.convert_tokens_to_ids(names)
    assert [*follow(ids, stop)] == expected
    if len(stop[0]) < 100:
        criterion = StopStringCriteria(CHAT, stop)
        ends = [size for size in range(1, len(ids) + 1) if criterion(torch.tensor([ids[:size]]), None)[0]]  # type: ignore[arg-type]
        assert (ends or [None])[0] == expected[1]


def test_what_may_begin_a_stop_string_is_held_back() -> None:
    text = TextStream(CHAT, [".<|end|>\n"])
    ids = CHAT.convert_tokens_to_ids(["a", ".", "<|start|>", ".", "<|end|>", "b"])
    assert [text.push(token) for token in ids] == ["a", "", ".", "", "", ".b"]
    assert text.finish() == "" and not text.stopped


@pytest.mark.parametrize("kind", ["byte-level", "byte fallback", "Unigram", "Unigram, byte fallback", "WordPiece"])
def test_answers_end_where_the_criterion_of_transformers_ends_them(kind: str) -> None:
    tokenizer, generator, ended = build(kind), random.Random(0), 0
    end = tokenizer.eos_token
    texts = [tokenizer.decode([token], skip_special_tokens=True) for token in range(len(tokenizer))]
    plain = [token for token, text in enumerate(texts) if text and BROKEN not in text]
    begin = tokenizer("a", add_special_tokens=False)["input_ids"]
    for _ in range(60):
        pool = [*generator.choices(plain, k=generator.choice((2, 5))), tokenizer.eos_token_id]
        ids = generator.choices(pool, k=generator.randrange(1, 16))
        whole = tokenizer.decode(ids)
        places = [(generator.randrange(len(whole)), generator.choice((1, 2, 3, 6, 9))) for _ in range(2)]
        stop = [whole[place : place + size] for place, size in places]
        try:
            criterion = StopStringCriteria(tokenizer, stop)
        except ValueError:  # it needs a token that ends in the same way
            continue
        ends = (size for size in range(1, len(ids) + 1) if criterion(torch.tensor([ids[:size]]), None)[0])  # type: ignore[arg-type]
        shown, count = follow(ids, stop, tokenizer)
        assert count == next(ends, None), (tokenizer.convert_ids_to_tokens(ids), stop)
        if count is None:
            continue
        ended += 1
        full = tokenizer.decode([*begin, *ids[:count]])[len(tokenizer.decode(begin)) :]
        found = min((full.index(each) + len(each), full.index(each)) for each in stop if each in full)[1]
        *others, last = full[:found].split(end)
        cut = next((size for size in range(len(end) - 1, 0, -1) if last.endswith(end[:size])), 0)
        last = last[: len(last) - cut] if full.startswith(end, found - cut) else last
        expected = "".join([*others, last])
        if kind == "WordPiece":  # it puts a space before each word and special token, and no mark before the first
            expected, shown = (text.replace(" ", "").removeprefix("##") for text in (expected, shown))
        # A tokenizer may drop a first space.
        assert shown in (expected, expected.removeprefix(" ")), (tokenizer.convert_ids_to_tokens(ids), stop)
    assert ended > 20


def test_text_that_was_tidied_has_no_stop_string_with_the_space() -> None:
    tokenizer = build("Unigram, tidied")
    ids = tokenizer.convert_tokens_to_ids(["a", "▁", ".", "b", "▁"])
    assert follow(ids, [" ."], tokenizer) == ("a.b ", None)
    assert follow(ids, ["a."], tokenizer) == ("", 3)
    assert follow(ids, [" "], tokenizer) == ("a.b", None)  # the answer's end makes it certain
    for size, finish in ((2, "stop"), (3, "length")):
        limits = Limits(size, stop=(" ",))
        request = Request(0, [3], limits, 100, TextStream(tokenizer, limits.stop))
        chunk = request.extend(ids[: size - 1], ids[size - 1])
        assert (chunk.finish, chunk.text) == (finish, "a" if size == 2 else "a.")


def test_one_string_is_taken_as_a_list_of_one() -> None:
    assert read_stop("ab") == read_stop(["ab"]) == read_stop({"ab"}) == ("ab",)
    assert read_stop(None) == read_stop(()) == ()


def test_a_special_token_alone_ends_an_answer_as_an_end_token() -> None:
    ends = find_special(("STOP", "<|end|>"), CHAT)
    assert ends == {CHAT.convert_tokens_to_ids("<|end|>")}
    limits = Limits(stop_ids=ends, stop=("<|end|>",))
    for names, finish in ((["a", "<|end|>"], "eos"), (["a", *"<|", "end", *"|>"], "stop")):
        request = Request(0, [3], limits, 100, TextStream(CHAT, limits.stop))
        *drafted, bonus = CHAT.convert_tokens_to_ids(names)
        chunk = request.extend(drafted, bonus)
        assert (chunk.finish, chunk.text) == (finish, "a")


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny("llama", vocab_size=len(CHAT))


def test_all_ways_to_generate_end_at_the_same_token(model: PreTrainedModel) -> None:
    target = Target(model, CHAT)
    engine, generator, mixed = Engine(target, "ngram", rows=2), random.Random(0), 0
    for first in range(1, len(CHAT), 2):
        prompt, settings = [first, 5], {"max_new_tokens": 24, "stop_ids": []}
        answer = generate(target, prompt, None, **settings)[0]
        whole = CHAT.decode(answer.tokens)
        place, size = generator.randrange(1, len(whole)), generator.choice((2, 4, 9, 12))
        stop = whole[place : place + size]
        mixed += "<|" in stop and stop not in ("<|end|>", "<|start|>")
        inputs = {"inputs": torch.tensor([prompt]), "max_new_tokens": 24, "stop_strings": stop, "tokenizer": CHAT}
        expected = model.generate(**inputs, do_sample=False)[0, 2:].tolist()
        assert model.generate(**inputs, custom_generate=speculate, proposer="ngram")[0, 2:].tolist() == expected
        answer = generate(target, prompt, "ngram", stop=stop, **settings)[0]
        *_, last = chunks = [*stream(target, prompt, "ngram", stop=[stop], **settings)]
        request = engine.add(prompt, stop=stop, **settings)
        engine_text = "".join(chunk.text for chunk in request)
        assert last.answer is not None and request.answer is not None
        assert answer.tokens == last.answer.tokens == request.answer.tokens == expected, (first, stop, whole)
        assert answer.text == "".join(chunk.text for chunk in chunks) == last.answer.text == engine_text
        assert CHAT.decode(expected, skip_special_tokens=True).startswith(answer.text)
    engine.close()
    assert mixed > 3


def test_only_the_answer_is_searched(model: PreTrainedModel) -> None:
    """Transformers' criterion, and with it `speculate`, also finds stop strings that begin in the prompt."""
    prompt = CHAT.convert_tokens_to_ids(["a", "b"])
    answer = generate(Target(model, CHAT), prompt, None, max_new_tokens=8, stop_ids=[])[0]
    stop = CHAT.decode([*prompt, *answer.tokens[:2]])[1:]
    inputs = {"inputs": torch.tensor([prompt]), "max_new_tokens": 8, "stop_strings": stop, "tokenizer": CHAT}
    for settings in ({}, {"custom_generate": speculate, "proposer": None}):
        assert model.generate(**inputs, **settings, do_sample=False)[0, 2:].tolist() == answer.tokens[:2]
    own = generate(Target(model, CHAT), prompt, None, max_new_tokens=8, stop_ids=[], stop=stop)[0]
    assert (own.tokens, own.text, own.finish) == (answer.tokens, answer.text, "length")


def test_stop_strings_need_a_tokenizer(model: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="stop strings need a tokenizer"):
        generate(Target(model), [5, 6], None, stop="<|end|>")
