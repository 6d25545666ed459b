"""A matcher that fails ends its own request, where the text gets there."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from decode import Matcher, Sampling, Target, generate
from decode.grammars import grammar as grammars
from proposers import DraftProposer, MergedProposer, NGramProposer
from tests.support.drafting import Known, texts, tree_of_rows
from tests.support.grammars import PERSON, SumMatcher, TableMatcher, encode, make_matcher, make_target, replay
from tests.support.models import VOCABULARY

PROMPTS = [[5, 9, 5, 9, 5], [7, 8, 9], [20, 21]]
SETTINGS: dict[str, Any] = {"max_new_tokens": 10, "stop_ids": []}
PROPOSERS: dict[str, Callable[[Target], Any]] = {
    "none": lambda target: None,
    "ngram": lambda target: NGramProposer(length=4),
    "merged": lambda target: MergedProposer(nodes=8),
    "sampled": lambda target: DraftProposer(target, sampled=True, depth=3, nodes=4),
}


class Failing(SumMatcher):
    """Raises in one of its methods after some number of tokens."""

    def __init__(self, method: str, size: int, is_meant: Callable[[list[int]], bool] = lambda tokens: True) -> None:
        super().__init__(VOCABULARY)
        self.tokens: list[int] = []
        self.method, self.limit, self.is_meant = method, size, is_meant

    def check(self, method: str) -> None:
        if method == self.method and len(self.tokens) >= self.limit and self.is_meant(self.tokens):
            raise LookupError("no more rules")

    def accept(self, token: int) -> bool:
        taken = super().accept(token)
        if taken:
            self.tokens.append(token)
        self.check("accept")
        return taken

    def fork(self) -> Matcher:
        self.check("fork")
        copied = copy(self)
        copied.states, copied.tokens = [*self.states], [*self.tokens]
        return copied

    def find_allowed(self) -> Tensor:
        self.check("find_allowed")
        return super().find_allowed()

    def find_forced(self) -> Sequence[int]:
        self.check("find_forced")
        return super().find_forced()

    @property
    def is_complete(self) -> bool:
        self.check("is_complete")
        return False


def alone(target: Target) -> list[list[int]]:
    """The answers without any fault."""
    return texts(target, PROMPTS, None, grammar=lambda request_id: SumMatcher(VOCABULARY), **SETTINGS)


@pytest.mark.parametrize("method", ["accept", "find_allowed", "is_complete"])
@pytest.mark.parametrize("name", PROPOSERS)
def test_a_matcher_that_fails_ends_its_request_alone(target: Target, name: str, method: str) -> None:
    def make(request_id: int) -> Matcher:
        return Failing(method, 5) if request_id == 1 else SumMatcher(VOCABULARY)

    expected = alone(target)
    with pytest.warns(RuntimeWarning, match="request 1: LookupError: no more rules"):
        answers = generate(target, PROMPTS, PROPOSERS[name](target), grammar=make, **SETTINGS)
    assert [answer.finish for answer in answers] == ["length", "error", "length"]
    assert [answers[0].tokens, answers[2].tokens] == [expected[0], expected[2]]
    taken = 4 if method == "accept" else 5  # a token that is not accepted is none of the answer's
    assert answers[1].tokens == expected[1][:taken] and isinstance(answers[1].exception, LookupError)


@pytest.mark.filterwarnings("ignore:request:RuntimeWarning")
@pytest.mark.parametrize(
    "method",
    [
        "accept",
        "find_allowed",
        "is_complete",
        "fork",
        "find_forced",
    ],
)
def test_a_matcher_that_fails_after_drafts_alone_changes_nothing(target: Target, method: str) -> None:
    """Only the text may end a request."""
    expected, failed = alone(target), list[int]()

    def make(request_id: int) -> Matcher:
        def is_meant(tokens: list[int]) -> bool:
            is_draft = tokens != expected[request_id][: len(tokens)]
            failed.extend([request_id] * is_draft)
            return is_draft

        return Failing(method, 1, is_meant)

    answers = generate(target, PROMPTS, Wide(expected), grammar=make, **SETTINGS)
    assert [answer.tokens for answer in answers] == expected
    assert {answer.finish for answer in answers} == {"length"} and {*failed} == {0, 1, 2}


class Wide(Known):
    """Known answers, and branches that leave them and go on. It asks for forced tokens, as a source may."""

    def __init__(self, answers: list[list[int]]) -> None:
        super().__init__(dict(enumerate(answers)), depth=2)

    def propose(self, step: Any, budget: int) -> Any:
        rows = []
        for request in step.requests:
            done = len(request.sequence) - len(request.prompt)
            right = [*self.answers[request.request_id][done : done + 2]]
            matcher = replay(lambda _: SumMatcher(VOCABULARY), self.answers[request.request_id][:done])
            wrong = [each for each in matcher.find_allowed().nonzero()[:3, 0].tolist() if each not in right]
            for token in wrong:
                request.constraint.find_forced((token,))
            tokens = [request.sequence[-1], *wrong, *right[:1], *wrong]
            rows.append((tokens, [-1, *([0] * (len(wrong) + len(right[:1]))), *range(1, len(wrong) + 1)]))
        return tree_of_rows(rows)


def test_a_matcher_that_cannot_be_made_ends_its_request_alone(target: Target) -> None:
    def make(request_id: int) -> Matcher:
        if request_id == 1:
            raise KeyError("no such grammar")
        return SumMatcher(VOCABULARY)

    with pytest.warns(RuntimeWarning, match="request 1: KeyError: 'no such grammar'"):
        answers = generate(target, PROMPTS, "merged", grammar=make, **SETTINGS)
    assert [len(answer.tokens) for answer in answers] == [10, 0, 10]


@pytest.mark.parametrize("name", PROPOSERS)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_dead_end_ends_its_request_alone(target: Target, name: str, temperature: float) -> None:
    """No token is allowed there, and the document is not complete."""
    chain = {place: {10 + place: place + 1, 30: place + 1} for place in range(4)}

    def make(request_id: int) -> Matcher:
        return TableMatcher(chain, VOCABULARY) if request_id == 1 else SumMatcher(VOCABULARY)

    settings = {**SETTINGS, "sampling": Sampling(temperature, seed=1)}
    with pytest.warns(RuntimeWarning, match=r"request 1: ValueError: the grammar allows no token here"):
        answers = generate(target, PROMPTS, PROPOSERS[name](target), grammar=make, **settings)
    assert [len(answer.tokens) for answer in answers] == [10, 4, 10]


def test_a_document_that_is_complete_at_once_has_no_tokens(target: Target) -> None:
    (answer,) = generate(target, PROMPTS[:1], None, grammar=lambda each: SumMatcher(VOCABULARY, size=0), **SETTINGS)
    assert (answer.finish, answer.tokens) == ("grammar", [])


def test_drafts_into_a_dead_end_are_rejected(target: Target) -> None:
    """The text itself does not go there."""
    table = {0: {10: 1, 11: 2}, 1: {12: TableMatcher.DONE}}
    make = lambda request_id: TableMatcher(table, VOCABULARY)  # noqa: E731

    def prefer(input_ids: Tensor, scores: Tensor) -> Tensor:
        scores[:, 10] += 1e4
        return scores

    settings = {**SETTINGS, "sampling": Sampling(processors=[prefer])}
    (answer,) = generate(target, PROMPTS[:1], Known({0: [11, 20, 20]}), grammar=make, **settings)
    assert (answer.tokens, answer.finish) == ([10, 12], "grammar")


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (torch.ones(7, dtype=torch.bool), r"\[7\] of torch.bool.*; it must return a tensor \[96\] of torch.bool"),
        (torch.ones(VOCABULARY), r"\[96\] of torch.float32"),
        (torch.ones(1, VOCABULARY, dtype=torch.bool), r"\[1, 96\] of torch.bool"),
        ([True] * VOCABULARY, "list.*; it must return a tensor"),
        (None, "NoneType"),
        (torch.ones(VOCABULARY, dtype=torch.bool, device="meta"), "meta"),
    ],
)
def test_other_results_than_masks_end_their_request_alone(target: Target, returned: Any, message: str) -> None:
    class Wrong(SumMatcher):
        def find_allowed(self) -> Any:
            return returned if len(self.states) > 2 else super().find_allowed()

    make = lambda request_id: (Wrong if request_id == 1 else SumMatcher)(VOCABULARY)  # noqa: E731
    with pytest.warns(RuntimeWarning, match=f"request 1: ValueError: find_allowed returned .*{message}"):
        answers = generate(target, PROMPTS, "merged", grammar=make, **SETTINGS)
    assert [len(answer.tokens) for answer in answers] == [10, 2, 10]


@pytest.mark.filterwarnings("ignore:request:RuntimeWarning")
def test_a_matcher_may_return_the_same_tensor_each_time(target: Target) -> None:
    class Reusing(SumMatcher):
        buffer = torch.zeros(VOCABULARY, dtype=torch.bool)

        def find_allowed(self) -> Tensor:
            return self.buffer.copy_(super().find_allowed())

    expected = alone(target)
    known = Known(dict(enumerate(expected)))
    assert texts(target, PROMPTS, known, grammar=lambda request_id: Reusing(VOCABULARY), **SETTINGS) == expected


class Complex:
    """llguidance's matcher, with an error after five tokens."""

    def __init__(self, inner: Any, taken: int = 0) -> None:
        self.inner, self.taken = inner, taken

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def deep_copy(self) -> Complex:
        return Complex(self.inner.deep_copy(), self.taken)

    def try_consume_tokens(self, tokens: list[int]) -> int:
        self.taken += 1
        return self.inner.try_consume_tokens(tokens)

    def is_error(self) -> bool:
        return self.taken >= 5

    def get_error(self) -> str:
        return "ParserTooComplex\nand what it was about to do"


