"""Medusa and Hydra heads in every published format: files built here with the published names load bit-exact."""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaModel

from heads import HydraConfig, HydraHead, LayerConfig, MedusaConfig, MedusaHead, load_head
from tests.heads.test_heads import HIDDEN, drawn, randomised
from tests.support.models import VOCABULARY, tiny

Tensors = dict[str, Tensor]
PUBLISHED = {"base_model_name_or_path": "lmsys/vicuna-7b-v1.3", "medusa_num_heads": 2, "medusa_num_layers": 1}
HYDRA = {
    "base_model_name_or_path": "lmsys/vicuna-7b-v1.3",
    "grounded_heads": True,
    "hidden_state_offset": 0,
    "hydra_head_arch": "prefix-mlp",
    "hydra_num_heads": 4,
    "hydra_num_layers": 4,
}
EMBEDDING = "prefix_embeding_layer.embed_tokens.weight"


def write(folder: Path, name: str, tensors: Tensors, config: dict[str, Any] | None = None) -> Path:
    if name.endswith(".safetensors"):
        save_file({key: tensor.clone() for key, tensor in tensors.items()}, folder / name, {"format": "pt"})
    else:
        torch.save(OrderedDict(tensors), folder / name)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def made_medusa(**settings: Any) -> MedusaHead:
    head = randomised(MedusaHead(MedusaConfig(HIDDEN, VOCABULARY, **{"output": "own", "heads": 5, **settings})))
    head.borrow(drawn(VOCABULARY, HIDDEN, seed=9)) if head.output == "target" else None
    return head.bfloat16()


def name_blocks(head: MedusaHead, prefix: str = "") -> Tensors:
    """FasterDecoding's names of the residual blocks."""
    return {
        f"{prefix}{i}.{j}.linear.{part}": tensor
        for i, block in enumerate(head.blocks)
        for j, layer in enumerate(block.layers)
        for part, tensor in layer.named_parameters()
    }


def name_all(head: MedusaHead, prefix: str = "") -> Tensors:
    """The same, with the output matrix of each head."""
    own = {f"{prefix}{i}.{head.config.layers}.weight": head.output_layer(i)[0] for i in range(head.depth)}
    return name_blocks(head, prefix) | own


def test_medusa_v01_heads_are_counted_in_the_file(tmp_path):
    head = made_medusa()
    loaded = load_head(write(tmp_path, "medusa_lm_head.pt", name_all(head), PUBLISHED))
    assert loaded.config == replace(head.config, target_name="lmsys/vicuna-7b-v1.3")
    assert_same(loaded, head)


def assert_same(loaded: Any, head: Any) -> None:
    """Every logit is bit-equal and has the same dtype."""
    assert type(loaded) is type(head) and loaded.depth == head.depth
    features, embedded = drawn(2, HIDDEN).bfloat16(), drawn(2, head.depth, HIDDEN, seed=3).bfloat16()
    for index in range(head.depth):
        if isinstance(head, MedusaHead):
            one, other = (each(features)[:, index] for each in (loaded, head))
        else:
            one, other = (each(features, embedded[:, : index + 1], index) for each in (loaded, head))
        assert one.dtype == other.dtype and torch.equal(loaded.logits(one, index), head.logits(other, index))
    every = torch.arange(head.draft_size)
    assert torch.equal(loaded.tokens(every), head.tokens(every))
    assert all(parameter.requires_grad for parameter in loaded.parameters())


def test_medusa_of_two_aliased_blocks(tmp_path):
    head = made_medusa(layers=2)
    tensors = name_all(head) | {
        name.replace(".0.", ".1.", 1): t for name, t in name_blocks(head).items() if ".0.l" in name
    }
    loaded = load_head(write(tmp_path, "medusa_lm_head.pt", tensors, PUBLISHED))
    for block in loaded.blocks:
        first, second = block.layers
        assert torch.equal(first.weight, second.weight) and first.weight.data_ptr() != second.weight.data_ptr()
    head.load_state_dict(loaded.state_dict())
    assert_same(loaded, head)
    # safetensors stores a shared tensor once and lists its other name in the metadata
    names = [name for name in tensors if ".1.linear" in name]
    once = {name: tensor.clone() for name, tensor in tensors.items() if name not in names}
    os.remove(tmp_path / "medusa_lm_head.pt")
    save_file(once, tmp_path / "medusa_lm_head.safetensors", {name: name.replace(".1.", ".0.", 1) for name in names})
    assert_same(load_head(tmp_path), head)


