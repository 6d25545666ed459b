"""Steps of fixed shape: results of a session with any lengths and rows, and nothing in them that depends on data."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from decode import Sampling, Session, Target, Tree, generate
from decode.cuda import backend as cuda
from decode.cuda.fixed_steps import FixedSteps
from decode.cuda.graph import CudaGraphPool
from decode.devices import graph
from decode.devices.graph import Captured, round_up
from decode.prefill import read_texts
from decode.trees.accept import accept, unpack
from decode.trees.noise import KEY_NAMES, TEXT, row_keys
from proposers import MergedProposer
from tests.decode.models.test_tree_attention import as_on_gpu
from tests.support.drafting import tree_of_rows
from tests.support.models import tiny
from tests.support.simulated_cuda import recorded_graphs

LAYERS = (1, -1)
VOCABULARY = 8  # so few that random drafts are accepted
GREEDY, SAMPLED = Sampling(), Sampling(temperature=0.8, top_p=0.9, seed=3)


def make_trees(choose: random.Random, rows: int, width: int) -> Tree:
    """A tree of at most `width` nodes for each row, one as large. No two siblings have the same token."""
    return tree_of_rows([make_row(choose, choose.randint(1, width) if row else width) for row in range(rows)])


def make_row(choose: random.Random, size: int) -> tuple[list[int], list[int]]:
    tokens, parents = [choose.randrange(VOCABULARY)], [-1]
    for node in range(1, size):
        parents.append(choose.randrange(node))
        siblings = {tokens[other] for other in range(1, node) if parents[other] == parents[node]}
        tokens.append(choose.choice([token for token in range(VOCABULARY) if token not in siblings]))
    return tokens, parents


def open_fixed(target: Target, rows: int, layers: Sequence[int] = ()) -> Session:
    return Session(target, rows, layers, steps=FixedSteps(target, rows, layers))


def open_sessions(kind: str, rows: int, length: int = 5, **changes: Any) -> tuple[Session, Session]:
    """A session with steps of fixed shape and one without, which have read the same prompts."""
    target = Target(tiny(kind, vocab_size=VOCABULARY, max_position_embeddings=1024, **changes))
    sessions = open_fixed(target, rows, LAYERS), target.open(rows, LAYERS)
    for session in sessions:
        read_texts(session, [[(7 * row + place) % VOCABULARY for place in range(length + row)] for row in range(rows)])
    return sessions


def add_noise(session: Session, sampling: Sampling) -> dict[int, list[int]]:
    """Upload the noise of a step. Returns texts as long as the committed ones."""
    texts = {row: [0] * length for row, length in enumerate(session.lengths)}
    if not sampling.greedy:
        keys = row_keys(sampling.seed, [*texts], session.lengths, 64, TEXT)
        session.begin_upload().add({KEY_NAMES[TEXT]: keys})
    return texts


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "gpt2"])  # gpt2 looks positions up
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("is_alike", [True, False])  # without it, graphs accept nothing
def test_results_are_those_of_a_session(kind: str, sampling: Sampling, is_alike: bool) -> None:
    """While trees change in size, rows leave and join, and the cache grows past its first 256 slots."""
    choose, rows = random.Random(1), 5
    fixed, session = open_sessions(kind, rows, length=236)
    capacities, longest = set(), 0
    for step in range(14):
        tree = make_trees(choose, rows, choose.choice([1, 5, 8]))
        texts = add_noise(fixed, sampling)
        found, expected = fixed.verify(tree, sampling=sampling if is_alike else None), session.verify(tree)
        assert found.features is not None and expected.features is not None
        assert found.logits.shape == expected.logits.shape and found.features.shape == expected.features.shape
        torch.testing.assert_close(found.logits[tree.real], expected.logits[tree.real])
        torch.testing.assert_close(found.features[tree.real], expected.features[tree.real])
        accepted = accept(tree, expected.logits, sampling, texts)
        assert (found.packed is not None) == is_alike
        assert found.packed is None or unpack(found.packed) == accepted
        for each in (fixed, session):
            each.keep(accepted.path)
        longest = max(longest, *map(len, accepted.path))
        capacities.add(fixed.cache.capacity)
        if step in (4, 8, 11):
            kept = choose.sample(range(rows), rows - 1)
            rows = rows - 1
            for each in (fixed, session):
                each.select(sorted(kept))
        if step == 9:
            (joining, _), rows = open_sessions(kind, 2, length=7), rows + 2
            for each in (fixed, session):
                each.join(joining, [1, 0])
        assert fixed.lengths == session.lengths
    assert fixed.cache.layers[0].keys.shape[0] == round_up(rows) == 4
    assert len(capacities) == 2 and longest > 1


def test_long_texts_are_seen_without_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the slots in use alone, in few different numbers; old graphs are given up."""
    for name, value in {"LONG": 64, "SLOTS": 8, "STRIDE": 32}.items():
        monkeypatch.setattr(cuda, name, value)
    monkeypatch.setattr(graph, "MOST_GRAPHS", 4)
    plain = Target(tiny("llama", vocab_size=VOCABULARY, max_position_embeddings=1024))
    target = as_on_gpu(tiny("llama", vocab_size=VOCABULARY, max_position_embeddings=1024), monkeypatch)
    choose, sessions = random.Random(2), (open_fixed(target, 3), Session(plain, 3))
    for session in sessions:
        read_texts(session, [[(7 * row + place) % VOCABULARY for place in range(70 + row)] for row in range(3)])
    windows = set()
    for _ in range(40):
        tree = make_trees(choose, 3, choose.choice([1, 5, 8]))
        found, expected = (session.verify(tree) for session in sessions)
        torch.testing.assert_close(found.logits[tree.real], expected.logits[tree.real])
        for session in sessions:
            session.keep([[0]] * 3)
        steps = sessions[0].steps
        assert isinstance(steps, FixedSteps) and len(steps.graphs) <= 4
        windows.update(key[4] for key in steps.graphs)
    assert windows == {(64, 96), (64, 128), (96, 128)}


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError])
def test_what_cannot_be_captured_runs_as_it_is(error: type[RuntimeError]) -> None:
    """It is captured once. Other graphs of its pool are tried if it was memory that this one lacked."""
    calls = []

    def compute(buffers: Mapping[str, Tensor]) -> Tensor:
        calls.append(buffers)
        if len(calls) == 2:
            raise error("not now")
        return buffers["x"] + 1

    with recorded_graphs():
        pool = CudaGraphPool(torch.device("cuda"))
        captured = Captured(pool, {"x": torch.zeros(1)})
        assert [float(captured.run(compute, {"x": torch.tensor([x])})) for x in (1.0, 2.0, 3.0)] == [2, 3, 4]
    assert len(calls) == 4
    assert pool.fault == ("RuntimeError: not now" if error is RuntimeError else None)


