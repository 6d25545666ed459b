"""transformers' `generate` with a grammar gives what a logits processor over llguidance's matcher gives."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedModel

from decode import Grammar, Target, generate, speculate
from proposers import DraftProposer, MergedProposer, NGramProposer
from tests.support.grammars import END, GRAMMARS, LARK, PERSON, SumMatcher, encode, make_target, make_tokenizer

llguidance = pytest.importorskip("llguidance")

PROMPTS = [encode("name"), encode("a green"), encode("hello, hello")]
WIDTH, PAD = max(map(len, PROMPTS)), 0
BATCH = torch.tensor([[PAD] * (WIDTH - len(prompt)) + prompt for prompt in PROMPTS])
MASK = torch.tensor([[0] * (WIDTH - len(prompt)) + [1] * len(prompt) for prompt in PROMPTS])
NEW = 18


class Masked(LogitsProcessor):
    """Forbids what llguidance's matcher forbids, for each row of a batch. It knows nothing of ours."""

    def __init__(self, kind: str, rows: int) -> None:
        from llguidance.hf import from_tokenizer

        target = make_target()
        tokenizer = from_tokenizer(make_tokenizer(), n_vocab=target.vocabulary, eos_token=END)
        if kind == "schema":
            options = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
            grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(PERSON), overrides=options)
        elif kind == "regex":
            grammar = llguidance.LLMatcher.grammar_from_regex(GRAMMARS[kind].pattern)
        else:
            grammar = llguidance.LLMatcher.grammar_from_lark(LARK)
        self.matchers = [llguidance.LLMatcher(tokenizer, grammar) for _ in range(rows)]
        self.length = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        for row, matcher in enumerate(self.matchers):
            if self.length and not matcher.is_stopped():
                assert matcher.consume_token(int(input_ids[row, -1])), matcher.get_error()
            bits = numpy.frombuffer(matcher.compute_bitmask(), dtype=numpy.uint8)
            allowed = numpy.unpackbits(bits, count=scores.shape[1], bitorder="little")
            scores[row, ~torch.from_numpy(allowed).bool()] = -torch.inf
        self.length = input_ids.shape[1]
        return scores


def theirs(kind: str, ids: Tensor, **settings: Any) -> list[list[int]]:
    """The new tokens of each row, without the end token that follows a complete document, and without padding."""
    model = make_target().model
    settings = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": PAD, **settings}
    found = model.generate(ids, logits_processor=[Masked(kind, len(ids))], **settings)
    return [cut(row) for row in found[:, ids.shape[1] :].tolist()]


def cut(tokens: Sequence[int]) -> list[int]:
    tokens = list(tokens)
    return tokens[: tokens.index(END)] if END in tokens else tokens


def ours(kind: Any, ids: Tensor, **settings: Any) -> list[list[int]]:
    model, grammar = make_target().model, GRAMMARS.get(kind, kind) if isinstance(kind, str) else kind
    settings = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": PAD, "proposer": "merged", **settings}
    found = model.generate(ids, custom_generate=speculate, grammar=grammar, tokenizer=make_tokenizer(), **settings)
    return [cut(row) for row in found[:, ids.shape[1] :].tolist()]


@pytest.mark.parametrize("kind", GRAMMARS)
def test_generate_gives_the_same_tokens(kind: str) -> None:
    """With ours, rows end with the document; the last token of theirs is the end token."""
    target = make_target()
    answers = generate(target, PROMPTS, "merged", grammar=GRAMMARS[kind], max_new_tokens=NEW)
    expected = [theirs(kind, torch.tensor([prompt]))[0] for prompt in PROMPTS]
    assert [cut(answer.tokens) for answer in answers] == expected
    assert {answer.finish for answer in answers} <= {"length", "grammar", "eos"}


@pytest.mark.parametrize("kind", GRAMMARS)
@pytest.mark.parametrize("proposer", [None, "merged", "ngram"])
def test_one_row_of_transformers_generate(kind: str, proposer: Any) -> None:
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        assert ours(kind, ids, proposer=proposer) == theirs(kind, ids)


