"""Medusa and Hydra drafts: their tokens, their number of nodes, and the independence of rows."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from decode import Sampling, Target, generate
from decode.models.cost_curve import CostCurve
from heads.layer_cache import attend, hide
from proposers import HydraProposer, MedusaProposer, feature_history
from proposers.draft_budget import DraftBudget
from proposers.feature_history import attend_like_target
from proposers.trees.candidates import Candidates
from proposers.trees.fixed import EAGLE_TREE, MEDUSA_TREE, check_tree, cut_tree
from proposers.trees.search import RANKS, ScoredDrafter, expect_right, search
from tests.support.drafting import Paths, Recorder, fix_cost, list_paths, make_head
from tests.support.models import tiny

PROMPTS = [[5, 9, 5, 9, 5], [7, 8, 9, 10, 11, 7, 8], [3], [4, 4, 20, 21, 22, 4, 4, 20]]
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "medusa": (MedusaProposer, {}),
    "hydra": (HydraProposer, {}),
    "hydra++": (HydraProposer, {"prefix": True}),
}


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny("llama"))


def make(kind: str, target: Target, head: dict[str, Any] | None = None, **settings: Any) -> Any:
    proposer, own = KINDS[kind]
    return proposer(make_head(kind.strip("+"), target, **own, **(head or {})), **settings)


def record(proposer: Any, target: Target, prompts: Sequence[list[int]] = PROMPTS, **settings: Any) -> Recorder:
    recorder = Recorder(proposer)
    generate(target, prompts, recorder, **{"max_new_tokens": 16, **settings})
    return recorder


# ---- the search ----


class MadeUpDrafter:
    """Its probabilities depend on the whole path, the row and nothing else. Draft id i is token 100 + i."""

    def __init__(self, rows: int, vocabulary: int) -> None:
        self.vocabulary = vocabulary
        self.paths: list[list[tuple[int, ...]]] = [[()] for _ in range(rows)]

    def probabilities(self, row: int, path: tuple[int, ...]) -> Tensor:
        generator = torch.Generator().manual_seed(hash((row, *path)) % 2**60)
        return 2 * torch.randn(self.vocabulary, generator=generator)

    def logits(self, level: int) -> Tensor:
        return torch.stack(
            [torch.stack([self.probabilities(row, path) for path in paths]) for row, paths in self._rows()]
        )

    def extend(self, parents: Tensor, tokens: Tensor) -> None:
        self.paths = [
            [
                (*paths[parent], token - 100)
                for parent, token in zip(parents[row].tolist(), tokens[row].tolist(), strict=True)
            ]
            for row, paths in self._rows()
        ]

    def _rows(self) -> Iterator[tuple[int, list[tuple[int, ...]]]]:
        return iter(enumerate(self.paths))


def search_all_levels(drafter: MadeUpDrafter, roots: list[int], width: int) -> Candidates:
    """The candidates of 3 levels for trees of up to 1000 nodes."""
    return search_for(1000, drafter, roots, width)


def search_for(nodes: int, drafter: MadeUpDrafter, roots: list[int], width: int) -> Candidates:
    paths = ScoredDrafter(drafter, 100 + torch.arange(drafter.vocabulary))
    return search(torch.tensor(roots), paths, 3, width, RANKS, nodes)


def best_first(drafter: MadeUpDrafter, row: int, levels: int, nodes: int) -> list[tuple[int, ...]]:
    """The most likely paths, one by one from a heap."""
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
    candidates = search_all_levels(drafter, [7, 8, 9], 1000)
    for nodes in (2, 3, 9, 40):
        tree = candidates.tree(nodes)
        tree.check(3, nodes, 200)
        assert tree.tokens[:, 0].tolist() == [7, 8, 9] and int(tree.depth.max()) <= tree.height
        for row in range(3):
            assert set(list_paths(tree, row)) == set(best_first(drafter, row, 3, nodes - 1))


def test_a_narrow_search_follows_the_most_likely_paths_of_each_level() -> None:
    drafter = MadeUpDrafter(1, 13)
    tree = search_all_levels(drafter, [7], 2).tree(1000)
    expected, beam = set[tuple[int, ...]](), {(): 0.0}
    for _ in range(3):
        grown = {}
        for path, score in beam.items():
            best = drafter.probabilities(0, path).log_softmax(dim=0).topk(RANKS)
            grown |= {(*path, int(token)): score + float(log_p) for log_p, token in zip(*best, strict=True)}
        expected |= set(grown)
        beam = dict(sorted(grown.items(), key=lambda item: -item[1])[:2])
    assert set(list_paths(tree, 0)) == {tuple(token + 100 for token in path) for path in expected}


class CountingDrafter(MadeUpDrafter):
    """Remembers how many paths of a row were followed."""

    followed = 0

    def extend(self, parents: Tensor, tokens: Tensor) -> None:
        self.followed += tokens.shape[1]
        super().extend(parents, tokens)


@pytest.mark.parametrize("rows", [1, 3])
def test_only_paths_that_a_tree_can_hold_are_followed(rows: int) -> None:
    """The trees are the same as if all were followed."""
    roots = [7, 8, 9][:rows]
    every = CountingDrafter(rows, 13)
    expected = search_all_levels(every, roots, 8)
    assert every.followed == 16
    counts = []
    for nodes in (3, 4, 6, 12, 30, 1000):
        drafter = CountingDrafter(rows, 13)
        tree, same = search_for(nodes, drafter, roots, 8).tree(nodes), expected.tree(nodes)
        assert all(list_paths(tree, row) == list_paths(same, row) for row in range(rows))
        counts.append(drafter.followed)
    assert counts == sorted(counts) and counts[0] <= 2 * rows and counts[2] < 12 and counts[-1] == 16


def test_paths_that_are_not_worth_their_time_are_not_followed() -> None:
    budget = DraftBudget()
    budget.begin(lambda nodes: 1 + 0.1 * (nodes - 1))
    assert budget.least_worth == pytest.approx(0.1)
    drafter = CountingDrafter(1, 13)
    wide = search_all_levels(MadeUpDrafter(1, 13), [7], 8)
    probable = int((wide.scores[0, :RANKS].exp() >= 0.1).sum())  # of the first level
    search(torch.tensor([7]), ScoredDrafter(drafter, 100 + torch.arange(13)), 2, 8, RANKS, 1000, budget)
    assert 1 <= drafter.followed == probable < 8


def test_expected_acceptance_is_that_of_the_best_trees() -> None:
    candidates = search_all_levels(MadeUpDrafter(2, 13), [7, 8], 8)
    accepted, _ = candidates.read_figures(20)
    for nodes in range(1, 21):
        tree = candidates.tree(nodes)
        expected = sum(sum(torch.tensor(list(list_paths(tree, row).values())).exp().tolist()) for row in range(2))
        assert accepted[nodes - 1] == pytest.approx(expected / 2, rel=1e-5)


def test_right_levels_are_those_with_a_right_path() -> None:
    """Levels may have different numbers of paths. Of sampled trees only the first level counts."""
    best = [torch.tensor([[0.5], [0.7]]).log(), torch.tensor([[0.3, 0.1], [0.2, 0.2]]).log()]
    assert expect_right(best, sampled=False).tolist() == pytest.approx([0.6, 0.4])
    assert expect_right(best, sampled=True).tolist() == pytest.approx([0.6, (0.5**2 + 0.7**2) / 2])


# ---- the heads' tokens and scores ----


def head_log_probabilities(kind: str, target: Target, head: Any, text: Sequence[int], path: Sequence[int]) -> Tensor:
    """The head's log-probabilities after a path, computed for one text alone."""
    _, features = target.open(1, head.features).extend([text[:-1]])
    assert features is not None
    if kind == "medusa":
        states = head(features[0, -1])[len(path)]
    else:
        embedded = target.model.get_input_embeddings()(torch.tensor([text[-1], *path]))
        states = head(head.contextualize(features)[0, -1], embedded, len(path))
    return head.logits(states, len(path)).log_softmax(dim=-1)


