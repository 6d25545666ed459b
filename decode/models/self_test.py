"""A numeric test of a target: logits of two small trees against plain forward passes over their root-to-leaf paths.

A model that mishandles a tree's mask or positions raises no error; its logits are just wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache

from decode.models.attention_windows import AttentionWindow
from decode.models.stock_model import StockModel
from decode.session import Session
from decode.tree import Tree

# The largest error of a logit, in standard deviations of the logits. Wrong masks give at least 2e-2 in float32. In
# float64 many models still compute softmax or norms in float32.
TOLERANCE = {torch.float64: 1e-4, torch.float32: 5e-3}
# In half precision it follows from rounding. Each of two passes rounds about 8 results a layer, with a standard
# deviation of 0.2 eps. Independent errors add up to 0.2 sqrt(2 x 8 x layers) eps, and the largest of many logits'
# errors is 5 times that: 4 sqrt(layers) eps. Measured in place of the 4: 2.5 to 13 in bfloat16 and 4 to 11 in float16,
# with 2 to 32 layers; 3.8 in both for SmolLM2-135M. Wrong masks give at least 0.5.
ROUNDING, MOST = 18, 0.4
SHORT = 64  # tokens of an attention window that is tried with a prompt; for longer ones the prompt is made up
EDGE = 9  # made-up tokens at the beginning; a long window hides some of them
PARENTS, LEAVES = (-1, 0, 0, 2, 2), (1, 3, 4)  # of both trees
PATH = [0, 2, 3]  # what is committed of the first tree


@torch.inference_mode()  # as in the loop
def self_test(target: StockModel) -> float:
    """The largest error of a logit, in standard deviations of the logits.

    Raises ValueError above `TOLERANCE`, or if the forward pass fails.
    """
    name, allowed = target.config.model_type, find_tolerance(target)
    try:
        error, coupling = _measure_errors(target, [0, 2])  # the path to node 2
        errors = [error, *(_measure_window_error(target, span) for span in _long_windows(target))]
    except torch.OutOfMemoryError:
        raise
    except Exception as cause:  # anything from the model's code
        reason = f"{type(cause).__name__}: {(str(cause).strip().splitlines() or [''])[0]}"
        raise ValueError(f"{name} cannot verify a tree: its forward pass over a small one raises {reason}") from cause
    error = float(torch.tensor(errors).max())  # unlike Python's `max`, keeps a NaN
    if error <= allowed:
        _refuse_row_coupling(name, coupling, allowed)
        return error
    if _looks_ahead(target, allowed):
        raise ValueError(f"{name} looks ahead like an encoder; only models whose tokens see no later ones can be used")
    _refuse_row_coupling(name, _measure_errors(target, range(5))[1], allowed)  # a wrong mask mixes nodes, but not rows
    raise ValueError(
        f"{name} fails the tree self-test and cannot verify a tree: its logits on a small tree differ from those on "
        f"the tree's paths by {error:.1e} standard deviations ({allowed:.0e} are allowed for {target.dtype})"
    )


def find_tolerance(target: StockModel) -> float:
    """The largest error that is allowed."""
    rounded = ROUNDING * float(torch.finfo(target.dtype).eps) * sqrt(target.config.num_hidden_layers)
    return TOLERANCE.get(target.dtype, min(MOST, rounded))


def _refuse_row_coupling(name: str, error: float, allowed: float) -> None:
    """Raise ValueError if unrelated tokens change a token's logits by more than a quarter of `allowed`."""
    if error > allowed / 4:
        raise ValueError(
            f"{name} is row-coupled: a token's logits change by {error:.1e} standard deviations with the other tokens "
            "of the forward pass. Quantisation with outliers or scales of a whole tensor does that (LLM.int8, dynamic "
            "fp8 per tensor); use weight-only quantisation, or scales for each token"
        )


def _measure_errors(target: StockModel, nodes: Sequence[int]) -> tuple[float, float]:
    """The error over two trees, and how much unrelated tokens of the same pass change the logits of these nodes.

    The second tree continues a path of the first, which also tests the cache's compaction. For the other figure the
    first is verified with other tokens at its other nodes and in another row. The shapes are the same, so a model that
    treats each token by itself rounds the same way.
    """
    prompt, tokens = _make_example(target)
    first, second = tokens.split(5)
    kept = torch.zeros(5, dtype=torch.bool).scatter_(0, torch.tensor(nodes), True)
    session = Session(target, 2)
    session.verify(Tree.chain([prompt, prompt]))
    session.keep([list(range(len(prompt)))] * 2)
    changed = session.verify(_make_trees(torch.where(kept, first, second), second)).logits[0, nodes]
    errors, coupling = [], 0.0
    for part in (first, second):
        tree = _make_trees(part, part)
        logits = session.verify(tree).logits[0]
        if part is first:
            coupling = float((logits[nodes] - changed).abs().max() / changed.float().std())
        errors += _path_errors(target, prompt, tree, logits)
        session.keep([PATH, PATH])
        prompt = prompt + part[PATH].tolist()
    return float(torch.stack(errors).max()), coupling  # unlike Python's `max`, keeps a NaN


