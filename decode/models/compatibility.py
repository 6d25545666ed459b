"""Which models can be a target: refusals by name, and a numeric test of everything else.

A model that mishandles a tree's mask or positions raises nothing; it is silently wrong. So each one is tried once on
a small tree against ordinary forward passes over that tree's root-to-node paths.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from decode.masks import layer_reaches
from decode.tree import Tree

if TYPE_CHECKING:
    from decode.target import Target

ATTENTION_IMPLEMENTATIONS = ("sdpa", "eager", "draftless_grouped_sdpa")
# Largest difference of a logit, in standard deviations of the logits. Wrong masks give 2e-2 and more in float32; in
# float64 many models still take softmax or norms in float32.
TOLERANCE = {torch.float64: 1e-4, torch.float32: 5e-3, torch.bfloat16: 0.4, torch.float16: 0.2}

SLOTS_AHEAD = 512  # no tree has so many nodes: a node's slot is less than this beyond its position


def refuse_unsupported(model: PreTrainedModel) -> None:
    """Raise ValueError, saying why, for a model in training, or whose state cannot branch or be read by position."""
    if any(module.training for module in model.modules()):
        raise ValueError("the model is in training mode, where dropout changes what it says; call model.eval() first")
    config = model.config.get_text_config(decoder=True)
    name = config.model_type
    if model.config.is_encoder_decoder or not model.can_generate():
        raise ValueError(f"{type(model).__name__} is no decoder-only language model; load an AutoModelForCausalLM")
    layer_reaches(model)
    if getattr(model, "_is_stateful", False):
        raise ValueError(
            f"{name} keeps a recurrent state, which cannot branch into a tree; use an attention-only model"
        )
    if _has_alibi(config):
        raise ValueError(f"{name} uses ALiBi, whose biases follow cache slots and not positions: a tree would be wrong")
    if hasattr(config, "attention_layers"):  # gpt_neo: a buffer of the context's size, read by slot; windows by slot
        raise ValueError(f"{name} masks its attention by cache slots, which are not a tree's positions")
    if "position_ids" not in inspect.signature(type(model).forward).parameters:
        raise ValueError(f"{name} takes no position_ids: it counts cache slots, which are not a tree's positions")
    used = config._attn_implementation
    if used not in ATTENTION_IMPLEMENTATIONS:
        raise ValueError(
            f"attention implementation {used!r} takes no mask of a tree; load the model with "
            "attn_implementation='sdpa' or 'eager'"
        )


def _has_alibi(config: PretrainedConfig) -> bool:
    if config.model_type in ("bloom", "mpt") or getattr(config, "alibi", False):
        return True
    return getattr(config, "position_embedding_type", None) == "alibi"


def usable_context(config: PretrainedConfig) -> int:
    """The number of positions up to which a token's logits depend on its own path alone.

    That is the context that the model was made for, but for two oddities of transformers. Longrope changes the
    frequencies of all positions once any node of any row passes a mark. Llama 4 scales the queries of its layers
    without positions by cache slot, in steps of `floor_scale`, the first of which changes nothing.
    """
    limits = [getattr(config, "max_position_embeddings", None)]
    rope = getattr(config, "rope_parameters", None) or {}
    for part in (rope, *rope.values()):  # some models have one set of parameters for each layer type
        if isinstance(part, dict) and part.get("rope_type") == "longrope":
            limits.append(part.get("original_max_position_embeddings"))
    if getattr(config, "attn_temperature_tuning", False):
        limits.append(config.floor_scale - SLOTS_AHEAD)
    return min((int(limit) for limit in limits if limit), default=1 << 30)


@torch.inference_mode()  # as the loop has it
def self_test(target: Target) -> float:
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


def _measure_error(target: Target) -> float:
    prompt, first, second = _example(target)
    session = target.open(batch=1)
    session.verify(Tree.chain([prompt]))
    session.keep([list(range(len(prompt)))])
    one = session.verify(first).logits[0]
    session.keep([[0, 2, 3]])
    two = session.verify(second).logits[0]
    continued = prompt + first.tokens[0, [0, 2, 3]].tolist()
    errors = torch.stack([*_errors(target, prompt, first, one), *_errors(target, continued, second, two)])
    return float(errors.max())  # unlike Python's own, this `max` keeps a NaN


def _looks_ahead(target: Target) -> bool:
    """Whether a token's logits depend on the tokens after it."""
    prompt, first, _ = _example(target)
    ids = torch.tensor([prompt, prompt[:-1] + first.tokens[0, :1].tolist()], device=target.device)
    one, other = target.model(input_ids=ids, use_cache=False).logits[:, 0].float()
    return float((one - other).abs().max() / one.std()) > TOLERANCE.get(target.dtype, 0.4)


def _example(target: Target) -> tuple[list[int], Tree, Tree]:
    """A prompt as long as the shortest window, if that is short, and two trees of 5 nodes with siblings and depth."""
    windows = [reach.window or reach.chunk or 0 for reach in target.reaches.values()]
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


def _errors(target: Target, prefix: list[int], tree: Tree, logits: Tensor) -> Iterator[Tensor]:
    """For each leaf's path: the largest difference to a plain forward pass over it."""
    for leaf in (1, 3, 4):
        path = tree.ancestors[0, leaf].nonzero()[:, 0]
        ids = torch.tensor([prefix + tree.tokens[0, path].tolist()], device=target.device)
        expected = target.model(input_ids=ids, use_cache=False).logits[0, len(prefix) :]
        difference = (logits[path.to(logits.device)].to(expected.device) - expected).abs().max()
        yield difference / expected.float().std()
