"""Attention over random trees, in every way that computes it, compared with float64 attention along each node's path"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention
from transformers import PreTrainedModel
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import decode.target as target_module
from decode import Sampling, Target, Tree, generate, prefill, session
from decode.cuda import backend as cuda
from decode.cuda.backend import CudaBackend
from decode.devices import attention
from decode.devices.attention import grouped_attention
from decode.trees.masks import AttentionWindow, tree_masks
from heads.layer_cache import attend
from proposers import DraftProposer, NGramProposer
from tests.decode.test_tree import climb, random_tree
from tests.support.drafting import texts
from tests.support.models import needs_compiler, tiny

SIZE = 8  # of a head's queries and keys
WINDOWS = [AttentionWindow(), AttentionWindow(window=5), AttentionWindow(chunk=7)]
Attend = Callable[[Tensor, Tensor, Tensor, Tensor, float | None], Tensor]  # ..., mask, softcap -> [B, N, heads, D]


@pytest.fixture(autouse=True)
def _uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run flex attention without compiling it. transformers compiles it on a CPU, too."""

    def run(*tensors: Tensor, training: bool, **settings: Any) -> Any:
        return flex_attention(*tensors, **settings)

    monkeypatch.setattr("transformers.integrations.flex_attention.compile_friendly_flex_attention", run)


