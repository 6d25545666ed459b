"""Which models can be a target, and what their layers attend to. Other models are refused, with the reason."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from typing import Any

from torch import nn
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import LinearAttentionLayer

from decode.devices.attention import ATTENTION

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
INDEXED = "indexed_attention"  # each token sees a few others, which an index chooses
# "hybrid" ones are of recurrent models.
ATTENDING = {FULL: FULL, SLIDING: SLIDING, CHUNKED: CHUNKED, "hybrid": FULL, "hybrid_sliding": SLIDING}
ATTENTION_IMPLEMENTATIONS = ("sdpa", "eager", "flex_attention")
CACHE_NAMES = "cache", "past_key_values"  # of the KV cache in transformers: since 5.24, and before
TRAINING = "the model is in training mode, where dropout changes its logits; call model.eval() first"


def unwrap(model: Any) -> PreTrainedModel:
    """The transformers model in a wrapper of torch.compile or peft. Adapters within its layers stay active.

    Raises ValueError for prompt-learning adapters, and for anything that is not a transformers model.
    """
    while hasattr(model, "_orig_mod") or hasattr(model, "get_base_model"):
        if hasattr(model, "_orig_mod"):  # torch.compile
            model = model._orig_mod
            continue
        configs = getattr(model, "peft_config", {}).values()
        if any(getattr(config, "is_prompt_learning", False) for config in configs):
            raise ValueError(
                "this peft model has a prompt-learning adapter, which adds virtual tokens in its own forward; "
                "only adapters within layers, such as LoRA, can be used"
            )
        model = model.get_base_model()
    if isinstance(model, str | PathLike):
        raise ValueError(f"Target takes a loaded model; to load one by name, call Target.load({str(model)!r})")
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"Target takes a transformers model, not a {type(model).__name__}")
    return model


def find_cache_name(function: Callable[..., Any]) -> str:
    """The name of the KV cache among a function's arguments."""
    parameters = inspect.signature(function).parameters
    return next(name for name in CACHE_NAMES if name in parameters)


def refuse_unsupported(model: PreTrainedModel) -> None:
    """Raise ValueError if a model is in training mode, or if it cannot compute the nodes of a tree.

    The state of a target must be able to branch, and its layers must place tokens by position, not by cache slot.
    """
    if any(map(in_training, model.modules())):
        raise ValueError(TRAINING)
    refuse_merged_adapters(model.modules())
    refuse_activated_adapters(model.modules())
    config = model.config.get_text_config(decoder=True)
    name = config.model_type
    if model.config.is_encoder_decoder or not model.can_generate():
        raise ValueError(f"{type(model).__name__} is no decoder-only language model; load an AutoModelForCausalLM")
    attention_windows(model)
    _refuse_row_coupling(model)
    is_gpt_neo = hasattr(config, "attention_layers")
    positional = getattr(config, "position_embedding_type", None)
    has_alibi = name in ("bloom", "mpt") or getattr(config, "alibi", False) or positional == "alibi"
    arguments = inspect.signature(type(model).forward).parameters.keys()
    unnamed = (
        f"cannot verify a tree: its forward pass takes no KV cache by a name that is known ({', '.join(CACHE_NAMES)})"
    )
    for is_refused, reason in (
        (
            getattr(model, "_is_stateful", False) and not is_recurrent(model),
            "keeps a recurrent state that is not in transformers' cache, so it cannot be restored after a wrong draft",
        ),
        (has_alibi, "uses ALiBi, whose biases depend on cache slots, not positions: a tree would be wrong"),
        (is_gpt_neo, "masks its attention by cache slots, which are not a tree's positions"),
        (
            "position_ids" not in arguments and not is_recurrent(model),
            "takes no position_ids: it counts cache slots, which are not a tree's positions",
        ),
        (arguments.isdisjoint(CACHE_NAMES), unnamed),
    ):
        if is_refused:
            raise ValueError(f"{name} {reason}")
    attention = config._attn_implementation
    if attention not in (*ATTENTION_IMPLEMENTATIONS, ATTENTION):
        raise ValueError(
            f"attention implementation {attention!r} takes no tree mask; load the model with "
            "attn_implementation='sdpa' or 'eager'"
        )


def in_training(module: nn.Module) -> bool | None:
    """Whether a module is in training mode; None if that changes nothing, as in the matrices of a new vocabulary."""
    return None if isinstance(module, nn.Embedding | nn.Linear | nn.Identity) else module.training


def refuse_merged_adapters(modules: Iterable[nn.Module]) -> None:
    """Raise ValueError for layers of peft whose next pass would take a merged adapter out of the weights."""
    for module in modules:
        if vars(module).get("_disable_adapters") and getattr(module, "merged_adapters", None):
            raise ValueError(
                "an adapter is merged into the weights and disabled, so the next pass would change them; call "
                "unmerge_adapter() first"
            )


def refuse_activated_adapters(modules: Iterable[nn.Module]) -> None:
    """Raise ValueError for layers with activated LoRA (aLoRA), which peft's own forward turns on for some tokens."""
    for module in modules:
        variants = vars(module).get("lora_variant", {}).values()
        if any(type(variant).__name__.startswith("ALora") for variant in variants):
            raise ValueError("the model has an adapter of activated LoRA, which only peft's own forward can turn on")


