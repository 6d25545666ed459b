"""Heads in every published format: files built here with the published names load bit-exact."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from heads import DFlashHead, HydraHead, LayerConfig, MedusaHead, load_head
from heads.checkpoint import read_target
from heads.formats.decoder_layer import WINDOWED
from heads.layer_cache import heads_of
from tests.support.models import tiny
from tests.support.published_heads import (
    BLOCK_SPECULATORS,
    DSPARK,
    EAGLE,
    EMBEDDING,
    HYDRA,
    MEDUSA,
    PEAGLE,
    READ,
    SPECULATORS,
    VICUNA,
    VLLM,
    ZLAB,
    Tensors,
    name_eagle,
    name_eagle3,
    name_hydra,
    name_medusa,
    write,
)
from tests.support.small_heads import HIDDEN, VOCABULARY, assert_same, drawn, made

EAGLE_FILES = ("model.safetensors", "pytorch_model.bin")
FIVE = {"output": "own", "heads": 5}
FOUR = {"output": "own", "output_bias": True, "projected": True, "heads": 4, "target_name": VICUNA}
SMALL = {"draft_size": 5}
BIASED, UNBIASED, FLAT = {"bias": True}, EAGLE | {"bias": False}, EAGLE | {READ: [2, 5, 9]}
RESIDUAL, FEEDBACK = {"norm_before_residual": True}, {"normed_feedback": True}
FC, PARTS, SPECULATED = {"norm_before_fc": True}, {"fc_norm": True}, {"draft_size": 5, "target_name": "little"}
name_with_prefix = partial(name_medusa, prefix="medusa_heads.")
name_without_dropout = partial(name_hydra, dropout=False)


def name_speculators(head: Any) -> Tensors:
    return EMBEDDING | name_eagle3(head, "layers.0.")


def name_dspark(head: Any) -> Tensors:
    return (
        EMBEDDING
        | name_eagle3(head)
        | {"confidence_head.proj.weight": drawn(1, 13), "confidence_head.proj.bias": drawn(1)}
    )


def name_unused_norm(head: Any) -> Tensors:
    return name_eagle3(head) | {"norm.weight": drawn(HIDDEN)}


def name_all_norms(head: Any) -> Tensors:
    """As a class of vLLM has them, which uses the first alone."""
    return name_speculators(head) | {f"layers.{number}.hidden_norm.weight": drawn(HIDDEN) for number in (1, 2)}


def name_z_lab_modules(head: Any) -> Tensors:
    """As z-lab's class names them, and not its files."""
    return {f"{name}.weight" if "codebook" in name else name: state for name, state in name_eagle3(head).items()}


def name_vllm(head: Any, prefix: str = "medusa_heads.") -> Tensors:
    return {prefix + name: state for name, state in head.state_dict().items()}


def name_one_matrix(head: Any, name: str = "lm_head.weight") -> Tensors:
    return name_medusa(head) | {name: head.lm_head.weight}


def without(*dropped: str) -> Callable[[Any], Tensors]:
    """An EAGLE head's names, a copy of the embeddings included, without some tensors."""

    def name(head: Any) -> Tensors:
        tensors = name_eagle(head) if head.kind == "eagle" else EMBEDDING | name_eagle3(head)
        return {name: tensor for name, tensor in tensors.items() if name not in dropped}

    return name