def check_static(kind: str, target: Target, head: Any, text: Sequence[int], paths: Paths, tree: Sequence[Any]) -> None:
    expected = {}
    for ranks in tree:
        tokens: tuple[int, ...] = ()
        score = 0.0
        for rank in ranks:
            best = head_log_probabilities(kind, target, head, text, tokens).topk(rank + 1)
            score += float(best.values[rank])
            tokens = (*tokens, int(head.tokens(best.indices[rank])))
        expected[tokens] = score
    assert paths.keys() == expected.keys()
    assert all(score == pytest.approx(expected[path], rel=1e-4) for path, score in paths.items())


@pytest.mark.parametrize("output", ["own", "shared", "target"])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_static_tree_has_the_tokens_of_its_ranks(target: Target, kind: str, output: str) -> None:
    tree = ((0,), (0, 1), (2,), (0, 1, 3), (2, 0), (1,))
    settings = {"output": output, "draft_size": 40} if output != "shared" else {"output": output}
    proposer = make(kind, target, settings, tree=tree, nodes=7)
    drafted = record(proposer, target).drafted
    assert len(drafted) > 40
    for text, paths in list(drafted.items())[::9]:
        if len(paths) == len(tree):
            check_static(kind, target, proposer.head, text, paths, tree)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_dynamic_tree_has_the_heads_scores(target: Target, kind: str) -> None:
    proposer = make(kind, target, {"draft_size": 40}, nodes=12)
    drafted = record(proposer, target, max_new_tokens=8).drafted
    for text, paths in list(drafted.items())[::7]:
        for path, score in paths.items():
            expected = 0.0
            for end, token in enumerate(path):
                log_q = head_log_probabilities(kind, target, proposer.head, text, path[:end])
                expected += float(log_q[proposer.head.token_map.tolist().index(token)])
            assert score == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("tree", ["dynamic", "static"])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_do_not_affect_each_other(target: Target, kind: str, tree: str) -> None:
    """Rows of different lengths that accept differently and end at different times draft what they draft alone."""
    sampling = Sampling(temperature=0.7, top_k=3, seed=2)
    settings: dict[str, Any] = {"sampling": sampling, "stop_ids": list(range(30, 36)), "max_new_tokens": 40}
    recorders = [
        record(make(kind, target, {"output": "target"}, tree=tree, nodes=12), target, batch_size=size, **settings)
        for size in (1, 2, 4)
    ]
    # Towards the end of an answer a row may get a larger tree for the sake of another one.
    alone, *together = [
        {text: paths.keys() for text, paths in recorder.drafted.items() if len(paths) == 11} for recorder in recorders
    ]
    assert len(alone) > 20
    for drafted in together:
        assert len(drafted) > 20 and drafted | alone == drafted


