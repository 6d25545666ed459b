"""Scaled rotary positions, compared with transformers."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from heads import RopeScaling
from heads.rope import rotary_table, rotate
from tests.support.small_heads import drawn


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 3.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.5,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 8.0,
            "beta_slow": 2.0,
        },
        {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 99, "attention_factor": 1.5},
    ],
)
def test_scaled_positions_match_transformers(scaling):
    config = LlamaConfig(hidden_size=32, num_attention_heads=1, head_dim=32, max_position_embeddings=512)
    config.rope_parameters = {"rope_theta": 500.0, **scaling}
    frequencies, strength = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, "cpu")
    states, positions = drawn(1, 1, 6, 32), torch.tensor([[0, 1, 2, 7, 60, 200]])
    angles = positions[:, None, :, None] * frequencies.double()
    first, second = states.split(16, dim=-1)
    rotated = torch.cat(
        [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], dim=-1
    )
    ours = rotate(states, rotary_table(positions, 32, 500.0, RopeScaling(**scaling), states.dtype))
    assert torch.allclose(ours, strength * rotated, rtol=0, atol=1e-4)


def test_errors_name_what_a_scaling_lacks():
    with pytest.raises(ValueError, match="rope_type is 'dynamic'; it can be default, linear, llama3, yarn"):
        RopeScaling("dynamic", 2.0)
    with pytest.raises(ValueError, match="'yarn' needs original_max_position_embeddings"):
        RopeScaling("yarn", 2.0)
