"""Medusa heads as they are published, and as vLLM (<= 0.32) reads them.

Blocks are named in one of two ways, `blocks.0.layers.0` (vLLM) or `0.0.linear` (FasterDecoding's Medusa), either
behind `medusa_heads.` (which vLLM strips) or `medusa_head.` (in a whole Medusa-2 model). Output matrices are one a
head, one for all, or absent where the target's own is meant. A whole model's base weights are passed over; its heads
were trained together with them, so they fit the model in their own folder and not the one that it was made from.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from heads.formats.layout import OWN, Layout, Said, Shapes, count, extent, number, read_origin, read_vocabulary, section
from heads.medusa import MedusaConfig, MedusaHead
from heads.vocabulary import Output

WHOLE = "medusa_head."
PREFIXES = ("medusa_heads.", WHOLE, "")
BLOCKS = ("blocks.{}.layers.{}", "{}.{}.linear")
BASE = ("model.", "lm_head.")  # what else is in a whole model


def read_medusa(shapes: Shapes, said: Said, vocab_size: int | None = None) -> Layout | None:
    """The layout of a Medusa head; None where there is no block of one.

    Raises ValueError where nothing says the size of the target's vocabulary.
    """
    styles = [(prefix, block) for prefix in PREFIXES for block in BLOCKS if count(f"{prefix}{block}.weight", shapes)]
    if not styles:
        return None
    prefix, block = styles[0]
    whole = prefix == WHOLE
    files = {name.removeprefix(prefix): name for name in shapes if not whole or name.startswith(prefix)}
    config, ours = _read({name: shapes[file] for name, file in files.items()}, block, said, whole, vocab_size)
    names = {files.get(name, prefix + name): known for name, known in ours.items()}
    return Layout(config, names, {name for name in shapes if whole and name.startswith(BASE)})


def _read(
    shapes: Shapes, block: str, said: Said, whole: bool, vocab_size: int | None
) -> tuple[MedusaConfig, dict[str, str]]:
    """The config, and the name of each tensor with our name for it."""
    forms = (f"{block}.weight", f"{block}.bias", "{}.{}.weight", "lm_heads.{}.weight")
    blocks, biases, *matrices = (count(form, shapes) for form in forms)
    heads = max(numbers[0] for numbers in (blocks, biases, *matrices) if numbers)
    layers = blocks[1]
    names = {
        f"{block.format(i, j)}.{part}": f"blocks.{i}.layers.{j}.{part}"
        for i in range(heads)
        for j in range(layers)
        for part in (("weight", "bias") if biases else ("weight",))
    }
    output, ends = _name_output(shapes, said, heads, layers)
    origin = read_origin(said)
    if whole:  # the config is the base model's, and the name in it that of an earlier one
        origin = {"target_layers": number(said, "num_hidden_layers"), "target_name": None}
    config = MedusaConfig(
        hidden_size=extent(shapes, names, 0),
        heads=heads,
        layers=layers,
        output=output,
        bias=bool(biases),
        **read_vocabulary(shapes, ends, said, vocab_size),
        **origin,
    )
    return config, names | ends | ({"token_map": "token_map"} if "token_map" in shapes else {})


def _name_output(shapes: Shapes, said: Said, heads: int, layers: int) -> tuple[Output, dict[str, str]]:
    """What the heads end in, and the names of its matrices."""
    if count("{}.{}.weight", shapes):
        return "own", {f"{i}.{layers}.weight": f"lm_heads.{i}.weight" for i in range(heads)}
    if own := count("lm_heads.{}.weight", shapes):
        if own == (1,) and said.get("original_lm_head"):
            return "shared", {"lm_heads.0.weight": "lm_head.weight"}
        return "own", {f"lm_heads.{i}.weight": f"lm_heads.{i}.weight" for i in range(heads)}
    if "lm_head.weight" not in shapes:
        return "target", {}
    if section(said, OWN).get("output") == "target":  # rows of the target's, written for vLLM alone
        return "target", {"lm_head.weight": "borrowed"}
    return "shared", {"lm_head.weight": "lm_head.weight"}


def export_medusa(head: MedusaHead) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the config of a folder for vLLM's Medusa, which has no word for the target's own matrix.

    Raises ValueError where a head that uses it has not borrowed it.
    """
    states, config = dict(head.state_dict()), head.config
    if head.output == "target":
        states["lm_head.weight"] = head.vocabulary(0)[0]
    described = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "num_heads": config.heads,
        "num_hidden_layers": config.layers,
        "truncated_vocab_size": config.draft_size or config.vocab_size,
        "medusa_fc_bias": config.bias,
        "original_lm_head": config.output != "own",
    }
    return states, described
