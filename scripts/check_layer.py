"""What vLLM 0.33 and SGLang 0.5.23 make of an EAGLE head's layer: their rules for all kinds of EAGLE.

They build the layer from the config alone, with transformers' defaults for what it does not say.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from decode import Target
from heads.formats.eagle import EMBEDDING
from heads.formats.layout import ConfigDict, number, section
from scripts.check_folder import Finding, HeadFolder

LLAMA = {  # transformers' defaults
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "rope_theta": 10_000.0,
}
DIFFERENT = 0.01  # of their length, from which on embeddings are others; rounding to bfloat16 stays below it
COMPARED = (  # of our note and config.json
    *("architectures", "bias", "draft_vocab_size", "eagle_aux_hidden_state_layer_ids", "eagle_config", "fc_norm"),
    *("head_dim", "hidden_size", "intermediate_size", "norm_before_fc", "norm_before_residual", "norm_output"),
    *("num_attention_heads", "num_aux_hidden_states", "num_hidden_layers", "num_key_value_heads", "rms_norm_eps"),
    *("rope_parameters", "rope_scaling", "rope_theta", "vocab_size"),
)


def take(words: ConfigDict, name: str) -> float:
    """A number of the config as transformers reads it."""
    return number(words, name) or LLAMA[name]


def check_config(folder: HeadFolder, target: Target) -> Iterator[Finding]:
    if not folder.said:
        yield Finding("error", "both", "no-config", "there is no config.json, without which no server loads a folder")
    elif "model_type" not in folder.words:
        text = 'config.json has no model_type, without which transformers cannot read it; write "model_type": "llama"'
        yield Finding("error", "both", "model-type", text)
    changed = [name for name in COMPARED if folder.note and folder.note.get(name) != folder.said.get(name)]
    if folder.said and changed:
        text = (
            f"config.json says other things than the weights' own note, of {', '.join(changed)}; servers read the "
            "former, Draftless the latter: save the head anew, or undo the change"
        )
        yield Finding("error", "both", "config-differs", text)


def check_layer_count(folder: HeadFolder, target: Target) -> Iterator[Finding]:
    said, held = int(take(folder.words, "num_hidden_layers")), folder.layers
    if said != held:
        text = f"num_hidden_layers is {said} and the file has {held}; the rest would run unfilled: write {held}"
        yield Finding("error", "both", "layer-count", text)


def check_sizes(folder: HeadFolder, target: Target) -> Iterator[Finding]:
    words, attention = folder.words, f"{folder.prefix}self_attn"
    hidden, heads = int(take(words, "hidden_size")), int(take(words, "num_attention_heads"))
    head_dim = int(number(words, "head_dim") or hidden // heads)
    narrow = int(number(words, "num_key_value_heads") or heads) * head_dim
    wanted = {
        f"{attention}.q_proj.weight": heads * head_dim,
        f"{attention}.k_proj.weight": narrow,
        f"{attention}.v_proj.weight": narrow,
        f"{attention}.o_proj.weight": hidden,
        f"{folder.prefix}mlp.gate_proj.weight": int(take(words, "intermediate_size")),
    }
    wrong = [(name, rows) for name, rows in wanted.items() if folder.rows(name) not in (None, rows)]
    if wrong:
        listed = "; ".join(f"{name} has {folder.rows(name)} rows, not {rows}" for name, rows in wrong)
        text = (
            f"{listed}: correct hidden_size, num_attention_heads, num_key_value_heads, head_dim and intermediate_size, "
            "which servers go by"
        )
        yield Finding("error", "both", "layer-sizes", text)
    elif "head_dim" not in words:
        text = f"config.json does not say head_dim; hidden_size / num_attention_heads ({head_dim}) fits, but write it"
        yield Finding("note", "both", "head-dim-missing", text)
    if (size := int(take(words, "vocab_size"))) != target.vocabulary:
        text = f"vocab_size is {size}, the target's {target.vocabulary}; write the target's, if the head is for it"
        yield Finding("error", "both", "vocabulary-size", text)


def check_rope(folder: HeadFolder, target: Target) -> Iterator[Finding]:
    words, new = folder.words, section(folder.words, "rope_parameters")
    thetas = [theta for theta in (number(words, "rope_theta"), number(new, "rope_theta")) if theta is not None]
    rope = getattr(target.config, "rope_parameters", None) or {}
    rope = rope.get("full_attention") or rope  # some models have one set for each layer type
    theirs = rope.get("rope_theta", LLAMA["rope_theta"])
    if not thetas:
        if theirs != LLAMA["rope_theta"]:
            text = (
                f"nothing says rope_theta, so that all take 10000, and the target has {theirs:g}; right only if it was "
                "trained so: write it into rope_theta and rope_parameters"
            )
            yield Finding("warning", "both", "rope-theta-default", text)
    elif len(thetas) == 1 and not folder.speculators:
        text = "rope_theta stands in one form only; write rope_theta with rope_scaling, and rope_parameters: both"
        yield Finding("warning", "both", "rope-one-form", text)
    elif thetas[0] != theirs:
        text = f"rope_theta is {thetas[0]:g}, the target's {theirs:g}; right if the head was trained so"
        yield Finding("note", "both", "rope-theta-differs", text)
    if len({*thetas}) > 1 or (len(thetas) > 1 and not _scales_alike(section(words, "rope_scaling"), new)):
        text = "rope_theta and rope_scaling say other positions than rope_parameters, and servers read either"
        yield Finding("error", "both", "rope-forms-differ", text)


def _scales_alike(old: ConfigDict, new: ConfigDict) -> bool:
    def read(said: ConfigDict) -> dict[str, object]:
        kind = said.get("rope_type") or said.get("type") or "default"
        return {"kind": kind} | {name: said[name] for name in ("factor",) if said.get(name) and kind != "default"}

    return read(old) == read(new)


def check_positions(folder: HeadFolder, target: Target) -> Iterator[Finding]:
    said, most = int(take(folder.words, "max_position_embeddings")), target.context
    if said < most:
        text = (
            f"max_position_embeddings is {said}, the target's context {most}; servers crash or stop guessing past the "
            f"former: write {most}"
        )
        yield Finding("warning", "both", "max-positions", text)


def check_output_tie(folder: HeadFolder, target: Target) -> Iterator[Finding]:
    if folder.words.get("tie_word_embeddings"):
        text = "tie_word_embeddings is true, so that servers guess with the embeddings; write false"
        yield Finding("error", "both", "tied-embeddings", text)


def check_attention_bias(folder: HeadFolder, target: Target) -> Iterator[Finding]:
    """SGLang's EAGLE-3 has no such bias; vLLM passes over every `*.bias` that the config does not announce."""
    held = {name for name in "qkvo" if f"{folder.prefix}self_attn.{name}_proj.bias" in folder.tensors}
    words, name = folder.words, "attention-bias"
    if words.get("attention_bias") and len(held) < 4:
        text = (
            "attention_bias is true and the file lacks some of the biases of q, k, v and o_proj, which would be left "
            "as they are in memory; write attention_bias: false (and qkv_bias: true where those are there)"
        )
        yield Finding("error", "both", name, text)
    elif held and not words.get("attention_bias") and not words.get("qkv_bias"):
        text = "attention has biases that config.json does not say, and they are dropped without a word; say qkv_bias"
        yield Finding("error", "vllm", name, text)
    qwen = "Qwen2ForCausalLMEagle" in folder.architectures
    if held and not qwen and (folder.kind == "eagle3" or not words.get("attention_bias")):
        text = "the biases of attention have no place in its class of this head; train without them"
        yield Finding("error", "sglang", name, text)


