"""Linear layers for a few tokens, as kernels that torch.compile makes with the machine's C++ compiler.

Plain decoding reads every weight for one product with it. oneDNN's packed layers read them at about half of the
memory's speed; a loop that torch.compile makes of sums of products, at nearly all of it. With each further token the
loop takes longer, a packed layer hardly so.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from decode.packed import PackedLinear, can_pack, make_linear

FEW = 5  # tokens; for more the packed layers are as fast
KINDS = 256  # of layers and numbers of tokens; torch.compile would stop at 8
OPTIONS: dict[str, Any] = {
    # What several loops read is computed once: else each sum of products computes its inputs anew.
    "realize_reads_threshold": 0,
    # Kernels are kept on disk; other processes may have another number of threads.
    "cpp.dynamic_threads": True,
}
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}  # of the largest number that a layer computes


class FewOrMany(nn.Module):
    """A linear layer in two forms: `few` is compiled and serves up to `FEW` tokens, `many` is packed and serves more.

    Where torch's state is another than when it was made (the number of threads, autocast), `many` serves all.
    Raises ValueError where there is no C++ compiler, or its kernels compute something else.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.few, self.many = SumsOfProducts(linear), PackedLinear(linear)
        self._state: tuple[Any, ...] = ()  # torch's, when the kernels were made
        self.eval()
        self._try()

    def forward(self, inputs: Tensor) -> Tensor:
        rows = inputs.numel() // inputs.shape[-1]
        if not 0 < rows <= FEW or self._state != state_of_torch():
            return self.many(inputs)
        outputs = run_compiled(sum_products, inputs.reshape(1, rows, -1), self.few.weight, self.few.bias)
        return outputs.view(*inputs.shape[:-1], -1)

    @torch.inference_mode()  # as the loop has it
    def _try(self) -> None:
        """Compile now rather than amid an answer, and compare."""
        weight, self._state = self.few.weight, state_of_torch()
        inputs = torch.randn(FEW, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight.dtype)
        try:
            with new_kind():
                found = [self(inputs[:rows]) for rows in range(1, FEW + 1)]
        except Exception as error:  # whatever torch.compile or the machine's compiler makes of it
            reason = (str(error).strip().splitlines() or [""])[0]
            raise ValueError(
                f"torch.compile cannot make kernels here ({type(error).__name__}: {reason}); it needs a C++ compiler "
                "such as g++ and Python's headers, or go on without compiling"
            ) from error
        expected = self.many(inputs)
        share = max(difference(some, expected[: len(some)]) for some in found)
        if not share <= TOLERANCE[weight.dtype]:
            raise ValueError(
                f"a compiled layer's result is off by {share:.1e} of its largest number; go on without compiling"
            )


class SumsOfProducts(nn.Module):
    """`nn.Linear` for a few tokens."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        frozen = make_linear(linear.weight, linear.bias)
        self.weight, self.bias = frozen.weight, frozen.bias
        self.eval()

    def forward(self, inputs: Tensor) -> Tensor:
        return sum_products(inputs, self.weight, self.bias)


def for_few(module: nn.Module) -> nn.Module:
    """A copy for a few tokens that shares the module's tensors."""
    if can_pack(module):
        return SumsOfProducts(module)
    copied = copy.copy(module)
    copied._modules = {name: child if child is None else for_few(child) for name, child in module._modules.items()}
    return copied


def sum_products(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear`, written so that torch.compile makes one loop over the weight of it."""
    rows = inputs.reshape(-1, inputs.shape[-1])
    # Beyond torch.compile's limit nothing is compiled; latent attention has layers that see all tokens of the KV cache.
    if not torch.compiler.is_compiling() or rows.shape[0] > FEW:
        return nn.functional.linear(inputs, weight, bias)
    outputs = torch.stack([(weight * row).sum(-1) for row in rows.unbind()])
    return (outputs if bias is None else outputs + bias).view(*inputs.shape[:-1], -1)


def run_compiled(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function by its kernels, of which there is one for every kind of layer that it is given."""
    return _compile(function)(*args)


@cache  # not when this file is imported: torch.compile takes a second for its own imports
def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False, options=OPTIONS)


@contextmanager
def new_kind() -> Iterator[None]:
    """Where a kind of layer is met for the first time: compile it whole, or raise what torch.compile says."""
    with (
        torch._dynamo.config.patch(recompile_limit=KINDS, fail_on_recompile_limit_hit=True),
        torch._dynamo.error_on_graph_break(True),
    ):
        yield


def state_of_torch() -> tuple[Any, ...]:
    """What kernels are made for, beside the tensors: in another state torch.compile would make new ones, unasked."""
    autocast = torch.is_autocast_enabled("cpu")
    return torch.is_inference_mode_enabled(), torch.get_num_threads(), autocast, torch.get_default_dtype()


def difference(found: Tensor, expected: Tensor) -> float:
    """The largest difference of two tensors, as a share of the largest number."""
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-30))
