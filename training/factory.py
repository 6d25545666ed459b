"""New heads for a target, and the objectives that train them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from decode import Target
from decode.devices.user_cache import print_notice
from decode.models.facts import find_context
from decode.models.fingerprint import fingerprint_vocabulary
from decode.models.stock_model import find_decoder
from heads import LayerConfig, choose_features
from heads.eagle import Eagle3Head, PEagleConfig, PEagleHead
from heads.jump import JumpHead, LayerCopy, choose_jump, copy_layer
from heads.kinds import get_kind
from heads.mtp import describe_block
from training.cut_model import cut_model
from training.data import LARGE_VOCABULARY, Example, choose_draft_vocabulary, find_rarest
from training.draft_model import DraftModel, DraftModelConfig, DraftModelObjective
from training.objectives import DECAY, OBJECTIVES, Decay, Objective
from training.teacher import Teacher

NORM_EXAMPLES = 8  # from which a new head's norm takes the size of features
FITTED_TOKENS = 16_384  # on which the linear maps of a new jump head are fitted


def make_head(
    kind: str,
    target: Target,
    examples: Sequence[Example],
    draft_vocab: int | None,
    *,
    window: int | None = None,
    prefix: bool = False,
    **shape: Any,
) -> Any:
    """A new head of a kind for the target; its output matrix starts as the target's.

    draft_vocab: see `choose_draft_vocabulary`. window: of its decoder layers. prefix: Hydra++'s prefix layer. shape:
    settings of the kind's config; None is its default. Above 64k tokens the default output is the target's, where there
    is a choice.
    """
    facts, vocab, model_config = get_kind(kind), target.vocabulary, target.config
    names = {each.name for each in fields(facts.config)}
    drafted, layers = choose_draft_vocabulary(examples, vocab, draft_vocab), model_config.num_hidden_layers
    large = "target" if vocab > LARGE_VOCABULARY and "output" in facts.options else None
    sizes: dict[str, Any] = {
        "draft_size": len(drafted),
        "target_layers": layers,
        **shape,
        "output": shape.get("output") or large,
        "prefix": _layer_config(target) if prefix else None,
    }
    if shape.get("pair_rank") == 0:  # as DFlash; with pairs, as DSpark
        sizes["from_anchor"] = False
    seen = _see_layer(target, examples) if facts.copies_layer else None
    own_layer = seen.copy.config if seen and seen.copy else _layer_config(target)
    found: dict[str, Callable[[], Any]] = {
        "layer": lambda: replace(own_layer, window=window or own_layer.window, **facts.layer),
        "max_position_embeddings": lambda: getattr(model_config, "max_position_embeddings", None),
        "features": lambda: choose_jump(layers) if seen else choose_features(layers),
        "block": lambda: describe_block(model_config),
        "mask_token": lambda: find_rarest(examples, vocab),
    }
    sizes |= {name: find() for name, find in found.items() if name in names}
    make_config, make_network = cast(Any, facts.config), cast(Any, facts.network)
    given = {name: value for name, value in sizes.items() if value is not None}
    head: Any = make_network(make_config(model_config.hidden_size, vocab, **given))
    if len(drafted) < vocab:
        head.token_map.copy_(drafted)
    head.borrow(target.output_matrix, target.output_bias)
    if seen is not None:
        _begin_as_layer(head, seen)
    elif "features" in names and hasattr(head, "norm"):
        _match_norm(head, target, examples)
    head.check_target(model_config.hidden_size, vocab, layers)
    if prefix:  # a new prefix layer changes nothing: its layer adds zero, and its norm keeps the features' size
        features = Teacher(target, head.features).compute(examples[:1])[0].features
        head.prefix.norm.weight.data.fill_(features.float().square().mean().sqrt())
    return head


def make_parallel(head: Eagle3Head, mask_token: int, heads: int | None = None, layers: int | None = None) -> PEagleHead:
    """A P-EAGLE head that drafts its first token exactly as an EAGLE-3 head does, with that head's own weights.

    mask_token, heads, layers: of `PEagleConfig`; heads None is its default, layers None the head's. What stands for
    unknown features is new, and so are layers after the head's. Raises ValueError for fewer layers.
    """
    shape = {each.name: getattr(head.config, each.name) for each in fields(head.config) if each.init}
    given: dict[str, Any] = {} if heads is None else {"heads": heads}
    if layers is not None:
        if layers < head.config.layers:
            raise ValueError(f"--layers is {layers}; this P-EAGLE head begins with one of {head.config.layers} layers")
        given["layers"] = layers
    parallel = PEagleHead(PEagleConfig(**shape | given, mask_token=mask_token))
    parallel.load_state_dict(parallel.state_dict() | head.state_dict())
    return parallel


def make_draft_model(
    model: PreTrainedModel,
    tokenizer: Any,
    target: Target,
    examples: Sequence[Example],
    layers: Sequence[int] | None,
    draft_vocab: int | None,
) -> DraftModel:
    """A draft model for the target: some layers of a model with the same vocabulary, or the whole model (None).

    draft_vocab: see `choose_draft_vocabulary`. Raises ValueError for a model with another vocabulary.
    """
    own, theirs = fingerprint_vocabulary(tokenizer), fingerprint_vocabulary(target.tokenizer)
    size = int(model.config.get_text_config(decoder=True).vocab_size)
    if own != theirs or size != target.vocabulary:
        raise ValueError(
            f"the draft model has {size} tokens, the target {target.vocabulary}, and both must be the same to train "
            "it: take a checkpoint with the target's tokenizer, or cut the draft out of the target"
        )
    drafted = choose_draft_vocabulary(examples, size, draft_vocab)
    longest, context = max(len(example.tokens) for example in examples), find_context(model)
    if longest > context:
        raise ValueError(
            f"an example has {longest} tokens, the draft model's context {context}; "
            f"cut them with --max-length {context}"
        )
    name, tokens = model.config.name_or_path, None if len(drafted) == size else drafted
    config = DraftModelConfig(Path(name).name, None if layers is None else tuple(layers), len(drafted))
    if layers is not None:
        model = cut_model(model, layers)
        _check_config(model, layers)
    return DraftModel(model, tokenizer, config, tokens)


def _check_config(model: PreTrainedModel, layers: Sequence[int]) -> None:
    """Raise ValueError if a model that is built from its config is another one: it could not be loaded again."""
    with torch.device("meta"):
        built = {name: weight.shape for name, weight in type(model)(model.config).state_dict().items()}
    if built != {name: weight.shape for name, weight in model.state_dict().items()}:
        raise ValueError(
            f"a config of {model.config.model_type} cannot describe a model of the layers {list(layers)} alone; try "
            "other --layers"
        )


def find_objective(kind: str) -> type[Objective]:
    """The class that trains heads of this kind. Raises ValueError for a kind that is not trained here."""
    if kind == "draft":  # no head
        return DraftModelObjective
    found: type[Objective] | None = get_kind(kind).objective or OBJECTIVES.get(kind)
    if found is None:
        raise ValueError(f"{kind} heads cannot be trained here; choose from {', '.join(OBJECTIVES)}")
    return found


@torch.no_grad()
def make_objective(
    head: Any, target: Target, loss: str = "kl", decay: Decay = DECAY, temperature: float = 1.0, **settings: Any
) -> Objective:
    """The objective that trains a head or draft model. settings: of its class alone."""
    make = find_objective(head.kind)
    table: Tensor | None = None
    if make.reads_tokens and head.embed_tokens is not None:
        table = head.embed_tokens.requires_grad_(False).weight
    elif make.reads_tokens:  # a call and not the weight: some models scale their embeddings
        table = target.model.get_input_embeddings()(torch.arange(target.vocabulary, device=target.device))
    if table is not None and get_kind(head.kind).has_own_scale:
        table = table * (head.config.embedding_scale / (target.embedding_scale if head.embed_tokens is None else 1))
    return make(head, loss, table, decay, temperature, **settings)


def _layer_config(target: Target) -> LayerConfig:
    """A decoder layer with the target's sizes, where its config names them as usual."""
    config = target.config
    heads, size = config.num_attention_heads, config.hidden_size
    return LayerConfig(
        num_attention_heads=heads,
        num_key_value_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or size // heads,
        intermediate_size=getattr(config, "intermediate_size", None) or 4 * size,
    )


