"""EAGLE heads in every published format: files built here with the published names load bit-exact."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from heads import LayerConfig, RopeScaling, load_head
from tests.heads.test_eagle_heads import LAYER, WIDE, made_eagle, made_eagle3
from tests.heads.test_head_layouts import Tensors, write
from tests.heads.test_heads import HIDDEN, VOCABULARY, drawn

READ = "eagle_aux_hidden_state_layer_ids"
# As published: a copy of the target's config, whose numbers of layers and key-value heads are wrong for the head.
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "intermediate_size": 77,
    "num_attention_heads": 6,
    "num_key_value_heads": 1,
    "num_hidden_layers": 40,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-3,
    "rope_theta": 50.0,
    "vocab_size": VOCABULARY,
}
SPECULATORS: dict[str, Any] = {
    "architectures": ["Eagle3DraftModel"],
    "speculators_model_type": "eagle3",
    "speculators_version": "0.9.0",
    "draft_vocab_size": 5,
    READ: [2, 5, 9],
    "target_hidden_size": None,
    "norm_before_fc": False,
    "fc_norm": False,
    "embed_requires_grad": False,
    "tie_word_embeddings": False,
    "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "little"}},
    "transformer_layer_config": {
        **{name: value for name, value in CONFIG.items() if name not in ("architectures", "rope_theta")},
        "head_dim": 4,
        "rope_parameters": {"rope_theta": 50.0, "rope_type": "default"},
        "rope_scaling": None,
    },
}
NAMED = ["model.safetensors", "pytorch_model.bin"]


def name_official(head: Any, prefix: str = "midlayer.") -> Tensors:
    """An EAGLE-3 head's tensors as its authors and SpecForge name them, or with speculators' prefix."""
    states = {name.replace("midlayer.", prefix): state for name, state in head.state_dict().items()}
    tokens = states.pop("token_map", None)
    if tokens is not None:
        mask = torch.zeros(VOCABULARY, dtype=torch.bool)
        mask[tokens] = True
        states |= {"d2t": tokens - torch.arange(len(tokens)), "t2d": mask}
    return states


def name_eagle(head: Any) -> Tensors:
    states = {name: state for name, state in head.state_dict().items() if name != "token_map"}
    return {"embed_tokens.weight": drawn(VOCABULARY, HIDDEN, seed=5), **states}


def assert_same(loaded: Any, head: Any) -> None:
    """Logits after a state was fed back are bit-equal."""
    assert type(loaded) is type(head) and loaded.features == head.features
    if head.output == "target":
        loaded.borrow(drawn(VOCABULARY, HIDDEN, seed=7))
    features = drawn(2, 6, head.target_hidden_size * len(head.features))
    embedded = drawn(2, 6, HIDDEN, seed=2)
    outputs = []
    for each in (loaded, head):
        states = each(embedded, each.fuse(features), torch.arange(6)[None])
        states = each(embedded, states, torch.arange(1, 7)[None])
        outputs.append(each.logits(states))
    assert torch.equal(*outputs)
    every = torch.arange(head.draft_size)
    assert torch.equal(loaded.tokens(every), head.tokens(every))


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("config", [{"bias": False}, {"bias": True}, {}])
@pytest.mark.parametrize("embedding", [True, False])
def test_published_eagle(tmp_path, name, config, embedding):
    head = made_eagle(bias=config.get("bias", True))
    tensors = name_eagle(head)
    if not embedding:
        del tensors["embed_tokens.weight"]
    loaded = load_head(write(tmp_path, name, tensors, {**CONFIG, **config}))
    assert loaded.config == head.config
    assert_same(loaded, head)
    with pytest.raises(ValueError, match=f"vocabulary size is {VOCABULARY}; this target's is 99"):
        loaded.check_target(HIDDEN, 99, 40)


def test_eagle_of_qwen2_with_all_its_key_value_heads(tmp_path):
    layer = replace(LAYER, qkv_bias=True, num_key_value_heads=6, rope_theta=10_000.0)
    head = made_eagle(layer)
    config = {
        **CONFIG,
        "bias": False,
        "qkv_bias": True,
        "num_key_value_heads": None,
        "head_dim": 99,
        "rope_theta": None,
    }
    loaded = load_head(write(tmp_path, "pytorch_model.bin", name_eagle(head), config))
    assert loaded.config == head.config, "no rope_theta means 10000"
    assert_same(loaded, head)


@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_eagle_with_scaled_positions(tmp_path, key):
    layer = replace(LAYER, rope_scaling=RopeScaling("linear", 4.0))
    head = made_eagle(layer)
    config = {**CONFIG, "bias": False, "rope_scaling": {key: "linear", "factor": 4.0}}
    loaded = load_head(write(tmp_path, "pytorch_model.bin", name_eagle(head), config))
    assert loaded.config == head.config
    assert_same(loaded, head)


@pytest.mark.parametrize(
    "parameters", [{"full_attention": {"rope_theta": 9.0}}, {"rope_type": "default", "partial_rotary_factor": 0.5}]
)
def test_unknown_positions_are_refused(tmp_path, parameters):
    config = {**CONFIG, "bias": False, "rope_parameters": parameters}
    folder = write(tmp_path, "pytorch_model.bin", name_eagle(made_eagle(LAYER)), config)
    with pytest.raises(ValueError, match=r"has rotary positions .*; supported are rope_theta and"):
        load_head(folder)


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("prefix", ["midlayer.", "layers.0."])
def test_published_eagle3(tmp_path, name, prefix):
    head = made_eagle3(draft_size=5, features=(2, 16, 29))
    tensors = name_official(head, prefix) | {"embed_tokens.weight": drawn(VOCABULARY, HIDDEN)}
    config = {**CONFIG, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 5}
    write(tmp_path, name, tensors, config)
    with pytest.raises(ValueError, match=f"the layers it reads; pass layers=, or add {READ}"):
        load_head(tmp_path)
    loaded = load_head(tmp_path, layers=32)
    assert loaded.config == head.config
    assert_same(loaded, head)


def test_eagle3_of_the_whole_vocabulary(tmp_path):
    for output in ("shared", "target"):
        head = made_eagle3(output=output)
        loaded = load_head(write(tmp_path, "model.safetensors", name_official(head), {**CONFIG, READ: [2, 5, 9]}))
        assert loaded.config == head.config
        assert_same(loaded, head)


@pytest.mark.parametrize(
    "config",
    [
        {READ: [2, 5, 9]},
        {"eagle_config": {READ: [1, 4, 8]}},
        {READ: [2, 5, 9], "eagle_config": {READ: [1, 4, 8]}},
        {READ: [2, 5, 9], "eagle_config": {READ: [2, 5, 9]}},
    ],
)
def test_both_numberings_of_layers(tmp_path, config):
    head = made_eagle3(draft_size=5)
    loaded = load_head(write(tmp_path, "model.safetensors", name_official(head), {**CONFIG, **config}), layers=99)
    assert loaded.features == (2, 5, 9)


@pytest.mark.parametrize("dropped", [["t2d"], ["d2t"], []])
def test_every_form_of_a_draft_vocabulary(tmp_path, dropped):
    head = made_eagle3(draft_size=5)
    tensors = {name: tensor for name, tensor in name_official(head).items() if name not in dropped}
    loaded = load_head(write(tmp_path, "model.safetensors", tensors, {**CONFIG, READ: [2, 5, 9]}))
    assert_same(loaded, head)
    assert loaded.token_map is not None and loaded.token_map.tolist() == [1, 3, 5, 7, 9]


@pytest.mark.parametrize(
    ("settings", "config"),
    [
        ({}, {"norm_before_residual": False}),
        ({"norm_before_residual": True}, {}),
        ({"norm_before_residual": True, "norm_before_fc": True}, {"norm_before_residual": True}),
        ({"norm_before_residual": True, "fc_norm": True}, {"norm_output": False}),
        ({"norm_before_residual": True, "normed_feedback": True}, {"norm_output": True}),
    ],
)
def test_flags_of_speculators(tmp_path, settings, config):
    head = made_eagle3(draft_size=5, target_name="little", **settings)
    flags = {name: settings[name] for name in ("norm_before_fc", "fc_norm") if name in settings}
    tensors = name_official(head, "layers.0.") | {"embed_tokens.weight": drawn(VOCABULARY, HIDDEN)}
    loaded = load_head(write(tmp_path, "model.safetensors", tensors, {**SPECULATORS, **flags, **config}))
    assert loaded.config == head.config
    assert_same(loaded, head)


@pytest.mark.parametrize(
    ("settings", "config", "prefix"),
    [
        ({}, {"norm_output": True}, "midlayer."),
        ({"final_norm": False}, {"norm_output": False}, "midlayer."),
        ({"normed_feedback": True}, {"norm_output": True}, "layers.0."),
        ({}, {"norm_output": False}, "layers.0."),
        ({"fc_norm": True, "normed_feedback": True}, {"norm_output": True, "fc_norm": True}, "midlayer."),
        ({"fc_norm": True}, {"norm_output": False, "fc_norm": True}, "midlayer."),
        ({"norm_before_residual": True}, {"norm_before_residual": True}, "midlayer."),
    ],
)
def test_flags_of_flat_configs(tmp_path, settings, config, prefix):
    """`norm_output` is about the input of the output matrix in SpecForge, and about the feedback in servers."""
    head = made_eagle3(draft_size=5, **settings)
    tensors = {"norm.weight": drawn(HIDDEN), **name_official(head, prefix)}
    loaded = load_head(write(tmp_path, "model.safetensors", tensors, {**CONFIG, READ: [2, 5, 9], **config}))
    assert loaded.config == head.config
    assert_same(loaded, head)


def test_eagle3_of_other_sizes(tmp_path):
    layer = replace(LAYER, num_attention_heads=3, num_key_value_heads=1, head_dim=6, qk_norm=True)
    head = made_eagle3(layer, draft_size=5, target_hidden_size=WIDE, embedding=True, features=(1, 17, 33, 35))
    config = {**CONFIG, "num_attention_heads": 40, READ: [1, 17, 33, 35]}
    for more in ({}, {"target_hidden_size": WIDE}):
        loaded = load_head(write(tmp_path, "model.safetensors", name_official(head), {**config, **more}))
        assert loaded.config == head.config
        assert_same(loaded, head)
        loaded.check_target(WIDE, VOCABULARY, 36)


def test_trained_embeddings_are_kept(tmp_path):
    head = made_eagle3(draft_size=5, embedding=True, norm_before_residual=True, target_name="little")
    tensors = name_official(head, "layers.0.")
    for trained in (True, False):
        loaded = load_head(write(tmp_path, NAMED[0], tensors, {**SPECULATORS, "embed_requires_grad": trained}))
        assert (loaded.embed_tokens is not None) == trained


def test_shapes_come_before_the_config(tmp_path):
    """The config's head_dim was ignored in training, and its num_attention_heads is wrong."""
    head = made_eagle3(LayerConfig(4, 2, 6, 10, 50.0, 1e-3), draft_size=5)
    config = {**CONFIG, READ: [2, 5, 9], "num_attention_heads": 4, "head_dim": 12}
    assert load_head(write(tmp_path, NAMED[0], name_official(head), config)).config == head.config
