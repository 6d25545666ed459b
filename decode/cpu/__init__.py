"""Makes a stock model fast on a CPU: packed linear layers, grouped attention, compiled decoder layers."""

from decode.cpu.acceleration import (
    MODES,
    accelerate,
    accelerated_copy,
    check_mode,
    dense_output_layer,
    is_compiled,
    is_fast_in_bfloat16,
)
from decode.cpu.compiled_model import compile_batch

__all__ = [
    "MODES",
    "accelerate",
    "accelerated_copy",
    "check_mode",
    "compile_batch",
    "dense_output_layer",
    "is_compiled",
    "is_fast_in_bfloat16",
]
