"""Losses between the head's distribution and the target's, computed without storing all logits.

Shapes: R rows, H hidden size, D draft vocabulary, S labels. q: the head's probabilities. p: the target's, known for
its S most likely tokens. alpha = sum min(p, q): the probability that a token drawn from q is accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

CHUNK = 1 << 22  # logits held in memory at a time
LEAST_P, LEAST_Q = 1e-8, 1e-30  # in logarithms; p may have been stored in half precision
LEAST_TAIL = 1e-6  # float32 cannot tell a smaller rest of a distribution from zero

# A loss takes p and q at the labels, [R, S], and p of all other tokens [R]. It returns its value [R] and its gradient
# by the logits, which for all of these losses is a * q, minus b at the labels: a [R, 1], b [R, S].
ValueAndGradient = tuple[Tensor, Tensor, Tensor]


def kl(p: Tensor, q: Tensor, tail: Tensor) -> ValueAndGradient:
    """Cross-entropy with the target's distribution: KL(p || q) up to a constant (Hinton et al. 2015)."""
    return -(p * q.clamp_min(LEAST_Q).log()).sum(dim=-1), p.sum(dim=-1, keepdim=True), p


def tv(p: Tensor, q: Tensor, tail: Tensor) -> ValueAndGradient:
    """Total variation, 1 - alpha: the probability of a rejection (Leviathan et al. 2023, corollary 3.6)."""
    below = q * (q < p)
    return 1 - torch.minimum(p, q).sum(dim=-1), below.sum(dim=-1, keepdim=True), below


def rkl(p: Tensor, q: Tensor, tail: Tensor) -> ValueAndGradient:
    """KL(q || p), which punishes tokens that the target does not give (Agarwal et al. 2024).

    All tokens that are no labels count as one. p is given that the token can be drafted.
    """
    whole = (p.sum(dim=-1) + tail).clamp_min(LEAST_P)
    p, p_tail = (p / whole[:, None]).clamp_min(LEAST_P), (tail / whole).clamp_min(LEAST_P)
    q, q_tail = q.clamp_min(LEAST_Q), (1 - q.sum(dim=-1)).clamp_min(LEAST_Q)
    slopes, tail_slope = (q / p).log(), (q_tail / p_tail).log()  # the derivatives by q, up to a constant
    value = (q * slopes).sum(dim=-1) + q_tail * tail_slope
    return value, (tail_slope - value)[:, None], q * (tail_slope[:, None] - slopes)


LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor], ValueAndGradient]] = {
    "ce": kl,  # its only label is the text's token
    "kl": kl,
    "tv": tv,
    "rkl": rkl,
}