@torch.no_grad()
def test_a_prefix_layer_misses_nothing_while_drafting_backs_off(
    monkeypatch: pytest.MonkeyPatch, target: Target
) -> None:
    fix_cost(monkeypatch, target, CostCurve([1, 64], [1.0, 1.0]))
    proposer = make("hydra++", target)
    backing_off = iter([False, True, True, False, True] * 20)
    monkeypatch.setattr(proposer.draft_budget, "is_backing_off", lambda: next(backing_off))
    drafted = record(proposer, target, max_new_tokens=12).drafted
    drafts = {text: paths for text, paths in drafted.items() if paths}
    assert 10 < len(drafts) < len(drafted)
    for text, paths in list(drafts.items())[::4]:
        first = {path[0]: score for path, score in paths.items() if len(path) == 1}
        log_q = head_log_probabilities("hydra", target, proposer.head, text, ())
        for token, score in first.items():
            assert score == pytest.approx(float(log_q[token]), rel=1e-4)


@torch.no_grad()
def test_a_prefix_layer_reads_long_prompts_in_parts(monkeypatch: pytest.MonkeyPatch, target: Target) -> None:
    prompts = [[(7 * place + row) % 96 for place in range(size)] for row, size in enumerate((30, 8, 17))]
    whole = record(make("hydra++", target, nodes=9), target, prompts, max_new_tokens=6).drafted
    monkeypatch.setattr(feature_history, "CHUNK", 8)
    parts = record(make("hydra++", target, nodes=9), target, prompts, max_new_tokens=6).drafted
    assert whole.keys() == parts.keys() and len(whole) >= 3
    assert all(parts[text] == pytest.approx(paths, rel=1e-5) for text, paths in whole.items())


# ---- how many nodes ----


