"""Medusa-2: adapters start as zero and merge, the objective matches a plain float64 version, both stages train."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from decode import Target, generate
from heads import HydraConfig, HydraHead, MedusaConfig, MedusaHead
from heads.checkpoint import load_head
from proposers import MedusaProposer
from scripts import train
from tests.support.models import VOCABULARY, tiny
from tests.support.predictable import train_predictable, walk, write_answers
from tests.support.training_runs import PLANNED
from training.data import Dataset, Example
from training.feature_cache import BatchLoader
from training.medusa2 import (
    ADAPTERS_LR_SHARE,
    HEADS_WEIGHT,
    Adapters,
    Medusa2Objective,
    divergence,
    save_adapted,
)
from training.objectives import DECAY, MedusaObjective
from training.optimizer import MUON_SCALE
from training.teacher import LABELS, Batch, Teacher, collate
from training.trainer import Schedule, Trainer, Validation

HEADS = 2
TOKENS = torch.tensor([[5, 17, 40, 3, 88, 62, 9, 31]])
EXAMPLES = [Example((5, 17, 40, 3, 88, 62, 9, 31, 7, 12), ((3, 7), (9, 10))), Example((4, 90, 11, 23, 6), ((1, 5),))]


def read(model: PreTrainedModel) -> Tensor:
    with torch.no_grad():
        return model(input_ids=TOKENS).logits


def disturb(adapters: Adapters, by: float = 0.05) -> None:
    """Random updates, as if trained."""
    generator = torch.Generator().manual_seed(3)
    for parameter in adapters.parameters():
        parameter.data += by * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)


def make_joint(kind: str, loss: str = "kl", name: str = "llama") -> tuple[Medusa2Objective, Batch]:
    """A Medusa-2 objective in float64 whose head has random weights, and a batch."""
    target = Target(tiny(name))
    torch.manual_seed(0)
    if kind == "medusa":
        head = MedusaHead(MedusaConfig(32, VOCABULARY, heads=HEADS)).double()
    else:
        head = HydraHead(HydraConfig(32, VOCABULARY, heads=HEADS)).double()
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    adapters = Adapters(target.model, rank=4)
    heads = MedusaObjective(head, loss, target.model.get_input_embeddings().weight)
    objective = Medusa2Objective(target, adapters, heads)
    return objective, collate(EXAMPLES, objective.teacher.compute(EXAMPLES))


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2", "gemma3_text", "phi3", "gpt_neox", "qwen3_moe"])
def test_adapters_start_as_zero_and_merge(name: str) -> None:
    model = tiny(name)
    plain = read(model)
    adapters = Adapters(model)
    assert torch.equal(read(model), plain)
    disturb(adapters)
    adapted = read(model)
    assert not torch.allclose(adapted, plain)
    with adapters.off():
        assert torch.equal(read(model), plain)
        states = adapters.merge(model.state_dict())
        assert torch.equal(read(model), plain)  # merging wrote into copies
        model.load_state_dict(states)
        torch.testing.assert_close(read(model), adapted, rtol=1e-9, atol=1e-9)


def test_adapters_of_a_model_in_half_precision_are_exact() -> None:
    model = tiny("llama", dtype=torch.bfloat16)
    adapters = Adapters(model)
    disturb(adapters)
    assert {parameter.dtype for parameter in adapters.parameters()} == {torch.float32}
    assert read(model).dtype == torch.bfloat16


def test_a_model_without_plain_layers_is_refused() -> None:
    with pytest.raises(ValueError, match="GPT2LMHeadModel has no linear layers to adapt"):
        Adapters(tiny("gpt2"))


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_only_adapters_and_head_learn(kind: str) -> None:
    objective, batch = make_joint(kind)
    disturb(objective.adapters)
    objective(batch).total.backward()
    for name, parameter in objective.named_parameters():
        assert name.startswith(("adapters.", "heads.head."))
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, name
    assert all(parameter.grad is None for parameter in objective.target.model.parameters())
    assert not objective.train().target.model.training


def test_the_teacher_is_the_original_target() -> None:
    objective, batch = make_joint("medusa")
    expected = collate(EXAMPLES, Teacher(Target(tiny("llama")), (-1,)).compute(EXAMPLES))
    disturb(objective.adapters)
    for targets in (batch, collate(EXAMPLES, objective.teacher.compute(EXAMPLES))):
        assert torch.equal(targets.probabilities, expected.probabilities)
        assert torch.equal(targets.features, expected.features)


def test_divergence() -> None:
    generator = torch.Generator().manual_seed(0)
    original, own = torch.randn(2, 6, 20, generator=generator, dtype=torch.float64)
    p, q = original.softmax(dim=-1), own.softmax(dim=-1)
    exact = (p * (p / q).log()).sum()
    probabilities, labels = p.topk(20)
    torch.testing.assert_close(divergence(own, labels, probabilities), exact, rtol=1e-6, atol=0)

    probabilities, labels = p.topk(8)
    rest_p, rest_q = 1 - probabilities.sum(dim=-1), 1 - q.gather(1, labels).sum(dim=-1)
    coarse = (probabilities * (probabilities / q.gather(1, labels)).log()).sum() + (
        rest_p * (rest_p / rest_q).log()
    ).sum()
    torch.testing.assert_close(divergence(own, labels, probabilities), coarse)
    assert coarse < exact
    original.requires_grad_()
    value = divergence(original, labels, probabilities)
    assert value.abs() < 1e-12
    assert torch.autograd.grad(value, original)[0].abs().max() < 1e-12


@pytest.mark.parametrize("name", ["llama", "gemma2"])  # the second caps its logits
@pytest.mark.parametrize("loss", ["ce", "kl"])
def test_objective_matches_a_plain_version(name: str, loss: str) -> None:
    objective, batch = make_joint("medusa", loss, name)
    drift, heads = write_out(objective, batch)
    assert drift.abs() < 1e-6
    torch.testing.assert_close(objective(batch).total.double(), HEADS_WEIGHT * heads, rtol=1e-5, atol=1e-5)

    disturb(objective.adapters)
    drift, heads = write_out(objective, batch)
    assert drift > 1e-3
    result = objective(batch)
    torch.testing.assert_close(result.total.double(), drift + HEADS_WEIGHT * heads, rtol=1e-5, atol=1e-5)
    assert result.anchors.tolist() == [6, 4]


@torch.no_grad()
def write_out(objective: Medusa2Objective, batch: Batch) -> tuple[Tensor, Tensor]:
    """KL with all but the most likely tokens as one, and a Medusa head's loss, text by text and token by token."""
    drift, total = torch.zeros(2, dtype=torch.float64)
    head, model = objective.heads.head, objective.target.model
    for example in EXAMPLES:
        ids = torch.tensor([example.tokens])
        adapted = model(input_ids=ids, output_hidden_states=True)
        with objective.adapters.off():
            original = model(input_ids=ids).logits[0].softmax(dim=-1)
        own = adapted.logits[0].softmax(dim=-1)
        for begin, end in example.spans:
            for t in range(begin - 1, end - 1):  # predicts token t + 1
                best = original[t].topk(LABELS).indices
                p, q = (torch.cat([each[t, best], 1 - each[t, best].sum()[None]]) for each in (original, own))
                drift += (p * (p / q).log()).sum()
                for index in range(min(HEADS, end - 2 - t)):
                    at = t + 1 + index
                    logs = head.logits(head(adapted.hidden_states[-1][0, t])[index], index).log_softmax(dim=-1)
                    if objective.heads.loss == "ce":
                        labels, probabilities = ids[0, at + 1], 1.0
                    else:
                        labels = original[at].topk(LABELS).indices
                        probabilities = original[at, labels]
                    total -= DECAY**index * (probabilities * logs[labels]).sum()
    return drift, total


