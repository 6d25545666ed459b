"""EAGLE-3 heads as they are published by its authors, SpecForge, ModelOpt and speculators, and as servers load them.

The layer is `midlayer` or `layers.0`; speculators' config keeps its sizes in an object of their own. One word has two
meanings, and which one is meant shows in the rest: see `_read_norms`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from heads.eagle3 import Eagle3Config, Eagle3Head, choose_features
from heads.formats.decoder_layer import describe_layer, read_layer
from heads.formats.eagle import EMBEDDING, LAYER, LONGEST, find_vocabulary
from heads.formats.layout import OWN, Layout, Said, Shapes, count, extent, number, read_origin, section
from heads.formats.token_map import MAP, write_offsets
from heads.vocabulary import Output

MIDLAYER = "midlayer."
READ = "eagle_aux_hidden_state_layer_ids"
NESTED = "transformer_layer_config"  # speculators' sizes of the layer
KNOWN = {  # what may be true in speculators' configs
    *("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "embed_requires_grad"),
    *("tie_word_embeddings", "return_dict", "use_cache"),
}


def read_eagle3(shapes: Shapes, said: Said, vocab_size: int | None = None, layers: int | None = None) -> Layout | None:
    """The layout of an EAGLE-3 head; None where there is none.

    layers: how many the target has, for configs that do not say which are read. Raises ValueError where nothing says
    a size that is needed, where a smaller vocabulary is not mapped, and for a variant that is not known.
    """
    _refuse_unknown(said)
    prefix = MIDLAYER if any(name.startswith(MIDLAYER) for name in shapes) else LAYER
    query = f"{prefix}self_attn.q_proj.weight"
    joins = prefix == MIDLAYER or f"{prefix}hidden_norm.weight" in shapes
    if not joins or not any(name.startswith(f"{prefix}self_attn.") for name in shapes):
        return None
    own, words = section(said, OWN), {**said, **section(said, NESTED)}
    hidden_size = extent(shapes, [f"{prefix}self_attn.o_proj.weight"], 0, extent(shapes, [query], 1, 2) // 2)
    features = _read_features(said, layers)
    target = _read_target_size(shapes, own or words, len(features), hidden_size)
    embedding = target != hidden_size or bool(EMBEDDING in shapes and (said.get("embed_requires_grad") or own))
    vocabulary = find_vocabulary(shapes, words, vocab_size, hidden_size)
    config = Eagle3Config(
        hidden_size=hidden_size,
        vocab_size=vocabulary,
        layer=read_layer(shapes, prefix, section(own, "layer") or words),
        features=features,
        target_hidden_size=None if target == hidden_size else target,
        embedding=embedding,
        bias="fc.bias" in shapes,
        max_position_embeddings=number(own, "max_position_embeddings"),
        **_read_draft(shapes, vocabulary),
        **_read_norms(shapes, said, prefix),
        **_read_origin(said),
    )
    return _name_tensors(config, prefix)


def _name_tensors(config: Eagle3Config, prefix: str) -> Layout:
    with torch.device("meta"):
        ours = Eagle3Head(config).state_dict()
    names = {name.replace(MIDLAYER, prefix, 1): name for name in ours}
    return Layout(config, names, {EMBEDDING, "t2d"} if config.final_norm else {EMBEDDING, "t2d", "norm.weight"})


def _refuse_unknown(said: Said) -> None:
    kind = said.get("speculators_model_type")
    if kind not in (None, "eagle3"):
        raise ValueError(f"it is speculators' {kind} head; of theirs, eagle3 can be loaded")
    if NESTED in said:
        strange = [name for name, value in said.items() if value is True and name not in KNOWN]
        if strange:
            raise ValueError(f"its config says {strange[0]}: true, which is not known; known are {sorted(KNOWN)}")


def _read_features(said: Said, layers: int | None) -> tuple[int, ...]:
    """Which hidden states are read, in transformers' numbering: L is the output of the first L layers.

    So are the ids of vLLM and speculators, at the top of a config. Those within `eagle_config` are SGLang's and
    SpecForge's and count the layer itself, from 0, that puts them out.
    """
    own, outer = section(said, OWN).get("features"), said.get(READ)
    inner = section(said, "eagle_config").get(READ)
    given, shift = (own or outer, 0) if own or outer else (inner, 1)
    if not given:
        if layers is None:
            raise ValueError(f"nothing in it says which layers it reads; pass layers=, or add {READ} to its config")
        return choose_features(layers)
    if not isinstance(given, list) or not all(type(layer) is int for layer in given):
        raise ValueError(f"its config says {READ}: {given!r}; that must be a list of layers")
    return tuple(layer + shift for layer in given)


def _read_target_size(shapes: Shapes, words: Said, parts: int, hidden_size: int) -> int:
    wide = extent(shapes, ["fc.weight"], 1, parts)
    size = number(words, "target_hidden_size") or wide // parts
    if size * parts != wide:
        raise ValueError(f"wrong: fc.weight has {wide} columns, and it reads {parts} layers of {size}; see {READ}")
    if size != hidden_size and EMBEDDING not in shapes:
        raise ValueError(
            f"missing: {EMBEDDING}, for by fc.weight's {wide} columns and {parts} layers ({READ}) its target's hidden "
            f"size is {size}, and its own is {hidden_size}"
        )
    return int(size)


def _read_draft(shapes: Shapes, vocab_size: int) -> dict[str, Any]:
    """The config's output and draft_size. Raises ValueError where tokens were left out and nothing says which."""
    output: Output = "shared" if "lm_head.weight" in shapes else "target"
    mapped = extent(shapes, [MAP], 0) if MAP in shapes else vocab_size
    rows = extent(shapes, ["lm_head.weight"], 0, mapped)
    if MAP not in shapes and rows != vocab_size:
        raise ValueError(f"missing: d2t, which must say what the {rows} tokens of lm_head.weight of {vocab_size} are")
    if output == "target" and mapped < vocab_size:
        raise ValueError(f"missing: lm_head.weight, which it must have for its own vocabulary of {mapped} tokens")
    return {"output": output, "draft_size": mapped if mapped < vocab_size else None}


