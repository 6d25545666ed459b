"""EAGLE drafts, compared with drafts computed path by path without a cache or a tree mask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from decode import Sampling, Target, generate
from decode.models.cost_curve import CostCurve
from heads import save_head
from proposers import EagleProposer, feature_history, load_proposer
from proposers.draft_budget import DraftBudget
from proposers.trees.fixed import EAGLE_TREE
from tests.decode.test_lossless import PROMPTS, texts
from tests.support.drafting import Paths, Recorder, fix_cost, make_head
from tests.support.models import tiny

VOCABULARY = 24  # so small that random heads are sometimes right
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "eagle": ("eagle", {}),
    "eagle of few tokens": ("eagle", {"draft_size": 7, "bias": True}),
    "eagle3": ("eagle3", {}),
    "eagle3 of few tokens": ("eagle3", {"draft_size": 13}),
    "eagle3 with all else": (
        "eagle3",
        {"embedding": True, "norm_before_fc": True, "norm_before_residual": True, "normed_feedback": True},
    ),
}
MAIN = ["eagle", "eagle3"]
PROMPTS = [[token % VOCABULARY for token in prompt] for prompt in PROMPTS]


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny("llama", vocab_size=VOCABULARY))


def make(kind: str, target: Target, **settings: Any) -> EagleProposer:
    name, shape = KINDS[kind]
    return EagleProposer(make_head(name, target, **shape), **settings)


def record(proposer: Any, target: Target, prompts: Sequence[list[int]] = PROMPTS, **settings: Any) -> Recorder:
    recorder = Recorder(proposer)
    generate(target, prompts, recorder, **{"max_new_tokens": 16, **settings})
    return recorder


class Written:
    """A head's probabilities after one text: each path is computed from the true features of all committed tokens."""

    def __init__(self, target: Target, head: Any, text: Sequence[int]) -> None:
        _, features = target.open(1, head.features).extend([text[:-1]])
        assert features is not None
        self.head, self.true = head, head.fuse(features)
        self.embed = head.embed_tokens or target.model.get_input_embeddings()
        self.follow = [*text[1:]]

    def probabilities(self, path: Sequence[int]) -> Tensor:
        """The log-probabilities over the draft vocabulary after a path."""
        features = self.true
        for end in range(len(path) + 1):
            tokens = torch.tensor([[*self.follow, *path[:end]]])
            states = self.head(self.embed(tokens), features, torch.arange(tokens.shape[1])[None])
            features = torch.cat([features, states[:, -1:]], dim=1)
        return self.head.logits(states[0, -1]).log_softmax(dim=-1)

    def best(self, path: Sequence[int], ranks: int) -> Paths:
        """The most likely tokens after a path, the most likely first."""
        log_q = self.probabilities(path)
        best = log_q.topk(min(ranks, len(log_q)))
        tokens = self.head.tokens(best.indices).tolist()
        return {(*path, token): log_p for token, log_p in zip(tokens, best.values.tolist(), strict=True)}

    def grow(self, depth: int, width: int, nodes: int) -> Paths:
        """EAGLE-2's tree: `width` paths get `width` tokens each a level; of all, the most likely are taken."""
        pool, beam = Paths(), {(): 0.0}
        for _ in range(depth):
            grown = {
                path: score + log_p for above, score in beam.items() for path, log_p in self.best(above, width).items()
            }
            pool |= grown
            beam = dict(_most_likely(grown, width))
        return dict(_most_likely(pool, nodes - 1))

    def fill(self, tree: Sequence[Sequence[int]]) -> Paths:
        """A tree of ranks."""
        found: Paths = {}
        for ranks in tree:
            path, score = (), 0.0
            for rank in ranks:
                path, log_p = [*self.best(path, rank + 1).items()][rank]
                score += log_p
            found[path] = score
        return found


def _most_likely(paths: Paths, count: int) -> list[Any]:
    return sorted(paths.items(), key=lambda item: -item[1])[:count]


def agree(drafted: Paths, expected: Paths) -> bool:
    return drafted.keys() == expected.keys() and all(
        score == pytest.approx(expected[path], rel=1e-5, abs=1e-5) for path, score in drafted.items()
    )


# ---- what is drafted ----


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_draft_is_the_tree_without_cache_and_mask(target: Target, kind: str) -> None:
    """Rows of a batch that accept differently, many steps on, end at different times."""
    proposer = make(kind, target, depth=3, width=4, nodes=14)
    sampling = Sampling(temperature=0.8, seed=1)
    recorder = record(proposer, target, sampling=sampling, stop_ids=[3, 9], max_new_tokens=30)
    texts = [text for text, paths in recorder.drafted.items() if len(paths) == 13]
    assert len(texts) > 20 and len({tree.batch for tree in recorder.trees}) > 1
    assert any(len({*accepted}) > 1 for accepted in recorder.accepted)
    for text in [*texts[:4], *texts[4::5]]:
        assert agree(recorder.drafted[text], Written(target, proposer.head, text).grow(3, 4, 14)), text


