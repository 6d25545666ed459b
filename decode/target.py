"""The target: the stock model whose distribution is kept."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from os import PathLike
from typing import Any, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.utils import ModelOutput

from decode.cpu.acceleration import accelerated_copy
from decode.cpu.compiled_layers import compiled_layers
from decode.cpu.native_ops import DTYPES, load_native_ops, passing_flat
from decode.cpu.packed_linear import PackedLayer
from decode.cuda.fixed_steps import find_graph_fault, open_steps
from decode.models.changes import MOVED, ModelWatch
from decode.models.compatibility import refuse_unsupported, unwrap
from decode.models.cost_curve import CONTEXTS, CostCurve
from decode.models.grouped_attention import ATTENTION
from decode.models.loading import load_model
from decode.models.timed_model import TimedModel
from decode.requests.arguments import naming_arguments
from decode.requests.text import Tokenizer
from decode.self_test import agrees_flat, self_test
from decode.session import Session


class Target(TimedModel):
    """The model whose distribution is kept, ready to verify trees.

    model: any decoder-only transformers model with sdpa, eager or flex attention. It is never changed.
    accelerate: "off" uses the model as it is; "packed", "compiled", "graphs" and "auto" use an accelerated copy
    (`decode.cpu.acceleration`). Changes of the weights are noticed, see `read_version`.
    deterministic: the sizes of draft trees do not depend on this run's clock. Nothing is measured; True takes a fixed
    cost curve, a `CostCurve` that curve, for example `cost_curve()` of an earlier run. In a `torch.distributed` group
    the first rank's counts, and all ranks must decode the same prompts.

    Raises ValueError for a model that cannot verify a tree, or that `accelerate` cannot compile or make graphs of.
    """

    @naming_arguments("Target")
    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Tokenizer | None = None,
        *,
        accelerate: str = "off",
        deterministic: bool | CostCurve = False,
    ) -> None:
        model = unwrap(model)
        refuse_unsupported(model)
        super().__init__(accelerated_copy(model, accelerate), deterministic)
        self.accelerate, self._shares_all = accelerate, self.model is model
        self.tokenizer = tokenizer
        self_test(self)
        if (mode := getattr(self.model, "graphs", None)) is not None:
            self._use_graphs(must=mode == "graphs")
        self._watch = ModelWatch(model)

    @classmethod
    @naming_arguments("Target.load")
    def load(
        cls,
        name: str | PathLike[str] | None = None,
        *,
        dtype: str | torch.dtype | None = None,
        device: str | None = None,
        device_map: str | None = None,
        accelerate: str = "auto",
        deterministic: bool | CostCurve = False,
    ) -> Self:
        """Load a target from a local folder, a hub id or a GGUF file; without a name, the default model.

        Arguments and errors are those of `decode.models.loading.load_model`, and of this class.
        """
        loaded = load_model(name, dtype=dtype, device=device, device_map=device_map, accelerate=accelerate)
        return cls(*loaded, deterministic=deterministic)

    def _use_graphs(self, must: bool) -> None:
        """Make steps CUDA graphs, if the model's code allows it. Raises ValueError if it must and does not."""
        fault = find_graph_fault(self)
        if fault is not None and must:
            raise ValueError(f"{self.config.model_type} cannot have CUDA graphs ({fault}); choose auto or packed")
        self.has_graphs = fault is None

    def read_version(self, deep: bool = False) -> int:
        """A number that rises when the model's weights or adapters have changed. What was computed before is void then.

        Before each step it compares which tensors there are, where they lie, and torch's version of each. Writing
        through `.data` changes none of these. deep: compare some elements of each tensor as well, which takes
        milliseconds and sees most such writing. It is done before prompts are read.

        Raises ValueError, with the call to make, if the model is in training mode, if it has another form, or if this
        target has copies of weights that have changed.
        """
        version, changes = self._watch.look(deep), self._watch.changes
        holds_places = self.has_graphs or not self._shares_all
        if changes and (self.is_packed or (MOVED in changes and holds_places)):
            raise ValueError(
                "the model's weights have changed since this target was made, and it has copies of them; make a new "
                f"one: Target(model, tokenizer, accelerate={self.accelerate!r})"
            )
        return version

    @cached_property  # every pass asks, and finding out takes half a millisecond
    def compiled(self) -> bool:
        """Whether passes over a few tokens run compiled kernels."""
        return bool(compiled_layers(self.model))

    @cached_property
    def is_packed(self) -> bool:
        """Whether it has packed copies of weights."""
        return any(isinstance(module, PackedLayer) for module in self.model.modules())

    @cached_property
    def passes_flat(self) -> bool:
        """Where the project's own attention op runs, if the model computes the same in a flat pass."""
        is_own = self.model.config._attn_implementation == ATTENTION and self.dtype in DTYPES
        if (
            self.device.type != "cpu"
            or self.is_recurrent
            or not (is_own and self.is_packed)
            or load_native_ops() is not None
        ):
            return False
        vars(self)["passes_flat"] = True  # while it is tried
        return agrees_flat(self)

    def run(self, cache: Cache, counts: Tensor | None = None, **inputs: Any) -> ModelOutput:
        if counts is None:
            return super().run(cache, **inputs)
        with passing_flat(counts):
            return super().run(cache, **inputs)

    @property
    def needs_masks(self) -> bool:
        return self.compiled or (self.device.type == "cpu" and self.model.config._attn_implementation == ATTENTION)

    def cost_curve(self, batch_size: int = 1, context: int = CONTEXTS[0]) -> CostCurve:
        curve = super().cost_curve(batch_size, context)
        return curve.padded if self.has_graphs else curve

    def open(self, batch_size: int, layers: Sequence[int] = ()) -> Session:
        steps = open_steps(self, batch_size, layers) if self.has_graphs else None
        return Session(self, batch_size, layers, steps=steps)


def check_target(target: Any, other: Any = None, order: str = "") -> None:
    """Raise TypeError, with the right call, for anything but a target.

    other, order: the argument that a target may have changed places with, and the call that takes it as "{}".
    """
    if isinstance(target, Target):
        return
    call = "Target(model, tokenizer)"
    if isinstance(other, Target):
        call = order.format(repr(str(target)) if isinstance(target, str | PathLike) else "prompts")
    elif isinstance(target, str | PathLike):
        call = f"Target.load({str(target)!r})"
    elif isinstance(target, type):
        call = "Target.load(name) or Target(model, tokenizer)"
    kind = f"the class {target.__name__}" if isinstance(target, type) else f"a {type(target).__name__}"
    raise TypeError(f"the target is {kind}; give {call}")
