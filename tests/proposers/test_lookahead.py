"""Lookahead decoding: its window, its pool, and the trees drafted from both."""

from __future__ import annotations

import random
import tracemalloc
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from decode import Sampling, Step, Target, Tree, generate
from proposers import LookaheadProposer, lookahead
from proposers.lookahead import POOLED, Pool, RequestState, Window
from tests.support.drafting import Recorder, list_paths
from tests.support.models import VOCABULARY, tiny

PROMPTS = [[5, 9, 5, 9, 5], [7, 8, 9, 10, 11, 7, 8], [3], [4, 4, 20, 21, 22, 4, 4, 20]]
SIZES = [(3, 4, 3), (1, 2, 1), (4, 3, 2), (2, 6, 5)]  # window, n-gram, continuations


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny("llama"))


class Watched(LookaheadProposer):
    """Keeps each text and its window, as they were drafted."""

    def propose(self, step: Step, budget: int) -> Tree:
        tree = super().propose(step, budget)
        windows = {request_id: state.window.columns for request_id, state in self._requests.items()}
        self.drafted = {
            request_id: (list(text), [list(column) for column in windows[request_id]])
            for request_id, text in zip(step.request_ids, step.sequences, strict=True)
        }
        return tree


def prefill(target: Target, *texts: list[int]) -> Step:
    """The first step of rows with these texts; the last tokens are the bonus tokens."""
    return Step(
        is_prefill=True,
        request_ids=list(range(len(texts))),
        kept=list(range(len(texts))),
        sequences=[list(text) for text in texts],
        room=[100] * len(texts),
        committed=[text[:-1] for text in texts],
        path=[[0]] * len(texts),
        tree=Tree.chain([text[-2:-1] for text in texts]),
        logits=torch.empty(0),
        features=None,
        seconds=0.0,
        sampling=Sampling(),
        stop_ids=frozenset(),
        target=target,
    )


# ---- the text stays the same ----


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_tokens_are_those_of_plain_decoding(
    target: Target, sizes: tuple[int, int, int], temperature: float
) -> None:
    settings = {"sampling": Sampling(temperature, seed=3), "max_new_tokens": 40, "stop_ids": [2, 11, 40]}
    plain = generate(target, PROMPTS, None, **settings)
    assert len({len(answer.tokens) for answer in plain}) > 1  # rows leave at different times
    for batch_size in (1, 3, 4):
        answers = generate(target, PROMPTS, LookaheadProposer(*sizes), batch_size=batch_size, **settings)
        assert [answer.tokens for answer in answers] == [answer.tokens for answer in plain], batch_size


@pytest.mark.parametrize("kind", ["gpt2", "mistral window", "gemma3_text"])
def test_random_cases_are_lossless(kind: str) -> None:
    target, accepted = Target(tiny(kind)), 0
    for case in range(30):
        choose = random.Random(case)
        prompts = [[choose.randrange(9) for _ in range(choose.randint(1, 12))] for _ in range(choose.randint(1, 4))]
        settings = {
            "sampling": Sampling(choose.choice([0.0, 0.9]), top_k=choose.choice([0, 5]), seed=case),
            "max_new_tokens": choose.randint(1, 30),
            "stop_ids": choose.choice([[], [2], list(range(0, VOCABULARY, 9))]),
        }
        proposer = LookaheadProposer(*choose.choice(SIZES))
        answers = generate(target, prompts, proposer, nodes=choose.randint(1, 30), **settings)
        plain = generate(target, prompts, None, **settings)
        assert [answer.tokens for answer in answers] == [answer.tokens for answer in plain], f"case {case}"
        accepted += sum(sum(answer.stats.accepted_by_depth) for answer in answers)
    assert accepted > 0


class Trimmed(Watched):
    """Loses the last nodes of its trees, as another proposer that takes them over may do."""

    def propose(self, step: Step, budget: int) -> Tree:
        tree = super().propose(step, budget)
        kept = random.Random(len(step.sequences[0])).randint(1, tree.width)
        height = min(tree.height, kept - 1)
        return Tree(tree.tokens[:, :kept], tree.parents[:, :kept], tree.sizes.clamp(max=kept), height)


