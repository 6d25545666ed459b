"""The kernel of a decoder layer: exported by torch.export, compiled by AOTInductor, run without Python.

One kernel serves all layers that differ only in their weights, for any number of rows, nodes and cache slots. The
project's own ops are opaque in it. It takes a layer's call as a flat list of tensors.

Shapes: B rows, N nodes, H key-value heads, C slots of the KV cache (attention sees the first S), D head size.
"""

from __future__ import annotations

import ast
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from operator import is_
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import ZipFile

import torch
import transformers
from torch import Tensor, nn
from torch.export import Dim
from torch.func import functional_call

from decode.cpu.attention import ATTENTION
from decode.cpu.build_cache import SECOND
from decode.devices.user_cache import digest, environment
from decode.kv_cache import KVCache

Kernel = Callable[[list[Tensor]], list[Tensor]]
OPTIONS: dict[str, Any] = {  # Inductor's
    "cpp.dynamic_threads": True,  # the number of threads may differ from process to process
    "cpp.vec_isa_ok": True,  # the native ops were compiled for this CPU; trying its vectors takes seconds
    "aot_inductor.compile_wrapper_opt_level": "O1",  # it only calls the loops; O0 takes 4 % more of a pass
    "aot_inductor.precompile_headers": False,  # they take 285 MB of the temporary folder, and serve one compilation
}
# Attributes that do not change what a module computes: those of every module, a layer's number, a merged layer's input.
STATE = {*vars(nn.Module()), "layer_idx", "number", "_last"} - {"training"}


class LayerCall(NamedTuple):
    """A call's structure, its sizes (B, N, S), and its tensors.

    form: what must be equal for two calls to run the same kernel, sizes aside. Each argument's type, which also tells
    1, 1.0 and True apart, or a tuple of types; the values that are neither tensors nor the KV cache; and each tensor's
    dtype. tensors: the call's, states [B, N, ...] first, then the layer's keys and values [B, H, C, D], then the new
    nodes' slots and rows [B, N]. In a flat pass, all but keys and values have one row.
    """

    form: tuple[Any, ...]
    sizes: tuple[int, int, int]
    tensors: list[Tensor]


class LastCall(NamedTuple):
    """What layers of the same pass have in common: most get the same arguments but for states, keys and values.

    others: the tensors of the call between these. names, values: the keyword arguments, without a value for the cache,
    which has them. slots: the cache's, which are new in each pass.
    """

    form: tuple[Any, ...]
    sizes: tuple[int, int, int]
    others: list[Tensor]
    names: tuple[str, ...]
    values: tuple[Any, ...]
    slots: Tensor
    states: tuple[torch.Size, torch.dtype]

    def repeat(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any], cache: KVCache) -> LayerCall | None:
        """The call of another layer, if it has the same arguments with other states of the same form."""
        if cache.node_slots is not self.slots or len(args) != 1:
            return None
        states, stored = args[0], cache.allocated(number)
        is_alike = (
            (states.shape, states.dtype) == self.states and states.is_contiguous() and tuple(kwargs) == self.names
        )
        # All values but the cache itself.
        if stored is None or not is_alike or sum(map(is_, self.values, kwargs.values())) != len(self.values) - 1:
            return None
        return LayerCall(self.form, self.sizes, [states, *self.others, *stored, cache.node_slots, cache.node_rows])


