"""Make a model fast on a CPU without changing what it computes: weights packed once, grouped queries not repeated."""

from __future__ import annotations

import copy
import os
import shutil
import sys
from platform import machine
from typing import Any

import torch
from transformers import PreTrainedModel

from decode.cpu.compiled_model import compile_model, whole_layers
from decode.cpu.grouped_attention import ATTENTION
from decode.cpu.linear_kernels import FewOrMany
from decode.cpu.packed_linear import PACKED, can_pack, pack_layers
from decode.models.user_cache import say

MODES = ("auto", "packed", "compiled", "off")
SIZES = 64 << 20, 2 << 30  # bytes in the linear layers of models that are compiled unasked
COMPILER = "clang++" if sys.platform == "darwin" else "g++"  # as torch has it


def accelerate(model: PreTrainedModel, mode: str = "auto") -> PreTrainedModel:
    """Make a CPU model fast, in place, and return it. Its outputs stay the same up to rounding; embeddings are untouched.

    mode: "packed" replaces linear layers by packed ones and frees their dense weights. "compiled" also compiles
    kernels for passes over a few tokens; they need the dense weights, which are kept. "auto" compiles where it is worth
    it (`is_worth_compiling`) and packs elsewhere. "off" changes nothing.

    Raises ValueError for an unknown mode, and if "compiled" is not possible.
    """
    check_mode(mode)
    if mode == "off":
        return model
    if model.device.type == "cpu" and model.config._attn_implementation == "sdpa":
        model.set_attn_implementation(ATTENTION)
    if mode == "compiled":
        compile_model(model)
    elif mode == "auto" and is_worth_compiling(model):
        _compile_if_possible(model)
    else:
        pack_layers(model)
    return model


def check_mode(mode: str) -> None:
    """Raise ValueError for anything but one of `MODES`."""
    if mode not in MODES:
        raise ValueError(f"accelerate is {mode!r}; choose one of {', '.join(MODES)}")


def is_worth_compiling(model: PreTrainedModel) -> bool:
    """Whether "auto" compiles: on a CPU with a C++ compiler, for linear layers of `SIZES` bytes in all."""
    size = sum(module.weight.nbytes for module in model.modules() if can_pack(module))
    return SIZES[0] <= size <= SIZES[1] and shutil.which(os.environ.get("CXX", COMPILER)) is not None


def _compile_if_possible(model: PreTrainedModel) -> None:
    """Compile, or pack if that fails. A failed compilation is not repeated: it could take a minute at each start."""
    try:
        compile_model(model, again=False)
    except ValueError as error:
        say(f"{error}; the model runs without")
        pack_layers(model)


def accelerated_copy(model: PreTrainedModel, mode: str) -> PreTrainedModel:
    """`accelerate` on a copy: modules are copied, tensors are shared, the given model stays as it is.

    Returns the model itself for "off", if it is accelerated already, and if accelerate's hooks spread it over devices.
    Raises ValueError if such a model is to be compiled.
    """
    check_mode(mode)
    if mode == "off":
        return model
    if any(hasattr(module, "_hf_hook") or isinstance(module, PACKED) for module in model.modules()):
        if mode == "compiled":
            raise ValueError("a model that is packed already or spread over devices cannot be compiled")
        return model
    tensors = [*model.parameters(), *model.buffers()]
    return accelerate(copy.deepcopy(model, {id(tensor): tensor for tensor in tensors}), mode)


def is_compiled(model: PreTrainedModel) -> bool:
    """Whether passes over a few tokens run compiled kernels, of whole decoder layers or of single linear layers."""
    return bool(whole_layers(model)) or any(isinstance(part, FewOrMany) for part in model.modules())


def dense_output_layer(model: PreTrainedModel) -> Any:
    """The output layer; of a compiled one, the form with the dense weight."""
    output = model.get_output_embeddings()
    return getattr(output, "few", output)


def is_fast_in_bfloat16(device: torch.device) -> bool:
    """Whether it has instructions for it. On older CPUs with AVX-512, oneDNN has kernels that only emulate them."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.ops.mkldnn._is_mkldnn_bf16_supported() and (native or machine() not in ("x86_64", "AMD64"))
