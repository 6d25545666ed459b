"""The search for draft trees, compared with a search path by path."""

from __future__ import annotations

import heapq

import pytest
import torch
from torch import Tensor

from decode.devices.cost_curve import CostCurve
from proposers.draft_budget import DraftBudget
from proposers.search import RANKS, Draft, ScoredDrafter, expect_right, search
from tests.support.drafting import list_paths


class MadeUpDrafter:
    """Its probabilities depend on the whole path, the row and nothing else. Draft id i is token 100 + i."""

    def __init__(self, rows: int, vocabulary: int) -> None:
        self.vocabulary = vocabulary
        self.paths: list[list[tuple[int, ...]]] = [[()] for _ in range(rows)]
        self.followed = 0  # paths of a row

    def probabilities(self, row: int, path: tuple[int, ...]) -> Tensor:
        generator = torch.Generator().manual_seed(hash((row, *path)) % 2**60)
        return 2 * torch.randn(self.vocabulary, generator=generator)

    def logits(self, level: int) -> Tensor:
        rows = enumerate(self.paths)
        return torch.stack([torch.stack([self.probabilities(row, path) for path in paths]) for row, paths in rows])

    def extend(self, parents: Tensor, tokens: Tensor) -> None:
        self.followed += tokens.shape[1]
        rows = zip(self.paths, parents.tolist(), tokens.tolist(), strict=True)
        self.paths = [[(*row[above], token - 100) for above, token in zip(*new, strict=True)] for row, *new in rows]


def find(drafter: MadeUpDrafter, roots: list[int], width: int, nodes: int = 1000) -> Draft:
    """The draft of 3 levels for trees of up to so many nodes."""
    paths = ScoredDrafter(drafter, 100 + torch.arange(drafter.vocabulary))
    return search(torch.tensor(roots), paths, 3, width, RANKS, nodes, has_figures=True)


def best_first(drafter: MadeUpDrafter, row: int, levels: int, nodes: int) -> list[tuple[int, ...]]:
    heap: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    found = []
    while heap and len(found) < nodes:
        score, path = heapq.heappop(heap)
        if path:
            found.append(tuple(token + 100 for token in path))
        if len(path) < levels:
            log_q = drafter.probabilities(row, path).log_softmax(dim=0)
            best = log_q.topk(min(RANKS, len(log_q)))
            for token, log_p in zip(best.indices.tolist(), best.values.tolist(), strict=True):
                heapq.heappush(heap, (score - log_p, (*path, token)))
    return found


@pytest.mark.parametrize("vocabulary", [1, 4, 13])
def test_a_wide_search_finds_the_most_likely_nodes(vocabulary: int) -> None:
    drafter = MadeUpDrafter(3, vocabulary)
    draft = find(drafter, [7, 8, 9], 1000)
    for nodes in (2, 3, 9, 40):
        tree = draft.largest.first(nodes)
        tree.check(nodes, 200)
        assert tree.tokens[:, 0].tolist() == [7, 8, 9] and int(tree.depth.max()) <= tree.height
        for row in range(3):
            assert set(list_paths(tree, row)) == set(best_first(drafter, row, 3, nodes - 1))


@pytest.mark.parametrize("rows", [1, 3])
def test_only_paths_that_a_tree_can_hold_are_followed(rows: int) -> None:
    roots, every = [7, 8, 9][:rows], MadeUpDrafter(rows, 13)
    expected = find(every, roots, 8)
    assert every.followed == 16
    counts = []
    for nodes in (3, 4, 6, 12, 30, 1000):
        drafter = MadeUpDrafter(rows, 13)
        tree, same = find(drafter, roots, 8, nodes).largest.first(nodes), expected.largest.first(nodes)
        assert all(list_paths(tree, row) == list_paths(same, row) for row in range(rows))
        counts.append(drafter.followed)
    assert counts == sorted(counts) and counts[0] <= 2 * rows and counts[2] < 12 and counts[-1] == 16


def test_paths_that_are_not_worth_their_time_are_not_followed() -> None:
    budget = DraftBudget()
    budget.begin(CostCurve([1, 64], [1.0, 7.3]))
    assert budget.least_worth == pytest.approx(0.1)
    drafter = MadeUpDrafter(1, 13)
    probable = int((drafter.probabilities(0, ()).softmax(dim=0) >= 0.1).sum())  # of the first level
    search(torch.tensor([7]), ScoredDrafter(drafter, 100 + torch.arange(13)), 2, 8, RANKS, 1000, budget)
    assert 1 <= drafter.followed == probable < 8


def test_expected_acceptance_is_that_of_the_best_trees() -> None:
    draft = find(MadeUpDrafter(2, 13), [7, 8], 8)
    accepted, _ = draft.read_figures()
    for nodes in range(1, 21):
        tree = draft.largest.first(nodes)
        expected = sum(sum(torch.tensor(list(list_paths(tree, row).values())).exp().tolist()) for row in range(2))
        assert accepted[nodes - 1] == pytest.approx(expected / 2, rel=1e-5)


def test_right_levels_are_those_with_a_right_path() -> None:
    """Levels may have different numbers of paths."""
    best = [torch.tensor([[0.5], [0.7]]).log(), torch.tensor([[0.3, 0.1], [0.2, 0.2]]).log()]
    assert expect_right(best).tolist() == pytest.approx([0.6, 0.4])
