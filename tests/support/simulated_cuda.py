"""A simulated CUDA device: its tensors say "cuda", are computed on the CPU, and log what a GPU's host would do.

    with simulate():           # from now on, device="cuda" works
        to_cuda(model)         # weights, in place
        ...
        with record() as log:  # waits, copies and launches of this part, each with the lines that caused it
            ...

A log is a list of `Event`. Launches are a lower bound: one per ATen op that is no view. Nothing is timed.
It replaces parts of torch for the whole process, so tests run it in a process of its own.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from operator import is_
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ROOT = str(Path(__file__).resolve().parents[2]) + "/"
CUDA, META = 1, 14  # device types in c10
aten = torch.ops.aten

# What a log holds. A blocking copy is a wait, too.
WAIT, UPLOAD, PAGEABLE, LAUNCH = "wait", "upload", "pageable upload", "launch"
GRAPH = "graph of"  # a number of launches: the op that a log has for a replay


def name_ops(names: str) -> set[str]:
    return {f"aten::{name}" for name in names.split()}


# No kernel runs.
MAKES_NOTHING = name_ops("empty empty_like empty_strided new_empty lift_fresh _unsafe_view detach")
# The shape of the result depends on data.
READS_SIZES = name_ops("nonzero masked_select _unique2 unique_dim repeat_interleave")
HAS_KERNEL = name_ops("scaled_dot_product_attention _fused_rms_norm")  # on a GPU; composed of others on a CPU
COPIES_DEVICE = aten.to.other, aten.type_as.default  # from a tensor
INDEXES = name_ops("index index_put_ index_put _index_put_impl_")
# All others refuse tensors on two devices, but for single numbers.
TAKES_BOTH = INDEXES | name_ops("copy_ _to_copy to type_as equal set_ _has_compatible_shallow_copy_type")


@dataclass(frozen=True)
class Event:
    """One thing that the host does, and the lines that led to it. in_target: the target's forward pass does it."""

    kind: str
    op: str
    in_target: bool
    shapes: tuple[tuple[int, ...], ...]
    lines: str


@dataclass(frozen=True)
class Call:
    """One launch that a graph holds, on CPU tensors."""

    func: Any
    args: Any
    kwargs: Any
    result: Any


@dataclass
class _State:
    log: list[Event] | None = None
    in_target: bool = False
    tape: list[Call] | None = None  # of the graph that is being captured


_state = _State()
_pinned: dict[int, Any] = {}  # storages by address, kept so that no address is used again


@contextmanager
def record() -> Iterator[list[Event]]:
    """The events inside."""
    before, _state.log = _state.log, []
    try:
        yield _state.log
    finally:
        _state.log = before


def watch_target(model: nn.Module) -> None:
    """Mark what happens in the model's forward pass as the target's."""
    forward = model.forward

    def watched(*args: Any, **kwargs: Any) -> Any:
        _state.in_target = True
        try:
            return forward(*args, **kwargs)
        finally:
            _state.in_target = False

    model.forward = watched


class CudaTensor(Tensor):
    """A tensor that says it is on the GPU. `held` is the CPU tensor that it computes with."""

    held: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: Tensor) -> CudaTensor:
        return torch.Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=torch.device("cuda", 0),
        )

    def __init__(self, held: Tensor) -> None:
        self.held = held

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})

    def __getitem__(self, index: Any) -> Tensor:
        parts = index if isinstance(index, tuple) else (index,)
        if any(isinstance(part, list | range) for part in parts):
            note(WAIT, "list as an index")
            note(PAGEABLE, "list as an index")
            parts = tuple(CudaTensor(_tensor([*part])) if isinstance(part, list | range) else part for part in parts)
            return _getitem(self, parts if isinstance(index, tuple) else parts[0])
        return _getitem(self, index)

    def tolist(self) -> Any:
        note(WAIT, "tolist")
        return self.held.tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """A copy on the CPU."""
        return memo.setdefault(id(self), self.held.clone())


class SimulatedCuda(TorchDispatchMode):
    """Sends ops that make a tensor on the GPU to the simulated device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Whether ops leave torch.compile first, which takes time. Nothing here is compiled."""
        return False


class Traits(NamedTuple):
    """What is fixed for an op. is_decomposed: it is no kernel, but composed of others."""

    name: str
    is_decomposed: bool
    has_device: bool
    is_launch: bool
    is_written: bool  # it returns the tensor that it writes to