def test_nodes_that_were_cut_off_change_nothing(target: Target) -> None:
    plain = generate(target, PROMPTS, None, max_new_tokens=40, stop_ids=[])
    answers = generate(target, PROMPTS, Trimmed(), max_new_tokens=40, stop_ids=[])
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in plain]


# ---- the window ----


@pytest.mark.parametrize("proposer_type", [Watched, Trimmed])
@pytest.mark.parametrize("sizes", SIZES)
def test_the_pool_has_what_the_target_predicts(
    monkeypatch: pytest.MonkeyPatch, target: Target, sizes: tuple[int, int, int], proposer_type: type[Watched]
) -> None:
    """Each n-gram is from the text, or a column of the window and the target's greedy token after its path."""
    window, size, _ = sizes
    proposer, found = proposer_type(window, size, continuations=1000), Counter[str]()
    expected: dict[int, set[tuple[int, ...]]] = {}
    propose = proposer.propose

    def check(step: Step, budget: int) -> Tree:
        drafted = {} if step.is_prefill else proposer.drafted
        tree = propose(step, budget)
        for row, (request_id, text) in enumerate(zip(step.request_ids, step.sequences, strict=True)):
            grams = expected.setdefault(request_id, set())
            grams |= {tuple(text[begin : begin + size]) for begin in range(len(text) - size + 1)}
            before, columns = drafted.get(request_id, ([], []))
            extended = []
            for index, column in enumerate(columns):
                path = [*(other[0] for other in columns[:index]), *column]
                if tuple(path) not in list_paths(step.tree, row):
                    found["cut off"] += 1
                    break
                greedy = generate(target, [before + path], None, max_new_tokens=1, stop_ids=[])[0].tokens
                extended.append([*column, *greedy])
                if len(column) == size - 1:
                    grams.add((*column, *greedy))
                    found["predicted"] += 1
            assert grams_of(proposer, request_id) == grams
            passed = len(text) - len(before)
            moved = [column[1:] for column in extended[passed - 1 :] if len(column) == size] or extended[passed:]
            now = proposer._requests[request_id].window.columns
            assert now[: len(moved)] == moved[: len(now)]
            found["moved"] += len(moved) if len(now) else 0
        return tree

    monkeypatch.setattr(proposer, "propose", check)
    generate(target, PROMPTS[:2], proposer, max_new_tokens=24, stop_ids=[])
    assert found["predicted"] > 10 and found["moved"] > 10
    assert found["cut off"] or window == 1  # at the answer's end


def grams_of(proposer: LookaheadProposer, request_id: int) -> set[tuple[int, ...]]:
    pool = proposer._requests[request_id].pool
    return {(first, *rest) for first in range(VOCABULARY) for rest in pool.find(first)}


def test_levels_are_filled_one_a_step_then_move_up() -> None:
    window = Window(3, request_id=0)
    window.columns = [[10], [20], [30]]
    assert window.advance([11, 21, 31], passed=1) == [] and window.columns == [[20, 21], [30, 31]]
    assert window.advance([22, 32], passed=1) == [] and window.columns == [[30, 31, 32]]
    assert window.levels == 3
    window.columns = [[10, 11, 12], [20, 21, 22], [30, 31, 32]]
    assert window.advance([13, 23, 33], passed=1) == [[10, 11, 12, 13], [20, 21, 22, 23], [30, 31, 32, 33]]
    assert window.columns == [[11, 12, 13], [21, 22, 23], [31, 32, 33]]


