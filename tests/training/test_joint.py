"""Medusa-2: adapters start as zero, the objective matches a plain float64 version, and the saved folders fit."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import decode.models.adapters
import decode.models.loading
from decode import Target, generate
from decode.models.adapters import ADAPTER, ADAPTER_WEIGHTS, BASE, DEFAULT_BASE
from draftless_commands.head_training import parts
from draftless_commands.head_training.options import TrainOptions
from heads import HydraConfig, HydraHead, MedusaConfig, MedusaHead
from proposers import MedusaProposer
from proposers.load import load_draft_head
from tests.support.models import VOCABULARY, tiny
from tests.support.training_runs import assert_same, stop_and_resume, train, walk
from training.checkpoint import CHECKPOINT
from training.data import Dataset, Example
from training.joint import HEAD_WEIGHT, RATE_SHARE, Adapters, JointObjective
from training.losses import divergence
from training.objectives import DECAY, HydraObjective, MedusaObjective
from training.teacher import LABELS, Batch, Teacher, collate
from training.trainer import MUON_SCALE, Schedule, Trainer

HEADS = 2
TOKENS = torch.tensor([[5, 17, 40, 3, 88, 62, 9, 31]])
EXAMPLES = [Example((5, 17, 40, 3, 88, 62, 9, 31, 7, 12), ((3, 7), (9, 10))), Example((4, 90, 11, 23, 6), ((1, 5),))]
KINDS: dict[str, Any] = {
    "medusa": (MedusaHead, MedusaConfig, MedusaObjective),
    "hydra": (HydraHead, HydraConfig, HydraObjective),
}
FIRST, SECOND = ["--epochs", "2", "--lr", "1e-2"], ["--epochs", "4", "--lr", "5e-3"]
SHORT = ["--max-steps", "6", "--validate-every", "2", "--save-every", "2", "--lr", "1e-2"]


def read(model: Any) -> Tensor:
    with torch.no_grad():
        return model(input_ids=TOKENS).logits


def disturb(adapters: Adapters, by: float = 0.05) -> None:
    """Random updates, as if trained."""
    generator = torch.Generator().manual_seed(3)
    for weight in adapters.weights:
        weight.data += by * torch.randn(weight.shape, generator=generator, dtype=torch.float64)


def make_joint(kind: str, loss: str = "kl", name: str = "llama") -> tuple[JointObjective, Adapters, Batch]:
    """A Medusa-2 objective in float64 whose head has random weights, its adapters, and a batch."""
    target = Target(tiny(name))
    make_head, make_config, make_objective = KINDS[kind]
    torch.manual_seed(0)
    head = make_head(make_config(32, VOCABULARY, heads=HEADS)).double()
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    objective = make_objective(head, loss, target.model.get_input_embeddings().weight)
    adapters = Adapters(target, None, rank=4)
    teacher = Teacher(target, (), adapters.off)
    return JointObjective(adapters, objective), adapters, collate(EXAMPLES, teacher.compute(EXAMPLES))


@pytest.mark.parametrize("name", ["llama", "gemma2", "phi3", "gpt_neox"])
def test_adapters_start_as_zero_and_merge(name: str) -> None:
    target = Target(tiny(name))
    plain = read(target.model)
    adapters = Adapters(target, None)
    assert torch.equal(read(target.model), plain)
    disturb(adapters)
    adapted = read(target.model)
    assert not torch.allclose(adapted, plain)
    merged = adapters.merge()
    torch.testing.assert_close(read(merged), adapted, rtol=1e-4, atol=1e-4)  # its weights are rounded to float32
    assert torch.equal(read(target.model), adapted)
    assert merged.get_input_embeddings().weight is target.model.get_input_embeddings().weight
    with adapters.off():
        assert torch.equal(read(target.model), plain)
    generate(target, [[5, 6, 7]], None, max_new_tokens=2)  # a target takes new adapters


def test_a_model_without_plain_layers_is_refused() -> None:
    with pytest.raises(ValueError, match="GPT2LMHeadModel has no linear layers to adapt"):
        Adapters(Target(tiny("gpt2")), None)


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_only_adapters_and_head_learn(kind: str) -> None:
    objective, adapters, batch = make_joint(kind)
    disturb(adapters)
    objective(batch).total.backward()
    for name, parameter in objective.named_parameters():
        assert name.startswith(("adapters.", "objective.head."))
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, name
    trained = {id(weight) for weight in adapters.weights}
    assert all(weight.grad is None for weight in adapters.model.parameters() if id(weight) not in trained)
    assert not objective.train().target.model.training


def test_the_teacher_is_the_original_target() -> None:
    _, adapters, batch = make_joint("medusa")
    expected = collate(EXAMPLES, Teacher(Target(tiny("llama")), ()).compute(EXAMPLES))
    disturb(adapters)
    again = collate(EXAMPLES, Teacher(adapters.target, (), adapters.off).compute(EXAMPLES))
    for targets in (batch, again):
        assert torch.equal(targets.probabilities, expected.probabilities)
        assert torch.equal(targets.labels, expected.labels)


def test_divergence() -> None:
    generator = torch.Generator().manual_seed(0)
    original, own = torch.randn(2, 6, 20, generator=generator, dtype=torch.float64)
    p, q = original.softmax(dim=-1), own.softmax(dim=-1)
    exact = (p * (p / q).log()).sum()
    probabilities, labels = p.topk(20)
    torch.testing.assert_close(divergence(own, labels, probabilities), exact, rtol=1e-6, atol=0)

    probabilities, labels = p.topk(8)
    known = q.gather(1, labels)
    tails = 1 - probabilities.sum(dim=-1), 1 - known.sum(dim=-1)
    coarse = (probabilities * (probabilities / known).log()).sum() + (tails[0] * (tails[0] / tails[1]).log()).sum()
    torch.testing.assert_close(divergence(own, labels, probabilities), coarse)
    assert coarse < exact
    original.requires_grad_()
    value = divergence(original, labels, probabilities)
    assert value.abs() < 1e-12
    assert torch.autograd.grad(value, original)[0].abs().max() < 1e-12


@pytest.mark.parametrize("name", ["llama", "gemma2"])  # the second caps its logits
@pytest.mark.parametrize("loss", ["ce", "kl"])
def test_objective_matches_a_plain_version(name: str, loss: str) -> None:
    objective, adapters, batch = make_joint("medusa", loss, name)
    drift, heads = write_out(objective, adapters)
    assert drift.abs() < 1e-6
    torch.testing.assert_close(objective(batch).total.double(), HEAD_WEIGHT * heads, rtol=1e-5, atol=1e-5)

    disturb(adapters)
    drift, heads = write_out(objective, adapters)
    assert drift > 1e-3
    result = objective(batch)
    torch.testing.assert_close(result.total.double(), drift + HEAD_WEIGHT * heads, rtol=1e-5, atol=1e-5)
    assert result.anchors.tolist() == [6, 4]


@torch.no_grad()
def write_out(objective: JointObjective, adapters: Adapters) -> tuple[Tensor, Tensor]:
    """KL with all but the most likely tokens as one, and a Medusa head's loss, text by text and token by token."""
    drift, total = torch.zeros(2, dtype=torch.float64)
    head, model = objective.objective.head, adapters.target.model
    for example in EXAMPLES:
        ids = torch.tensor([example.tokens])
        adapted = model(input_ids=ids, output_hidden_states=True)
        with adapters.off():
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
                    labels = ids[0, at + 1] if objective.objective.loss == "ce" else original[at].topk(LABELS).indices
                    probabilities = 1.0 if objective.objective.loss == "ce" else original[at, labels]
                    total -= DECAY**index * (probabilities * logs[labels]).sum()
    return drift, total


