"""EAGLE heads, compared with plain tensor operations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from heads import Eagle3Config, Eagle3Head, EagleConfig, EagleHead, choose_features
from tests.support.small_heads import HIDDEN, LAYER, VOCABULARY, PlainLayer, close, drawn, made

WIDE = 12  # a target's hidden size that differs from the head's


class Reference(PlainLayer):
    """A head in plain tensor operations."""

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
def test_states_and_logits_match_the_reference(kind, settings):
    head = made(kind, **settings)
    reference, matrix = Reference(head), head.output_layer(0)[0]
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
