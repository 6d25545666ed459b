"""Heads of every kind, the layer cache and rotary positions, compared with plain tensor operations, in float64."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from heads import (
    Eagle3Config,
    Eagle3Head,
    EagleConfig,
    EagleHead,
    LayerCache,
    LayerConfig,
    MedusaConfig,
    MedusaHead,
    choose_features,
)
from heads.layers import rotate
from heads.medusa import HydraConfig, HydraHead
from tests.support.small_heads import HIDDEN, LAYER, LLAMA3, VOCABULARY, YARN, PlainLayer, close, drawn, made, silu

WIDE = 12  # a target's hidden size that differs from the head's


@pytest.mark.parametrize("output", ["own", "shared", "target"])
@pytest.mark.parametrize("draft_size", [None, 5])
@pytest.mark.parametrize(("layers", "bias"), [(1, True), (3, False)])
def test_medusa_matches_the_reference(output, draft_size, layers, bias):
    head = made("medusa", layers=layers, output=output, bias=bias, draft_size=draft_size)
    features, weights = drawn(2, 4, HIDDEN), head.state_dict()
    states = head(features)
    for index in range(3):
        matrix = {
            "own": weights.get(f"lm_heads.{index}.weight"),
            "shared": weights.get("lm_head.weight"),
            "target": drawn(VOCABULARY, HIDDEN, seed=7)[slice(None) if head.token_map is None else head.token_map],
        }[output]
        state = features
        for layer in range(layers):
            name = f"blocks.{index}.layers.{layer}"
            state = state + silu(state @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0))
        assert close(states[..., index, :], state)
        assert close(head.logits(states[..., index, :], index), state @ matrix.T)


@pytest.mark.parametrize("projected", [True, False])
@pytest.mark.parametrize("layers", [1, 3])
def test_hydra_matches_the_reference(projected, layers):
    head = made("hydra", layers=layers, output="own", output_bias=True, projected=projected)
    weights = head.state_dict()

    def multiply(name, states):
        return states @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    features, embedded = drawn(2, HIDDEN), drawn(2, 3, HIDDEN, seed=2)
    for index in range(3):
        seen = torch.cat([features, *embedded[:, : index + 1].unbind(1)], dim=-1)
        residual = multiply(f"grounded.{index}.residual", seen) if projected else features
        state = residual + silu(multiply(f"grounded.{index}.linear", seen))
        for layer in range(layers - 1):
            state = state + silu(multiply(f"blocks.{index}.layers.{layer}", state))
        states = head(features, embedded[:, : index + 1], index)
        assert close(states, state)
        assert close(head.logits(states, index), multiply(f"lm_heads.{index}", state))


def test_the_prefix_layer_matches_the_reference():
    head = made("hydra", prefix=LAYER)
    features, layer = drawn(2, 7, HIDDEN), PlainLayer(LAYER, head.state_dict(), "prefix.layer.")
    contextual = head.contextualize(features)
    layer.weights["norm.weight"] = head.prefix["norm"].weight
    for row, found in zip(features, contextual, strict=True):
        assert close(found, layer.norm("norm", layer.run(row, layer.norm("input_layernorm", row))))
    padded = torch.cat([features[:, :4], torch.full_like(features[:, 4:], 1e6)], dim=1)
    assert torch.equal(head.contextualize(padded)[:, :4], contextual[:, :4]), "nothing attends to padding on the right"


class EagleReference(PlainLayer):
    def __init__(self, head: Any) -> None:
        self.head, self.eagle3 = head.config, head.kind == "eagle3"
        super().__init__(head.config.layer, head.state_dict(), "midlayer." if self.eagle3 else "layers.0.")

    def fuse(self, features: Tensor) -> Tensor:
        if not self.eagle3:
            return features
        parts = features.chunk(len(self.head.features), dim=-1)
        joined = torch.cat([self.norm(f"fc_norm.{index}", part) for index, part in enumerate(parts)], dim=-1)
        return self.multiply("fc", self.norm("input_norm", joined))

    def run_head(self, embedded: Tensor, features: Tensor) -> Tensor:
        if not self.eagle3:
            fused = self.multiply("fc", torch.cat([embedded, features], dim=-1))
            return self.run(fused, self.norm("input_layernorm", fused))
        normed = self.norm("hidden_norm", features)
        joined = torch.cat([self.norm("input_layernorm", embedded), normed], dim=-1)
        states = self.run(normed if self.head.norm_before_residual else features, joined)
        return self.norm("norm", states) if self.head.normed_feedback else states

    def logits(self, states: Tensor, matrix: Tensor) -> Tensor:
        is_normed = not self.eagle3 or self.head.normed_feedback
        return (states if is_normed else self.norm("norm", states)) @ matrix.T


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("eagle", {}),
        ("eagle", {"layer": {"qkv_bias": True, "num_key_value_heads": 6}, "bias": True}),
        ("eagle", {"layer": {"qk_norm": True, "input_norm": True}, "draft_size": 5}),
        ("eagle3", {"draft_size": 5}),
        ("eagle3", {"layer": {"qkv_bias": True}, "bias": True, "fc_norm": True, "normed_feedback": True}),
        ("eagle3", {"layer": {"qk_norm": True}, "norm_before_residual": True, "norm_before_fc": True}),
        ("eagle3", {"target_hidden_size": WIDE, "embedding": True, "features": (0, 3, 4, 7, 8)}),
        ("eagle3", {"layer": {"num_attention_heads": 2}, "final_norm": False, "output": "target", "features": (1, 2)}),
    ],
)
def test_eagle_matches_the_reference(kind, settings):
    head = made(kind, **settings)
    reference, matrix = EagleReference(head), head.output_layer(0)[0]
    if kind == "eagle":
        whole = drawn(VOCABULARY, HIDDEN, seed=7)
        assert torch.equal(matrix, whole if head.token_map is None else whole[head.token_map])
        assert head.features == (-1,)
    assert (head.embed_tokens is not None) == settings.get("embedding", False)
    embedded, features = drawn(2, 7, HIDDEN, seed=2), drawn(2, 7, head.target_hidden_size * len(head.features), seed=3)
    states = head(embedded, head.fuse(features), torch.arange(7)[None])
    again = head(embedded, states, torch.arange(7)[None])  # states are fed back
    for row in range(2):
        expected = reference.run_head(embedded[row], reference.fuse(features[row]))
        assert close(states[row], expected)
        assert close(head.logits(states)[row], reference.logits(expected, matrix))
        assert close(again[row], reference.run_head(embedded[row], expected))


def test_cached_rows_of_different_lengths_equal_the_whole_texts():
    """Rows grow differently, are padded with nonsense, lose tokens, and leave."""
    head, features, embedded = made("eagle3"), drawn(3, 600, HIDDEN), drawn(3, 600, HIDDEN, seed=2)
    whole = head(embedded, features, torch.arange(600)[None])
    generator = torch.Generator().manual_seed(0)
    cache, rows = LayerCache(3), [0, 1, 2]
    for step in range(60):
        counts = torch.randint(0, 9, (len(rows),), generator=generator).tolist()
        before, new = cache.lengths, torch.full((2, len(rows), max(*counts, 1), HIDDEN), math.pi).double()
        parts = [slice(start, start + count) for start, count in zip(before, counts, strict=True)]
        for place, row in enumerate(rows):
            for filled, given in zip(new, (features, embedded), strict=True):
                filled[place, : counts[place]] = given[row, parts[place]]
        states = head(new[1], new[0], cache.positions(new.shape[2], new.device), cache.attend)
        cache.keep(counts)
        for place, row in enumerate(rows):
            assert close(states[place, : counts[place]], whole[row, parts[place]])
        if step % 7 == 3:
            cache.crop([max(0, length - 5) for length in cache.lengths])
        if step == 50:
            rows = [2, 1]
            cache.select(rows)
    assert min(cache.lengths) > 0 and cache.held is not None and not cache.held[0].requires_grad
    assert len(cache.lengths) == 2 and cache.held[0].shape[2] == 256


def read_on(head: Any, features: Tensor, cache: LayerCache) -> Tensor:
    """The prefix layer's states, after the tokens in a cache, which keeps the new ones."""
    states: Tensor = head.contextualize(features, cache.positions(features.shape[1], features.device), cache.attend)
    cache.keep([features.shape[1]] * len(features))
    return states


