"""Losses and objectives against plain float64 versions; which optimizer moves which weights, and how far."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Muon as TorchMuon

from decode import Target
from heads import HydraHead, JumpHead, LayerCache, MedusaHead, MultiTokenHead
from heads.layer_cache import attend
from proposers.dflash import DFlashDrafter
from proposers.eagle import draft_ahead
from proposers.feature_history import FeaturePart
from tests.support.drafting import LAYER, make_head
from tests.support.models import VOCABULARY, tiny
from training import losses, objectives, trainer
from training.draft_attention import choose_anchors
from training.losses import LOSSES, vocabulary_loss
from training.objectives import (
    OBJECTIVES,
    BlockObjective,
    EagleObjective,
    MedusaObjective,
    PEagleObjective,
)
from training.teacher import Batch
from training.trainer import MUON_SCALE, make_optimizers

ROWS, DRAFTED, SIZE, LABELS = 7, 60, 32, 20
TARGET = Target(tiny("llama", num_hidden_layers=4))
EMBEDDING = torch.randn(VOCABULARY, SIZE, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
HEADS = 3  # of Medusa and Hydra
DECAY = 0.7
DraftFrom = Callable[[int, int], Iterator[tuple[Tensor, Any]]]


def written_out(name: str, p: Tensor, q: Tensor, tail: Tensor) -> Tensor:
    """The losses of whole distributions p and q, [R, D]; tail [R]: p of all tokens that are no labels."""
    if name == "rkl":  # tokens that are no labels count as one; p is that of tokens that can be drafted
        labels = p > 0
        p = torch.cat([p * labels, tail[:, None]], 1)
        p, q = p / p.sum(1, True), torch.cat([q * labels, 1 - (q * labels).sum(1, True)], 1)
        p, q = p.clamp_min(1e-300), q.clamp_min(1e-300)
        return (q * (q / p).log()).sum()
    return len(p) - torch.minimum(p, q).sum() if name == "tv" else -(p * q.log()).sum()


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("cut", [SIZE, 20])
def test_value_and_gradient(name: str, biased: bool, cut: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a weight of one matrix, and of two side by side."""
    monkeypatch.setattr(losses, "CHUNK", 3 * VOCABULARY)  # three rows at a time, the last time one
    generator = torch.Generator().manual_seed(0)
    states, weight, logits = (
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((ROWS, SIZE), (VOCABULARY, SIZE), (ROWS, VOCABULARY))
    )
    bias = torch.linspace(-1, 1, VOCABULARY, dtype=torch.float64) if biased else None
    probabilities, labels = torch.softmax(2 * logits, dim=-1).topk(LABELS)
    labels[2, 1] = -1  # not in the draft vocabulary
    known = labels >= 0
    p = torch.zeros(ROWS, VOCABULARY, dtype=torch.float64).scatter_add_(1, labels.clamp_min(0), probabilities * known)
    inputs = [tensor.requires_grad_() for tensor in (states, weight, bias) if tensor is not None]

    value, right = vocabulary_loss(
        name, states, weight.split([cut, SIZE - cut][: 1 + (cut < SIZE)], dim=1), bias, labels, probabilities
    )
    logits = states @ weight.T + (0 if bias is None else bias)
    expected = written_out(name, p, logits.softmax(dim=-1), 1 - probabilities.sum(dim=-1))

    torch.testing.assert_close(value, expected)
    assert right.tolist() == (logits.argmax(dim=-1) == labels[:, 0]).tolist()
    torch.testing.assert_close(*(torch.autograd.grad(each * 3, inputs) for each in (value, expected)))


def test_temperature_is_that_of_both_distributions() -> None:
    """Labels of all tokens, so that nothing is left out."""
    head = make_head("medusa", TARGET)
    batch = make_batch("medusa")
    p = torch.randn(3, 13, VOCABULARY, dtype=torch.float64).softmax(dim=-1)
    probabilities, labels = p.sort(dim=-1, descending=True)
    batch = batch._replace(labels=labels, probabilities=probabilities)
    found = MedusaObjective(head, "tv", None, temperature=0.5)(batch).total
    total = torch.zeros((), dtype=torch.float64)
    objective = MedusaObjective(head, "tv", None)
    for depth, (states, row, column) in enumerate(objective.draft(batch)):
        weight, bias = head.output_layer(depth)
        logits = torch.nn.functional.linear(states, weight, bias)
        rejected = 1 - torch.minimum((p[row, column].log() / 0.5).softmax(-1), (logits / 0.5).softmax(-1)).sum(dim=-1)
        total += objective.decay**depth * rejected.sum()
    torch.testing.assert_close(found.double(), total)


