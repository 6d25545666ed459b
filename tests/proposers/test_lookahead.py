"""Lookahead decoding: n-grams that come from the window, the pool's limits, and the window's nodes in draft trees."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import pairwise

import pytest
import torch

from decode import Sampling, Step, Target, generate
from decode.prefill import read_texts
from proposers import HydraProposer, LookaheadProposer, MergedProposer, SuffixProposer
from proposers.sources import LookaheadSource, RecyclingSource, SuffixSource, lookahead
from proposers.sources.lookahead import Pool
from tests.support.drafting import Recorder, list_paths, make_head, texts
from tests.support.models import tiny

PROMPTS = [[5, 9, 5, 9, 5], [7, 8, 9, 10, 11, 7, 8], [3], [4, 4, 20, 21, 22, 4, 4, 20]]
SIZES = [(3, 4), (1, 2), (4, 3), (2, 6)]  # columns of the window, tokens of an n-gram
LIMITS = {"max_new_tokens": 40, "stop_ids": [2, 11, 40]}  # rows leave at different times


# ---- the window ----


def test_new_text_is_drafted_from_predictions_alone() -> None:
    """The target names the next token of a circle, whatever is before it. No token of the answer was in the text.

    But 16, which stands before the last token of the prompt: the window goes on after it, far ahead of the text.
    """
    target = Target(tiny("llama", vocab_size=32))
    with torch.no_grad():
        target.model.model.embed_tokens.weight.copy_(torch.eye(32))
        for layer in target.model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        target.model.lm_head.weight.copy_(torch.eye(32).roll(1, 0))
    recorder, blind = Recorder(LookaheadProposer()), LookaheadSource()
    blind.assumed = 0  # no nodes for the window
    others = SuffixProposer(nodes=19), MergedProposer([blind], nodes=19)
    for proposer, steps in ((recorder, 18), *((other, 30) for other in others)):
        answer = generate(target, [[16, 0]], proposer, max_new_tokens=30, stop_ids=[])[0]
        assert answer.tokens == [*range(1, 31)] and answer.stats.steps == steps
    assert recorder.accepted == [[0]] * 16 + [[4]]  # the rest is accepted in the last step


class WatchedSource(LookaheadSource):
    """Compares all n-grams with those of the text, and of the windows and the target's greedy tokens after them."""

    def __init__(self, window: int, size: int, added: dict[int, set[tuple[int, ...]]]) -> None:
        super().__init__(window, size)
        self.added, self.found = added, Counter[str]()
        self.expected: dict[int, set[tuple[int, ...]]] = defaultdict(set)
        self.before: dict[int, tuple[list[int], list[list[int]]]] = {}  # texts and columns

    def observe(self, step: Step) -> None:
        super().observe(step)
        assert [*self._requests] == step.request_ids  # those that have left are forgotten
        for row, (request_id, text) in enumerate(zip(step.request_ids, step.sequences, strict=True)):
            pool, window = self._requests[request_id]
            grams = self.expected[request_id]
            grams |= {tuple(text[end - self.size : end]) for end in range(self.size, len(text) + 1)}
            old, begun = self.before.get(request_id, ([], []))
            columns = []
            for index, column in enumerate(begun):
                path = [*(other[0] for other in begun[:index]), *column]
                if tuple(path) not in list_paths(step.tree, row):
                    self.found["cut off"] += 1
                    break
                logits, _ = read_texts(step.target.open(1), [[*old, *path]])
                columns.append([*column, int(logits.argmax())])
            grams.update(map(tuple, columns))
            moved = [column[1:] for column in columns[len(text) - len(old) - 1 :]] if old else []
            assert window.columns[: len(moved)] == moved and len(window.columns) == self.window
            assert self.added[id(pool)] == grams
            self.found.update(predicted=len(columns), moved=len(moved))
            self.before[request_id] = list(text), window.columns[:]


@pytest.mark.parametrize("sizes", SIZES)
def test_n_grams_are_the_texts_and_what_the_target_predicts_after_the_window(
    monkeypatch: pytest.MonkeyPatch, target: Target, sizes: tuple[int, int]
) -> None:
    """By the positions and the ancestors that the window's tokens should have. Requests join and leave."""
    added, add, pools = defaultdict[int, set[tuple[int, ...]]](set), Pool.add, []

    def watch(pool: Pool, gram: list[int]) -> None:
        added[id(pool)].add(tuple(gram))
        pools.append(pool)  # so that no other gets its id
        add(pool, gram)

    monkeypatch.setattr(Pool, "add", watch)
    source = WatchedSource(*sizes, added)
    nodes = 1 + 2 * source.assumed
    answers = generate(target, PROMPTS, MergedProposer([source], nodes=nodes), batch_size=2, **LIMITS)
    assert [answer.tokens for answer in answers] == texts(target, PROMPTS, None, **LIMITS)
    assert len({len(answer.tokens) for answer in answers}) > 1
    assert source.found["predicted"] > 50 and source.found["moved"] > 40
    assert source.found["cut off"] or sizes == (1, 2)  # at the answer's end


# ---- the pool ----


