"""A numeric test of every model: a small tree against ordinary forward passes over its root-to-node paths.

A model that mishandles a tree's mask or positions raises nothing; its logits are silently wrong.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from decode.models.stock_model import StockModel
from decode.session import Session
from decode.tree import Tree

# Largest difference of a logit, in standard deviations of the logits. Wrong masks give 2e-2 and more in float32; in
# float64 many models still take softmax or norms in float32.
TOLERANCE = {torch.float64: 1e-4, torch.float32: 5e-3, torch.bfloat16: 0.4, torch.float16: 0.2}


@torch.inference_mode()  # as the loop has it
def self_test(target: StockModel) -> float:
    """Verify two small trees in a row and compare with forward passes without cache or tree mask.

    Returns the largest error, in standard deviations of the logits. Raises ValueError above `TOLERANCE`, or where the
    model fails. The second tree stands on a path of the first, so the compaction of the cache is tried too.
    """
    name, allowed = target.config.model_type, TOLERANCE.get(target.dtype, 0.4)
    try:
        error = _measure_error(target)
    except torch.OutOfMemoryError:
        raise
    except Exception as cause:  # whatever a model's code makes of a mask, positions or a cache that it doesn't expect
        reason = (str(cause).strip().splitlines() or [""])[0]
        raise ValueError(
            f"{name} cannot be verified as a tree: on a small one its forward pass ends in {type(cause).__name__}: "
            f"{reason}"
        ) from cause
    if error <= allowed:
        return error
    if _looks_ahead(target):
        raise ValueError(
            f"{name} looks ahead like an encoder; only models in which no token sees later ones can be used"
        )
    raise ValueError(
        f"{name} fails the tree self-test: its logits on a small tree differ from those on the tree's paths by "
        f"{error:.1e} standard deviations ({allowed:.0e} are allowed for {target.dtype}); it cannot be verified as a "
        "tree"
    )


def _measure_error(target: StockModel) -> float:
    prompt, first, second = _example(target)
    session = Session(target, 1)
    session.verify(Tree.chain([prompt]))
    session.keep([list(range(len(prompt)))])
    one = session.verify(first).logits[0]
    session.keep([[0, 2, 3]])
    two = session.verify(second).logits[0]
    continued = prompt + first.tokens[0, [0, 2, 3]].tolist()
    errors = torch.stack([*_errors(target, prompt, first, one), *_errors(target, continued, second, two)])
    return float(errors.max())  # unlike Python's own, this `max` keeps a NaN


def _looks_ahead(target: StockModel) -> bool:
    """Whether a token's logits depend on the tokens after it."""
    prompt, first, _ = _example(target)
    ids = torch.tensor([prompt, prompt[:-1] + first.tokens[0, :1].tolist()], device=target.device)
    one, other = target.model(input_ids=ids, use_cache=False).logits[:, 0].float()
    return float((one - other).abs().max() / one.std()) > TOLERANCE.get(target.dtype, 0.4)


def _example(target: StockModel) -> tuple[list[int], Tree, Tree]:
    """A prompt as long as the shortest window, if that is short, and two trees of 5 nodes with siblings and depth."""
    windows = [reach.window or reach.chunk or 0 for reach in target.windows.values()]
    short = [window for window in windows if 0 < window <= 64]
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(target.vocabulary, (max(short, default=4) + 12,), generator=generator).tolist()
    prompt, rest = tokens[:-10], tokens[-10:]
    parents = torch.tensor([[-1, 0, 0, 2, 2]])
    sizes = torch.tensor([5])
    return (
        prompt,
        Tree(torch.tensor([rest[:5]]), parents, sizes, height=2),
        Tree(torch.tensor([rest[5:]]), parents, sizes, height=2),
    )


def _errors(target: StockModel, prefix: list[int], tree: Tree, logits: Tensor) -> Iterator[Tensor]:
    """For each leaf's path: the largest difference to a plain forward pass over it."""
    for leaf in (1, 3, 4):
        path = tree.ancestors[0, leaf].nonzero()[:, 0]
        ids = torch.tensor([prefix + tree.tokens[0, path].tolist()], device=target.device)
        expected = target.model(input_ids=ids, use_cache=False).logits[0, len(prefix) :]
        difference = (logits[path.to(logits.device)].to(expected.device) - expected).abs().max()
        yield difference / expected.float().std()