def test_columns_that_the_text_has_passed_are_filled_anew_from_the_text() -> None:
    window, text = Window(2, request_id=7), [50, 51, 52, 53, 54]
    window.levels, window.columns = 2, [[10, 11], [20, 21], [30, 31]]
    window.advance([12, 22, 32], passed=3)  # two accepted tokens and the bonus token
    assert window.columns == [[31, 32]]
    window.resize(3, text)
    assert window.columns[0] == [31, 32] and len(window.columns) == 3
    for first, second in window.columns[1:]:
        assert (first, second) in [*pairwise(text), (54, 50)]
    other = Window(2, request_id=7)
    other.levels = 2
    other.resize(2, text)
    assert other.columns == window.columns[1:]  # the same request, the same columns
    window.resize(1, text)
    assert window.columns == [[31, 32]]


def test_a_column_without_its_last_node_is_lost(target: Target) -> None:
    proposer = LookaheadProposer(3, 4)
    proposer.propose(prefill(target, [1, 2, 3, 4, 5]), 64)
    window = proposer._requests[0].window
    window.levels, window.columns = 3, [[60, 61, 62], [70, 71, 72], [80, 81, 82]]
    nodes = proposer._requests[0].draft(5, 9)
    tree = Tree(torch.tensor([nodes.tokens]), torch.tensor([nodes.parents]), torch.tensor([len(nodes.tokens)]), 5)
    for depth, columns in [(5, 3), (4, 2), (3, 1), (2, 0), (0, 0)]:  # column i ends 3 + i tokens after the root
        cut = tree.cut([depth])
        ends = window.find_ends(cut.tokens[0].tolist(), cut.parents[0].tolist())
        assert cut.tokens[0, ends].tolist() == [62, 72, 82][:columns]


def test_columns_with_the_same_tokens_share_nodes() -> None:
    state = RequestState(0, 3, 2)
    state.window.levels, state.window.columns = 2, [[6, 7], [7, 7], [8, 6]]
    state.pool.add([5, 6, 7])
    nodes = state.draft(5, 4)
    assert nodes.tokens == [5, 6, 7, 7, 8, 6] and nodes.parents == [-1, 0, 1, 2, 2, 4]
    assert state.window.find_ends(nodes.tokens, nodes.parents) == [2, 3, 5]
    state.window.columns = [[6, 8], [7, 7]]
    assert state.window.find_ends(nodes.tokens, nodes.parents) == []  # the first column's end is missing


# ---- the pool ----


def test_continuations_of_the_root_are_drafted_newest_first(target: Target) -> None:
    text = [9, 1, 2, 3, 9, 1, 4, 5, 9, 6, 7, 8, 9, 1, 2, 3, 30, 9]
    proposer = LookaheadProposer(window=1, size=4, continuations=2)
    tree = proposer.propose(prefill(target, text), 64)
    paths = [path for path in list_paths(tree, 0) if len(path) == 3]
    assert paths == [(1, 2, 3), (6, 7, 8)]
    assert tree.tokens[0, 1:4].tolist() == [1, 2, 3]


def test_accepted_tokens_move_the_window(target: Target) -> None:
    """An accepted token and the bonus token pass the first column; level 0 goes in any case."""
    proposer = LookaheadProposer(3, 3)
    step = prefill(target, [1, 2, 3, 4, 5])
    proposer.propose(step, 64)
    window = proposer._requests[0].window
    window.levels, window.columns = 2, [[60, 61], [70, 71], [80, 81]]
    nodes = proposer._requests[0].draft(5, 0)
    tree = Tree(torch.tensor([nodes.tokens]), torch.tensor([nodes.parents]), torch.tensor([len(nodes.tokens)]), 4)
    logits = torch.zeros(1, tree.width, VOCABULARY)
    for node, token in zip(window.find_ends(nodes.tokens, nodes.parents), (62, 72, 82), strict=True):
        logits[0, node, token] = 1
    text = [1, 2, 3, 4, 5, 60, 9]
    proposer.propose(
        replace(step, is_prefill=False, sequences=[text], path=[[0, 1]], tree=tree, logits=logits), budget=64
    )
    assert window.columns[:2] == [[71, 72], [81, 82]] and len(window.columns) == 3


