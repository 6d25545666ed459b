"""Hydra heads as they are published (Ankner et al.'s repository), and as we write them ourselves.

A published head i is `hydra_mlp.{i}`, a list of blocks with dropout between them ("prefix-mlp") or without ("mlp"),
and `hydra_lm_head.{i}`. "prefix-mlp" has a prefix layer: a Llama model of one layer, whose embeddings are not used.
"""

from __future__ import annotations

import torch

from heads.decoder_layer import LayerConfig
from heads.formats.decoder_layer import read_layer
from heads.formats.layout import OWN, Layout, Said, Shapes, count, extent, read_origin, read_vocabulary, section
from heads.hydra import HydraConfig, HydraHead
from heads.vocabulary import Output

PREFIX = "prefix_embeding_layer."  # spelled so
PASSED_OVER = {  # copies of what the target has, and what can be computed
    "input_embed_fn.weight",
    f"{PREFIX}embed_tokens.weight",
    f"{PREFIX}layers.0.self_attn.rotary_emb.inv_freq",
}


def read_hydra(shapes: Shapes, said: Said, vocab_size: int | None = None) -> Layout | None:
    """The layout of a Hydra head; None where there is no block of one.

    Raises ValueError where nothing says a size that is needed, and for heads that see no tokens, which are not Hydra's.
    """
    if count("grounded.{}.linear.weight", shapes):
        config = _read_own(shapes, said, vocab_size)
        return Layout(config, {name: name for name in _parameters(config)})
    if count("hydra_mlp.{}.{}.linear.weight", shapes):
        return _read_published(shapes, said)
    return None


def _parameters(config: HydraConfig) -> list[str]:
    with torch.device("meta"):
        return list(HydraHead(config).state_dict())


def _read_own(shapes: Shapes, said: Said, vocab_size: int | None) -> HydraConfig:
    (heads,) = count("grounded.{}.linear.weight", shapes)
    behind = count("blocks.{}.layers.{}.weight", shapes)
    own = [f"lm_heads.{i}" for i in range(heads)] if count("lm_heads.{}.weight", shapes) else []
    shared = ["lm_head"] if "lm_head.weight" in shapes else []
    output: Output = "own" if own else "shared" if shared else "target"
    return HydraConfig(
        hidden_size=extent(shapes, [f"grounded.{i}.linear.weight" for i in range(heads)], 0),
        heads=heads,
        layers=1 + behind[1] if behind else 1,
        output=output,
        output_bias=any(f"{matrix}.bias" in shapes for matrix in own + shared),
        projected=bool(count("grounded.{}.residual.weight", shapes)),
        prefix=_read_prefix(shapes, "prefix.", "layer.", said),
        **read_vocabulary(shapes, [f"{matrix}.weight" for matrix in own or shared], said, vocab_size),
        **read_origin(said),
    )


def _read_published(shapes: Shapes, said: Said) -> Layout:
    heads, places = count("hydra_mlp.{}.{}.linear.weight", shapes)
    dropout = not count("hydra_mlp.{}.0.linear.weight", shapes)
    first, *behind = range(dropout, places, 1 + dropout)
    grounded = [f"hydra_mlp.{i}.{first}.linear.weight" for i in range(heads)]
    hidden_size = extent(shapes, grounded, 0)
    if extent(shapes, grounded, 1) == hidden_size:
        raise ValueError("its heads see no guessed tokens (grounded_heads: false); a Hydra head must")
    matrix = "hydra_lm_head.{}.1" if count("hydra_lm_head.{}.1.weight", shapes) else "hydra_lm_head.{}"
    config = HydraConfig(
        hidden_size=hidden_size,
        vocab_size=extent(shapes, [f"{matrix.format(i)}.weight" for i in range(heads)], 0),
        heads=heads,
        layers=1 + len(behind),
        output="own",
        output_bias=bool(count(f"{matrix}.bias", shapes)),
        projected=bool(count(f"hydra_mlp.{{}}.{first}.res_connection.weight", shapes)),
        prefix=_read_prefix(shapes, PREFIX, "layers.0.", said),
        **read_origin(said),
    )
    theirs = {f"grounded.{i}.linear": f"hydra_mlp.{i}.{first}.linear" for i in range(heads)}
    theirs |= {f"grounded.{i}.residual": f"hydra_mlp.{i}.{first}.res_connection" for i in range(heads)}
    theirs |= {
        f"blocks.{i}.layers.{j}": f"hydra_mlp.{i}.{place}.linear"
        for i in range(heads)
        for j, place in enumerate(behind)
    }
    theirs |= {f"lm_heads.{i}": matrix.format(i) for i in range(heads)}
    names = {_rename(ours, theirs): ours for ours in _parameters(config)}
    return Layout(config, names, PASSED_OVER)


def _read_prefix(shapes: Shapes, prefix: str, layer: str, said: Said) -> LayerConfig | None:
    words = section(section(said, OWN), "prefix") or said
    return read_layer(shapes, prefix + layer, words) if any(name.startswith(prefix) for name in shapes) else None


def _rename(ours: str, theirs: dict[str, str]) -> str:
    if ours.startswith("prefix."):
        return ours.replace("prefix.layer.", f"{PREFIX}layers.0.").replace("prefix.norm.", f"{PREFIX}norm.")
    module, _, part = ours.rpartition(".")
    return f"{theirs[module]}.{part}"
