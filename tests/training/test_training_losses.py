"""Losses and objectives against plain float64 versions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from heads import HydraConfig, HydraHead, MedusaConfig, MedusaHead
from training import losses
from training.losses import LOSSES, vocabulary_loss
from training.objectives import DECAY, MedusaObjective
from training.teacher import Batch

ROWS, WIDTH, VOCABULARY, LABELS = 7, 5, 11, 4


def written_out(name: str, p: Tensor, q: Tensor) -> Tensor:
    """The losses of whole distributions p and q, [R, D]."""
    alpha = torch.minimum(p, q).sum(dim=-1)
    entropy = -(p * q.log()).sum(dim=-1)
    weight = torch.exp(-3 * alpha).detach()
    return {
        "ce": entropy,
        "kl": entropy,
        "tv": 1 - alpha,
        "lk-alpha": -alpha.log(),
        "lk": weight * entropy + (1 - weight) * (1 - alpha),
    }[name].sum()


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("biased", [False, True])
def test_value_and_gradient(name: str, biased: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "CHUNK", 3 * VOCABULARY)  # three rows at a time, the last time one
    generator = torch.Generator().manual_seed(0)
    states, weight, logits = (
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((ROWS, WIDTH), (VOCABULARY, WIDTH), (ROWS, VOCABULARY))
    )
    bias = torch.linspace(-1, 1, VOCABULARY, dtype=torch.float64) if biased else None
    probabilities, labels = torch.softmax(2 * logits, dim=-1).topk(LABELS)
    labels[2, 1] = -1  # not in the draft vocabulary
    known = labels >= 0
    p = torch.zeros(ROWS, VOCABULARY, dtype=torch.float64).scatter_add_(1, labels.clamp_min(0), probabilities * known)
    inputs = [tensor.requires_grad_() for tensor in (states, weight, bias) if tensor is not None]

    value, right = vocabulary_loss(name, states, weight, bias, labels, probabilities)
    logits = states @ weight.T + (0 if bias is None else bias)
    expected = written_out(name, p, logits.softmax(dim=-1))

    torch.testing.assert_close(value, expected)
    assert right.tolist() == (logits.argmax(dim=-1) == labels[:, 0]).tolist()
    for got, wanted in zip(
        torch.autograd.grad(value * 3, inputs), torch.autograd.grad(expected * 3, inputs), strict=True
    ):
        torch.testing.assert_close(got, wanted)


def make_batch(vocab: int) -> Batch:
    """Two rows; the second is shorter and has two answers."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(vocab, (2, 12), generator=generator)
    answers = torch.zeros(2, 12, dtype=torch.bool)
    answers[0, 3:10] = True
    answers[1, 1:4] = True
    answers[1, 6:8] = True
    features = torch.randn(2, 12, WIDTH, generator=generator, dtype=torch.float64)
    p = torch.randn(2, 12, vocab, generator=generator, dtype=torch.float64).softmax(dim=-1)
    probabilities, labels = p.topk(LABELS)
    return Batch(tokens, answers, features, labels, probabilities)


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
@pytest.mark.parametrize("loss", ["ce", "kl"])
def test_objective(kind: str, loss: str) -> None:
    """Anchor by anchor: the training targets of head i at token t are at position t + 1 + i, in the same answer."""
    vocab, heads = 20, 3
    torch.manual_seed(2)
    batch = make_batch(vocab)
    embedding = torch.randn(vocab, WIDTH, dtype=torch.float64)
    token_map = torch.arange(0, vocab, 2)
    if kind == "medusa":
        head = MedusaHead(MedusaConfig(WIDTH, vocab, heads=heads, layers=2, draft_size=10)).double()
    else:
        head = HydraHead(HydraConfig(WIDTH, vocab, heads=heads, layers=2, draft_size=10)).double()
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter)
    head.token_map.copy_(token_map)

    total, anchors = torch.zeros((), dtype=torch.float64), [0] * heads
    for row in range(2):
        for t in range(12):
            for index in range(heads):
                if not all(t + ahead < 12 and batch.answers[row, t + ahead] for ahead in range(index + 2)):
                    continue
                anchors[index] += 1
                feature = batch.features[row, t]
                if kind == "medusa":
                    state = head(feature)[index]
                else:
                    state = head(feature, embedding[batch.tokens[row, t + 1 : t + 2 + index]], index)
                logs = dict(zip(token_map.tolist(), head.logits(state, index).log_softmax(dim=-1), strict=True))
                at = t + 1 + index
                if loss == "ce":
                    wanted = {int(batch.tokens[row, at + 1]): 1.0}
                else:
                    wanted = dict(
                        zip(batch.labels[row, at].tolist(), batch.probabilities[row, at].tolist(), strict=True)
                    )
                for token, p in wanted.items():
                    total = total - DECAY**index * p * logs.get(token, torch.zeros(()))

    result = MedusaObjective(head, loss, embedding)(batch)
    torch.testing.assert_close(result.total.double(), total, rtol=1e-5, atol=1e-5)
    assert result.anchors.tolist() == anchors
