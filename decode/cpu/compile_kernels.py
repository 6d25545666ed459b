"""Compile exported programs to kernels, in a process of its own: `python build_kernels.py FOLDER...`.

In each folder lie `program.pt2` and `inputs.json`; `kernel.pt2` is put there, or `failure.txt`, and a line is printed.
AOTInductor writes C++ and calls the machine's compiler; a call of the kernel then passes through no Python.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch._inductor

OPTIONS: dict[str, Any] = {
    # What several loops read is computed once: else each sum of products computes its inputs anew.
    "realize_reads_threshold": 0,
    # Other processes may have another number of threads.
    "cpp.dynamic_threads": True,
    # What calls the loops takes longer to compile than they do, and gains nothing from being optimised.
    "aot_inductor.compile_wrapper_opt_level": "O0",
}


def build(folder: Path) -> None:
    """Compile one program. It was saved without examples of its inputs, which hold weights: sizes and strides do."""
    exported = torch.export.load(folder / "program.pt2")
    likes = json.loads((folder / "inputs.json").read_text())
    examples = [torch.empty_strided(size, stride, dtype=getattr(torch, dtype)) for size, stride, dtype in likes]
    exported.example_inputs = (examples,), {}
    package = str(folder / "kernel.pt2")
    torch._inductor.aoti_compile_and_package(exported, package_path=package, inductor_configs=OPTIONS)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        try:
            build(Path(name))
        except Exception as error:  # whatever torch or the compiler makes of it
            first = (str(error).strip().splitlines() or [""])[0]
            (Path(name) / "failure.txt").write_text(f"{type(error).__name__}: {first}")
        print(name, flush=True)
