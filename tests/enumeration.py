"""Every outcome of a random program with its exact probability, and tiny targets and drafts to try the rules on.

A tree shape is a list of (parent, sampled); node i + 1 of the tree is entry i. V is the vocabulary.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from decode.rejection import Dice, Drafted, Rule

T = TypeVar("T")
Prefix = tuple[int, ...]
Shape = list[tuple[int, bool]]
EXACT, WRONG = 1e-12, 1e-3


@dataclass
class Enumerator:
    """Dice that replay a script of choices, extend it by the first possible one, and note the alternatives."""

    script: list[int]
    alternatives: list[list[int]] = field(default_factory=list)
    probability: float = 1.0
    turn: int = 0

    def accept(self, probability: float) -> bool:
        assert 0 <= probability <= 1  # NaN fails too
        return self._choose([1 - probability, probability]) == 1

    def draw(self, weights: Tensor) -> int:
        values = weights.tolist()
        total = sum(values)
        assert 0 < total < float("inf") and min(values) >= 0
        return self._choose([value / total for value in values])

    def _choose(self, law: list[float]) -> int:
        if self.turn == len(self.script):
            first, *others = (i for i, weight in enumerate(law) if weight > 0)
            self.alternatives += [[*self.script, other] for other in others]
            self.script.append(first)
        choice = self.script[self.turn]
        self.turn += 1
        self.probability *= law[choice]
        return choice


def enumerate_outcomes(program: Callable[[Dice], T]) -> Iterator[tuple[T, float]]:
    scripts: list[list[int]] = [[]]
    while scripts:
        dice = Enumerator(scripts.pop())
        result = program(dice)
        scripts += dice.alternatives
        yield result, dice.probability


class Laws:
    """A target p and a draft q, random for every prefix, of one of the kinds below."""

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
Guess = Callable[[Laws, Prefix, list[int]], int]  # a deterministic token, by its prefix and its elder siblings
Exists = Callable[[int, dict[int, int]], bool]  # whether a node of the shape is drafted, from the tokens drawn so far


def guess_best(laws: Laws, prefix: Prefix, siblings: list[int]) -> int:
    return int(laws.p((*prefix, 9)).argmax())  # a law of no consequence, so now a good token and now a bad one


def guess_other(laws: Laws, prefix: Prefix, siblings: list[int]) -> int:
    return next((token for token in range(laws.vocabulary) if token not in siblings), 0)


def guess_again(laws: Laws, prefix: Prefix, siblings: list[int]) -> int:
    return siblings[0] if siblings else guess_best(laws, prefix, siblings)


def draft(
    laws: Laws, shape: Shape, dice: Dice, guess: Guess = guess_best, exists: Exists = lambda node, drawn: True
) -> tuple[Drafted, list[Prefix]]:
    """Draw the tree in index order; `exists` may leave out a node by the tokens drawn so far."""
    tokens, parents, sampled = [0], [-1], [False]
    prefixes: list[Prefix] = [()]
    place, drawn = {0: 0}, {0: 0}  # by node of the full shape: where it went, its token
    for node, (parent, is_sampled) in enumerate(shape, start=1):
        if parent not in place or not exists(node, drawn):
            continue
        above = place[parent]
        siblings = [i for i, p in enumerate(parents) if p == above]
        if is_sampled:
            law = laws.q(prefixes[above]).clone()
            law[[tokens[i] for i in siblings if sampled[i]]] = 0
            token = dice.draw(law) if law.sum() > 0 else 0  # past the support: any token
        else:
            token = guess(laws, prefixes[above], [tokens[i] for i in siblings])
        place[node], drawn[node] = len(tokens), token
        tokens.append(token)
        parents.append(above)
        sampled.append(is_sampled)
        prefixes.append((*prefixes[above], token))
    p = [laws.p(prefix) for prefix in prefixes]
    return Drafted(tokens, parents, sampled, p.__getitem__, lambda node: laws.q(prefixes[node])), prefixes


def emit(
    rule: Rule, laws: Laws, shape: Shape, guess: Guess = guess_best, exists: Exists = lambda node, drawn: True
) -> dict[Prefix, float]:
    """The law of what one step emits: accepted tokens and the bonus token."""
    law: dict[Prefix, float] = {}
    for (drafted, prefixes), chance in enumerate_outcomes(lambda dice: draft(laws, shape, dice, guess, exists)):
        for (path, bonus), probability in enumerate_outcomes(partial(rule, drafted)):
            assert path[0] == 0 and all(drafted.parents[child] == node for node, child in itertools.pairwise(path))
            emitted = (*prefixes[path[-1]], bonus)
            law[emitted] = law.get(emitted, 0.0) + chance * probability
    return law


def measure_error(law: dict[Prefix, float], laws: Laws) -> float:
    """Extend what was emitted by the target to one length; the largest error over all sequences of that length."""
    length = max(map(len, law))

    def likelihood(sequence: Prefix, start: int) -> float:
        result = 1.0
        for i in range(start, length):
            result *= float(laws.p(sequence[:i])[sequence[i]])
        return result

    worst = 0.0
    for sequence in itertools.product(range(laws.vocabulary), repeat=length):
        got = sum(law.get(sequence[:n], 0.0) * likelihood(sequence, n) for n in range(1, length + 1))
        worst = max(worst, abs(got - likelihood(sequence, 0)))
    return worst


def count_tokens(law: dict[Prefix, float]) -> float:
    return sum(len(emitted) * probability for emitted, probability in law.items())


def make_shape(*levels: str) -> Shape:
    """Every node of a level gets these children: s for a sampled one, d for a deterministic one."""
    shape: Shape = []
    nodes = [0]
    for level in levels:
        added = [(node, kind == "s") for node in nodes for kind in level]
        nodes = list(range(len(shape) + 1, len(shape) + 1 + len(added)))
        shape += added
    return shape