def test_adapters_have_a_quarter_of_the_learning_rate(tmp_path: Path) -> None:
    objective, _ = make_joint("medusa")
    adapters = [id(parameter) for parameter in objective.adapters.parameters()]
    trainer = Trainer(
        objective,
        Dataset(EXAMPLES, [], 0, 0),
        lambda numbers: collate([], []),
        lambda: Validation(1.0, []),
        lambda: None,
        Schedule(lr=1e-2),
        tmp_path,
        Accelerator(cpu=True),
        {},
    )
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    rates = {id(weight): group["initial_lr"] for group in groups for weight in group["params"]}
    assert {rates.pop(number) for number in adapters} == {1e-2 * ADAPTERS_LR_SHARE}
    assert set(rates.values()) == {1e-2, 1e-2 * MUON_SCALE}


@pytest.mark.parametrize("tied", [False, True])
def test_the_adapted_model_is_an_ordinary_folder(tied: bool, tmp_path: Path, save_model: Callable[..., Path]) -> None:
    folder = save_model(tie_word_embeddings=tied)
    target = Target(
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64), AutoTokenizer.from_pretrained(folder)
    )
    adapters = Adapters(target.model)
    for _ in range(2):  # the second replaces the first
        disturb(adapters)
        save_adapted(target, adapters, tmp_path / "out" / "model")
    written = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model", dtype="auto")
    torch.testing.assert_close(read(written), read(target.model), rtol=1e-9, atol=1e-9)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out" / "model")
    assert tokenizer("walk")["input_ids"] == target.tokenizer("walk")["input_ids"]
    assert tokenizer.chat_template == target.tokenizer.chat_template
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model"]


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory, save_model: Callable[..., Path]) -> Callable[..., Path]:
    """Trains a head on answers of the predictable model, with the given arguments; returns the folder of --out."""
    model = save_model(dtype=torch.float32, num_hidden_layers=1)
    train_predictable().save_pretrained(model)
    answers = write_answers(model / "answers.jsonl", rows=300)

    def run(*more: str, out: Path | None = None) -> Path:
        out = tmp_path_factory.mktemp("head") / "out" if out is None else out
        named = {"model": model, "kind": "medusa", "data": answers, "out": out, "device": "cpu", "dtype": "float32"}
        sizes = {"heads": 2, "batch-tokens": 512, "epochs": 4, "validation": 2}
        train.main([*(f"--{name}={value}" for name, value in (named | sizes).items()), *more])
        return out

    return run


