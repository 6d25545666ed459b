"""Prompt lookup: the last tokens occurred before, so what followed them then is guessed to follow again.

After Saxena, "Prompt Lookup Decoding" (2023). An index from n-grams to places makes a lookup independent of the
length of the text; how long a draft is worth verifying is learned from what was accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from decode import Step, Tree
from decode.models.cost_curve import CostCurve

LONGEST_MATCH = 16  # matches are told apart up to this length
# The chance that a copied token is accepted, by the length of the match before it: where learning starts. Measured on
# 80,000 greedy tokens of the default model's answers to instructions and grade-school maths.
PRIOR = (0.0, 0.26, 0.53, 0.63, 0.69, 0.73, 0.75, 0.77, 0.81, 0.84, 0.84, 0.84, 0.85, 0.86, 0.87, 0.88, 0.96)
TEXT_WEIGHT = 10.0  # a text's own trials outweigh what was learned before from this number on
PRIOR_WEIGHT = 100.0  # all texts' trials outweigh PRIOR from here: a short run of bad luck must not end the drafting


class NGramProposer:
    """Drafts a chain copied from behind an earlier occurrence of the last tokens, the longest match first.

    max_size: the longest n-gram that is looked up. length: tokens to draft; None drafts as many as should pay, given
    what was accepted so far and what verifying them costs on the device, which may be none. first: copy from the
    first occurrence instead of the latest. `NGramProposer(max_size=2, length=10, first=True)` drafts what
    transformers' `prompt_lookup_num_tokens=10` does.
    """

    layers: Sequence[int] = ()

    def __init__(self, max_size: int = 8, length: int | None = None, first: bool = False) -> None:
        if max_size < 1:
            raise ValueError(f"max_size is {max_size}; an n-gram has at least one token")
        if length is not None and length < 1:
            raise ValueError(f"length is {length}; a draft has at least one token (None chooses it)")
        self.max_size, self.length, self.first = max_size, length, first
        self.learned = Acceptance()  # of all texts so far, where a new one starts from
        self._texts: dict[int, Text] = {}

    @property
    def adaptive(self) -> bool:
        """Whether drafts are sized by the target's cost curve."""
        return self.length is None

    def propose(self, step: Step, budget: int) -> Tree:
        self._observe(step)
        longest = budget - 1 if self.length is None else min(self.length, budget - 1)
        texts = [self._texts[request_id] for request_id in step.request_ids]
        drafts = [
            text.draft(min(longest, room - 1), step.stop_ids) for text, room in zip(texts, step.room, strict=True)
        ]
        if self.length is None:
            drafts = self._worthwhile(texts, drafts, step.target.cost_curve(len(texts)))
        for text, draft in zip(texts, drafts, strict=True):
            text.drafted = len(draft)
        return Tree.chain([[root, *draft] for root, draft in zip(step.bonus, drafts, strict=True)])

    def _observe(self, step: Step) -> None:
        if step.is_prefill:
            self._texts = {row: Text(self.max_size, self.first, self.learned) for row in step.request_ids}
        for row, sequence, path in zip(step.request_ids, step.sequences, step.path, strict=True):
            if not step.is_prefill:
                self._texts[row].learn(len(path) - 1)
            self._texts[row].read(sequence)

    def _worthwhile(self, texts: list[Text], drafts: list[list[int]], cost: CostCurve) -> list[list[int]]:
        """Cut the drafts where most tokens a second are expected; the rows of a batch share one forward pass."""
        longest = max(map(len, drafts))
        if longest == 0:
            return drafts
        reached = [[0.0, *accumulate(text.chances(len(draft)))] for text, draft in zip(texts, drafts, strict=True)]
        rates = [
            sum(1 + gains[min(length, len(gains) - 1)] for gains in reached) / cost(1 + length)
            for length in range(longest + 1)
        ]
        best = rates.index(max(rates))
        return [draft[:best] for draft in drafts]


class Text:
    """One row's text: where its n-grams occurred, and how far its copies held."""

    def __init__(self, max_size: int, first: bool, learned: Acceptance) -> None:
        self.first = first
        self.tokens: Sequence[int] = ()
        self.places: list[dict[tuple[int, ...], int]] = [{} for _ in range(max_size)]  # n-gram -> what follows it
        self.accepted = Acceptance(learned)
        self.indexed = 0  # n-grams that end before this token are in `places`
        self.matched = 0
        self.drafted = 0

    def read(self, tokens: Sequence[int]) -> None:
        """Index what is new. The last token's n-grams wait until it is known what follows them."""
        self.tokens = tokens
        for end in range(max(self.indexed, 1), len(tokens)):
            for size, places in enumerate(self.places[:end], start=1):
                gram = tuple(tokens[end - size : end])
                if not (self.first and gram in places):
                    places[gram] = end
        self.indexed = len(tokens)

    def draft(self, longest: int, stops: frozenset[int]) -> list[int]:
        """The tokens behind the longest match, at most `longest` and none from an end token on."""
        place = self._find()
        if place is None:
            self.matched = 0
            return []
        self.matched = self._matched(place)
        copied = list(self.tokens[place : place + longest])
        while not self.first and len(copied) < longest:  # a repetition goes on: copy the copy
            copied.append(copied[len(copied) - (len(self.tokens) - place)])
        end = next((index for index, token in enumerate(copied) if token in stops), len(copied))
        return copied[:end]

    def chances(self, length: int) -> list[float]:
        """The chance that the draft holds up to its 1st, 2nd, ... token."""
        return list(accumulate((self.accepted.rate(self.matched + index) for index in range(length)), mul))

    def learn(self, accepted: int) -> None:
        """Take note of how many tokens of the last draft were accepted."""
        for index in range(min(accepted + 1, self.drafted)):
            self.accepted.count(self.matched + index, index < accepted)

    def _find(self) -> int | None:
        for size in range(min(len(self.places), len(self.tokens) - 1), 0, -1):
            place = self.places[size - 1].get(tuple(self.tokens[-size:]))
            if place is not None:
                return place
        return None

    def _matched(self, place: int) -> int:
        size, limit = 1, min(place, LONGEST_MATCH)
        while size < limit and self.tokens[place - 1 - size] == self.tokens[-1 - size]:
            size += 1
        return size


class Acceptance:
    """How often a copied token was accepted, by the length of the match before it (tokens accepted on the way count).

    Starts from what `parent` has learned, or from `PRIOR`, and passes on what it learns.
    """

    def __init__(self, parent: Acceptance | None = None) -> None:
        self.parent = parent
        self.hits = [0] * (LONGEST_MATCH + 1)
        self.trials = [0] * (LONGEST_MATCH + 1)

    def rate(self, matched: int) -> float:
        matched = min(matched, LONGEST_MATCH)
        if self.parent is None:
            before, weight = PRIOR[matched], PRIOR_WEIGHT
        else:
            before, weight = self.parent.rate(matched), TEXT_WEIGHT
        return (self.hits[matched] + weight * before) / (self.trials[matched] + weight)

    def count(self, matched: int, accepted: bool) -> None:
        matched = min(matched, LONGEST_MATCH)
        self.hits[matched] += accepted
        self.trials[matched] += 1
        if self.parent is not None:
            self.parent.count(matched, accepted)
