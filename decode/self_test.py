"""A numeric test of a target: logits of two small trees against plain forward passes over their root-to-leaf paths.

A model that mishandles a tree's mask or positions raises no error; its logits are just wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import isnan, sqrt
from operator import add
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache

from decode.models.compatibility import ATTENDING, AttentionWindow, find_input_scales
from decode.models.stock_model import StockModel, capture_features, find_decoder
from decode.prefill import read_texts
from decode.session import Session
from decode.trees.tree import Tree
from decode.weights.layers import BAD_WEIGHT, PackedLayer, find_bad_weight

# The largest error of a logit, in standard deviations of the logits. Wrong masks give at least 2e-2 in float32. In
# float64 many models still compute softmax or norms in float32.
TOLERANCE = {torch.float64: 1e-4, torch.float32: 5e-3}
# In half precision it follows from rounding. Each of two passes rounds about 8 results a layer, with a standard
# deviation of 0.2 eps. Independent errors add up to 0.2 sqrt(2 x 8 x layers) eps, and the largest of many logits'
# errors is 5 times that: 4 sqrt(layers) eps. Measured in place of the 4: 2.5 to 13 in bfloat16 and 4 to 11 in float16,
# with 2 to 32 layers; 3.8 in both for SmolLM2-135M. Wrong masks give at least 0.5. Deep models may amplify rounding
# beyond all bounds. Where they do, the states after the first layers are compared, with the tolerance of so many. Each
# channel is compared with its own size there, because in many models a few are hundreds of times as large as others.
# Before that, other texts are tried: a wrong mask shows in each, amplified rounding in few (in bfloat16 gemma-3-270m
# passes the bound in one text of ten, and wrong masks give at least 3 there).
ROUNDING, MOST, TEXTS = 18, 0.4, 3
FIRST = 4  # layers: models alternate kinds of layers, also without saying so in their config
SHORT = 64  # tokens of an attention window that is tried with a prompt; for longer ones the prompt is made up
EDGE = 4  # the made-up token that only some nodes see, because it is at the edge of a long window
LARGEST = 4096  # bounds its value: float16 ends at 65504
PARENTS, LEAVES = (-1, 0, 0, 2, 2), (1, 3, 4)  # of both trees
PATH = [0, 2, 3]  # what is committed of the first tree


@torch.inference_mode()  # as in the loop
def self_test(target: StockModel) -> float:
    """The largest error of a logit, in standard deviations of the logits.

    Raises ValueError above `TOLERANCE`, or if the forward pass fails.
    """
    name, allowed = target.config.model_type, find_tolerance(target)
    try:
        measured = [_measure(target)]
        while measured[-1][0] > allowed and target.dtype not in TOLERANCE and len(measured) < TEXTS:
            measured.append(_measure(target, text=len(measured)))
        error, coupling = measured[-1][0], max(each for _, each in measured)
        missed = [span for kind, span in _long_windows(target).items() if _misses_edge(target, kind, span)]
    except torch.OutOfMemoryError:
        raise
    except Exception as cause:  # anything from the model's code
        reason = f"{type(cause).__name__}: {(str(cause).strip().splitlines() or [''])[0]}"
        kind = "chain" if target.is_recurrent else "tree"
        raise ValueError(f"{name} cannot verify a {kind}: its forward pass over a small one raises {reason}") from cause
    if error <= allowed:
        _refuse_coupled_rows(name, coupling, allowed)
        _refuse_windows(name, missed)
        return error
    if _looks_ahead(target, allowed):
        raise ValueError(f"{name} looks ahead like an encoder; only models whose tokens see no later ones can be used")
    if isnan(error):
        _refuse_no_numbers(target)
    if not target.is_recurrent:  # a wrong mask mixes nodes, but not rows
        _refuse_coupled_rows(name, _measure_errors(target, range(5))[1], allowed)
    if target.dtype not in TOLERANCE and _first_layers_agree(target):
        _refuse_windows(name, missed)
        return error
    if target.is_recurrent:
        raise ValueError(
            f"{name} fails the self-test and cannot verify a chain: after a cached state, its logits in passes of "
            f"different lengths differ from those of one pass by {error:.1e} standard deviations ({allowed:.0e} are "
            f"allowed for {target.dtype}){_explain_chain_error(target, allowed)}; it can be used without drafts, by "
            "transformers' own generate"
        )
    raise ValueError(
        f"{name} fails the tree self-test and cannot verify a tree: its logits on a small tree differ from those on "
        f"the tree's paths by {error:.1e} standard deviations ({allowed:.0e} are allowed for {target.dtype})"
    )


@torch.inference_mode()
def agrees_flat(target: StockModel) -> bool:
    """Whether a model computes the same for trees of different sizes in a flat pass as for each alone."""
    prompt, tokens = _make_example(target)
    rows = [[*prompt, *tokens.tolist()], prompt, [*prompt, int(tokens[0])]]
    try:
        session, errors = Session(target, len(rows)), []
        read_texts(session, [prompt[: len(prompt) - row] for row in range(len(rows))])
        together = session.verify(Tree.chain(rows)).logits
        for row, drafted in enumerate(rows):
            alone = Session(target, 1)
            read_texts(alone, [prompt[: len(prompt) - row]])
            expected = alone.verify(Tree.chain([drafted])).logits[0]
            errors.append((together[row, : len(drafted)] - expected).abs().max() / expected.float().std())
    except Exception:  # anything from the model's code
        return False
    return float(torch.stack(errors).max()) <= find_tolerance(target) / 4


def _refuse_no_numbers(target: StockModel) -> None:
    """Raise ValueError for a model whose own logits are NaN or infinite, with the weight that is to blame."""
    prompt, tokens = _make_example(target)
    ids = torch.tensor([[*prompt, *tokens.tolist()]], device=target.device)
    if bool(target.model(input_ids=ids, use_cache=False).logits.isfinite().all()):
        return
    name, dtype = target.config.model_type, str(target.dtype).removeprefix("torch.")
    if weight := find_bad_weight(target.model):
        raise ValueError(f"{name} cannot be used in {dtype}: its weight {weight} {BAD_WEIGHT}")
    advice = ": its numbers overflow; try bfloat16 or float32" if target.dtype == torch.float16 else ""
    fault = "its logits are NaN or infinite, though all weights are finite"
    if any(isinstance(module, PackedLayer) for module in target.model.modules()):
        advice = ", or its code reads weights of packed linear layers; try accelerate='off' (--accelerate off)"
    raise ValueError(f"{name} cannot be used in {dtype}: {fault}{advice}")


def find_tolerance(target: StockModel, layers: int | None = None) -> float:
    """The largest error that is allowed, of logits or of the states after so many layers."""
    quantizes_inputs = any(find_input_scales(layer) for layer in target.model.modules())
    dtype = torch.bfloat16 if quantizes_inputs else target.dtype  # which also has 8 bits
    rounded = ROUNDING * float(torch.finfo(dtype).eps) * sqrt(layers or target.config.num_hidden_layers)
    return TOLERANCE.get(dtype, min(MOST, rounded))


def _refuse_coupled_rows(name: str, error: float, allowed: float) -> None:
    """Raise ValueError if unrelated tokens change a token's logits by more than a quarter of `allowed`."""
    if error > allowed / 4:
        raise ValueError(
            f"{name} is row-coupled: a token's logits change by {error:.1e} standard deviations with the other tokens "
            "of the forward pass. Quantisation with outliers or scales of a whole tensor does that (LLM.int8, dynamic "
            "fp8 per tensor); use weight-only quantisation, or scales for each token"
        )


