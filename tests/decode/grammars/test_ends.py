"""Where answers that fit a grammar end, and what chunks tell of them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from decode import Answer, Sampling, Target, generate, stream
from decode.grammars.grammar import AnyGrammar
from proposers import MergedProposer, NGramProposer
from tests.support.drafting import Known
from tests.support.grammars import END, PERSON, SumMatcher, TableMatcher, encode, make_target, make_tokenizer, replay
from tests.support.models import VOCABULARY

PROMPT = encode("a green ")
CHAIN = {place: {10 + place: place + 1} for place in range(6)}  # 10, 11, ..., one token at a time


def table(entries: dict[int, dict[int, int]], vocabulary: int = VOCABULARY) -> AnyGrammar:
    return lambda request_id: TableMatcher(entries, vocabulary)


def answer(grammar: AnyGrammar, **settings: Any) -> Answer:
    """The answer to a prompt, with text. Drafts that go on after its end must not change it."""
    target = make_target()
    plain = [*stream(target, [PROMPT], None, grammar=grammar, **settings)]
    (expected,) = (chunk.answer for chunk in plain if chunk.answer)
    proposer = Known({0: [*expected.tokens, 7, 7]})
    chunks = [*stream(target, [PROMPT], proposer, grammar=grammar, **settings)]
    (found,) = (chunk.answer for chunk in chunks if chunk.answer)
    assert (found.tokens, found.finish, found.text) == (expected.tokens, expected.finish, expected.text)
    assert "".join(chunk.text for chunk in chunks) == found.text == "".join(chunk.text for chunk in plain)
    assert len(chunks) <= len(plain)
    return found


def test_a_complete_document_ends_with_grammar_and_has_no_end_token() -> None:
    schema = {**PERSON, "properties": {**PERSON["properties"], "name": {"enum": ["hello", "hell"]}}}
    found = answer(schema, max_new_tokens=60)
    assert found.finish == "grammar" and END not in found.tokens
    assert set(json.loads(found.text)) == {"name", "colour", "amount", "kept"}


def ending(token: int) -> Sampling:
    """Takes a token wherever it is allowed."""

    def choose(input_ids: Tensor, scores: Tensor) -> Tensor:
        scores[:, token] += 1e4
        return scores

    return Sampling(processors=[choose])


def test_the_model_may_end_an_answer_that_could_go_on() -> None:
    found = answer(re.compile("(ab|ba)+"), sampling=ending(END), max_new_tokens=20)
    assert found.finish == "eos" and found.tokens[2:] == [END] and found.text in ("ab", "ba")
    found = answer(re.compile("(abab|baab){3}"), sampling=ending(END), max_new_tokens=20)
    assert found.finish == "grammar" and len(found.text) == 12
    assert answer(re.compile("a b # and a comment", re.VERBOSE), max_new_tokens=20).text == "ab"


def test_an_answer_may_end_at_a_token_of_the_requests_own() -> None:
    own = encode("</think>")[0]
    found = answer(re.compile("(ab|ba)+"), sampling=ending(own), stop_ids=[own], max_new_tokens=20)
    assert found.finish == "eos" and found.tokens[2:] == [own]


def test_an_answer_that_is_cut_ends_with_length() -> None:
    found = answer(PERSON, max_new_tokens=4)
    assert found.finish == "length" and len(found.tokens) == 4
    assert '{"name": "'.startswith(found.text) or found.text.startswith('{"name": "')


def test_the_last_allowed_token_may_complete_a_document() -> None:
    """`max_new_tokens` of them are enough."""
    assert answer(re.compile("abba"), max_new_tokens=4).finish == "grammar"
    assert answer(re.compile("abba"), max_new_tokens=3).finish == "length"


@pytest.mark.parametrize(
    ("pattern", "stop", "finish", "text"),
    [
        ("xyx(ab){4}", "ab", "stop", "xyx"),
        ("xyx(ab){4}", "ba", "stop", "xyxa"),
        ("xyab", "ab", "stop", "xy"),  # it is cut off at the document's end, too
        ("xyab", "abc", "grammar", "xyab"),  # what might have begun it comes with the complete document
    ],
)
def test_a_stop_string_ends_a_document(pattern: str, stop: str, finish: str, text: str) -> None:
    found = answer(re.compile(pattern), stop=[stop], max_new_tokens=20)
    assert (found.finish, found.text) == (finish, text)


@pytest.mark.parametrize(("ends", "finish", "size"), [([13], "eos", 4), ([], "length", 6), ([10, 12], "eos", 1)])
def test_a_stop_token_ends_a_document(target: Target, ends: Sequence[int], finish: str, size: int) -> None:
    for proposer in (None, Known({0: [10, 11, 12, 13, 14, 15]})):
        (found,) = generate(target, [[5, 9]], proposer, grammar=table(CHAIN), stop_ids=ends, max_new_tokens=6)
        assert (found.finish, found.tokens) == (finish, [10, 11, 12, 13, 14, 15][:size])


def test_a_criterion_is_not_asked_about_a_complete_document(target: Target) -> None:
    asked: list[int] = []

    def judge(request_id: int, tokens: list[int]) -> bool:
        asked.append(len(tokens))
        return len(tokens) == 4

    entries = {**CHAIN, 4: {14: TableMatcher.DONE}}
    settings: dict[str, Any] = {"stop_ids": [], "criterion": judge, "max_new_tokens": 9}
    (found,) = generate(target, [[5, 9]], None, grammar=table(entries), **settings)
    assert (found.finish, found.tokens) == ("criterion", [10, 11])
    entries[1] = {11: TableMatcher.DONE}
    asked.clear()
    (found,) = generate(target, [[5, 9]], None, grammar=table(entries), **settings)
    assert (found.finish, found.tokens, asked) == ("grammar", [10, 11], [3])


@pytest.mark.parametrize("proposer", [None, NGramProposer(length=4), MergedProposer(nodes=8)])
def test_log_probs_are_the_models_own(target: Target, proposer: Any) -> None:
    """As if nothing was forbidden."""
    settings: dict[str, Any] = {"max_new_tokens": 7, "stop_ids": [], "log_probs": 3}
    make = lambda request_id: SumMatcher(VOCABULARY, size=6)  # noqa: E731
    (found,) = generate(target, [[5, 9, 5]], proposer, grammar=make, **settings)
    assert found.finish == "grammar" and len(found.log_probs) == 6
    logits = target.model(torch.tensor([[5, 9, 5, *found.tokens]])).logits[0, 2:-1].detach()
    log_p, forbidden = logits.log_softmax(dim=-1), 0
    for place, (token, told) in enumerate(zip(found.tokens, found.log_probs, strict=True)):
        assert told.chosen == pytest.approx(float(log_p[place, token]))
        assert [*told.best] == log_p[place].topk(3).indices.tolist()
        forbidden += not bool(replay(make, found.tokens[:place]).find_allowed()[[*told.best]].all())
    assert forbidden > 0


def test_the_chunks_of_a_document_have_its_text() -> None:
    chunks = [*stream(make_target(), [PROMPT], "merged", grammar=PERSON, max_new_tokens=30)]
    tokens = [token for chunk in chunks for token in chunk.tokens]
    assert "".join(chunk.text for chunk in chunks) == make_tokenizer().decode(tokens)
    assert all(chunk.finish is None for chunk in chunks[:-1]) and chunks[-1].finish == "length"


def test_typical_acceptance_keeps_a_grammar(target: Target) -> None:
    """It is lossy, but never takes a forbidden token."""
    make = lambda request_id: SumMatcher(VOCABULARY, size=9)  # noqa: E731
    settings: dict[str, Any] = {"sampling": Sampling(1.5, seed=2), "stop_ids": [], "lossy_typical_acceptance": True}
    for answer in generate(target, [[5, 9, 5], [7, 7]], "merged", grammar=make, **settings):
        matcher = make(0)
        assert all(map(matcher.accept, answer.tokens)) and answer.finish == "grammar"