def test_an_error_of_llguidance_ends_its_request_alone() -> None:
    made, target = make_matcher(PERSON), make_target()

    def make(request_id: int) -> Matcher:
        matcher: Any = made(request_id)
        return matcher if request_id else grammars.LibraryMatcher(Complex(matcher._matcher), target.vocabulary)

    prompts = [encode("name"), encode("a green ")]
    with pytest.warns(RuntimeWarning, match=r"request 0: ValueError: the grammar failed: ParserTooComplex$"):
        answers = generate(target, prompts, None, grammar=make, max_new_tokens=30)
    assert [answer.finish for answer in answers] == ["error", "length"] and len(answers[0].tokens) == 4


DEEP = r"""
import json, sys
from decode.grammars.grammar import make_matchers
from tests.support.tokenizers import byte_level
tokenizer = byte_level()
place = {"type": "object", "required": ["x"]}
schema = {"$ref": "#/$defs/a0", "$defs": {"a1000": {"type": "integer"}}}
for number in range(1000):
    schema["$defs"][f"a{number}"] = {**place, "properties": {"x": {"$ref": f"#/$defs/a{number + 1}"}}}
rules = "start: r0\n" + "\n".join(f"r{number}: r{number + 1}" for number in range(5000)) + '\nr5000: "a"'
for grammar in (schema, rules):
    assert make_matchers(grammar, tokenizer, len(tokenizer), frozenset([1]))(0).find_allowed().any()
print("done")
"""


def test_rules_within_rules_do_not_overflow_the_stack() -> None:
    """That would end the process."""
    run = subprocess.run([sys.executable, "-c", DEEP], capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (0, "done\n"), run.stderr
