"""Prompt lookup: find an earlier occurrence of the last tokens and draft the tokens that followed it.

After Saxena, "Prompt Lookup Decoding" (2023). An index from n-grams to places makes a lookup independent of the
length of the text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, pairwise
from operator import itemgetter, mul

from decode import Step, Tree
from decode.devices.cost_curve import CostCurve
from proposers.draft_budget import chain_time, choose_fastest

LONGEST_MATCH = 16  # longer matches count as this long
# The probability that a copied token is accepted, by the length of the match before it: where learning starts.
# Measured on 80,000 greedy tokens of the default model's answers to instructions and grade-school maths.
PRIOR = (0.0, 0.26, 0.53, 0.63, 0.69, 0.73, 0.75, 0.77, 0.81, 0.84, 0.84, 0.84, 0.85, 0.86, 0.87, 0.88, 0.96)
PRIOR_WEIGHT = 100.0  # trials that PRIOR counts for: a short run of bad luck must not end the drafting
TEXT_WEIGHT = 10.0  # trials in a text that everything learned before counts for


class NGramProposer:
    """Drafts a chain of tokens that followed an earlier occurrence of the last tokens; the longest match wins.

    max_size: the longest n-gram that is looked up.
    length: tokens to draft. None drafts as many as yield most tokens per second, by the acceptance so far and the
    target's cost curve; that may be none.
    first: copy from the first occurrence instead of the latest. `NGramProposer(max_size=2, length=10, first=True)`
    drafts the same as `prompt_lookup_num_tokens=10` in transformers.

    Raises ValueError for sizes below 1.
    """

    layers: Sequence[int] = ()

    def __init__(self, max_size: int = 8, length: int | None = None, first: bool = False) -> None:
        if max_size < 1:
            raise ValueError(f"max_size is {max_size}; an n-gram has at least one token")
        if length is not None and length < 1:
            raise ValueError(f"length is {length}; a draft has at least one token (None chooses it)")
        self.max_size, self.length, self.first = max_size, length, first
        self.adaptive = length is None  # drafts are sized by the target's cost curve
        self.acceptance = CopyAcceptance()  # in all texts so far
        self._texts: dict[int, NGramIndex] = {}

    def propose(self, step: Step, budget: int) -> Tree:
        self._observe(step)
        longest = budget - 1 if self.length is None else min(self.length, budget - 1)
        texts = [self._texts[request_id] for request_id in step.request_ids]
        rows = zip(texts, step.room, step.stop_ids, strict=True)
        drafts = [text.draft(min(longest, room - 1), stops) for text, room, stops in rows]
        if self.adaptive and any(drafts):
            cost = step.target.cost_after(step.sequences)
            drafts = _cut_drafts(texts, drafts, cost, step)
        for text, draft in zip(texts, drafts, strict=True):
            text.drafted = len(draft)
        return Tree.chain([[root, *draft] for root, draft in zip(step.bonus, drafts, strict=True)])

    def _observe(self, step: Step) -> None:
        before, self._texts = self._texts, {}
        for request_id, place, sequence, path in zip(
            step.request_ids, step.kept, step.sequences, step.path, strict=True
        ):
            if place is None:
                text = NGramIndex(self.max_size, self.first, self.acceptance)
            else:
                text = before[request_id]
                text.learn(len(path) - 1)
            text.read(sequence)
            self._texts[request_id] = text


def _cut_drafts(texts: list[NGramIndex], drafts: list[list[int]], cost: CostCurve, step: Step) -> list[list[int]]:
    """Cut the drafts to the lengths that yield most tokens per second; the rows share one forward pass.

    Where a pass takes as long as its tokens, each token goes where it is most likely to be right. Else all drafts get
    the same length.
    """
    shares, count = step.target.passes_flat, len(texts)
    found = [text.probabilities(len(draft)) for text, draft in zip(texts, drafts, strict=True)]
    if shares:
        steps = sorted(((p, [row]) for row, each in enumerate(found) for p in each), key=itemgetter(0), reverse=True)
    else:
        longest = max(map(len, found))
        growing = [[row for row, each in enumerate(found) if len(each) > place] for place in range(longest)]
        steps = [(sum(found[row][place] for row in rows), rows) for place, rows in enumerate(growing)]
    tokens = [*accumulate((p for p, _ in steps), initial=float(count))]
    unit = 1 / count if shares else 1
    times = [cost(1 + unit * number) for number in range(len(tokens))]
    if step.target.is_recurrent:
        p = [1.0, *((more - less) / count for less, more in pairwise(tokens))]
        sizes = enumerate(zip(tokens, p, strict=True), start=1)
        times = [chain_time(cost, step.given, size, right / count - 1, all_right) for size, (right, all_right) in sizes]
    best = choose_fastest(tokens, times)
    lengths = Counter(row for _, rows in steps[:best] for row in rows)
    return [draft[: lengths[row]] for row, draft in enumerate(drafts)]


class NGramIndex:
    """One request's text: where its n-grams occurred, and how many copied tokens were accepted."""

    def __init__(self, max_size: int, first: bool, learned: CopyAcceptance) -> None:
        self.first = first
        self.tokens: Sequence[int] = ()
        self.places: list[dict[tuple[int, ...], int]] = [{} for _ in range(max_size)]  # n-gram -> the token after it
        self.acceptance = CopyAcceptance(learned)
        self.indexed = 0  # n-grams that end before this token are in `places`
        self.matched = 0
        self.drafted = 0

    def read(self, tokens: Sequence[int]) -> None:
        """Index the new tokens. N-grams that end with the last token wait until the next is known."""
        self.tokens = tokens
        for end in range(max(self.indexed, 1), len(tokens)):
            for size, places in enumerate(self.places[:end], start=1):
                gram = tuple(tokens[end - size : end])
                if not (self.first and gram in places):
                    places[gram] = end
        self.indexed = len(tokens)

    def draft(self, longest: int, stops: frozenset[int]) -> list[int]:
        """The tokens after the longest match, at most `longest`, up to the first end token."""
        place = self._find()
        if place is None:
            self.matched = 0
            return []
        self.matched = self._match_length(place)
        copied = list(self.tokens[place : place + longest])
        while not self.first and len(copied) < longest:  # a repetition goes on: copy the copy
            copied.append(copied[len(copied) - (len(self.tokens) - place)])
        end = next((index for index, token in enumerate(copied) if token in stops), len(copied))
        return copied[:end]

    def probabilities(self, length: int) -> list[float]:
        """The probability that a draft is accepted up to its 1st, 2nd, ... token."""
        return list(accumulate((self.acceptance.rate(self.matched + index) for index in range(length)), mul))

    def learn(self, accepted: int) -> None:
        """Take in how many tokens of the last draft were accepted."""
        for index in range(min(accepted + 1, self.drafted)):
            self.acceptance.count(self.matched + index, index < accepted)

    def _find(self) -> int | None:
        sizes = range(min(len(self.places), len(self.tokens) - 1), 0, -1)
        places = (self.places[size - 1].get(tuple(self.tokens[-size:])) for size in sizes)
        return next((place for place in places if place is not None), None)

    def _match_length(self, place: int) -> int:
        size, limit = 1, min(place, LONGEST_MATCH)
        while size < limit and self.tokens[place - 1 - size] == self.tokens[-1 - size]:
            size += 1
        return size


class CopyAcceptance:
    """How often copied tokens are accepted, by the length of the match; tokens accepted on the way extend the match.

    Starts from what `parent` has learned, or from `PRIOR`, and passes on what it learns.
    """

    def __init__(self, parent: CopyAcceptance | None = None) -> None:
        self.parent = parent
        self.hits = [0] * (LONGEST_MATCH + 1)
        self.trials = [0] * (LONGEST_MATCH + 1)

    def rate(self, matched: int) -> float:
        matched = min(matched, LONGEST_MATCH)
        prior, weight = (self.parent.rate(matched), TEXT_WEIGHT) if self.parent else (PRIOR[matched], PRIOR_WEIGHT)
        return (self.hits[matched] + weight * prior) / (self.trials[matched] + weight)

    def count(self, matched: int, accepted: bool) -> None:
        matched = min(matched, LONGEST_MATCH)
        self.hits[matched] += accepted
        self.trials[matched] += 1
        if self.parent:
            self.parent.count(matched, accepted)
