"""A stock Hugging Face model, with what verifying a tree needs to know of it."""

from __future__ import annotations

import torch
from transformers import PretrainedConfig, PreTrainedModel

from decode.masks import attention_windows

SLOTS_AHEAD = 512  # no tree has more nodes: a node's cache slot is at most this far past its position


class StockModel:
    """A decoder-only transformers model and the facts that its forward pass over a tree depends on."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.config = model.config.get_text_config(decoder=True)
        self.windows = attention_windows(model)
        self.vocabulary = int(self.config.vocab_size)
        self.device = _input_device(model)
        self.dtype = model.dtype

    @property
    def context(self) -> int:
        """The number of positions that prompt and answer may fill."""
        return _usable_context(self.config)


def _usable_context(config: PretrainedConfig) -> int:
    """The number of positions up to which a token's logits depend on its own path alone.

    This is the model's context length, with two exceptions in transformers. Longrope changes the frequencies of all
    positions once any row passes its original context. Llama 4 scales the queries of its layers without positions by
    cache slot, in steps of `floor_scale`; the first step changes nothing.
    """
    limits = [getattr(config, "max_position_embeddings", None)]
    rope = getattr(config, "rope_parameters", None) or {}
    for part in (rope, *rope.values()):  # some models have one set of parameters for each layer type
        if isinstance(part, dict) and part.get("rope_type") == "longrope":
            limits.append(part.get("original_max_position_embeddings"))
    if getattr(config, "attn_temperature_tuning", False):
        limits.append(config.floor_scale - SLOTS_AHEAD)
    return min((int(limit) for limit in limits if limit), default=1 << 30)


def _input_device(model: PreTrainedModel) -> torch.device:
    """Where token ids go: the embeddings' device, or the one accelerate moves them to."""
    embeddings = model.get_input_embeddings()
    device = getattr(getattr(embeddings, "_hf_hook", None), "execution_device", None)
    return embeddings.weight.device if device is None else torch.device(device)
