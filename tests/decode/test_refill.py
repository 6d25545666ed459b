"""Batches: waiting prompts take the rows of finished ones, answers stay the same, and a run leaves nothing behind."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from weakref import WeakSet

import pytest
import torch

from decode import Answer, PlainProposer, Sampling, Step, Target, Tree, generate
from decode.kv_cache import KVCache, KVLayer
from decode.prefill import read_texts
from decode.session import Session
from decode.trees.noise import gumbel_max
from decode.trees.walk import draw
from proposers import NGramProposer
from tests.support.models import tiny

KINDS = ["llama", "gemma3_text", "gemma3n_text", "gpt2"]  # full, windowed and shared layers, learned positions
LENGTHS = [5, 1, 70, 2, 33, 200, 1, 9, 40, 3, 64, 12]  # a refilled row may be longer than all before
PROMPTS = [[(7 * index + 3 * position) % 90 + 3 for position in range(length)] for index, length in enumerate(LENGTHS)]
ENDS = range(40, 52)  # an eighth of the vocabulary: answers end at very different times
SETTINGS: dict[str, Any] = {"max_new_tokens": 30, "stop_ids": ENDS}


def read(answers: list[Answer]) -> list[tuple[list[int], str]]:
    return [(answer.tokens, answer.finish) for answer in answers]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_refilled_rows_give_the_same_answers_as_alone(kind: str, temperature: float) -> None:
    target, sampling = Target(tiny(kind)), Sampling(temperature=temperature, seed=3)
    alone = [
        generate(target, [prompt], None, request_ids=[request_id], sampling=sampling, **SETTINGS)[0]
        for request_id, prompt in enumerate(PROMPTS)
    ]
    assert len({len(answer.tokens) for answer in alone}) > 3
    for size in (2, 5):
        assert read(generate(target, PROMPTS, None, batch_size=size, sampling=sampling, **SETTINGS)) == read(alone)


def test_the_batch_stays_full_while_prompts_wait(monkeypatch: pytest.MonkeyPatch, target: Target) -> None:
    sizes, real = list[int](), Session.verify

    def verify(session: Session, tree: Tree, **options: Any) -> Any:
        if tree.width == 1 and any(session.lengths):
            sizes.append(tree.batch)
        return real(session, tree, **options)

    monkeypatch.setattr(Session, "verify", verify)
    answers = generate(target, PROMPTS, None, batch_size=4, **SETTINGS)
    assert sizes == sorted(sizes, reverse=True)
    assert len(sizes) < sum(len(answer.tokens) for answer in answers) / 2.5
    assert all(answer.stats.tau == 1 for answer in answers)


class CountingProposer(PlainProposer):
    """Sees the prefill of every request."""

    def __init__(self) -> None:
        self.known: set[int] = set()

    def propose(self, step: Step, budget: int) -> Tree:
        self.known |= {step.request_ids[row] for row in step.joined}
        assert self.known >= {*step.request_ids}
        return super().propose(step, budget)


def test_a_proposer_that_extends_plain_decoding_sees_all_prompts(target: Target) -> None:
    proposer = CountingProposer()
    generate(target, PROMPTS, proposer, batch_size=4, **SETTINGS)
    assert len(proposer.known) > len(PROMPTS) / 2  # the others end with their first token


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_drawing_row_by_row_equals_drawing_all_at_once(dtype: torch.dtype) -> None:
    generator, rows = torch.Generator().manual_seed(0), 25
    logits = torch.randn(rows, 1000, generator=generator).to(dtype)
    seeds = torch.randint(2**53, (rows,), generator=generator)
    sampling = Sampling(temperature=0.8, top_k=50, top_p=0.9)
    expected = gumbel_max(sampling.probabilities(logits), seeds)
    assert torch.equal(draw(logits, sampling, [], range(rows), seeds), expected)


# What a run leaves behind


def test_kv_caches_are_freed_at_once(monkeypatch: pytest.MonkeyPatch, target: Target) -> None:
    """Without the garbage collector, which does not run when a GPU is out of memory."""
    layers, make = WeakSet[KVLayer](), KVLayer.__init__

    def count(layer: KVLayer, *arguments: object) -> None:
        make(layer, *arguments)
        layers.add(layer)

    monkeypatch.setattr(KVLayer, "__init__", count)
    gc.collect()
    gc.disable()
    try:
        generate(target, [[5, 9, 5], [7], [8, 9]], None, batch_size=2, max_new_tokens=4)
        generate(target, [[5, 9, 5]], NGramProposer(), max_new_tokens=4)
        assert not layers
    finally:
        gc.enable()


def test_a_failed_pass_leaves_no_hook(target: Target) -> None:
    with pytest.raises(ValueError, match="layer 99 does not exist"):
        target.open(1, (2, 99)).verify(Tree.chain([[5, 9]]))
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in target.model.modules())


def test_each_thread_captures_its_own_features(target: Target) -> None:
    chains = [list(range(3, 3 + size)) for size in (10, 15)]

    def read(chain: list[int]) -> list[torch.Tensor]:
        verdicts = [target.open(1, (2, -1)).verify(Tree.chain([chain])) for _ in range(60)]
        return [verdict.features for verdict in verdicts if verdict.features is not None]

    alone = [read(chain)[0] for chain in chains]
    with ThreadPoolExecutor(2) as pool:
        together = [*pool.map(read, chains)]
    assert all(torch.equal(one, expected) for found, expected in zip(together, alone, strict=True) for one in found)


def test_texts_of_other_lengths_leave_a_first_pass_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text is read in a cache without keys, as alone: the kernels of its first pass depend on that."""
    target, held, run = Target(tiny("llama")), list[bool](), Target.run

    def watch(self: Target, cache: KVCache, *args: Any, **inputs: Any) -> Any:
        held.append(cache.allocated(0) is not None)
        return run(self, cache, *args, **inputs)

    monkeypatch.setattr(Target, "run", watch)
    read_texts(target.open(3), [[5] * 40, [6] * 100, [7] * 200])
    assert held == [False] * 3
