"""Which models can be a target: everything that cannot work is refused by name."""

from __future__ import annotations

import inspect
from os import PathLike
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel

from decode.masks import attention_windows

ATTENTION_IMPLEMENTATIONS = ("sdpa", "eager", "draftless_grouped_sdpa")


def unwrap(model: Any) -> PreTrainedModel:
    """The transformers model inside torch.compile's wrapper or a peft one.

    Raises ValueError for anything else that is no model, and for adapters that live in the wrapper alone.
    """
    model = getattr(model, "_orig_mod", model)  # torch.compile's
    if hasattr(model, "peft_config") and hasattr(model, "get_base_model"):
        if any(getattr(config, "is_prompt_learning", False) for config in model.peft_config.values()):
            raise ValueError(
                "prompt-learning adapters of peft prepend virtual tokens, which a draft tree has no room for"
            )
        model = model.get_base_model()
    if isinstance(model, str | PathLike):
        raise ValueError(f"Target takes a loaded model; to load one by name, call Target.load({str(model)!r})")
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"Target takes a transformers model, not a {type(model).__name__}")
    return model


def refuse_unsupported(model: PreTrainedModel) -> None:
    """Raise ValueError, saying why, for a model in training, or whose state cannot branch or be read by position."""
    if any(module.training for module in model.modules()):
        raise ValueError("the model is in training mode, where dropout changes what it says; call model.eval() first")
    config = model.config.get_text_config(decoder=True)
    name = config.model_type
    if model.config.is_encoder_decoder or not model.can_generate():
        raise ValueError(f"{type(model).__name__} is no decoder-only language model; load an AutoModelForCausalLM")
    attention_windows(model)
    if getattr(model, "_is_stateful", False):
        raise ValueError(
            f"{name} keeps a recurrent state, which cannot branch into a tree; use an attention-only model"
        )
    if _has_alibi(config):
        raise ValueError(f"{name} uses ALiBi, whose biases follow cache slots and not positions: a tree would be wrong")
    if hasattr(config, "attention_layers"):  # gpt_neo: a buffer of the context's size, read by slot; windows by slot
        raise ValueError(f"{name} masks its attention by cache slots, which are not a tree's positions")
    if "position_ids" not in inspect.signature(type(model).forward).parameters:
        raise ValueError(f"{name} takes no position_ids: it counts cache slots, which are not a tree's positions")
    used = config._attn_implementation
    if used not in ATTENTION_IMPLEMENTATIONS:
        raise ValueError(
            f"attention implementation {used!r} takes no mask of a tree; load the model with "
            "attn_implementation='sdpa' or 'eager'"
        )


def _has_alibi(config: PretrainedConfig) -> bool:
    if config.model_type in ("bloom", "mpt") or getattr(config, "alibi", False):
        return True
    return getattr(config, "position_embedding_type", None) == "alibi"
