"""Hydra heads as published (Ankner et al.'s repository).

Head i is `hydra_mlp.{i}`, a list of blocks with dropout between them ("prefix-mlp") or without ("mlp"), and
`hydra_lm_head.{i}`. "prefix-mlp" has a prefix layer: a Llama model of one layer, whose embeddings are not used.
"""

from __future__ import annotations

from heads.formats.decoder_layer import read_layer
from heads.formats.layout import ConfigDict, Layout, Shapes, count, extent, read_common, rename
from heads.hydra import HydraConfig

PREFIX = "prefix_embeding_layer."  # misspelt in published files
IGNORED = {  # copies of the target's tensors, and a computed one
    "input_embed_fn.weight",
    f"{PREFIX}embed_tokens.weight",
    f"{PREFIX}layers.0.self_attn.rotary_emb.inv_freq",
}


def read_hydra(shapes: Shapes, config: ConfigDict, vocab_size: int | None) -> Layout | None:
    """The layout of a Hydra head; None if the file has no Hydra block."""
    found = count("hydra_mlp.{}.{}.linear.weight", shapes)
    if not found:
        return None
    heads, places = found
    dropout = not count("hydra_mlp.{}.0.linear.weight", shapes)
    first, *further = range(dropout, places, 1 + dropout)
    matrix = "hydra_lm_head.{}.1." if count("hydra_lm_head.{}.1.weight", shapes) else "hydra_lm_head.{}."
    renamed = {"prefix.layer.": f"{PREFIX}layers.0.", "prefix.norm.": f"{PREFIX}norm."}
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
        **read_common(shapes, hidden_size, ["lm_heads.{}.weight"], config, vocab_size),
        heads=heads,
        layers=1 + len(further),
        output="own",
        output_bias=True,
        projected=True,
        prefix=read_layer(shapes, "prefix.layer.", config) if has_prefix else None,
    )
    return Layout(head_config, renamed, IGNORED)