def test_medusa_version_2_shares_the_targets_matrix(tmp_path):
    head = made_medusa(output="target")
    folder = write(tmp_path, "medusa_lm_head.safetensors", name_blocks(head), {**PUBLISHED, "version": "2"})
    with pytest.raises(ValueError, match="the target's vocabulary size; pass vocab_size="):
        load_head(folder)
    loaded = load_head(folder, vocab_size=VOCABULARY)
    assert loaded.output == "target" and loaded.borrowed is None
    loaded.borrow(head.borrowed)
    assert_same(loaded, head)
    loaded = load_head(write(tmp_path, "medusa_lm_head.safetensors", name_blocks(head), {"vocab_size": VOCABULARY}))
    assert loaded.vocab_size == VOCABULARY


@pytest.mark.parametrize("suffix", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("own", [True, False])
def test_medusa_2_is_a_whole_model(tmp_path, suffix, own):
    model = tiny("llama", hidden_size=HIDDEN, dtype=torch.bfloat16)
    head = made_medusa(output="own" if own else "target")
    ours = (name_all if own else name_blocks)(head, "medusa_head.")
    shards = [{**model.state_dict()}, dict(list(ours.items())[:3]), dict(list(ours.items())[3:])]
    stem, _, kind = suffix.partition(".")
    listed = {}
    for number, shard in enumerate(shards, start=1):
        name = f"{stem}-0000{number}-of-00003.{kind}"
        write(tmp_path, name, shard)
        listed |= dict.fromkeys(shard, name)
    (tmp_path / f"{suffix}.index.json").write_text(json.dumps({"weight_map": listed}))
    config = {**model.config.to_dict(), "base_model_name_or_path": "another", "medusa_num_heads": 5}
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = load_head(tmp_path)
    expected = replace(head.config, target_layers=model.config.num_hidden_layers)
    assert loaded.config == expected, "its target is the model in its folder, not the base model"
    loaded.check_target(HIDDEN, VOCABULARY, 2)
    if not own:
        loaded.borrow(head.borrowed)
    assert_same(loaded, head)
    os.remove(tmp_path / f"{stem}-00002-of-00003.{kind}")
    with pytest.raises(ValueError, match=f"index.json lists files that do not exist: {stem}-00002-of-00003"):
        load_head(tmp_path)


VLLM = {"model_type": "medusa", "num_heads": 5, "num_hidden_layers": 1, "hidden_size": HIDDEN, "vocab_size": VOCABULARY}


@pytest.mark.parametrize("prefix", ["", "medusa_heads."])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("published_names", [True, False])
def test_medusa_of_vllm(tmp_path, prefix, bias, published_names):
    head = made_medusa(layers=2, bias=bias)
    tensors = (
        name_all(head, prefix)
        if published_names
        else {prefix + name: state for name, state in head.state_dict().items()}
    )
    config = {**VLLM, "medusa_fc_bias": not bias, "num_hidden_layers": 7, "original_lm_head": True}
    loaded = load_head(write(tmp_path, "model.safetensors", tensors, config))
    assert loaded.config == head.config
    assert_same(loaded, head)


@pytest.mark.parametrize("name", ["lm_head.weight", "lm_heads.0.weight"])
def test_medusa_of_vllm_with_one_matrix(tmp_path, name):
    head = made_medusa(output="shared")
    tensors = name_blocks(head) | {name: head.lm_head.weight}
    loaded = load_head(write(tmp_path, "model.safetensors", tensors, {**VLLM, "original_lm_head": True}))
    assert loaded.config == head.config
    assert_same(loaded, head)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_medusa_of_vllm_with_a_token_map_in_any_order(tmp_path, whole, dtype):
    head = made_medusa(draft_size=6)
    head.token_map = torch.tensor([2, 7, 31, 40, 41, 95])
    shuffle = torch.tensor([3, 1, 5, 0, 2, 4])
    states = head.state_dict()
    states["token_map"] = head.token_map[shuffle].to(dtype)
    for index in range(head.depth):
        name = f"lm_heads.{index}.weight"
        full = torch.zeros(VOCABULARY, HIDDEN, dtype=torch.bfloat16)
        full[head.token_map] = states[name]
        states[name] = full if whole else states[name][shuffle]
    loaded = load_head(write(tmp_path, "model.safetensors", states, VLLM))
    assert loaded.config == head.config
    assert_same(loaded, head)


def test_a_token_map_of_the_whole_vocabulary_is_dropped(tmp_path):
    head = made_medusa(output="shared")
    order = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(0))
    tensors = head.state_dict() | {"lm_head.weight": head.lm_head.weight[order], "token_map": order}
    loaded = load_head(write(tmp_path, "model.safetensors", tensors, VLLM))
    assert loaded.config == head.config and loaded.token_map is None
    assert_same(loaded, head)