def test_adapters_have_a_quarter_of_the_learning_rate(tmp_path: Path) -> None:
    objective, adapters, _ = make_joint("medusa")
    data, schedule = Dataset(EXAMPLES, [], 0, 0, 0), Schedule(lr=1e-2)
    unused: Any = None
    trainer = Trainer(objective, data, unused, unused, unused, schedule, tmp_path, Accelerator(cpu=True), {})
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    rates = {id(weight): group["initial_lr"] for group in groups for weight in group["params"]}
    assert {rates.pop(id(weight)) for weight in adapters.weights} == {1e-2 * RATE_SHARE}
    assert set(rates.values()) == {1e-2, 1e-2 * MUON_SCALE}


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # of a model within peft
def test_the_folder_is_the_adapted_model(
    save_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Draftless and peft load it, and the head knows the weights that are loaded; also if the base is the default."""
    base, folder = save_model(dtype=torch.float32), tmp_path / "out" / "adapter"
    monkeypatch.setattr(decode.models.loading, "default_model", lambda: base)
    head = MedusaHead(MedusaConfig(32, VOCABULARY, heads=HEADS))
    options: Any = {"kind": "medusa", "data": (), "out": tmp_path / "out", "joint": True, "init": tmp_path}
    original = Target.load(base)
    for name in (str(base), None):  # the second replaces the first
        target = Target.load(base, accelerate="off")
        assert head.config.target_weights != target.weights_fingerprint
        made = parts.make_parts(TrainOptions(model=name, **options), target, head, [[5, 6, 7]])
        assert isinstance(made.objective, JointObjective)
        for weight in made.objective.adapters:
            weight.data += 0.05 * torch.randn_like(weight)
        made.validate()
        made.save_best()
        assert json.loads((folder / ADAPTER).read_text())[BASE] == (DEFAULT_BASE if name is None else str(base))
        assert not [*folder.glob(".*")]
        for dtype in ("float32", "float64"):
            loaded = Target.load(folder, dtype=dtype)
            assert loaded.weights_fingerprint == head.config.target_weights != original.weights_fingerprint
            torch.testing.assert_close(read(loaded.model).float(), read(target.model), rtol=1e-4, atol=1e-4)
            with warnings.catch_warnings(action="error"):
                load_draft_head(folder.parent, loaded)
        assert loaded.fingerprints == original.fingerprints | {"weights": loaded.weights_fingerprint}
        with pytest.warns(UserWarning, match="with other weights than this target's"):
            load_draft_head(folder.parent, original)
        by_peft = PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), str(folder)
        )
        torch.testing.assert_close(read(by_peft.eval()), read(target.model), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kind": "eagle"}, "--joint is not for eagle heads; leave it out"),
        ({"kind": "multi-token"}, "--joint is not for multi-token heads; leave it out"),
        ({"kind": "draft"}, "--joint is not for draft models; leave it out"),
        ({"init": None}, "--joint needs a trained head: .* name it with --init"),
        ({"cache": Path("cache")}, "since the model changes; leave out --cache"),
        ({"dtype": "bfloat16"}, "--joint trains in float32; leave out --dtype"),
        ({"joint": False, "lora_rank": 4}, "--lora-rank is for --joint"),
    ],
)
def test_options_that_do_not_fit_are_refused(given: dict[str, Any], message: str) -> None:
    options: Any = {"kind": "medusa", "data": (), "out": Path("out"), "init": Path("head"), "joint": True}
    TrainOptions(**options)
    with pytest.raises(ValueError, match=message):
        TrainOptions(**options | given)


def test_without_peft_nothing_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").touch()
    monkeypatch.setattr(decode.models.adapters, "is_installed", lambda _: False)
    options = TrainOptions(kind="medusa", data=(tmp_path / "data",), out=tmp_path, init=tmp_path, joint=True)
    with pytest.raises(ValueError, match=r'run pip install "draftless\[lora\]"'):
        options.check_files()


@pytest.fixture(scope="module")
def first(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The head of the first stage."""
    folder = tmp_path_factory.mktemp("first")
    assert train(place, folder, *FIRST) == 0
    return folder


def measure(model: Path, head: Path) -> tuple[float, list[list[int]]]:
    """Tau with a head of three draft tokens, and the greedy text of the model."""
    target = Target.load(model)
    proposer = MedusaProposer(load_draft_head(head, target), nodes=8)
    prompts = [walk(start, 4) for start in range(3, 96, 5)]
    answers = generate(target, prompts, proposer, max_new_tokens=24, nodes=8, stop_ids=())
    steps = sum(answer.stats.steps for answer in answers)
    return sum(len(answer.tokens) for answer in answers) / steps, [answer.tokens for answer in answers]


@pytest.mark.slow
def test_two_stages(place: Path, first: Path, tmp_path: Path) -> None:
    """The second raises tau more than as many further steps of the head alone do, and hardly changes the text."""
    more = "--init", str(first), *SECOND
    assert train(place, tmp_path / "alone", *more) == train(place, tmp_path / "joint", "--joint", *more) == 0
    before, text = measure(place, first)
    alone, _ = measure(place, tmp_path / "alone")
    joint, joint_text = measure(tmp_path / "joint" / "adapter", tmp_path / "joint")
    assert before < alone < joint
    same = [ours == theirs for ours, theirs in zip(chain(*text), chain(*joint_text), strict=True)]
    assert sum(same) > 0.95 * len(same)


@pytest.mark.parametrize("kind", ["medusa", pytest.param("hydra", marks=pytest.mark.slow)])
def test_a_resumed_training_equals_an_uninterrupted_one(place: Path, tmp_path: Path, kind: str) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert train(place, tmp_path / "first", "--kind", kind, *SHORT) == 0
    options = "--kind", kind, "--joint", "--init", str(tmp_path / "first"), "--lora-rank", "4", *SHORT
    assert train(place, whole, *options) == 0
    stop_and_resume(3, place, stopped, *options)
    assert_same(whole, stopped)
    assert any(name.startswith("adapters.") for name in torch.load(whole / CHECKPOINT, weights_only=True)["weights"])
    one, two = (load_file(folder / "adapter" / ADAPTER_WEIGHTS) for folder in (whole, stopped))
    torch.testing.assert_close(one, two, rtol=0, atol=0)
    assert max(float(weight.abs().max()) for name, weight in one.items() if "lora_B" in name) > 0
    assert train(place, whole, *(each for each in options if each not in ("--joint", "--lora-rank", "4")), "--resume")
