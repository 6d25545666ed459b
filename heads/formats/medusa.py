"""Medusa heads as published (FasterDecoding's Medusa), and as vLLM's Medusa class reads them.

Blocks are named `blocks.0.layers.0` (vLLM) or `0.0.linear` (FasterDecoding), after `medusa_heads.` (vLLM strips it)
or `medusa_head.` (a whole Medusa-2 model). There is an output matrix for each head, one for all, or none if the
target's is used. A whole model's base weights are ignored. Its heads were trained jointly with them, so they fit only
the model in their own folder.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from heads.formats.layout import MAP, OWN, ConfigDict, Layout, Shapes, count, extent, read_common, section
from heads.medusa import MedusaConfig, MedusaHead
from heads.vocabulary import Output

WHOLE = "medusa_head."
PREFIXES = ("medusa_heads.", WHOLE, "")
BLOCKS = ("blocks.{}.layers.{}", "{}.{}.linear")
BASE = ("model.", "lm_head.")  # prefixes of a whole model's other tensors


def read_medusa(shapes: Shapes, config: ConfigDict, vocab_size: int | None) -> Layout | None:
    """The layout of a Medusa head; None if the file has no Medusa block."""
    styles = [(prefix, block) for prefix in PREFIXES for block in BLOCKS if count(f"{prefix}{block}.weight", shapes)]
    if not styles:
        return None
    prefix, block = styles[0]
    whole = prefix == WHOLE
    files = {name.removeprefix(prefix): name for name in shapes if not whole or name.startswith(prefix)}
    bare = {name: shapes[file] for name, file in files.items()}  # without the prefix
    blocks, biases, *matrices = (
        count(form, bare) for form in (f"{block}.weight", f"{block}.bias", "{}.{}.weight", "lm_heads.{}.weight")
    )
    heads, layers = max(numbers[0] for numbers in (blocks, biases, *matrices) if numbers), blocks[1]
    modules = {f"blocks.{i}.layers.{j}.": f"{block.format(i, j)}." for i in range(heads) for j in range(layers)}
    output, outputs = _name_output(bare, config, heads, layers)
    head_config = MedusaConfig(
        hidden_size=extent(bare, [module + part for module in modules.values() for part in ("weight", "bias")], 0),
        heads=heads,
        layers=layers,
        output=output,
        bias=bool(biases),
        **read_common(bare, outputs.values(), config, vocab_size),
    )
    if whole:  # The config is the base model's; its base_model_name_or_path is an earlier model.
        head_config = replace(head_config, target_layers=config.get("num_hidden_layers"), target_name=None)
    names = Layout.of(head_config, modules | outputs).names | {file: ours for ours, file in outputs.items()}
    names |= {MAP: MAP} if MAP in bare else {}
    ignored = {name for name in shapes if whole and name.startswith(BASE)}
    return Layout(head_config, {files.get(name, prefix + name): ours for name, ours in names.items()}, ignored)


def _name_output(shapes: Shapes, config: ConfigDict, heads: int, layers: int) -> tuple[Output, dict[str, str]]:
    """Where the output matrices come from, and our names of them -> the file's."""
    if count("{}.{}.weight", shapes):
        return "own", {f"lm_heads.{i}.weight": f"{i}.{layers}.weight" for i in range(heads)}
    if own := count("lm_heads.{}.weight", shapes):
        if own == (1,) and config.get("original_lm_head"):
            return "shared", {"lm_head.weight": "lm_heads.0.weight"}
        return "own", {f"lm_heads.{i}.weight": f"lm_heads.{i}.weight" for i in range(heads)}
    if "lm_head.weight" not in shapes:
        return "target", {}
    if section(config, OWN).get("output") == "target":  # a copy of the target's, written for vLLM
        return "target", {"borrowed": "lm_head.weight"}
    return "shared", {"lm_head.weight": "lm_head.weight"}


def export_medusa(head: MedusaHead) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and config of a folder for vLLM's Medusa class, which needs an output matrix in the file.

    Raises ValueError if the head uses the target's and has not borrowed it.
    """
    states, config = head.state_dict(), head.config
    if head.output == "target":
        states["lm_head.weight"] = head.output_layer(0)[0]
    return states, {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "num_heads": config.heads,
        "num_hidden_layers": config.layers,
        "truncated_vocab_size": head.draft_size,
        "medusa_fc_bias": config.bias,
        "original_lm_head": config.output != "own",
    }