@torch.no_grad()
def _match_norm(head: Any, target: Target, examples: Sequence[Example]) -> None:
    """Scale a new head's last norm so that its channels have the sizes that the target's output layer reads."""
    targets = Teacher(target, (*head.features, -1)).compute(examples[:NORM_EXAMPLES])
    features = torch.cat([one.features for one in targets]).float().cpu()
    deep, last = features.split([features.shape[1] - head.hidden_size, head.hidden_size], dim=1)
    if head.begins_with_tokens:
        tokens = torch.tensor([token for one in examples[:NORM_EXAMPLES] for token in one.tokens])
        states = target.model.get_input_embeddings()(tokens.to(target.device)).float().cpu()
    else:
        states = head.fuse(deep)
    normed = head.norm(states)
    head.norm.weight.copy_(last.abs().median(dim=0).values / normed.abs().median(dim=0).values.clamp(min=1e-6))


class _SeenLayer(NamedTuple):
    """What a jump head begins with: its layer, and the states around the target's on some texts. See `JumpHead.fit`."""

    copy: LayerCopy | None
    embedded: Tensor
    features: Tensor
    last: Tensor


@torch.no_grad()
def _see_layer(target: Target, examples: Sequence[Example]) -> _SeenLayer:
    size, states = target.config.hidden_size, choose_jump(target.config.num_hidden_layers)
    sums = accumulate(len(each.tokens) for each in examples)
    chosen = [each for each, total in zip(examples, sums, strict=True) if total <= FITTED_TOKENS] or examples[:1]
    teacher = Teacher(target, (*states, -1))
    targets = [one for begin in range(0, len(chosen), 4) for one in teacher.compute(chosen[begin : begin + 4])]
    layer = find_decoder(target.model)[1][states[0]]
    longest = max((one.features for one in targets), key=len)
    below, above, _ = longest[None].split(size, dim=2)
    embed = target.model.get_input_embeddings()
    tokens = (torch.tensor(each.tokens[1:], dtype=torch.long, device=target.device) for each in chosen)
    before, own = (torch.cat([one.features[part] for one in targets]) for part in (slice(None, -1), slice(1, None)))
    return _SeenLayer(
        copy_layer(layer, target.config.to_dict(), below, above),
        torch.cat([embed(each) for each in tokens]).float().cpu(),
        torch.stack([before, own])[..., : 2 * size].float().cpu(),
        own[:, 2 * size :].float().cpu(),
    )


def _begin_as_layer(head: JumpHead, seen: _SeenLayer) -> None:
    """Start a jump head as the target's layer, if that has a copy, between linear maps."""
    if seen.copy is None:
        print_notice("the layer of this jump head is new, because the target's computes something else than Llama's")
    else:
        head.layer.load_state_dict({name: tensor.float().cpu() for name, tensor in seen.copy.tensors.items()})
    head.fit(seen.embedded, seen.features, seen.last)
