"""EAGLE-1 heads as they are published (EAGLE-2 and HASS have the same), and as servers load them.

A published folder has a copy of the target's embeddings, and a config of the target's with a few words of its own:
`num_hidden_layers` and `num_key_value_heads` are often wrong, no `bias` means that there is one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from heads.eagle import EagleConfig, EagleHead
from heads.formats.decoder_layer import describe_layer, read_layer
from heads.formats.layout import OWN, Layout, Said, Shapes, extent, number, read_origin, section
from heads.formats.token_map import MAP

LAYER = "layers.0."
EMBEDDING = "embed_tokens.weight"
LONGEST = 131_072  # tokens that servers are told of where the target's own limit is not known


def read_eagle(shapes: Shapes, said: Said, vocab_size: int | None = None) -> Layout | None:
    """The layout of an EAGLE head; None where there is none. A head's file with EAGLE-3's names is not looked for here.

    Raises ValueError where nothing says a size that is needed, or what the file has cannot be.
    """
    if "fc.weight" not in shapes or not any(name.startswith(f"{LAYER}self_attn.") for name in shapes):
        return None
    own = section(said, OWN)
    hidden_size = extent(shapes, ["fc.weight"], 0)
    bias = bool(own.get("bias")) if own else "fc.bias" in shapes or said.get("bias", True)
    if bias and "fc.bias" not in shapes:
        raise ValueError("missing: fc.bias, which it must have unless its config says bias: false")
    config = EagleConfig(
        hidden_size=hidden_size,
        vocab_size=find_vocabulary(shapes, said, vocab_size, hidden_size),
        layer=read_layer(shapes, LAYER, section(own, "layer") or said),
        draft_size=extent(shapes, [MAP], 0) if MAP in shapes else None,
        bias=bool(bias),
        max_position_embeddings=number(own, "max_position_embeddings"),
        **read_origin(said),
    )
    with torch.device("meta"):
        names = {name: name for name in EagleHead(config).state_dict()}
    return Layout(config, names, {EMBEDDING, *(["fc.bias"] if own and not bias else [])})


def find_vocabulary(shapes: Shapes, said: Said, given: int | None, width: int) -> int:
    """The size of the target's vocabulary. Raises ValueError where nothing says it, and for embeddings of other width.

    width: of the head's embeddings. said: the config's words for its layer. given: the size from the caller.
    """
    if EMBEDDING in shapes:
        rows = extent(shapes, [EMBEDDING], 0)
        if tuple(shapes[EMBEDDING]) != (rows, width):
            raise ValueError(f"wrong: {EMBEDDING} is {list(shapes[EMBEDDING])}, not {[rows, width]}")
        return rows
    masked = extent(shapes, ["t2d"], 0) if "t2d" in shapes else None
    size = masked or number(section(said, OWN), "vocab_size") or number(said, "vocab_size") or given
    if size is None:
        raise ValueError("nothing in it says how many tokens its target has; pass vocab_size=, or add it to its config")
    return int(size)


def export_eagle(head: EagleHead) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the config of a folder for vLLM 0.33 and SGLang 0.5.23; neither takes an output matrix.

    Both look for their own name of it: SGLang for the first, vLLM for "Eagle" before the second. SGLang wants a bias
    and gets zeros. vLLM would drop one without a word, so a head that has one is not named to it. A smaller
    vocabulary is in our part of the config, where neither looks.
    """
    states, config = dict(head.state_dict()), head.config
    tokens = states.pop(MAP, None)
    states.setdefault("fc.bias", torch.zeros(config.hidden_size, dtype=head.fc.weight.dtype))
    described = describe_layer(config.layer) | {
        "architectures": ["LlamaForCausalLMEagle", *([] if config.bias else ["LlamaForCausalLM"])],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings or LONGEST,
        "attention_bias": False,  # would be one of o_proj too
        "qkv_bias": config.layer.qkv_bias,
        "tie_word_embeddings": False,
        OWN: {} if tokens is None else {MAP: tokens.tolist()},
    }
    return states, described