def _read_norms(shapes: Shapes, said: Said, prefix: str) -> dict[str, Any]:
    """The config's norms. A norm that the file has is used, whatever the config says.

    `norm_output` is whether normed states are fed back in speculators, vLLM and SGLang, and whether the output matrix
    reads normed ones in SpecForge, whose configs are flat and whose layer is `midlayer`. EAGLE-3.1 (`fc_norm`) has
    only the first meaning, in SpecForge too.
    """
    own, nested = section(said, OWN), NESTED in said
    names = ("norm_before_residual", "normed_feedback", "final_norm")
    fc_norm = bool(said.get("fc_norm")) or bool(count("fc_norm.{}.weight", shapes))
    if own:
        chosen = {name: bool(own.get(name, name == "final_norm")) for name in names}
    else:
        word, fed_back = said.get("norm_output"), nested or fc_norm or prefix == LAYER
        before = bool(said.get("norm_before_residual", nested))
        chosen = dict(zip(names, (before, fed_back and bool(word), fed_back or word is not False), strict=True))
    return chosen | {
        "fc_norm": fc_norm,
        "norm_before_fc": bool(said.get("norm_before_fc")) or "input_norm.weight" in shapes,
    }


def _read_origin(said: Said) -> dict[str, Any]:
    origin = read_origin(said)
    verifier = section(section(said, "speculators_config"), "verifier").get("name_or_path")
    return {**origin, "target_name": origin["target_name"] or verifier}


def export_eagle3(head: Eagle3Head) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the config of a folder for vLLM 0.33 and SGLang 0.5.23.

    The layers that are read are said in both conventions. SGLang passes over `norm_before_residual`, embeddings of
    the head's own and all biases; neither server can leave out the last norm; vLLM alone has norms of queries and
    keys, in the Qwen3 form of the network. Heads of the default config do without all of these.
    """
    states, config = dict(head.state_dict()), head.config
    tokens = states.pop(MAP, None)
    if tokens is not None:
        states |= write_offsets(tokens, config.vocab_size)
    normed = config.layer.qk_norm
    described = describe_layer(config.layer) | {
        "architectures": ["Eagle3Qwen3ForCausalLM" if normed else "LlamaForCausalLMEagle3"],
        "model_type": "qwen3" if normed else "llama",
        "hidden_size": config.hidden_size,
        "target_hidden_size": head.target_hidden_size,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": None if config.output == "target" else head.draft_size,
        "max_position_embeddings": config.max_position_embeddings or LONGEST,
        "tie_word_embeddings": False,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.normed_feedback,
        READ: list(config.features),
        "num_aux_hidden_states": len(config.features),
        "eagle_config": {READ: [layer - 1 for layer in config.features], "use_aux_hidden_state": True},
    }
    return states, described
