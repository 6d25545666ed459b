"""Make a model fast on a CPU without changing what it computes."""

from __future__ import annotations

import copy
import os
import shutil
import sys
from platform import machine
from typing import Any

import torch
from transformers import PreTrainedModel

from decode.cpu.compiled_model import compile_model, compiled_layers
from decode.cpu.grouped_attention import ATTENTION
from decode.cpu.linear_kernels import CompiledLinear
from decode.cpu.packed_linear import PACKED, can_pack, pack_layers
from decode.models.user_cache import print_notice

MODES = ("auto", "packed", "compiled", "off")
COMPILED_BYTES = 64 << 20, 2 << 30  # smallest and largest size of all linear layers that "auto" compiles
COMPILER = "clang++" if sys.platform == "darwin" else "g++"  # torch's default


def accelerate(model: PreTrainedModel, mode: str = "auto") -> PreTrainedModel:
    """Make a CPU model fast, in place, and return it. Outputs stay the same up to rounding; embeddings are untouched.

    mode: "packed" replaces linear layers by packed ones and frees their dense weights. "compiled" also compiles kernels
    for passes over a few tokens; they need the dense weights, which are kept. "auto" compiles with a C++ compiler and
    linear layers of `COMPILED_BYTES`, and packs otherwise. "off" changes nothing.

    Raises ValueError for an unknown mode, and if "compiled" is not possible.
    """
    check_mode(mode)
    if mode == "off":
        return model
    if model.device.type == "cpu" and model.config._attn_implementation == "sdpa":
        model.set_attn_implementation(ATTENTION)
    if mode == "compiled" or (mode == "auto" and _is_worth_compiling(model)):
        try:
            compile_model(model, retry_failed=mode == "compiled")  # could take a minute at each start
            return model
        except ValueError as error:
            if mode == "compiled":
                raise
            print_notice(f"{error}; the model runs without")
    pack_layers(model)
    return model


def check_mode(mode: str) -> None:
    """Raise ValueError for anything but one of `MODES`."""
    if mode not in MODES:
        raise ValueError(f"accelerate is {mode!r}; choose one of {', '.join(MODES)}")


def _is_worth_compiling(model: PreTrainedModel) -> bool:
    size = sum(module.weight.nbytes for module in model.modules() if can_pack(module))
    has_compiler = shutil.which(os.environ.get("CXX", COMPILER)) is not None
    return COMPILED_BYTES[0] <= size <= COMPILED_BYTES[1] and has_compiler


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
    """Whether passes over a few tokens run compiled kernels."""
    return bool(compiled_layers(model)) or any(isinstance(part, CompiledLinear) for part in model.modules())


def dense_output_layer(model: PreTrainedModel) -> Any:
    """The output layer; if it is compiled, the form with the dense weight."""
    output = model.get_output_embeddings()
    return output.dense if isinstance(output, CompiledLinear) else output


def is_fast_in_bfloat16(device: torch.device) -> bool:
    """Whether a device has bfloat16 instructions. On older CPUs with AVX-512, oneDNN only emulates them."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.ops.mkldnn._is_mkldnn_bf16_supported() and (native or machine() not in ("x86_64", "AMD64"))