def outputs(head: Any) -> list[Any]:
    """The logits of all its heads, or after a state was fed back, and all tokens."""
    features, embedded = drawn(2, 6, head.target_hidden_size * len(head.features)), drawn(2, 6, HIDDEN, seed=2)
    dtype = next(head.parameters()).dtype
    features, embedded = features.to(dtype), embedded.to(dtype)
    if isinstance(head, MedusaHead):
        states = [*head(features).unbind(dim=-2)]
    elif isinstance(head, HydraHead):
        features = head.contextualize(features)
        states = [head(features, embedded[:, :, None].repeat(1, 1, i + 1, 1), i) for i in range(head.depth)]
    elif isinstance(head, DFlashHead):
        keys, values = head.read(head.fuse(features), torch.arange(6)[None])
        attend = partial(see_all, keys, values)
        last = head(embedded[:, : head.rows], 6 + torch.arange(head.rows)[None], attend)[:, -head.depth :]
        every, pairs = torch.arange(VOCABULARY), torch.zeros(1)
        if head.config.candidates:
            pairs = head.candidate_selector(last[0, :1], every, every)
        elif head.has_pairs:
            pairs = head.markov_head(every)
        return [head.logits(last), pairs, head.begin_block(torch.tensor(5)), head.tokens(torch.arange(head.draft_size))]
    else:
        first = head(embedded, head.fuse(features), torch.arange(6)[None])
        states = [head(embedded, first, torch.arange(1, 7)[None])]
    logits = [head.logits(state, index) for index, state in enumerate(states)]
    return [*logits, head.tokens(torch.arange(head.draft_size))]


def see_all(text_keys: Any, text_values: Any, queries: Any, keys: Any, values: Any, layer: int) -> Any:
    """Attention to a text and all of a block."""
    pairs = (text_keys, keys), (text_values, values)
    both = (torch.cat([text[:, heads_of(layer, own)], own], dim=2) for text, own in pairs)
    return torch.nn.functional.scaled_dot_product_attention(queries, *both, enable_gqa=True)


def assert_alike(loaded: Any, head: Any) -> None:
    """The heads and every output are equal, to the bit. loaded: with a copy of the target's embeddings, if with any."""
    loaded.share(EMBEDDING["embed_tokens.weight"], None)
    assert_same(loaded, head)
    if head.output == "target":
        loaded.borrow(drawn(VOCABULARY, HIDDEN, seed=7))
    assert all(torch.equal(found, expected) for found, expected in zip(outputs(loaded), outputs(head), strict=True))


