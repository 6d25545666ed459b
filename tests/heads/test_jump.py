"""Jump heads begin as a layer of the target between linear maps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from decode import Target
from decode.models.stock_model import capture_features, find_decoder
from heads.jump import EXACT, JumpConfig, LayerCopy, choose_jump, copy_layer
from tests.support.drafting import LAYER
from tests.support.models import VOCABULARY, tiny
from tests.support.training_runs import FIRST, train_predictable, walk
from training.data import Example
from training.factory import make_head

LAYERS = 3


def read_around(target: Target, number: int) -> tuple[Tensor, Tensor]:
    """The states below and above a layer, on a text."""
    tokens = torch.randint(FIRST, VOCABULARY, (1, 20), generator=torch.Generator().manual_seed(0))
    with capture_features(target.model, (number, number + 1)) as captured, torch.no_grad():
        target.model(input_ids=tokens)
    return captured[number], captured[number + 1]


def copy_middle(name: str) -> tuple[LayerCopy | None, Target]:
    target = Target(tiny(name, num_hidden_layers=LAYERS), accelerate="off")
    layer = find_decoder(target.model)[1][1]
    return copy_layer(layer, target.config.to_dict(), *read_around(target, 1)), target


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral", "granite", "phi3", "gemma2", "olmo2", "gpt2"])
def test_a_layer_is_copied_if_ours_computes_the_same(name: str) -> None:
    copy, target = copy_middle(name)
    assert (copy is not None) == (name in ("llama", "qwen2", "qwen3", "mistral"))
    if copy is not None:
        layer = find_decoder(target.model)[1][1]
        assert copy.tensors.keys() == layer.state_dict().keys()
        for name, tensor in layer.state_dict().items():
            torch.testing.assert_close(copy.tensors[name], tensor)


def test_a_copied_layer_keeps_its_window() -> None:
    """Where some layers of the target have one: what a window hides must not count as another computation."""
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    target = Target(
        tiny("qwen2", num_hidden_layers=LAYERS, use_sliding_window=True, sliding_window=8, layer_types=kinds),
        accelerate="off",
    )
    seen = [Example(tuple(walk(start, 40)), ((1, 40),)) for start in range(FIRST, 30)]
    windows = {}
    for number in (0, 1):
        layer = find_decoder(target.model)[1][number]
        copy = copy_layer(layer, target.config.to_dict(), *read_around(target, number))
        assert copy is not None
        windows[number] = copy.config.window
    assert windows == {0: None, 1: 8}
    other = Target(tiny("mistral", num_hidden_layers=LAYERS, sliding_window=8), accelerate="off")  # the config has it
    assert make_head("jump", other, seen, None).window == 8
    assert [make_head("jump", target, seen, None, window=own).window for own in (None, 4)] == [8, 4]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_of_a_target_with_packed_weights_is_copied(dtype: torch.dtype) -> None:
    """Also next to biases that are much larger than they are."""
    model = tiny("qwen2", num_hidden_layers=LAYERS, dtype=dtype)
    own = {name: tensor.clone() for name, tensor in find_decoder(model)[1][1].state_dict().items()}
    for name, tensor in find_decoder(model)[1][1].named_parameters():
        if name.endswith("k_proj.bias"):
            own[name] = tensor.data.mul_(64).clone()
    target = Target(model, accelerate="packed")
    copy = copy_layer(find_decoder(target.model)[1][1], target.config.to_dict(), *read_around(target, 1))
    assert copy is not None
    torch.testing.assert_close(copy.tensors, own, rtol=0, atol=0)


def test_rotary_positions_of_another_base_are_noticed() -> None:
    """The config tells one base, the model computes with another."""
    target = Target(tiny("llama", num_hidden_layers=LAYERS), accelerate="off")
    layer, states, config = find_decoder(target.model)[1][1], read_around(target, 1), target.config.to_dict()
    config["rope_parameters"]["rope_theta"] = 3.0
    assert copy_layer(layer, config, *states) is None and EXACT < 0.1


def test_a_new_head_knows_what_linear_maps_know() -> None:
    """Half of the next tokens, on texts that it was not fitted on; chance knows one of a hundred."""
    target = Target(train_predictable(LAYERS), accelerate="off")
    seen, new = ([Example(tuple(walk(start, 40)), ((1, 40),)) for start in range(begin, 60, 2)] for begin in (FIRST, 4))
    head = make_head("jump", target, seen, None)
    assert head.features == (1, 2) and head.config.target_layers == LAYERS
    embed, right, count = target.model.get_input_embeddings(), 0, 0
    for example in new:
        tokens = torch.tensor([example.tokens])
        with capture_features(target.model, head.features) as captured, torch.no_grad():
            target.model(input_ids=tokens)
            features = torch.cat([captured[1], captured[2]], dim=-1)
            states = head(embed(tokens[:, 1:]), head.above(features[:, :-1]), torch.arange(1, 40)[None])
            found = head.logits(states[:, 2:-1]).argmax(dim=-1)
        right += int((found == tokens[:, 4:]).sum())
        count += found.numel()
    assert right / count > 0.4


@pytest.mark.parametrize(("layers", "states"), [(1, (0, 1)), (2, (0, 1)), (3, (1, 2)), (30, (20, 21)), (36, (24, 25))])
def test_the_layer_is_at_two_thirds(layers: int, states: tuple[int, int]) -> None:
    assert choose_jump(layers) == states


@pytest.mark.parametrize("features", [(1,), (2, 1), (1, 2, 3), (-2, 1)])
def test_a_head_reads_two_states(features: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="a jump head reads the states below and above a layer"):
        JumpConfig(8, 13, layer=LAYER, features=features)
