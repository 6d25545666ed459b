"""A model with some of its decoder layers only: a draft that needs no training, or from which training begins."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from torch import nn
from transformers import PreTrainedModel

from decode.models.stock_model import find_decoder


def cut_model(model: PreTrainedModel, layers: Sequence[int]) -> PreTrainedModel:
    """A model that has these decoder layers of another one, by number, and shares all weights with it.

    Embeddings, final norm and output layer stay; the other model is not changed. Works on a model as it was loaded
    (`accelerate="off"`). Raises ValueError for layers that it does not have, and if its list of layers is not found.
    """
    count = len(find_decoder(model)[1])
    if not layers or not 0 <= min(layers) <= max(layers) < count or len({*layers}) < len(layers):
        raise ValueError(f"layers {list(layers)} cannot be cut out of a model with layers 0 to {count - 1}")
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    cut = copy.deepcopy(model, shared)
    stack = find_decoder(cut)[1]
    chosen = nn.ModuleList(stack[layer] for layer in layers).train(stack.training)
    for parent in [*cut.modules()]:
        for name, module in parent.named_children():
            if module is stack:
                setattr(parent, name, chosen)
    for place, layer in enumerate(chosen):  # its place in the KV cache
        for module in layer.modules():
            if "layer_idx" in vars(module):
                vars(module)["layer_idx"] = place
    config = cut.config.get_text_config(decoder=True)
    for name, value in [*vars(config).items()]:  # kinds of layers, their windows, and such
        if isinstance(value, list | tuple) and len(value) == count and not name.endswith("_token_id"):
            setattr(config, name, [value[layer] for layer in layers])
    config.num_hidden_layers = len(layers)
    return cut
