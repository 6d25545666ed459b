"""Which models can be a target: refusals by name, and a numeric test of everything else.

A model that mishandles a tree's mask or positions raises nothing; it is silently wrong. So each one is tried once on
a small tree against ordinary forward passes over that tree's root-to-node paths.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from decode.masks import layer_reaches
from decode.tree import Tree

if TYPE_CHECKING:
    from decode.target import Target

ATTENTION_IMPLEMENTATIONS = ("sdpa", "eager", "draftless_grouped_sdpa")
# Largest difference of a logit, in standard deviations of the logits. Wrong masks give 2e-2 and more in float32.
TOLERANCE = {torch.float64: 1e-8, torch.float32: 5e-3, torch.bfloat16: 0.4, torch.float16: 0.2}


def refuse_unsupported(model: PreTrainedModel) -> None:
    """Raise ValueError, saying why, for a model whose state cannot branch into a tree or be read by position."""
    config = model.config.get_text_config(decoder=True)
    name = config.model_type
    if model.config.is_encoder_decoder or not hasattr(model, "generate") or not model.can_generate():
        raise ValueError(f"{type(model).__name__} is no decoder-only language model; load an AutoModelForCausalLM")
    layer_reaches(config)
    if getattr(model, "_is_stateful", False):
        raise ValueError(f"{name} keeps a recurrent state, which cannot branch into a tree; use an attention-only model")
    if _has_alibi(config):
        raise ValueError(f"{name} uses ALiBi, whose biases follow cache slots and not positions: a tree would be wrong")
    if "local" in (getattr(config, "attention_layers", None) or ()):
        raise ValueError(f"{name} has local attention layers that count cache slots and not positions")
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


@torch.inference_mode()
def self_test(target: Target) -> float:
    """Verify two small trees in a row and compare with forward passes without cache or tree mask.

    Returns the largest error, in standard deviations of the logits. Raises ValueError above `TOLERANCE`. The second
    tree stands on a path of the first, so the compaction of the cache is tried too.
    """
    prompt, first, second = _example(target)
    session = target.open(batch=1)
    session.verify(Tree.chain([prompt]))
    session.keep([list(range(len(prompt)))])
    one = session.verify(first).logits[0]
    session.keep([[0, 2, 3]])
    two = session.verify(second).logits[0]
    continued = prompt + first.tokens[0, [0, 2, 3]].tolist()
    errors = [_error(target, prompt, first, one), _error(target, continued, second, two)]
    error, allowed = max(errors), TOLERANCE.get(target.dtype, 0.4)
    if not error <= allowed:
        raise ValueError(
            f"{target.config.model_type} fails the tree self-test: its logits on a small tree differ from those on "
            f"the tree's paths by {error:.1e} standard deviations ({allowed:.0e} are allowed for {target.dtype}); "
            "it cannot be verified as a tree"
        )
    return error


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


def _error(target: Target, prefix: list[int], tree: Tree, logits: Tensor) -> float:
    worst = 0.0
    for leaf in (1, 3, 4):
        path = tree.ancestors[0, leaf].nonzero()[:, 0]
        ids = torch.tensor([prefix + tree.tokens[0, path].tolist()], device=target.device)
        expected = target.model(input_ids=ids, use_cache=False).logits[0, len(prefix) :]
        difference = (logits[path.to(logits.device)].to(expected.device) - expected).abs().max()
        worst = max(worst, float(difference / expected.float().std()))
    return worst