def make_batch(kind: str) -> Batch:
    """Rows of different lengths and answers; the last has none."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCABULARY, (3, 13), generator=generator)
    answers = torch.zeros(3, 13, dtype=torch.bool)
    answers[0, 3:12] = True
    answers[1, 0:2] = answers[1, 5:9] = True
    width = SIZE * {"eagle3": 3, "peagle": 3, "dflash": 3, "jump": 2}.get(kind, 1)
    features = torch.randn(3, 13, width, generator=generator, dtype=torch.float64)
    p = torch.randn(3, 13, VOCABULARY, generator=generator, dtype=torch.float64).softmax(dim=-1)
    probabilities, labels = p.topk(LABELS)
    return Batch(tokens, answers, features, labels, probabilities)


def see(count: int, window: int | None) -> Any:
    before = torch.arange(count)[:, None] - torch.arange(count)
    return partial(attend, mask=((before >= 0) & (before < (window or count)))[None, None])


def draft(head: Any, features: Tensor, tokens: list[int], steps: int) -> list[Tensor]:
    """The states of a draft after features [T, F], one step at a time, without masks and without a cache.

    tokens: the token after each feature, then the draft tokens.
    """
    if isinstance(head, MedusaHead):
        return [*head(features[-1])]
    if isinstance(head, MultiTokenHead):
        return [*head(features[None], torch.arange(len(features))[None], see(len(features), head.window))[0, -1]]
    if isinstance(head, HydraHead):
        after = EMBEDDING[tokens[len(features) - 1 :]]
        return [head(features[-1], after[: depth + 1], depth) for depth in range(steps)]
    if isinstance(head, JumpHead):
        return draft_jump(head, features[None], tokens[len(features) - 1 :], steps)
    inputs = head.fuse(features[None])
    states = []
    for _ in range(steps):
        count = inputs.shape[1]
        embedded, positions = EMBEDDING[tokens[:count]][None], torch.arange(count)[None]
        states.append(head(embedded, inputs, positions, see(count, head.window))[0, -1])
        inputs = torch.cat([inputs, states[-1][None, None]], dim=1)
    return states


def draft_jump(head: JumpHead, features: Tensor, tokens: list[int], steps: int) -> list[Tensor]:
    """The states of a draft, whose tokens see the whole text and the ones before them."""
    count = features.shape[1]
    text, states = head.read(features, torch.arange(count)[None]), head.above(features[:, -1:])

    def attend_to_both(queries: Tensor, *own: Tensor) -> Tensor:
        parts = (torch.cat(pair, dim=2) for pair in zip(text, own, strict=True))
        mask = see(count + queries.shape[2], head.window).keywords["mask"]
        return attend(queries, *parts, mask=mask[:, :, count:])

    for size in range(1, steps + 1):
        positions = count + torch.arange(size)[None]
        grown = head(EMBEDDING[tokens[:size]][None], states, positions, attend_to_both)
        states = torch.cat([states, grown[:, -1:]], dim=1)
    return [*states[0, 1:]]


def add_up(head: Any, batch: Batch, loss: str, draft_from: DraftFrom) -> tuple[Tensor, list[int]]:
    """The loss of a draft from each anchor, and how many anchors each depth has.

    draft_from: the logits of each depth after a token of a row, and what is added to that depth's loss. The targets of
    depth i at token t are at t + 1 + i, in the same answer.
    """
    draft_ids = {int(token): place for place, token in enumerate(head.token_map)}
    total, anchors = torch.zeros((), dtype=torch.float64), [0] * 13
    for row, column in batch.answers.nonzero().tolist():
        for depth, (logits, more) in enumerate(draft_from(row, column)):
            at = column + 1 + depth
            if at >= 13 or not batch.answers[row, column : at + 1].all():
                break
            wanted = dict(zip(batch.labels[row, at].tolist(), batch.probabilities[row, at], strict=True))
            if loss == "ce":
                wanted = {int(batch.tokens[row, at + 1]): torch.tensor(1.0)}
            log_q = logits.log_softmax(dim=-1)
            value = sum(-p * log_q[draft_ids[token]] for token, p in wanted.items() if token in draft_ids)
            total, anchors[depth] = total + DECAY**depth * (value + more), anchors[depth] + 1
    return total, anchors


@pytest.mark.parametrize(
    ("kind", "settings", "loss", "steps"),
    [
        *((kind, {"layers": 2}, loss, HEADS) for kind in ("medusa", "hydra") for loss in ("ce", "kl")),
        *((kind, {}, "kl", steps) for kind in ("eagle", "eagle3") for steps in (1, 2, 4)),
        *((kind, {"normed_feedback": True}, "kl", steps) for kind in ("eagle3", "mtp") for steps in (1, 2, 4)),
        ("eagle3", {"layer": replace(LAYER, window=5)}, "kl", 4),
        ("eagle3", {"layers": 2}, "kl", 3),
        *(("jump", {"layer": replace(LAYER, window=window)}, "kl", 4) for window in (None, 5)),
        *(("multi-token", {"layer": replace(LAYER, window=window)}, "kl", HEADS) for window in (None, 5)),
    ],
)
def test_an_objective_matches_a_draft_from_each_token(kind: str, settings: dict, loss: str, steps: int) -> None:
    """Anchors, the loss and its gradient."""
    head, batch = make_head(kind, TARGET, draft_size=DRAFTED, **settings), make_batch(kind)
    regression = 2.0 if kind == "eagle" else 0.0
    unrolling: dict[str, Any] = {"steps": steps} if "ttt_steps" in OBJECTIVES[kind].options else {}
    objective = OBJECTIVES[kind](head, loss, EMBEDDING, DECAY, **unrolling)
    if regression:
        objective.regression = regression  # type: ignore[assignment]
    result = objective(batch)
    result.total.backward()
    gradients = [parameter.grad.clone() for parameter in head.parameters()]
    head.zero_grad()

    def draft_from(row: int, column: int) -> Iterator[tuple[Tensor, Any]]:
        tokens = batch.tokens[row].tolist()
        states = draft(head, batch.features[row, : column + 1], tokens[1:] + [0] * steps, steps)
        for depth, state in enumerate(states):
            wanted, more = batch.features[row, column + 1 + depth], 0.0
            if kind == "jump":  # the second half is the state above its layer
                more = (state - wanted[SIZE:]).square().sum() / wanted[SIZE:].square().sum()
            elif regression:
                more = regression * nn.functional.smooth_l1_loss(state, wanted)
            yield head.logits(state, depth), more

    expected, anchors = add_up(head, batch, loss, draft_from)
    assert result.anchors.tolist() == anchors[:steps] and anchors[steps - 1] > 0
    torch.testing.assert_close(result.total.double(), expected, rtol=1e-6, atol=1e-6)
    expected.backward()
    expected_gradients = [parameter.grad for parameter in head.parameters()]
    torch.testing.assert_close(gradients, expected_gradients, rtol=1e-5, atol=1e-5)  # sums are made in float32


def test_pace_weighs_a_token_by_the_expected_length() -> None:
    """D-PACE's gradient is that of the expected number of accepted tokens, if a token is accepted with probability
    (1 + q) / 2 and the logarithm of q stands for that of this probability."""
    head, batch = make_head("eagle3", TARGET, draft_size=DRAFTED), make_batch("eagle3")
    objective = EagleObjective(head, "ce", EMBEDDING, decay="pace")
    objective(batch).total.backward()
    found = [parameter.grad.clone() for parameter in head.parameters()]
    head.zero_grad()
    draft_ids = {int(token): place for place, token in enumerate(head.token_map)}
    length = torch.zeros((), dtype=torch.float64)
    for row, column in batch.answers.nonzero().tolist():
        tokens, reached = batch.tokens[row].tolist(), torch.ones((), dtype=torch.float64)
        states = draft(head, batch.features[row, : column + 1], tokens[1:] + [0] * 3, 3)
        for depth, state in enumerate(states):
            at = column + 1 + depth
            if at >= 13 or not batch.answers[row, column : at + 1].all():
                break
            q = torch.zeros((), dtype=torch.float64)
            if tokens[at + 1] in draft_ids:
                q = head.logits(state, depth).softmax(dim=-1)[draft_ids[tokens[at + 1]]]
            share = ((1 + q) / 2).detach()
            reached = reached * (share * q / q.detach() if q > 0 else share)
            length = length + reached
    (-length).backward()
    torch.testing.assert_close(found, [parameter.grad for parameter in head.parameters()], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["peagle", "dflash"])
def test_pace_counts_the_drafts_that_are_not_made(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """On average the loss is that of all drafts of a long answer."""
    head, batch, repeats = make_head(kind, TARGET, draft_size=DRAFTED), make_batch(kind), 20
    batch = Batch(*(part[:1].repeat(1, repeats, *[1] * (part.ndim - 2)) for part in batch))
    batch = batch._replace(answers=torch.arange(13 * repeats)[None] >= 3)
    batch.answers[:, -2:] = False
    network: Any = PEagleObjective if kind == "peagle" else BlockObjective
    objective = network(head, "kl", EMBEDDING, decay="pace")
    torch.manual_seed(0)
    with torch.no_grad():
        drawn = torch.stack([objective(batch).total for _ in range(20)])
        for share in ("NESTED", "ANCHORS"):
            monkeypatch.setattr(objectives, share, 1.0)
        whole = objective(batch).total
    assert abs(float(drawn.mean() / whole) - 1) < 0.03 and float(drawn.std()) > 0


WINDOW = {"layer": replace(LAYER, qk_norm=True, window=5)}
BLOCKS: list[dict[str, Any]] = [
    *({}, {"pair_rank": 0, "from_anchor": False}, {"layers": 1}, WINDOW, {"causal": True}, {**WINDOW, "causal": True}),
    {**WINDOW, "causal": True, "full_layers": (1,)},
]


@pytest.mark.parametrize("settings", BLOCKS)
@pytest.mark.parametrize("loss", ["ce", "kl"])
def test_a_block_objective_matches_a_draft_from_each_anchor(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], loss: str
) -> None:
    """Each draft is made by the proposer's drafter, which never sees a later feature."""
    monkeypatch.setattr(objectives, "ANCHORS", 1.0)
    head, batch = make_head("dflash", TARGET, draft_size=DRAFTED, **settings), make_batch("dflash")
    result = BlockObjective(head, loss, EMBEDDING, DECAY)(batch)

    def draft_from(row: int, column: int) -> Iterator[tuple[Tensor, Any]]:
        tokens, cache = batch.tokens[row], LayerCache(1, window=head.window)
        fused = head.fuse(batch.features[row : row + 1, : column + 1])
        cache.write(*head.read(fused, torch.arange(column + 1)[None]))
        cache.keep([column + 1])
        root = tokens[column + 1][None]
        drafter = DFlashDrafter(head, root, cache, lambda tokens: EMBEDDING[tokens])
        for depth in range(head.depth):
            yield drafter.logits(depth)[0, 0], 0
            if depth + 1 < head.depth:
                drafter.extend(root[None], tokens[column + 2 + depth].view(1, 1))

    expected, anchors = add_up(head, batch, loss, draft_from)
    assert result.anchors.tolist() == anchors[: head.depth] and anchors[head.depth - 1] > 0
    torch.testing.assert_close(result.total.double(), expected.detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("window", "layers"), [(None, 1), (None, 3), (5, 1), (5, 2)])
