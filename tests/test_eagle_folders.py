"""Folders of EAGLE heads: what comes back, what vLLM and SGLang find in them, and all that can be wrong with them."""

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
from tests.models import VOCABULARY as TINY
from tests.models import tiny
from tests.test_eagle_heads import LAYER, WIDE, made_eagle, made_eagle3
from tests.test_eagle_layouts import NAMED, READ, SAID, SPECULATORS, assert_same, name_eagle, name_official
from tests.test_head_layouts import Tensors, write
from tests.test_heads import HIDDEN, VOCABULARY, drawn

HEADS: dict[str, Any] = {
    "eagle": lambda: made_eagle(target_layers=6, target_name="little", max_position_embeddings=512),
    "eagle with all": lambda: made_eagle(
        replace(LAYER, qkv_bias=True, input_norm=True, rope_scaling=RopeScaling("yarn", 2.0, 64)),
        bias=True,
        draft_size=5,
    ),
    "eagle3": lambda: made_eagle3(draft_size=5, target_layers=12, target_name="little"),
    "eagle3 of the target's matrix": lambda: made_eagle3(output="target"),
    "eagle3 with all": lambda: made_eagle3(
        replace(LAYER, qkv_bias=True, qk_norm=True, rope_scaling=RopeScaling("llama3", 8.0, 64)),
        **dict.fromkeys(("embedding", "bias", "fc_norm", "norm_before_residual", "normed_feedback"), True),
        target_hidden_size=WIDE,
        features=(1, 2),
    ),
    "eagle3 without a norm": lambda: made_eagle3(norm_before_fc=True, final_norm=False),
}


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_an_eagle_head_comes_back_as_it_was(tmp_path, name, dtype):
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


SERVED = replace(LAYER, num_attention_heads=4)  # transformers' LlamaConfig wants a divisor of the hidden size


def list_layer(prefix: str, said: dict[str, Any], inputs: int) -> dict[str, list[int]]:
    """The tensors of a server's decoder layer, by its config alone."""
    hidden, size, inner = said["hidden_size"], said["head_dim"], said["intermediate_size"]
    wide, narrow = said["num_attention_heads"] * size, said["num_key_value_heads"] * size
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
    said = json.loads((folder / "config.json").read_text())
    assert said["num_hidden_layers"] == 1 and said["tie_word_embeddings"] is False and said["attention_bias"] is False
    assert (said["vocab_size"], said["hidden_size"], said["rope_theta"]) == (VOCABULARY, HIDDEN, 50.0)
    understood = AutoConfig.from_pretrained(folder)
    assert understood.model_type == "llama" and understood.rope_parameters["rope_theta"] == 50.0
    assert understood.dtype == torch.float64
    return said, {name: list(tensor.shape) for name, tensor in tensors.items()}, tensors


@pytest.mark.parametrize("draft_size", [None, 5])
def test_servers_find_an_eagle_head(tmp_path, draft_size):
    said, shapes, tensors = read_saved(made_eagle(SERVED, draft_size=draft_size), tmp_path)
    assert said["architectures"] == ["LlamaForCausalLMEagle", "LlamaForCausalLM"]
    assert not said["draftless"]["bias"] and said["max_position_embeddings"] == 131_072
    fusing = {"fc.weight": [HIDDEN, 2 * HIDDEN], "fc.bias": [HIDDEN]}
    assert shapes == list_layer("layers.0.", said, 1) | fusing, "vLLM refuses what it does not know, such as lm_head"
    assert not tensors["fc.bias"].any(), "SGLang has a bias"


def test_vllm_is_not_named_where_it_would_drop_a_bias(tmp_path):
    said, shapes, _ = read_saved(made_eagle(SERVED, bias=True), tmp_path)
    assert said["architectures"] == ["LlamaForCausalLMEagle"] and said["draftless"]["bias"] and "fc.bias" in shapes


