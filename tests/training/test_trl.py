"""Rollouts in TRL's own trainers: the same training, whatever drafts."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from transformers import AutoModelForCausalLM, AutoTokenizer

from decode import Target
from proposers import AnswerStore, load_proposer
from training.rollouts import METRICS, Rollouts

PROMPTS = ["One, two", "A b c", "xyz", "why?"]
STEPS = 6
pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def fresh_accelerate() -> Any:
    """Other tests train in another number format."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(scope="module")
def folder(save_model: Callable[..., Path]) -> Path:
    return save_model(dtype=torch.float32)


def count_high(completions: list[Any], **others: Any) -> list[float]:
    """The share of an answer's characters in the upper half: about a half at first, and easily learned."""
    texts = [each if isinstance(each, str) else each[0]["content"] for each in completions]
    return [fmean([float(ord(each) >= 80) for each in text] or [0.5]) for text in texts]


def train(
    folder: Path,
    out: Path,
    rollouts: Rollouts | None,
    *,
    kind: str = "GRPO",
    as_function: bool = False,
    chat: bool = True,
    peft: bool = False,
    log: str = "reward",
    **settings: Any,
) -> list[dict[str, float]]:
    """What a trainer logs in each of its steps, which have the entry `log`."""
    import trl  # here, because importing it takes seconds
    from datasets import Dataset
    from peft import LoraConfig

    usual = {"per_device_train_batch_size": 16, "learning_rate": 0.01, "max_steps": STEPS}
    if kind != "OnlineDPO":
        usual |= {"num_generations": 8, "max_completion_length": 16}
    fixed = {"logging_steps": 1, "bf16": False, "report_to": "none", "save_strategy": "no", "disable_tqdm": True}
    config = getattr(trl, f"{kind}Config")(str(out), **usual | fixed | settings)
    prompts = [[{"role": "user", "content": text}] if chat else text for text in PROMPTS]
    given: dict[str, Any] = {"rollout_func": rollouts} if as_function else {}
    if peft:
        given["peft_config"] = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = getattr(trl, f"{kind}Trainer")(
            model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
            reward_funcs=count_high,
            args=config,
            train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts * 4]),
            processing_class=AutoTokenizer.from_pretrained(folder),
            **given,
        )
        if rollouts is not None and not as_function:
            rollouts.attach(trainer)
        trainer.train()
    return [each for each in trainer.state.log_history if log in each]


def rewards(logs: list[dict[str, float]]) -> list[float]:
    return [each["reward"] for each in logs]


@pytest.mark.parametrize("chat", [True, False])
def test_a_training_is_the_same_with_every_proposer_and_in_both_ways(folder: Path, tmp_path: Path, chat: bool) -> None:
    """Each step's rewards and gradients, up to rounding; the answers repeat, so a store by prompt drafts them."""

    def recall(target: Target) -> Any:
        return load_proposer("auto", target, store=AnswerStore(by_prompt=True))

    plain = train(folder, tmp_path, Rollouts(None), chat=chat)
    drafted = train(folder, tmp_path, Rollouts(recall, rows=5), chat=chat)
    called = train(folder, tmp_path, Rollouts("merged"), chat=chat, as_function=True)
    for logs in (drafted, called):
        assert rewards(logs) == pytest.approx(rewards(plain), abs=1e-6)
        assert [each["grad_norm"] for each in logs] == pytest.approx([each["grad_norm"] for each in plain], rel=1e-3)
        assert {*METRICS} <= logs[0].keys()
    assert all(each[METRICS[1]] == 1.0 for each in plain)
    assert len(plain) == STEPS and len({*rewards(plain)}) == STEPS


def test_rewards_have_the_distribution_of_trl_and_improve(folder: Path, tmp_path: Path) -> None:
    """Without learning, two means of 512 answers each; with it, both go up."""
    still = {"learning_rate": 0.0, "per_device_train_batch_size": 128, "max_steps": 4, "num_generations": 32}
    with_ours, with_theirs = (train(folder, tmp_path, each, **still) for each in (Rollouts("merged"), None))
    deviation = fmean(each["reward_std"] for each in with_theirs)  # of an answer's reward
    difference = fmean(rewards(with_ours)) - fmean(rewards(with_theirs))
    assert abs(difference) < 4 * deviation * (2 / 512) ** 0.5
    for rollouts in (Rollouts("merged"), None):
        learned = rewards(train(folder, tmp_path, rollouts, max_steps=16))
        assert fmean(learned[-4:]) > fmean(learned[:4]) + 0.05


def test_adapters_of_peft_and_another_trainer(folder: Path, tmp_path: Path) -> None:
    for settings in ({"peft": True}, {"kind": "RLOO"}):
        plain, drafted = (train(folder, tmp_path, each, **settings) for each in (Rollouts(None), Rollouts("merged")))
        assert rewards(drafted) == pytest.approx(rewards(plain), abs=1e-6)
        assert len({*rewards(plain)}) == STEPS


def test_online_dpo_is_the_same_training_with_and_without_drafts(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    from trl.experimental import online_dpo

    monkeypatch.setattr("trl.OnlineDPOConfig", online_dpo.OnlineDPOConfig, raising=False)
    monkeypatch.setattr("trl.OnlineDPOTrainer", online_dpo.OnlineDPOTrainer, raising=False)
    settings = {"per_device_train_batch_size": 4, "max_new_tokens": 12, "max_steps": 4, "temperature": 1.0}
    runs = [
        train(folder, tmp_path, each, kind="OnlineDPO", log="loss", **settings)
        for each in (Rollouts(None), Rollouts("merged"))
    ]
    for name in ("objective/scores", "grad_norm"):
        plain, drafted = ([each[name] for each in logs] for logs in runs)
        assert len({*plain}) == 4 and drafted == pytest.approx(plain, rel=1e-3)