def _make_trees(*rows: Tensor) -> Tree:
    """A tree of the shape `PARENTS` for each row's tokens [5]."""
    return Tree(torch.stack(rows), torch.tensor([PARENTS] * len(rows)), torch.tensor([5] * len(rows)), height=2)


def _long_windows(target: StockModel) -> list[AttentionWindow]:
    """The attention windows that no small prompt exceeds, if the model has enough positions for one that does."""
    sizes = {span: span.window or span.chunk or 0 for span in target.windows.values()}
    return [span for span, size in sizes.items() if SHORT < size <= target.context - SHORT]


def _measure_window_error(target: StockModel, span: AttentionWindow) -> float:
    """The error of a tree that lies across the edge of a long window, compared with transformers' own cache.

    The text before it is made up, because reading one would take long: its keys are zeros, so that all tokens count
    alike, and so are its values, except around the window's edge, where they are large.
    """
    committed = span.window + 2 if span.window else (span.chunk or 1) - 1  # chunks end within the tree
    session, expected = Session(target, 1), DynamicCache(config=target.config)
    session.verify(Tree.chain([[1, 2]]))  # which makes the cache's layers
    session.cache.lengths = [committed]
    session.cache.reserve(0, len(PARENTS), target.device)
    generator = torch.Generator().manual_seed(0)
    for number in range(len(session.cache.layers)):
        states = session.cache.allocated(number)
        if states is not None:
            for each in states:
                each.zero_()
            large = torch.randn(states[1][:, :, :EDGE].shape, generator=generator) * min(committed, 4096) / 4
            states[1][:, :, :EDGE] = large.to(states[1])
            expected.update(*(each[:, :, :committed].clone() for each in states), number)
    tokens = _make_example(target)[1][:5]
    tree = _make_trees(tokens)
    path = tree.ancestors[0, -1].nonzero()[:, 0]
    logits = session.verify(tree).logits[0, path.to(target.device)]
    ids = tokens[None, path].to(target.device)
    plain = target.run(expected, input_ids=ids).logits[0].to(logits.device)
    return float((logits - plain).abs().max() / plain.float().std())


def _path_errors(target: StockModel, prompt: list[int], tree: Tree, logits: Tensor) -> list[Tensor]:
    """The largest differences from a plain forward pass over the paths to the first row's leaves."""
    paths = [tree.ancestors[0, leaf].nonzero()[:, 0] for leaf in LEAVES]
    drafted = pad_sequence([tree.tokens[0, path] for path in paths], batch_first=True)
    ids = torch.cat([torch.tensor([prompt] * len(paths)), drafted], dim=1).to(target.device)
    plain = target.model(input_ids=ids, use_cache=False).logits[:, len(prompt) :].to(logits.device)
    pairs = [(logits[path.to(logits.device)], row[: len(path)]) for path, row in zip(paths, plain, strict=True)]
    return [(found - expected).abs().max() / expected.float().std() for found, expected in pairs]


def _make_example(target: StockModel) -> tuple[list[int], Tensor]:
    """A prompt that is longer than the model's windows, if those are short, and the tokens [10] of two trees."""
    windows = [kind.window or kind.chunk or 0 for kind in target.windows.values()]
    longest = max((window for window in windows if 0 < window <= SHORT), default=4)
    tokens = torch.randint(target.vocabulary, (longest + 12,), generator=torch.Generator().manual_seed(0))
    return tokens[:-10].tolist(), tokens[-10:]


def _looks_ahead(target: StockModel, allowed: float) -> bool:
    """Whether a token's logits depend on the tokens after it."""
    prompt, tokens = _make_example(target)
    ids = torch.tensor([prompt, [*prompt[:-1], int(tokens[0])]], device=target.device)
    one, other = target.model(input_ids=ids, use_cache=False).logits[:, 0].float()
    return float((one - other).abs().max() / one.std()) > allowed
