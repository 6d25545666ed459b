"""Make a model fast on a CPU without changing what it computes: weights packed once, grouped queries not repeated."""

from __future__ import annotations

import copy
import os
import shutil
import sys
from platform import machine
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from decode.cpu.compiled_model import compile_model
from decode.cpu.packed_linear import PACKED, can_pack, pack_layers
from decode.kv_cache import LARGE
from decode.models.user_cache import say

ATTENTION = "draftless_grouped_sdpa"
SIZES = 64 << 20, 2 << 30  # bytes in the linear layers of models that are compiled unasked
COMPILER = "clang++" if sys.platform == "darwin" else "g++"  # as torch has it


def prepare(model: PreTrainedModel, *, compile: bool | None = None) -> PreTrainedModel:
    """Pack the linear layers of a CPU model in place and free their dense weights; embeddings stay as they are.

    compile: passes over a few tokens run compiled kernels on the dense weights, which are kept. None does so where it
    pays and works, see `pays_to_compile`. Raises ValueError where it is asked for and cannot be done.
    """
    if model.device.type == "cpu" and model.config._attn_implementation == "sdpa":
        model.set_attn_implementation(ATTENTION)
    if compile:
        compile_model(model)
    elif compile is None and pays_to_compile(model):
        _compile_if_possible(model)
    else:
        pack_layers(model)
    return model


def pays_to_compile(model: PreTrainedModel) -> bool:
    """Whether a model is compiled unasked: on a CPU with a C++ compiler, not tiny, nor too large to keep twice."""
    size = sum(module.weight.nbytes for module in model.modules() if can_pack(module))
    return SIZES[0] <= size <= SIZES[1] and shutil.which(os.environ.get("CXX", COMPILER)) is not None


def _compile_if_possible(model: PreTrainedModel) -> None:
    """What failed before is not tried again: it could take a minute at each start."""
    try:
        compile_model(model, again=False)
    except ValueError as error:
        say(f"{error}; the model runs without")
        pack_layers(model)


def prepared_copy(model: PreTrainedModel, *, compile: bool | None = None) -> PreTrainedModel:
    """The same for a model that must stay as it is: its modules are copied, its tensors are shared.

    A model that is prepared already is returned itself, and so is one that accelerate has spread over devices: its
    hooks belong to the modules they are on. Neither can be compiled.
    """
    if any(hasattr(module, "_hf_hook") or isinstance(module, PACKED) for module in model.modules()):
        if compile:
            raise ValueError("a model that is packed already or spread over devices cannot be compiled")
        return model
    tensors = [*model.parameters(), *model.buffers()]
    return prepare(copy.deepcopy(model, {id(tensor): tensor for tensor in tensors}), compile=compile)


def is_fast_in_bfloat16(device: torch.device) -> bool:
    """Whether it has instructions for it. On older CPUs with AVX-512, oneDNN has kernels that only emulate them."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.ops.mkldnn._is_mkldnn_bf16_supported() and (native or machine() not in ("x86_64", "AMD64"))


def grouped_sdpa(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """transformers' sdpa attention, but the key-value heads are shared by their queries and not repeated in memory.

    The queries of a head are laid below one another, as if they were more nodes: torch's own kernel for grouped
    queries takes 5 times as long in bfloat16.
    """
    if attention_mask is None or kwargs.get("position_bias") is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    batch, heads, nodes, size = query.shape
    groups = heads // key.shape[1]
    folded = query.reshape(batch, key.shape[1], groups * nodes, size)
    mask = attention_mask if nodes == 1 else attention_mask.repeat(1, 1, groups, 1)  # [B, 1, G * N, S]
    if nodes == 1 and batch >= LARGE and key.dtype == torch.bfloat16 and key.is_contiguous():
        mixed = _attend_by_products(folded, key, value, mask, kwargs.get("scaling") or size**-0.5)
    else:
        scale = kwargs.get("scaling")
        mixed = nn.functional.scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scale)
    return mixed.reshape(batch, heads, nodes, -1).transpose(1, 2).contiguous(), None


def _attend_by_products(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Attention of few queries a head over a cache without gaps, as transformers' eager attention computes it.

    In bfloat16 on a CPU it takes little more than half the time of torch's fused kernel, which calls a product for
    each row and head by itself.
    """
    scores = torch.matmul(query, key.transpose(-1, -2)).float() * scale + mask
    return torch.matmul(scores.softmax(-1).to(value.dtype), value)


AttentionInterface.register(ATTENTION, grouped_sdpa)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