def test_graphs_need_a_gpu() -> None:
    with pytest.raises(ValueError, match="need a CUDA device"):
        Target(tiny("llama"), accelerate="graphs")


def test_calls_before_a_graph_is_replayed_tell_nothing_of_later_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    class Pool(graph.GraphPool):
        def capture(self, function: Any) -> Any:
            return (lambda: None), function()

    found = Captured[Tensor](Pool(), {"x": torch.zeros(2)})
    warm = []
    for _ in range(4):
        warm.append(found.is_warm)
        found.run(lambda buffers: buffers["x"] + 1, {"x": torch.ones(2)})
    assert warm == [False, False, True, True]
    alone = Captured[Tensor](None, {"x": torch.zeros(2)})
    alone.run(lambda buffers: buffers["x"] + 1, {"x": torch.ones(2)})
    assert alone.is_warm
    learned = list[float]()
    target = Target(tiny("llama"))
    monkeypatch.setattr(target, "learn_cost", lambda *args: learned.append(args[1]))
    for is_warm, count in ((False, 0), (True, 6)):
        monkeypatch.setattr(Session, "is_warm", is_warm)
        generate(target, [[5, 9, 5, 9]], MergedProposer(), max_new_tokens=7, stop_ids=[])
        assert bool(learned) == bool(count)