def test_rows_of_another_cache_are_added():
    """Of any length and allocation, which grows; also to and from a cache that nothing was written to."""
    head, features = made("hydra", prefix=LAYER), drawn(4, 900, HIDDEN)
    whole, lengths, cache = head.contextualize(features), [0, 700, 5, 300], LayerCache(1)
    for row, length in enumerate(lengths[1:], start=1):
        other = LayerCache(1)
        for part in features[row : row + 1, :length].split(200, dim=1):
            read_on(head, part, other)
        cache.add_rows(1)
        if length:
            cache.fill([row], other)
    cache.add_rows(2)
    assert cache.lengths == [*lengths, 0, 0]
    rows = [0, 1, 2, 3, 0, 1]
    new = torch.stack([features[row, length : length + 3] for row, length in zip(rows, cache.lengths, strict=True)])
    states = read_on(head, new, cache)
    for place, (row, length) in enumerate(zip(rows, [*lengths, 0, 0], strict=True)):
        assert close(states[place], whole[row, length : length + 3])


def test_a_cache_stays_in_its_place_when_rows_leave_and_join():
    """CUDA graphs write to it. What a row leaves there, NaN for example, does no harm to the next."""
    head, features = made("hydra", prefix=LAYER), drawn(3, 40, HIDDEN)
    whole, cache = head.contextualize(features), LayerCache(3)
    read_on(head, features, cache)
    held = cache.held
    assert held is not None
    for place in held:
        place[1] = math.nan
    other = LayerCache(1)
    read_on(head, features[1:2, :30], other)
    cache.select([0, 2])
    cache.add_rows(1)
    cache.fill([2], other)
    cache.crop([20, 25, 30])
    new = torch.stack([features[row, length : length + 9] for row, length in zip((0, 2, 1), (20, 25, 30), strict=True)])
    states = read_on(head, new, cache)
    for place, (row, length) in enumerate(((0, 20), (2, 25), (1, 30))):
        assert close(states[place], whole[row, length : length + 9])
    cache.restart(2)
    assert close(read_on(head, features[:2], cache), whole[:2]) and cache.held is held


