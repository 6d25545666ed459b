"""What vLLM 0.33 and SGLang 0.5.23 take for an EAGLE-1 head (EAGLE-2 and HASS have the same files)."""

from __future__ import annotations

from collections.abc import Iterator

from decode import Target
from heads.formats.eagle import LAYER
from heads.formats.layout import OWN, section
from heads.formats.token_map import MAP
from scripts.check_folder import Finding, HeadFolder

FAMILIES = ("Llama", "Llama4", "Mistral", "Cohere", "MiniCPM")  # that vLLM has an "Eagle..." of
IN_VLLM = {f"{eagle}{family}ForCausalLM" for family in FAMILIES for eagle in ("", "Eagle")}
IN_SGLANG = {f"{family}ForCausalLMEagle" for family in ("Llama", "Mistral", "Qwen2", "Ernie4")}
ITS_OWN, PLAIN = "LlamaForCausalLMEagle", "LlamaForCausalLM"


def check_architectures(folder: HeadFolder, target: Target) -> Iterator[Finding]:
    named = folder.architectures
    if folder.speculators or any("Eagle3" in name for name in named):
        text = f"config.json calls it EAGLE-3 ({', '.join(named)}), and its tensors are those of EAGLE-1"
        yield Finding("error", "both", "other-kind", text)
    if not IN_VLLM & {*named}:
        text = f'architectures is {named}; vLLM puts "Eagle" before each name and knows none: add "{PLAIN}"'
        yield Finding("error", "vllm", "architectures", text)
    if not IN_SGLANG & {*named}:
        text = f'architectures is {named}; SGLang wants its own name of the class: put "{ITS_OWN}" first'
        yield Finding("error", "sglang", "architectures", text)
    if IN_VLLM & {*named} and IN_SGLANG & {*named}:
        text = (
            "architectures names the class of either server; by their source each takes its own, but nobody has seen "
            "it: should one refuse, give it a copy of the folder with its name alone"
        )
        yield Finding("note", "both", "two-architectures", text)


def check_tensors(folder: HeadFolder, target: Target) -> Iterator[Finding]:
    if f"{LAYER}input_layernorm.weight" in folder.tensors:
        text = f"{LAYER}input_layernorm.weight has no place in either server; heads are trained without it"
        yield Finding("error", "both", "input-layernorm", text)
    if "norm.weight" in folder.tensors:
        text = "norm.weight, a last norm, has no place in either server; heads are trained without it"
        yield Finding("error", "both", "final-norm", text)
    if "lm_head.weight" in folder.tensors:
        text = "lm_head.weight is refused: the target's matrix is used; take it out"
        yield Finding("error", "vllm", "lm-head-present", text)
        text = "lm_head.weight is passed over for the target's matrix; take it out"
        yield Finding("warning", "sglang", "lm-head-present", text)
    if section(folder.said, OWN).get(MAP) or "d2t" in folder.tensors:
        text = (
            "its smaller draft vocabulary is passed over and every token is guessed, correctly but slower; SGLang "
            "takes a list of tokens with --speculative-token-map"
        )
        yield Finding("note", "both", "draft-vocabulary-unused", text)


RULES = (check_architectures, check_tensors)
