"""Scaled rotary positions, compared with transformers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from heads.rope import rotate
from tests.support.small_heads import LAYER, LLAMA3, YARN, drawn


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
