"""Make a model fast without changing what it computes: on a CPU, and its attention on a GPU."""

from __future__ import annotations

import copy
import ctypes
import sys
from collections.abc import Sequence

from torch import nn
from transformers import PreTrainedModel

from decode.cpu.compiled_layers import compile_layers
from decode.cpu.native_ops import load_native_ops
from decode.cpu.packed_linear import PackedLayer, StoredLayer, can_pack, pack_layers
from decode.cpu.quantized_weights import store_quantized_layers
from decode.models.fingerprint import fingerprint_weights
from decode.models.gguf.model import restore_blocks
from decode.models.grouped_attention import ATTENTION
from decode.models.user_cache import print_notice_once

MODES = ("auto", "packed", "compiled", "graphs", "off")
WORTH_COMPILING = 64 << 20  # bytes of all linear layers from which "auto" compiles


def accelerate(model: PreTrainedModel, mode: str = "auto") -> PreTrainedModel:
    """Make a model fast, in place, and return it. Outputs stay the same up to rounding; embeddings are untouched.

    On a GPU every mode but "off" changes only attention: grouped queries share their keys and values instead of
    repeating them in memory, and long texts are seen without a mask. "graphs" also makes steps CUDA graphs
    (`decode.cuda.fixed_steps`), and so does "auto" for models that allow it.
    mode: on a CPU, "packed" replaces linear layers by packed ones and frees their dense weights. "compiled" also
    compiles the decoder layers. "auto" compiles models that are large enough, where there is a C++ compiler, and packs
    others. "off" changes nothing.

    Raises ValueError for an unknown mode, and if "compiled" or "graphs" is not possible.
    """
    check_mode(mode)
    if not hasattr(model, "weights_fingerprint"):
        model.weights_fingerprint = fingerprint_weights(model)  # now, because packed layers have no parameters
    if mode == "off":
        return model
    is_stored = any(isinstance(module, StoredLayer) for module in model.modules())
    device = "cpu" if is_stored else model.device.type
    if mode == "compiled" and device != "cpu":
        raise ValueError(f"layers are compiled on a CPU, and the model is on {device}; choose auto")
    if mode == "graphs" and device != "cuda":
        raise ValueError(f"CUDA graphs need a CUDA device, and the model is on the {device}; choose auto")
    if mode == "graphs" and _has_hooks(model):
        raise ValueError("a model that accelerate spreads over devices cannot have CUDA graphs; choose auto")
    if device in ("cpu", "cuda") and model.config._attn_implementation == "sdpa":
        model.set_attn_implementation(ATTENTION)
    if device == "cuda":
        model.graphs = mode if mode in ("auto", "graphs") and not _has_hooks(model) else None
        return model
    if load_native_ops() is None:
        restore_blocks(model)
        store_quantized_layers(model)
    linears = [module for module in model.modules() if can_pack(module)]
    if mode == "compiled":
        _check_compilable(linears)
    is_large = sum(linear.weight.nbytes for linear in linears) >= WORTH_COMPILING
    del linears  # their dense weights are freed one by one
    pack_layers(model)
    _release_memory()
    if mode == "compiled" or (mode == "auto" and is_large):
        if load_native_ops() is None:
            compile_layers(model, retry_failed=mode == "compiled")  # could take long at each start
            _release_memory()
        else:
            reason = f"no compiled kernels ({load_native_ops()})"
            print_notice_once("no kernels", f"{reason}: decoding will take about twice as long")
    return model


def _release_memory() -> None:
    """Give freed memory back to the system. Linux's allocator would keep a fifth of the weights' size."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


def check_mode(mode: str) -> None:
    """Raise ValueError for anything but one of `MODES`."""
    if mode not in MODES:
        raise ValueError(f"accelerate is {mode!r}; choose one of {', '.join(MODES)}")


def _check_compilable(linears: Sequence[nn.Linear]) -> None:
    if not linears:
        raise ValueError("nothing to compile: only linear layers on a CPU (--device cpu), in float32 or bfloat16, are")
    failure = load_native_ops()
    if failure is not None:
        advice = "a C++ compiler such as g++ and a cache folder that can be written (XDG_CACHE_HOME names another)"
        raise ValueError(f"kernels cannot be compiled here ({failure}); they need {advice}")


def accelerated_copy(model: PreTrainedModel, mode: str) -> PreTrainedModel:
    """`accelerate` on a copy: modules are copied, tensors are shared, the given model stays as it is.

    Returns the model itself for "off", if it is accelerated already, and if accelerate's hooks spread it over devices.
    Raises ValueError if such a model is to be compiled or to have graphs.
    """
    check_mode(mode)
    if mode == "off":
        return model
    if _has_hooks(model) or any(isinstance(module, PackedLayer) for module in model.modules()):
        if mode in ("compiled", "graphs"):
            raise ValueError(f"a model that is packed already or spread over devices cannot have accelerate={mode!r}")
        return model
    tensors = [*model.parameters(), *model.buffers()]
    return accelerate(copy.deepcopy(model, {id(tensor): tensor for tensor in tensors}), mode)


def _has_hooks(model: PreTrainedModel) -> bool:
    """Whether accelerate moves weights or activations between devices while the model runs."""
    return any(hasattr(module, "_hf_hook") for module in model.modules())
