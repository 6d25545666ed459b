"""What a kernel is compiled from: a function, exported as a graph."""

from __future__ import annotations

import hashlib
import platform
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from decode.cpu.compile_kernels import OPTIONS, allocate

PACKAGE = Path(__file__).parents[1]
# Attributes that do not change what a module computes: those of every module, and a layer's number.
STATE = {*vars(nn.Module()), "layer_idx"}


@dataclass(frozen=True)
class KernelSource:
    """A function to compile.

    description: distinguishes sources by its repr. compute: takes a list of tensors, may change some in place, and
    returns a list of tensors. examples: tensors like its inputs. dynamic: the dimensions of each input whose size may
    differ from the example's.
    """

    description: Any
    compute: Callable[[list[Tensor]], list[Tensor]]
    examples: list[Tensor]
    dynamic: Sequence[tuple[int, ...]]

    @cached_property
    def key(self) -> str:
        """A digest of everything that may change the exported graph, without exporting it.

        It covers more than necessary: a comment in this package or in a layer's source file changes the key.
        """
        inputs = [(tuple(tensor.shape), tensor.stride(), tensor.dtype) for tensor in self.examples]
        versions = transformers.__version__, torch.get_default_dtype(), _digest_package()
        return _digest(self.description, inputs, self.dynamic, versions, environment())

    def export(self) -> ExportedProgram:
        """The function's graph, without any weights. Takes about a second; raises whatever torch.export does."""
        module = nn.Module()  # torch.export takes modules only
        vars(module)["forward"] = self.compute
        dynamic = [dict.fromkeys(dimensions, Dim.DYNAMIC) for dimensions in self.dynamic]
        with torch.inference_mode(False), torch.no_grad(), torch.autocast("cpu", enabled=False):
            inputs = (allocate(self.examples, "cpu"),)
            program = torch.export.export(module, inputs, dynamic_shapes=(dynamic,), strict=False)
        program.example_inputs = (allocate(self.examples, "meta"),), {}
        return program


def name_kernel(program: ExportedProgram) -> str:
    """A digest of what determines a kernel: the graph, its inputs and constants, Inductor's options, torch and CPU."""
    graphs = [part.code for part in program.graph_module.modules() if isinstance(part, torch.fx.GraphModule)]
    values = [node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"]
    inputs = [(value.shape, value.stride(), value.dtype) for value in values if isinstance(value, Tensor)]
    constants = [
        (name, value.dtype, value.tolist()) if isinstance(value, Tensor) else (name, value)
        for name, value in {**program.state_dict, **program.constants}.items()
    ]
    sizes = program.range_constraints
    return _digest(graphs, inputs, sizes, program.graph_signature, constants, OPTIONS, environment())


def describe_module(module: nn.Module) -> list[Any]:
    """What determines a module's computation, tensors aside: the class, source file and settings of each part."""
    return [
        (
            name,
            type(part).__qualname__,
            _digest_source(type(part).__module__),
            sorted((key, _describe_value(value)) for key, value in vars(part).items() if key not in STATE),
        )
        for name, part in module.named_modules()
    ]


def _describe_value(value: Any) -> tuple[str, ...]:
    text = re.sub(" at 0x[0-9a-f]+", "", repr(value.tolist() if isinstance(value, Tensor) else value))
    attention = getattr(value, "_attn_implementation", "")  # a config's repr lacks it
    return text, str(type(value)), attention, _digest_source(getattr(value, "__module__", ""))


@cache
def _digest_source(module: str) -> str:
    """A digest of the file of an imported module; empty if it has none."""
    file = getattr(sys.modules.get(module), "__file__", None)
    return "" if file is None else hashlib.sha256(Path(file).read_bytes()).hexdigest()


@cache
def _digest_package() -> str:
    return _digest([file.read_text(encoding="utf-8") for file in sorted(PACKAGE.rglob("*.py"))])


@cache
def environment() -> tuple[str, str]:
    """torch's version, and the CPU: kernels use all of its instructions."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else [f"model name: {platform.processor()}"]
    cpu = {line for line in lines if line.startswith(("flags", "Features", "model name"))}
    return torch.__version__, "\n".join(sorted(cpu))


def _digest(*parts: Any) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()