def _refuse_windows(name: str, missed: Sequence[AttentionWindow]) -> None:
    """Raise ValueError if there are windows whose edge is elsewhere in transformers."""
    for span in missed:
        raise ValueError(
            f"{name} fails the tree self-test and cannot verify a tree: at the edge of its attention window of "
            f"{span.window or span.chunk} tokens, nodes attend to other tokens than in transformers"
        )


def _first_layers_agree(target: StockModel) -> bool:
    """Whether the states are right after the first layers: `FIRST`, or so many that each kind has come once."""
    kinds = getattr(target.config, "layer_types", None) or [""]
    count = max(FIRST, 1 + max(map(kinds.index, kinds)))
    if count >= target.config.num_hidden_layers:
        return False
    try:
        error, _ = _measure(target, layer=count)
    except ValueError:  # this model's layers have several states
        return False
    return error <= find_tolerance(target, count)


def _compute(target: StockModel, ids: Tensor, layer: int | None) -> Tensor:
    """transformers' own logits of texts [B, T, V], or the states before this layer [B, T, H]."""
    with capture_features(target.model, () if layer is None else (layer,)) as captured:
        logits = target.model(input_ids=ids.to(target.device), use_cache=False).logits
    return logits if layer is None else captured[layer]


def _verify(session: Session, tree: Tree) -> Tensor:
    """The logits of a tree [B, N, V], or the states [B, N, H] if the session reads a layer."""
    verdict = session.verify(tree)
    return verdict.logits if verdict.features is None else verdict.features


