"""Merged trees: which nodes they have, what is learned from them, and each source's own account of a text."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from decode import Request, Sampling, Target, generate
from decode.prefill import read_texts
from decode.requests.answer import Limits
from proposers import AnswerStore, Continuation, HydraProposer, MergedProposer, Place, Source
from proposers.sources import RecyclingSource, SuffixSource, recycling
from proposers.sources.growing_tree import LEARNED_WEIGHT, TRUST_MEMORY, TRUST_WEIGHT, GrowingTree, Trust
from proposers.sources.recycling import KEPT_RANKS, ORDERS, Context, Predictions, Recycled, learn
from tests.support.drafting import Recorder, list_paths, make_head


class TableSource(Source):
    def __init__(self, table: dict[tuple[int, ...], dict[int, float]]) -> None:
        self.table = table

    def continuations(self, state: Place) -> Iterable[Continuation]:
        return [Continuation(token, p, "table") for token, p in self.table.get(state.draft, {}).items()]


def plant(*tables: dict[tuple[int, ...], dict[int, float]], least: float = 0.0, deepest: int = 9) -> GrowingTree:
    """A tree that grows from the tables and, if there is one table, another source."""
    sources = [TableSource(table) for table in tables]
    for source in sources:
        source._texts = {7: [1, 2]}
    request = Request(7, [1, 2], Limits(deepest + 1, frozenset({50})), context=100)
    return GrowingTree(request, sources, [{}, {}], [Trust(1.0), Trust(1.0)], least)


def grow(*tables: dict[tuple[int, ...], dict[int, float]], size: int, **limits: Any) -> list:
    """The paths of a tree and their probabilities, in order."""
    tree = plant(*tables, **limits)
    fill(tree, size)
    paths: list[tuple[int, ...]] = []
    for node in tree.nodes:
        paths.append((*paths[node.parent.number], node.token) if node.parent else ())
    return [(path, round(node.p, 6)) for path, node in zip(paths, tree.nodes, strict=True)]


def fill(tree: GrowingTree, size: int) -> None:
    assert all(tree.grow(size))


FIRST = {(): {10: 0.5, 11: 0.4}, (10,): {20: 0.5}, (10, 20): {30: 0.9}, (11,): {21: 0.1}}
SECOND = {(): {11: 0.6, 12: 0.1}, (11,): {22: 0.8}, (12,): {50: 1.0}, (12, 50): {1: 1.0}}


def test_the_most_likely_nodes_of_all_sources_become_one_tree() -> None:
    merged = [((), 1.0), ((11,), 0.6), ((10,), 0.5), ((11, 22), 0.48), ((10, 20), 0.25), ((10, 20, 30), 0.225)]
    merged += [((12,), 0.1), ((12, 50), 0.1), ((11, 21), 0.06)]  # after the end token 50 there is nothing
    for size in range(1, 12):
        assert grow(FIRST, SECOND, size=size) == merged[:size]
    assert grow(FIRST, SECOND, size=20, least=0.2) == merged[:6]
    assert grow(FIRST, SECOND, size=20, deepest=1) == [merged[0], merged[1], merged[2], merged[6]]
    assert grow(FIRST, SECOND, size=20, deepest=0) == merged[:1]


def test_continuations_that_come_later_change_the_tree() -> None:
    tree = plant(FIRST)
    fill(tree, 3)
    assert [node.token for node in tree.nodes] == [2, 10, 11]
    tree.add(tree.nodes[2], 1, [Continuation(99, 0.9), Continuation(21, 0.3)])
    fill(tree, 4)
    assert [(node.token, round(node.p, 6)) for node in tree.nodes] == [(2, 1.0), (10, 0.5), (11, 0.4), (99, 0.36)]
    fill(tree, 6)
    assert (tree.nodes[-1].token, round(tree.nodes[-1].p, 6)) == (30, 0.225)
    tree.add(tree.nodes[0], 1, [Continuation(77, 1.0)])
    fill(tree, 2)
    assert [node.token for node in tree.nodes] == [2, 77]
    assert len({(id(node.parent), node.token) for node in tree.nodes}) == len(tree.nodes)


def test_only_continuations_of_accepted_nodes_are_counted() -> None:
    tree = plant(FIRST)
    fill(tree, 9)
    accepted = tree.learn([10, 20, 40])  # 10 and 20 were right, 30 was not
    assert [(node.token, source) for node, source in accepted] == [(2, 0), (10, 0), (20, -1)]
    # Named after accepted nodes: 10 and 11, 20, 30. Two of the four were right.
    assert tree.counts == [{"table": [2, 4]}, {}]
    tree.add(tree.root, 0, [Continuation(45, 0.8, "table")])
    learned = (2 + LEARNED_WEIGHT * 0.8) / (4 + LEARNED_WEIGHT)
    assert tree.root.likely[45][0] == pytest.approx(learned * tree.trusts[0].share)


@pytest.mark.parametrize("share", [0.3, 0.9])
def test_a_source_is_trusted_as_far_as_its_drafts_were_right(share: float) -> None:
    trust, choose = Trust(0.8), random.Random(0)

    def draft(count: int, share: float) -> float:
        for _ in range(count):
            trust.fade()
            trust.learn(0.6, choose.random() < 0.6 * share)
        trust.fade()
        return trust.share

    assert trust.share == 0.8
    seen = 0.6 / (1 - TRUST_MEMORY)  # tokens that should have been right, in the long run
    expected = (0.8 * TRUST_WEIGHT + share * seen) / (TRUST_WEIGHT + seen)
    assert draft(500, share) == pytest.approx(expected, abs=0.1)
    assert draft(300, 1 / 0.6) == 1
    draft(300, 0)
    assert trust.share < 0.3
    for _ in range(500):  # steps in which nothing of it was drafted, perhaps because it was not trusted
        trust.fade()
    assert trust.share == pytest.approx(0.8, abs=0.01)


@pytest.mark.parametrize("text", [[10, 99], [10]])
def test_only_drafts_after_right_ones_are_judged(text: list[int]) -> None:
    """The last token of an answer may be a drafted one, without a bonus."""
    tree = plant(FIRST)
    fill(tree, 9)
    judged: list[tuple[float, bool]] = []
    tree.trusts[0].learn = lambda p, is_right: judged.append((round(p, 3), is_right))  # type: ignore[method-assign]
    path = [node for node, _ in tree.learn(text)]
    assert [node.token for node in path] == [2, 10][: len(text)]
    children = [node for node in tree.nodes[1:] if node.parent in path]
    assert len(children) < len(tree.nodes) - 1 and any(node.token == 10 for node in children)
    expected = [(round(node.p / node.parent.p, 3), node.token == 10) for node in children if node.parent]
    assert judged == expected


def find(recycled: Recycled, tail: tuple[int, ...]) -> list[tuple[int, int]]:
    """The continuations after a tail, each with the length of its key."""
    return [(kind[0], token) for token, _, kind in RecyclingSource().continuations(Context(recycled, tail))]


def test_predictions_after_every_node_are_recycled() -> None:
    """Rejected nodes too, by the last one to three tokens of their own paths."""
    recycled = Recycled()
    predictions = [Predictions((node,), (7,)) for node in range(5)]
    learn(recycled, [1, 2], [3, 4, 5, 6], [-1, 0, 0, 1], predictions[:4])
    for tail, node in {(1, 2, 3): 0, (2, 3, 4): 1, (2, 3, 5): 2, (3, 4, 6): 3}.items():
        assert find(recycled, tail) == [(ORDERS, node)]
        assert find(recycled, (9, *tail[1:])) == [(2, node)]
        assert find(recycled, (9, 9, tail[-1])) == [(1, node)]
    assert find(recycled, (0,)) == []
    learn(recycled, [8], [3], [-1], [predictions[4]])
    assert find(recycled, (2, 3)) == [(2, 0)] and find(recycled, (3,)) == [(1, 4)]


def test_recycled_predictions_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recycling, "KEYS", 30)
    recycled = Recycled()
    for token in range(100):
        learn(recycled, [token], [token + 1], [-1], [Predictions((token,), (7,))])
    assert len(recycled) == 30
    assert find(recycled, (100,)) and not find(recycled, (50,))


def test_a_repeated_text_is_drafted(target: Target) -> None:
    """Both sources, alone and together, see a repetition that prompt lookup would see."""
    prompt = [5, 6, 7, 8, 9, 10, 11, 12, 5, 6, 7]
    only_8 = torch.full((1, target.vocabulary), -torch.inf).index_fill(1, torch.tensor([8]), 0.0)
    sampling = Sampling(processors=[lambda ids, scores: only_8.to(scores)])
    for proposer in (MergedProposer([SuffixSource()], nodes=6), MergedProposer(nodes=6)):
        recorder = Recorder(proposer)
        generate(target, [prompt], recorder, max_new_tokens=9, stop_ids=(), sampling=sampling)
        assert (9, 10, 11) in recorder.drafted[*prompt, 8]


def test_what_is_kept_after_a_token_is_the_models_own_prediction(target: Target) -> None:
    proposer = MergedProposer([RecyclingSource()], nodes=1)  # rejected nodes could be the last ones after a token
    answer = generate(target, [[5, 6, 7, 5, 6]], proposer, max_new_tokens=30, stop_ids=())[0]
    recycled, text = proposer.sources[0]._roots[0].recycled, [5, 6, 7, 5, 6, *answer.tokens]
    for end in range(5, 30):
        tail = tuple(text[end - 3 : end])
        if all(tuple(text[place - 3 : place]) != tail for place in range(end + 1, len(text) + 1)):
            logits, _ = read_texts(target.open(1), [text[:end]])
            found = [token for _, token in find(recycled, tail)]
            assert found == logits[0].topk(KEPT_RANKS).indices.tolist() and found[0] == text[end]


def test_answers_are_kept_for_later_streams(target: Target) -> None:
    store = AnswerStore(1000)
    proposer = MergedProposer([], store=store, nodes=8)
    settings = {"max_new_tokens": 30, "stop_ids": ()}
    first = generate(target, [[5, 6, 7], [9, 8, 7]], proposer, **settings)
    assert len(store) == 0
    again = generate(target, [[5, 6, 7], [9, 8, 7]], proposer, **settings)
    assert list(store.answers())[:2] == [answer.tokens for answer in first]
    assert [answer.tokens for answer in again] == [answer.tokens for answer in first]
    assert sum(answer.stats.steps for answer in again) < sum(answer.stats.steps for answer in first)
    proposer.keep_answers()
    assert len(store) == 4 * 30


def test_a_head_extends_what_others_named(target: Target) -> None:
    """With the target's own next tokens as the table, the head's continuations come after them too."""
    head = HydraProposer(make_head("hydra", target))
    table = {(): dict.fromkeys(range(3, 8), 0.9)}
    recorder = Recorder(MergedProposer([TableSource(table)], head, nodes=24))
    generate(target, [[5, 6, 7]], recorder, max_new_tokens=6, stop_ids=())
    paths = list_paths(recorder.trees[0], 0)
    assert {path[0] for path in paths} >= set(range(3, 8))
    assert any(len(path) == 2 and path[0] in range(3, 8) for path in paths)  # the table ends at depth 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_accepted_tokens_are_counted_by_source(target: Target, temperature: float) -> None:
    """All of them, those of each request's last tree too, wherever it ends."""
    head = HydraProposer(make_head("hydra", target, output="target"))
    proposer = MergedProposer(drafter=head, store=AnswerStore(1000), nodes=16)
    assert proposer.accepted_by_source == {"suffix": 0, "recycling": 0, "grammar": 0, "stored": 0, "hydra": 0}
    accepted = 0
    for length in (30, 30, 11, 1):
        limits = {"max_new_tokens": length, "stop_ids": [], "sampling": Sampling(temperature, seed=1)}
        end = generate(target, [[5, 6, 7, 5, 6]], None, **limits)[0].tokens[-1]
        for ends in ([], [end]):
            answers = generate(target, [[5, 6, 7, 5, 6], [9, 8, 7]], proposer, **{**limits, "stop_ids": ends})
            accepted += sum(sum(answer.stats.accepted_by_depth) for answer in answers)
            assert sum(proposer.accepted_by_source.values()) == accepted
    assert proposer.accepted_by_source["stored"] > 0 < accepted
    assert sum(proposer.renew().accepted_by_source.values()) == 0


def test_a_renewed_proposer_has_learned_nothing(target: Target) -> None:
    proposer = MergedProposer(drafter=HydraProposer(make_head("hydra", target)), nodes=8)
    record = Recorder(proposer)
    generate(target, [[5, 6, 7, 5, 6]], record, max_new_tokens=20, stop_ids=())
    again = Recorder(proposer.renew())
    generate(target, [[5, 6, 7, 5, 6]], again, max_new_tokens=20, stop_ids=())
    assert again.drafted == record.drafted


def test_random_trees_are_best_first() -> None:
    for seed in range(200):
        choose = random.Random(seed)
        table = {
            path: {choose.randrange(40): choose.random() for _ in range(choose.randrange(4))}
            for path in [(), *((a,) for a in range(40)), *((a, b) for a in range(40) for b in range(40))]
        }
        size = choose.randrange(1, 12)
        found = grow(table, size=size)
        every = {(): 1.0}
        for depth in range(3):
            for path, p in [(path, p) for path, p in every.items() if len(path) == depth and 50 not in path]:
                every |= {(*path, token): p * share for token, share in table.get(path, {}).items()}
        best = sorted(every.values(), reverse=True)[:size]
        assert [p for _, p in found] == [round(p, 6) for p in best]
