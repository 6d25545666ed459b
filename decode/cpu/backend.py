"""What a CPU can do: packed layers, an attention op and compiled decoder layers, where there is a C++ compiler."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from decode.cpu.compiled_layers import compile_layers, compiled_layers
from decode.cpu.compiled_module import Compiled, compile_module
from decode.cpu.native_ops import DTYPES, attend, find_top_tokens, load_native_ops, passing_flat
from decode.cpu.packed_experts import pack_experts
from decode.cpu.packed_linear import PackedLinear, can_pack, expecting_many_rows, has_bfloat16_products, pack_layers
from decode.cpu.quantized_weights import round_layers, store_quantized_layers
from decode.devices.attention import ATTENTION
from decode.devices.backend import Backend
from decode.devices.user_cache import print_notice_once
from decode.weights.gguf.model import restore_blocks
from decode.weights.layers import PackedLayer

PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}  # not on Windows
PAUSE_SOFT = 1  # OpenMP 5.0, section 2.15.1
SIZES = 1, 2, 4, 8, 12, 16, 32, 64  # of fixed cost curves
BLOCK_COSTS = 1.0, 1.1, 1.54, 2.29, 3.32, 4.03, 7.52, 14.23
FLOAT_COSTS = 1.0, 1.0, 1.0, 1.12, 1.24, 1.58, 2.69, 5.26
WORTH_COMPILING = 64 << 20  # bytes of all linear layers from which "auto" compiles


@cache
def find_openmp() -> list[ctypes.CDLL]:
    """torch's copy of GNU's OpenMP, if it has one."""
    found, torch_folder = list[ctypes.CDLL](), Path(torch.__file__).parent
    for folder in (torch_folder / "lib", torch_folder.with_name("torch.libs")):
        for file in folder.glob("libgomp*.so*"):
            with suppress(OSError, AttributeError):  # it is not loaded, or too old
                library = ctypes.CDLL(str(file), mode=os.RTLD_NOLOAD)
                library.omp_pause_resource_all.restype = ctypes.c_int
                found.append(library)
    return found


class CpuBackend(Backend):
    """How models are accelerated: "packed" replaces linear layers by packed ones and frees their dense weights.
    "compiled" also compiles the decoder layers. "auto" compiles models that are large enough, where there is a C++
    compiler, and packs others.
    """

    name = "cpu"
    waits = False
    pass_tokens = 0  # longer passes are not faster
    default_dtype = torch.float32
    attention, attend, top_tokens = ATTENTION, staticmethod(attend), staticmethod(find_top_tokens)
    reading_texts, passing_flat = staticmethod(expecting_many_rows), staticmethod(passing_flat)
    lacks = ("graphs",)

    @property
    def is_fast_in_bfloat16(self) -> bool:
        return has_bfloat16_products()

    @property
    def takes_blocks(self) -> bool:  # type: ignore[override]
        return load_native_ops() is None

    def find_fixed_costs(self, model: nn.Module) -> tuple[Sequence[float], Sequence[float]]:
        """Those of the default model on two cores: with its weights in blocks of 4 and 8 bits, or in float32."""
        layers = [layer for layer in model.modules() if isinstance(layer, PackedLinear)]
        weights = sum(each.in_features * each.out_features for each in layers)
        has_blocks = sum(each.packed.nbytes for each in layers) < 1.5 * weights  # of 8 bits have 8.5, with their scales
        return SIZES, BLOCK_COSTS if has_blocks else FLOAT_COSTS

    def release_threads(self) -> None:
        """End this thread's helpers. It gets others when it needs them.

        Helpers wait for work in a loop. If there are more threads than cores, GNU's OpenMP lets them sleep instead, and
        a pass takes twice as long.
        """
        for library in find_openmp():
            library.omp_pause_resource_all(PAUSE_SOFT)

    def make_zeros(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """The system maps a page of memory once it is written to: slots that no text reaches take none."""
        if not prod(shape):
            return like.new_zeros(*shape)
        try:
            memory = mmap.mmap(-1, prod(shape) * like.dtype.itemsize, **PRIVATE)
        except OSError as error:
            raise torch.OutOfMemoryError(f"not enough memory for a KV cache of {shape}: {error}") from error
        with torch.enable_grad():  # see `decode.kv_cache.Block.hold`
            return torch.frombuffer(memory, dtype=like.dtype).view(*shape)

    def accelerate(self, model: PreTrainedModel, mode: str) -> None:
        super().accelerate(model, mode)
        if mode == "off":
            return
        if load_native_ops() is None:
            restore_blocks(model)
            store_quantized_layers(model)
        if mode == "compiled":
            _check_compilable(model)
        pack_experts(model)
        pack_layers(model)
        _release_memory()

    def compile(self, target: Any, mode: str) -> bool:
        layers = [module for module in target.model.modules() if isinstance(module, PackedLayer)]
        is_large = sum(layer.weight.nbytes for layer in layers) >= WORTH_COMPILING
        if mode == "compiled" or (mode == "auto" and is_large):
            if (failure := load_native_ops()) is None:
                compile_layers(target, retry_failed=mode == "compiled")  # could take long at each start
                _release_memory()
            else:
                reason = f"no compiled kernels ({failure})"
                print_notice_once("no kernels", f"{reason}: decoding will take about twice as long")
        return bool(compiled_layers(target.model))

    def pack_drafter(self, module: nn.Module) -> None:
        if load_native_ops() is None:
            round_layers(module)
        pack_experts(module)
        pack_layers(module, has_adapters=False)
        _round_inputs(module)

    def compile_module(
        self, module: nn.Module, example: Sequence[Tensor], dimensions: Sequence[Sequence[Any]]
    ) -> Compiled | None:
        return compile_module(module, example, dimensions) if load_native_ops() is None else None

    def round_inputs(self, model: nn.Module) -> None:
        if not _round_inputs(model):
            needs = "weights in blocks, as GGUF files have, and a CPU that multiplies bytes (8 bits need VNNI)"
            raise ValueError(f"dtype fixed16 needs {needs}; choose float32, which is the same here")

    def can_pass_flat(self, model: PreTrainedModel) -> bool:
        """Where the project's own attention op runs."""
        has_ops = model.config._attn_implementation == ATTENTION and model.dtype in DTYPES and load_native_ops() is None
        return has_ops and any(isinstance(module, PackedLayer) for module in model.modules())

    def needs_masks(self, model: PreTrainedModel) -> bool:
        return bool(compiled_layers(model)) or model.config._attn_implementation == ATTENTION


BACKEND = CpuBackend


def _round_inputs(module: nn.Module) -> int:
    """Round the inputs of packed layers with weights in blocks to 16 bits, if they are rounded at all. Returns how many
    these layers are."""
    layers = [layer for layer in module.modules() if isinstance(layer, PackedLinear) and layer.digits]
    for layer in layers:
        layer.digits = 2
    return len(layers)


def _release_memory() -> None:
    """Give freed memory back to the system. Linux's allocator would keep a fifth of the weights' size."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


def _check_compilable(model: PreTrainedModel) -> None:
    if not any(can_pack(module) for module in model.modules()):
        raise ValueError("nothing to compile: only linear layers on a CPU (--device cpu), in float32 or bfloat16, are")
    failure = load_native_ops()
    if failure is not None:
        advice = "a C++ compiler such as g++ and a cache folder that can be written (XDG_CACHE_HOME names another)"
        raise ValueError(f"kernels cannot be compiled here ({failure}); they need {advice}")