def flatten_call(number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LayerCall | None:
    """A call of the layer that writes to layer `number` of a `KVCache`.

    None if that part of the cache is empty, or if an argument is not a tensor, a plain value, a tuple or that cache.
    """
    cache = next((value for value in (*kwargs.values(), *args) if isinstance(value, KVCache)), None)
    if cache is None:
        return None
    last: LastCall | None = cache.last_call
    if last is not None and (call := last.repeat(number, args, kwargs, cache)) is not None:
        return call
    states = cache.allocated(number)
    call = None if states is None else _flatten(args, kwargs, cache, states)
    if call is not None and len(args) == 1 and call.tensors[0] is args[0]:
        values = tuple(None if value is cache else value for value in kwargs.values())
        kind = args[0].shape, args[0].dtype
        cache.last_call = LastCall(
            call.form, call.sizes, call.tensors[1:-4], (*kwargs,), values, cache.node_slots, kind
        )
    return call


def _flatten(
    args: tuple[Any, ...], kwargs: dict[str, Any], cache: KVCache, states: tuple[Tensor, Tensor]
) -> LayerCall | None:
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
    return LayerCall((*form, tuple(constants)), sizes, [*tensors, *states, cache.node_slots, cache.node_rows])


def rebuild_call(form: tuple[Any, ...], used: int, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a flattened call, with a `LayerView` of `used` slots for the KV cache."""
    *arguments, keys, values, slots, rows = tensors
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


def name_kernel(layer: nn.Module, call: LayerCall, dimensions: Sequence[Any]) -> str:
    """A digest of all that determines the kernel of such calls of a layer, weights aside."""
    tensors = [(name, tensor.dtype, *shape_of(tensor)) for name, tensor in layer_tensors(layer).items()]
    versions = transformers.__version__, torch.get_default_dtype(), environment(), OPTIONS
    own = [_digest_code(file) for file in sorted(Path(__file__).parent.glob("*.py"))]
    return digest(describe_module(layer), tensors, call.form, dimensions, versions, own)


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

    module = nn.Module()  # torch.export takes modules only
    vars(module)["forward"] = compute
    inputs = [torch.empty_like(tensor) for tensor in (*tensors.values(), *call.tensors)]
    for number, packed in enumerate(inputs[: len(tensors)]):  # sizes that are equal by chance would be taken for one
        inputs[number] = packed if packed.dtype != torch.uint8 else packed.new_empty(4096 + 64 * number)
    attends = {getattr(getattr(part, "config", None), "_attn_implementation", None) for part in layer.modules()}
    for states in (-4, -3) if ATTENTION in attends else ():  # in a flat pass, keys and values alone have all rows
        rows, *others = inputs[states].shape
        inputs[states] = inputs[states].new_empty(rows + 1, *others)
    dynamic = [{d: Dim.DYNAMIC for d, size in enumerate(sizes) if isinstance(size, str)} for sizes in dimensions]
    shapes = [*({0: Dim.DYNAMIC} if tensor.dtype == torch.uint8 else {} for tensor in tensors.values()), *dynamic]
    config: Any = torch.fx.experimental._config
    oblivious = config.patch(backed_size_oblivious=True)  # sizes may be 1 as well
    quiet = warnings.catch_warnings(action="ignore")  # torch warns of its own code
    with torch.inference_mode(False), torch.no_grad(), torch.autocast("cpu", enabled=False), oblivious, quiet:
        program = torch.export.export(module, (inputs,), dynamic_shapes=(shapes,), strict=False)
        build_library(program, into)


def build_library(program: torch.export.ExportedProgram, into: Path) -> None:
    """Compile a program, whose weights are inputs, to a shared library.

    A file with the calls of our own ops is put next to it, where torch looks for it. All others stay in that folder.
    """
    from torch._inductor.utils import fresh_cache  # importing it takes a second

    package = into.with_suffix(".pt2")
    with fresh_cache(dir=str(into.parent)):
        torch._inductor.aoti_compile_and_package(program, package_path=str(package), inductor_configs={**OPTIONS})
    with ZipFile(package) as archive:
        (library,) = (name for name in archive.namelist() if name.endswith(".so"))
        into.write_bytes(archive.read(library))
        if (calls := library.removesuffix(".so") + SECOND) in archive.namelist():
            into.with_suffix(SECOND).write_bytes(archive.read(calls))


def load_kernel(path: Path) -> Kernel:
    """The kernel in a file. Raises RuntimeError for one that cannot be loaded."""
    # torch's loader of packages unpacks them into the system's temporary folder, and leaves them there.
    run: Kernel = torch._C._aoti.AOTIModelContainerRunnerCpu(str(path), 1).run
    return run


def split_output(output: Any) -> tuple[Any, ...]:
    """What a layer returns: states first, then what some layers add."""
    return output if isinstance(output, tuple) else (output,)


def describe_module(module: nn.Module) -> list[Any]:
    """What determines a module's computation, tensors aside: the class, code and settings of each part."""
    return [
        (
            name,
            type(part).__qualname__,
            _digest_module(type(part).__module__),
            sorted((key, _describe_value(value)) for key, value in vars(part).items() if key not in STATE),
        )
        for name, part in module.named_modules()
    ]


def _describe_value(value: Any) -> tuple[str, ...]:
    text = re.sub(" at 0x[0-9a-f]+", "", repr(value.tolist() if isinstance(value, Tensor) else value))
    attention = getattr(value, "_attn_implementation", "")  # a config's repr lacks it
    return text, str(type(value)), attention, _digest_module(getattr(value, "__module__", ""))


def _digest_module(name: str) -> str:
    """A digest of an imported module's code; empty if it has no file, or a version that tells it."""
    file = None if name.startswith(("torch.", "transformers.")) else getattr(sys.modules.get(name), "__file__", None)
    return _digest_code(Path(file)) if file is not None and file.endswith(".py") else ""


@cache
def _digest_code(file: Path) -> str:
    """A digest that comments and layout do not change."""
    return digest(ast.dump(ast.parse(file.read_text(encoding="utf-8"))))