def test_a_repetition_is_accepted_from_the_pool() -> None:
    """The target repeats itself: all logits but those of the next token in a circle of ten are low."""
    target = Target(tiny("llama", vocab_size=10))
    with torch.no_grad():
        target.model.model.embed_tokens.weight.copy_(torch.eye(10, 32))
        for layer in target.model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        target.model.lm_head.weight.copy_(torch.eye(10, 32).roll(1, 0))
    recorder = Recorder(LookaheadProposer(window=1))
    answer = generate(target, [[*range(10), 0]], recorder, max_new_tokens=41, stop_ids=[])[0]
    assert answer.tokens == [(1 + index) % 10 for index in range(41)]
    assert answer.stats.tau > 3.5 and all(accepted >= 3 for [accepted] in recorder.accepted[1:])


def test_the_pool_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = 1 << 20  # beyond the integers that Python shares
    tracemalloc.start()
    pool = Pool(3)
    for token in range(begin, begin + 2 * POOLED):
        for later in range(4):
            pool.add([token, token + later, token + 5 + later, token + 9 + later])
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    sizes = [len(pool.find(token)) for token in range(begin, begin + 2 * POOLED)]
    assert sizes == [0] * POOLED + [3] * POOLED  # the oldest first tokens are gone
    assert 4e6 < held < 6e6
    monkeypatch.setattr(lookahead, "POOLED", 2)
    pool = Pool(2)
    for gram in ([1, 1], [2, 1], [1, 2], [1, 3], [3, 1], [1, 2]):
        pool.add(gram)
    assert [list(pool.find(token)) for token in (1, 2, 3)] == [[(2,), (3,)], [], [(1,)]]


# ---- trees and rows ----


@pytest.mark.parametrize("sizes", SIZES)
def test_trees_keep_to_the_budget(target: Target, sizes: tuple[int, int, int]) -> None:
    window, size, continuations = sizes
    largest = 1 + (window + continuations) * (size - 1)
    for budget in range(1, 21):
        recorder = Recorder(LookaheadProposer(*sizes))
        plain = generate(target, PROMPTS, None, max_new_tokens=24)
        answers = generate(target, PROMPTS, recorder, max_new_tokens=24, nodes=budget)
        assert [answer.tokens for answer in answers] == [answer.tokens for answer in plain]
        widths = [tree.width for tree in recorder.trees]
        assert max(widths) <= min(budget, largest) and (budget == 1 or max(widths) > 1)
        columns, pooled = LookaheadProposer(*sizes)._split(budget)
        assert columns <= window and pooled <= continuations * (size - 1)
        unused = min(budget, largest) - 1 - columns * (size - 1) - pooled
        assert 0 <= unused < size - 1  # less than another column
        assert columns >= 1 or budget < size  # a window as soon as one column fits


def test_rows_do_not_change_each_others_drafts_and_leave(target: Target) -> None:
    settings = {"max_new_tokens": 40, "stop_ids": [2, 11, 40]}
    together = Recorder(LookaheadProposer())
    generate(target, PROMPTS, together, **settings)
    drafted = 0
    for request_id, prompt in enumerate(PROMPTS):
        alone = Recorder(LookaheadProposer())
        generate(target, [prompt], alone, request_ids=[request_id], **settings)
        assert alone.drafted.items() <= together.drafted.items()
        drafted += len(alone.drafted)
    assert drafted == len(together.drafted) > 40
    assert len(together.step.request_ids) < len(PROMPTS)
    assert [*together.proposer._requests] == together.step.request_ids


def test_a_new_batch_forgets_the_last(target: Target) -> None:
    proposer = LookaheadProposer()
    proposer.propose(prefill(target, [1, 2, 3, 4, 1], [5, 6]), 64)
    proposer.propose(prefill(target, [1]), 64)
    assert [*proposer._requests] == [0] and not proposer._requests[0].pool.find(1)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"window": 0}, "window is 0; it has at least one column"),
        ({"size": 1}, "size is 1; an n-gram to draft from has at least two tokens"),
        ({"continuations": 0}, "continuations is 0; at least one is kept"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LookaheadProposer(**sizes)
