"""Compile exported graphs to kernels, in a process of its own: `python compile_kernels.py FOLDER...`.

Reads `program.pt2` and `settings.json` from each folder. Writes `kernel.pt2` or, if compiling fails, `failure.txt`, and
prints the folder's name. AOTInductor generates C++ and calls the machine's compiler, so kernels run without Python.
"""

import json
import sys
from pathlib import Path

import torch
import torch._inductor


def compile_program(folder: Path) -> None:
    """Compile the graph in a folder. Its saved form has no example inputs; sizes and strides are enough."""
    program = torch.export.load(folder / "program.pt2")
    settings = json.loads((folder / "settings.json").read_text())
    inputs = [
        torch.empty_strided(size, stride, dtype=getattr(torch, dtype)) for size, stride, dtype in settings["inputs"]
    ]
    program.example_inputs = (inputs,), {}
    package = str(folder / "kernel.pt2")
    torch._inductor.aoti_compile_and_package(program, package_path=package, inductor_configs=settings["options"])


if __name__ == "__main__":
    for name in sys.argv[1:]:
        try:
            compile_program(Path(name))
        except Exception as error:  # anything from torch or the compiler
            line = (str(error).strip().splitlines() or [""])[0]
            (Path(name) / "failure.txt").write_text(f"{type(error).__name__}: {line}")
        print(name, flush=True)
