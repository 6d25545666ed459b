"""Which models can be a target. Models that cannot are refused, with the reason."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from os import PathLike
from typing import Any

from transformers import PreTrainedModel

from decode.models.attention_windows import attention_windows

ATTENTION_IMPLEMENTATIONS = ("sdpa", "eager", "flex_attention", "draftless_grouped_sdpa")
CACHE_NAMES = "cache", "past_key_values"  # of the KV cache in transformers: since 5.24, and before


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
    """The name of the KV cache among a function's arguments.

    Raises ValueError without one.
    """
    parameters = inspect.signature(function).parameters
    for name in CACHE_NAMES:
        if name in parameters:
            return name
    raise ValueError(f"{function.__qualname__} takes no KV cache by a name that is known ({', '.join(CACHE_NAMES)})")


def refuse_unsupported(model: PreTrainedModel) -> None:
    """Raise ValueError if a model is in training mode, or if it cannot compute the nodes of a tree.

    The state of a target must be able to branch, and its layers must place tokens by position, not by cache slot.
    """
    if any(module.training for module in model.modules()):
        raise ValueError("the model is in training mode, where dropout changes its logits; call model.eval() first")
    config = model.config.get_text_config(decoder=True)
    name = config.model_type
    if model.config.is_encoder_decoder or not model.can_generate():
        raise ValueError(f"{type(model).__name__} is no decoder-only language model; load an AutoModelForCausalLM")
    attention_windows(model)
    is_recurrent, is_gpt_neo = getattr(model, "_is_stateful", False), hasattr(config, "attention_layers")
    positional = getattr(config, "position_embedding_type", None)
    has_alibi = name in ("bloom", "mpt") or getattr(config, "alibi", False) or positional == "alibi"
    arguments = inspect.signature(type(model).forward).parameters.keys()
    unnamed = (
        f"cannot verify a tree: its forward pass takes no KV cache by a name that is known ({', '.join(CACHE_NAMES)})"
    )
    for is_refused, reason in (
        (is_recurrent, "keeps a recurrent state, which cannot branch into a tree; use an attention-only model"),
        (has_alibi, "uses ALiBi, whose biases depend on cache slots, not positions: a tree would be wrong"),
        (is_gpt_neo, "masks its attention by cache slots, which are not a tree's positions"),
        (
            "position_ids" not in arguments,
            "takes no position_ids: it counts cache slots, which are not a tree's positions",
        ),
        (arguments.isdisjoint(CACHE_NAMES), unnamed),
    ):
        if is_refused:
            raise ValueError(f"{name} {reason}")
    if config._attn_implementation not in ATTENTION_IMPLEMENTATIONS:
        raise ValueError(
            f"attention implementation {config._attn_implementation!r} takes no tree mask; load the model with "
            "attn_implementation='sdpa' or 'eager'"
        )