@pytest.mark.parametrize(("tree", "most"), [("dynamic", 64), ("static", 62), (EAGLE_TREE, 21)])  # cut to depth 3
@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_trees_have_the_requested_number_of_nodes(target: Target, kind: str, tree: Any, most: int) -> None:
    sizes = ((5, 64, 5), (64, 9, 9), (1, 64, 1), (2, 64, 2), (64, 1, 1), (7, 2, 2), (200, 64, most))
    for nodes, budget, expected in sizes:
        recorder = record(make(kind, target, tree=tree, nodes=nodes), target, nodes=budget, max_new_tokens=9)
        assert recorder.trees[0].width == min(expected, 64)


def test_the_device_decides_how_many_nodes(monkeypatch: pytest.MonkeyPatch, target: Target) -> None:
    widths = []
    for rise in (0.0, 0.02, 0.1, 5.0):
        fix_cost(monkeypatch, target, CostCurve([1, 64], [1.0, 1.0 + 63 * rise]))
        widths.append(record(make("medusa", target), target, max_new_tokens=200).trees[0].width)
    assert widths[0] == 64 > widths[1] > widths[2] > widths[3] == 1


@pytest.mark.parametrize(("kind", "deepest"), [("medusa", 3), ("hydra", 1)])
def test_levels_that_do_not_pay_are_left_out(
    monkeypatch: pytest.MonkeyPatch, target: Target, kind: str, deepest: int
) -> None:
    """Each of Hydra's levels is a pass of its head; Medusa has them all at once."""
    fix_cost(monkeypatch, target, CostCurve([1, 64], [1.0, 1.0]))
    monkeypatch.setattr(DraftBudget, "is_worth_a_level", lambda self, p: p > 2)
    assert max(tree.height for tree in record(make(kind, target), target).trees) == deepest
    asked = record(make(kind, target, nodes=40), target, nodes=40, max_new_tokens=60).trees
    assert asked[0].height == 3  # a requested number of nodes is drafted


# ---- odd heads, and errors ----


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 3, 96])
@pytest.mark.parametrize("tree", ["dynamic", "static"])
def test_small_draft_vocabularies(target: Target, kind: str, size: int, tree: str) -> None:
    proposer = make(kind, target, {"draft_size": size}, tree=tree, nodes=64)
    recorder = record(proposer, target)
    known = set(proposer.head.tokens(torch.arange(size)).tolist())
    assert {token for paths in recorder.drafted.values() for path in paths for token in path} <= known
    assert all(1 < tree.width <= 1 + size + size**2 + size**3 for tree in recorder.trees[:1])


@pytest.mark.parametrize("kind", KINDS)
def test_prepared_heads_draft_the_same(kind: str) -> None:
    target = Target(tiny("llama", dtype=torch.float32))
    for output in ("own", "shared", "target"):
        proposer = make(kind, target, {"output": output, "layers": 2}, nodes=16)
        stock = record(proposer, target).drafted
        proposer.head.borrowed = None  # it is borrowed again
        prepared = proposer.renew().prepare(target)
        assert prepared.head is not proposer.head
        drafted = record(prepared, target).drafted
        assert drafted.keys() == stock.keys()
        for text, paths in drafted.items():
            assert sorted(paths.values()) == pytest.approx(sorted(stock[text].values()), rel=1e-3)
        assert record(proposer.renew(), target).drafted == stock  # the head itself is unchanged


def test_a_matrix_borrowed_while_decoding_can_be_used_in_training(target: Target) -> None:
    proposer = make("medusa", target, {"output": "target", "draft_size": 40}, nodes=8)
    proposer.head.borrowed = None
    record(proposer, target)
    assert not proposer.head.borrowed.is_inference()  # such tensors take part in no backward pass


def test_a_head_prepared_for_another_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target(tiny("llama", dtype=torch.float32))
    prepared = make("medusa", target).prepare(target)
    prepared.bind(target)
    monkeypatch.setattr(target, "device", torch.device("meta"))
    with pytest.raises(ValueError, match="prepared for cpu, not meta; load it again"):
        prepared.bind(target)


