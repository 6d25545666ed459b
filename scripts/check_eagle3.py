"""What vLLM 0.33 and SGLang 0.5.23 take for an EAGLE-3 head: format, norms and vocabulary (layers: check_aux.py)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from decode import Target
from heads.formats.eagle3 import KNOWN, MIDLAYER
from heads.formats.layout import count, number, section
from scripts.check_folder import Engine, Finding, HeadFolder

LLAMA = {"LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLM"}  # vLLM puts "Eagle3" before the last
QWEN = {"Eagle3Qwen3ForCausalLM", "Qwen3ForCausalLM"}
IN_SGLANG = "LlamaForCausalLMEagle3"
IN_SPECULATORS = ("llama", "qwen3")  # vLLM goes by the layer's model_type there
FURTHER = re.compile(r"layers\.([1-9]\d*)\.")
FURTHER_NORM: dict[Engine, str] = {"vllm": "input_layernorm", "sglang": "hidden_norm"}


def check_architectures(folder: HeadFolder, target: Target) -> Iterator[Finding]:
    if folder.speculators:
        return
    named = folder.architectures
    if any(name.endswith("Eagle") for name in named):
        text = f"config.json calls it EAGLE-1 ({', '.join(named)}), and its tensors are those of EAGLE-3"
        yield Finding("error", "both", "other-kind", text)
    if not (LLAMA | QWEN) & {*named}:
        text = f'architectures is {named}; vLLM knows none of it as EAGLE-3: write "{IN_SGLANG}"'
        yield Finding("error", "vllm", "architectures", text)
    if IN_SGLANG not in named:
        text = f'architectures is {named}; SGLang wants its own name of the class: write "{IN_SGLANG}"'
        yield Finding("error", "sglang", "architectures", text)
    text = "name its algorithm EAGLE3, as below: with EAGLE it would run and accept nothing, without a word"
    yield Finding("note", "sglang", "sglang-algorithm", text)


def check_speculators(folder: HeadFolder, target: Target) -> Iterator[Finding]:
    """The format of vLLM's speculators: one object for the layer's sizes, one for the verifier."""
    if not folder.speculators:
        return
    text = "it is in speculators' format, which SGLang does not read; load and save it with Draftless for a flat one"
    yield Finding("error", "sglang", "speculators-format", text)
    for name in (name for name, value in folder.said.items() if value is True and name not in KNOWN):
        text = f"its config says {name}: true, which is not known; it would run without: known are {sorted(KNOWN)}"
        yield Finding("error", "draftless", "unknown-flag", text)
    model = folder.words.get("model_type")
    if (kind := folder.said.get("speculators_model_type")) != "eagle3" or model not in IN_SPECULATORS:
        text = f"speculators_model_type is {kind} and the layer's model_type {model}; EAGLE-3 needs eagle3 and llama"
        yield Finding("error", "vllm", "speculators-type", text)
    config = section(folder.said, "speculators_config")
    methods = config.get("proposal_methods")
    first = methods[0] if isinstance(methods, list) and methods and isinstance(methods[0], dict) else {}
    if not first.get("speculative_tokens") or not section(config, "verifier").get("name_or_path"):
        text = "speculators_config lacks verifier.name_or_path or proposal_methods[0].speculative_tokens; add them"
        yield Finding("error", "vllm", "speculators-config", text)
    elif str(section(config, "verifier")["name_or_path"]).startswith(("/", ".", "~")):
        text = "its verifier is a local path, which `vllm serve FOLDER` refuses; name the target first, as below"
        yield Finding("warning", "vllm", "speculators-verifier", text)


def check_norms(folder: HeadFolder, target: Target) -> Iterator[Finding]:
    said, tensors = folder.said, folder.tensors
    if said.get("norm_before_residual", folder.speculators):
        text = "it goes on from the normed state (norm_before_residual), which SGLang passes over; train with false"
        yield Finding("error", "sglang", "norm-before-residual", text)
    pairs = (
        ("norm_before_fc", "norm-before-fc", "input_norm.weight" in tensors, "input_norm.weight"),
        ("fc_norm", "fc-norm", bool(count("fc_norm.{}.weight", tensors)), "fc_norm.{0,1,2}.weight"),
    )
    for flag, name, held, tensor in pairs:
        if bool(said.get(flag)) != held:
            text = f"{flag} is {bool(said.get(flag))} and {tensor} is {'' if held else 'not '}there: write what is so"
            yield Finding("error", "both", name, text)
    if "norm.weight" not in tensors:
        text = "there is no norm.weight, and neither server can do without a last norm"
        yield Finding("error", "both", "missing-norm", text)
    specforge = folder.prefix == MIDLAYER and not folder.note and not said.get("fc_norm")
    if specforge and said.get("norm_output"):
        text = (
            "norm_output: true means a last norm to SpecForge, whose file this seems to be, and to servers that normed "
            "states are fed back; leave it out"
        )
        yield Finding("warning", "both", "norm-output", text)
    if any(f"{folder.prefix}self_attn.{name}_norm.weight" in tensors for name in "qk"):
        text = "its norms of queries and keys have no place in SGLang's class; train without them"
        yield Finding("error", "sglang", "qk-norm", text)
        if not folder.speculators and not QWEN & {*folder.architectures}:
            text = 'only the Qwen3 form has norms of queries and keys; write "Eagle3Qwen3ForCausalLM"'
            yield Finding("error", "vllm", "qk-norm", text)


def check_layers(folder: HeadFolder, target: Target) -> Iterator[Finding]:
    """Both can have more than one layer, with different names."""
    for layer in sorted({int(match[1]) for match in map(FURTHER.match, folder.tensors) if match}):
        for engine, norm in FURTHER_NORM.items():
            name = f"layers.{layer}.{norm}.weight"
            if name not in folder.tensors:
                text = f"layer {layer} needs {name}, which the other server does not know; keep to one layer"
                yield Finding("error", engine, "extra-layers", text)


def check_draft_vocabulary(folder: HeadFolder, target: Target) -> Iterator[Finding]:
    rows, d2t = folder.rows("lm_head.weight"), folder.tensors.get("d2t")
    if "draft_vocab_size" not in folder.said:
        text = "config.json has no draft_vocab_size, and SGLang reads it in any case; write the rows of lm_head"
        yield Finding("error", "sglang", "draft-vocab-size", text)
    size = number(folder.said, "draft_vocab_size")
    if rows is None and size is not None:
        text = f"there is no lm_head.weight for a draft_vocab_size of {size}; write null to share the target's"
        yield Finding("error", "both", "missing-lm-head", text)
    elif rows is not None and size not in (None, rows):
        text = f"draft_vocab_size is {size} and lm_head.weight has {rows} rows: write {rows}"
        yield Finding("error", "both", "draft-vocab-size", text)
    elif rows is not None and size is None and "draft_vocab_size" in folder.said:
        text = f"draft_vocab_size: null means the target's matrix, and the file has one of {rows} rows: write {rows}"
        yield Finding("error", "both", "draft-vocab-size", text)
    if d2t is None and rows is not None and rows < target.vocabulary:
        text = f"lm_head.weight has {rows} of {target.vocabulary} tokens, and no d2t says which (t2d alone is not read)"
        yield Finding("error", "both", "missing-d2t", text)
    if d2t is not None:
        yield from _check_offsets(d2t, rows, folder.tensors.get("t2d"), target.vocabulary)


def _check_offsets(d2t: Tensor, rows: int | None, mask: Tensor | None, vocabulary: int) -> Iterator[Finding]:
    """d2t [D] holds offsets: draft token i is the target's i + d2t[i]."""
    if rows is not None and len(d2t) != rows:
        text = f"d2t has {len(d2t)} entries and lm_head.weight {rows} rows; they must be as many"
        yield Finding("error", "both", "d2t-length", text)
    tokens = d2t.long().flatten() + torch.arange(d2t.numel())
    marked = None if mask is None else mask.flatten().nonzero().flatten()
    inside = all(0 <= token < vocabulary for token in tokens.tolist()) and tokens.unique().numel() == len(tokens)
    if not inside or (marked is not None and not torch.equal(tokens.sort().values, marked)):
        ascends = all(before < after for before, after in pairwise(d2t.flatten().tolist()))
        seems = "it seems to hold the tokens themselves; subtract 0, 1, 2, ..." if ascends else "make it anew"
        text = f"i + d2t[i] must be different tokens below {vocabulary}, those that t2d marks, and is not: {seems}"
        yield Finding("error", "both", "d2t-not-offsets", text)
    if len(tokens) < vocabulary:
        text = (
            "above temperature 0, its rejection sampling knows neither trees (topk > 1) nor pruned draft vocabularies, "
            "such as this one"
        )
        yield Finding("note", "sglang", "pruned-vocabulary-sampling", text)


RULES = (check_architectures, check_speculators, check_norms, check_layers, check_draft_vocabulary)
