"""Faults in a head's folder: each one raises an error of one line that names it."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from heads import load_head
from heads.formats.eagle import READ
from tests.support import published_heads as published
from tests.support.small_heads import HIDDEN, LAYER, VOCABULARY, drawn, made

PROJECTED = {"output": "own", "output_bias": True, "projected": True}
SAVED = made("hydra", prefix=LAYER, draft_size=5)
# Intact files: tensors and config.
FILES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "none": ({}, {}),
    "medusa": (published.name_medusa(made("medusa", output="own", heads=5)), published.MEDUSA),
    "mapped": (made("medusa", draft_size=5).state_dict(), {"vocab_size": VOCABULARY, "truncated_vocab_size": 5}),
    "hydra": (published.name_hydra(made("hydra", layers=2, **PROJECTED)), published.HYDRA),
    "saved": (SAVED.state_dict(), {"draftless": {"kind": "hydra", **asdict(SAVED.config)}}),
    "eagle": (published.name_eagle(made("eagle")), published.EAGLE | {"bias": False}),
    "dflash": (published.name_eagle3(made("dflash", pair_rank=0, from_anchor=False)), published.ZLAB),
    "eagle3": (published.name_eagle3(made("eagle3", draft_size=5)), published.EAGLE | {READ: [2, 5, 9]}),
}
BLOCK = published.ZLAB["dflash_config"]
BLOCK_MASK = {"mask_token_id": 3}
WINDOWS = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 6}
MIXED = WINDOWS | {"layer_types": ["sliding_attention", "full_attention"]}
CODEBOOK = {"candidate_selector.predecessor_codebook": drawn(9, 2)}
TWO_HEADS = {name: None for name in FILES["medusa"][0] if name[0] in "12" or name == "0.1.weight"}
UNGROUNDED = {f"hydra_mlp.{i}.1.linear.weight": drawn(8, 8) for i in range(4)}
PREFIX_NORM = {"prefix_embeding_layer.norm.weight": drawn(8)}
OTHER_LAYER = {f"layers.1.mlp.{name}_proj.weight": drawn(10, 8) for name in ("gate", "up")}
NO_ATTENTION = "seems to be an EAGLE head without attention"
UNKNOWN_ROTARY = "has rotary positions .*; supported"
UNSCALED = {"max_position_embeddings": None, "rope_scaling": {"type": "yarn", "factor": 2.0}}
TURBO = {**published.SPECULATORS, "turbo": True}
INDEX = "model.safetensors.index.json"
WIDE_EMBEDDING = {"embed_tokens.weight": drawn(VOCABULARY, 9)}


@pytest.mark.parametrize(
    ("file", "changed", "config", "fault"),
    [
        ("medusa", {"3.1.weight": None}, {}, "missing: 3.1.weight$"),
        ("medusa", TWO_HEADS, {}, "missing: 0.1.weight, 1.1.weight, 2.1.weight, 1.0.linear.weight and 3 more$"),
        ("medusa", {"0.1.bias": drawn(VOCABULARY)}, {}, "unexpected: 0.1.bias$"),
        ("medusa", {"2.1.weight": drawn(7, HIDDEN)}, {}, r"wrong: 2.1.weight is \[7, 8\], not \[13, 8\]$"),
        ("medusa", {"2.1.weight": torch.ones(13, 8, dtype=torch.int8)}, {}, "2.1.weight is of torch.int8"),
        ("hydra", {"hydra_mlp.2.3.linear.bias": None}, {}, "missing: hydra_mlp.2.3.linear.bias$"),
        ("hydra", {"hydra_mlp.2.1.linear.weight": drawn(8, 8)}, {}, r"is \[8, 8\], not \[8, 32\]$"),
        ("hydra", PREFIX_NORM, {}, "missing: prefix_embeding_layer.layers"),
        ("none", UNGROUNDED, {}, "grounded_heads: false"),
        ("saved", {}, {"draftless": {"kind": "hydra", "prefix": 1}}, "section draftless is damaged"),
        ("saved", {}, {"draftless": {"kind": "hydra", "hidden_size": 8}}, "is damaged: .* argument: 'vocab_size'"),
        ("saved", {}, {"draftless": {"kind": "oak"}}, "it is of kind 'oak', which is not one of ours"),
        ("mapped", {"token_map": torch.arange(5) * 4}, {}, "must be a list of different tokens, each below 13"),
        ("mapped", {"token_map": None}, {}, "missing: token_map or d2t, which must map its 5 output rows to 13 tokens"),
        ("mapped", {}, {"vocab_size": "96"}, "vocab_size: '96'; it must be a positive number"),
        ("mapped", {}, {"draftless": 1}, "draftless: 1; it must be an object"),
        ("mapped", {}, {"draftless": {"token_map": ["1"]}}, "token_map must be a list of tokens"),
        ("mapped", {}, {"vocab_size": None}, "does not contain the target's vocabulary size"),
        ("mapped", {}, {"vocab_size": 4}, "draft_size is 5; it must be from 1 to the vocabulary size, 4"),
        ("eagle", {}, {"bias": True}, "missing: fc.bias, which is required unless its config has bias: false"),
        ("eagle", {"layers.0.self_attn.k_proj.weight": drawn(9, 8)}, {}, "24 and 9 rows, .* head_dim 128;"),
        ("eagle", {"lm_head.weight": drawn(13, 9)}, {}, r"wrong: lm_head.weight is \[13, 9\], not \[13, 8\]$"),
        ("eagle", WIDE_EMBEDDING, {}, r"wrong: embed_tokens.weight is \[13, 9\], not \[13, 8\]$"),
        ("eagle", {"embed_tokens.weight": None}, {"vocab_size": None}, "pass vocab_size="),
        ("eagle", {}, {"hidden_act": "gelu"}, "hidden_act: 'gelu'; only silu"),
        ("eagle", {}, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type is 'dynamic'; it can"),
        ("eagle", {}, UNSCALED, "'yarn' needs original_max_position_embeddings"),
        ("eagle", {}, {"rope_scaling": {"type": "linear"}}, "'linear' needs factor"),
        ("eagle", {}, {"rope_scaling": {"type": "yarn", "factor": 2, "mscale": 1}}, "'mscale': 1"),
        ("eagle", {}, {"rope_parameters": {"full_attention": {"rope_theta": 9.0}}}, UNKNOWN_ROTARY),
        ("eagle", {}, {"speculators_model_type": "dflash"}, "it is speculators' dflash head; only their eagle3"),
        ("eagle3", {}, {"speculators_model_type": "mtp"}, "it is speculators' mtp head; only their eagle3, peagle"),
        ("eagle3", {"mask_hidden": drawn(1, 1, 24)}, {}, "mask_token_id: None; it must be a token"),
        ("eagle3", {"layers.1.self_attn.o_proj.weight": drawn(8, 8)}, {}, "missing: layers.1.input_layernorm.weight, "),
        ("dflash", CODEBOOK, {"selector_top_k": 0}, "has candidates, pair_rank, taps and group, each of 1 at least"),
        ("dflash", CODEBOOK, {}, "its config has selector_top_k: None; it must be a whole number"),
        ("dflash", {"prefix_gru.weight_ih_l0": drawn(2, 8)}, {}, "it is a Domino head; DFlash, DFlash2"),
        ("dflash", {}, {"layer_types": ["chunked_attention"] * 2}, "layers have chunked_attention; only full"),
        ("dflash", {}, {"layer_types": ["sliding_attention"] * 2}, "its config has windows, but no size"),
        ("dflash", {}, {"layer_types": ["full_attention"] * 3}, "layer_types has 3 entries; the head has 2 layers"),
        ("dflash", {}, WINDOWS | {"use_sliding_window": False}, "has windows, and use_sliding_window: false"),
        ("dflash", {}, MIXED | {"is_causal": True}, "is_causal: true, which is not supported where some layers have a"),
        ("dflash", {}, {"final_logit_softcapping": "20"}, "softcapping: '20'; it must be a positive number"),
        ("dflash", {}, {"logit_scale": 0.5}, "its config has logit_scale: 0.5; only 1 is supported"),
        ("dflash", {}, {"markov_head_type": "gated"}, "its markov_head_type is 'gated'; only vanilla"),
        ("dflash", {}, {"dflash_config": BLOCK_MASK}, "must list the layers that it reads"),
        (
            *("dflash", {}, {"dflash_config": BLOCK | {"target_layer_ids": [1, 4]}}),
            r"24 columns, but it reads 2 layers of 8: dflash_config.target_layer_ids is \[1, 4\]; a list of 3 would be",
        ),
        (
            *("dflash", {}, {"dflash_config": BLOCK | {"target_layer_ids": [1, 4, 12]}}),
            r"\[1, 4, 12\]; it must be ascending layer numbers from -1 to 11, because the target has 12 layers$",
        ),
        (
            *("dflash", {}, {"dflash_config": BLOCK_MASK, "target_layer_ids": [4, 4, 8], "num_target_layers": None}),
            r" target_layer_ids: \[4, 4, 8\]; it must be ascending layer numbers from -1$",
        ),
        ("dflash", {}, {"aux_hidden_state_layer_ids": [0, 4, 13]}, r" aux_hidden_state_layer_ids: .* from 0 to 12"),
        ("dflash", {}, {"aux_hidden_state_layer_ids": []}, "must list at least one layer, .* from 0 to 12"),
        ("dflash", {}, {"aux_hidden_state_layer_ids": "all"}, "layer_ids: 'all'; it must be a list of layers$"),
        ("dflash", {}, {"num_target_layers": "many"}, "num_target_layers: 'many'; it must be a whole number$"),
        ("eagle3", {}, {READ: None, "eagle_config": {READ: [1, 4]}}, rf": eagle_config.{READ} is \[1, 4\]; a list of"),
        ("eagle3", {}, {READ: None, "eagle_config": {READ: [1, 8, 4]}}, rf"has eagle_config.{READ}: \[1, 8, 4\]; it"),
        ("eagle3", {}, {READ: [True, 2, 5]}, r"\[True, 2, 5\]; it must be a list of layers$"),
        ("dflash", {}, {"dflash_config": {"target_layer_ids": [1, 4, 8]}}, "mask_token_id: None; it must be a whole"),
        ("dflash", {}, {"dflash_config": BLOCK | {"mask_token_id": 13}}, "mask_token is 13; it must be a token of"),
        ("dflash", {}, {"block_size": 1}, "heads is 0; a head that drafts in one pass has at least one"),
        ("eagle3", {"lm_head.weight": None}, {}, "draft vocabulary needs an output matrix of its own, lm_head.weight"),
        ("eagle3", {"t2d": torch.ones(13, dtype=torch.bool)}, {}, "d2t and t2d are of different tokens"),
        ("eagle3", {"t2d": None, "d2t": drawn(5)}, {}, "its d2t is .5. of torch.float64; it must be a list of offsets"),
        ("eagle3", {"norm.weight": None}, {}, "missing: norm.weight$"),
        ("eagle3", {}, {"norm_before_fc": True}, "missing: input_norm.weight$"),
        ("eagle3", {}, {"fc_norm": True}, "missing: fc_norm.0.weight, fc_norm.1.weight, fc_norm.2.weight$"),
        ("eagle3", {}, {"target_hidden_size": 12}, "fc.weight has 24 columns, but it reads 3 layers of 12"),
        ("eagle3", {}, {READ: [1, 2]}, rf"reads 2 layers of 8: {READ} is \[1, 2\]; a list of 3 would be right$"),
        (
            *("eagle3", {}, {READ: [1, 2], "target_hidden_size": 12}),
            "hidden size is 8 and whose target's is 12 needs its own embeddings",
        ),
        ("eagle3", OTHER_LAYER, {}, "unexpected: layers.1.mlp.gate_proj.weight, "),
        ("eagle3", {}, TURBO, "its config has turbo: true, which is unknown; known are"),
        ("none", {"fc.weight": drawn(8, 16), "layers.0.mlp.up_proj.weight": drawn(8, 8)}, {}, NO_ATTENTION),
        ("none", {"model.layers.0.mlp.up_proj.weight": drawn(8, 8)}, {}, "seems to be a whole model without heads"),
        ("none", {"bert.pooler.weight": drawn(8, 8)}, {}, "of no known head: bert.pooler.weight$"),
    ],
)
@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_faulty_file_is_named(tmp_path, name, file, changed, config, fault):
    tensors, intact = FILES[file]
    tensors = {name: tensor for name, tensor in {**tensors, **changed}.items() if tensor is not None}
    published.write(tmp_path, name, tensors, intact | config)
    with pytest.raises(ValueError, match=fault) as error:
        load_head(tmp_path)
    assert str(tmp_path) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("file", [file for file in FILES if file != "none"])
def test_the_files_have_no_fault_before(tmp_path, file):
    load_head(published.write(tmp_path, "model.safetensors", *FILES[file]))


@pytest.mark.parametrize("name", ["medusa_lm_head.safetensors", "medusa_lm_head.pt", "old.pt", "pytorch_model.bin"])
def test_truncated_files_and_files_of_another_format(tmp_path, name):
    """Of each format, including that of PyTorch before 1.6."""
    file, (tensors, config) = tmp_path / name.replace("old", "medusa_lm_head"), FILES["medusa"]
    published.write(tmp_path, file.name, tensors, config)
    if name == "old.pt":
        torch.save(tensors, file, _use_new_zipfile_serialization=False)
    load_head(tmp_path)
    intact = file.read_bytes()
    sizes = (0, 1, 7, 100, len(intact) // 2, len(intact) - 100, len(intact) - 1)
    for content in (*(intact[:size] for size in sizes), b"<html>404: not found</html>" * 100):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=f"{file.name} is damaged") as error:
            load_head(tmp_path)
        assert "\n" not in str(error.value) and "weights_only" not in str(error.value)


class Harmful:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("zipped", [True, False])
def test_no_code_in_a_pickle_is_run(tmp_path, zipped):
    harm, (tensors, _) = tmp_path / "harm", FILES["medusa"]
    contents: list[Any] = [{**tensors, "more": Harmful(harm)}, [*tensors.values()], {"state_dict": tensors}]
    for content in contents:
        torch.save(content, tmp_path / "medusa_lm_head.pt", _use_new_zipfile_serialization=zipped)
        with pytest.raises(ValueError, match=r"medusa_lm_head\.pt is damaged, or holds more than tensors"):
            load_head(tmp_path)
    assert not harm.exists()


@pytest.mark.parametrize(
    ("name", "content", "fault"),
    [
        ("config.json", "{", "config.json is not JSON"),
        ("config.json", "[]", "config.json holds no JSON object"),
        ("pytorch_model.bin.index.json", "nonsense", "pytorch_model.bin.index.json is not JSON"),
        (INDEX, "{}", "has no weight_map"),
        (INDEX, '{"weight_map": {"a": "b.safetensors"}}', "lists files that do not exist: b.safetensors"),
        (INDEX, '{"weight_map": {"a": "../secret.bin"}}', "lists files that do not exist: ../secret.bin"),
    ],
)
def test_faulty_json_is_named(tmp_path, name, content, fault):
    (tmp_path / "secret.bin").touch()
    folder = tmp_path / "head"
    folder.mkdir()
    if name == "config.json":
        published.write(folder, "model.safetensors", FILES["mapped"][0])
    (folder / name).write_text(content)
    with pytest.raises(ValueError, match=fault):
        load_head(folder)


def test_folders_without_a_head(tmp_path):
    with pytest.raises(ValueError, match="/medusa-vicuna': there is no such local folder"):
        load_head("FasterDecoding/medusa-vicuna")
    with pytest.raises(ValueError, match=r"it holds none of medusa_lm_head.safetensors, .*, model.safetensors"):
        load_head(tmp_path)
