"""Folders of EAGLE heads: round trip, the tensors and config that vLLM and SGLang read, and faults."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig

from decode import Target
from heads import RopeScaling, load_head, save_head
from proposers.load import load_proposer
from tests.heads.test_eagle_heads import LAYER, WIDE, made_eagle, made_eagle3
from tests.heads.test_eagle_layouts import CONFIG, NAMED, READ, SPECULATORS, assert_same, name_eagle, name_official
from tests.heads.test_head_layouts import Tensors, write
from tests.heads.test_heads import HIDDEN, VOCABULARY, drawn
from tests.support.models import VOCABULARY as TINY
from tests.support.models import tiny

HEADS: dict[str, Any] = {
    "eagle": lambda: made_eagle(target_layers=6, target_name="little", max_position_embeddings=512),
    "eagle with all options": lambda: made_eagle(
        replace(LAYER, qkv_bias=True, input_norm=True, rope_scaling=RopeScaling("yarn", 2.0, 64)),
        bias=True,
        draft_size=5,
    ),
    "eagle3": lambda: made_eagle3(draft_size=5, target_layers=12, target_name="little"),
    "eagle3 with the target's matrix": lambda: made_eagle3(output="target"),
    "eagle3 with all options": lambda: made_eagle3(
        replace(LAYER, qkv_bias=True, qk_norm=True, rope_scaling=RopeScaling("llama3", 8.0, 64)),
        **dict.fromkeys(("embedding", "bias", "fc_norm", "norm_before_residual", "normed_feedback"), True),
        target_hidden_size=WIDE,
        features=(1, 2),
    ),
    "eagle3 without a norm": lambda: made_eagle3(norm_before_fc=True, final_norm=False),
}


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_saved_eagle_head_loads_bit_exact(tmp_path, name, dtype):
    head = HEADS[name]()
    save_head(head, tmp_path, dtype)
    loaded = load_head(tmp_path)
    assert type(loaded) is type(head) and loaded.config == head.config
    stored, states = head.to(dtype or torch.float64).state_dict(), loaded.state_dict()
    assert states.keys() == stored.keys()
    assert all(torch.equal(states[key], state) and states[key].dtype == state.dtype for key, state in stored.items())
    save_head(loaded, tmp_path)
    if dtype is None:
        assert_same(load_head(tmp_path), head)


SERVED = replace(LAYER, num_attention_heads=4)  # LlamaConfig needs a divisor of the hidden size


def list_layer(prefix: str, config: dict[str, Any], inputs: int) -> dict[str, list[int]]:
    """The tensors of the decoder layer that a server builds from the config."""
    hidden, size, inner = config["hidden_size"], config["head_dim"], config["intermediate_size"]
    wide, narrow = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    return {
        f"{prefix}self_attn.q_proj.weight": [wide, inputs * hidden],
        f"{prefix}self_attn.k_proj.weight": [narrow, inputs * hidden],
        f"{prefix}self_attn.v_proj.weight": [narrow, inputs * hidden],
        f"{prefix}self_attn.o_proj.weight": [hidden, wide],
        f"{prefix}mlp.gate_proj.weight": [inner, hidden],
        f"{prefix}mlp.up_proj.weight": [inner, hidden],
        f"{prefix}mlp.down_proj.weight": [hidden, inner],
        f"{prefix}post_attention_layernorm.weight": [hidden],
    }


def read_saved(head: Any, folder: Path) -> tuple[dict[str, Any], dict[str, list[int]], dict[str, Tensor]]:
    save_head(head, folder)
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    assert (
        config["num_hidden_layers"] == 1
        and config["tie_word_embeddings"] is False
        and config["attention_bias"] is False
    )
    assert (config["vocab_size"], config["hidden_size"], config["rope_theta"]) == (VOCABULARY, HIDDEN, 50.0)
    parsed = AutoConfig.from_pretrained(folder)
    assert parsed.model_type == "llama" and parsed.rope_parameters["rope_theta"] == 50.0
    assert parsed.dtype == torch.float64
    return config, {name: list(tensor.shape) for name, tensor in tensors.items()}, tensors


@pytest.mark.parametrize("draft_size", [None, 5])
def test_servers_can_read_an_eagle_head(tmp_path, draft_size):
    config, shapes, tensors = read_saved(made_eagle(SERVED, draft_size=draft_size), tmp_path)
    assert config["architectures"] == ["LlamaForCausalLMEagle", "LlamaForCausalLM"]
    assert not config["draftless"]["bias"] and config["max_position_embeddings"] == 131_072
    fusing = {"fc.weight": [HIDDEN, 2 * HIDDEN], "fc.bias": [HIDDEN]}
    assert shapes == list_layer("layers.0.", config, 1) | fusing, "vLLM refuses unknown tensors such as lm_head"
    assert not tensors["fc.bias"].any(), "SGLang needs a bias"


def test_an_eagle_head_with_a_bias_does_not_name_vllms_class(tmp_path):
    config, shapes, _ = read_saved(made_eagle(SERVED, bias=True), tmp_path)
    assert config["architectures"] == ["LlamaForCausalLMEagle"] and config["draftless"]["bias"] and "fc.bias" in shapes


@pytest.mark.parametrize("draft_size", [None, 5])
@pytest.mark.parametrize("scaling", [None, RopeScaling("llama3", 8.0, 64)])
def test_servers_can_read_an_eagle3_head(tmp_path, draft_size, scaling):
    head = made_eagle3(replace(SERVED, rope_scaling=scaling), draft_size=draft_size, max_position_embeddings=512)
    config, shapes, tensors = read_saved(head, tmp_path)
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["max_position_embeddings"] == 512
    assert config["draft_vocab_size"] == (draft_size or VOCABULARY)
    assert (
        config[READ] == [2, 5, 9] and config["eagle_config"][READ] == [1, 4, 8] and config["num_aux_hidden_states"] == 3
    )
    assert not any(config[flag] for flag in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"))
    assert (config["rope_scaling"] or {}).get("rope_type", "default") == config["rope_parameters"]["rope_type"]
    more = {f"midlayer.{name}.weight": [HIDDEN] for name in ("input_layernorm", "hidden_norm")}
    more |= {"fc.weight": [HIDDEN, 3 * HIDDEN], "norm.weight": [HIDDEN], "lm_head.weight": [head.draft_size, HIDDEN]}
    if draft_size:
        more |= {"d2t": [5], "t2d": [VOCABULARY]}
        assert (tensors["d2t"].dtype, tensors["t2d"].dtype) == (torch.int64, torch.bool)
        assert tensors["d2t"].tolist() == [1, 2, 3, 4, 5], "offsets"
        assert tensors["t2d"].nonzero().flatten().tolist() == [1, 3, 5, 7, 9]
    assert shapes == list_layer("midlayer.", config, 2) | more


def test_the_targets_matrix_is_not_saved(tmp_path):
    config, shapes, _ = read_saved(made_eagle3(SERVED, output="target"), tmp_path)
    assert config["draft_vocab_size"] is None and "lm_head.weight" not in shapes


EAGLE, EAGLE3 = name_eagle(made_eagle()), name_official(made_eagle3(draft_size=5))
OTHER = {f"layers.1{name[8:]}": tensor for name, tensor in EAGLE3.items() if name.startswith("midlayer.mlp")}


def spoil(tensors: Tensors, *dropped: str, **changed: Any) -> Tensors:
    return {name: tensor for name, tensor in {**tensors, **changed}.items() if name not in dropped}


@pytest.mark.parametrize(
    ("tensors", "config", "fault"),
    [
        (EAGLE, {}, "missing: fc.bias, which is required unless its config has bias: false"),
        (spoil(EAGLE, "layers.0.mlp.up_proj.weight"), {"bias": False}, "missing: layers.0.mlp.up_proj.weight$"),
        (spoil(EAGLE, "fc.weight"), {"bias": False}, "of no known head"),
        (spoil(EAGLE, what=drawn(3)), {"bias": False}, "unexpected: what$"),
        (spoil(EAGLE, **{"lm_head.weight": drawn(13, 8)}), {"bias": False}, "unexpected: lm_head.weight$"),
        (
            spoil(EAGLE, **{"embed_tokens.weight": drawn(VOCABULARY, 9)}),
            {"bias": False},
            r"wrong: embed_tokens.weight is \[13, 9\], not \[13, 8\]$",
        ),
        (spoil(EAGLE, "embed_tokens.weight"), {"bias": False, "vocab_size": None}, "pass vocab_size="),
        (EAGLE, {"bias": False, "hidden_act": "gelu"}, "hidden_act: 'gelu'; only silu"),
        (EAGLE, {"bias": False, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type is 'dynamic'; it can"),
        (EAGLE, {"bias": False, "rope_scaling": {"type": "linear"}}, "'linear' without a factor"),
        (EAGLE, {"bias": False, "rope_scaling": {"type": "yarn", "factor": 2, "mscale": 1}}, "'mscale': 1"),
        (spoil(EAGLE3, "d2t", "t2d"), {}, "missing: d2t, which must map the 5 rows of lm_head.weight to 13 tokens"),
        (
            spoil(EAGLE3, "lm_head.weight"),
            {},
            "missing: lm_head.weight, which a draft vocabulary of 5 tokens needs",
        ),
        (spoil(EAGLE3, t2d=torch.ones(13, dtype=torch.bool)), {}, "d2t and t2d are of different tokens"),
        (spoil(EAGLE3, "t2d", d2t=torch.arange(5) * 9), {}, "must be a list of different tokens, each below 13"),
        (spoil(EAGLE3, "t2d", d2t=drawn(5)), {}, "its d2t is .5. of torch.float64; it must be a list of offsets"),
        (spoil(EAGLE3, "midlayer.hidden_norm.weight"), {}, "missing: midlayer.hidden_norm.weight$"),
        (spoil(EAGLE3, "norm.weight"), {}, "missing: norm.weight$"),
        (EAGLE3, {"norm_before_fc": True}, "missing: input_norm.weight$"),
        (EAGLE3, {"fc_norm": True}, "missing: fc_norm.0.weight, fc_norm.1.weight, fc_norm.2.weight$"),
        (EAGLE3, {"target_hidden_size": 12}, "fc.weight has 24 columns, but it reads 3 layers of 12"),
        (EAGLE3, {READ: [1, 2, 3, 4, 5]}, "fc.weight has 24 columns, but it reads 5 layers of 4"),
        (EAGLE3, {READ: [1, 2]}, "fc.weight's 24 columns and 2 layers .* hidden size is 12, and its own is 8$"),
        (EAGLE3, {READ: [9, 5, 2]}, r"\[9, 5, 2\]; it must be ascending"),
        (EAGLE3, {READ: "all"}, "'all'; it must be a list of layers"),
        (spoil(EAGLE3, **OTHER), {}, "unexpected: layers.1.mlp.down_proj.weight, "),
        (EAGLE3, {**SPECULATORS, "turbo": True}, "its config has turbo: true, which is unknown; known are"),
        (
            EAGLE3,
            {"speculators_model_type": "peagle"},
            "it is speculators' peagle head; only their eagle3 is supported",
        ),
        (EAGLE, {"speculators_model_type": "dflash"}, "it is speculators' dflash head; only their eagle3 is supported"),
    ],
)
def test_a_faulty_eagle_folder_is_named(tmp_path, tensors, config, fault):
    write(tmp_path, "model.safetensors", tensors, {**CONFIG, READ: [2, 5, 9], **config})
    with pytest.raises(ValueError, match=fault) as error:
        load_head(tmp_path)
    assert str(tmp_path) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("name", NAMED)
def test_truncated_eagle_files(tmp_path, name):
    write(tmp_path, name, EAGLE3, {**CONFIG, READ: [2, 5, 9]})
    load_head(tmp_path)
    intact = (tmp_path / name).read_bytes()
    for size in (0, 7, len(intact) // 2, len(intact) - 1):
        (tmp_path / name).write_bytes(intact[:size])
        with pytest.raises(ValueError, match=f"{name} is damaged"):
            load_head(tmp_path)


@pytest.mark.parametrize(("kind", "other"), [("eagle", "eagle3"), ("eagle3", "eagle")])
def test_a_head_of_another_kind_is_refused(tmp_path, kind, other):
    save_head(HEADS[kind](), tmp_path)
    assert load_head(tmp_path).kind == kind
    target = Target(tiny("llama", hidden_size=HIDDEN, vocab_size=TINY))
    with pytest.raises(ValueError, match=f"is of kind {kind}, not {other}"):
        load_proposer(other, target, head=tmp_path)


def test_a_token_map_of_strings_is_refused(tmp_path):
    save_head(made_eagle(draft_size=5), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    config["draftless"]["token_map"] = ["1"]
    with pytest.raises(ValueError, match="token_map must be a list of tokens"):
        load_head(write(tmp_path, "model.safetensors", tensors, config))