@pytest.mark.parametrize("kind", MAIN)
@torch.no_grad()
def test_fixed_trees(target: Target, kind: str) -> None:
    for tree, paths in (("static", EAGLE_TREE), (((0,), (0, 1), (2,), (2, 0), (2, 0, 1)),) * 2):
        proposer = make(kind, target, tree=tree, nodes=26)
        drafted = record(proposer, target, max_new_tokens=40).drafted
        whole = [text for text, found in drafted.items() if len(found) == len(paths)]
        assert len(whole) > 12
        for text in whole[::5]:
            assert agree(drafted[text], Written(target, proposer.head, text).fill(paths))


def test_a_fixed_tree_has_no_width(target: Target) -> None:
    with pytest.raises(ValueError, match="width is for a dynamic tree; static has its own paths"):
        make("eagle", target, tree="static", width=3)


@pytest.mark.parametrize("kind", MAIN)
@torch.no_grad()
def test_a_width_of_1_drafts_a_chain(target: Target, kind: str) -> None:
    proposer = make(kind, target, depth=4, width=1, nodes=60)
    recorder = record(proposer, target)
    assert recorder.trees[0].width == 5
    for text, paths in [*recorder.drafted.items()][::6]:
        assert sorted(map(len, paths)) == list(range(1, len(paths) + 1))
        assert agree(paths, Written(target, proposer.head, text).grow(len(paths), 1, 5))


@torch.no_grad()
def test_long_prompts_are_read_in_parts(monkeypatch: pytest.MonkeyPatch, target: Target) -> None:
    monkeypatch.setattr(feature_history, "CHUNK", 8)
    prompts = [
        [(7 * place + shift) % VOCABULARY for place in range(size)] for shift, size in ((0, 30), (1, 8), (2, 17))
    ]
    proposer = make("eagle3", target, depth=2, width=3, nodes=8)
    drafted = record(proposer, target, prompts, max_new_tokens=10).drafted
    for text in [*drafted][:3]:
        assert agree(drafted[text], Written(target, proposer.head, text).grow(2, 3, 8))


@pytest.mark.parametrize("kind", MAIN)
@torch.no_grad()
def test_no_feature_is_missed_while_drafting_backs_off(
    monkeypatch: pytest.MonkeyPatch, target: Target, kind: str
) -> None:
    fix_cost(monkeypatch, target, CostCurve([1, 64], [1.0, 1.0]))
    proposer = make(kind, target, depth=2, width=3)
    backing_off = iter([False, True, True, False, True] * 20)
    monkeypatch.setattr(proposer.draft_budget, "is_backing_off", lambda: next(backing_off))
    monkeypatch.setattr(proposer.draft_budget, "is_worth_a_level", lambda p: True)
    drafted = record(proposer, target, max_new_tokens=30).drafted
    drafts = {text: paths for text, paths in drafted.items() if len(paths) == 12}
    assert 8 < len(drafts) < len(drafted)
    for text, paths in [*drafts.items()][::3]:
        assert agree(paths, Written(target, proposer.head, text).grow(2, 3, 13))


def has_room(text: tuple[int, ...]) -> bool:
    """Whether an answer of 30 tokens has room for a tree of 4 levels; near its end its trees are as deep
    as other rows can use."""
    return any([*text[: len(prompt)]] == prompt and len(text) - len(prompt) <= 30 - 5 for prompt in PROMPTS)


@pytest.mark.parametrize("tree", ["dynamic", "static"])
@pytest.mark.parametrize("kind", MAIN)
def test_rows_do_not_affect_each_other(target: Target, kind: str, tree: str) -> None:
    """Rows of different lengths that accept differently and end at different times draft what they draft alone."""
    settings: dict[str, Any] = {"sampling": Sampling(temperature=0.9, seed=3), "stop_ids": [3, 9], "max_new_tokens": 30}
    alone, *together = [
        {
            text: paths
            for text, paths in record(
                make(kind, target, tree=tree, depth=4, nodes=12), target, batch_size=size, **settings
            ).drafted.items()
            if len(paths) == 11 and has_room(text)
        }
        for size in (1, 2, 4)
    ]
    assert len(alone) > 20
    for drafted in together:
        assert alone.keys() <= drafted.keys()
        assert all(agree(paths, drafted[text]) for text, paths in alone.items())


