"""Rules of vLLM 0.33 and SGLang 0.5.23 for an EAGLE-3 head: format, norms, number of layers and draft vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch

from decode import Target
from heads.formats.eagle3 import KNOWN, MIDLAYER
from heads.formats.layout import count, number, section
from scripts.serving_rules.folder import Engine, Finding, HeadFolder, error, note, warning

SGLANG_CLASS = "LlamaForCausalLMEagle3"
QWEN_CLASSES = {"Eagle3Qwen3ForCausalLM", "Qwen3ForCausalLM"}  # vLLM puts "Eagle3" before names of plain models
EAGLE3_CLASSES: dict[Engine, set[str]] = {
    "vllm": {SGLANG_CLASS, "Eagle3LlamaForCausalLM", "LlamaForCausalLM", *QWEN_CLASSES},
    "sglang": {SGLANG_CLASS},
}
FURTHER_NORM: dict[Engine, str] = {"vllm": "input_layernorm", "sglang": "hidden_norm"}  # of layers after the first


def check_architectures(folder: HeadFolder, target: Target) -> Iterator[Finding]:
    if folder.is_speculators:
        return
    names = folder.architectures
    if any(name.endswith("Eagle") for name in names):
        yield error("both", "other-kind", "config.json says EAGLE-1, but the tensors are an EAGLE-3 head's")
    for engine, known in EAGLE3_CLASSES.items():
        if not known & {*names}:
            yield error(engine, "architectures", f'{names} has no EAGLE-3 class: write "{SGLANG_CLASS}"')
    yield note("sglang", "sglang-algorithm", "use the algorithm EAGLE3; as EAGLE it would run and accept nothing")


def check_speculators(folder: HeadFolder, target: Target) -> Iterator[Finding]:
    """The format of vLLM's speculators: one object for the layer's sizes, one for the target ("verifier")."""
    if not folder.is_speculators:
        return
    text = "SGLang does not read speculators' format; load and save the head with Draftless for a flat config"
    yield error("sglang", "speculators-format", text)
    for name in (name for name, value in folder.config.items() if value is True and name not in KNOWN):
        yield error("draftless", "unknown-flag", f"config.json has {name}: true, which Draftless does not know")
    kind, layer = folder.config.get("speculators_model_type"), folder.layer_config.get("model_type")
    if kind != "eagle3" or layer not in ("llama", "qwen3"):
        text = f"speculators_model_type is {kind} and the layer's model_type {layer}: write eagle3, and llama or qwen3"
        yield error("vllm", "speculators-type", text)
    config = section(folder.config, "speculators_config")
    methods, verifier = config.get("proposal_methods"), section(config, "verifier").get("name_or_path")
    first = methods[0] if isinstance(methods, list) and methods and isinstance(methods[0], dict) else {}
    if not first.get("speculative_tokens") or not verifier:
        text = "speculators_config lacks verifier.name_or_path or proposal_methods[0].speculative_tokens; add both"
        yield error("vllm", "speculators-config", text)
    elif str(verifier).startswith(("/", ".", "~")):
        text = "its verifier is a local path, so `vllm serve FOLDER` refuses it; name the target, as in the command"
        yield warning("vllm", "speculators-verifier", text)


def check_norms(folder: HeadFolder, target: Target) -> Iterator[Finding]:
    config, tensors = folder.config, folder.tensors
    if config.get("norm_before_residual", folder.is_speculators):
        text = "SGLang ignores norm_before_residual: true (the default in speculators' format); train with false"
        yield error("sglang", "norm-before-residual", text)
    for flag, form in (("norm_before_fc", "input_norm.weight"), ("fc_norm", "fc_norm.{}.weight")):
        present = form in tensors or bool(count(form, tensors))
        if bool(config.get(flag)) != present:
            held, value = ("has", "true") if present else ("lacks", "false")
            yield error("both", flag.replace("_", "-"), f"the file {held} {form.format(0)}: write {flag}: {value}")
    if "norm.weight" not in tensors:
        yield error("both", "missing-norm", "there is no norm.weight; both engines need a final norm")
    if folder.prefix == MIDLAYER and not folder.metadata and not config.get("fc_norm") and config.get("norm_output"):
        text = "norm_output: true means a final norm in SpecForge, but normed feedback in engines: leave it out"
        yield warning("both", "norm-output", text)
    if any(f"{folder.prefix}self_attn.{name}_norm.weight" in tensors for name in "qk"):
        yield error("sglang", "qk-norm", "SGLang's class has no norms of queries and keys; train without them")
        if not folder.is_speculators and not QWEN_CLASSES & {*folder.architectures}:
            text = 'only the Qwen3 class has norms of queries and keys: write "Eagle3Qwen3ForCausalLM"'
            yield error("vllm", "qk-norm", text)
    for layer in sorted(folder.layers - {0}):
        for engine, norm in FURTHER_NORM.items():
            if (name := f"layers.{layer}.{norm}.weight") not in tensors:
                yield error(engine, "extra-layers", f"it needs {name}, which the other engine ignores; train one layer")


def check_draft_vocabulary(folder: HeadFolder, target: Target) -> Iterator[Finding]:
    rows, d2t, stated = folder.rows("lm_head.weight"), folder.tensors.get("d2t"), "draft_vocab_size" in folder.config
    size = number(folder.config, "draft_vocab_size")
    if not stated:
        yield error("sglang", "draft-vocab-size", "there is no draft_vocab_size; write the rows of lm_head.weight")
    if rows is None and size is not None:
        yield error("both", "missing-lm-head", f"draft_vocab_size is {size} without an lm_head.weight: write null")
    elif rows is not None and stated and size != rows:
        meaning = "null (the target's matrix)" if size is None else size
        text = f"draft_vocab_size is {meaning}, but lm_head.weight has {rows} rows: write {rows}"
        yield error("both", "draft-vocab-size", text)
    if d2t is None and rows is not None and rows < target.vocabulary:
        text = f"lm_head.weight has {rows} of {target.vocabulary} tokens, but there is no d2t, and engines ignore t2d"
        yield error("both", "missing-d2t", text)
    if d2t is not None and rows is not None and len(d2t) != rows:
        yield error("both", "d2t-length", f"d2t has {len(d2t)} entries and lm_head.weight {rows} rows: make them equal")


def check_offsets(folder: HeadFolder, target: Target) -> Iterator[Finding]:
    """d2t [D] holds offsets: draft token i is the target's token i + d2t[i]. t2d [V] marks these tokens."""
    d2t, t2d = folder.tensors.get("d2t"), folder.tensors.get("t2d")
    if d2t is None:
        return
    tokens = d2t.long().flatten() + torch.arange(d2t.numel())
    differ = t2d is not None and not torch.equal(tokens.sort().values, t2d.flatten().nonzero().flatten())
    outside = any(not 0 <= token < target.vocabulary for token in tokens.tolist())
    if differ or outside or tokens.unique().numel() < len(tokens):
        ascends = all(before < after for before, after in pairwise(d2t.flatten().tolist()))
        remedy = "it seems to hold the tokens themselves; subtract 0, 1, 2, ..." if ascends else "compute it again"
        text = f"the tokens i + d2t[i] must be distinct, below {target.vocabulary}, and marked by t2d: {remedy}"
        yield error("both", "d2t-not-offsets", text)
    if len(tokens) < target.vocabulary:
        text = "above temperature 0, it supports neither trees (topk > 1) nor draft vocabularies such as this one"
        yield note("sglang", "pruned-vocabulary-sampling", text)


EAGLE3_RULES = (check_architectures, check_speculators, check_norms, check_draft_vocabulary, check_offsets)
