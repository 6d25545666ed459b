"""Every outcome of a random program with its exact probability, and tiny models p and q to try the rules on.

A tree's shape is a list of (parent, sampled): entry i is node i + 1.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from decode.rejection import Randomness, SampledTree
from tests.support.reference_rules import RowRule

T = TypeVar("T")
Prefix = tuple[int, ...]
Shape = list[tuple[int, bool]]
EXACT, WRONG = 1e-12, 1e-3


@dataclass
class Enumerator:
    """Replays a script of choices, extends it by the first possible one, and records the alternatives."""

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

    def _choose(self, probabilities: list[float]) -> int:
        if self.turn == len(self.script):
            first, *others = (i for i, probability in enumerate(probabilities) if probability > 0)
            self.alternatives += [[*self.script, other] for other in others]
            self.script.append(first)
        choice = self.script[self.turn]
        self.turn += 1
        self.probability *= probabilities[choice]
        return choice


def enumerate_outcomes(program: Callable[[Randomness], T]) -> Iterator[tuple[T, float]]:
    """Every result of a random program with its probability; a result may come more than once."""
    scripts: list[list[int]] = [[]]
    while scripts:
        randomness = Enumerator(scripts.pop())
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
# A deterministic token, from its prefix and its earlier siblings.
ChooseToken = Callable[[Distributions, Prefix, list[int]], int]
# Whether the tree gets a node of its shape, from the tokens drawn so far.
Exists = Callable[[int, dict[int, int]], bool]


def draft_best(models: Distributions, prefix: Prefix, siblings: list[int]) -> int:
    return int(models.p((*prefix, 9)).argmax())  # any distribution: now a good token and now a bad one


def draft_other(models: Distributions, prefix: Prefix, siblings: list[int]) -> int:
    return next((token for token in range(models.vocabulary) if token not in siblings), 0)


def draft_repeated(models: Distributions, prefix: Prefix, siblings: list[int]) -> int:
    return siblings[0] if siblings else draft_best(models, prefix, siblings)


def draft(
    models: Distributions,
    shape: Shape,
    randomness: Randomness,
    choose: ChooseToken = draft_best,
    exists: Exists = lambda node, drawn: True,
) -> tuple[SampledTree, list[Prefix]]:
    """Draft a tree in index order; `exists` may leave out a node because of the tokens drawn so far."""
    tokens, parents, sampled = [0], [-1], [False]
    prefixes: list[Prefix] = [()]
    index, drawn = {0: 0}, {0: 0}  # by node of the shape: its node in the tree, its token
    for node, (parent, is_sampled) in enumerate(shape, start=1):
        if parent not in index or not exists(node, drawn):
            continue
        above = index[parent]
        siblings = [i for i, p in enumerate(parents) if p == above]
        if is_sampled:
            q = models.q(prefixes[above]).clone()
            q[[tokens[i] for i in siblings if sampled[i]]] = 0
            token = randomness.draw(q) if q.sum() > 0 else 0  # past the support: any token
        else:
            token = choose(models, prefixes[above], [tokens[i] for i in siblings])
        index[node], drawn[node] = len(tokens), token
        tokens.append(token)
        parents.append(above)
        sampled.append(is_sampled)
        prefixes.append((*prefixes[above], token))
    p = [models.p(prefix) for prefix in prefixes]
    return SampledTree(tokens, parents, sampled, p.__getitem__, lambda node: models.q(prefixes[node])), prefixes


def emit(
    rule: RowRule,
    models: Distributions,
    shape: Shape,
    choose: ChooseToken = draft_best,
    exists: Exists = lambda node, drawn: True,
) -> dict[Prefix, float]:
    """The probabilities of what one step emits: accepted tokens and the bonus token."""
    emitted: dict[Prefix, float] = {}
    drafts = enumerate_outcomes(lambda randomness: draft(models, shape, randomness, choose, exists))
    for (tree, prefixes), p_draft in drafts:
        for (path, bonus), p_rule in enumerate_outcomes(partial(rule, tree)):
            assert path[0] == 0 and all(tree.parents[child] == node for node, child in itertools.pairwise(path))
            text = (*prefixes[path[-1]], bonus)
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


def make_shape(*levels: str) -> Shape:
    """Every node of a level gets these children: s for sampled, d for deterministic."""
    shape: Shape = []
    nodes = [0]
    for level in levels:
        added = [(node, kind == "s") for node in nodes for kind in level]
        nodes = list(range(len(shape) + 1, len(shape) + 1 + len(added)))
        shape += added
    return shape
