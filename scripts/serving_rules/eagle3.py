"""Rules of vLLM 0.33 and SGLang 0.5.23 for an EAGLE-3 head: format, norms, layers read and draft vocabulary.

A head reads some of the target's layers (auxiliary layers). vLLM's list of them is at the top of the config: L is the
output of the first L layers. SGLang's is in `eagle_config`: v is the output of layer v, counted from 0, so L = v + 1.
Without its list, each engine reads L = 2, n // 2, n - 3 of n.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch

from decode import Target
from heads.formats.eagle3 import KNOWN, MIDLAYER, READ
from heads.formats.layout import count, extent, number, section
from scripts.serving_rules.folder import Engine, Finding, HeadFolder, error, note, warning

SGLANG_CLASS = "LlamaForCausalLMEagle3"
QWEN_CLASSES = {"Eagle3Qwen3ForCausalLM", "Qwen3ForCausalLM"}  # vLLM puts "Eagle3" before names of plain models
EAGLE3_CLASSES: dict[Engine, set[str]] = {
    "vllm": {SGLANG_CLASS, "Eagle3LlamaForCausalLM", "LlamaForCausalLM", *QWEN_CLASSES},
    "sglang": {SGLANG_CLASS},
}
REMEDY = f"write {READ} at the top of config.json, and the same numbers minus 1 in eagle_config"
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


def check_layers_read(folder: HeadFolder, target: Target) -> Iterator[Finding]:
    top, nested = read_lists(folder)
    layers = target.config.num_hidden_layers
    default = [2, layers // 2, layers - 3]
    if top is None and nested is None:
        text = f"config.json has no {READ}; engines read {default} of this target's {layers} layers"
        if sorted({*default}) != default:
            yield error("both", "aux-layer-ids-default", f"{text}, which are not three layers: {REMEDY}")
        else:
            yield warning("both", "aux-layer-ids-default", f"{text}; if it was trained with these, {REMEDY}")
    elif top is not None and nested is not None and top != nested:
        hint = " (one list seems to use the other's convention)" if [layer - 1 for layer in nested] == top else ""
        text = f"vLLM would read the outputs of the first {top} layers, SGLang of {nested}{hint}: {REMEDY}"
        yield error("both", "aux-layer-ids", text)
    elif not folder.is_speculators and top != nested:
        yield from _check_single_list(top or nested or [], "sglang" if nested is None else "vllm", default)
    read = top or nested or default
    if not 0 <= min(read) <= max(read) <= layers:
        text = f"it reads the outputs of the first {read} layers, and the target has {layers}; it is for another target"
        yield error("both", "aux-layer-range", text)
    elif max(read) == layers:
        text = f"it reads the output of the last layer ({layers}), which engines do not record: train with lower ones"
        yield warning("both", "aux-layer-last", text)


def read_lists(folder: HeadFolder) -> tuple[list[int] | None, list[int] | None]:
    """vLLM's and SGLang's list, both in vLLM's convention. Raises ValueError if one is not a list of whole numbers."""
    found: list[list[int] | None] = []
    for config, shift in ((folder.config, 0), (section(folder.config, "eagle_config"), 1)):
        listed = config.get(READ)
        if listed is not None and (not isinstance(listed, list) or not all(type(layer) is int for layer in listed)):
            raise ValueError(f"config.json has {READ}: {listed!r}; it must be a list of layers")
        found.append([layer + shift for layer in listed] if listed else None)
    return found[0], found[1]


def _check_single_list(listed: list[int], lacking: Engine, default: list[int]) -> Iterator[Finding]:
    """One engine lacks its list, and nothing shows whether the other list was written in its own convention."""
    place, shift = ("at the top of config.json", -1) if lacking == "vllm" else ("in eagle_config", 1)
    if listed != default:
        text = f"there is no {READ} {place}, so it would read {default}, not {listed}: {REMEDY}"
        yield error(lacking, "aux-layer-ids", text)
    if [layer + shift for layer in listed] == default:
        text = f"in the other convention, its {READ} would be the usual {default}: keep the one with the higher tau"
        yield warning("both", "aux-layer-ids-convention", text)


def check_layer_number(folder: HeadFolder, target: Target) -> Iterator[Finding]:
    """vLLM's Qwen3 class counts the list at the top. Others count the nested list, or read num_aux_hidden_states."""
    top, nested = read_lists(folder)
    stated = number(folder.config, "num_aux_hidden_states")
    width = int(number(folder.layer_config, "target_hidden_size") or folder.read_size("hidden_size"))
    columns = extent(folder.shapes, ["fc.weight"], 1, 0)
    qwen = "qwen3" in str(folder.layer_config.get("model_type"))
    counts = {count for count in (stated, len(nested or ())) if count} or {len(top) if qwen and top else 3}
    if any(count * width != columns for count in counts):
        expected = " or ".join(f"{count} x {width}" for count in sorted(counts))
        text = f"fc.weight has {columns} columns, not {expected}: write num_aux_hidden_states and target_hidden_size"
        yield error("both", "num-aux-hidden-states", text)


EAGLE3_RULES = (
    *(check_architectures, check_speculators, check_norms, check_draft_vocabulary, check_offsets),
    *(check_layers_read, check_layer_number),
)
