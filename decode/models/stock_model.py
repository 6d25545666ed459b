"""A stock model as sessions run it, and its hidden states as features."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from threading import get_ident
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.utils import ModelOutput

from decode.devices.backend import Backend
from decode.models.facts import ModelFacts
from decode.weights.layers import PackedLayer


class StockModel(Protocol):
    """What sessions read of a `decode.target.Target`, which opens them."""

    model: PreTrainedModel
    config: Any
    facts: ModelFacts
    backend: Backend
    device: torch.device
    dtype: torch.dtype
    vocabulary: int
    context: int
    is_recurrent: bool
    needs_masks: bool
    sees_texts_whole: bool
    passes_flat: bool
    has_graphs: bool
    compiled: bool
    idle_steps: list[Any]

    def open(self, batch_size: int, layers: Sequence[int] = ()) -> Any: ...

    def run(self, cache: Cache, counts: Tensor | None = None, **inputs: Any) -> ModelOutput: ...


class StandIn:
    """A `forward` that a device has put in the place of a module's own. It is for this module alone."""


def copy_modules(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of a model's modules. Its tensors and packed layers are shared. Hooks are copied, too."""
    modules = [*model.modules()]
    packed = [module for module in modules if isinstance(module, PackedLayer)]
    replaced = [vars(module)["forward"] for module in modules if _is_replaced(module)]
    shared = (*model.parameters(), *model.buffers(), *packed, *replaced)
    own = deepcopy(model, {id(each): each for each in shared})
    for module in own.modules():
        if _is_replaced(module):
            del module.forward
    return own


def _is_replaced(module: nn.Module) -> bool:
    return isinstance(vars(module).get("forward"), StandIn)


@contextmanager
def capture_features(model: PreTrainedModel, layers: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """A dict that gets the hidden states [B, N, H] of these layers, by layer, in each forward pass of this thread.

    Layers are numbered as transformers' `hidden_states`: i is the input of decoder layer i (0: the embeddings), the
    last one, also -1, is the output of the final norm.

    Raises ValueError if a layer does not exist and, in a pass, if it has several states for each token.
    """
    captured: dict[int, Tensor] = {}
    with ExitStack() as stack:
        for layer in layers:
            stack.callback(_hook_layer(model, layer, captured).remove)
        yield captured


def _hook_layer(model: PreTrainedModel, layer: int, captured: dict[int, Tensor]) -> RemovableHandle:
    decoder, stack = find_decoder(model)
    index = layer + len(stack) + 1 if layer < 0 else layer
    if not 0 <= index <= len(stack):
        raise ValueError(f"layer {layer} does not exist; features can be read from layers 0 to {len(stack)}")
    thread = get_ident()

    def read_input(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if get_ident() != thread:
            return
        states = args[0] if args else kwargs["hidden_states"]
        if states.ndim != 3:
            name = type(model).__name__
            raise ValueError(f"layer {layer} of {name} works on several states at once; only layer -1 can be read")
        captured[layer] = states

    def read_output(module: nn.Module, args: Any, output: Any) -> None:
        if get_ident() == thread:
            captured[layer] = output[0]

    if index == len(stack):
        return decoder.register_forward_hook(read_output)
    return stack[index].register_forward_pre_hook(read_input, with_kwargs=True)


def find_decoder(model: PreTrainedModel) -> tuple[nn.Module, nn.ModuleList]:
    """The part of a model that ends with the final norm, and the list of its layers.

    Raises ValueError if there is no such list.
    """
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    # For some models (Llama 4, ModernBERT) transformers returns the whole model or the output layer as the decoder.
    named = model.get_decoder()
    for decoder in (*model.children(),) if named is model else (named, *model.children()):
        for module in decoder.modules():
            if isinstance(module, nn.ModuleList) and len(module) == count:
                return decoder, module
    raise ValueError(f"{type(model).__name__} has no list of {count} layers that features could be read from")