@cache
def find_traits(func: Any) -> Traits:
    name, written = func._schema.name, [each.alias_info and each.alias_info.is_write for each in func._schema.returns]
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
    devices = any("Device" in str(each.type) for each in func._schema.arguments) or func in COPIES_DEVICE
    is_view = len(written) > 0 and all(each is False for each in written)
    is_launch = not is_view and name not in MAKES_NOTHING
    return Traits(name, composite and name not in HAS_KERNEL, devices, is_launch, bool(written and written[0]))


def run(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an op on the CPU and note what it would be on a GPU."""
    traits = find_traits(func)
    pin = kwargs.pop("pin_memory", None)
    device = None if kwargs.get("device") is None else torch.device(kwargs["device"])
    to_cuda = device is not None and device.type == "cuda"
    held, named = unwrap(args), unwrap(kwargs)
    from_cuda = held is not args or named is not kwargs
    if not from_cuda and not to_cuda:
        result = func(*args, **kwargs)
        if pin:
            _pinned[result.untyped_storage().data_ptr()] = result.untyped_storage()
        return result
    if func in (aten._local_scalar_dense.default, aten.equal.default):
        note(WAIT, traits.name)
        return func(*held, **named)
    # Its parts are of no interest where nobody counts or captures them.
    if traits.is_decomposed and (traits.has_device or _state.log is not None or _state.tape is not None):
        with SimulatedCuda():
            result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
    note_copies(traits.name, args, kwargs, from_cuda, to_cuda, device)
    if traits.name in READS_SIZES:
        note(WAIT, traits.name)
    if traits.name in INDEXES:
        if not isinstance(args[0], CudaTensor) and any(isinstance(index, CudaTensor) for index in args[1]):
            raise RuntimeError("indices should be either on cpu or on the same device as the indexed tensor (cpu)")
        note_indices(traits.name, args[1])
    elif from_cuda and traits.name not in TAKES_BOTH:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.dim() > 0]
        if len({isinstance(tensor, CudaTensor) for tensor in tensors}) > 1:
            raise RuntimeError(f"Expected all tensors to be on the same device ({traits.name})")
    if device is not None:
        named = {**named, "device": torch.device("cpu")}
    result = func(*held, **named)
    if traits.is_launch:
        note(LAUNCH, traits.name, (args, kwargs))
        if _state.tape is not None:
            _state.tape.append(Call(func, held, named, result))
    if traits.is_written:
        return kwargs.get("out", args[0])
    return wrap(result) if (from_cuda and device is None) or to_cuda else result


def note_copies(
    name: str, args: Sequence[Any], kwargs: dict[str, Any], from_cuda: bool, to_cuda: bool, device: torch.device | None
) -> None:
    """Note a copy between host and device, and whether the host waits for it."""
    if name == "aten::_to_copy" and device is not None:
        source, is_up, is_down = args[0], to_cuda and not from_cuda, from_cuda and not to_cuda
        asynchronous, to_pinned = bool(kwargs.get("non_blocking")), False
    elif name == "aten::copy_" and args[1].dim() > 0:
        source, there = args[1], isinstance(args[0], CudaTensor)
        is_up, is_down = there and not isinstance(source, CudaTensor), not there and isinstance(source, CudaTensor)
        asynchronous = bool(args[2] if len(args) > 2 else kwargs.get("non_blocking"))
        to_pinned = is_down and is_pinned(args[0])
    else:
        return
    if is_up:
        note(UPLOAD if is_pinned(source) else PAGEABLE, name, [source])
    if (is_up and not asynchronous) or (is_down and not (asynchronous and to_pinned)):
        note(WAIT, name, [source])


def note_indices(name: str, indices: Sequence[Tensor | None]) -> None:
    """Masks are counted first, and indices on the CPU are copied."""
    for index in indices:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            note(WAIT, f"{name} by a mask")
        if index is not None and not isinstance(index, CudaTensor):
            note(WAIT, f"{name} by a CPU tensor")
            note(PAGEABLE, f"{name} by a CPU tensor")


def note(kind: str, op: str, inputs: Any = ()) -> None:
    if _state.tape is not None and kind != LAUNCH:
        raise RuntimeError(f"{kind} of {op}: operation not permitted when stream is capturing")
    if _state.log is not None:
        shapes = tuple(tuple(each.shape) for each in list_tensors(inputs))
        _state.log.append(Event(kind, op, _state.in_target, shapes, find_lines()))


def find_lines() -> str:
    """The innermost three lines of the project that led here."""
    lines: list[str] = []
    frame = sys._getframe(2)
    while frame is not None and len(lines) < 3:
        file = frame.f_code.co_filename
        if file.startswith(ROOT) and file != __file__ and "/.venv/" not in file:
            lines.append(f"{file.removeprefix(ROOT)}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(lines)


def is_pinned(tensor: Tensor) -> bool:
    return tensor.untyped_storage().data_ptr() in _pinned


def unwrap(value: Any) -> Any:
    """An op's arguments with CPU tensors for those on the device: the same object where there are none.

    Much faster than `tree_map`.
    """
    kind = type(value)
    if kind is CudaTensor:
        return value.held
    if kind is tuple or kind is list:
        items = kind(map(unwrap, value))
        return value if all(map(is_, items, value)) else items
    if kind is dict:
        items = {key: unwrap(each) for key, each in value.items()}
        return value if all(map(is_, items.values(), value.values())) else items
    return value


def list_tensors(values: Any) -> list[Tensor]:
    leaves = [values] if isinstance(values, Tensor) else tree_leaves(values)
    return [each for each in leaves if isinstance(each, Tensor)]


def wrap(result: Any) -> Any:
    """The results of an op, on the device."""
    if isinstance(result, Tensor):
        return CudaTensor(result)
    return type(result)(map(wrap, result)) if type(result) in (tuple, list) else result


def to_cuda(module: nn.Module) -> nn.Module:
    """Move a module's weights to the simulated device, in place. Tied weights stay tied."""
    moved: dict[int, CudaTensor] = {}
    for each in module.modules():
        for tensors in (each._parameters, each._buffers):
            for name, tensor in list(tensors.items()):
                if tensor is not None and not isinstance(tensor, CudaTensor):
                    tensors[name] = moved.setdefault(id(tensor), CudaTensor(tensor.detach()))
    module.to = lambda *args, **kwargs: module  # type: ignore[method-assign]
    return module


_tensor = torch.tensor
_getitem = Tensor.__getitem__


def _make_tensor(data: Any, *, dtype: torch.dtype | None = None, device: Any = None, **settings: Any) -> Tensor:
    """`torch.tensor`: on a GPU it waits, because its memory is pageable."""
    made = _tensor(data, dtype=dtype, **settings)
    if device is None or torch.device(device).type != "cuda":
        return made
    note(WAIT, "torch.tensor(device=cuda)")
    note(PAGEABLE, "torch.tensor(device=cuda)")
    return CudaTensor(made)


@contextmanager
def simulate() -> Iterator[None]:
    """Make the device "cuda" usable without a GPU, until the end of the process."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * 16).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    guards[CUDA] = guards[META] or guards[0]  # any guard that does nothing
    wait: Callable[..., None] = lambda *_: note(WAIT, "synchronize")  # noqa: E731
    torch.cuda._lazy_init = lambda: None
    torch.cuda.current_device = lambda: 0
    torch.cuda.synchronize = wait
    torch.cuda.current_stream = lambda *_: SimpleNamespace(synchronize=wait)
    torch.tensor = _make_tensor
    with SimulatedCuda():
        yield


class RecordedGraph:
    """What `torch.cuda.CUDAGraph` is used for: it records ops, and a replay runs them again on the same tensors.

    So a number of the host that a step would need anew each time gives wrong tokens here as on a GPU.
    """

    calls: list[Call]

    def replay(self) -> None:
        note(LAUNCH, f"{GRAPH} {len(self.calls)}")
        with torch._C._DisableTorchDispatch():  # all tensors of a tape are on the CPU
            for call in self.calls:
                result = call.func(*call.args, **call.kwargs)
                if find_traits(call.func).is_written:  # its result is where it was
                    continue
                for before, now in zip(list_tensors(call.result), list_tensors(result), strict=True):
                    before.copy_(now)


@contextmanager
def record_graph(graph: RecordedGraph, *settings: Any, **more: Any) -> Iterator[None]:
    """What `torch.cuda.graph` is used for. Waits and copies inside raise RuntimeError, as on a GPU."""
    _state.tape = graph.calls = []
    try:
        yield
    finally:
        _state.tape = None


@contextmanager
def recorded_graphs() -> Iterator[None]:
    """Make graphs usable on the simulated device."""
    fakes = {
        "CUDAGraph": RecordedGraph,
        "graph": record_graph,
        "graph_pool_handle": int,
        "Stream": lambda device: SimpleNamespace(device_index=0),
        "stream": nullcontext,
    }
    # A build for CUDA has this function, and on a machine without a GPU it takes no pool.
    ending = patch.object(torch._C, "_cuda_endAllocateToPool", lambda *pool: None, create=True)
    with patch.multiple("torch.cuda", **fakes), ending:
        yield