def is_recurrent(model: PreTrainedModel) -> bool:
    """Whether some layers keep a state instead of keys and values, in transformers' own cache."""
    try:
        layers = DynamicCache(config=model.config.get_text_config(decoder=True)).layers
    except Exception:  # a config that transformers makes no cache for
        return False
    return any(isinstance(layer, LinearAttentionLayer) for layer in layers)


def find_input_scales(layer: nn.Module) -> str | None:
    """Whether a quantized layer also quantizes its inputs: "together" if the tokens of a pass share a scale that
    depends on them, else "apart". None if it does not, or is not known to.
    """
    weight = getattr(layer, "weight", None)
    inputs = getattr(getattr(layer, "quantization_scheme", None), "input_activations", None)  # compressed-tensors
    if inputs is not None:
        return "together" if inputs.dynamic and inputs.strategy == "tensor" else "apart"
    settings = getattr(weight, "act_quant_kwargs", getattr(weight, "activation_quantization", None))  # torchao
    if settings is None:
        return None
    is_dynamic = getattr(weight, "act_quant_scale", None) is None
    is_shared = type(getattr(settings, "granularity", None)).__name__ == "PerTensor" and is_dynamic
    return "together" if is_shared or getattr(settings, "use_dynamic_per_tensor_scale", False) else "apart"


def _refuse_row_coupling(model: PreTrainedModel) -> None:
    """Raise ValueError for a quantized layer whose result for a token depends on the other tokens of a pass.

    The self-test finds only what exceeds rounding in its small trees.
    """
    for name, layer in model.named_modules():
        if type(layer).__name__ == "Linear8bitLt":  # bitsandbytes
            fault = "is a layer of LLM.int8, whose outlier columns depend on all tokens of a pass"
            advice = "load the model in NF4 or unquantized"
        elif find_input_scales(layer) == "together":
            fault = "quantizes its inputs with one scale for all tokens of a pass"
            advice = "use weight-only quantization, or a scale for each token"
        else:
            continue
        raise ValueError(f"{model.config.model_type} is row-coupled: {name} {fault}; {advice}")


@dataclass(frozen=True)
class AttentionWindow:
    """What a layer attends to: everything, the last `window` positions, or its own chunk of `chunk` positions."""

    window: int | None = None
    chunk: int | None = None

    @cached_property
    def is_full(self) -> bool:
        return self.window is None and self.chunk is None


def attention_windows(model: PreTrainedModel) -> dict[str, AttentionWindow]:
    """The attention window of each layer type of a model.

    Raises ValueError for layer types that cannot verify a tree (recurrent layers, linear attention, convolutions) and
    for windows that differ within a layer type.
    """
    config = model.config.get_text_config(decoder=True)
    window = _common_window(config)
    known = {
        FULL: AttentionWindow(),
        SLIDING: AttentionWindow(window=window),
        CHUNKED: AttentionWindow(chunk=getattr(config, "attention_chunk_size", None)),
    }
    types = getattr(config, "layer_types", None)
    if INDEXED in (types or ()):
        raise ValueError(f"{config.model_type} has sparse attention ({INDEXED}), whose index keys are not in our cache")
    if types is not None and is_recurrent(model):
        types = [ATTENDING[kind] for kind in types if kind in ATTENDING] or [FULL]
    if types is None:
        _refuse_ignored_window(model, window)
        return {FULL: AttentionWindow(window=window)}
    unknown = sorted(set(types) - set(known))
    if unknown:
        raise ValueError(
            f"{config.model_type} has layers of type {', '.join(unknown)}, whose state cannot branch into a tree; "
            f"only attention layers ({', '.join(known)}) can be verified"
        )
    return {kind: known[kind] for kind in sorted(set(types))}


def _common_window(config: PretrainedConfig) -> int | None:
    """The window that all windowed layers share; None if there is none, or none shorter than the context."""
    if getattr(config, "is_heterogeneous", False):
        windows = {getattr(layer, "sliding_window", None) for layer in config.per_layer_config}
        if len(windows) > 1:
            raise ValueError(f"{config.model_type} has layers with different windows; one mask per layer type is made")
    window = getattr(config, "sliding_window", None) or 0  # some configs write 0 for none
    return window if 0 < window < (getattr(config, "max_position_embeddings", None) or 1 << 30) else None


def _refuse_ignored_window(model: PreTrainedModel, window: int | None) -> None:
    """Raise ValueError if a model's config has a window, copied from another model, that its code does not apply.

    transformers then contradicts itself: `generate` drops tokens outside the window, `forward` attends to them.
    """
    code = sys.modules[type(model.get_decoder()).__module__]
    if window is not None and not hasattr(code, "create_sliding_window_causal_mask"):
        name = model.config.get_text_config(decoder=True).model_type
        raise ValueError(
            f"{name} has no windows, but its configuration has sliding_window={window}; "
            "set model.config.sliding_window = None"
        )