@pytest.fixture(scope="module")
def first(stage: Callable[..., Path]) -> Path:
    """The head of the first stage."""
    return stage("--max-steps", "60", "--lr", "0.02")


def measure(model: PreTrainedModel, folder: Path) -> tuple[float, list[list[int]]]:
    """Tau with the head in the folder, and the greedy text of the model."""
    prompts: Sequence[Any] = [walk(start, 4) for start in range(3, 96, 5)]
    proposer = MedusaProposer(load_head(folder, torch.float32), nodes=8)
    answers = generate(Target(model), prompts, proposer, max_new_tokens=24, nodes=8)
    passes = sum(answer.stats.steps for answer in answers)
    return sum(len(answer.tokens) for answer in answers) / passes, [answer.tokens for answer in answers]


def test_two_stages(stage: Callable[..., Path], first: Path) -> None:
    second = stage("--joint", "--init", str(first), "--max-steps", "40", "--lr", "0.02")
    adapted = AutoModelForCausalLM.from_pretrained(second / "model", dtype=torch.float32)
    tau, text = measure(train_predictable(), first)
    joint_tau, joint_text = measure(adapted, second)
    assert joint_tau >= tau
    same = [ours == theirs for ours, theirs in zip(chain(*text), chain(*joint_text), strict=True)]
    assert sum(same) > 0.95 * len(same)
    weights = zip(train_predictable().parameters(), adapted.parameters(), strict=True)
    assert not all(torch.equal(before, after) for before, after in weights)


def test_a_resumed_training_matches_an_uninterrupted_one(
    stage: Callable[..., Path], first: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--joint", "--init", str(first), "--max-steps", "6", "--lora-rank", "4", "--validate-every", "2"]
    whole = stage(*options)
    loaded = 0
    load = BatchLoader.__call__

    def stop_at_the_third(self: BatchLoader, numbers: Sequence[int]) -> Batch:
        nonlocal loaded
        loaded += 1
        if loaded == PLANNED + 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return load(self, numbers)

    monkeypatch.setattr(BatchLoader, "__call__", stop_at_the_third)
    with pytest.raises(SystemExit):
        stage(*options, out=tmp_path / "out")
    assert loaded == PLANNED + 3
    resumed = stage(*options, "--resume", out=tmp_path / "out")
    one, other = (torch.load(folder / "checkpoint.pt") for folder in (whole, resumed))
    assert one["progress"] == other["progress"]
    assert any(name.startswith("adapters.") for name in one["weights"])
    assert all(torch.equal(weight, other["weights"][name]) for name, weight in one["weights"].items())
    for file in ("model.safetensors", "model/model.safetensors"):
        one, other = load_file(whole / file), load_file(resumed / file)
        assert all(torch.equal(weight, other[name]) for name, weight in one.items())


def test_resuming_without_joint_is_refused(
    stage: Callable[..., Path], first: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        stage("--joint", "--max-steps", "60", "--lr", "0.02", "--resume", out=first)
    assert "lora_rank was None, now 32" in capsys.readouterr().err
