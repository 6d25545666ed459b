"""What a kind of device can do. It is decided once, when a target is loaded; no other file asks for a device's type.

`Backend` describes any device. A folder `decode/TYPE` with a `backend.py` describes devices of that type better. It is
found by its name, so that the core imports none, and another kind of device takes another folder alone.

Shapes: B rows, N nodes, S slots of the KV cache, V vocabulary, R ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from decode.devices.graph import GraphPool

MODES = ("auto", "packed", "compiled", "graphs", "off")
NEEDS = {"compiled": "layers are compiled on a CPU", "graphs": "CUDA graphs need a CUDA device"}


class Backend:
    """A device, used in the ways that any one allows.

    waits: reading a tensor makes the host wait for all that was launched before. pins: copies from and to pinned memory
    go on while the host does. takes_blocks: weights stay in the blocks that files store them in. pass_tokens: of all
    rows, in a pass that reads prompts; fewer would not keep the device busy. default_dtype: of models. attention: the
    name of what models attend by, for transformers; None: as the model itself. attend: the device's own way of
    `decode.devices.attention.attend`. top_tokens: its own way of the function of that name, or None for logits that it
    leaves to torch. lacks: modes of `accelerate` that it has not. running: where passes of models run.

    Only of devices with graphs: find_graph_fault, why steps of a target cannot be graphs, None if they can; open_steps,
    what makes a session's steps. Only of those that can pass flat: passing_flat, where such a pass runs, by the nodes
    [B] of each row.
    """

    waits, pins, takes_blocks = True, False, False
    pass_tokens = 8192
    default_dtype: str | torch.dtype = "auto"
    attention: str | None = None
    attend: Callable[..., Tensor] | None = None
    top_tokens: Callable[[Tensor, int, bool], tuple[Tensor, Tensor] | None] | None = None
    lacks: tuple[str, ...] = "compiled", "graphs"
    running: Callable[[], AbstractContextManager[None]] = staticmethod(nullcontext)
    find_graph_fault: Callable[[Any], str | None]
    open_steps: Callable[[Any, int, Sequence[int]], Any]
    passing_flat: Callable[[Tensor], AbstractContextManager[None]]

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def name(self) -> str | None:
        """What tells devices of this kind apart by speed; None if nothing does."""
        return None

    @property
    def is_fast_in_bfloat16(self) -> bool:
        """Whether it has instructions for bfloat16."""
        return False

    def find_fixed_costs(self, model: nn.Module) -> tuple[Sequence[float], Sequence[float]]:
        """The sizes and seconds of a cost curve for runs that measure none.

        Here of a GPU: an estimate, not timed. While weights are read, there is time for the arithmetic of 300 tokens.
        """
        return (1, 64, 256, 512), (1.0, 1.1, 1.4, 2.4)

    def synchronize(self) -> None:
        """Wait for all that was launched."""
        torch.get_device_module(self.device).synchronize(self.device)

    def release_threads(self) -> None:
        """Let passes of another thread be as fast as those of this one."""

    def make_zeros(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Memory for a KV cache."""
        return like.new_zeros(*shape)

    def make_pool(self) -> GraphPool | None:
        """What graphs share that are never replayed at the same time; None if the device has no graphs."""
        return None

    def accelerate(self, model: Any, mode: str) -> None:
        """Make a model fast, in place. Outputs stay the same up to rounding.

        mode: one of `MODES`. "packed": layers and attention in the device's own forms. "compiled" and "graphs": these
        are made too, see `compile` and `find_graph_fault`; "auto": where they are worth it. "off": nothing.

        Raises ValueError if "compiled" or "graphs" is not possible.
        """
        if mode in self.lacks:
            raise ValueError(f"{NEEDS[mode]}, and the model is on {self.device.type}; choose auto")
        if mode != "off" and self.attention is not None and model.config._attn_implementation == "sdpa":
            model.set_attn_implementation(self.attention)

    def compile(self, target: Any, mode: str) -> bool:
        """Compile the layers of a target's accelerated model, if the mode asks for it. Returns whether some are."""
        return False

    def pack_drafter(self, module: nn.Module) -> None:
        """Pack or merge the linear layers of a drafter, in place. Weights and inputs may be rounded."""

    def compile_module(
        self, module: nn.Module, example: Sequence[Tensor], dimensions: Sequence[Sequence[Any]]
    ) -> Callable[..., Tensor] | None:
        """A module that takes tensors and returns one, compiled; None if that is not possible.

        example: what it takes. It writes to the last two. dimensions: of each, each dimension's symbol, or its size if
        it is fixed.
        """
        return None

    def round_inputs(self, model: Any) -> None:
        """Round the inputs of layers with weights in blocks to 16 bits. Raises ValueError if there is none to round."""
        raise ValueError(f"dtype fixed16 is for CPUs; choose float32 or another for {self.device}")

    def reading_texts(self) -> AbstractContextManager[None]:
        """Where passes over many tokens run, but not those of decoding: a token's result may depend on their number."""
        return self.running()

    def can_pass_flat(self, model: Any) -> bool:
        """Whether an accelerated model might take the tokens of all rows as one row, without padding."""
        return False

    def needs_masks(self, model: Any) -> bool:
        """Whether prompts need masks, too. Else the model's own code hides later tokens."""
        return False

    def sees_texts_whole(self, dtype: torch.dtype, size: int) -> bool:
        """Whether long texts are faster seen without a mask, by heads of a size."""
        return False

    def count_seen(self, lengths: Sequence[int]) -> int:
        """The slots of texts of these lengths that all nodes should see without a mask; 0 if texts are short."""
        return 0

    def find_window(self, lengths: Sequence[int], capacity: int, more: int) -> tuple[int, int]:
        """The slots that all nodes see without a mask, and those in all that they see, for steps of fixed shape.

        lengths: of the texts; `more` slots follow the longest, of `capacity`. Both numbers change rarely, because each
        takes graphs of its own.
        """
        return 0, capacity


@cache
def find_backend(device: torch.device) -> Backend:
    """What a device can do."""
    if find_spec(f"decode.{device.type}") is None:
        return Backend(device)
    backend: Backend = import_module(f"decode.{device.type}.backend").BACKEND(device)
    return backend


def check_mode(mode: str) -> None:
    """Raise ValueError for anything but one of `MODES`."""
    if mode not in MODES:
        raise ValueError(f"accelerate is {mode!r}; choose one of {', '.join(MODES)}")


def top_tokens(logits: Tensor, count: int, *, normalized: bool = True) -> tuple[Tensor, Tensor]:
    """The ids of the `count` largest of logits [..., V], or all if there are fewer, and their log-probabilities in
    float32, or the logits if these are not to be `normalized`: [..., R] each, best first. With a NaN, any id."""
    logits, count = logits.float(), min(count, logits.shape[-1])
    own = find_backend(logits.device).top_tokens
    if own is not None and (found := own(logits, count, normalized)) is not None:
        return found
    values, ids = logits.topk(count, dim=-1)
    return ids, logits.log_softmax(dim=-1).gather(-1, ids) if normalized else values