@pytest.mark.parametrize("draft_size", [None, 5])
@pytest.mark.parametrize("scaling", [None, RopeScaling("llama3", 8.0, 64)])
def test_servers_find_an_eagle3_head(tmp_path, draft_size, scaling):
    head = made_eagle3(replace(SERVED, rope_scaling=scaling), draft_size=draft_size, max_position_embeddings=512)
    said, shapes, tensors = read_saved(head, tmp_path)
    assert said["architectures"] == ["LlamaForCausalLMEagle3"] and said["max_position_embeddings"] == 512
    assert said["draft_vocab_size"] == (draft_size or VOCABULARY)
    assert said[READ] == [2, 5, 9] and said["eagle_config"][READ] == [1, 4, 8] and said["num_aux_hidden_states"] == 3
    assert not any(said[flag] for flag in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"))
    assert (said["rope_scaling"] or {}).get("rope_type", "default") == said["rope_parameters"]["rope_type"]
    more = {f"midlayer.{name}.weight": [HIDDEN] for name in ("input_layernorm", "hidden_norm")}
    more |= {"fc.weight": [HIDDEN, 3 * HIDDEN], "norm.weight": [HIDDEN], "lm_head.weight": [head.draft_size, HIDDEN]}
    if draft_size:
        more |= {"d2t": [5], "t2d": [VOCABULARY]}
        assert (tensors["d2t"].dtype, tensors["t2d"].dtype) == (torch.int64, torch.bool)
        assert tensors["d2t"].tolist() == [1, 2, 3, 4, 5], "offsets"
        assert tensors["t2d"].nonzero().flatten().tolist() == [1, 3, 5, 7, 9]
    assert shapes == list_layer("midlayer.", said, 2) | more


def test_the_targets_matrix_is_not_written(tmp_path):
    said, shapes, _ = read_saved(made_eagle3(SERVED, output="target"), tmp_path)
    assert said["draft_vocab_size"] is None and "lm_head.weight" not in shapes


EAGLE, EAGLE3 = name_eagle(made_eagle()), name_official(made_eagle3(draft_size=5))
OTHER = {f"layers.1{name[8:]}": tensor for name, tensor in EAGLE3.items() if name.startswith("midlayer.mlp")}


def spoil(tensors: Tensors, *dropped: str, **changed: Any) -> Tensors:
    return {name: tensor for name, tensor in {**tensors, **changed}.items() if name not in dropped}


@pytest.mark.parametrize(
    ("tensors", "said", "fault"),
    [
        (EAGLE, {}, "missing: fc.bias, which it must have unless its config says bias: false"),
        (spoil(EAGLE, "layers.0.mlp.up_proj.weight"), {"bias": False}, "missing: layers.0.mlp.up_proj.weight$"),
        (spoil(EAGLE, "fc.weight"), {"bias": False}, "no head's that is known"),
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
        (spoil(EAGLE3, "d2t", "t2d"), {}, "missing: d2t, which must say what the 5 tokens of lm_head.weight of 13 are"),
        (
            spoil(EAGLE3, "lm_head.weight"),
            {},
            "missing: lm_head.weight, which it must have for its own vocabulary of 5",
        ),
        (spoil(EAGLE3, t2d=torch.ones(13, dtype=torch.bool)), {}, "d2t and t2d are of different tokens"),
        (spoil(EAGLE3, "t2d", d2t=torch.arange(5) * 9), {}, "must be a list of different tokens, each below 13"),
        (spoil(EAGLE3, "t2d", d2t=drawn(5)), {}, "its d2t is .5. of torch.float64; it must be a list of offsets"),
        (spoil(EAGLE3, "midlayer.hidden_norm.weight"), {}, "missing: midlayer.hidden_norm.weight$"),
        (spoil(EAGLE3, "norm.weight"), {}, "missing: norm.weight$"),
        (EAGLE3, {"norm_before_fc": True}, "missing: input_norm.weight$"),
        (EAGLE3, {"fc_norm": True}, "missing: fc_norm.0.weight, fc_norm.1.weight, fc_norm.2.weight$"),
        (EAGLE3, {"target_hidden_size": 12}, "fc.weight has 24 columns, and it reads 3 layers of 12"),
        (EAGLE3, {READ: [1, 2, 3, 4, 5]}, "fc.weight has 24 columns, and it reads 5 layers of 4"),
        (EAGLE3, {READ: [1, 2]}, "fc.weight's 24 columns and 2 layers .* hidden size is 12, and its own is 8$"),
        (EAGLE3, {READ: [9, 5, 2]}, r"\[9, 5, 2\]; they must be ascending"),
        (EAGLE3, {READ: "all"}, "'all'; that must be a list of layers"),
        (spoil(EAGLE3, **OTHER), {}, "unexpected: layers.1.mlp.down_proj.weight, "),
        (EAGLE3, {**SPECULATORS, "turbo": True}, "its config says turbo: true, which is not known; known are"),
        (EAGLE3, {"speculators_model_type": "peagle"}, "it is speculators' peagle head; of theirs, eagle3 can be"),
        (EAGLE, {"speculators_model_type": "dflash"}, "it is speculators' dflash head; of theirs, eagle3 can be"),
    ],
)
def test_what_is_wrong_with_an_eagle_folder_is_named(tmp_path, tensors, said, fault):
    write(tmp_path, "model.safetensors", tensors, {**SAID, READ: [2, 5, 9], **said})
    with pytest.raises(ValueError, match=fault) as error:
        load_head(tmp_path)
    assert str(tmp_path) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("name", NAMED)
def test_eagle_files_that_are_cut_short(tmp_path, name):
    write(tmp_path, name, EAGLE3, {**SAID, READ: [2, 5, 9]})
    load_head(tmp_path)
    whole = (tmp_path / name).read_bytes()
    for size in (0, 7, len(whole) // 2, len(whole) - 1):
        (tmp_path / name).write_bytes(whole[:size])
        with pytest.raises(ValueError, match=f"{name} is damaged"):
            load_head(tmp_path)


@pytest.mark.parametrize(("kind", "other"), [("eagle", "eagle3"), ("eagle3", "eagle")])
def test_one_kind_is_not_taken_for_the_other(tmp_path, kind, other):
    save_head(HEADS[kind](), tmp_path)
    assert load_head(tmp_path).kind == kind
    target = Target(tiny("llama", hidden_size=HIDDEN, vocab_size=TINY))
    with pytest.raises(ValueError, match=f"is of kind {kind}, not {other}"):
        load_proposer(other, target, head=tmp_path)


def test_an_empty_note_of_a_token_map_is_refused(tmp_path):
    save_head(made_eagle(draft_size=5), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    said = json.loads((tmp_path / "config.json").read_text())
    said["draftless"]["token_map"] = ["1"]
    with pytest.raises(ValueError, match="token_map must be a list of tokens"):
        load_head(write(tmp_path, "model.safetensors", tensors, said))