# ---- the text ----


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("kind", KINDS)
def test_the_text_is_the_targets(
    monkeypatch: pytest.MonkeyPatch, target: Target, kind: str, temperature: float
) -> None:
    fix_cost(monkeypatch, target, CostCurve([1, 64], [1.0, 2.0]))
    sampling = Sampling(temperature=temperature, seed=3)
    plain = texts(target, None, PROMPTS, sampling=sampling)
    trees: list[dict[str, Any]] = [{"nodes": 20}, {"tree": "static"}, {"width": 1, "nodes": 5}, {}]
    for batch_size in (1, 2, 4):
        for settings in trees[:: 3 if batch_size == 2 else 1]:
            proposer = make(kind, target, **settings)
            assert texts(target, proposer, PROMPTS, sampling=sampling, batch_size=batch_size) == plain, settings


@pytest.mark.parametrize("kind", KINDS)
def test_random_heads_are_rarely_right(target: Target, kind: str) -> None:
    """A random head that is right often would be reading the answer."""
    answers = generate(target, PROMPTS, make(kind, target, nodes=9), max_new_tokens=60, stop_ids=())
    tau = sum(answer.stats.tokens for answer in answers) / sum(answer.stats.steps for answer in answers)
    assert 1 <= tau < 1.5


@pytest.mark.parametrize("kind", KINDS)
def test_prepared_heads_draft_the_same(kind: str) -> None:
    target = Target(tiny("llama", vocab_size=VOCABULARY, dtype=torch.float32))
    proposer = make(kind, target, depth=3, nodes=12)
    stock = record(proposer, target).drafted
    prepared = proposer.renew().prepare(target)
    assert prepared.head is not proposer.head
    drafted = record(prepared, target).drafted
    assert drafted.keys() == stock.keys()
    for text, paths in drafted.items():
        assert sorted(paths.values()) == pytest.approx(sorted(stock[text].values()), rel=1e-3)
    assert record(proposer.renew(), target).drafted == stock


# ---- limits and errors ----


@pytest.mark.parametrize("kind", MAIN)
def test_trees_respect_depth_width_and_budget(target: Target, kind: str) -> None:
    for settings, budget, expected in (
        ({"depth": 1, "width": 4, "nodes": 64}, 64, 5),
        ({"depth": 2, "width": 3, "nodes": 64}, 64, 13),
        ({"depth": 3, "width": 30, "nodes": 64}, 40, 40),
        ({"nodes": 7}, 64, 7),
        ({"nodes": 64}, 1, 1),
        ({"tree": EAGLE_TREE, "nodes": 64}, 64, 26),
        ({"tree": "static", "depth": 2, "nodes": 64}, 64, 13),
    ):
        trees = record(make(kind, target, **settings), target, nodes=budget, max_new_tokens=12).trees
        assert trees[0].width == expected, settings
        assert max(int(tree.depth.max()) for tree in trees) <= settings.get("depth", 6)


@pytest.mark.parametrize("kind", MAIN)
def test_levels_that_do_not_pay_are_left_out(monkeypatch: pytest.MonkeyPatch, target: Target, kind: str) -> None:
    fix_cost(monkeypatch, target, CostCurve([1, 64], [1.0, 1.0]))
    monkeypatch.setattr(DraftBudget, "is_worth_a_level", lambda self, p: p > 2)
    assert max(tree.height for tree in record(make(kind, target), target).trees) == 1
    asked = record(make(kind, target, nodes=40), target, nodes=40, max_new_tokens=60).trees
    assert asked[0].height == 6  # a requested number of nodes is drafted


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"depth": 0}, "depth 0 and width 10 must be at least 1"),
        ({"width": 0}, "depth 6 and width 0 must be at least 1"),
        ({"nodes": 0}, "nodes is 0"),
        ({"tree": "calibrated"}, "was not calibrated"),
    ],
)
def test_bad_settings_are_refused(target: Target, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make("eagle", target, **settings)


@pytest.mark.parametrize("kind", MAIN)
def test_a_head_for_another_target_is_refused(target: Target, kind: str) -> None:
    with pytest.raises(ValueError, match="this target's is 3"):
        generate(Target(tiny("llama", vocab_size=VOCABULARY, num_hidden_layers=3)), [[5]], make(kind, target))


@pytest.mark.parametrize("kind", MAIN)
def test_folders_of_heads_draft(target: Target, kind: str, tmp_path: Any) -> None:
    proposer = make(kind, target, nodes=12)
    save_head(proposer.head, tmp_path)
    loaded = load_proposer(kind, target, head=tmp_path, nodes=12)
    assert record(loaded, target).drafted == record(proposer, target).drafted
