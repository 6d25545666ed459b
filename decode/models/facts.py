"""What a forward pass over a tree depends on in a stock model."""

from __future__ import annotations

from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from decode.models.compatibility import AttentionWindow, attention_windows, find_cache_name, is_recurrent

MAX_TREE_SLOTS = 512  # no tree has more nodes: a node's cache slot is at most this far past its position


@dataclass(frozen=True)
class ModelFacts:
    """What a model's architecture allows.

    windows: what its layers attend to, by layer type. is_recurrent: some layers keep a state; it verifies chains, see
    `decode.recurrent`. cache_name: the forward pass's argument for the KV cache. context: see `find_context`.
    head_size: of all heads; None if they differ, or if keys are stored in another form.
    """

    windows: dict[str, AttentionWindow]
    takes_positions: bool
    is_recurrent: bool
    cache_name: str
    vocabulary: int
    context: int
    head_size: int | None

    @classmethod
    def of(cls, model: PreTrainedModel) -> ModelFacts:
        """Raises ValueError for layers that cannot verify a tree."""
        config, forward = model.config.get_text_config(decoder=True), type(model).forward
        return cls(
            windows=attention_windows(model),
            takes_positions="position_ids" in signature(forward).parameters,
            is_recurrent=is_recurrent(model),
            cache_name=find_cache_name(forward),
            vocabulary=int(config.vocab_size),
            context=find_context(model),
            head_size=_find_head_size(config),
        )

    @property
    def sees_all(self) -> bool:
        """Whether all layers attend to the whole text."""
        return all(span.is_full for span in self.windows.values())


def find_context(model: PreTrainedModel) -> int:
    """The largest number of tokens of a prompt and its answer.

    This is the context length, or the number of positions whose logits depend on a token's own path alone. Two kinds of
    model have fewer of those in transformers. Longrope changes the frequencies of all positions once any row passes its
    original context. Llama 4 scales the queries of layers without positions by cache slot, in steps of `floor_scale`;
    the first step changes nothing.
    """
    config = model.config.get_text_config(decoder=True)
    limits = [getattr(config, "max_position_embeddings", None)]
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in (rope, *rope.values()):  # some models have a dict of parameters for each layer type
        if isinstance(parameters, dict) and parameters.get("rope_type") == "longrope":
            limits.append(parameters.get("original_max_position_embeddings"))
    if getattr(config, "attn_temperature_tuning", False):
        limits.append(config.floor_scale - MAX_TREE_SLOTS)
    return min((int(limit) for limit in limits if limit), default=1 << 30)


def _find_head_size(config: PretrainedConfig) -> int | None:
    shape = config.to_dict()  # reading an attribute that differs between layers raises
    if shape.get("kv_lora_rank") or shape.get("global_head_dim"):
        return None
    heads = shape.get("num_attention_heads")
    return shape.get("head_dim") or (shape["hidden_size"] // heads if isinstance(heads, int) else None)


def find_device(model: PreTrainedModel) -> torch.device:
    """The device for token ids: that of the embeddings, or the one that accelerate moves them to."""
    embeddings: Any = model.get_input_embeddings()
    device = getattr(getattr(embeddings, "_hf_hook", None), "execution_device", None)
    if device is not None:
        return torch.device(device)
    tensors = [getattr(embeddings, "weight", None), *model.parameters()]  # packed embeddings have none
    return next((each.device for each in tensors if each is not None and not each.is_meta), model.device)


def has_hooks(model: PreTrainedModel) -> bool:
    """Whether accelerate moves weights or activations between devices while the model runs."""
    return any(hasattr(module, "_hf_hook") for module in model.modules())
