"""Hydra heads as published (Ankner et al.'s repository), and as we save them.

A published head i is `hydra_mlp.{i}`, a list of blocks with dropout between them ("prefix-mlp") or without ("mlp"),
and `hydra_lm_head.{i}`. "prefix-mlp" has a prefix layer: a Llama model of one layer, whose embeddings are not used.
"""

from __future__ import annotations

from heads.decoder_layer import LayerConfig
from heads.formats.decoder_layer import read_layer
from heads.formats.layout import OWN, ConfigDict, Layout, Shapes, count, extent, read_target, read_vocabulary, section
from heads.hydra import HydraConfig
from heads.vocabulary import Output

PREFIX = "prefix_embeding_layer."  # misspelt in published files
IGNORED = {  # copies of the target's tensors, and a computed one
    "input_embed_fn.weight",
    f"{PREFIX}embed_tokens.weight",
    f"{PREFIX}layers.0.self_attn.rotary_emb.inv_freq",
}


def read_hydra(shapes: Shapes, config: ConfigDict, vocab_size: int | None = None) -> Layout | None:
    """The layout of a Hydra head; None if the file has no Hydra block.

    Raises ValueError if a size is unknown, or if the heads read no draft tokens, which Hydra heads must.
    """
    if count("grounded.{}.linear.weight", shapes):
        return Layout.of(_read_own(shapes, config, vocab_size))
    return _read_published(shapes, config) if count("hydra_mlp.{}.{}.linear.weight", shapes) else None


def _read_own(shapes: Shapes, config: ConfigDict, vocab_size: int | None) -> HydraConfig:
    (heads,) = count("grounded.{}.linear.weight", shapes)
    further = count("blocks.{}.layers.{}.weight", shapes)
    own = [f"lm_heads.{i}" for i in range(heads)] if count("lm_heads.{}.weight", shapes) else []
    shared = ["lm_head"] if "lm_head.weight" in shapes else []
    output: Output = "own" if own else "shared" if shared else "target"
    return HydraConfig(
        hidden_size=extent(shapes, [f"grounded.{i}.linear.weight" for i in range(heads)], 0),
        heads=heads,
        layers=1 + further[1] if further else 1,
        output=output,
        output_bias=any(f"{matrix}.bias" in shapes for matrix in own + shared),
        projected=bool(count("grounded.{}.residual.weight", shapes)),
        prefix=_read_prefix(shapes, "prefix.", "layer.", config),
        **read_vocabulary(shapes, [f"{matrix}.weight" for matrix in own or shared], config, vocab_size),
        **read_target(config),
    )


def _read_published(shapes: Shapes, config: ConfigDict) -> Layout:
    heads, places = count("hydra_mlp.{}.{}.linear.weight", shapes)
    dropout = not count("hydra_mlp.{}.0.linear.weight", shapes)
    first, *further = range(dropout, places, 1 + dropout)
    grounded = [f"hydra_mlp.{i}.{first}.linear.weight" for i in range(heads)]
    hidden_size = extent(shapes, grounded, 0)
    if extent(shapes, grounded, 1) == hidden_size:
        raise ValueError("its heads read no draft tokens (grounded_heads: false); Hydra heads must")
    matrix = "hydra_lm_head.{}.1" if count("hydra_lm_head.{}.1.weight", shapes) else "hydra_lm_head.{}"
    head_config = HydraConfig(
        hidden_size=hidden_size,
        vocab_size=extent(shapes, [f"{matrix.format(i)}.weight" for i in range(heads)], 0),
        heads=heads,
        layers=1 + len(further),
        output="own",
        output_bias=bool(count(f"{matrix}.bias", shapes)),
        projected=bool(count(f"hydra_mlp.{{}}.{first}.res_connection.weight", shapes)),
        prefix=_read_prefix(shapes, PREFIX, "layers.0.", config),
        **read_target(config),
    )
    renamed = {"prefix.layer.": f"{PREFIX}layers.0.", "prefix.norm.": f"{PREFIX}norm."}
    for i in range(heads):
        renamed[f"grounded.{i}.linear."] = f"hydra_mlp.{i}.{first}.linear."
        renamed[f"grounded.{i}.residual."] = f"hydra_mlp.{i}.{first}.res_connection."
        renamed |= {f"blocks.{i}.layers.{j}.": f"hydra_mlp.{i}.{place}.linear." for j, place in enumerate(further)}
        renamed[f"lm_heads.{i}."] = f"{matrix.format(i)}."
    return Layout.of(head_config, renamed, IGNORED)


def _read_prefix(shapes: Shapes, prefix: str, layer: str, config: ConfigDict) -> LayerConfig | None:
    layer_config = section(section(config, OWN), "prefix") or config
    return read_layer(shapes, prefix + layer, layer_config) if any(name.startswith(prefix) for name in shapes) else None