@pytest.mark.parametrize("prepare", [False, True])
def test_a_borrowed_matrix_comes_with_its_bias(prepare: bool) -> None:
    model = tiny("phi", dtype=torch.float32)
    torch.nn.init.normal_(model.lm_head.bias)
    target = Target(model)
    proposer = make("medusa", target, {"output": "target", "draft_size": 7})
    proposer.prepare(target) if prepare else proposer.bind(target)
    states = torch.randn(3, target.config.hidden_size)
    expected = model.lm_head(states)[:, proposer.head.token_map]
    assert torch.allclose(proposer.head.logits(states, 0), expected, atol=1e-5)


def test_a_borrowed_matrix_is_that_of_the_current_target() -> None:
    one, other = (Target(tiny("llama", dtype=torch.float32, seed=seed)) for seed in (0, 1))
    proposer = make("medusa", one, {"output": "target"}, nodes=8)
    for target in (one, other):
        generate(target, [[5, 9, 5]], proposer, max_new_tokens=2)
        assert torch.equal(proposer.head.borrowed, target.output_matrix)
    prepared = proposer.prepare(other)
    with pytest.raises(ValueError, match="was prepared for another target"):
        generate(one, [[5, 9, 5]], prepared, max_new_tokens=2)
    generate(Target(other.model, accelerate="auto"), [[5, 9, 5]], prepared, max_new_tokens=2)


def test_published_trees_are_trees() -> None:
    for paths, count in ((MEDUSA_TREE, 63), (EAGLE_TREE, 25)):
        assert check_tree(paths) == paths and len(paths) == count  # in this order already
    assert MEDUSA_TREE[:6] == ((0,), (0, 0), (1,), (0, 1), (2,), (0, 0, 0))


def test_trees_are_ordered_and_cut() -> None:
    assert check_tree([(1, 0), [0], (1,), (0,)]) == ((1,), (1, 0), (0,))
    assert cut_tree(((0,), (0, 5), (1,), (0, 0), (0, 0, 0)), depth=2, ranks=5, nodes=2) == ((0,), (1,))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tree": ((0,), (1, 0))}, r"the tree has the path \(1, 0\) but not \(1,\)"),
        ({"tree": ((0,), ())}, "one rank or more"),
        ({"tree": ((-1,),)}, "a whole number from 0 on"),
        ({"tree": "oak"}, "no tree 'oak'; choose from dynamic, calibrated, static, or give paths"),
        ({"tree": "calibrated"}, "was not calibrated; run `draftless calibrate`"),
        ({"nodes": 0}, "nodes is 0"),
        ({"depth": 10}, "depth is 10; this head drafts 3 levels"),
    ],
)
def test_bad_settings_are_refused(target: Target, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make("medusa", target, **settings)


def test_a_tree_without_a_usable_rank_is_refused(target: Target) -> None:
    proposer = make("medusa", target, {"draft_size": 3}, tree=((3,), (4,)), nodes=4)
    with pytest.raises(ValueError, match="no path with ranks below 3"):
        generate(target, [[5]], proposer)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 16}, "hidden size is 32; this target's is 16"),
        ({"vocab_size": 50}, "vocabulary size is 96; this target's is 50"),
        ({"num_hidden_layers": 3}, "number of layers is 2; this target's is 3"),
    ],
)
@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_a_head_for_another_target_is_refused(target: Target, kind: str, changes: dict[str, int], message: str) -> None:
    other = Target(tiny("llama", **changes))
    with pytest.raises(ValueError, match=message):
        generate(other, [[5]], make(kind, target))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_attention_of_drafts_matches_the_heads_own(dtype: torch.dtype) -> None:
    """Also with keys and values that are a part of a larger cache."""
    generator = torch.Generator().manual_seed(0)
    queries, keys, values = (torch.randn(2, heads, 9, 16, generator=generator).double() for heads in (6, 2, 2))
    for tokens, slots in ((1, 9), (2, 7), (5, 9)):
        hidden = torch.rand(2, 1, tokens, slots, generator=generator) < 0.5
        hidden[..., 0] = False
        parts = queries[:, :, :tokens], keys[:, :, :slots], values[:, :, :slots], hide(hidden, torch.float64)
        found = attend_like_target(*(part.to(dtype) for part in parts))
        assert found.dtype == dtype
        assert torch.allclose(found.double(), attend(*parts), rtol=0, atol=0.03 if dtype == torch.bfloat16 else 1e-5)