def test_new_heads_return_their_input():
    features, embedded = drawn(2, 3, HIDDEN), drawn(2, 3, 2, HIDDEN, seed=2)
    medusa = MedusaHead(MedusaConfig(HIDDEN, VOCABULARY, layers=2)).double()
    assert all(torch.equal(medusa(features)[..., index, :], features) for index in range(4))
    for projected in (True, False):
        hydra = HydraHead(HydraConfig(HIDDEN, VOCABULARY, layers=2, projected=projected)).double()
        assert torch.equal(hydra(features, embedded, 1), features)
        assert hydra.contextualize(features) is features
    prefixed = HydraHead(HydraConfig(HIDDEN, VOCABULARY, prefix=LAYER)).double()
    sizes = (features.square().mean(-1, keepdim=True) + LAYER.rms_norm_eps).sqrt()
    assert close(prefixed.contextualize(features), features / sizes)


def test_new_heads_repeat_their_deepest_feature():
    embedded, features = drawn(2, 4, HIDDEN), drawn(2, 4, 3 * HIDDEN, seed=2)
    eagle = EagleHead(EagleConfig(HIDDEN, VOCABULARY, replace(LAYER, input_norm=False), bias=True)).double()
    assert torch.equal(eagle(embedded, features[..., :HIDDEN], torch.arange(4)[None]), features[..., :HIDDEN])
    eagle3 = Eagle3Head(Eagle3Config(HIDDEN, VOCABULARY, LAYER, (2, 5, 9))).double()
    assert torch.equal(eagle3(embedded, eagle3.fuse(features), torch.arange(4)[None]), features[..., -HIDDEN:])


def test_the_default_layers_differ_from_each_other():
    assert choose_features(32) == (2, 16, 29)
    assert choose_features(61) == (2, 30, 58)
    assert choose_features(7) == (2, 3, 4)
    for layers in range(1, 80):
        chosen = choose_features(layers)
        assert len(chosen) == min(layers, 3) and sorted(set(chosen)) == list(chosen)
        assert chosen[0] >= 1 and chosen[-1] <= layers - (layers > 3)