def name_hydra(head: HydraHead, dropout: bool) -> Tensors:
    """Names as in Ankner et al.'s repository. All blocks after the first are the same one, with several names."""
    first, tensors = int(dropout), {"input_embed_fn.weight": drawn(VOCABULARY, HIDDEN)}
    for i in range(head.depth):
        for part in ("weight", "bias"):
            place = f"hydra_mlp.{i}.{first}"
            tensors[f"{place}.linear.{part}"] = getattr(head.grounded[i].linear, part)
            tensors[f"{place}.res_connection.{part}"] = getattr(head.grounded[i].residual, part)
            for j in range(head.config.layers - 1):
                place = f"hydra_mlp.{i}.{(3 + 2 * j) if dropout else 1 + j}"
                tensors[f"{place}.linear.{part}"] = getattr(head.blocks[i].layers[0], part)
            place = f"hydra_lm_head.{i}.1" if dropout else f"hydra_lm_head.{i}"
            tensors[f"{place}.{part}"] = getattr(head.lm_heads[i], part)
        for layer in head.blocks[i].layers[1:]:
            layer.load_state_dict(head.blocks[i].layers[0].state_dict())
    return tensors


def made_hydra(**settings: Any) -> HydraHead:
    config = HydraConfig(HIDDEN, VOCABULARY, 4, 4, "own", True, True, target_name="lmsys/vicuna-7b-v1.3")
    return randomised(HydraHead(replace(config, **settings))).bfloat16()


@pytest.mark.parametrize("dropout", [True, False])
@pytest.mark.parametrize("layers", [1, 4])
def test_hydra_mlp(tmp_path, dropout, layers):
    head = made_hydra(layers=layers)
    loaded = load_head(write(tmp_path, "hydra_lm_head.pt", name_hydra(head, dropout), HYDRA))
    assert loaded.config == head.config
    assert_same(loaded, head)


@pytest.mark.parametrize("more", [{}, {"head_dim": 4, "rope_theta": 50.0, "rms_norm_eps": 1e-3}])
def test_hydra_prefix_mlp(tmp_path, more):
    """The published prefix layer is a transformers LlamaModel; ours must compute the same from its weights."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=12,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        **{"head_dim": 128, "rms_norm_eps": 1e-6, **more},
    )
    llama = randomised(LlamaModel(config))
    tensors = {f"prefix_embeding_layer.{name}": state for name, state in llama.state_dict().items()}
    assert EMBEDDING in tensors
    tensors["prefix_embeding_layer.layers.0.self_attn.rotary_emb.inv_freq"] = drawn(2)
    layer = LayerConfig(4, 2, config.head_dim, 12, more.get("rope_theta", 10_000.0), config.rms_norm_eps)
    head = made_hydra()
    loaded = load_head(write(tmp_path, "hydra_lm_head.pt", name_hydra(head, True) | tensors, {**HYDRA, **more}))
    assert loaded.config == replace(head.config, prefix=layer)
    assert_same(loaded, head)
    exact = load_head(tmp_path, torch.float64)
    features = drawn(2, 9, HIDDEN)
    assert torch.allclose(exact.contextualize(features), llama(inputs_embeds=features)[0], rtol=0, atol=1e-6)


def test_the_dtype_is_the_given_one_or_the_files(tmp_path):
    tensors = name_all(made_medusa())
    tensors["0.0.linear.bias"] = tensors["0.0.linear.bias"].double()
    folder = write(tmp_path, "medusa_lm_head.pt", tensors, PUBLISHED)
    for dtype in (None, torch.float32):
        assert {parameter.dtype for parameter in load_head(folder, dtype).parameters()} == {dtype or torch.bfloat16}
