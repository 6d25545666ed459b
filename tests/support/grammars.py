"""Grammars to test with: matchers of the tests' own, a small tokenizer, and constrained decoding without drafts.

Run as a module, it prints the answers that differ on a simulated GPU, as JSON:

python -m tests.support.grammars
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from decode import Matcher, Proposer, Sampling, Target, generate
from decode.cuda import graph
from decode.grammars.grammar import AnyGrammar, MakeMatcher, make_matchers
from proposers import MedusaProposer, MergedProposer, NGramProposer
from tests.support.drafting import make_head
from tests.support.models import tiny
from tests.support.simulated_cuda import recorded_graphs, simulate, to_cuda
from tests.support.tokenizers import merging

END = 1  # the token that ends answers
WORDS = ['", "', '": ', '": "', "name", "colour", "amount", "green", "true", "false", "hello"]
FIXED: dict[str, Any] = {"additionalProperties": False, "type": "object"}
PERSON = {
    **FIXED,
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "colour": {"enum": ["green", "red", "grey"]},
        "amount": {"type": "integer", "minimum": 0, "maximum": 99},
        "kept": {"type": "boolean"},
    },
    "required": ["name", "colour", "amount", "kept"],
}
LARK = 'start: greeting (" " greeting)*\ngreeting: "hello" | /[a-c]{2,4}/ | "(" greeting ")"'
GRAMMARS: dict[str, AnyGrammar] = {
    "schema": PERSON,
    "regex": re.compile(r"(true|false)(, \d{1,3}/\d){2,}"),
    "lark": LARK,
}


@cache
def make_tokenizer() -> PreTrainedTokenizerFast:
    """All bytes, `WORDS` and their beginnings, and special tokens around a thought."""
    tokenizer = merging(WORDS)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})
    return tokenizer


@cache
def make_target(kind: str = "llama", cuda: bool = False, accelerate: str = "off") -> Target:
    """A small model of this tokenizer's tokens, and some that it lacks."""
    tokenizer = make_tokenizer()
    model = tiny(kind, vocab_size=len(tokenizer) + 7, num_hidden_layers=2 if kind == "lfm2" else 1)
    model.generation_config.eos_token_id = END
    return Target(to_cuda(model) if cuda else model, tokenizer, accelerate=accelerate)


@cache
def make_bare_target() -> Target:
    """A smaller model, without a tokenizer, for matchers of the tests' own."""
    return Target(tiny("llama", num_hidden_layers=1))


def make_matcher(grammar: AnyGrammar, target: Target | None = None) -> MakeMatcher:
    """What makes the matchers of a grammar."""
    target = target or make_target()
    return make_matchers(grammar, target.tokenizer, target.vocabulary, target.stop_ids)


def encode(text: str) -> list[int]:
    return make_tokenizer()(text, add_special_tokens=False)["input_ids"]


def replay(make: MakeMatcher, tokens: Sequence[int]) -> Matcher:
    """A fresh matcher after some tokens."""
    matcher = make(0)
    for token in tokens:
        assert matcher.accept(token), f"{token} is forbidden in {tokens}"
    return matcher


def decode_greedily(target: Target, prompt: Sequence[int], make: MakeMatcher, most: int) -> tuple[list[int], str]:
    """Tokens and end of an answer by whole forward passes. Each token has a fresh matcher."""
    answer: list[int] = []
    while len(answer) < most:
        allowed = replay(make, answer).find_allowed()
        logits = target.model(torch.tensor([[*prompt, *answer]])).logits[0, -1]
        answer.append(int(logits.masked_fill(~allowed, -torch.inf).argmax()))
        if answer[-1] in target.stop_ids:
            return answer, "eos"
        if replay(make, answer).is_complete:
            return answer, "grammar"
    return answer, "length"


class TableMatcher:
    """A matcher by a table: for each state, the state after each allowed token. It begins in state 0.

    The document is complete in state `DONE`. Any state that is not in the table allows nothing.
    """

    DONE = -1

    def __init__(self, table: Mapping[int, Mapping[int, int]], vocabulary: int) -> None:
        self.table, self.vocabulary, self.states = table, vocabulary, [0]

    @property
    def following(self) -> Mapping[int, int]:
        return self.table.get(self.states[-1], {})

    def accept(self, token: int) -> bool:
        if token not in self.following:
            return False
        self.states.append(self.following[token])
        return True

    def fork(self) -> Matcher:
        return deepcopy(self)

    def find_allowed(self) -> Tensor:
        allowed = torch.zeros(self.vocabulary, dtype=torch.bool)
        allowed[[*self.following]] = True
        return allowed

    def find_forced(self) -> Sequence[int]:
        return [*self.following] if len(self.following) == 1 else []

    @property
    def is_complete(self) -> bool:
        return self.states[-1] == self.DONE


class SumMatcher(TableMatcher):
    """Allows three tokens of four, by the sum of those before, and is complete after some number of them."""

    def __init__(self, vocabulary: int, size: int = 1 << 30, divisor: int = 11) -> None:
        super().__init__({}, vocabulary)
        self.size, self.divisor = size, divisor

    @property
    def following(self) -> Mapping[int, int]:
        state = self.states[-1]
        if self.is_complete:
            return {}
        tokens = [token for token in range(self.vocabulary) if (token + state) % 4]
        return {token: (state * 7 + token) % self.divisor for token in tokens}

    @property
    def is_complete(self) -> bool:
        return len(self.states) > self.size


def list_differences() -> list[str]:
    """The answers that are not the CPU's."""
    faults, prompts = [], [encode("name"), encode("a green "), encode("hello hello")]
    cpu = make_target()
    for accelerate in ("off", "graphs"):
        target = make_target(cuda=True, accelerate=accelerate)
        proposers: dict[str, Callable[[], Proposer | None]] = {
            "plain": lambda: None,
            "ngram": lambda: NGramProposer(length=4),
            "merged": lambda: MergedProposer(nodes=9),
            "medusa": lambda: MedusaProposer(to_cuda(make_head("medusa", make_target(cuda=True))), nodes=9),
        }
        for kind, grammar in GRAMMARS.items():
            for settings in ({}, {"temperature": 0.8, "seed": 3}):
                options: dict[str, Any] = {"max_new_tokens": 14, "sampling": Sampling(**settings)}
                expected = generate(cpu, prompts, None, grammar=grammar, **options)
                for name, make in proposers.items():
                    found = generate(target, prompts, make(), grammar=grammar, **options)
                    if [each.tokens for each in found] != [each.tokens for each in expected]:
                        faults.append(f"{accelerate}, {kind}, {name}, {settings}")
    return faults


def main() -> None:
    torch.set_num_threads(1)
    graph.print_notice = lambda *_: None
    with simulate(), recorded_graphs():
        print(json.dumps(list_differences()))


if __name__ == "__main__":
    main()