def check_embeddings(folder: HeadFolder, target: Target) -> Iterator[Finding]:
    own = folder.tensors.get(EMBEDDING)
    if own is None or not _differ(own, target.model.get_input_embeddings().weight):
        return
    text = f"the file's {EMBEDDING} differs from the target's, which is always put in its place; train without it"
    yield Finding("error", "sglang", "embeddings-differ", text)
    if folder.kind == "eagle3":
        text = (
            f"the file's {EMBEDDING} differs from the target's and is used; some files hold a random one: unless it "
            "was trained, leave it out"
        )
        yield Finding("warning", "vllm", "embeddings-differ", text)


def _differ(own: Tensor, other: Tensor) -> bool:
    if own.shape != other.shape:
        return True
    own, other = own.float(), other.detach().to("cpu").float()
    return bool((own - other).norm() > DIFFERENT * other.norm())


def check_bias_of_fc(folder: HeadFolder, target: Target) -> Iterator[Finding]:
    """vLLM's `fc` has no bias in either method and drops one without a word; nor has SGLang's in EAGLE-3."""
    bias = folder.tensors.get("fc.bias")
    if bias is not None and bias.any():
        text = "fc.bias is not zero and is dropped without a word, so that it guesses worse; train it without"
        yield Finding("error", "vllm" if folder.kind == "eagle" else "both", "fc-bias-dropped", text)
    if folder.kind == "eagle" and bias is None:
        text = "there is no fc.bias, so that one is left as initialised; add zeros (a head saved by Draftless has them)"
        yield Finding("error", "sglang", "fc-bias-random", text)
    if folder.said.get("bias"):
        text = "bias: true is EAGLE's word for fc; to servers it means a bias of attention: leave it out"
        yield Finding("warning", "both", "bias-word", text)


RULES = (
    check_config,
    check_layer_count,
    check_sizes,
    check_rope,
    check_positions,
    check_output_tie,
    check_attention_bias,
    check_embeddings,
    check_bias_of_fc,
)
