"""The project's own ops in C++, compiled once per machine and kept in the user's cache.

These are linear layers, attention, all layers in one call, and the most likely tokens. They are opaque to torch's
compilers, so one compiled layer serves any number of rows. Compiling them takes seconds.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from decode.devices.attention import attend_generally
from decode.devices.user_cache import build_once, digest, environment
from decode.weights.blocks import BLOCKS, FLOAT_BLOCKS, PLAIN, Weight

FOLDER = Path(__file__).parent
SOURCES = [FOLDER / name for name in ("linear.cpp", "attention.cpp", "layers.cpp", "top_tokens.cpp")]
COMPILER = "clang++" if sys.platform == "darwin" else "g++"  # torch's own choice
FLAGS = ("-std=c++20", "-O3", "-march=native", "-ffp-contract=fast", "-fPIC")
DTYPES = torch.float32, torch.bfloat16
DIGITS = 3  # 24 bits of an input, as float32 has; see `fixed_point.h`
DIGITS_AT = slice(16, 24)  # where the header of a packed layer has them
STABLE_ABI = "0x020b000000000000"  # of torch 2.11; the library works with all later versions

HANDLE = "AtenTensorHandle"
SHIMS = {  # the ops that compiled layers call, and the C functions for them
    "packed_linear": "AOTITorchError aoti_torch_cpu_packed_linear"
    f"({HANDLE}, {HANDLE}, {HANDLE}*, int64_t, {HANDLE}*, {HANDLE}*)",
    "tree_attention": "AOTITorchError aoti_torch_cpu_tree_attention"
    f"({HANDLE}, {HANDLE}, {HANDLE}, {HANDLE}, double, {HANDLE}*)",
}


@cache
def load_native_ops() -> str | None:
    """Make the ops available: `torch.ops.draftless`. Returns None, or why they are not in one line."""
    code = [file.read_text(encoding="utf-8") for file in (*SOURCES, *sorted(FOLDER.glob("*.h")))]
    try:
        library = build_once(f"ops-{digest(code, _flags(), _compiler(), environment())}.so", _compile)
        torch.ops.load_library(str(library))
        ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)  # so that kernels find the functions of `SHIMS`
        torch.library.register_fake("draftless::packed_linear")(_fake_linear)
        torch.library.register_fake("draftless::tree_attention")(_fake_attention)
    except (OSError, ValueError, RuntimeError, subprocess.SubprocessError) as error:
        return (str(error).strip().splitlines() or [type(error).__name__])[0]
    return None


@contextmanager
def passing_flat(counts: Tensor) -> Iterator[None]:
    """Let attention take the nodes of all rows as one row: `counts` [B] of each row of the KV cache, in their order.

    It holds on this thread, for queries of so many nodes.
    """
    torch.ops.draftless.set_counts(counts.contiguous())
    try:
        yield
    finally:
        torch.ops.draftless.set_counts(None)


def pack(*weights: Weight, digits: int = DIGITS) -> Tensor:
    """Weights with the same inputs, one below the other, as the op `draftless::packed_linear` takes them.

    digits: bytes of the integers that float32 inputs of blocks are rounded to, if this CPU multiplies bytes; 0: none.
    """
    pairs = PLAIN[torch.bfloat16]  # inputs are read in pairs: of an odd number, the last one with the next row's first
    weights = tuple(Weight.dense(each.rows()) if each.form == pairs and each.inputs % 2 else each for each in weights)
    orders = [torch.empty(0, dtype=torch.long) if each.order is None else each.order for each in weights]
    forms, inputs = [each.form for each in weights], weights[0].inputs
    packed: Tensor = torch.ops.draftless.pack([each.data for each in weights], forms, orders, inputs, digits)
    return packed


def unpack(packed: Tensor, rows: Tensor) -> Tensor:
    """Rows of packed weights in float32, [..., K] for row numbers [...]. Raises RuntimeError for a missing one."""
    unpacked: Tensor = torch.ops.draftless.unpack(packed.cpu(), rows.cpu().long()).to(packed.device)
    return unpacked


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """See `decode.devices.attention`. The op has no gradients, which an adapter on one of them may need."""
    has_gradient = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    is_whole = mask.shape[1] == 1 and mask.shape[3] == key.shape[2]
    if query.dtype in DTYPES and is_whole and not has_gradient and load_native_ops() is None:
        output: Tensor = torch.ops.draftless.tree_attention(query, key, value, mask, scale)
        return output
    return attend_generally(query, key, value, mask, scale)


def find_top_tokens(logits: Tensor, count: int, normalized: bool) -> tuple[Tensor, Tensor] | None:
    """See `decode.devices.backend.top_tokens`. None if the ops are not loaded: they are not compiled for this alone."""
    is_loaded = load_native_ops.cache_info().currsize and load_native_ops() is None
    if not is_loaded or logits.dtype != torch.float32:
        return None
    ids, values = torch.ops.draftless.top_tokens(logits, count, normalized)
    return ids, values


def list_forms(packed: Tensor) -> list[tuple[str, int]]:
    """The form of each packed weight, and how many numbers it has. Ours go by their bits: "4 bits"."""
    names = {form: str(dtype).removeprefix("torch.") for dtype, form in PLAIN.items()}
    names |= {form: name for name, form in BLOCKS.items()}
    names |= {form: f"{bits} bits" for (bits, _), form in FLOAT_BLOCKS.items()}
    header = packed[:8].view(torch.int64).tolist()
    count, inputs, _, *rest = packed[: 8 * (3 + 3 * header[0])].view(torch.int64).tolist()
    parts = [rest[3 * part : 3 * part + 2] for part in range(count)]
    return [(names[form], outputs * inputs) for form, outputs in parts]


def _fake_linear(
    inputs: Tensor, packed: Tensor, bias: Tensor | None, outputs: int, ends: Tensor | None = None
) -> Tensor:
    return inputs.new_empty(*inputs.shape[:-1], outputs)


def _fake_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3])


def _compiler() -> str:
    return os.environ.get("CXX", COMPILER)


def _flags() -> list[str]:
    """Ours, and the user's: `DRAFTLESS_CXXFLAGS=-march=x86-64-v3` compiles for CPUs without AVX-512.

    Not those of `CXXFLAGS`: conda and builds of distributions set it, for CPUs of twenty years ago.
    """
    return [*FLAGS, *shlex.split(os.environ.get("DRAFTLESS_CXXFLAGS", ""))]


def _compile(into: Path) -> None:
    """Compile the sources, at the same time, and link them. Raises RuntimeError with the compiler's first error."""
    home = Path(torch.__file__).parent
    flags = [*_flags(), f"-DTORCH_TARGET_VERSION={STABLE_ABI}", f"-I{home / 'include'}", "-c"]
    objects = [str(into.with_name(f"{source.stem}.o")) for source in SOURCES]
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda source, to: _run(*flags, str(source), "-o", to), SOURCES, objects))  # raises what one did
    _run("-shared", *objects, "-o", str(into), f"-L{home / 'lib'}", "-ltorch_cpu", "-ltorch")


def _run(*options: str) -> None:
    """Run the compiler. Raises RuntimeError with its first error."""
    command = [_compiler(), *options]
    result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
    if result.returncode:
        errors = [line for line in result.stderr.splitlines() if "error" in line] or ["the compiler failed"]
        raise RuntimeError(errors[0])
