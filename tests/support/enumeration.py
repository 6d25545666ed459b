"""Every outcome of a random program with its exact probability, tiny models p and q to try acceptance rules on, and
a comparison of samples."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from decode import Answer

T = TypeVar("T")
Prefix = tuple[int, ...]
EXACT, WRONG = 1e-12, 1e-3


@dataclass
class Randomness:
    """The random decisions of a program: replays a script of choices, extends it by the first possible one, and
    records the alternatives."""

    script: list[int]
    alternatives: list[list[int]] = field(default_factory=list)
    probability: float = 1.0
    turn: int = 0

    def accept(self, probability: float) -> bool:
        """True with this probability."""
        assert 0 <= probability <= 1  # NaN fails too
        return self._choose([1 - probability, probability]) == 1

    def draw(self, weights: Tensor) -> int:
        """A token, sampled by weights [V] >= 0 that need not sum to one."""
        values = weights.tolist()
        total = sum(values)
        assert 0 < total < float("inf") and min(values) >= 0
        return self._choose([value / total for value in values])

    def _choose(self, probabilities: list[float]) -> int:
        if self.turn == len(self.script):
            first, *others = (i for i, probability in enumerate(probabilities) if probability > 0)
            self.alternatives += [[*self.script, other] for other in others]
            self.script.append(first)
        choice = self.script[self.turn]
        self.turn += 1
        self.probability *= probabilities[choice]
        return choice


@dataclass(frozen=True)
class Chain:
    """A sampled chain with the probabilities of target and draft after each node, [V] each."""

    tokens: list[int]  # root first
    p: list[Tensor]
    q: list[Tensor]


# A rule for one chain: how many draft tokens are accepted, and the token after them.
RowRule = Callable[[Chain, Randomness], tuple[int, int]]


def enumerate_outcomes(program: Callable[[Randomness], T]) -> Iterator[tuple[T, float]]:
    """Every result of a random program with its probability; a result may come more than once."""
    scripts: list[list[int]] = [[]]
    while scripts:
        randomness = Randomness(scripts.pop())
        result = program(randomness)
        scripts += randomness.alternatives
        yield result, randomness.probability


class Distributions:
    """The probabilities of a target p and a draft q, random for every prefix, of one of `KINDS`."""

    def __init__(self, kind: str, vocabulary: int = 3, seed: int = 0) -> None:
        self.kind, self.vocabulary, self.seed = kind, vocabulary, seed
        self.cache: dict[tuple[str, Prefix], Tensor] = {}

    def p(self, prefix: Prefix) -> Tensor:
        return self._recall("p", prefix)

    def q(self, prefix: Prefix) -> Tensor:
        return self._recall("p" if self.kind == "equal" else "q", prefix)

    def _recall(self, name: str, prefix: Prefix) -> Tensor:
        if (name, prefix) not in self.cache:
            self.cache[name, prefix] = self._make(name, prefix)
        return self.cache[name, prefix]

    def _make(self, name: str, prefix: Prefix) -> Tensor:
        generator = torch.Generator().manual_seed(hash((self.seed, name == "p", *prefix)) % 2**62)
        weights = (1.2 * torch.randn(self.vocabulary, generator=generator, dtype=torch.float64)).exp()
        lost = int(torch.randint(self.vocabulary, (), generator=generator))
        if self.kind == f"zeros in {name}":
            weights[lost] = 0
        elif self.kind == f"point {name}":
            weights = torch.zeros_like(weights)
            weights[lost] = 1
        elif self.kind == "disjoint":
            weights[slice(0, 1) if name == "q" else slice(1, None)] = 0
        elif self.kind == "close" and name == "q":
            weights = self.p(prefix) + 0.1 * weights / weights.sum()
        return weights / weights.sum()


KINDS = ["generic", "close", "equal", "disjoint", "zeros in p", "zeros in q", "point p", "point q"]
GoesOn = Callable[[Prefix], bool]  # whether the chain gets another token, from those drawn so far


def draft(models: Distributions, most: int, goes_on: GoesOn, randomness: Randomness) -> Chain:
    """A chain of up to `most` draft tokens, sampled from q."""
    drawn: Prefix = ()
    while len(drawn) < most and goes_on(drawn):
        drawn = (*drawn, randomness.draw(models.q(drawn)))
    prefixes = [drawn[:size] for size in range(len(drawn) + 1)]
    return Chain([0, *drawn], [*map(models.p, prefixes)], [*map(models.q, prefixes)])


def emit(rule: RowRule, models: Distributions, most: int, goes_on: GoesOn = lambda drawn: True) -> dict[Prefix, float]:
    """The probabilities of what one step emits: accepted tokens and the bonus token."""
    emitted: dict[Prefix, float] = {}
    for chain, p_draft in enumerate_outcomes(partial(draft, models, most, goes_on)):
        for (accepted, bonus), p_rule in enumerate_outcomes(partial(rule, chain)):
            text = (*chain.tokens[1 : accepted + 1], bonus)
            emitted[text] = emitted.get(text, 0.0) + p_draft * p_rule
    return emitted


def measure_error(emitted: dict[Prefix, float], models: Distributions) -> float:
    """The largest error over all sequences of one length, to which the target continues what was emitted."""
    length = max(map(len, emitted))

    def likelihood(sequence: Prefix, start: int) -> float:
        result = 1.0
        for i in range(start, length):
            result *= float(models.p(sequence[:i])[sequence[i]])
        return result

    worst = 0.0
    for sequence in itertools.product(range(models.vocabulary), repeat=length):
        got = sum(emitted.get(sequence[:n], 0.0) * likelihood(sequence, n) for n in range(1, length + 1))
        worst = max(worst, abs(got - likelihood(sequence, 0)))
    return worst


def count_tokens(emitted: dict[Prefix, float]) -> float:
    """The expected number of tokens."""
    return sum(len(text) * probability for text, probability in emitted.items())


def compare_third_tokens(*samples: Sequence[Answer]) -> float:
    """Chi-square statistic of two samples of equal size. The third token of an answer lies inside drafts."""
    one, other = (torch.bincount(torch.tensor([each.tokens[2] for each in sample]), minlength=12) for sample in samples)
    assert len(one) == len(other) == 12  # the models have 12 tokens, so there are 11 degrees of freedom
    return float(((one - other).double() ** 2 / (one + other).clamp(min=1)).sum())