QWEN2 = {"qkv_bias": True, "num_key_value_heads": 6, "rope_theta": 10_000.0}
QWEN2_CONFIG = {"qkv_bias": True, "num_key_value_heads": None, "head_dim": 99, "rope_theta": None}
TRAINED = SPECULATED | RESIDUAL | {"embedding": True}
THREES = {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 6, "qk_norm": True}
FOURS = {"num_attention_heads": 4, "head_dim": 6}
WIDE = {"layer": THREES, "target_hidden_size": 12, "embedding": True, "features": (1, 17, 33, 35), **SMALL}
WIDE_CONFIG = EAGLE | {"num_attention_heads": 40, READ: [1, 17, 33, 35]}
ROTARY = {"rope_theta": 50.0, "rope_type": "default"}
LINEAR = {"layer": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}}
PUBLISHED = {"pair_rank": 0, "from_anchor": False}
INNER_SIZE = {name: value for name, value in ZLAB.items() if name != "block_size"}
INNER_SIZE |= {"dflash_config": ZLAB["dflash_config"] | {"block_size": 4}}
DSPARK_FLAT = {name: value for name, value in ZLAB.items() if name != "dflash_config"}
DSPARK_FLAT |= {"markov_rank": 5, "mask_token_id": 3, "target_layer_ids": [1, 4, 8]}
THREE_LAYERS = {"layers": 3}
WINDOW, CAUSAL, LITTLE = {"layer": {"window": 6}}, {"causal": True}, {"target_name": "little"}
NESTED = "transformer_layer_config"
SLIDING = {"layer_types": [WINDOWED] * 2, "sliding_window": 6}
WITHOUT_CAUSAL = {name: BLOCK_SPECULATORS[name] for name in BLOCK_SPECULATORS if name != "sliding_window_non_causal"}
DFLASH2 = {"pair_rank": 5, "candidates": 4, "taps": 2, "group": 4}
MIXED = SLIDING | {"layer_types": [WINDOWED, "full_attention"]}
SLIDING_SIZES = BLOCK_SPECULATORS[NESTED] | SLIDING
LAYOUTS = [
    ("medusa", {**FIVE, "target_name": VICUNA}, name_medusa, MEDUSA),
    ("medusa", {"output": "target"}, name_medusa, {"vocab_size": VOCABULARY, "version": "2"}),
    # of vLLM, which also takes FasterDecoding's names
    ("medusa", {**FIVE, "layers": 2}, name_vllm, VLLM),
    ("medusa", {**FIVE, "bias": False}, partial(name_vllm, prefix=""), VLLM | {"medusa_fc_bias": True}),
    ("medusa", {**FIVE, "layers": 2, "bias": False}, name_with_prefix, VLLM),
    ("medusa", FIVE, name_with_prefix, VLLM | {"original_lm_head": True}),
    ("medusa", {}, name_one_matrix, VLLM | {"original_lm_head": True}),
    ("medusa", {}, partial(name_one_matrix, name="lm_heads.0.weight"), VLLM | {"original_lm_head": True}),
    ("hydra", {**FOUR, "layers": 1}, name_hydra, HYDRA),
    ("hydra", {**FOUR, "layers": 4}, name_hydra, HYDRA),
    ("hydra", {**FOUR, "layers": 1}, name_without_dropout, HYDRA),
    ("hydra", {**FOUR, "layers": 4}, name_without_dropout, HYDRA),
    # a missing bias means true, a missing rope_theta 10000
    ("eagle", BIASED, name_eagle, EAGLE),
    ("eagle", BIASED, without(*EMBEDDING), EAGLE | BIASED),
    ("eagle", {}, name_eagle, UNBIASED),
    ("eagle", {}, without(*EMBEDDING), UNBIASED),
    ("eagle", {"layer": QWEN2}, name_eagle, UNBIASED | QWEN2_CONFIG),
    ("eagle", LINEAR, name_eagle, UNBIASED | {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    ("eagle", LINEAR, name_eagle, UNBIASED | {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    # both numberings of the layers
    ("eagle3", SMALL, without(), FLAT),
    ("eagle3", SMALL, name_eagle3, EAGLE | {"eagle_config": {READ: [1, 4, 8]}}),
    ("eagle3", SMALL, name_speculators, FLAT | {"eagle_config": {READ: [1, 4, 8]}}),
    ("eagle3", SMALL, name_eagle3, FLAT | {"eagle_config": {READ: [2, 5, 9]}}),
    # every form of a draft vocabulary
    ("eagle3", SMALL, without("t2d"), FLAT),
    ("eagle3", SMALL, without("d2t"), FLAT),
    ("eagle3", {}, name_eagle3, FLAT),
    ("eagle3", {"output": "target"}, name_eagle3, FLAT),
    # norms: in SpecForge `norm_output` is about the input of the output matrix, in servers about the feedback
    ("eagle3", SPECULATED | RESIDUAL, name_speculators, SPECULATORS),
    ("eagle3", SPECULATED, name_speculators, SPECULATORS | {"norm_before_residual": False}),
    ("eagle3", SPECULATED | RESIDUAL | FC, name_speculators, SPECULATORS | RESIDUAL | FC),
    ("eagle3", SPECULATED | RESIDUAL | PARTS, name_speculators, SPECULATORS | PARTS | {"norm_output": False}),
    ("eagle3", SPECULATED | RESIDUAL | FEEDBACK, name_speculators, SPECULATORS | {"norm_output": True}),
    ("eagle3", SMALL, name_eagle3, FLAT | {"norm_output": True}),
    ("eagle3", SMALL | {"final_norm": False}, name_unused_norm, FLAT | {"norm_output": False}),
    ("eagle3", SMALL | FEEDBACK, name_speculators, FLAT | {"norm_output": True}),
    ("eagle3", SMALL, name_speculators, FLAT | {"norm_output": False}),
    ("eagle3", SMALL | PARTS | FEEDBACK, name_eagle3, FLAT | PARTS | {"norm_output": True}),
    ("eagle3", SMALL | PARTS, name_eagle3, FLAT | PARTS | {"norm_output": False}),
    ("eagle3", SMALL | RESIDUAL, name_eagle3, FLAT | RESIDUAL),
    # several layers: all numbered, or after `midlayer`
    ("eagle3", SPECULATED | RESIDUAL | THREE_LAYERS, name_speculators, SPECULATORS),
    ("eagle3", SPECULATED | RESIDUAL | THREE_LAYERS, name_all_norms, SPECULATORS),
    ("eagle3", SMALL | THREE_LAYERS, name_eagle3, FLAT),
    # trained embeddings, a target of another hidden size, and a head_dim that was ignored in training
    ("eagle3", TRAINED, name_speculators, SPECULATORS | {"embed_requires_grad": True}),
    ("eagle3", WIDE, name_eagle3, WIDE_CONFIG),
    ("eagle3", WIDE, name_eagle3, WIDE_CONFIG | {"target_hidden_size": 12}),
    ("eagle3", SMALL | {"layer": FOURS}, name_eagle3, FLAT | {"num_attention_heads": 4, "head_dim": 12}),
    # P-EAGLE: speculators, and a flat config for vLLM
    ("peagle", SPECULATED | {"heads": 7, "embedding": True}, name_speculators, PEAGLE),
    ("peagle", SMALL | {"layers": 4, "heads": 6}, partial(name_eagle3, prefix="layers.0."), FLAT | {"ptd_token_id": 3}),
    # block heads: z-lab, an older place of the block size, and speculators with and without a draft vocabulary
    ("dflash", PUBLISHED, name_eagle3, ZLAB),
    ("dflash", PUBLISHED, name_eagle3, INNER_SIZE),
    ("dflash", PUBLISHED | LITTLE, name_eagle3, BLOCK_SPECULATORS),
    ("dflash", PUBLISHED | SPECULATED | {"output": "shared"}, name_eagle3, BLOCK_SPECULATORS),
    ("dflash", SPECULATED | {"output": "shared", "heads": 4}, name_dspark, DSPARK),
    # DFlash2: z-lab's, and speculators'
    (
        "dflash",
        PUBLISHED | DFLASH2,
        name_eagle3,
        ZLAB | {"dflash_config": ZLAB["dflash_config"] | {"selector_top_k": 4}},
    ),
    (
        *("dflash", PUBLISHED | DFLASH2 | LITTLE | WINDOW, name_eagle3),
        WITHOUT_CAUSAL | {"speculators_model_type": "dflash2", "selector_top_k": 4, NESTED: SLIDING_SIZES},
    ),
    (
        *("dflash", PUBLISHED | {"logit_factor": 0.2, "logit_cap": 20.0, "embedding_scale": 3.0}, name_eagle3),
        ZLAB | {"output_multiplier": 0.2, "final_logit_softcapping": 20.0, "input_embedding_scale": 3},
    ),
    ("dflash", PUBLISHED | DFLASH2, name_z_lab_modules, ZLAB | {"selector_top_k": 4}),
    # windows, whose rows see no later ones unless the config says so, and blocks that are causal without
    ("dflash", PUBLISHED | CAUSAL | WINDOW, name_eagle3, ZLAB | SLIDING),
    ("dflash", PUBLISHED | WINDOW, name_eagle3, ZLAB | SLIDING | {"is_causal": False}),
    ("dflash", PUBLISHED | WINDOW, name_eagle3, ZLAB | {"use_swa": True, "swa_window_size": 6}),
    ("dflash", PUBLISHED | CAUSAL, name_eagle3, ZLAB | {"is_causal": True}),
    ("dflash", PUBLISHED | CAUSAL, name_eagle3, ZLAB | {"dflash_config": ZLAB["dflash_config"] | {"causal": True}}),
    ("dflash", PUBLISHED | CAUSAL | WINDOW | LITTLE, name_eagle3, BLOCK_SPECULATORS | {NESTED: SLIDING_SIZES}),
    (
        *("dflash", PUBLISHED | WINDOW | LITTLE, name_eagle3),
        BLOCK_SPECULATORS | {NESTED: SLIDING_SIZES, "sliding_window_non_causal": True},
    ),
    ("eagle3", SPECULATED | RESIDUAL | WINDOW, name_speculators, SPECULATORS | {NESTED: SLIDING_SIZES}),
    # z-lab's newest: a window in all layers but the last, which alone sees the whole block
    ("dflash", PUBLISHED | CAUSAL | WINDOW | {"full_layers": (1,)}, name_eagle3, ZLAB | MIXED),
    ("dflash", PUBLISHED | WINDOW | {"full_layers": (1,)}, name_eagle3, ZLAB | MIXED | {"is_causal": False}),
    ("dflash", {"heads": 4}, name_eagle3, DSPARK_FLAT),
]


@pytest.mark.parametrize("pickled", [False, True])
@pytest.mark.parametrize(("kind", "settings", "named", "config"), LAYOUTS)
def test_published_layouts_load_bit_exact(tmp_path, kind, settings, named, config, pickled):
    head = made(kind, target_layers=config.get("num_target_layers"), **settings)
    own = f"{kind}_lm_head.safetensors", f"{kind}_lm_head.pt"
    files = own if kind in ("medusa", "hydra") else EAGLE_FILES
    assert_alike(load_head(write(tmp_path, files[pickled], named(head), config)), head)
    assert read_target(tmp_path).target_name == head.config.target_name


def test_what_a_file_lacks_is_given(tmp_path):
    medusa, eagle3 = made("medusa", output="target"), made("eagle3", draft_size=5, features=(2, 16, 29))
    (tmp_path / "medusa").mkdir()
    folder = write(tmp_path / "medusa", "medusa_lm_head.safetensors", name_medusa(medusa), {"version": "2"})
    with pytest.raises(ValueError, match="the target's vocabulary size; pass vocab_size="):
        load_head(folder)
    assert_alike(load_head(folder, vocab_size=VOCABULARY), medusa)
    write(tmp_path, "model.safetensors", name_eagle3(eagle3), EAGLE)
    with pytest.raises(ValueError, match=f"the layers it reads; pass layers=, or add {READ}"):
        load_head(tmp_path)
    assert_alike(load_head(tmp_path, layers=32), eagle3)


def test_aliased_blocks_get_memory_of_their_own(tmp_path):
    """Medusa's published blocks are one block with several names. safetensors stores it once, with its other names."""
    head = made("medusa", layers=2, target_name=VICUNA, **FIVE)
    for block in head.blocks:
        block.layers[1].load_state_dict(block.layers[0].state_dict())
    tensors = name_medusa(head)
    names = {name: name.replace(".1.", ".0.", 1) for name in tensors if ".1.linear" in name}
    tensors |= {name: tensors[original] for name, original in names.items()}
    write(tmp_path, "medusa_lm_head.pt", tensors, MEDUSA)
    loaded = load_head(tmp_path)
    assert_alike(loaded, head)
    assert all(len({layer.weight.data_ptr() for layer in block.layers}) == 2 for block in loaded.blocks)
    once = {name: tensor.clone() for name, tensor in tensors.items() if name not in names}
    save_file(once, tmp_path / "medusa_lm_head.safetensors", names)
    assert_alike(load_head(tmp_path), head)


@pytest.mark.parametrize("suffix", EAGLE_FILES)
@pytest.mark.parametrize("output", ["own", "target"])
def test_medusa_2_is_a_whole_model(tmp_path, suffix, output):
    """Its target is the model in its folder, not the base model."""
    model = tiny("llama", hidden_size=HIDDEN, vocab_size=VOCABULARY)
    head = made("medusa", heads=5, output=output, target_layers=model.config.num_hidden_layers)
    ours = [*name_medusa(head, "medusa_head.").items()]
    stem, _, kind = suffix.partition(".")
    listed = {}
    for number, shard in enumerate((model.state_dict(), dict(ours[:3]), dict(ours[3:])), start=1):
        name = f"{stem}-0000{number}-of-00003.{kind}"
        write(tmp_path, name, shard)
        listed |= dict.fromkeys(shard, name)
    (tmp_path / f"{suffix}.index.json").write_text(json.dumps({"weight_map": listed}))
    config = {**model.config.to_dict(), "base_model_name_or_path": "another", "medusa_num_heads": 5}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert_alike(load_head(tmp_path), head)
    assert read_target(tmp_path).target_name == str(tmp_path)
    os.remove(tmp_path / f"{stem}-00002-of-00003.{kind}")
    with pytest.raises(ValueError, match=f"index.json lists files that do not exist: {stem}-00002-of-00003"):
        load_head(tmp_path)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("size", [6, VOCABULARY])
def test_a_token_map_in_any_order(tmp_path, dtype, size):
    """As in vLLM's Medusa heads, and in ModelOpt's d2t, which is in the order of frequency. One of all tokens goes."""
    order = torch.randperm(size, generator=torch.Generator().manual_seed(0))
    for kind, config in (("medusa", VLLM), ("eagle3", FLAT), ("dflash", DSPARK)):
        shared = {"output": "shared", "heads": 4} if kind == "dflash" else {}
        head = made(kind, draft_size=size if size < VOCABULARY else None, **shared)
        tokens = (torch.arange(size) if head.token_map is None else head.token_map)[order]
        named = {"token_map": tokens} if kind == "medusa" else {"d2t": tokens - torch.arange(size)}
        states = {name: state for name, state in head.state_dict().items() if name != "token_map"}
        states["lm_head.weight"] = head.lm_head.weight[order]
        if kind == "dflash":
            states["markov_head.markov_w2.weight"] = head.markov_head.markov_w2.weight[order]
            head.config = replace(head.config, target_name="little")
        states |= {name: numbers.to(dtype) for name, numbers in named.items()}
        (tmp_path / kind).mkdir()
        assert_alike(load_head(write(tmp_path / kind, "model.safetensors", states, config)), head)


@pytest.mark.parametrize("more", [{}, {"head_dim": 4, "rms_norm_eps": 1e-3, "rope_parameters": ROTARY}])
def test_hydra_prefix_mlp(tmp_path, more):
    """The published prefix layer is a transformers LlamaModel; ours must compute the same from its weights."""
    sizes = {"hidden_size": HIDDEN, "vocab_size": VOCABULARY, "num_hidden_layers": 1, "head_dim": 128}
    llama: Any = tiny("llama", **sizes | more).model
    config, theta = llama.config, llama.config.rope_parameters["rope_theta"]
    layer = LayerConfig(4, 2, config.head_dim, 48, theta, config.rms_norm_eps)
    head = made("hydra", prefix=layer, layers=4, **FOUR)
    head.prefix["layer"].load_state_dict(llama.layers[0].state_dict())
    head.prefix["norm"].load_state_dict(llama.norm.state_dict())
    tensors = {f"prefix_embeding_layer.{name}": state for name, state in llama.state_dict().items()}
    tensors["prefix_embeding_layer.layers.0.self_attn.rotary_emb.inv_freq"] = drawn(2)
    loaded = load_head(write(tmp_path, "hydra_lm_head.pt", name_hydra(head) | tensors, {**HYDRA, **more}))
    assert_alike(loaded, head)
    features = drawn(2, 9, HIDDEN)
    assert torch.allclose(loaded.contextualize(features), llama(inputs_embeds=features)[0], rtol=0, atol=1e-5)


def test_the_dtype_is_the_given_one_or_the_files(tmp_path):
    tensors = name_medusa(made("medusa", dtype=torch.bfloat16, **FIVE))
    tensors["0.0.linear.bias"] = tensors["0.0.linear.bias"].double()
    folder = write(tmp_path, "medusa_lm_head.pt", tensors, MEDUSA)
    for dtype in (None, torch.float32):
        assert {parameter.dtype for parameter in load_head(folder, dtype).parameters()} == {dtype or torch.bfloat16}
