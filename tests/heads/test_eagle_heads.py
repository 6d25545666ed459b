"""EAGLE heads, compared with a reference in plain Python that runs path by path, without cache and tree mask."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from heads import (
    Eagle3Config,
    Eagle3Head,
    EagleConfig,
    EagleHead,
    LayerCache,
    LayerConfig,
    choose_features,
)
from heads.layer_cache import hide
from tests.heads.test_heads import (
    HIDDEN,
    VOCABULARY,
    Vector,
    add,
    close,
    drawn,
    multiply,
    norm,
    randomised,
    rotate_pairs,
    silu,
)

LAYER = LayerConfig(6, 2, 4, 10, rope_theta=50.0, rms_norm_eps=1e-3, input_norm=False)
WIDE = 12  # a target's hidden size that differs from the head's
PATHS = [(0,), (1,), (0, 2), (0, 3), (1, 4)]  # each node of a tree of two levels, after its ancestors


def made_eagle(layer: LayerConfig = LAYER, **settings: Any) -> EagleHead:
    head = randomised(EagleHead(EagleConfig(HIDDEN, VOCABULARY, layer, **settings)))
    for parameter in head.parameters():
        parameter.data /= 2  # without norms, values grow from level to level
    if head.token_map is not None:
        head.token_map = torch.arange(head.draft_size) * 2 + 1
    head.borrow(drawn(VOCABULARY, HIDDEN, seed=7))
    return head


def made_eagle3(layer: LayerConfig = LAYER, **settings: Any) -> Eagle3Head:
    layer = replace(layer, input_norm=True)
    head = randomised(Eagle3Head(Eagle3Config(HIDDEN, VOCABULARY, layer, **{"features": (2, 5, 9), **settings})))
    if head.token_map is not None:
        head.token_map = torch.arange(head.draft_size) * 2 + 1
    if head.output == "target":
        head.borrow(drawn(VOCABULARY, HIDDEN, seed=7))
    return head


class Reference:
    """A head in plain Python: `run` processes one path, pair by pair of embedding and feature."""

    def __init__(self, head: Any) -> None:
        self.eagle3, self.config, self.layer = head.kind == "eagle3", head.config, head.config.layer
        self.weights = dict(head.state_dict())
        self.eps = self.layer.rms_norm_eps
        self.prefix = "midlayer." if self.eagle3 else "layers.0."

    def norm(self, vector: Vector, name: str) -> Vector:
        return norm(vector, self.weights[f"{name}.weight"], self.eps)

    def multiply(self, name: str, vector: Vector) -> Vector:
        return multiply(self.weights[f"{name}.weight"], vector, self.weights.get(f"{name}.bias"))

    def fuse(self, features: Vector) -> Vector:
        if not self.eagle3:
            return features
        parts, size = len(self.config.features), len(features) // len(self.config.features)
        split = [features[part * size : (part + 1) * size] for part in range(parts)]
        if self.config.fc_norm:
            split = [self.norm(part, f"fc_norm.{index}") for index, part in enumerate(split)]
        joined = [number for part in split for number in part]
        return self.multiply("fc", self.norm(joined, "input_norm") if self.config.norm_before_fc else joined)

    def enter(self, embedded: Vector, feature: Vector) -> tuple[Vector, Vector]:
        """The residual, and the input of the attention."""
        if self.eagle3:
            normed = self.norm(feature, f"{self.prefix}hidden_norm")
            joined = self.norm(embedded, f"{self.prefix}input_layernorm") + normed
            return (normed if self.config.norm_before_residual else feature), joined
        residual = self.multiply("fc", embedded + feature)
        return residual, self.norm(residual, f"{self.prefix}input_layernorm") if self.layer.input_norm else residual

    def project(self, name: str, entry: Vector, head: int, position: int) -> Vector:
        size = self.layer.head_dim
        part = self.multiply(f"{self.prefix}self_attn.{name}_proj", entry)[head * size : (head + 1) * size]
        if self.layer.qk_norm and name != "v":
            part = self.norm(part, f"{self.prefix}self_attn.{name}_norm")
        return part if name == "v" else rotate_pairs(part, position, self.layer.rope_theta)

    def attend(self, entries: list[Vector]) -> Vector:
        """The attention output of the last entry, over all entries."""
        mixed: Vector = []
        share = self.layer.num_attention_heads // self.layer.num_key_value_heads
        last, size = len(entries) - 1, self.layer.head_dim
        for head in range(self.layer.num_attention_heads):
            query = self.project("q", entries[last], head, last)
            keys = [self.project("k", entry, head // share, place) for place, entry in enumerate(entries)]
            scores = [math.exp(sum(a * b for a, b in zip(query, key, strict=True)) / math.sqrt(size)) for key in keys]
            values = [self.project("v", entry, head // share, 0) for entry in entries]
            mixed += [sum(s * v[i] for s, v in zip(scores, values, strict=True)) / sum(scores) for i in range(size)]
        return self.multiply(f"{self.prefix}self_attn.o_proj", mixed)

    def run(self, pairs: list[tuple[Vector, Vector | None]]) -> list[Vector]:
        """The state of each pair. A pair without a feature uses the state before it."""
        entries: list[Vector] = []
        states: list[Vector] = []
        for embedded, feature in pairs:
            residual, entry = self.enter(embedded, states[-1] if feature is None else feature)
            entries.append(entry)
            state = add(residual, self.attend(entries))
            inner = self.norm(state, f"{self.prefix}post_attention_layernorm")
            gate, up = (self.multiply(f"{self.prefix}mlp.{name}_proj", inner) for name in ("gate", "up"))
            gated = [silu(a) * b for a, b in zip(gate, up, strict=True)]
            state = add(state, self.multiply(f"{self.prefix}mlp.down_proj", gated))
            normed = self.eagle3 and self.config.normed_feedback
            states.append(self.norm(state, "norm") if normed else state)
        return states

    def logits(self, state: Vector, matrix: Tensor) -> Vector:
        normed = self.eagle3 and self.config.final_norm and not self.config.normed_feedback
        return multiply(matrix, self.norm(state, "norm") if normed else state)


def draft(head: Any, stem: int, embedded: Tensor, features: Tensor, nodes: Tensor) -> tuple[Tensor, Tensor]:
    """States of a stem [1, T], two tokens a call, and of the nodes [1, 5] of `PATHS`, a level a call, with a cache."""
    cache, states = LayerCache(1), []
    for first in range(0, stem, 2):
        count = min(2, stem - first)
        places = slice(first, first + count)
        states.append(
            head(
                embedded[:, places],
                head.fuse(features[:, places]),
                cache.positions(count, torch.device("cpu")),
                context=cache,
            )
        )
        cache.keep([count])
    stem_states = torch.cat(states, dim=1)
    seen = torch.tensor([[place < stem or place - stem in path for place in range(stem + 5)] for path in PATHS])
    mask = hide(~seen, features.dtype)
    one = head(
        nodes[:, :2],
        stem_states[:, [-1, -1]],
        torch.full((1, 2), stem),
        mask[None, None, :2, : stem + 2],
        cache,
    )
    two = head(nodes[:, 2:], one[:, [0, 0, 1]], torch.full((1, 3), stem + 1), mask[None, None, 2:], cache)
    assert cache.lengths == [stem]
    return stem_states, torch.cat([one, two], dim=1)


def check_against_reference(head: Any, matrix: Tensor) -> None:
    """Without cache, with cache and as a tree: every state and logit matches the reference."""
    stem, reference = 5, Reference(head)
    embedded, nodes = drawn(2, stem, HIDDEN, seed=2), drawn(2, 5, HIDDEN, seed=4)
    features = drawn(2, stem, head.target_hidden_size * len(head.features), seed=3)
    whole = head(embedded, head.fuse(features), torch.arange(stem)[None])
    for row in range(2):
        given: list[tuple[Vector, Vector | None]] = [
            (e.tolist(), reference.fuse(f.tolist())) for e, f in zip(embedded[row], features[row], strict=True)
        ]
        expected = reference.run(given)
        assert close(whole[row], expected)
        assert close(head.logits(whole)[row, 2], reference.logits(expected[2], matrix))
        stem_states, tree = draft(head, stem, embedded[[row]], features[[row]], nodes[[row]])
        assert close(stem_states[0], expected)
        for node, path in enumerate(PATHS):
            state = reference.run(given + [(nodes[row, step].tolist(), None) for step in path])[-1]
            assert close(tree[0, node], state)
            assert close(head.logits(tree, 0)[0, node], reference.logits(state, matrix))


@pytest.mark.parametrize(
    ("layer", "settings"),
    [
        ({}, {}),
        ({"qkv_bias": True, "num_key_value_heads": 6}, {"bias": True}),
        ({"qk_norm": True, "input_norm": True}, {"draft_size": 5}),
    ],
)
def test_eagle_matches_the_reference(layer, settings):
    head = made_eagle(replace(LAYER, **layer), **settings)
    target = drawn(VOCABULARY, HIDDEN, seed=7)
    check_against_reference(head, target if head.token_map is None else target[head.token_map])
    assert head.features == (-1,) and head.embed_tokens is None


@pytest.mark.parametrize(
    ("layer", "settings"),
    [
        ({}, {"draft_size": 5}),
        ({"qkv_bias": True}, {"bias": True, "fc_norm": True, "normed_feedback": True}),
        ({"qk_norm": True}, {"norm_before_residual": True, "norm_before_fc": True}),
        ({}, {"target_hidden_size": WIDE, "embedding": True, "features": (0, 3, 4, 7, 8)}),
        ({"num_attention_heads": 2}, {"final_norm": False, "output": "target", "features": (1, 2)}),
    ],
)
def test_eagle3_matches_the_reference(layer, settings):
    head = made_eagle3(replace(LAYER, **layer), **settings)
    check_against_reference(head, head.output_layer(0)[0])
    assert (head.embed_tokens is not None) == head.config.embedding


def test_rows_of_different_lengths_share_a_cache():
    for head in (made_eagle(), made_eagle3()):
        embedded, fused = drawn(3, 30, HIDDEN), drawn(3, 30, HIDDEN, seed=2)
        whole = head(embedded, fused, torch.arange(30)[None])
        generator, cache = torch.Generator().manual_seed(0), LayerCache(3)
        for _ in range(8):
            counts = torch.randint(0, 4, (3,), generator=generator).tolist()
            before, width = cache.lengths, max(*counts, 1)
            places = [[min(start + step, 29) for step in range(width)] for start in before]
            new = [torch.stack([part[row, places[row]] for row in range(3)]) for part in (embedded, fused)]
            states = head(*new, cache.positions(width, torch.device("cpu")), context=cache)
            cache.keep(counts)
            for row, count in enumerate(counts):
                expected = whole[row, before[row] : before[row] + count]
                assert torch.allclose(states[row, :count], expected, rtol=0, atol=1e-12)


def test_new_heads_repeat_their_deepest_feature():
    embedded, features = drawn(2, 4, HIDDEN), drawn(2, 4, 3 * HIDDEN, seed=2)
    eagle = EagleHead(EagleConfig(HIDDEN, VOCABULARY, LAYER, bias=True)).double()
    assert torch.equal(eagle(embedded, features[..., :HIDDEN], torch.arange(4)[None]), features[..., :HIDDEN])
    eagle3 = Eagle3Head(Eagle3Config(HIDDEN, VOCABULARY, replace(LAYER, input_norm=True), (2, 5, 9))).double()
    assert torch.equal(eagle3(embedded, eagle3.fuse(features), torch.arange(4)[None]), features[..., -HIDDEN:])


@pytest.mark.parametrize("made", [made_eagle, made_eagle3])
def test_gradients_reach_every_weight(made):
    head, embedded = made(), drawn(2, 4, HIDDEN)
    features = drawn(2, 4, HIDDEN * len(head.features), seed=2)
    states = head(embedded, head.fuse(features), torch.arange(4)[None])
    head.logits(head(embedded, states, torch.arange(1, 5)[None])).square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in head.parameters())


def test_borrow_initializes_an_eagle3_vocabulary():
    head = made_eagle3(draft_size=4)
    target = drawn(VOCABULARY, HIDDEN, seed=8)
    head.borrow(target)
    assert torch.equal(head.lm_head.weight, target[[1, 3, 5, 7]])
    assert head.tokens(torch.tensor([[3, 0]])).tolist() == [[7, 1]]


def test_the_default_layers_differ_from_each_other():
    assert choose_features(32) == (2, 16, 29)
    assert choose_features(61) == (2, 30, 58)
    assert choose_features(7) == (2, 3, 4)
    for layers in range(1, 80):
        chosen = choose_features(layers)
        assert len(chosen) == min(layers, 3) and sorted(set(chosen)) == list(chosen)
        assert chosen[0] >= 1 and chosen[-1] <= layers - (layers > 3)


def test_errors_name_what_does_not_fit():
    head = made_eagle3(target_hidden_size=WIDE, embedding=True, target_name="little")
    head.check_target(WIDE, VOCABULARY, 9)
    with pytest.raises(ValueError, match="for little, whose hidden size is 12; this target's is 8"):
        head.check_target(HIDDEN, VOCABULARY, 9)
    with pytest.raises(ValueError, match="reads layer 9; this target has 8 layers"):
        head.check_target(WIDE, VOCABULARY, 8)
    faults: list[tuple[dict[str, Any], str]] = [
        ({"features": (2, 2, 3)}, r"\[2, 2, 3\]; it must be ascending"),
        ({"features": ()}, "must be ascending"),
        ({"output": "own"}, "has one output matrix"),
        ({"output": "target", "draft_size": 5}, "needs its own output matrix"),
        ({"fc_norm": True, "norm_before_fc": True}, "choose one"),
        ({"target_hidden_size": WIDE}, "needs its own embeddings"),
    ]
    for settings, fault in faults:
        with pytest.raises(ValueError, match=fault):
            made_eagle3(**settings)