def _measure(target: StockModel, layer: int | None = None, text: int = 0) -> tuple[float, float]:
    """The error of the kind of drafts that a target verifies, and how much unrelated tokens change logits."""
    if target.is_recurrent:
        return _measure_chain_errors(target, layer=layer, text=text), 0.0
    return _measure_errors(target, [0, 2], layer, text)


def _measure_errors(
    target: StockModel, nodes: Sequence[int], layer: int | None = None, text: int = 0
) -> tuple[float, float]:
    """The error over two trees, and how much unrelated tokens of the same pass change the logits of these nodes.

    The second tree continues a path of the first, which also tests the cache's compaction. For the other figure the
    first is verified with other tokens at its other nodes and in another row. The shapes are the same, so a model that
    treats each token by itself rounds the same way.
    layer: compares the states before it in place of the logits. text: the number of the example.
    """
    prompt, tokens = _make_example(target, text)
    first, second = tokens.split(5)
    kept = torch.zeros(5, dtype=torch.bool).scatter_(0, torch.tensor(nodes), True)
    session = Session(target, 2, () if layer is None else (layer,))
    session.verify(Tree.chain([prompt, prompt]))
    session.keep([list(range(len(prompt)))] * 2)
    changed = _verify(session, _make_trees(torch.where(kept, first, second), second))[0, nodes]
    errors, coupling = [], 0.0
    for part in (first, second):
        tree = _make_trees(part, part)
        found = _verify(session, tree)[0]
        if part is first:
            coupling = float((found[nodes] - changed).abs().max() / changed.float().std())
        errors += _path_errors(target, prompt, tree, found, layer)
        session.keep([PATH, PATH])
        prompt = prompt + part[PATH].tolist()
    return float(torch.stack(errors).max()), coupling  # unlike Python's `max`, keeps a NaN


def _measure_chain_errors(target: StockModel, others: int = 1, layer: int | None = None, text: int = 0) -> float:
    """The error over chains. Some of their nodes are rejected, which restores the state.

    others: further rows of the batch, which are shorter, so that there is padding. layer: compares the states before it
    in place of the logits. text: the number of the example.
    """
    prompt, tokens = _make_example(target, text)
    texts = [[*prompt, *tokens.tolist()]] + [[*prompt[3:], *tokens.tolist()]] * others
    plain = [_compute(target, torch.tensor([text]), layer)[0].float() for text in texts]
    session = Session(target, len(texts), () if layer is None else (layer,))
    read_texts(session, [text[: -len(tokens)] for text in texts])
    errors, left = [], len(tokens)
    for count, wrong in ((2, 3), (1, 0), (1, 0), (3, 2), (3, 0)):  # accepted and rejected nodes; the third goes alone
        right = [text[-left:][:count] for text in texts]
        wrongs = [tokens[: max(wrong - 2 * row, 0)].tolist() for row in range(len(texts))]
        results = _verify(session, Tree.chain([*map(add, right, wrongs)]))[:, :count]
        for found, whole in zip(results, plain, strict=True):
            expected = whole[-left:][:count]
            errors.append(_compare(found.to(expected.device), expected, layer))
        session.keep([list(range(count)) for _ in texts])
        left -= count
    return float(torch.stack(errors).max())


def _explain_chain_error(target: StockModel, allowed: float) -> str:
    """Why passes differ, if that is known: rows of other lengths, or one rule that bounds the time steps of states."""
    if _measure_chain_errors(target, others=0) <= allowed:
        return ", because its positions in a batch are those of the longest row"
    bounds = [getattr(module, "time_step_limit", (0.0,))[0] for module in target.model.modules()]
    reason = "transformers raises its time steps to time_step_min in passes over several tokens only"
    return f", because {reason}" if max(bounds) > 0 else ""


def _make_trees(*rows: Tensor) -> Tree:
    """A tree of the shape `PARENTS` for each row's tokens [5]."""
    return Tree(torch.stack(rows), torch.tensor([PARENTS] * len(rows)), torch.tensor([5] * len(rows)), height=2)


def _long_windows(target: StockModel) -> dict[str, AttentionWindow]:
    """The attention windows that no small prompt exceeds, if the model has enough positions for one that does."""
    sizes = {kind: span.window or span.chunk or 0 for kind, span in target.facts.windows.items()}
    return {kind: target.facts.windows[kind] for kind, size in sizes.items() if SHORT < size <= target.context - SHORT}


