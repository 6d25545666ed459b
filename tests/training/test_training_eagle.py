"""The EAGLE objective against drafts from one token at a time, without masks and without a cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from heads import Eagle3Config, Eagle3Head, EagleConfig, EagleHead, LayerConfig
from training.objectives import EagleObjective, gather_anchors
from training.teacher import Batch

VOCABULARY, DRAFTED, SIZE, LABELS = 20, 12, 16, 6
LAYER = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "intermediate_size": 10}
FEATURES = {"eagle": SIZE, "eagle3": 3 * SIZE}


def make_head(kind: str, **settings: Any) -> Any:
    torch.manual_seed(3)
    if kind == "eagle":
        layer = LayerConfig(**LAYER, input_norm=False)
        head: Any = EagleHead(EagleConfig(SIZE, VOCABULARY, layer, draft_size=DRAFTED, **settings))
        head.borrow(torch.randn(VOCABULARY, SIZE))
    else:
        head = Eagle3Head(
            Eagle3Config(SIZE, VOCABULARY, LayerConfig(**LAYER), features=(1, 2, 4), draft_size=DRAFTED, **settings)
        )
    head.token_map.copy_(torch.randperm(VOCABULARY)[:DRAFTED].sort().values)
    for parameter in head.parameters():
        parameter.data = torch.randn_like(parameter) / parameter.shape[-1] ** 0.5
    return head.double()


def make_batch(kind: str) -> Batch:
    """Rows of different lengths and answers; the last has none."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCABULARY, (3, 13), generator=generator)
    answers = torch.zeros(3, 13, dtype=torch.bool)
    answers[0, 3:12] = True
    answers[1, 0:2] = answers[1, 5:9] = True
    features = torch.randn(3, 13, FEATURES[kind], generator=generator, dtype=torch.float64)
    p = torch.randn(3, 13, VOCABULARY, generator=generator, dtype=torch.float64).softmax(dim=-1)
    probabilities, labels = p.topk(LABELS)
    return Batch(tokens, answers, features, labels, probabilities)


def draft(head: Any, embedding: Tensor, features: Tensor, tokens: list[int], steps: int) -> list[Tensor]:
    """The states of a draft after features [T, F]; tokens: the token after each feature, then the draft tokens."""
    inputs = head.fuse(features[None])
    states = []
    for _ in range(steps):
        count = inputs.shape[1]
        states.append(head(embedding[tokens[:count]][None], inputs, torch.arange(count)[None])[0, -1])
        inputs = torch.cat([inputs, states[-1][None, None]], dim=1)
    return states


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "fed back normed"])
@pytest.mark.parametrize("steps", [1, 2, 4])
def test_steps_match_a_draft_from_each_token(kind: str, steps: int) -> None:
    """States, anchors, the loss and its gradient."""
    settings = {"normed_feedback": True} if kind.startswith("fed") else {}
    kind = "eagle3" if settings else kind
    head, batch = make_head(kind, **settings), make_batch(kind)
    embedding = torch.randn(VOCABULARY, SIZE, dtype=torch.float64)
    regression = 2.0 if kind == "eagle" else 0.0
    objective = EagleObjective(head, "kl", embedding, steps, regression, decay=0.7)
    loss = objective(batch)
    loss.total.backward()
    gradients = [parameter.grad.clone() for parameter in head.parameters()]
    head.zero_grad()

    draft_ids = {int(token): place for place, token in enumerate(head.token_map)}
    expected, anchors = torch.zeros((), dtype=torch.float64), [0] * steps
    for row, column in batch.answers.nonzero().tolist():
        tokens = batch.tokens[row].tolist()
        states = draft(head, embedding, batch.features[row, : column + 1], tokens[1:] + [0] * steps, steps)
        for step, state in enumerate(states):
            at = column + 1 + step  # the position of this step's training targets
            if at >= 13 or not batch.answers[row, column : at + 1].all():
                break
            log_q = head.logits(state).log_softmax(dim=-1)
            labels = zip(batch.labels[row, at].tolist(), batch.probabilities[row, at], strict=True)
            value = sum(-p * log_q[draft_ids[token]] for token, p in labels if token in draft_ids)
            if regression:
                distance = torch.nn.functional.smooth_l1_loss(state, batch.features[row, at])
                value = value + regression * distance
            expected = expected + 0.7**step * value
            anchors[step] += 1
    assert loss.anchors.tolist() == anchors and anchors[-1] > 0
    torch.testing.assert_close(loss.total.double(), expected, rtol=1e-6, atol=1e-6)
    expected.backward()
    for parameter, gradient in zip(head.parameters(), gradients, strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-5, atol=1e-5)  # sums are made in float32


def test_noise_is_for_training_only() -> None:
    head, batch = make_head("eagle"), make_batch("eagle")
    objective = EagleObjective(head, "kl", torch.randn(VOCABULARY, SIZE, dtype=torch.float64), 1, noise=0.1)
    quiet = EagleObjective(head, "kl", objective.embedding, 1)(batch).total
    assert objective(batch).total != objective(batch).total
    assert torch.equal(objective.eval()(batch).total, quiet)


def test_a_batch_without_answers_has_no_loss() -> None:
    head, batch = make_head("eagle3"), make_batch("eagle3")
    batch.answers.zero_()
    loss = EagleObjective(head, "lk", torch.randn(VOCABULARY, SIZE, dtype=torch.float64), 3)(batch)
    loss.total.backward()
    assert loss.total == 0 and loss.anchors.tolist() == [0, 0, 0]
    assert all(not parameter.grad.any() for parameter in head.parameters())


def test_anchors_are_gathered_in_order() -> None:
    answers = torch.tensor([[0, 1, 0, 1, 1], [0, 0, 1, 0, 0]], dtype=torch.bool)
    columns, chosen = gather_anchors(answers)
    assert columns[0].tolist() == [1, 3, 4] and columns[1, 0] == 2
    assert chosen.tolist() == [[True, True, True], [True, False, False]]
