"""Fused kernels of a GPU's step, run on the CPU: they compile as a whole, and compute what they compute unfused."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from decode import Target
from decode.accept import pack
from decode.cpu.packed_linear import MergedPart, merge_layers
from decode.device import fusion
from decode.device.at_once import choose_greedily, find_path
from decode.device.check import _mend
from decode.device.fusion import fused, fusing
from decode.kv_cache import move_slots
from heads import LayerCache
from proposers.eagle import EagleDrafter, FixedEagleDrafter
from proposers.feature_history import attend_like_target, pick_last
from tests.decode.test_tree import random_tree
from tests.support.drafting import make_head
from tests.support.models import VOCABULARY, tiny
from tests.support.simulated_cuda import list_kernels

ROWS, WIDTH, LEVELS = 3, 4, 3


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions are compiled as if their tensors were on a GPU."""
    monkeypatch.setattr(fusion, "_is_on_gpu", lambda _: True)
    monkeypatch.setattr(fusion, "_failed", False)


@pytest.mark.usefixtures("on_gpu")
def test_what_cannot_be_compiled_runs_as_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any) -> None:
        raise torch._dynamo.exc.Unsupported("no compiler")

    monkeypatch.setattr(torch, "compile", lambda *_, **__: fail)
    with fusing(True):
        assert [fused(torch.add)(torch.ones(1), 1).tolist() for _ in range(2)] == [[2], [2]]
    assert capsys.readouterr().err.count("no compiler") == 1


@pytest.mark.slow
@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("variants", [12, 70])  # torch's own limit is 8
def test_a_function_may_have_many_variants(monkeypatch: pytest.MonkeyPatch, variants: int) -> None:
    """Beyond the limit it runs as it is."""
    traced: list[int] = []

    def trace(module: Any, _: Any) -> Any:
        traced.append(len(traced))
        return module

    @fused
    def take(tensor: torch.Tensor, rows: tuple[int, ...], row: int) -> torch.Tensor:
        return tensor + rows[row]  # as a calibration's levels: a program for each

    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=trace))
    rows = tuple(range(variants))
    with fusing(True):
        assert [int(take(torch.zeros(1), rows, row)) for row in rows] == [*rows]
    assert len(traced) == min(variants, fusion.VARIANTS) and not fusion._failed


@pytest.mark.usefixtures("on_gpu")
def test_a_function_with_too_many_variants_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """It alone: others stay compiled."""
    compiled, limit = [], torch._dynamo.exc.FailOnRecompileLimitHit

    def compile_it(function: Any, **_: Any) -> Any:
        compiled.append(function)
        return function if function is torch.sub else lambda *_: (_ for _ in ()).throw(limit("too many"))

    monkeypatch.setattr(torch, "compile", compile_it)
    add, subtract = fused(torch.add), fused(torch.sub)
    with fusing(True):
        assert [add(torch.ones(1), 1).tolist() for _ in range(2)] == [[2], [2]]
        assert subtract(torch.ones(1), 1).tolist() == [0]
    assert compiled == [torch.add, torch.sub]


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(getattr(function, "__wrapped__"), fullgraph=True)  # noqa: B009


def test_compiled_rules_are_exact() -> None:
    """Integers and choices, the same from inductor as from torch."""
    torch._dynamo.reset()
    mend, choose, find, packed = map(compiled, (_mend, choose_greedily, find_path, pack))
    trees = [tree for seed in range(90) if (tree := random_tree(random.Random(seed))).width == 12]
    for seed, drafted in enumerate(trees):  # of one shape, so that each function is compiled once
        tree = replace(drafted, height=11)
        torch.manual_seed(seed)
        tokens = torch.where(torch.rand(tree.tokens.shape) < 0.1, -7, tree.tokens)
        settings = None, min(12, tree.width), 6, tree.height, False
        given = tokens, tree.parents, tree.sizes, tree.tokens[:, 0], *settings
        parts = _mend(*given)
        for name, part in mend(*given).items():
            assert torch.equal(part, parts[name]), name
        logits = torch.randn(*tree.tokens.shape, 6)
        logits[0, 0, seed % 6] = [torch.nan, torch.inf, 0.0][seed % 3]
        chosen = choose(logits)
        assert torch.equal(chosen, choose_greedily(logits))
        nodes = (*(parts[name] for name in ("tokens", "parents", "real", "ancestors", "depth")),)
        found = find(chosen, *nodes)
        assert all(map(torch.equal, found, find_path(chosen, *nodes)))
        last = parts["tokens"], parts["sizes"], parts["wrong"], *found
        assert torch.equal(packed(*last), pack(*last))
    assert len(trees) > 15


def test_moving_slots_reads_all_before_it_writes() -> None:
    """As one kernel it would read slots that it has already overwritten: sources and destinations overlap."""
    states, slots = torch.zeros(2, 3, 2, 64, 8), torch.tensor([[1, 3], [2, 3], [5, 9]])
    assert len(list_kernels(getattr(move_slots, "__wrapped__"), (states, states + 1, slots, slots - 1), {})) == 2  # noqa: B009


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_fixed_shapes_and_merged_layers_draft_the_same(kind: str) -> None:
    target = Target(tiny("llama"))
    head, embed = make_head(kind, target), target.model.get_input_embeddings()
    merged = copy.deepcopy(head)
    merge_layers(merged, lambda layer: type(layer) is nn.Linear)
    assert sum(isinstance(module, MergedPart) for module in merged.modules()) == 5  # q, k, v, gate, up
    size = head.target_hidden_size * len(head.features)
    caches = [LayerCache(ROWS, attend_like_target)]

    def read(features: torch.Tensor, tokens: torch.Tensor, counts: list[int]) -> torch.Tensor:
        fused, cache = head.fuse(features), caches[0]
        states = head(embed(tokens), fused, cache.positions(fused.shape[1], fused.device), cache.attend)
        cache.keep(counts)
        return pick_last(states, torch.tensor(counts))

    def draw(counts: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        shape = ROWS, max(counts)
        return torch.randn(*shape, size, dtype=target.dtype), torch.randint(VOCABULARY, shape)

    with torch.no_grad():
        torch.manual_seed(0)
        read(*draw([5, 9, 2]), [5, 9, 2])
        for counts in ([1, 3, 2], [2, 2, 2]):
            caches.append(copy.deepcopy(caches[0]))
            features, tokens = draw(counts)
            numbers = {"counts": torch.tensor(counts), "lengths": torch.tensor(caches[1].lengths)}
            inputs = {"features": head.fuse(features), "following": tokens, **numbers}
            caches[1].reserve(max(caches[1].lengths) + max(counts) + LEVELS * WIDTH)
            fixed = FixedEagleDrafter(merged, embed, caches[1], inputs, LEVELS + 1, LEVELS * WIDTH, (0, 256))
            caches[1].keep(counts)
            grown = EagleDrafter(head, read(features, tokens, counts), caches[0], embed)
            paths = 1
            for level in range(LEVELS + 1):
                torch.testing.assert_close(fixed.logits(level), grown.logits(level), rtol=1e-9, atol=1e-9)
                parents, tokens = torch.randint(paths, (ROWS, WIDTH)), torch.randint(VOCABULARY, (ROWS, WIDTH))
                if level < LEVELS:
                    fixed.extend(parents, tokens)
                    grown.extend(parents, tokens)
                paths = WIDTH
            assert caches.pop().lengths == caches[0].lengths
