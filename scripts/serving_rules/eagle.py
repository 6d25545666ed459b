"""Rules of vLLM 0.33 and SGLang 0.5.23 for EAGLE-1 heads (EAGLE-2 and HASS heads have the same files)."""

from __future__ import annotations

from collections.abc import Iterator

from decode import Target
from heads.formats.eagle import LAYER
from heads.formats.layout import MAP, OWN, section
from scripts.serving_rules.folder import Finding, HeadFolder, error, note, warning

FAMILIES = ("Llama", "Llama4", "Mistral", "Cohere", "MiniCPM")  # vLLM has an "Eagle..." class of each
VLLM_CLASSES = {f"{prefix}{family}ForCausalLM" for family in FAMILIES for prefix in ("", "Eagle")}
SGLANG_CLASSES = {f"{family}ForCausalLMEagle" for family in ("Llama", "Mistral", "Qwen2", "Ernie4")}


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


EAGLE_RULES = (check_architectures, check_tensors)
