"""The kernel of a decoder layer: exported by torch.export, compiled by AOTInductor, run without Python.

One kernel serves all layers that differ only in their weights, for any number of rows, nodes and cache slots. It calls
the project's own ops by their C functions. It takes a layer's call as a flat list of tensors.

Shapes: B rows, N nodes, H key-value heads, C slots of the KV cache (attention sees the first S), D head size.
"""

from __future__ import annotations

import ast
import ctypes
import re
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import ZipFile

import torch
import transformers
from torch import Tensor, nn
from torch.export import Dim
from torch.func import functional_call

from decode.cpu.native_ops import SHIMS
from decode.devices.attention import ATTENTION, grouped_attention
from decode.devices.user_cache import digest, environment
from decode.kv_cache import KVCache

# Runs layers one after the other. Takes their weights, the tensors of the first one's call without keys and values, and
# the keys and values of each; returns what the last layer does.
Kernel = Callable[[list[Tensor], list[Tensor], list[Tensor]], list[Tensor]]
OPTIONS: dict[str, Any] = {  # Inductor's
    "cpp.dynamic_threads": True,  # the number of threads may differ from process to process
    "cpp.vec_isa_ok": True,  # the native ops were compiled for this CPU; trying its vectors takes seconds
    "aot_inductor.compile_wrapper_opt_level": "O1",  # it only calls the loops; O0 takes 4 % more of a pass
    "aot_inductor.precompile_headers": False,  # they take 285 MB of the temporary folder, and serve one compilation
}
# Attributes that do not change what a module computes: those of every module, a layer's number, a merged layer's input,
# what a packed layer was made from.
STATE = {*vars(nn.Module()), "layer_idx", "number", "_last", "_live"} - {"training"}


class LayerCall(NamedTuple):
    """A call's structure, its sizes (B, N, S), and its tensors.

    form: what must be equal for two calls to run the same kernel, sizes aside. Each argument's type, which also tells
    1, 1.0 and True apart, or a tuple of types; the values that are neither tensors nor the KV cache; and each tensor's
    dtype. tensors: the call's, states [B, N, ...] first, then the new nodes' slots and rows [B, N]. stored: the layer's
    keys and values [B, H, C, D]. In a flat pass, all but these have one row.
    """

    form: tuple[Any, ...]
    sizes: tuple[int, int, int]
    tensors: list[Tensor]
    stored: tuple[Tensor, Tensor]


def find_cache(args: tuple[Any, ...], kwargs: dict[str, Any]) -> KVCache | None:
    """The KV cache among a layer's arguments."""
    return next((value for value in (*kwargs.values(), *args) if isinstance(value, KVCache)), None)