@pytest.mark.parametrize("kind", GRAMMARS)
def test_a_batch_of_transformers_generate(kind: str) -> None:
    """Rows that end before the others are padded."""
    found = ours(kind, BATCH, attention_mask=MASK)
    expected = theirs(kind, BATCH, attention_mask=MASK)
    for mine, row in zip(found, expected, strict=True):
        assert mine[: len(row)] == row and {*mine[len(row) :]} <= {PAD}


def test_sampling_fits_the_grammar_and_follows_the_seed() -> None:
    texts = []
    for proposer in (None, MergedProposer(nodes=8), NGramProposer(length=3)):
        torch.manual_seed(5)
        texts.append(ours("schema", BATCH, attention_mask=MASK, do_sample=True, proposer=proposer, max_new_tokens=40))
    assert texts[0] == texts[1] == texts[2]
    for row in texts[0]:
        text = make_tokenizer().decode([each for each in row if each != PAD])
        assert text.startswith('{"name": "')


def test_a_grammar_that_begins_after_a_token() -> None:
    ids = torch.tensor([PROMPTS[1]])

    def think(input_ids: Tensor, scores: Tensor) -> Tensor:
        scores[:, encode("</think>")[0]] += 1e4 * (input_ids.shape[1] == ids.shape[1] + 1)
        return scores

    (row,) = ours(Grammar(PERSON, after="</think>"), ids, logits_processor=[think])
    assert row[1] == encode("</think>")[0] and make_tokenizer().decode(row[2:]).startswith('{"name": "')


def test_a_grammar_needs_the_tokenizer_argument() -> None:
    with pytest.raises(ValueError, match="a grammar needs a tokenizer"):
        make_target().model.generate(BATCH[:1], custom_generate=speculate, grammar=PERSON, max_new_tokens=3)


def test_a_matcher_of_ones_own_needs_none() -> None:
    target = make_target()
    settings = {"custom_generate": speculate, "max_new_tokens": 9, "proposer": "merged"}
    ids = torch.tensor([PROMPTS[0]])
    found = target.model.generate(ids, grammar=lambda each: SumMatcher(target.vocabulary, size=4), **settings)
    assert found.shape[1] == ids.shape[1] + 4


def test_an_error_of_a_matcher_is_raised() -> None:
    def make(request_id: int) -> Any:
        raise LookupError("no such grammar")

    with pytest.raises(LookupError, match="no such grammar"):
        ours(make, BATCH[:1])


def test_rows_of_a_batch_that_may_end_early_need_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with stopping criteria."""
    model: PreTrainedModel = make_target().model
    monkeypatch.setattr(model.generation_config, "eos_token_id", -1)
    assert Target(model).stop_ids == frozenset()  # -1 means none
    monkeypatch.setattr(model.generation_config, "eos_token_id", None)
    monkeypatch.setattr(model.generation_config, "pad_token_id", None)
    settings: dict[str, Any] = {"attention_mask": MASK, "custom_generate": speculate, "max_new_tokens": 9}
    with pytest.raises(ValueError, match="rows that end before the others are padded; set pad_token_id"):
        model.generate(BATCH, grammar=lambda each: SumMatcher(make_target().vocabulary, size=3 + each), **settings)


def test_scores_are_those_that_tokens_were_chosen_by() -> None:
    model, settings = make_target().model, {"return_dict_in_generate": True, "output_scores": True, "max_new_tokens": 6}
    ids = torch.tensor([PROMPTS[0]])
    found = model.generate(ids, custom_generate=speculate, grammar=PERSON, tokenizer=make_tokenizer(), **settings)
    expected = model.generate(ids, logits_processor=[Masked("schema", 1)], **settings)
    assert torch.equal(found.sequences, expected.sequences)
    for mine, other in zip(found.scores, expected.scores, strict=True):
        assert torch.allclose(mine.double(), other.double(), atol=1e-4)


def test_sampled_drafts_in_transformers_generate_fit_the_grammar() -> None:
    target = make_target()
    proposer = DraftProposer(target, sampled=True, depth=3, nodes=4)
    (row,) = ours("schema", BATCH[1:2], attention_mask=MASK[1:2], do_sample=True, proposer=proposer)
    assert make_tokenizer().decode(row).startswith('{"name": "')
