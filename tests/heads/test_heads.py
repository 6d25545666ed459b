"""Medusa, Hydra and the layer cache, compared with a reference in plain Python, in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from heads import HydraConfig, HydraHead, LayerCache, LayerConfig, MedusaConfig, MedusaHead
from heads.layer_cache import hide
from heads.layers import DecoderLayer

HIDDEN, VOCABULARY = 8, 13
PREFIX = LayerConfig(
    num_attention_heads=6, num_key_value_heads=2, head_dim=4, intermediate_size=10, rope_theta=50.0, rms_norm_eps=1e-3
)
Vector = list[float]


def randomised(module: nn.Module, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.double().parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 2
    return module


def made_hydra(**settings: Any) -> HydraHead:
    return randomised(HydraHead(HydraConfig(HIDDEN, VOCABULARY, **settings)))


def drawn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def silu(number: float) -> float:
    return number / (1 + math.exp(-number))


def multiply(matrix: Tensor, vector: Vector, bias: Tensor | None = None) -> Vector:
    plus = [0.0] * len(matrix) if bias is None else bias.tolist()
    return [
        sum(a * b for a, b in zip(row, vector, strict=True)) + c for row, c in zip(matrix.tolist(), plus, strict=True)
    ]


def add(one: Vector, other: Vector) -> Vector:
    return [a + b for a, b in zip(one, other, strict=True)]


def step(state: Vector, weight: Tensor, bias: Tensor | None) -> Vector:
    return add(state, [silu(number) for number in multiply(weight, state, bias)])


def norm(vector: Vector, weight: Tensor, eps: float) -> Vector:
    size = math.sqrt(sum(number**2 for number in vector) / len(vector) + eps)
    return [number / size * factor for number, factor in zip(vector, weight.tolist(), strict=True)]


def rotate_pairs(vector: Vector, position: int, theta: float) -> Vector:
    half = len(vector) // 2
    rotated = list(vector)
    for pair in range(half):
        angle = position / theta ** (2 * pair / len(vector))
        a, b = vector[pair], vector[pair + half]
        rotated[pair] = a * math.cos(angle) - b * math.sin(angle)
        rotated[pair + half] = b * math.cos(angle) + a * math.sin(angle)
    return rotated


def run_prefix_layer(states: dict[str, Tensor], features: list[Vector], config: LayerConfig) -> list[Vector]:
    """Reference prefix layer for one row, without cache, batch and padding."""
    weights = {name.removeprefix("prefix."): weight for name, weight in states.items()}
    attention = {name: weights[f"layer.self_attn.{name}_proj.weight"] for name in "qkvo"}
    size, eps = config.head_dim, config.rms_norm_eps
    share = config.num_attention_heads // config.num_key_value_heads
    normed = [norm(feature, weights["layer.input_layernorm.weight"], eps) for feature in features]

    def part(name: str, place: int, head: int) -> Vector:
        return multiply(attention[name], normed[place])[head * size : (head + 1) * size]

    outputs = []
    for place, feature in enumerate(features):
        mixed: Vector = []
        for head in range(config.num_attention_heads):
            query = rotate_pairs(part("q", place, head), place, config.rope_theta)
            keys = [rotate_pairs(part("k", past, head // share), past, config.rope_theta) for past in range(place + 1)]
            scores = [math.exp(sum(a * b for a, b in zip(query, key, strict=True)) / math.sqrt(size)) for key in keys]
            values = [part("v", past, head // share) for past in range(place + 1)]
            mixed += [sum(s * v[i] for s, v in zip(scores, values, strict=True)) / sum(scores) for i in range(size)]
        state = add(feature, multiply(attention["o"], mixed))
        inner = norm(state, weights["layer.post_attention_layernorm.weight"], eps)
        gate, up = (multiply(weights[f"layer.mlp.{name}_proj.weight"], inner) for name in ("gate", "up"))
        gated = [silu(a) * b for a, b in zip(gate, up, strict=True)]
        state = add(state, multiply(weights["layer.mlp.down_proj.weight"], gated))
        outputs.append(norm(state, weights["norm.weight"], eps))
    return outputs


def close(tensor: Tensor, expected: Any) -> bool:
    return bool((tensor - torch.tensor(expected, dtype=torch.float64)).abs().max() < 1e-12)


@pytest.mark.parametrize("output", ["own", "shared", "target"])
@pytest.mark.parametrize("draft_size", [None, 5])
@pytest.mark.parametrize(("layers", "bias"), [(1, True), (3, False)])
def test_medusa_matches_the_reference(output, draft_size, layers, bias):
    config = MedusaConfig(HIDDEN, VOCABULARY, 3, layers, output, bias, draft_size=draft_size)
    head = randomised(MedusaHead(config))
    target = drawn(VOCABULARY, HIDDEN, seed=2)
    if draft_size:
        head.token_map = torch.tensor([0, 3, 4, 9, 12])
    if output == "target":
        head.borrow(target)
    features = drawn(2, 4, HIDDEN)
    states = head(features)
    assert states.shape == (2, 4, 3, HIDDEN)
    weights = head.state_dict()
    for index in range(3):
        matrix = {
            "own": weights.get(f"lm_heads.{index}.weight"),
            "shared": weights.get("lm_head.weight"),
            "target": target[[0, 3, 4, 9, 12]] if draft_size else target,
        }[output]
        state = features[1, 2].tolist()
        for layer in range(layers):
            name = f"blocks.{index}.layers.{layer}"
            state = step(state, weights[f"{name}.weight"], weights.get(f"{name}.bias"))
        assert close(states[1, 2, index], state)
        assert close(head.logits(states[..., index, :], index)[1, 2], multiply(matrix, state))


@pytest.mark.parametrize("projected", [True, False])
@pytest.mark.parametrize("layers", [1, 3])
def test_hydra_matches_the_reference(projected, layers):
    head = made_hydra(heads=3, layers=layers, output="own", output_bias=True, projected=projected)
    weights = head.state_dict()
    features, embedded = drawn(2, HIDDEN), drawn(2, 3, HIDDEN, seed=2)
    for index in range(3):
        seen = [*features[1].tolist(), *embedded[1, : index + 1].flatten().tolist()]
        grounded = f"grounded.{index}"
        activated = [
            silu(x) for x in multiply(weights[f"{grounded}.linear.weight"], seen, weights[f"{grounded}.linear.bias"])
        ]
        residual = features[1].tolist()
        if projected:
            residual = multiply(weights[f"{grounded}.residual.weight"], seen, weights[f"{grounded}.residual.bias"])
        state = add(residual, activated)
        for layer in range(layers - 1):
            name = f"blocks.{index}.layers.{layer}"
            state = step(state, weights[f"{name}.weight"], weights[f"{name}.bias"])
        states = head(features, embedded[:, : index + 1], index)
        assert close(states[1], state)
        matrix, bias = (weights[f"lm_heads.{index}.{part}"] for part in ("weight", "bias"))
        assert close(head.logits(states, index)[1], multiply(matrix, state, bias))


def test_the_prefix_layer_matches_the_reference():
    head = made_hydra(prefix=PREFIX)
    features = drawn(2, 7, HIDDEN)
    contextual = head.contextualize(features)
    for row in range(2):
        assert close(contextual[row], run_prefix_layer(head.state_dict(), features[row].tolist(), PREFIX))
    padded = torch.cat([features[:, :4], torch.full_like(features[:, 4:], 1e6)], dim=1)
    assert torch.equal(head.contextualize(padded)[:, :4], contextual[:, :4]), "nothing attends to padding on the right"


def test_a_cached_prefix_equals_the_whole_prefix():
    head = made_hydra(prefix=PREFIX)
    features = drawn(3, 600, HIDDEN)
    whole = head.contextualize(features)
    generator = torch.Generator().manual_seed(0)
    cache, rows = LayerCache(3), [0, 1, 2]
    for step_number in range(60):
        counts = torch.randint(0, 9, (len(rows),), generator=generator).tolist()
        width = max(*counts, 1)
        new = torch.full((len(rows), width, HIDDEN), math.pi, dtype=torch.float64)
        before = cache.lengths
        for place, row in enumerate(rows):
            new[place, : counts[place]] = features[row, before[place] : before[place] + counts[place]]
        contextual = head.contextualize(new, cache, counts)
        for place, row in enumerate(rows):
            expected = whole[row, before[place] : before[place] + counts[place]]
            assert torch.allclose(contextual[place, : counts[place]], expected, rtol=0, atol=1e-12)
        if step_number % 7 == 3:
            cache.crop([max(0, length - 5) for length in cache.lengths])
        if step_number == 50:
            rows = [2, 0]
            cache.select(rows)
    assert min(cache.lengths) > 0 and cache.keys is not None and not cache.keys.requires_grad
    assert len(cache.lengths) == 2 and cache.keys.shape[2] == 256


def test_a_cache_keeps_its_content_when_it_grows():
    head = made_hydra(prefix=PREFIX)
    features = drawn(2, 600, HIDDEN)
    cache = LayerCache(2)
    parts = [head.contextualize(part, cache) for part in features.split([250, 10, 1, 339], dim=1)]
    assert cache.lengths == [600, 600]
    assert torch.allclose(torch.cat(parts, dim=1), head.contextualize(features), rtol=0, atol=1e-12)


def test_a_draft_tree_attends_to_the_cache_without_changing_it():
    layer = randomised(DecoderLayer(HIDDEN, PREFIX))
    stem, one, other = drawn(1, 5, HIDDEN), drawn(1, 1, HIDDEN, seed=2), drawn(1, 1, HIDDEN, seed=3)
    cache = LayerCache(1)
    layer(stem, torch.arange(5)[None], context=cache)
    cache.keep([5])
    hidden = torch.tensor([[0, 0, 0, 0, 0, 0, 1], [0, 0, 0, 0, 0, 1, 0]], dtype=torch.bool)
    mask = hide(hidden, torch.float64)[None, None]
    for _ in range(2):  # the second pass overwrites the first
        tried = layer(torch.cat([one, other], dim=1), torch.tensor([[5, 5]]), mask, cache)
        for place, node in enumerate((one, other)):
            path = layer(torch.cat([stem, node], dim=1), torch.arange(6)[None])
            assert torch.allclose(tried[:, place], path[:, 5], rtol=0, atol=1e-12)


def test_new_heads_return_their_input():
    features, embedded = drawn(2, 3, HIDDEN), drawn(2, 3, 2, HIDDEN, seed=2)
    medusa = MedusaHead(MedusaConfig(HIDDEN, VOCABULARY, layers=2)).double()
    assert all(torch.equal(medusa(features)[..., index, :], features) for index in range(4))
    for projected in (True, False):
        hydra = HydraHead(HydraConfig(HIDDEN, VOCABULARY, layers=2, projected=projected)).double()
        assert torch.equal(hydra(features, embedded, 1), features)
        assert hydra.contextualize(features, LayerCache(2), [1, 3]) is features
    prefixed = HydraHead(HydraConfig(HIDDEN, VOCABULARY, prefix=PREFIX)).double()
    sizes = (features.square().mean(-1, keepdim=True) + PREFIX.rms_norm_eps).sqrt()
    assert torch.allclose(prefixed.contextualize(features), features / sizes, rtol=0, atol=1e-12)


def test_gradients_reach_the_prefix_layer():
    head = made_hydra(prefix=PREFIX)
    head.contextualize(drawn(2, 4, HIDDEN)).square().sum().backward()
    assert all(parameter.grad is not None for parameter in head.prefix.parameters())


def test_bfloat16_distinguishes_positions_beyond_256():
    head = made_hydra(prefix=PREFIX).bfloat16()
    features = drawn(1, 600, HIDDEN).bfloat16()
    contextual, exact = head.contextualize(features), head.double().contextualize(features.double())
    assert (contextual.double() - exact)[:, 300:].abs().mean() < 0.02


def test_borrow_initializes_own_and_shared_matrices():
    target = drawn(VOCABULARY, HIDDEN)
    for output in ("own", "shared"):
        head = made_hydra(output=output, draft_size=3, output_bias=True)
        head.token_map = torch.tensor([1, 5, 12])
        head.borrow(target)
        assert all(torch.equal(head.output_layer(index)[0], target[[1, 5, 12]]) for index in range(4))
        assert not head.output_layer(3)[1].any()
        head.borrow(target, target[:, 0])
        assert torch.equal(head.output_layer(3)[1], target[[1, 5, 12], 0])
        assert head.tokens(torch.tensor([[2, 0]])).tolist() == [[12, 1]]


def test_errors_name_what_does_not_fit():
    head = MedusaHead(MedusaConfig(HIDDEN, VOCABULARY, output="target", target_layers=6, target_name="little"))
    head.check_target(HIDDEN, VOCABULARY, 6)
    with pytest.raises(ValueError, match="for little, whose hidden size is 8; this target's is 16"):
        head.check_target(16, VOCABULARY, 6)
    with pytest.raises(ValueError, match="vocabulary size is 13; this target's is 14"):
        head.check_target(HIDDEN, 14, 6)
    with pytest.raises(ValueError, match="number of layers is 6; this target's is 7"):
        head.check_target(HIDDEN, VOCABULARY, 7)
    MedusaHead(MedusaConfig(HIDDEN, VOCABULARY)).check_target(HIDDEN, VOCABULARY, 99)
    with pytest.raises(ValueError, match="pass it to borrow"):
        head.logits(drawn(1, HIDDEN), 0)
    with pytest.raises(ValueError, match=r"\[8, 13\]; this head needs \[13, 8\]"):
        head.borrow(drawn(HIDDEN, VOCABULARY))
    with pytest.raises(ValueError, match="choose own, shared or target"):
        MedusaHead(MedusaConfig(HIDDEN, VOCABULARY, output="mine"))
    with pytest.raises(ValueError, match="draft_size is 14; it must be from 1 to the vocabulary size, 13"):
        MedusaHead(MedusaConfig(HIDDEN, VOCABULARY, draft_size=14))
    with pytest.raises(ValueError, match="6 attention heads cannot share 4"):
        LayerConfig(6, 4, 8, 10)
    with pytest.raises(ValueError, match="head_dim is 7"):
        LayerConfig(6, 3, 7, 10)