def flatten_call(number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LayerCall | None:
    """A call of the layer that writes to layer `number` of a `KVCache`.

    None if that part of the cache is empty, or if an argument is not a tensor, a plain value, a tuple or that cache.
    """
    cache = find_cache(args, kwargs)
    stored = None if cache is None else cache.allocated(number)
    if cache is None or stored is None:
        return None
    tensors: list[Tensor] = []
    constants: list[Any] = []

    def describe(value: Any) -> Any:
        if isinstance(value, Tensor):
            tensors.append(value if value.is_contiguous() else value.contiguous())
            return value.dtype
        if isinstance(value, tuple):
            return tuple(map(describe, value))
        if value is cache:
            return KVCache
        constants.append(value)
        return type(value)

    form = tuple(map(describe, args)), tuple((name, describe(value)) for name, value in kwargs.items())
    if not tensors or tensors[0].dim() < 2 or not all(_is_plain(value) for value in constants):
        return None
    sizes = tensors[0].shape[0], tensors[0].shape[1], cache.used
    return LayerCall((*form, tuple(constants)), sizes, [*tensors, cache.node_slots, cache.node_rows], stored)


def rebuild_call(form: tuple[Any, ...], used: int, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a flattened call, with a `LayerView` of `used` slots for the KV cache."""
    *arguments, slots, rows, keys, values = tensors
    args, kwargs, constants = form
    cache, left, constants = LayerView(keys, values, slots, rows, used), iter(arguments), iter(constants)

    def rebuild(kind: Any) -> Any:
        if isinstance(kind, tuple):
            return tuple(map(rebuild, kind))
        if kind is KVCache:
            return cache
        return next(left if isinstance(kind, torch.dtype) else constants)

    return rebuild(args), {name: rebuild(kind) for name, kind in kwargs}


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, int | float | str)


@dataclass
class LayerView:
    """A kernel's view of the KV cache: a layer's keys and values [B, H, C, D], its nodes' slots and rows, and S."""

    keys: Tensor
    values: Tensor
    slots: Tensor
    rows: Tensor
    used: int

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """As `KVLayer.update`, but writes to the whole tensors: a compiler would copy slices of them."""
        self.keys[self.rows, :, self.slots] = key_states.transpose(1, 2)
        self.values[self.rows, :, self.slots] = value_states.transpose(1, 2)
        return self.keys[:, :, : self.used], self.values[:, :, : self.used]


class BareLayer(nn.Module):
    """A layer without its hooks."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return type(self.layer).forward(self.layer, *args, **kwargs)


def layer_tensors(layer: nn.Module) -> dict[str, Tensor]:
    """All tensors of a layer, by name."""
    return {**dict(layer.named_parameters()), **dict(layer.named_buffers())}


def shape_of(tensor: Tensor) -> torch.Size:
    """What a kernel depends on of a tensor's shape. Packed weights tell their forms and sizes themselves."""
    return tensor.shape[1:] if tensor.dtype == torch.uint8 else tensor.shape


def name_kernel(module: nn.Module, *described: Any) -> str:
    """A digest of all that determines a module's kernel, weights aside. described: the calls that it serves."""
    tensors = [(name, tensor.dtype, *shape_of(tensor)) for name, tensor in layer_tensors(module).items()]
    versions = transformers.__version__, torch.get_default_dtype(), environment(), OPTIONS
    own = [_digest_code(file) for file in sorted(Path(__file__).parent.glob("*.py"))]
    own.append(digest_module(grouped_attention.__module__))
    return digest(describe_module(module), tensors, *described, versions, own, SHIMS)


@torch.inference_mode(False)  # a caller may be in it, and its tensors cannot be exported
def compile_kernel(layer: nn.Module, call: LayerCall, dimensions: Sequence[Sequence[Any]], into: Path) -> None:
    """Compile the kernel of such calls of a layer. Takes seconds; raises whatever torch's compilers do.

    dimensions: for each tensor of the call, each dimension's symbol, or its size if it is fixed.
    """
    bare, tensors = BareLayer(layer), layer_tensors(layer)
    names = [f"layer.{name}" for name in tensors]
    place, dimension = next((i, d) for i, sizes in enumerate(dimensions) for d, size in enumerate(sizes) if size == "S")

    def compute(inputs: list[Tensor]) -> list[Tensor]:
        weights, others = dict(zip(names, inputs, strict=False)), inputs[len(names) :]
        args, kwargs = rebuild_call(call.form, others[place].shape[dimension], others)
        # Parts of a merged layer share a module. `tie_weights` would replace its tensors once for each of them.
        output = functional_call(bare, weights, args, kwargs, tie_weights=False)
        return [part for part in split_output(output) if part is not None]

    inputs = [*example_weights(tensors), *map(torch.empty_like, (*call.tensors, *call.stored))]
    attends = {getattr(getattr(part, "config", None), "_attn_implementation", None) for part in layer.modules()}
    for states in (-2, -1) if ATTENTION in attends else ():  # in a flat pass, keys and values alone have all rows
        rows, *others = inputs[states].shape
        inputs[states] = inputs[states].new_empty(rows + 1, *others)
    compile_function(compute, inputs, tensors, dimensions, into)


def example_weights(tensors: Mapping[str, Tensor]) -> list[Tensor]:
    """Tensors like a module's. Sizes of packed ones that are equal by chance would be taken for one."""
    return [
        torch.empty_like(tensor) if tensor.dtype != torch.uint8 else tensor.new_empty(4096 + 64 * number)
        for number, tensor in enumerate(tensors.values())
    ]


def compile_function(
    compute: Callable[[list[Tensor]], list[Tensor]],
    inputs: list[Tensor],
    tensors: Mapping[str, Tensor],
    dimensions: Sequence[Sequence[Any]],
    into: Path,
) -> None:
    """Compile a function of a list of tensors: those of a module, then others of these dimensions."""
    module = nn.Module()  # torch.export takes modules only
    vars(module)["forward"] = compute
    dynamic = [{d: Dim.DYNAMIC for d, size in enumerate(sizes) if isinstance(size, str)} for sizes in dimensions]
    shapes = [*({0: Dim.DYNAMIC} if tensor.dtype == torch.uint8 else {} for tensor in tensors.values()), *dynamic]
    config: Any = torch.fx.experimental._config
    oblivious = config.patch(backed_size_oblivious=True)  # sizes may be 1 as well
    quiet = warnings.catch_warnings(action="ignore")  # torch warns of its own code
    with torch.no_grad(), torch.autocast("cpu", enabled=False), oblivious, quiet:
        program = torch.export.export(module, (inputs,), dynamic_shapes=(shapes,), strict=False)
        build_library(program, into)


def build_library(program: torch.export.ExportedProgram, into: Path) -> None:
    """Compile a program, whose weights are inputs, to a shared library. All other files stay in its folder."""
    from torch._inductor.utils import fresh_cache  # importing it takes a second

    package = into.with_suffix(".pt2")
    ops = {getattr(torch.ops.draftless, name).default: [function] for name, function in SHIMS.items()}
    options = {**OPTIONS, "aot_inductor.custom_ops_to_c_shims": ops}
    with fresh_cache(dir=str(into.parent)):
        torch._inductor.aoti_compile_and_package(program, package_path=str(package), inductor_configs=options)
    with ZipFile(package) as archive:
        (library,) = (name for name in archive.namelist() if name.endswith(".so"))
        into.write_bytes(archive.read(library))


def load_kernel(path: Path) -> Kernel:
    """The kernel in a file. Raises RuntimeError for one that cannot be loaded."""
    # torch's loader of packages unpacks them into the system's temporary folder, leaves them there, and runs one layer.
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise RuntimeError(str(error)) from error
    container, outputs = ctypes.c_void_p(), ctypes.c_size_t()
    if library.AOTInductorModelContainerCreateWithDevice(ctypes.byref(container), ctypes.c_size_t(1), b"cpu", None):
        raise RuntimeError(f"{path} holds no kernel")
    library.AOTInductorModelContainerGetNumOutputs(container, ctypes.byref(outputs))
    run, op = ctypes.cast(library.AOTInductorModelContainerRun, ctypes.c_void_p).value, torch.ops.draftless.run_layers

    def kernel(weights: list[Tensor], inputs: list[Tensor], stored: list[Tensor]) -> list[Tensor]:
        returned: list[Tensor] = op(run, container.value, outputs.value, weights, inputs, stored)
        return returned

    return kernel


def split_output(output: Any) -> tuple[Any, ...]:
    """What a layer returns: states first, then what some layers add."""
    return output if isinstance(output, tuple) else (output,)


def describe_module(module: nn.Module) -> list[Any]:
    """What determines a module's computation, tensors aside: the class, code and settings of each part."""
    return [
        (
            name,
            type(part).__qualname__,
            digest_module(type(part).__module__),
            sorted((key, _describe_value(value)) for key, value in vars(part).items() if key not in STATE),
        )
        for name, part in module.named_modules()
    ]


def _describe_value(value: Any) -> tuple[str, ...]:
    text = re.sub(" at 0x[0-9a-f]+", "", repr(value.tolist() if isinstance(value, Tensor) else value))
    attention = getattr(value, "_attn_implementation", "")  # a config's repr lacks it
    return text, str(type(value)), attention, digest_module(getattr(value, "__module__", ""))


def digest_module(name: str) -> str:
    """A digest of an imported module's code; empty if it has no file, or a version that tells it."""
    file = None if name.startswith(("torch.", "transformers.")) else getattr(sys.modules.get(name), "__file__", None)
    return _digest_code(Path(file)) if file is not None and file.endswith(".py") else ""


@cache
def _digest_code(file: Path) -> str:
    """A digest that comments and layout do not change."""
    return digest(ast.dump(ast.parse(file.read_text(encoding="utf-8"))))