def test_bfloat16_distinguishes_positions_beyond_256():
    head = made("hydra", prefix=LAYER).bfloat16()
    features = drawn(1, 600, HIDDEN).bfloat16()
    contextual, exact = head.contextualize(features), head.double().contextualize(features.double())
    assert (contextual.double() - exact)[:, 300:].abs().mean() < 0.02


@pytest.mark.parametrize(
    ("kind", "settings"), [("hydra", {"output": "own"}), ("hydra", {"output": "shared"}), ("eagle3", {})]
)
def test_borrow_initializes_the_output_matrices(kind, settings):
    target, biased = drawn(VOCABULARY, HIDDEN), kind == "hydra"
    head = made(kind, draft_size=3, **settings, **({"output_bias": True} if biased else {}))
    head.token_map = torch.tensor([1, 5, 12])
    head.borrow(target)
    assert all(torch.equal(head.output_layer(index)[0], target[[1, 5, 12]]) for index in range(3))
    assert not biased or not head.output_layer(2)[1].any()
    head.borrow(target, target[:, 0])
    assert not biased or torch.equal(head.output_layer(2)[1], target[[1, 5, 12], 0])
    assert head.tokens(torch.tensor([[2, 0]])).tolist() == [[12, 1]]


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 3.0},
        LLAMA3,
        YARN | {"original_max_position_embeddings": 128},
        YARN | {"beta_fast": 8.0, "beta_slow": 2.0},
        YARN | {"factor": 2.0, "attention_factor": 1.5},
    ],
)
def test_scaled_positions_match_transformers(scaling):
    config = LlamaConfig(hidden_size=32, num_attention_heads=1, head_dim=32, max_position_embeddings=512)
    config.rope_parameters = {"rope_theta": 500.0, **scaling}
    frequencies, strength = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, "cpu")
    states, positions = drawn(1, 1, 6, 32), torch.tensor([[0, 1, 2, 7, 60, 200]])
    angles = positions[:, None, :, None] * frequencies.double()
    first, second = states.split(16, dim=-1)
    cosines, sines = angles.cos(), angles.sin()
    rotated = torch.cat([first * cosines - second * sines, second * cosines + first * sines], dim=-1)
    layer = replace(LAYER, head_dim=32, rope_theta=500.0, rope_scaling=scaling)
    ours = rotate(states, layer.rotary_table(positions, states.dtype))
    assert torch.allclose(ours, strength * rotated, rtol=0, atol=1e-4)


def test_errors_name_what_does_not_fit():
    head = MedusaHead(MedusaConfig(HIDDEN, VOCABULARY, output="target", target_layers=6, target_name="little"))
    head.check_target(HIDDEN, VOCABULARY, 6)
    made("medusa").check_target(HIDDEN, VOCABULARY, 99)
    eagle3 = made("eagle3", target_hidden_size=12, embedding=True)
    eagle3.check_target(12, VOCABULARY, 9)
    for call, fault in (
        (lambda: head.check_target(16, VOCABULARY, 6), "for little, whose hidden size is 8; this target's is 16"),
        (lambda: head.check_target(HIDDEN, VOCABULARY, 7), "number of layers is 6; this target's is 7"),
        (lambda: eagle3.check_target(HIDDEN, VOCABULARY, 9), "whose hidden size is 12; this target's is 8"),
        (lambda: eagle3.check_target(12, VOCABULARY, 8), "reads layer 9; this target has 8 layers"),
        (lambda: head.logits(drawn(1, HIDDEN), 0), "pass it to borrow"),
        (lambda: head.borrow(drawn(HIDDEN, VOCABULARY)), r"\[8, 13\]; this head needs \[13, 8\]"),
        (lambda: made("medusa", output="mine"), "choose own, shared or target"),
        (lambda: made("eagle3", features=(2, 2, 3)), r"\[2, 2, 3\]; it must be ascending"),
        (lambda: made("eagle3", output="own"), "has one output matrix"),
        (lambda: made("eagle3", target_hidden_size=12), "needs its own embeddings"),
        (lambda: made("eagle3", fc_norm=True, norm_before_fc=True), "choose one"),
        (lambda: LayerConfig(6, 4, 8, 10), "6 attention heads cannot share 4"),
    ):
        with pytest.raises(ValueError, match=fault):
            call()