def by_transformers(function: Callable[..., Any]) -> Attend:
    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, softcap: float | None) -> Tensor:
        module = SimpleNamespace(num_key_value_groups=query.shape[1] // key.shape[1], training=False, is_causal=True)
        return function(module, query, key, value, mask, scaling=SIZE**-0.5, softcap=softcap)[0]

    return attend


WAYS: dict[str, Attend] = {
    "grouped": by_transformers(grouped_attention),
    "in two": by_transformers(grouped_attention),
    "heads": lambda query, key, value, mask, _: attend(query, key, value, mask).transpose(1, 2),
    "sdpa": by_transformers(sdpa_attention_forward),
    "flex": by_transformers(flex_attention_forward),
}


def attend_along_paths(
    query: Tensor, key: Tensor, value: Tensor, tree: Tree, lengths: list[int], span: AttentionWindow, cap: float | None
) -> Tensor:
    """Attention in float64 [B, N, heads, D], node by node. Zero for padding."""
    output = torch.zeros(len(query), tree.width, query.shape[1], value.shape[3], dtype=torch.float64)
    shared = query.shape[1] // key.shape[1]
    for row, length in enumerate(lengths):
        for node in range(int(tree.sizes[row])):
            path = climb(tree, row, node)
            slots = [*range(length), *(length + each for each in path)]  # a slot's place in this list is its position
            own = len(slots) - 1
            seen = [slot for position, slot in enumerate(slots) if sees(span, own, position)]
            for head in range(query.shape[1]):
                scores = key[row, head // shared, seen].double() @ query[row, head, node].double() * SIZE**-0.5
                scores = scores if cap is None else cap * (scores / cap).tanh()
                output[row, node, head] = scores.softmax(dim=0) @ value[row, head // shared, seen].double()
    return output


def sees(span: AttentionWindow, own: int, position: int) -> bool:
    if span.window is not None:
        return own - position < span.window
    return span.chunk is None or own // span.chunk == position // span.chunk


CASES = [
    *((way, None, torch.float64) for way in WAYS),
    ("flex", 3.0, torch.float64),
    # These dtypes are those of the C++ op.
    *(pytest.param("grouped", None, dtype, marks=needs_compiler) for dtype in (torch.float32, torch.bfloat16)),
]
ALLOWED = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.02}


@pytest.mark.parametrize(("way", "softcap", "dtype"), CASES)
@pytest.mark.parametrize("seed", range(12))
def test_nodes_attend_to_their_paths(way: str, softcap: float | None, dtype: torch.dtype, seed: int) -> None:
    choose = random.Random(seed)
    torch.manual_seed(seed)
    tree, span = random_tree(choose), WINDOWS[seed % 3]
    lengths = [choose.choice([0, 1, choose.randrange(40)]) for _ in range(tree.batch)]
    groups, shared = choose.choice([1, 2, 3]), choose.choice([1, 2, 4])
    used = max(lengths) + tree.width + choose.randrange(9)
    query = torch.randn(tree.batch, groups * shared, tree.width, SIZE, dtype=dtype)
    value_size = SIZE if way == "flex" else 5
    key, value = (torch.randn(tree.batch, groups, used, size, dtype=dtype) for size in (SIZE, value_size))
    seen = choose.randrange(min(lengths) + 1) if way == "in two" else 0
    mask = tree_masks({"": span}, torch.tensor(lengths), tree.ancestors, tree.depth, used, dtype, seen)
    assert isinstance(mask, Tensor) and mask.shape[3] == used - (seen if span.is_full else 0)
    found = WAYS[way](query, key, value, mask, softcap).double()
    expected = attend_along_paths(query, key, value, tree, lengths, span, softcap)
    assert torch.allclose(found[tree.real], expected[tree.real], rtol=0, atol=ALLOWED[dtype])


@pytest.mark.parametrize(("length", "nodes"), [(9, 1), (9, 6)])
def test_the_next_tokens_need_no_mask(length: int, nodes: int) -> None:
    torch.manual_seed(0)
    query = torch.randn(2, 6, nodes, SIZE).double()
    key, value = (torch.randn(2, 3, length + nodes, size).double() for size in (SIZE, 5))
    found = by_transformers(grouped_attention)(query, key, value, query.new_empty(2, 1, nodes, 0), None)
    tree = Tree.chain([[0] * nodes] * 2)
    expected = attend_along_paths(query, key, value, tree, [length] * 2, AttentionWindow(), None)
    assert torch.allclose(found, expected, rtol=0, atol=1e-12)


def as_on_gpu(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> Target:
    """A target on the CPU that attends as on a GPU in half precision."""
    backend = CudaBackend(torch.device("cpu"))
    for name, value in {
        "waits": False,
        "pass_tokens": 0,
        "sees_texts_whole": lambda *_: True,
        "make_pool": lambda: None,
    }.items():
        monkeypatch.setattr(backend, name, value)
    monkeypatch.setattr(target_module, "find_backend", lambda _: backend)
    return Target(model, accelerate="packed")


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_texts_that_are_seen_whole_change_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU in half precision: long texts are seen without a mask, prompts and single nodes need none."""
    plain = Target(tiny(kind, dtype=torch.float64))
    target = as_on_gpu(tiny(kind, dtype=torch.float64), monkeypatch)
    monkeypatch.setattr(prefill, "CHUNK", 5)
    monkeypatch.setattr(session, "LONG_CHAIN", 5)
    monkeypatch.setattr(cuda, "SLOTS", 4)
    monkeypatch.setattr(cuda, "LONG", 8)
    used: Counter[str] = Counter()
    attend_in_two = attention.attend_in_two

    def count(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, seen: int, scale: float) -> Tensor:
        used["no mask" if mask is None else "mask"] += 1
        return attend_in_two(query, key, value, mask, seen, scale)

    monkeypatch.setattr(attention, "attend_in_two", count)
    prompts = [[*range(5, 28)], [7, 8, 9] * 4, [*range(5, 28)]]
    for batch_size in (1, 3):
        for sampling in (Sampling(), Sampling(0.8, seed=1)):
            settings: dict[str, Any] = {"sampling": sampling, "max_new_tokens": 20, "stop_ids": []}
            expected = texts(plain, prompts, None, **settings)
            for proposer in (None, NGramProposer(length=4), DraftProposer(plain, width=2, depth=3, nodes=9)):
                assert texts(target, prompts, proposer, batch_size=batch_size, **settings) == expected
    assert used["mask"] > 100 and (kind != "llama" or used["no mask"] > 100)  # windows need masks


def test_passes_and_drafts_choose_among_torchs_kernels(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but cuDNN's, on a GPU."""
    with CudaBackend(torch.device("cuda")).running():
        assert not torch.backends.cuda.cudnn_sdp_enabled() and torch.backends.cuda.flash_sdp_enabled()
    assert torch.backends.cuda.cudnn_sdp_enabled()
    chosen: list[None] = []
    monkeypatch.setattr(target.backend, "running", lambda: chosen.append(None) or nullcontext())
    (answer,) = generate(target, [[5, 6, 7]], None, max_new_tokens=9, stop_ids=[])
    assert len(chosen) == 8 + answer.stats.steps


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "gemma2"])  # gemma2: windows and a softcap
def test_flex_attention_gives_the_same_tokens(kind: str) -> None:
    prompts, answers = [[5, 6, 7, 8] * 4, [9, 3]], []
    for implementation in ("eager", "flex_attention"):
        model = tiny(kind)
        model.set_attn_implementation(implementation)
        assert model.config._attn_implementation == implementation
        for proposer in (None, NGramProposer(length=4)):
            answers.append(texts(Target(model), prompts, proposer, max_new_tokens=16, stop_ids=[]))
    assert answers[1:] == answers[:1] * 3