def vocabulary_loss(
    name: str,
    states: Tensor,
    weights: Sequence[Tensor],
    bias: Tensor | None,
    labels: Tensor,
    p: Tensor,
    factors: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The sum over rows of a loss of q = softmax(states weight^T + bias), and [R] bool: whether q's most likely token
    is label 0.

    states [R, H]; weights: matrices [D, *] that are side by side the weight [D, H]; bias [D]; labels [R, S] are draft
    ids, -1 outside the draft vocabulary; p [R, S]; factors [R]: of the rows in the sum, 1 if None.
    """
    return _VocabularyLoss.apply(LOSSES[name], find_dtype(states), states, bias, labels, p, factors, *weights)


@torch.no_grad()
def find_acceptance(
    states: Tensor, weights: Sequence[Tensor], bias: Tensor | None, labels: Tensor, p: Tensor
) -> Tensor:
    """alpha [R] of q = softmax(states weight^T + bias), with the arguments of `vocabulary_loss`."""
    dtype = find_dtype(states)
    matrices = [weight.to(dtype) for weight in weights]
    parts = states.to(dtype).split([weight.shape[1] for weight in weights], dim=1)
    found = []
    for part, index, drafted in split_rows(labels, len(matrices[0])):
        q = compute_q(parts, matrices, bias, part)
        found.append(torch.minimum(p[part].to(q) * drafted, q.gather(1, index)).sum(dim=-1))
    return torch.cat(found) if found else states.new_zeros(0)


def divergence(logits: Tensor, labels: Tensor, p: Tensor) -> Tensor:
    """The sum over rows of KL(p || q) for q = softmax(logits), with all tokens that are no labels counted as one.

    logits [R, V]; labels, p [R, S]. Value and gradient are zero where both distributions agree. `kl` has a gradient
    there, towards no probability for other tokens than labels.
    """
    exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
    p, log_q = p.to(exact.dtype), exact.gather(1, labels) - exact.logsumexp(dim=1, keepdim=True)  # [R, S]
    p_tail, q_tail = ((1 - known.sum(dim=1)).clamp_min(LEAST_TAIL) for known in (p, log_q.exp()))  # [R]
    return (torch.xlogy(p, p) - p * log_q).sum() + (p_tail * (p_tail / q_tail).log()).sum()


def find_dtype(states: Tensor) -> torch.dtype:
    """The dtype of a matrix product with these states."""
    device = states.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else states.dtype


def split_rows(labels: Tensor, width: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Parts of the rows of labels [R, S], of at most `CHUNK` logits: the rows, their labels as valid draft ids, and
    which of these are in the draft vocabulary."""
    rows = max(1, CHUNK // width)
    for begin in range(0, len(labels), rows):
        part = slice(begin, begin + rows)
        yield part, labels[part].clamp_min(0), labels[part] >= 0


def compute_q(parts: Sequence[Tensor], matrices: Sequence[Tensor], bias: Tensor | None, rows: slice) -> Tensor:
    """q [*, D] of some rows, in float32 or wider, from parts of the states and of the output matrix."""
    logits = parts[0][rows] @ matrices[0].T
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    for inputs, matrix in zip(parts[1:], matrices[1:], strict=True):
        logits += inputs[rows] @ matrix.T
    if bias is not None:
        logits += bias
    return logits.sub_(logits.logsumexp(dim=-1, keepdim=True)).exp_()


class _VocabularyLoss(torch.autograd.Function):
    """Linear layer, softmax and loss in one, over chunks of rows. The forward pass overwrites the logits with their
    gradient: with separate operations, memory traffic would take half of the training time."""

    @staticmethod
    def forward(
        ctx: Any,
        loss: Any,
        dtype: torch.dtype,
        states: Tensor,
        bias: Any,
        labels: Tensor,
        p: Tensor,
        factors: Any,
        *weights: Tensor,
    ):
        exact = torch.promote_types(dtype, torch.float32)
        narrow, matrices = states.to(dtype), [weight.to(dtype) for weight in weights]
        grad_states = torch.empty_like(narrow)
        # A borrowed matrix is not trained; its gradient would be a third of the work.
        needed = ctx.needs_input_grad[7:]
        grads = [
            torch.zeros_like(each, dtype=exact) if wanted else None
            for each, wanted in zip(weights, needed, strict=True)
        ]
        widths = [weight.shape[1] for weight in weights]
        parts, grad_parts = narrow.split(widths, dim=1), grad_states.split(widths, dim=1)
        grad_bias = None if bias is None else torch.zeros_like(bias, dtype=exact)
        total = torch.zeros((), dtype=exact, device=states.device)
        right = torch.empty(len(states), dtype=torch.bool, device=states.device)
        for part, index, drafted in split_rows(labels, len(matrices[0])):
            q = compute_q(parts, matrices, bias, part)
            right[part] = q.argmax(dim=-1) == labels[part, 0]
            labelled = p[part].to(exact)
            tail = (1 - labelled.sum(dim=-1)).clamp_min(0)
            value, a, b = loss(labelled * drafted, q.gather(1, index) * drafted, tail)
            if factors is not None:
                factor = factors[part]
                value, a, b = value * factor, a * factor[:, None], b * factor[:, None]
            total += value.sum()
            gradient = q.mul_(a).scatter_add_(1, index, -b)
            if grad_bias is not None:
                grad_bias += gradient.sum(dim=0)
            gradient = gradient.to(dtype)
            for into, matrix in zip(grad_parts, matrices, strict=True):
                into[part] = gradient @ matrix
            for grad, inputs in zip(grads, parts, strict=True):
                if grad is not None:
                    grad += gradient.T @ inputs[part]
        ctx.save_for_backward(grad_states, grad_bias, *grads)
        ctx.dtypes = states.dtype, weights[0].dtype
        ctx.mark_non_differentiable(right)
        return total, right

    @staticmethod
    def backward(ctx: Any, scale: Any, _: Any) -> Any:
        grad_states, *grads = ctx.saved_tensors
        states, weight = ctx.dtypes
        bias, *matrices = (None if part is None else (part * scale).to(weight) for part in grads)
        return None, None, (grad_states * scale).to(states), bias, None, None, None, *matrices
