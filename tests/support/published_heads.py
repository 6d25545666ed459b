"""Heads as others publish them: the names of their tensors, and their configs, for the sizes of `small_heads`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from heads.formats.eagle import READ
from tests.support.small_heads import HIDDEN, VOCABULARY, drawn

Tensors = dict[str, Tensor]
VICUNA = "lmsys/vicuna-7b-v1.3"
EMBEDDING = {"embed_tokens.weight": drawn(VOCABULARY, HIDDEN, seed=5)}  # a copy of the target's

# Their repositories' configs. Medusa's has the wrong number of heads.
MEDUSA = {"base_model_name_or_path": VICUNA, "medusa_num_heads": 2, "medusa_num_layers": 1}
VLLM = {"model_type": "medusa", "num_heads": 5, "num_hidden_layers": 7, "hidden_size": HIDDEN, "vocab_size": VOCABULARY}
HYDRA = {"base_model_name_or_path": VICUNA, "hydra_head_arch": "prefix-mlp", "hydra_num_heads": 4}
# A copy of the target's config, whose numbers of layers and key-value heads are wrong for the head.
EAGLE = {
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
        **{name: value for name, value in EAGLE.items() if name not in ("architectures", "rope_theta")},
        "head_dim": 4,
        "rope_parameters": {"rope_theta": 50.0, "rope_type": "default"},
        "rope_scaling": None,
    },
}
PEAGLE: dict[str, Any] = SPECULATORS | {
    "architectures": ["PEagleDraftModel"],
    "speculators_model_type": "peagle",
    "embed_requires_grad": True,
    "mask_token_id": 3,
    "norm_before_residual": False,
    "norm_output": False,
    "speculators_config": {
        "algorithm": "peagle",
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 7}],
        "verifier": {"name_or_path": "little"},
    },
}

ZLAB: dict[str, Any] = {  # a copy of a Qwen3 config, whose number of layers is the head's
    **EAGLE,
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "head_dim": 4,
    "layer_types": ["full_attention"] * 2,
    "block_size": 4,
    "num_target_layers": 12,
    "dflash_config": {"mask_token_id": 3, "target_layer_ids": [1, 4, 8]},
}
BLOCK_SPECULATORS: dict[str, Any] = {
    "architectures": ["DFlashSpeculator"],
    "speculators_model_type": "dflash",
    "speculators_version": "0.9.0",
    "draft_vocab_size": VOCABULARY,
    "block_size": 4,
    "aux_hidden_state_layer_ids": [2, 5, 9],
    "mask_token_id": 3,
    "sample_from_anchor": False,
    "sliding_window_non_causal": False,
    "speculators_config": {"algorithm": "dflash", "verifier": {"name_or_path": "little"}},
    "transformer_layer_config": SPECULATORS["transformer_layer_config"]
    | {"model_type": "qwen3", "num_hidden_layers": 2, "layer_types": ["full_attention"] * 2},
}
DSPARK: dict[str, Any] = BLOCK_SPECULATORS | {
    "architectures": ["DSparkSpeculator"],
    "speculators_model_type": "dspark",
    "draft_vocab_size": 5,
    "sample_from_anchor": True,
    "markov_rank": 5,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
}


def write(folder: Path, name: str, tensors: Tensors, config: dict[str, Any] | None = None) -> Path:
    """Write a weight file, and config.json if there is a config."""
    if name.endswith(".safetensors"):
        save_file({key: tensor.clone() for key, tensor in tensors.items()}, folder / name, {"format": "pt"})
    else:
        torch.save(tensors, folder / name)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def name_medusa(head: Any, prefix: str = "") -> Tensors:
    """FasterDecoding's names. Only a head with its own output matrices has them in the file."""
    tensors = {}
    for i, block in enumerate(head.blocks):
        for j, layer in enumerate(block.layers):
            tensors |= {f"{prefix}{i}.{j}.linear.{part}": tensor for part, tensor in layer.named_parameters()}
        if head.output == "own":
            tensors[f"{prefix}{i}.{head.config.layers}.weight"] = head.lm_heads[i].weight
    return tensors


def name_hydra(head: Any, dropout: bool = True) -> Tensors:
    """Names as in Ankner et al.'s repository. All blocks after the first are the same one, with several names."""
    first, tensors = int(dropout), {"input_embed_fn.weight": EMBEDDING["embed_tokens.weight"]}
    for i in range(head.depth):
        for layer in head.blocks[i].layers[1:]:
            layer.load_state_dict(head.blocks[i].layers[0].state_dict())
        for part in ("weight", "bias"):
            place = f"hydra_mlp.{i}.{first}"
            tensors[f"{place}.linear.{part}"] = getattr(head.grounded[i].linear, part)
            tensors[f"{place}.res_connection.{part}"] = getattr(head.grounded[i].residual, part)
            for j in range(head.config.layers - 1):
                place = f"hydra_mlp.{i}.{(3 + 2 * j) if dropout else 1 + j}"
                tensors[f"{place}.linear.{part}"] = getattr(head.blocks[i].layers[j], part)
            place = f"hydra_lm_head.{i}.1" if dropout else f"hydra_lm_head.{i}"
            tensors[f"{place}.{part}"] = getattr(head.lm_heads[i], part)
    return tensors


def name_eagle(head: Any) -> Tensors:
    return EMBEDDING | {name: state for name, state in head.state_dict().items() if name != "token_map"}


def name_eagle3(head: Any, prefix: str = "midlayer.") -> Tensors:
    """The names of EAGLE-3's authors and SpecForge, or speculators' with their prefix, and those of block heads."""
    states = {name.replace("midlayer.", prefix): state for name, state in head.state_dict().items()}
    tokens = states.pop("token_map", None)
    if tokens is None:
        return states
    mask = torch.zeros(head.config.vocab_size, dtype=torch.bool).scatter(0, tokens, True)
    return states | {"d2t": tokens - torch.arange(len(tokens)), "t2d": mask}