def test_a_p_eagle_objective_matches_a_draft_from_each_anchor(
    monkeypatch: pytest.MonkeyPatch, window: int | None, layers: int
) -> None:
    """Each draft is made as the proposer's, which never sees a later feature."""
    monkeypatch.setattr(objectives, "NESTED", 1.0)
    layer = replace(LAYER, window=window)
    head = make_head("peagle", TARGET, draft_size=DRAFTED, layer=layer, layers=layers)
    batch = make_batch("peagle")
    result = PEagleObjective(head, "kl", EMBEDDING, DECAY)(batch)

    def draft_from(row: int, column: int) -> Iterator[tuple[Tensor, Any]]:
        cache, count = LayerCache(1, window=window), column + 1
        following = nn.functional.pad(batch.tokens[row], (0, 1))[None, 1 : count + 1]
        fused = head.fuse(batch.features[row : row + 1, :count])
        part = FeaturePart(fused, following, torch.tensor([count]), [count])
        states = draft_ahead(head, lambda tokens: EMBEDDING[tokens], cache, part, *head.unknown(head.depth - 1))
        yield from ((head.logits(states[0, depth]), 0) for depth in range(head.depth))

    expected, anchors = add_up(head, batch, "kl", draft_from)
    assert result.anchors.tolist() == anchors[: head.depth] and anchors[head.depth - 1] > 0
    torch.testing.assert_close(result.total.double(), expected.detach(), rtol=1e-6, atol=1e-6)


