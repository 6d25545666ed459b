"""Hydra heads as published (Ankner et al.'s repository), and as we save them.

A published head i is `hydra_mlp.{i}`, a list of blocks with dropout between them ("prefix-mlp") or without ("mlp"),
and `hydra_lm_head.{i}`. "prefix-mlp" has a prefix layer: a Llama model of one layer, whose embeddings are not used.
"""

from __future__ import annotations

from heads.formats.decoder_layer import read_layer
from heads.formats.layout import ConfigDict, Layout, Shapes, count, extent, read_common, replace_prefix
from heads.hydra import HydraConfig
from heads.vocabulary import Output

PREFIX = "prefix_embeding_layer."  # misspelt in published files
IGNORED = {  # copies of the target's tensors, and a computed one
    "input_embed_fn.weight",
    f"{PREFIX}embed_tokens.weight",
    f"{PREFIX}layers.0.self_attn.rotary_emb.inv_freq",
}


def read_hydra(shapes: Shapes, config: ConfigDict, vocab_size: int | None) -> Layout | None:
    """The layout of a Hydra head; None if the file has no Hydra block."""
    published = count("hydra_mlp.{}.{}.linear.weight", shapes)
    found = published or count("grounded.{}.linear.weight", shapes)
    if not found:
        return None
    renamed = _rename_published(shapes, *published) if published else {}
    ours = {file: prefix for prefix, file in renamed.items()}
    shapes = {replace_prefix(name, ours): shape for name, shape in shapes.items()}
    heads, further = found[0], count("blocks.{}.layers.{}.weight", shapes)
    blocks = [f"grounded.{i}.linear.weight" for i in range(heads)]
    hidden_size = extent(shapes, blocks, 0)
    if extent(shapes, blocks, 1, 0) == hidden_size:
        raise ValueError("its heads read no draft tokens (grounded_heads: false); Hydra heads must")
    output: Output = "shared" if "lm_head.weight" in shapes else "target"
    output = "own" if published or count("lm_heads.{}.weight", shapes) else output
    has_prefix = any(name.startswith("prefix.") for name in shapes)
    matrices = [f"lm_heads.{i}" for i in range(heads)] if output == "own" else ["lm_head"]
    head_config = HydraConfig(
        hidden_size=hidden_size,
        heads=heads,
        layers=1 + further[1] if further else 1,
        output=output,
        output_bias=any(f"{matrix}.bias" in shapes for matrix in matrices),
        projected=bool(count("grounded.{}.residual.weight", shapes)),
        prefix=read_layer(shapes, "prefix.layer.", config) if has_prefix else None,
        **read_common(shapes, [f"{matrix}.weight" for matrix in matrices], config, vocab_size),
    )
    return Layout.of(head_config, renamed, IGNORED if published else frozenset())


def _rename_published(shapes: Shapes, heads: int, places: int) -> dict[str, str]:
    """Our prefixes of names -> the published ones."""
    dropout = not count("hydra_mlp.{}.0.linear.weight", shapes)
    first, *further = range(dropout, places, 1 + dropout)
    matrix = "hydra_lm_head.{}.1." if count("hydra_lm_head.{}.1.weight", shapes) else "hydra_lm_head.{}."
    renamed = {"prefix.layer.": f"{PREFIX}layers.0.", "prefix.norm.": f"{PREFIX}norm."}
    for i in range(heads):
        renamed[f"grounded.{i}.linear."] = f"hydra_mlp.{i}.{first}.linear."
        renamed[f"grounded.{i}.residual."] = f"hydra_mlp.{i}.{first}.res_connection."
        renamed |= {f"blocks.{i}.layers.{j}.": f"hydra_mlp.{i}.{place}.linear." for j, place in enumerate(further)}
        renamed[f"lm_heads.{i}."] = matrix.format(i)
    return renamed
