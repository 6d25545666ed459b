"""Compile exported graphs to kernels, in a process of its own: `python compile_kernels.py FOLDER...`.

Reads `program.pt2` from each folder. Writes `kernel.pt2` or, if compiling fails, `failure.txt`, and prints the folder's
name. AOTInductor generates C++ and calls the machine's compiler, so kernels run without Python.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

OPTIONS: dict[str, Any] = {  # Inductor's
    # Compute what several loops read once, not in each of them.
    "realize_reads_threshold": 0,
    # The number of threads may differ from process to process.
    "cpp.dynamic_threads": True,
    # The code that calls the loops takes longer to compile than they do and gains nothing from optimization.
    "aot_inductor.compile_wrapper_opt_level": "O0",
}


def compile_program(folder: Path) -> None:
    """Compile the graph in a folder. Its example inputs are on the "meta" device, without content."""
    program = torch.export.load(folder / "program.pt2")
    program.example_inputs = (allocate(program.example_inputs[0][0], "cpu"),), {}
    package = str(folder / "kernel.pt2")
    torch._inductor.aoti_compile_and_package(program, package_path=package, inductor_configs=OPTIONS)


def allocate(examples: Sequence[torch.Tensor], device: str) -> list[torch.Tensor]:
    """Tensors of the same sizes, strides and dtypes."""
    return [torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device) for like in examples]


def describe_error(error: Exception) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


if __name__ == "__main__":
    for name in sys.argv[1:]:
        try:
            compile_program(Path(name))
        except Exception as error:  # anything from torch or the compiler
            (Path(name) / "failure.txt").write_text(describe_error(error))
        print(name, flush=True)
