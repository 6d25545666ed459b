"""A stock transformers model: what a session and a head need to know about it, and its hidden states as features."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from inspect import signature
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.utils import ModelOutput

from decode.devices.backend import find_backend
from decode.models.compatibility import attention_windows, find_cache_name, is_recurrent
from decode.models.grouped_attention import choosing_kernels, sees_texts_whole

MAX_TREE_SLOTS = 512  # no tree has more nodes: a node's cache slot is at most this far past its position


class StockModel:
    """A decoder-only transformers model and the properties that a forward pass over a tree depends on.

    has_graphs: its steps on a GPU are CUDA graphs.
    """

    has_graphs = False

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.config = model.config.get_text_config(decoder=True)
        self.windows = attention_windows(model)
        self.takes_positions = "position_ids" in signature(type(model).forward).parameters
        self.is_recurrent = is_recurrent(model)  # it verifies chains, see `decode.recurrent`
        self.vocabulary = int(self.config.vocab_size)
        self.device = _input_device(model)
        self.backend = find_backend(self.device)
        self.dtype = model.dtype
        self.idle_steps: list[Any] = []  # of a session that has ended, one at most; see `Session`
        self._cache_name = find_cache_name(type(model).forward)

    @cached_property
    def sees_texts_whole(self) -> bool:
        """See `decode.models.grouped_attention.sees_texts_whole`."""
        return sees_texts_whole(self.model)

    @property
    def passes_flat(self) -> bool:
        """Whether a pass takes the tokens of all rows as one row, without padding, and as long as these take."""
        return False

    def run(self, cache: Cache, counts: Tensor | None = None, **inputs: Any) -> ModelOutput:
        """The model's forward pass, which reads and extends a KV cache.

        counts [B]: how many inputs each row has, in a flat pass.
        """
        with choosing_kernels(self.device):
            return self.model(**inputs, **{self._cache_name: cache}, use_cache=True)

    @property
    def stop_ids(self) -> frozenset[int]:
        """The tokens that end an answer, from the model's generation config."""
        config = self.model.generation_config
        ids = config.eos_token_id if config is not None else None
        return frozenset([ids] if isinstance(ids, int) else ids or ())

    @property
    def needs_masks(self) -> bool:
        """Whether prompts need masks, too. Else the model's own code hides later tokens."""
        return False

    @property
    def context(self) -> int:
        """The largest number of tokens of a prompt and its answer.

        This is the context length, or the number of positions whose logits depend on a token's own path alone. Two
        kinds of model have fewer of those in transformers. Longrope changes the frequencies of all positions once any
        row passes its original context. Llama 4 scales the queries of layers without positions by cache slot, in steps
        of `floor_scale`; the first step changes nothing.
        """
        limits = [getattr(self.config, "max_position_embeddings", None)]
        rope = getattr(self.config, "rope_parameters", None) or {}
        for parameters in (rope, *rope.values()):  # some models have a dict of parameters for each layer type
            if isinstance(parameters, dict) and parameters.get("rope_type") == "longrope":
                limits.append(parameters.get("original_max_position_embeddings"))
        if getattr(self.config, "attn_temperature_tuning", False):
            limits.append(self.config.floor_scale - MAX_TREE_SLOTS)
        return min((int(limit) for limit in limits if limit), default=1 << 30)

    @property
    def output_matrix(self) -> Tensor:
        """The output layer's matrix [V, H].

        Raises ValueError if the model has no dense one.
        """
        output, embeddings = self.model.get_output_embeddings(), self.model.get_input_embeddings()
        if hasattr(output, "dense_weight") and not (self.config.tie_word_embeddings and hasattr(embeddings, "weight")):
            return output.dense_weight()
        matrix = getattr(embeddings if self.config.tie_word_embeddings else output, "weight", None)
        if not isinstance(matrix, Tensor) or matrix.is_meta:
            raise ValueError(f"{type(self.model).__name__} has no dense output matrix that a head could share")
        return matrix.detach()

    @property
    def embedding_matrix(self) -> Tensor:
        """The matrix [V, H] that embeddings are looked up in."""
        embeddings = self.model.get_input_embeddings()
        matrix = embeddings.layer.dense_weight() if hasattr(embeddings, "layer") else embeddings.weight.detach()
        return matrix

    @property
    def embedding_scale(self) -> float:
        """What the embedding layer multiplies rows of `embedding_matrix` with, as in Gemma; 1 in most models."""
        embeddings = self.model.get_input_embeddings()
        return float(getattr(getattr(embeddings, "module", embeddings), "embed_scale", 1.0))

    @property
    def output_bias(self) -> Tensor | None:
        """The output layer's bias [V]; None in most models."""
        bias = getattr(self.model.get_output_embeddings(), "bias", None)
        return bias.detach() if isinstance(bias, Tensor) else None


def _input_device(model: PreTrainedModel) -> torch.device:
    """The device for token ids: that of the embeddings, or the one that accelerate moves them to."""
    embeddings = model.get_input_embeddings()
    device = getattr(getattr(embeddings, "_hf_hook", None), "execution_device", None)
    weight = getattr(embeddings, "weight", None)  # packed ones have none
    found = model.device if weight is None else weight.device
    return found if device is None else torch.device(device)


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
