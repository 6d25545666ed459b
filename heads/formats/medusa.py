"""Medusa and Hydra heads as published.

Medusa's blocks are named `blocks.0.layers.0` (vLLM) or `0.0.linear` (FasterDecoding), after `medusa_heads.` (vLLM
strips it) or `medusa_head.` (a whole Medusa-2 model). There is an output matrix for each head, one for all, or none if
the target's is used. A whole model's base weights are ignored. Its heads were trained jointly with them, so they fit
only the model in their own folder.

Hydra's head i is `hydra_mlp.{i}`, a list of blocks with dropout between them ("prefix-mlp") or without ("mlp"), and
`hydra_lm_head.{i}`. `input_embed_fn` has the embeddings of draft tokens, a copy of the base model's. "prefix-mlp" has a
prefix layer: a Llama model of one layer, whose embeddings are not used.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from heads.formats.decoder_layer import read_layer
from heads.formats.layout import (
    EMBEDDING,
    ConfigDict,
    Format,
    Layout,
    TargetSizes,
    count,
    extent,
    find_shapes,
    read_common,
    rename,
)
from heads.medusa import HydraConfig, MedusaConfig, MedusaHead
from heads.vocabulary import Output

WHOLE = "medusa_head."
PREFIXES = ("medusa_heads.", WHOLE, "")
BLOCKS = ("blocks.{}.layers.{}.", "{}.{}.linear.")
BASE = ("model.", "lm_head.")  # prefixes of a whole model's other tensors
HYDRA_BLOCK = "hydra_mlp.{}.{}.linear.weight"
EMBEDDINGS = "input_embed_fn."
PREFIX = "prefix_embeding_layer."  # misspelt in published files
IGNORED = {  # embeddings that are never looked up, and a computed tensor
    f"{PREFIX}embed_tokens.weight",
    f"{PREFIX}layers.0.self_attn.rotary_emb.inv_freq",
}


def is_medusa(names: Collection[str]) -> bool:
    """Whether a file with these names of tensors has a Medusa head."""
    return bool(_list_styles(names))


def _list_styles(names: Collection[str]) -> list[tuple[str, str]]:
    """The prefixes and names of blocks that a file has."""
    return [(prefix, block) for prefix in PREFIXES for block in BLOCKS if count(f"{prefix}{block}weight", names)]


def read_medusa(tensors: Mapping[str, Tensor], config: ConfigDict, target: TargetSizes) -> Layout:
    """The layout of a Medusa head."""
    shapes = find_shapes(tensors)
    prefix, block = _list_styles(shapes)[0]
    sizes = [count(f"{prefix}{block}{part}", shapes) for part in ("weight", "bias")]
    heads, layers = max(size[0] for size in sizes if size), max(size[1] for size in sizes if size)
    renamed = {f"blocks.{i}.layers.{j}.": prefix + block.format(i, j) for i in range(heads) for j in range(layers)}
    if count(f"{prefix}{{}}.{{}}.weight", shapes):
        renamed |= {f"lm_heads.{i}.": f"{prefix}{i}.{layers}." for i in range(heads)}
    elif config.get("original_lm_head") and count(f"{prefix}lm_heads.{{}}.weight", shapes) == (1,):
        renamed["lm_head."] = f"{prefix}lm_heads.0."
    renamed[""] = prefix  # all other names
    whole = prefix == WHOLE
    ignored = {name for name in shapes if whole and name.startswith(BASE)}
    shapes = rename({name: shape for name, shape in shapes.items() if name not in ignored}, renamed)
    hidden_size = extent(shapes, ["blocks.{}.layers.{}.weight", "blocks.{}.layers.{}.bias"], 0)
    output: Output = "shared" if "lm_head.weight" in shapes else "target"
    head_config = MedusaConfig(
        **read_common(shapes, hidden_size, ["lm_heads.{}.weight", "lm_head.weight"], config, target.vocab_size),
        heads=heads,
        layers=layers,
        output="own" if count("lm_heads.{}.weight", shapes) else output,
        bias=bool(sizes[1]),
    )
    if whole:  # The config is the base model's; its base_model_name_or_path is an earlier model.
        head_config = replace(head_config, target_layers=config.get("num_hidden_layers"), target_name=None)
    return Layout(head_config, renamed, ignored)


def export_medusa(head: MedusaHead) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and config of a folder for vLLM's Medusa class, which needs an output matrix: not the target's."""
    config = head.config
    return head.state_dict(), {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "num_heads": config.heads,
        "num_hidden_layers": config.layers,
        "truncated_vocab_size": head.draft_size,
        "medusa_fc_bias": config.bias,
        "original_lm_head": config.output != "own",
        **({"base_model_name_or_path": config.target_name} if config.target_name else {}),
    }


def is_hydra(names: Collection[str]) -> bool:
    """Whether a file with these names of tensors has a Hydra head."""
    return bool(count(HYDRA_BLOCK, names))


def read_hydra(tensors: Mapping[str, Tensor], config: ConfigDict, target: TargetSizes) -> Layout:
    """The layout of a Hydra head."""
    shapes = find_shapes(tensors)
    heads, places = count(HYDRA_BLOCK, shapes)
    dropout = not count("hydra_mlp.{}.0.linear.weight", shapes)
    first, *further = range(dropout, places, 1 + dropout)
    matrix = "hydra_lm_head.{}.1." if count("hydra_lm_head.{}.1.weight", shapes) else "hydra_lm_head.{}."
    renamed = {"prefix.layer.": f"{PREFIX}layers.0.", "prefix.norm.": f"{PREFIX}norm.", "embed_tokens.": EMBEDDINGS}
    for i in range(heads):
        renamed[f"grounded.{i}.linear."] = f"hydra_mlp.{i}.{first}.linear."
        renamed[f"grounded.{i}.residual."] = f"hydra_mlp.{i}.{first}.res_connection."
        renamed |= {f"blocks.{i}.layers.{j}.": f"hydra_mlp.{i}.{place}.linear." for j, place in enumerate(further)}
        renamed[f"lm_heads.{i}."] = matrix.format(i)
    shapes = rename(shapes, renamed)
    hidden_size = extent(shapes, ["grounded.{}.linear.weight"], 0)
    if extent(shapes, ["grounded.0.linear.weight"], 1, 0) == hidden_size:
        raise ValueError("its heads read no draft tokens (grounded_heads: false); Hydra heads must")
    has_prefix = any(name.startswith("prefix.") for name in shapes)
    head_config = HydraConfig(
        **read_common(shapes, hidden_size, ["lm_heads.{}.weight"], config, target.vocab_size),
        heads=heads,
        layers=1 + len(further),
        output="own",
        output_bias=True,
        projected=True,
        embedding=EMBEDDING in shapes,
        prefix=read_layer(shapes, "prefix.layer.", config) if has_prefix else None,
    )
    return Layout(head_config, renamed, IGNORED)


MEDUSA = Format(is_medusa, read_medusa, export_medusa, frozenset({"lm_head.weight"}))
HYDRA = Format(is_hydra, read_hydra)
