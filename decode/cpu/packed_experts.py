"""Experts of mixtures with packed weights, for inference on a CPU.

A pass reads the weights of the experts that its rows have chosen, each once, in one call of the op for all experts.

Shapes: n rows, k chosen experts of a row, E experts, S = n k pairs of a row and an expert, sorted by expert.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from decode.cpu.native_ops import load_native_ops
from decode.cpu.packed_linear import TOLERANCE, PackedLinear, agree
from decode.devices.transfer import waits
from decode.devices.user_cache import print_notice_once
from decode.weights.blocks import StoredExperts, WeightStack
from decode.weights.layers import BAD_WEIGHT, LiveWeights, find_bad_weight, make_linear, make_stored

FAULTS = RuntimeError, TypeError, ValueError, AttributeError, IndexError  # of experts with another signature


class PackedStack(PackedLinear):
    """A matrix of each expert, packed one below the other."""

    def __init__(self, module: Any, name: str, stored: WeightStack | None) -> None:
        stack = join_stack(module, name)
        super().__init__(
            *(split_stack(stack, module.is_transposed) if stored is None else map(make_stored, stored.split()))
        )
        self._live = LiveStack(stack, module.is_transposed)


class LiveStack(LiveWeights):
    """The weights [E, N, K] and biases [E, N] of all experts of a layer."""

    def __init__(self, stack: nn.Linear, is_transposed: bool) -> None:
        super().__init__([stack])
        self._is_transposed = is_transposed

    def find_written(self) -> list[nn.Linear]:
        return [linear for stack in super().find_written() for linear in split_stack(stack, self._is_transposed)]


def join_stack(module: Any, name: str) -> nn.Linear:
    """A weight of a module, often that of all experts, and a bias of this name, as a layer has them."""
    stack = nn.Linear(1, 1, bias=False, device="meta")
    stack.weight, stack.bias = module._parameters[name], module._parameters.get(f"{name}_bias")
    stack.out_features, stack.in_features = stack.weight.shape[-2:]
    return stack


def split_stack(stack: nn.Linear, is_transposed: bool) -> list[nn.Linear]:
    """The layer of each expert."""
    weights = stack.weight.detach()
    biases = [None] * len(weights) if stack.bias is None else stack.bias.detach().unbind()
    return [*map(make_linear, (weights.mT if is_transposed else weights).unbind(), biases)]


class PackedExperts(nn.Module):
    """The experts of a layer, on packed weights. The activation, the gate and what follows are the module's own.

    Raises RuntimeError if it computes something else than the module.
    """

    def __init__(self, experts: Any) -> None:
        super().__init__()
        stored = experts.stored if isinstance(experts, StoredExperts) else {}
        self.module = module = experts.module if stored else experts
        self.count, names = len(module.down_proj), ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")
        self.gate_up, self.down = (PackedStack(module, name, stored.get(name)) for name in names)
        self.eval()
        if not stored:
            self._check()
        for name in names:
            del module._parameters[name]
            module._parameters.pop(f"{name}_bias", None)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The weighted sums [n, H] for states [n, H], the experts [n, k] of each, and their weights [n, k]."""
        module: Any = self.module
        experts, places = top_k_index.flatten().sort(stable=True)
        ends = torch.searchsorted(experts, torch.arange(self.count), right=True)
        states = self.gate_up(hidden_states[places // top_k_index.shape[1]], ends)
        states = self.down(module._apply_gate(states) if module.has_gate else module.act_fn(states), ends)
        if getattr(module, "has_post_expert_norm", False):
            states = module.post_expert_norm(states)
        states = torch.empty_like(states).index_copy(0, places, states)
        first, *others = (states.view(*top_k_index.shape, states.shape[-1]) * top_k_weights[..., None]).unbind(1)
        for other in others:  # torch's sum may have another order for other numbers of rows
            first = first + other
        return first.to(hidden_states.dtype)

    @torch.no_grad()
    def _check(self) -> None:
        draw = torch.Generator().manual_seed(0)
        inputs = torch.randn(7, self.gate_up.in_features, generator=draw).to(self.gate_up.dtype)
        experts, weights = (torch.arange(14) % self.count).view(7, 2), torch.rand(7, 2, generator=draw).to(inputs)
        found, expected = self(inputs, experts, weights), self.module(inputs, experts, weights)
        if not agree(found, expected, layers=3):  # two, and the weighted sum
            raise RuntimeError("packed experts do not compute what the module does")


class PackedRouter(nn.Module):
    """A module that chooses experts, whose product with its weight does not depend on the other rows."""

    def __init__(self, router: nn.Module) -> None:
        super().__init__()
        self.router, self.layer = router, PackedLinear(join_stack(router, "weight"))  # a bias is the router's affair
        self.eval()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with _Multiplying(self.router.weight, self.layer):
            return self.router(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """As the router's, which other parts of a layer read."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("router"), name)


class _Multiplying(TorchFunctionMode):
    """Inside, products with this weight are those of a packed layer."""

    def __init__(self, weight: Any, layer: PackedLinear) -> None:
        super().__init__()
        self._weight, self._layer = weight, layer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear and not kwargs and args[1] is self._weight:
            inputs, _, *bias = args
            if inputs.dtype == self._layer.dtype:
                found = self._layer(inputs)
                return found + bias[0] if bias and bias[0] is not None else found
        return func(*args, **(kwargs or {}))


def can_pack_experts(module: Any) -> bool:
    """Whether these are experts in the form of transformers' own, which can be packed on this machine."""
    weight = module._parameters.get("down_proj")
    if isinstance(module, StoredExperts):
        return True
    if type(weight) is not nn.Parameter or not hasattr(module, "_apply_gate") or not hasattr(module, "has_gate"):
        return False
    if weight.dtype not in TOLERANCE or waits(weight) or hasattr(module, "_hf_hook"):
        return False
    if getattr(module, "_is_expert_parallel", False):
        return False
    return load_native_ops() is None


def pack_experts(model: nn.Module) -> None:
    """Pack the experts of all mixtures of a model, and what chooses them, in place.

    Those that cannot be packed, or whose module computes something else, stay as they are. Raises ValueError with the
    name of a weight that is NaN or infinite.
    """
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if can_pack_experts(child) and name != "base_layer":  # peft reads its weights
                try:
                    _pack_mixture(parent, name, PackedExperts(child))
                except FAULTS as error:
                    if weight := find_bad_weight(model):
                        raise ValueError(f"the weight {weight} {BAD_WEIGHT}") from error
                    if isinstance(child, StoredExperts):
                        raise
                    print_notice_once(
                        "experts", f"experts of this model run as in transformers, which is slower: {error}"
                    )


def _pack_mixture(parent: nn.Module, name: str, experts: PackedExperts) -> None:
    setattr(parent, name, experts)
    shape = experts.count, experts.gate_up.in_features
    for name, child in list(parent.named_children()):
        weight = child._parameters.get("weight")
        if weight is not None and weight.shape == shape and weight.dtype in TOLERANCE and type(child) is not nn.Linear:
            setattr(parent, name, PackedRouter(child))
