"""A numeric test of a target: logits of two small trees against plain forward passes over their root-to-leaf paths.

A model that mishandles a tree's mask or positions raises no error; its logits are just wrong.
"""

from __future__ import annotations

import torch
from torch import Tensor

from decode.models.stock_model import StockModel
from decode.session import Session
from decode.tree import Tree

# The largest error of a logit, in standard deviations of the logits. Wrong masks give at least 2e-2 in float32. In
# float64 many models still compute softmax or norms in float32.
TOLERANCE = {torch.float64: 1e-4, torch.float32: 5e-3, torch.bfloat16: 0.4, torch.float16: 0.2}
PARENTS = ((-1, 0, 0, 2, 2),)  # of both trees; nodes 1, 3 and 4 are the leaves
PATH = [0, 2, 3]  # what is committed of the first tree


@torch.inference_mode()  # as in the loop
def self_test(target: StockModel) -> float:
    """The largest error of a logit, in standard deviations of the logits.

    Raises ValueError above `TOLERANCE`, or if the forward pass fails.
    """
    name, allowed = target.config.model_type, TOLERANCE.get(target.dtype, 0.4)
    try:
        error = _measure_error(target)
    except torch.OutOfMemoryError:
        raise
    except Exception as cause:  # anything from the model's code
        reason = f"{type(cause).__name__}: {(str(cause).strip().splitlines() or [''])[0]}"
        raise ValueError(f"{name} cannot verify a tree: its forward pass over a small one raises {reason}") from cause
    if error <= allowed:
        _refuse_row_coupling(target, allowed)
        return error
    if _looks_ahead(target, allowed):
        raise ValueError(f"{name} looks ahead like an encoder; only models whose tokens see no later ones can be used")
    raise ValueError(
        f"{name} fails the tree self-test and cannot verify a tree: its logits on a small tree differ from those on "
        f"the tree's paths by {error:.1e} standard deviations ({allowed:.0e} are allowed for {target.dtype})"
    )


def _refuse_row_coupling(target: StockModel, allowed: float) -> None:
    """Raise ValueError if a node's logits depend on unrelated nodes of the tree by more than a quarter of `allowed`.

    The shapes are the same, so a model that treats each token by itself rounds the same way.
    """
    prompt, tokens = _make_example(target)
    session, found = Session(target, 1), []
    session.verify(Tree.chain([prompt]))
    session.keep([list(range(len(prompt)))])
    for others in (tokens[:5], tokens[5:]):
        mixed = torch.where(torch.tensor([True, False, True, False, False]), tokens[:5], others)
        found.append(session.verify(Tree(mixed[None], torch.tensor(PARENTS), torch.tensor([5]), height=2)).logits[0])
    difference = (found[0] - found[1])[::2][:2]  # of nodes 0 and 2, whose paths are the same in both trees
    error = float(difference.abs().max() / found[0].float().std())
    if error > allowed / 4:
        raise ValueError(
            f"{target.config.model_type} is row-coupled: a token's logits change by {error:.1e} standard deviations "
            "with the other tokens of the forward pass. Quantisation with outliers or scales of a whole tensor does "
            "that (LLM.int8, dynamic fp8 per tensor); use weight-only quantisation, or scales for each token"
        )


def _measure_error(target: StockModel) -> float:
    """The error over two trees. The second continues a path of the first, which also tests the cache's compaction."""
    prompt, tokens = _make_example(target)
    session = Session(target, 1)
    session.verify(Tree.chain([prompt]))
    session.keep([list(range(len(prompt)))])
    errors = []
    for part in tokens.split(5):
        tree = Tree(part[None], torch.tensor(PARENTS), torch.tensor([5]), height=2)
        logits = session.verify(tree).logits[0]
        errors += [_path_error(target, prompt, tree, leaf, logits) for leaf in (1, 3, 4)]
        session.keep([PATH])
        prompt = prompt + part[PATH].tolist()
    return float(torch.stack(errors).max())  # unlike Python's `max`, keeps a NaN


def _path_error(target: StockModel, prompt: list[int], tree: Tree, leaf: int, logits: Tensor) -> Tensor:
    """The largest difference from a plain forward pass over the path to a leaf."""
    path = tree.ancestors[0, leaf].nonzero()[:, 0]
    ids = torch.tensor([prompt + tree.tokens[0, path].tolist()], device=target.device)
    expected = target.model(input_ids=ids, use_cache=False).logits[0, len(prompt) :]
    return (logits[path.to(logits.device)].to(expected.device) - expected).abs().max() / expected.float().std()


def _make_example(target: StockModel) -> tuple[list[int], Tensor]:
    """A prompt that is longer than the model's windows, if those are short, and the tokens [10] of two trees."""
    windows = [kind.window or kind.chunk or 0 for kind in target.windows.values()]
    longest = max((window for window in windows if 0 < window <= 64), default=4)
    tokens = torch.randint(target.vocabulary, (longest + 12,), generator=torch.Generator().manual_seed(0))
    return tokens[:-10].tolist(), tokens[-10:]


def _looks_ahead(target: StockModel, allowed: float) -> bool:
    """Whether a token's logits depend on the tokens after it."""
    prompt, tokens = _make_example(target)
    ids = torch.tensor([prompt, [*prompt[:-1], int(tokens[0])]], device=target.device)
    one, other = target.model(input_ids=ids, use_cache=False).logits[:, 0].float()
    return float((one - other).abs().max() / one.std()) > allowed