def test_no_block_sees_a_feature_at_or_after_its_anchor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The leak that trains a head to an accuracy that no draft has (SpecForge #470)."""
    monkeypatch.setattr(objectives, "ANCHORS", 1.0)
    head, batch = make_head("dflash", TARGET), make_batch("dflash")
    objective = BlockObjective(head, "kl", EMBEDDING)
    for column in range(3, 10):
        changed = batch.features.clone()
        changed[:, column + 1 :] = 7.0
        drafts = []
        for features in (batch.features, changed):
            torch.manual_seed(0)  # the same anchors
            drafts.append([*objective.draft(batch._replace(features=features))])
        for depth, ((states, _, columns), (found, _, _)) in enumerate(zip(*drafts, strict=True)):
            early = columns - 1 - depth <= column  # the feature of the last token before the anchor
            assert torch.equal(states[early], found[early])
            assert not (states[~early] == found[~early]).all(dim=1).any()


def test_anchors_are_drawn_anew_in_each_step() -> None:
    answers = make_batch("dflash").answers
    drawn, counts = set(), []
    for seed in range(200):
        torch.manual_seed(seed)
        columns, chosen = choose_anchors(answers, 0.25)
        counts.append(chosen.sum(dim=1))
        assert all(answers[row, column] for row, column in zip(chosen.nonzero()[:, 0], columns[chosen], strict=True))
        assert all(len({*columns[row, chosen[row]].tolist()}) == chosen[row].sum() for row in range(3))
        drawn.add(tuple(columns[chosen].tolist()))
    found = torch.stack(counts)
    assert len(drawn) > 100 and [sorted({*row.tolist()}) for row in found.T] == [[2, 3], [1, 2], [0]]
    assert torch.allclose(found.double().mean(dim=0), torch.tensor([2.25, 1.5, 0], dtype=torch.float64), atol=0.1)


def test_noise_is_for_training_only() -> None:
    head, batch = make_head("eagle", TARGET), make_batch("eagle")
    objective = EagleObjective(head, "kl", EMBEDDING, steps=1, noise=0.1)
    assert objective(batch).total != objective(batch).total
    assert torch.equal(objective.eval()(batch).total, EagleObjective(head, "kl", EMBEDDING, steps=1)(batch).total)


def test_a_batch_without_answers_has_no_loss() -> None:
    head, batch = make_head("eagle3", TARGET), make_batch("eagle3")
    batch.answers.zero_()
    loss = EagleObjective(head, "kl", EMBEDDING)(batch)
    loss.total.backward()
    assert loss.total == 0 and loss.anchors.tolist() == [0, 0, 0]
    assert all(not parameter.grad.any() for parameter in head.parameters())


@pytest.mark.parametrize(
    ("kind", "settings", "vocabulary"),
    [
        ("medusa", {"output": "own"}, {"lm_heads"}),
        ("medusa", {"output": "target"}, set()),
        ("hydra", {"prefix": True, "output": "shared"}, {"lm_head"}),
        ("eagle", {}, set()),
        ("eagle3", {}, {"lm_head"}),
    ],
)
def test_muon_gets_the_matrices_between_hidden_states(kind: str, settings: dict, vocabulary: set[str]) -> None:
    head = make_head(kind, TARGET, **settings)
    weights = {f"head.{name}": weight for name, weight in head.named_parameters()}
    muon, adamw = make_optimizers(weights, 1e-2)
    names = {id(weight): name for name, weight in weights.items()}
    moved = [{names[id(weight)] for group in each.param_groups for weight in group["params"]} for each in (muon, adamw)]
    assert moved[0] | moved[1] == {*weights} and not moved[0] & moved[1]
    linears = {f"head.{name}.weight" for name, module in head.named_modules() if isinstance(module, nn.Linear)}
    outputs = {name for name in linears if name.split(".")[1] in vocabulary}
    assert bool(outputs) == bool(vocabulary)
    assert moved[0] == linears - outputs


@pytest.mark.parametrize("shape", [(6, 20), (20, 6)])
def test_muon_is_torchs_and_near_it_without_bfloat16(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's rounds to bfloat16, as ours does where a device is fast at it."""
    generator = torch.Generator().manual_seed(0)
    first, gradients = torch.randn(shape, generator=generator), torch.randn(3, *shape, generator=generator)

    def move(is_fast: bool, make: Any) -> Tensor:
        monkeypatch.setattr(trainer, "find_backend", lambda device: SimpleNamespace(is_fast_in_bfloat16=is_fast))
        weight = nn.Parameter(first.clone())
        optimizer = make(weight)
        for gradient in gradients:
            weight.grad = gradient.clone()
            optimizer.step()
        return weight.detach() - first

    settings: dict[str, Any] = {"lr": 1e-2 * MUON_SCALE, "weight_decay": trainer.WEIGHT_DECAY / MUON_SCALE}
    theirs = move(True, lambda weight: TorchMuon([weight], **settings, adjust_lr_fn="match_rms_adamw"))
    fast, wide = (move(is_fast, lambda weight: make_optimizers({"fc.weight": weight}, 1e-2)[0]) for is_fast in (1, 0))
    torch.testing.assert_close(fast, theirs, rtol=1e-3, atol=1e-6)
    assert 0 < torch.dist(wide, theirs) < 0.02 * theirs.norm()