def test_the_newest_n_grams_of_a_token_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool(2, 3)
    pool.read([1, 2, 3, 1, 4, 5, 1, 2])
    assert pool.find(1) == [(1, 0, (4, 5)), (1, 1, (2, 3))] and pool.find(2) == [(1, 0, (3, 1))] and not pool.find(9)
    pool.read([1, 2, 3, 1, 4, 5, 1, 2, 3])
    assert [rest for *_, rest in pool.find(1)] == [(2, 3), (4, 5)]  # the same again
    pool.read([1, 2, 3, 1, 4, 5, 1, 2, 3, 1, 6, 6])
    assert [rest for *_, rest in pool.find(1)] == [(6, 6), (2, 3)]
    monkeypatch.setattr(lookahead, "POOLED", 2)
    pool = Pool(2, 2)
    for gram in ([1, 1], [2, 1], [1, 2], [1, 3], [3, 1], [1, 2]):
        pool.add(gram)
    assert [[rest for *_, rest in pool.find(token)] for token in (1, 2, 3)] == [[(2,), (3,)], [], [(1,)]]


# ---- trees ----


@pytest.mark.parametrize("budget", [1, 2, 4, 7, 12, 30])
def test_trees_keep_to_the_budget(target: Target, budget: int) -> None:
    plain = texts(target, PROMPTS, None, **LIMITS)
    for proposer, most in ((LookaheadProposer(), min(budget, 19)), (LookaheadProposer(4, 3, nodes=budget), budget)):
        recorder = Recorder(proposer)
        assert texts(target, PROMPTS, recorder, nodes=budget, **LIMITS) == plain
        sizes = [int(tree.sizes.max()) for tree in recorder.trees]
        assert max(sizes) == most  # the window and the drafts reach it together


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_with_other_sources_and_a_head_the_text_stays(target: Target, temperature: float) -> None:
    settings = {**LIMITS, "sampling": Sampling(temperature, seed=3)}
    plain = texts(target, PROMPTS, None, **settings)
    head = HydraProposer(make_head("hydra", target, output="target"))
    proposer = MergedProposer([SuffixSource(), LookaheadSource(), RecyclingSource()], head, nodes=20)
    for again in (proposer, proposer, proposer.renew()):
        assert texts(target, PROMPTS, again, batch_size=2, **settings) == plain
    assert proposer.accepted_by_source["lookahead"] > 0


class RecordedSource(LookaheadSource):
    """Records the whole windows, as paths and their beginnings. For one request."""

    def __init__(self) -> None:
        super().__init__()
        self.windows: list[set[tuple[int, ...]]] = []

    def assume(self, request_id: int) -> list[list[int]]:
        paths = super().assume(request_id)
        self.windows.append({tuple(path[:length]) for path in paths for length in range(1, len(path) + 1)})
        return paths


@pytest.mark.parametrize(("nodes", "kept"), [(24, 9), (16, 8)])
def test_other_sources_leave_room_for_the_window(target: Target, nodes: int, kept: int) -> None:
    """They name more than fits. The window has as many nodes as it declares, or half of a smaller tree."""
    recorder = Recorder(MergedProposer([RecyclingSource(), source := RecordedSource()], nodes=nodes))
    generate(target, [PROMPTS[1]], recorder, max_new_tokens=30, stop_ids=[])
    full = 0
    for tree, window in [*zip(recorder.trees, source.windows, strict=False)][:-8]:  # the answer's end cuts the window
        paths = {*list_paths(tree, 0)}
        assert len(paths) < nodes and len(paths - window) < nodes - kept
        assert len(window & paths) >= min(len(window), kept)
        full += len(paths) == nodes - 1
    assert full > 5


def test_trees_with_a_window_have_a_fixed_size() -> None:
    with pytest.raises(ValueError, match="LookaheadSource has nodes of its own in every tree; give nodes"):
        MergedProposer([SuffixSource(), LookaheadSource()])
    assert not any(source.assumed for source in MergedProposer().sources)  # by default there is no window
    assert LookaheadSource(7, 5).assumed == 28 and LookaheadProposer(7, 5).nodes == 57


def test_chains_have_no_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Targets with a recurrent state verify chains: of the n-grams of the text. So nothing is read from the device."""
    monkeypatch.setattr(lookahead, "read", lambda *given: pytest.fail("the device was read"))
    target = Target(tiny("lfm2"))
    settings = {"batch_size": 2, "max_new_tokens": 24, "sampling": Sampling(0.8, seed=3)}
    recorder = Recorder(LookaheadProposer())
    assert texts(target, PROMPTS, recorder, **settings) == texts(target, PROMPTS, None, **settings)
    for text, paths in recorder.drafted.items():
        grams = {text[end - 2 : end] for end in range(2, len(text) + 1)}
        chain = [text[-1], *max(paths, key=len, default=())]
        assert len(chain) == 1 + len(paths) and grams.issuperset(pairwise(chain))
    assert any(recorder.drafted.values())


@pytest.mark.parametrize(("sizes", "message"), [((0, 4), "window is 0; it has"), ((3, 1), "size is 1; an n-gram")])
def test_sizes_that_make_no_sense_are_refused(sizes: tuple[int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LookaheadProposer(*sizes)