def _misses_edge(target: StockModel, kind: str, span: AttentionWindow) -> bool:
    """Whether nodes at the edge of a long window attend to other committed tokens than in transformers' own cache.

    The text before them is made up, because reading one would take long: its keys are zeros, so that all tokens count
    alike, and so are its values. One value at the edge then becomes large in the first layer of this type. The nodes
    that see it are those whose states after this layer change. How much they change does not matter, and passes of the
    same shape round alike, so the model's precision does not matter either.
    """
    committed = span.window + 2 if span.window else (span.chunk or 1) - 1  # chunks end within the tree
    types = getattr(target.config, "layer_types", None)
    layer = [ATTENDING.get(each) for each in types].index(kind) if types else 0
    session, tree = Session(target, 1), _make_trees(_make_example(target)[1][:5])
    tree = tree.best_chains() if target.is_recurrent else tree
    path = tree.ancestors[0, -1].nonzero()[:, 0]  # of depth 0, 1 and 2: the first two see the value
    ids = tree.tokens[:, path].to(target.device)
    session.verify(Tree.chain([[1, 2]]))  # which makes the cache's layers
    session.cache.lengths = [committed]
    session.cache.reserve(0, tree.width, target.device)
    states = [(layer.keys, layer.values) if layer.is_initialized else None for layer in session.cache.layers]
    large = torch.randn(session.cache.layers[layer].values[0, :, 0].shape, generator=torch.Generator().manual_seed(0))
    results: list[tuple[Tensor, Tensor]] = []
    for size in (0, 2 * min(committed, LARGEST)):
        for written in filter(None, states):
            for each in written:
                each.zero_()
        session.cache.layers[layer].values[0, :, EDGE] = (size * large).to(target.dtype)
        expected = DynamicCache(config=target.config)
        for number, pair in enumerate(states):
            if pair is not None:
                expected.update(*(each[:, :, :committed].clone() for each in pair), number)
        with _capture_states(target, layer) as captured:
            session.verify(tree)
            target.run(expected, input_ids=ids)
        results.append((captured[0][path.to(captured[0].device)], captured[1]))
    found, plain = ((after - before).norm(dim=1) for before, after in zip(*results, strict=True))
    return not torch.equal(found > found.max() / 100, plain > plain.max() / 100)


@contextmanager
def _capture_states(target: StockModel, layer: int) -> Iterator[list[Tensor]]:
    """A list that gets the states [N, F] of the first row's nodes after a layer, in each forward pass."""
    captured, thread = list[Tensor](), get_ident()

    def read(module: nn.Module, args: Any, output: Any) -> None:
        if get_ident() != thread:  # another may run the same model
            return
        states = output if isinstance(output, Tensor) else output[0]  # [..., B, N, H]; some models have several
        captured.append(states.movedim(-2, 0).flatten(1).float())

    hook = find_decoder(target.model)[1][layer].register_forward_hook(read)
    try:
        yield captured
    finally:
        hook.remove()


def _path_errors(target: StockModel, prompt: list[int], tree: Tree, results: Tensor, layer: int | None) -> list[Tensor]:
    """The largest differences from a plain forward pass over the paths to the first row's leaves."""
    paths = [tree.ancestors[0, leaf].nonzero()[:, 0] for leaf in LEAVES]
    drafted = pad_sequence([tree.tokens[0, path] for path in paths], batch_first=True)
    ids = torch.cat([torch.tensor([prompt] * len(paths)), drafted], dim=1)
    plain = _compute(target, ids, layer)[:, len(prompt) :].to(results.device)
    pairs = [(results[path.to(results.device)], row[: len(path)]) for path, row in zip(paths, plain, strict=True)]
    return [_compare(found, expected, layer) for found, expected in pairs]


def _compare(found: Tensor, expected: Tensor, layer: int | None) -> Tensor:
    """The largest error of logits [T, V], in their standard deviations, or of states [T, H], by each channel's size."""
    if layer is None:
        return (found - expected).abs().max() / expected.float().std()
    sizes = expected.float().square().mean(dim=0).sqrt()
    return ((found - expected).abs() / sizes.clamp(min=sizes.median())).max()


def _make_example(target: StockModel, text: int = 0) -> tuple[list[int], Tensor]:
    """A prompt that is longer than the model's windows, if those are short, and the tokens [10] of two trees."""
    windows = [kind.window or kind.chunk or 0 for kind in target.facts.windows.values()]
    longest = max((window for window in windows if 0 < window <= SHORT), default=4)
    tokens = torch.randint(target.vocabulary, (longest + 12,), generator=torch.Generator().manual_seed(text))
    return tokens[:-10].tolist(), tokens[-10:]


def _looks_ahead(target: StockModel, allowed: float) -> bool:
    """Whether a token's logits depend on the tokens after it."""
    prompt, tokens = _make_example(target)
    ids = torch.tensor([prompt, [*prompt[:-1], int(tokens[0])]], device=target.device)
    one, other = target.model(input_ids=ids, use_cache=False).logits[:, 0].float()
    return float((one - other).abs().max() / one.std()) > allowed
