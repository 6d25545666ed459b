"""Tiny stock transformers models of every architecture that the tests need.

Only their sizes are changed, and their weights are random, so large that greedy text varies.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel
from transformers.generation import GenerateDecoderOnlyOutput

from decode import costs
from decode.devices.cost_curve import CostCurve
from decode.models.compatibility import find_cache_name

VOCABULARY = 96
USUAL_COSTS = CostCurve(costs.SIZES, [0.002 + 0.00003 * size for size in costs.SIZES])  # of a tiny model's passes
CONTEXT = 256
CACHE = find_cache_name(GenerateDecoderOnlyOutput)  # what this transformers calls the KV cache
WINDOW = 8  # shorter than most prompts of the tests, so that it matters

needs_compiler = pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="no C++ compiler found")

# Settings that nearly every config has; the others ignore them.
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": False,  # with tied random weights a token predicts itself
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
EXPERTS: dict[str, Any] = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    "num_experts_per_tok": 2,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
}
WINDOWS: dict[str, Any] = {
    "sliding_window": WINDOW,
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
SHARED: dict[str, Any] = {  # the last two layers read the others' keys and values
    "sliding_window": WINDOW,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 8,
}
RECURRENT: dict[str, Any] = {"layer_types": ["linear_attention", "full_attention"]}
GATED: dict[str, Any] = {  # the delta rule
    **RECURRENT,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
}
STATE_SPACE: dict[str, Any] = {
    **dict.fromkeys(("mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_chunk_size"), 8),
    "mamba_n_groups": 2,
}

ZAMBA2: dict[str, Any] = {
    "time_step_min": 0.5,
    **STATE_SPACE,
    **{key: ["linear_attention", "hybrid"] for key in ("layers_block_type", "layer_types")},
    "mamba_ngroups": 2,
    "n_mamba_heads": 8,
}
NEMOTRON_H: dict[str, Any] = {
    "time_step_min": 0.5,
    **EXPERTS,
    "num_hidden_layers": 4,
    "hybrid_override_pattern": "M*M-",
    **dict.fromkeys(("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "chunk_size"), 8),
    "n_groups": 2,
}
STEPPING = {"zamba2": ZAMBA2, "nemotron_h": NEMOTRON_H}  # their time steps are bounded, but not in all passes
INKLING: dict[str, Any] = {
    **EXPERTS,
    **dict.fromkeys(("swa_num_attention_heads", "d_rel"), 4),
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 8,
    "sliding_window_size": WINDOW,
    "unpadded_vocab_size": VOCABULARY,
    "rel_extent": 16,
}
LONG_ROPE: dict[str, Any] = {
    **{"rope_type": "longrope", "rope_theta": 10_000.0},
    **{"short_factor": [1.0] * 4, "long_factor": [4.0] * 4},
}

# What an architecture needs beyond `SIZES`. A name of several words is a variant of the first word's model type.
OVERRIDES: dict[str, dict[str, Any]] = {
    "qwen2 windows": {**WINDOWS, "use_sliding_window": True},
    "qwen2 all windows": {**WINDOWS, "use_sliding_window": True, "layer_types": ["sliding_attention"] * 3},
    "qwen3 windows": {**WINDOWS, "use_sliding_window": True},
    "mistral window eager": {"sliding_window": WINDOW, "attn_implementation": "eager"},
    **dict.fromkeys(("ministral", "gemma3_text", "olmo3", "cohere2", "exaone4"), WINDOWS),
    "phi3 longrope": {"original_max_position_embeddings": 64, "rope_parameters": LONG_ROPE},
    "gemma2": {**WINDOWS, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "gemma3_text eager": {**WINDOWS, "attn_implementation": "eager"},
    "gemma3n_text": {**SHARED, "laurel_rank": 8, "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0]},
    "gemma4_text": {**SHARED, "global_head_dim": 16},
    "llama eager": {"attn_implementation": "eager"},
    "llama4_text": {
        **EXPERTS,
        "num_hidden_layers": 4,
        "attention_chunk_size": WINDOW,
        "layer_types": ["chunked_attention", "full_attention"] * 2,
        "no_rope_layers": [1, 0, 1, 0],
        "intermediate_size_mlp": 48,
    },
    "modernbert-decoder": {**WINDOWS, "local_attention": WINDOW},
    "gpt_oss": {**EXPERTS, **WINDOWS},
    **dict.fromkeys(("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "phimoe"), EXPERTS),
    **{key: {"rotary_dim": 4} for key in ("gptj", "codegen")},
    **{key: {"sliding_window": WINDOW} for key in ("ministral3", "mistral window", "phi3 window", "starcoder2 window")},
    **{key: {**EXPERTS, **LATENT, "first_k_dense_replace": 1} for key in ("deepseek_v2", "deepseek_v3")},
    "kimi_linear": {**EXPERTS, **LATENT, **RECURRENT, "linear_head_dim": 8, "linear_num_heads": 4},
    "bailing_hybrid": {**EXPERTS, **LATENT, **RECURRENT},
    "zaya": {**EXPERTS, "num_experts_per_tok": 1, "router_hidden_size": 16},
    **{key: {"is_decoder": True} for key in ("bert decoder", "roberta decoder")},
    **dict.fromkeys(("olmo_hybrid", "qwen3_5_text"), GATED),
    **{key: {**EXPERTS, **GATED} for key in ("qwen3_5_moe_text", "qwen3_next")},
    **dict.fromkeys(("inkling2_text", "inkling2_loop_text"), INKLING),
    "granitemoe": {**EXPERTS, "logits_scaling": 2.0},
    "glm4_moe": {**EXPERTS, "first_k_dense_replace": 1},
    "granite": {"logits_scaling": 2.0, "attention_multiplier": 0.5},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "falcon": {"alibi": False, "head_dim": ...},
    "falcon alibi": {"alibi": True, "head_dim": ...},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "num_hidden_layers": ...},
    "bart": {"decoder_layers": 2, "encoder_layers": 2, "d_model": 32, "decoder_ffn_dim": 48},
    "t5": {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2},
    "bamba": {**STATE_SPACE, "attn_layer_indices": [1]},
    "falcon_h1": {**STATE_SPACE, "mamba_d_ssm": 64},
    "granitemoehybrid": {
        **EXPERTS,
        **STATE_SPACE,
        "layer_types": ["mamba", "attention"],
        "shared_intermediate_size": 32,
    },
    "jamba": {**EXPERTS, "num_hidden_layers": 8},
    "mamba2": {
        "num_attention_heads": ...,
        **dict.fromkeys(("num_heads", "head_dim", "state_size", "chunk_size"), 8),
        "n_groups": 2,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {**EXPERTS, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "minimax": {**EXPERTS, **RECURRENT},
    "qwen4_exp_text": {
        **EXPERTS,
        **GATED,
        **dict.fromkeys(("hc_count", "indexer_n_heads"), 2),
        **dict.fromkeys(("hc_lowrank", "indexer_head_dim", "indexer_budget"), 8),
        "indexer_kv_heads": 1,
        "indexer_compress_ratio": 4,
    },
    "zamba2": ZAMBA2,
    "nemotron_h": NEMOTRON_H,
    **{f"{name} unbounded": {**shape, "time_step_min": 1e-9} for name, shape in STEPPING.items()},
    "lara_mini": {**EXPERTS, **GATED, **WINDOWS, "layer_types": [*GATED["layer_types"], "sliding_attention"]},
    "lfm3": {**WINDOWS, "layer_types": ["conv", "sliding_attention", "full_attention"]},
    "inkling_text": {
        **INKLING,
        **{"layer_types": ["hybrid_sliding", "hybrid"], "mlp_layer_types": ["dense", "sparse"]},
    },
    "zamba": {
        "num_hidden_layers": 3,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention"],
        "n_mamba_heads": 2,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
        "attention_head_dim": 8,
        "attention_hidden_size": 64,
    },
    "rwkv": {"attention_hidden_size": 32},
}


def tiny(name: str, *, seed: int = 0, dtype: torch.dtype = torch.float64, **overrides: Any) -> PreTrainedModel:
    """A tiny model of an architecture: a transformers `model_type` or one of `OVERRIDES`.

    It has VOCABULARY tokens, CONTEXT positions and no stop token. overrides go to its config; `...` keeps the config's
    default.
    """
    settings = {**SIZES, **OVERRIDES.get(name, {}), **overrides}
    attention = settings.pop("attn_implementation", None)
    config = AutoConfig.for_model(name.split()[0], **{key: value for key, value in settings.items() if value != ...})
    # The default kernel for experts does not support float64.
    auto = AutoModelForCausalLM if type(config) in AutoModelForCausalLM._model_mapping else AutoModelForSeq2SeqLM
    model = auto.from_config(config, dtype=dtype, attn_implementation=attention, experts_implementation="eager")
    _draw_weights(model, torch.Generator().manual_seed(seed))
    model.generation_config.eos_token_id = None
    return model.eval()


class Adapter(nn.Module):
    """A low-rank adapter in the place of a linear layer. As in peft, it has a state and reads its factors' dtype."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer, rank = base_layer, 4
        self.lora_A = nn.ModuleDict({name: nn.Linear(base_layer.in_features, rank, bias=False) for name in "ab"})
        self.lora_B = nn.ModuleDict({name: nn.Linear(rank, base_layer.out_features, bias=False) for name in "ab"})
        self._disable_adapters, self._active_adapter, self.merged_adapters = False, ["a"], list[str]()
        self.scaling = {"a": 1.0, "b": 1.0}
        self.to(base_layer.weight).eval()

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.base_layer(inputs)
        for name in () if self._disable_adapters else self._active_adapter:
            first, second = self.lora_A[name], self.lora_B[name]
            outputs = outputs + self.scaling[name] * second(first(inputs.to(first.weight.dtype))).to(inputs.dtype)
        return outputs


class InDouble(TorchFunctionMode):
    """Inside, whatever asks for float32 gets float64, as softmax and rotary angles do in many models.

    Results of one and the same sum in float32 depend on its place in a vector of the CPU.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            return args[0].double()
        if func in (Tensor.to, Tensor.type, Tensor.softmax, nn.functional.softmax):
            args = [torch.float64 if each is torch.float32 else each for each in args]
            kwargs = {key: torch.float64 if each is torch.float32 else each for key, each in (kwargs or {}).items()}
        return func(*args, **(kwargs or {}))


@contextmanager
def limit_threads(most: int) -> Iterator[None]:
    """Use so many threads inside. One is best for tiny models, above all on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(most)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _draw_weights(model: PreTrainedModel, generator: torch.Generator) -> None:
    """Draw weights so large that each token affects the next; with usual ones a random model repeats itself."""
    for name, parameter in model.named_parameters():
        if name.endswith(("A_log", "dt_bias")):
            parameter.data.fill_(0.5)  # transformers draws them without this generator
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter.dtype)
        if parameter.ndim > 1:
            parameter.data = noise * 2 / parameter.shape[-1] ** 0.5
        else:
            parameter.data += noise / 5
