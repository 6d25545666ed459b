"""A run leaves no memory and no hooks, and concurrent runs do not see each other's features."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from weakref import WeakSet

import pytest
import torch

from decode import Target, Tree, generate
from decode.kv_cache import TreeCacheLayer
from proposers import NGramProposer
from tests.support.models import tiny


def test_kv_caches_are_freed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the garbage collector, which does not run when a GPU is out of memory."""
    layers, make = WeakSet[TreeCacheLayer](), TreeCacheLayer.__init__

    def count(layer: TreeCacheLayer, *arguments: object) -> None:
        make(layer, *arguments)
        layers.add(layer)

    monkeypatch.setattr(TreeCacheLayer, "__init__", count)
    target = Target(tiny("llama"))
    gc.collect()
    gc.disable()
    try:
        generate(target, [[5, 9, 5], [7], [8, 9]], None, batch_size=2, max_new_tokens=4)
        generate(target, [[5, 9, 5]], NGramProposer(), max_new_tokens=4)
        assert not layers
    finally:
        gc.enable()


def test_a_failed_pass_leaves_no_hook() -> None:
    target = Target(tiny("llama"))
    with pytest.raises(ValueError, match="layer 99 does not exist"):
        target.open(1, (2, 99)).verify(Tree.chain([[5, 9]]))
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in target.model.modules())


def test_each_thread_captures_its_own_features() -> None:
    target = Target(tiny("llama"))
    chains = [list(range(3, 3 + size)) for size in (10, 15)]

    def read(chain: list[int]) -> list[torch.Tensor]:
        verdicts = [target.open(1, (2, -1)).verify(Tree.chain([chain])) for _ in range(60)]
        return [verdict.features for verdict in verdicts if verdict.features is not None]

    alone = [read(chain)[0] for chain in chains]
    with ThreadPoolExecutor(2) as pool:
        together = [*pool.map(read, chains)]
    assert all(torch.equal(one, expected) for found, expected in zip(together, alone, strict=True) for one in found)
