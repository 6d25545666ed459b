"""The most likely tokens by logits, by the device's own function, if it has one.

Shapes: V vocabulary, R ranks.
"""

from __future__ import annotations

from torch import Tensor

from decode.devices.backend import find_backend


def top_tokens(logits: Tensor, count: int, *, normalized: bool = True) -> tuple[Tensor, Tensor]:
    """The ids of the `count` largest of logits [..., V], or all if there are fewer, and their log-probabilities in
    float32, or the logits if these are not to be `normalized`: [..., R] each, best first. With a NaN, any id."""
    logits, count = logits.float(), min(count, logits.shape[-1])
    own = find_backend(logits.device).top_tokens
    if own is not None and (found := own(logits, count, normalized)) is not None:
        return found
    values, ids = logits.topk(count, dim=-1)
    return ids, logits.log_softmax(dim=-1).gather(-1, ids) if normalized else values
