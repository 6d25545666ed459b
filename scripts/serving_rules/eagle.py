"""Rules of vLLM 0.33 and SGLang 0.5.23 for EAGLE-1 heads (EAGLE-2, HASS), and for the decoder layer of EAGLE-1 and -3.

Both engines build the layer from config.json alone, with transformers' defaults for missing keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from decode import Target
from heads.formats.eagle import EMBEDDING, LAYER
from heads.formats.layout import MAP, OWN, number, section
from scripts.serving_rules.folder import Finding, HeadFolder, error, note, warning

FAMILIES = ("Llama", "Llama4", "Mistral", "Cohere", "MiniCPM")  # vLLM has an "Eagle..." class of each
VLLM_CLASSES = {f"{prefix}{family}ForCausalLM" for family in FAMILIES for prefix in ("", "Eagle")}
SGLANG_CLASSES = {f"{family}ForCausalLMEagle" for family in ("Llama", "Mistral", "Qwen2", "Ernie4")}
DEFAULT_THETA = 10_000.0  # of transformers
DIFFERENT = 0.01  # relative norm of the difference; rounding to bfloat16 stays below it
COMPARED = (  # keys of config.json and of the weights' metadata
    *("architectures", "bias", "draft_vocab_size", "eagle_aux_hidden_state_layer_ids", "eagle_config", "fc_norm"),
    *("head_dim", "hidden_size", "intermediate_size", "norm_before_fc", "norm_before_residual", "norm_output"),
    *("num_attention_heads", "num_aux_hidden_states", "num_hidden_layers", "num_key_value_heads", "rms_norm_eps"),
    *("rope_parameters", "rope_scaling", "rope_theta", "vocab_size"),
)


def check_architectures(folder: HeadFolder, target: Target) -> Iterator[Finding]:
    names = folder.architectures
    in_vllm, in_sglang = VLLM_CLASSES & {*names}, SGLANG_CLASSES & {*names}
    if folder.is_speculators or any("Eagle3" in name for name in names):
        yield error("both", "other-kind", "config.json says EAGLE-3, but the tensors are an EAGLE-1 head's")
    if not in_vllm:
        yield error("vllm", "architectures", f'architectures, {names}, has no class of vLLM: add "LlamaForCausalLM"')
    if not in_sglang:
        yield error("sglang", "architectures", f'architectures, {names}, lacks "LlamaForCausalLMEagle": put it first')
    if in_vllm and in_sglang:
        text = "architectures has a class for each: vLLM 0.32 and 0.33 served such a folder, SGLang 0.5.23 resolves it"
        yield note("both", "two-architectures", text)


def check_tensors(folder: HeadFolder, target: Target) -> Iterator[Finding]:
    for tensor, name in ((f"{LAYER}input_layernorm.weight", "input-layernorm"), ("norm.weight", "final-norm")):
        if tensor in folder.tensors:
            yield error("both", name, f"neither engine has a place for {tensor}; train the head without it")
    if "lm_head.weight" in folder.tensors:
        yield error("vllm", "lm-head-present", "vLLM refuses lm_head.weight and uses the target's; remove it")
        yield warning("sglang", "lm-head-present", "SGLang ignores lm_head.weight and uses the target's; remove it")
    if section(folder.config, OWN).get(MAP) or "d2t" in folder.tensors:
        text = "engines ignore its draft vocabulary, which is slower; SGLang takes one with --speculative-token-map"
        yield note("both", "draft-vocabulary-unused", text)


def check_config(folder: HeadFolder, target: Target) -> Iterator[Finding]:
    if not folder.config:
        yield error("both", "no-config", "there is no config.json; save the head with Draftless to get one")
    elif "model_type" not in folder.layer_config:
        yield error("both", "model-type", 'config.json has no model_type; write "model_type": "llama"')
    changed = [name for name in COMPARED if folder.metadata and folder.metadata.get(name) != folder.config.get(name)]
    if folder.config and changed:
        text = f"config.json (read by engines) and the weights' metadata (by Draftless) differ in {', '.join(changed)}"
        yield error("both", "config-differs", f"{text}: undo the change, or save the head again")
    if folder.layer_config.get("tie_word_embeddings"):
        yield error("both", "tied-embeddings", "tie_word_embeddings: true replaces the output matrix; write false")
    if folder.config.get("bias"):
        yield warning("both", "bias-word", "bias: true means a bias of attention to engines, not of fc; remove it")
    stated, held = folder.read_size("num_hidden_layers"), len(folder.layers)
    if stated != held:
        yield error("both", "layer-count", f"num_hidden_layers is {stated}, but the file has {held}: write {held}")


def check_sizes(folder: HeadFolder, target: Target) -> Iterator[Finding]:
    hidden, heads = folder.read_size("hidden_size"), folder.read_size("num_attention_heads")
    head_dim = int(number(folder.layer_config, "head_dim") or hidden // heads)
    key_size = int(number(folder.layer_config, "num_key_value_heads") or heads) * head_dim
    sizes = {"q": heads * head_dim, "k": key_size, "v": key_size, "o": hidden}
    expected = {f"{folder.prefix}self_attn.{name}_proj.weight": rows for name, rows in sizes.items()}
    expected[f"{folder.prefix}mlp.gate_proj.weight"] = folder.read_size("intermediate_size")
    wrong = [name for name, rows in expected.items() if folder.rows(name) not in (None, rows)]
    if wrong:
        text = "; ".join(f"{name} has {folder.rows(name)} rows, not {expected[name]}" for name in wrong)
        keys = "hidden_size, num_attention_heads, num_key_value_heads, head_dim and intermediate_size"
        yield error("both", "layer-sizes", f"{text}: correct {keys}")
    elif "head_dim" not in folder.layer_config:
        text = f"config.json has no head_dim; the default hidden_size / num_attention_heads ({head_dim}) fits: write it"
        yield note("both", "head-dim-missing", text)
    if (size := folder.read_size("vocab_size")) != target.vocabulary:
        yield error("both", "vocabulary-size", f"vocab_size is {size}: write the target's, {target.vocabulary}")


def check_rope(folder: HeadFolder, target: Target) -> Iterator[Finding]:
    """Older transformers read rope_theta and rope_scaling, newer ones rope_parameters."""
    config, new = folder.layer_config, section(folder.layer_config, "rope_parameters")
    thetas = [theta for rope in (config, new) if (theta := number(rope, "rope_theta")) is not None]
    rope = getattr(target.config, "rope_parameters", None) or {}
    theirs = (rope.get("full_attention") or rope).get("rope_theta", DEFAULT_THETA)  # some have one for each layer type
    if not thetas and theirs != DEFAULT_THETA:
        text = f"config.json has no rope_theta, so engines use 10000; the target's is {theirs:g}: write the trained one"
        yield warning("both", "rope-theta-default", text)
    elif len(thetas) == 1 and not folder.is_speculators:
        text = "rope_theta is in one form only; write both: rope_theta with rope_scaling, and rope_parameters"
        yield warning("both", "rope-one-form", text)
    elif thetas and thetas[0] != theirs:
        text = f"rope_theta is {thetas[0]:g}, the target's is {theirs:g}; correct only if the head was trained with it"
        yield note("both", "rope-theta-differs", text)
    alike = _summarise_scaling(section(config, "rope_scaling")) == _summarise_scaling(new)
    if len(thetas) > 1 and (thetas[0] != thetas[1] or not alike):
        text = "rope_theta with rope_scaling differs from rope_parameters, and engines read either: make them equal"
        yield error("both", "rope-forms-differ", text)


def _summarise_scaling(rope: Mapping[str, Any]) -> tuple[Any, Any]:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    return kind, None if kind == "default" else rope.get("factor") or None


def check_positions(folder: HeadFolder, target: Target) -> Iterator[Finding]:
    stated, context = folder.read_size("max_position_embeddings"), target.context
    if stated < context:
        text = f"engines crash or stop drafting at max_position_embeddings ({stated}): write the target's {context}"
        yield warning("both", "max-positions", text)


def check_biases(folder: HeadFolder, target: Target) -> Iterator[Finding]:
    """vLLM ignores each `*.bias` that the config does not state. SGLang's EAGLE-3 class has no biases."""
    held = {name for name in "qkvo" if f"{folder.prefix}self_attn.{name}_proj.bias" in folder.tensors}
    config, name, bias = folder.layer_config, "attention-bias", folder.tensors.get("fc.bias")
    if config.get("attention_bias") and len(held) < 4:
        text = "attention_bias: true needs biases of q, k, v and o_proj: write false, or qkv_bias: true for q, k and v"
        yield error("both", name, text)
    elif held and not config.get("attention_bias") and not config.get("qkv_bias"):
        yield error("vllm", name, "vLLM ignores the biases of attention unless config.json has qkv_bias: true; add it")
    qwen = "Qwen2ForCausalLMEagle" in folder.architectures
    if held and not qwen and (folder.kind == "eagle3" or not config.get("attention_bias")):
        yield error("sglang", name, "SGLang's class of this head has no biases of attention; train without them")
    if bias is not None and bias.any():
        text = "fc.bias is not zero and is ignored, so fewer draft tokens are accepted; train without it"
        yield error("vllm" if folder.kind == "eagle" else "both", "fc-bias-dropped", text)
    if bias is None and folder.kind == "eagle":
        yield error("sglang", "fc-bias-random", "there is no fc.bias, so SGLang's stays random; add zeros")


def check_embeddings(folder: HeadFolder, target: Target) -> Iterator[Finding]:
    own, theirs = folder.tensors.get(EMBEDDING), target.model.get_input_embeddings().weight.detach().cpu().float()
    if own is None or (own.shape == theirs.shape and torch.dist(own.float(), theirs) <= DIFFERENT * theirs.norm()):
        return
    text = f"{EMBEDDING} differs from the target's, which SGLang uses instead; train the head without it"
    yield error("sglang", "embeddings-differ", text)
    if folder.kind == "eagle3":
        text = f"{EMBEDDING} differs from the target's, and vLLM uses it; leave it out unless it was trained"
        yield warning("vllm", "embeddings-differ", text)


DECODER_LAYER_RULES = (check_config, check_sizes, check_rope, check_positions, check_biases, check_embeddings)
EAGLE_RULES = (check_architectures, check_tensors, *DECODER_LAYER_RULES)
