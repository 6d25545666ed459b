"""EAGLE's drafts at fixed shapes, as a GPU makes them, are those of a CPU."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from decode import Target
from decode.devices import graph
from decode.weights.layers import MergedPart, merge_layers
from heads import LayerCache
from proposers import fast_heads
from proposers.eagle import EagleDrafter
from proposers.feature_history import attend_like_target, pick_last
from tests.support.drafting import make_head
from tests.support.models import VOCABULARY, needs_compiler, tiny

ROWS, WIDTH, LEVELS = 3, 4, 3


@pytest.mark.parametrize(("kind", "layers"), [("eagle", 1), ("eagle3", 1), ("eagle3", 2)])
def test_fixed_shapes_and_merged_layers_draft_the_same(kind: str, layers: int) -> None:
    target = Target(tiny("llama"))
    shape = {} if kind == "eagle" else {"layers": layers}
    head, embed = make_head(kind, target, **shape), target.model.get_input_embeddings()
    merged = copy.deepcopy(head)
    merge_layers(merged, lambda layer: type(layer) is nn.Linear)
    assert sum(isinstance(module, MergedPart) for module in merged.modules()) == 5 * layers  # q, k, v, gate, up
    size = head.target_hidden_size * len(head.features)
    caches = [LayerCache(ROWS, attend_like_target)]

    def read(head: Any, cache: LayerCache, features: torch.Tensor, tokens: torch.Tensor, counts: list[int]) -> Any:
        fused = head.fuse(features)
        states = head(embed(tokens), fused, cache.positions(fused.shape[1], fused.device), cache.attend)
        cache.keep(counts, torch.tensor(counts))
        return pick_last(states, torch.tensor(counts))

    def draw(counts: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        shape = ROWS, max(counts)
        return torch.randn(*shape, size, dtype=target.dtype), torch.randint(VOCABULARY, shape)

    with torch.no_grad():
        torch.manual_seed(0)
        read(head, caches[0], *draw([5, 9, 2]), [5, 9, 2])
        for counts in ([1, 3, 2], [2, 2, 2]):
            caches.append(copy.deepcopy(caches[0]))
            features, tokens = draw(counts)
            caches[1].reserve(max(caches[1].lengths) + max(counts) + LEVELS * WIDTH)
            fixed_cache = caches[1].at_fixed_shape(torch.tensor(caches[1].lengths), (0, 256))
            caches[1].keep(counts)
            fixed, grown = (
                EagleDrafter(
                    fast_heads.FastPass(each, target.dtype),
                    read(each, cache, features, tokens, counts),
                    cache,
                    embed,
                    LEVELS,
                    LEVELS * WIDTH,
                )
                for each, cache in ((merged, fixed_cache), (head, caches[0]))
            )
            paths = 1
            for level in range(LEVELS + 1):
                torch.testing.assert_close(fixed.logits(level), grown.logits(level), rtol=1e-9, atol=1e-9)
                parents, tokens = torch.randint(paths, (ROWS, WIDTH)), torch.randint(VOCABULARY, (ROWS, WIDTH))
                if level < LEVELS:
                    fixed.extend(parents, tokens)
                    grown.extend(parents, tokens)
                paths = WIDTH
            assert caches.pop().lengths == caches[0].lengths


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize(("kind", "settings"), [("eagle", {}), ("eagle3", {}), ("jump", {}), ("eagle", {"window": 6})])
def test_compiled_passes_compute_the_same(kind: str, settings: dict[str, Any]) -> None:
    """Of texts of several lengths, prompts and drafts of all widths; the first pass of a cache is not compiled."""
    target = Target(tiny("llama", dtype=torch.float32))
    head, embed = make_head(kind, target), target.model.get_input_embeddings()
    compiled, plain = (fast_heads.FastPass(head, target.dtype, compiles=compiles) for compiles in (True, False))
    assert compiled.is_compiled and not plain.is_compiled
    caches = [LayerCache(ROWS, attend_like_target, **settings) for _ in range(2)]
    torch.manual_seed(0)
    with torch.inference_mode():
        for counts in ([5, 9, 2], [1, 1, 1], [1, 3, 2], [300, 2, 1], [2, 2, 2]):
            tokens = torch.randint(VOCABULARY, (ROWS, max(counts)))
            states = torch.randn(*tokens.shape, head.hidden_size)
            found, expected = (
                each(embed(tokens), states, cache, cache.positions(max(counts), tokens.device))
                for each, cache in zip((compiled, plain), caches, strict=True)
            )
            for row, count in enumerate(counts):
                torch.testing.assert_close(found[row, :count], expected[row, :count], rtol=1e-4, atol=1e-5)
            for cache in caches:
                cache.keep(counts)
            last = pick_last(expected, torch.tensor(counts))
            drafters = [
                EagleDrafter(each, last, cache, embed, LEVELS, LEVELS * WIDTH)
                for each, cache in zip((compiled, plain), caches, strict=True)
            ]
            for width in range(1, LEVELS + 1):
                parents, tokens = torch.randint(width - 1 or 1, (ROWS, width)), torch.randint(VOCABULARY, (ROWS, width))
                for drafter in drafters:
                    drafter.extend(parents, tokens)
                torch.testing.assert_close(drafters[0].states, drafters[1].states, rtol=1e-4, atol=1e-5)


def test_old_graphs_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts that grow, and rows that join, take more and more of them."""
    monkeypatch.setattr(graph, "MOST_GRAPHS", 3)
    graphs, model = fast_heads.DraftGraphs(), nn.Linear(1, 1)
    for rows in [*range(1, 9), 8, 2]:
        inputs = {"roots": torch.arange(rows)}
        found: Any = graphs.run(model, None, "kind", lambda given: given["roots"] + 1, inputs)  # type: ignore[arg-type]
        assert torch.equal(found, torch.arange(rows) + 1) and len(graphs._captured) <= 3
