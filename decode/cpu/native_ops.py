"""The project's own ops in C++, a linear layer and attention: compiled once per machine and kept in the user's cache.

They are opaque to torch's compilers, so one compiled layer serves any number of rows. Compiling them takes seconds.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn

from decode.cpu.build_cache import build_once, digest, environment

FOLDER = Path(__file__).parent
SOURCES = [FOLDER / name for name in ("linear.cpp", "attention.cpp")]
COMPILER = "clang++" if sys.platform == "darwin" else "g++"  # torch's own choice
FLAGS = ("-std=c++20", "-O3", "-march=native", "-ffp-contract=fast", "-fPIC")
DTYPES = torch.float32, torch.bfloat16
STABLE_ABI = "0x020b000000000000"  # of torch 2.11; the library works with all later versions


@cache
def load_native_ops() -> str | None:
    """Make `draftless::linear` and `draftless::attention` available. Returns None, or why they are not in one line."""
    code = [file.read_text(encoding="utf-8") for file in (*SOURCES, FOLDER / "vectors.h")]
    try:
        library = build_once(f"ops-{digest(code, FLAGS, _compiler(), environment())}.so", _compile)
        torch.ops.load_library(str(library))
        torch.library.register_fake("draftless::linear")(_fake_linear)
        torch.library.register_fake("draftless::attention")(_fake_attention)
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
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


def can_run(inputs: Tensor) -> bool:
    """Whether the ops take such inputs."""
    has_gradient = torch.is_grad_enabled() and inputs.requires_grad
    return inputs.device.type == "cpu" and inputs.dtype in DTYPES and not has_gradient


def pack(*weights: Tensor) -> Tensor:
    """Weights [N, K], one below the other, in panels of P outputs.

    float32: [panels, K, P], bfloat16: [panels, K / 2, P, 2]; zeros fill up.
    """
    panel, pair = torch.ops.draftless.panel_size(), 2 if weights[0].dtype == torch.bfloat16 else 1
    if any(len(weight) % panel for weight in weights[:-1]):  # panels would hold outputs of two weights
        weights = (torch.cat(weights),)
    outputs, inputs = sum(map(len, weights)), weights[0].shape[1]
    packed = weights[0].new_empty(-(-outputs // panel), -(-inputs // pair), panel, pair)
    begin = 0
    for weight in weights:
        panels = _to_panels(weight, panel, pair)
        packed[begin : begin + len(panels)] = panels
        begin += len(panels)
    return packed if pair == 2 else packed.squeeze(3)


def _to_panels(weight: Tensor, panel: int, pair: int) -> Tensor:
    """A weight [N, K] as [panels, K / pair, panel, pair]: a view, if no zeros are needed."""
    if len(weight) % panel or weight.shape[1] % pair:  # padding by nothing would copy the weight
        weight = nn.functional.pad(weight, (0, -weight.shape[1] % pair, 0, -len(weight) % panel))
    return weight.view(-1, panel, weight.shape[1] // pair, pair).transpose(1, 2)


def unpack(packed: Tensor, outputs: int, inputs: int) -> Tensor:
    """The weight [N, K] that `pack` was given."""
    panels = packed if packed.dim() == 4 else packed.unsqueeze(3)
    return panels.transpose(1, 2).reshape(-1, panels.shape[1] * panels.shape[3])[:outputs, :inputs]


def _fake_linear(inputs: Tensor, packed: Tensor, bias: Tensor | None, outputs: int) -> Tensor:
    return inputs.new_empty(*inputs.shape[:-1], outputs)


def _fake_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3])


def _compiler() -> str:
    return os.environ.get("CXX", COMPILER)


def _compile(into: Path) -> None:
    """Compile the sources, at the same time, and link them. Raises RuntimeError with the compiler's first error."""
    home = Path(torch.__file__).parent
    flags = [*FLAGS, f"-DTORCH_TARGET_VERSION={STABLE_ABI}", f"-I{home / 'include'}", "-c"]
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
