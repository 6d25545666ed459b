"""FlashMap heads: folders as their authors' package saves them, and the logits that it computes from them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from heads import FlashMapHead, load_head, save_head
from heads.checkpoint import find_kind, read_target
from heads.layer_cache import heads_of
from tests.support.published_heads import write
from tests.support.small_heads import assert_same, drawn

HIDDEN, VOCABULARY, SLOTS, LAYERS, WIDTH, INNER, CONDITION, TIMES = 12, 17, 3, 2, 16, 20, 6, 8
CONFIG: dict[str, Any] = {
    "architectures": ["FlashMapDraftModel"],
    "model_type": "flashmap",
    "target_model": "Qwen/Qwen3-4B",
    "target_hidden_size": HIDDEN,
    "vocab_size": VOCABULARY,
    "target_layer_ids": [0, 2],
    "block_size": SLOTS,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "intermediate_size": INNER,
    "cond_dim": CONDITION,
    "time_embed_dim": TIMES,
    "time_scale": 100.0,
    "rope_theta": 50.0,
    "rms_norm_eps": 1e-3,
    "qk_norm_eps": 1e-2,
    "layer_norm_eps": 1e-4,
    "noise_gate": "jump",
    "num_steps": 1,
    "jump_grids": {"1": [0.0, 1.0], "2": [0.0, 0.8, 1.0]},
}
# The first logits of each slot, from flashmap 0.1.0: `FlashMapDraftModel.draft` of the folder below, in float32.
EXPECTED = [
    [1.35754, -4.86706, 9.92748, 6.02812, -7.15044, -3.00258],
    [1.62262, -5.03767, 10.03991, 6.19873, -7.21952, -2.98778],
    [1.5558, -4.84098, 10.07213, 6.07569, -7.0638, -3.12006],
]


def linear(name: str, rows: int, columns: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}


def make_tensors() -> dict[str, Tensor]:
    """Random weights by the published names."""
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (WIDTH, 2 * HIDDEN), "noise_gate": (1,)}
    shapes |= {f"{name}_norm.weight": (WIDTH,) for name in ("hidden", "anchor")}
    shapes |= {f"{name}_norm.weight": (HIDDEN,) for name in ("state", "noise")}
    shapes |= linear("anchor_proj", WIDTH, HIDDEN) | linear("x_embed", WIDTH, HIDDEN) | linear("head", HIDDEN, WIDTH)
    shapes |= linear("final_adaln.linear", 3 * WIDTH, CONDITION)
    for name in ("time_embed", "jump_embed"):
        shapes |= linear(f"{name}.linear_1", CONDITION, TIMES) | linear(f"{name}.linear_2", CONDITION, CONDITION)
    for layer in (f"layers.{number}." for number in range(LAYERS)):
        for part in ("self_attn", "cross_attn", "mlp"):
            shapes |= linear(f"{layer}{part}_adaln.linear", 3 * WIDTH, CONDITION)
        for part in ("self_attn", "cross_attn"):
            shapes |= {f"{layer}{part}.{name}_proj.weight": (WIDTH, WIDTH) for name in "qkvo"}
            shapes |= {f"{layer}{part}.{name}_norm.weight": (WIDTH // 2,) for name in "qk"}
        shapes |= linear(f"{layer}mlp.fc1", INNER, WIDTH) | linear(f"{layer}mlp.fc2", WIDTH, INNER)
    return {name: (drawn(*shape, seed=i) / 2).float() for i, (name, shape) in enumerate(sorted(shapes.items()))}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path, "model.safetensors", make_tensors(), CONFIG)


def make_inputs() -> tuple[Tensor, ...]:
    """A text's features, the anchor, the noise of a block, and the target's embeddings and output matrix."""
    shapes = (1, 5, 2 * HIDDEN), (1, SLOTS, VOCABULARY), (VOCABULARY, HIDDEN), (VOCABULARY, HIDDEN)
    features, noise, *matrices = (drawn(*shape, seed=100 + i).float() for i, shape in enumerate(shapes))
    return features, torch.tensor([4]), noise, *matrices


@torch.no_grad()
def draft(head: Any) -> Tensor:
    """The logits [L, V] of a block after the text."""
    features, anchor, noise, embeddings, output = make_inputs()
    head.borrow(output)
    count = features.shape[1]
    head.starts = torch.zeros(count + 1 + SLOTS, WIDTH)
    head.starts[count + 1 :] = head.start(embeddings.mean(dim=0), noise @ embeddings)[0]
    read = torch.cat([head.fuse(features), head.fuse_anchor(embeddings[anchor][None])], dim=1)
    text = head.read(read, torch.arange(count + 1)[None])
    logits: Tensor = head.logits(head(count + 1 + torch.arange(SLOTS)[None], partial(see, text)))
    return logits[0]


def see(text: tuple[Tensor, Tensor], queries: Tensor, layer: int) -> Tensor:
    """Attention to a text and the anchor."""
    keys, values = (each[:, heads_of(layer, queries)] for each in text)
    return torch.nn.functional.scaled_dot_product_attention(queries, keys, values)


def test_a_published_folder_has_the_logits_of_its_authors(folder: Path, tmp_path: Path) -> None:
    assert find_kind(folder) == "flashmap"
    assert (read_target(folder).target_name, read_target(folder).hidden_size) == ("Qwen/Qwen3-4B", HIDDEN)
    head = load_head(folder)
    assert isinstance(head, FlashMapHead) and head.features == (1, 3)
    logits = draft(head)
    torch.testing.assert_close(logits[:, : len(EXPECTED[0])], torch.tensor(EXPECTED), rtol=1e-5, atol=1e-5)
    save_head(head, tmp_path / "saved")
    saved = load_head(tmp_path / "saved")
    assert_same(saved, head)
    assert torch.equal(draft(saved), logits)


def test_noise_is_as_the_embedding_of_a_whole_block_of_it(folder: Path) -> None:
    """Its covariance is that of x E with x ~ N(0, 1), and another head of the same weights draws the same."""
    head, embeddings, seen = load_head(folder), make_inputs()[3], list[Tensor]()
    head.noise_norm.register_forward_pre_hook(lambda _, inputs: seen.extend(inputs))
    head.draw(embeddings)
    again = load_head(folder)
    again.draw(embeddings)
    assert torch.equal(head.starts, again.starts)
    covariance, expected = seen[0].T @ seen[0] / len(seen[0]), embeddings.T @ embeddings
    assert torch.dist(covariance, expected) < 0.3 * expected.norm()


@pytest.mark.parametrize(
    ("changed", "config", "fault"),
    [
        ({"noise_norm.weight": None}, {}, "missing: noise_norm.weight$"),
        ({"layers.1.mlp_adaln.linear.bias": None}, {}, "missing: layers.1.mlp_adaln.linear.bias$"),
        ({"x_embed.bias": None}, {}, "missing: x_embed.bias$"),
        ({"more.weight": drawn(2)}, {}, "unexpected: more.weight$"),
        ({"head.weight": drawn(7, WIDTH)}, {}, r"wrong: head.weight is \[7, 16\], not \[12, 16\]$"),
        ({"time_embed.linear_2.weight": drawn(5, 6)}, {}, "wrong: its tensors do not fit together"),
        ({}, {"num_steps": 2}, "num_steps: 2; drafts take one jump: write 1$"),
        ({"layers.1.self_attn.q_norm.weight": drawn(3)}, {}, "wrong: its tensors do not fit together"),
        ({"time_embed.linear_1.weight": drawn(6)}, {}, "wrong: its tensors do not fit together"),
        ({}, {"num_attention_heads": 4}, "num_attention_heads: 4, its layers 16 channels in heads of 8$"),
        ({}, {"block_size": None}, "its config lacks block_size$"),
        ({}, {"target_layer_ids": None}, "its config has target_layer_ids: None; it must be a list of layers$"),
        ({}, {"target_layer_ids": [0, 2, 3]}, "it reads 3 layers of 12: .* a list of 2 would be right$"),
    ],
)
def test_faults_are_named(tmp_path: Path, changed: dict[str, Any], config: dict[str, Any], fault: str) -> None:
    tensors = {name: tensor for name, tensor in {**make_tensors(), **changed}.items() if tensor is not None}
    with pytest.raises(ValueError, match=fault):
        load_head(write(tmp_path, "model.safetensors", tensors, CONFIG | config))
