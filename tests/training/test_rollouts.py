"""Rollouts: a trainer's model answers while its weights change."""

from __future__ import annotations

from collections import Counter
from copy import deepcopy
from itertools import cycle, islice
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from decode import Sampling, Target, generate
from proposers import AnswerStore, MergedProposer, NGramProposer
from proposers.medusa import MedusaProposer
from tests.support.drafting import make_head
from tests.support.models import USUAL_COSTS, tiny
from tests.support.tokenizers import byte_level
from training.data import Example
from training.factory import make_objective
from training.feature_cache import BatchLoader
from training.rollouts import METRICS, Rollouts
from training.teacher import Teacher
from training.trainer import plan_batches

PROMPTS = ["one one one", "two", "one one one", "two"]


def make_trainer(model: PreTrainedModel, **settings: Any) -> Any:
    """What rollouts read of a trainer of TRL."""
    usual = {"do_sample": True, "max_new_tokens": 12, "pad_token_id": 0, "eos_token_id": 7, "top_k": 0}
    return SimpleNamespace(
        model=model,
        processing_class=byte_level(),
        generation_config=GenerationConfig(**usual | settings),
        args=SimpleNamespace(seed=3),
        state=SimpleNamespace(global_step=0),
        accelerator=SimpleNamespace(process_index=0),
        _metrics={"train": {name: [] for name in METRICS}, "eval": {}},
    )


def make_model(dtype: torch.dtype = torch.float64, **sizes: Any) -> Any:
    return tiny("llama", dtype=dtype, vocab_size=300, **sizes).train()


def step(trainer: Any) -> None:
    """Train the model a little."""
    model = trainer.model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    inputs = torch.arange(20)[None] + trainer.state.global_step
    model(inputs, labels=inputs).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    trainer.state.global_step += 1


def score(model: PreTrainedModel, prompt: list[int], answer: list[int], temperature: float) -> Tensor:
    """The log-probabilities of an answer as trainers compute them."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(-1, torch.tensor(answer)[:, None])[:, 0]


@pytest.mark.parametrize("accelerate", ["off", "auto"])
def test_answers_follow_the_weights_and_never_depend_on_drafts(accelerate: str) -> None:
    """A living proposer, a plain one and a deep copy with nothing kept answer alike after each step."""
    dtype = torch.float64 if accelerate == "off" else torch.float32
    trainer = make_trainer(make_model(dtype), temperature=0.7)
    drafted, plain = Rollouts(NGramProposer(length=3), rows=3, accelerate=accelerate), Rollouts(None, rows=2)
    seen = set[str]()
    for _ in range(3):
        found, expected = drafted(PROMPTS, trainer), plain(PROMPTS, trainer)
        assert found["prompt_ids"] == expected["prompt_ids"] == trainer.processing_class(PROMPTS)["input_ids"]
        assert found["completion_ids"] == expected["completion_ids"]
        assert found["completion_ids"][0] != found["completion_ids"][2], "answers to the same prompt share their noise"
        fresh = Rollouts(None)
        copy = make_trainer(deepcopy(trainer.model), temperature=0.7)
        copy.state.global_step = trainer.state.global_step
        assert fresh(PROMPTS, copy)["completion_ids"] == found["completion_ids"]
        for prompt, answer, told in zip(*map(found.get, ("prompt_ids", "completion_ids", "logprobs")), strict=True):
            expected_scores = score(trainer.model, prompt, answer, 0.7)
            assert torch.allclose(torch.tensor(told).double(), expected_scores.double(), atol=1e-5)
            assert len(answer) == 12 or answer[-1] == 7
        assert all(each.training for each in trainer.model.modules())
        seen.add(repr(found["completion_ids"]))
        step(trainer)
    assert len(seen) == 3
    assert [*drafted.metrics] == [*METRICS] == [*trainer._metrics["train"]]
    assert drafted.metrics[METRICS[1]] >= 1 and plain.metrics[METRICS[0]] == 0


def test_the_same_step_has_the_same_answers_and_calls_in_it_have_others() -> None:
    trainer = make_trainer(make_model())
    first = Rollouts("merged")
    one, two = first(PROMPTS, trainer), first(PROMPTS, trainer)
    again = Rollouts(None)
    assert again(PROMPTS, trainer)["completion_ids"] == one["completion_ids"] != two["completion_ids"]
    assert again(PROMPTS, trainer)["completion_ids"] == two["completion_ids"]
    trainer.accelerator.process_index = 1
    assert Rollouts(None)(PROMPTS, trainer)["completion_ids"] != one["completion_ids"]


def test_the_distribution_is_that_of_the_weights_at_each_step() -> None:
    """Exact probabilities of all texts of two tokens, with drafts, while the weights change: chi-square."""
    model = tiny("llama", vocab_size=6, num_hidden_layers=1).train()
    trainer = make_trainer(model, max_new_tokens=2, eos_token_id=None, top_k=3)
    rollouts, prompt, statistic, cells = Rollouts(MergedProposer(nodes=8), rows=64, accelerate="off"), [1, 2, 4], 0.0, 0
    for _ in range(4):
        answers = rollouts.answer([prompt] * 600, trainer, trainer.generation_config)
        counts = Counter(tuple(answer.tokens) for answer in answers)
        with torch.no_grad():
            logits = trainer.model(torch.tensor([prompt])).logits[0, -1]
            first = keep_best(logits, 3)
            after = {
                token: keep_best(trainer.model(torch.tensor([[*prompt, token]])).logits[0, -1], 3) for token in first
            }
        expected = {(a, b): 600 * p * after[a][b] for a, p in first.items() for b in after[a]}
        assert counts.keys() <= expected.keys()
        for text, mean in expected.items():
            statistic += (counts[text] - mean) ** 2 / mean
        cells += len(expected) - 1
        with torch.no_grad():
            model.lm_head.weight.copy_(model.lm_head.weight.roll(1, 0))
        trainer.state.global_step += 1
    assert cells == 32 and statistic < 32 + 4 * (2 * 32) ** 0.5


def keep_best(logits: Tensor, count: int) -> dict[int, float]:
    """The probabilities of the most likely tokens alone."""
    best = logits.topk(count)
    return dict(zip(best.indices.tolist(), best.values.softmax(-1).tolist(), strict=True))


def test_attached_rollouts_take_the_place_of_generate() -> None:
    trainer = make_trainer(make_model(), temperature=0.7)
    rollouts = Rollouts("merged")
    expected = Rollouts(None)(PROMPTS, trainer)
    rollouts.attach(trainer)
    longest = max(map(len, expected["prompt_ids"]))
    ids = torch.tensor([[0] * (longest - len(each)) + each for each in expected["prompt_ids"]])
    mask = torch.tensor([[0] * (longest - len(each)) + [1] * len(each) for each in expected["prompt_ids"]])
    found = trainer.model.generate(input_ids=ids, attention_mask=mask, generation_config=trainer.generation_config)
    width = max(map(len, expected["completion_ids"]))
    assert found.tolist() == [
        [*row.tolist(), *answer, *[0] * (width - len(answer))]
        for row, answer in zip(ids, expected["completion_ids"], strict=True)
    ]
    with pytest.raises(ValueError, match=r"cannot honour pixel_values; leave it out"):
        trainer.model.generate(input_ids=ids, pixel_values=ids)
    del trainer.model.generate
    assert trainer.model.eval().generate(ids[:1], max_new_tokens=2).shape == (1, longest + 2)


def test_a_wrapped_forward_and_the_mode_of_each_module_come_back() -> None:
    """accelerate replaces a model's `forward` by one with autocast, which runs no copy of the model."""
    trainer = make_trainer(make_model())
    model = trainer.model
    expected = Rollouts(None)(PROMPTS, trainer)["completion_ids"]
    model.model.norm.eval()
    wrapped = model.forward = lambda *args, **kwargs: pytest.fail("the wrapper ran")
    for accelerate in ("off", "auto"):
        assert Rollouts("merged", accelerate=accelerate)(PROMPTS, trainer)["completion_ids"] == expected
        assert model.forward is wrapped and model.training and not model.model.norm.training


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"num_beams": 4}, r"cannot honour num_beams=4 of the generation config; leave it out"),
        ({"min_new_tokens": 3}, r"cannot honour min_new_tokens=3"),
        ({"max_new_tokens": None, "max_length": 50}, r"need max_new_tokens in the generation config; max_length"),
        ({"temperature": -1.0}, r"temperature is -1.0"),
    ],
)
def test_settings_that_cannot_be_honoured_are_refused(settings: dict[str, Any], error: str) -> None:
    trainer = make_trainer(make_model())
    trainer.generation_config.update(**settings)
    trainer.model.generation_config.update(max_new_tokens=None)
    with pytest.raises(ValueError, match=error):
        Rollouts(None)(PROMPTS, trainer)
    assert trainer.model.training


def test_penalties_and_greedy_decoding_are_those_of_generate() -> None:
    trainer = make_trainer(make_model(), do_sample=False, repetition_penalty=1.3)
    found = Rollouts("merged")(PROMPTS[:1], trainer)["completion_ids"]
    ids = torch.tensor(trainer.processing_class(PROMPTS[:1])["input_ids"])
    expected = trainer.model.eval().generate(ids, generation_config=trainer.generation_config)
    assert found == [expected[0, ids.shape[1] :].tolist()]


def test_a_prompt_with_an_image_is_refused() -> None:
    image = [{"role": "user", "content": [{"type": "image", "image": None}]}]
    with pytest.raises(ValueError, match=r"a prompt has a part of type image; rollouts take text alone"):
        Rollouts(None)([image], make_trainer(make_model()))


def test_another_model_and_another_form_get_a_target_of_their_own() -> None:
    trainer = make_trainer(make_model())
    rollouts = Rollouts("merged")
    rollouts(PROMPTS, trainer)
    for change in (lambda: trainer.model.float(), lambda: setattr(trainer, "model", make_model(seed=5))):
        change()
        trainer.state.global_step += 1  # with a seed of its own
        assert rollouts(PROMPTS, trainer)["completion_ids"] == Rollouts(None)(PROMPTS, trainer)["completion_ids"]


def test_a_store_by_prompt_drafts_earlier_answers_from_their_first_token_on() -> None:
    target = Target(make_model().eval())
    store = AnswerStore(by_prompt=True)
    proposer = MergedProposer([], store=store, nodes=16)
    settings: dict[str, Any] = {"max_new_tokens": 24, "stop_ids": [], "sampling": Sampling(0.5, seed=1)}
    prompts = [[*b"a first prompt"], [*b"and another one"]]
    first = generate(target, prompts, proposer, **settings)
    proposer.keep_answers()
    again = generate(target, prompts, proposer, **settings)
    assert [each.tokens for each in again] == [each.tokens for each in first]
    assert all(each.stats.steps <= 4 for each in again), "15 draft tokens at a time are right"
    ends = [store.find(prompt, store.key_of(prompt)) for prompt in prompts]
    assert [[copy.token for copy in each][:1] for each in ends] == [[each.tokens[0]] for each in first]
    assert not store.find(prompts[0], store.key_of(prompts[1])) and not store.find(prompts[0])
    with pytest.raises(ValueError, match="keeps no prompts"):
        store.save("answers")


def test_the_models_own_settings_stand_in_for_none() -> None:
    trainer = make_trainer(make_model(), do_sample=True)
    trainer.generation_config.top_k = None
    trainer.model.generation_config.top_k = 1
    (sampled,) = Rollouts(None)(PROMPTS[:1], trainer)["completion_ids"]
    trainer.generation_config.do_sample, trainer.generation_config.top_k = False, 50
    assert Rollouts(None)(PROMPTS[:1], trainer)["completion_ids"] == [sampled], "top-k of 1 is greedy decoding"
    trainer.model.generation_config.no_repeat_ngram_size = 2
    with pytest.raises(ValueError, match="cannot honour no_repeat_ngram_size=2"):
        Rollouts(None)(PROMPTS[:1], trainer)


@pytest.mark.parametrize("name", ["use_vllm", "use_transformers_continuous_batching"])
def test_trainers_that_generate_in_another_way_are_refused(name: str) -> None:
    trainer = make_trainer(make_model())
    setattr(trainer, name, True)
    with pytest.raises(ValueError, match=f"with {name}, the trainer does not call generate"):
        Rollouts(None).attach(trainer)


def test_an_interrupt_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of packing, and of a step: the next call answers with the weights as they are."""
    trainer = make_trainer(make_model(torch.float32))
    rollouts = Rollouts("merged", accelerate="packed")
    rollouts(PROMPTS, trainer)
    for place in ("decode.cpu.packed_linear._pack", "decode.loop.find_log_probs"):
        step(trainer)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(place, Mock(side_effect=KeyboardInterrupt))
            rollouts(PROMPTS, trainer)
        assert all(each.training for each in trainer.model.modules())
        trainer.state.global_step += 1
        assert rollouts(PROMPTS, trainer)["completion_ids"] == Rollouts(None)(PROMPTS, trainer)["completion_ids"]


def train_medusa(target: Target, prompts: list[list[int]]) -> Any:
    """A head that drafts what this target says now."""
    head, examples = make_head("medusa", target), []
    for answer in generate(target, prompts, None, max_new_tokens=40, stop_ids=[]):
        examples.append(Example((*answer.prompt, *answer.tokens), ((len(answer.prompt), 40 + len(answer.prompt)),)))
    objective = make_objective(head, target).float()
    load, plan = BatchLoader(examples, Teacher(target, head.features)), plan_batches([50] * 4, 256, 0, 0)
    optimizer = torch.optim.AdamW(head.parameters(), lr=0.02)
    for batch in map(load, islice(cycle(plan), 40)):
        optimizer.zero_grad()
        (objective(batch).total / batch.answers.sum()).backward()
        optimizer.step()
    return head


@pytest.mark.parametrize("is_merged", [False, True])
def test_a_head_is_left_out_while_it_does_not_pay(is_merged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone and among other sources."""
    model, drafts = make_model(torch.float32).eval(), []
    target = Target(model, deterministic=USUAL_COSTS)
    prompts = byte_level()(["one one one", "two", "a b c d", "x y"])["input_ids"]
    drafter = MedusaProposer(train_medusa(target, prompts))
    start = drafter.start_drafter
    monkeypatch.setattr(drafter, "start_drafter", lambda *given: drafts.append(1) or start(*given))
    proposer = MergedProposer(drafter=drafter) if is_merged else drafter
    shares = []  # of the steps, that the head drafts in
    for moved in (0, 7, -7):  # other tokens follow, and then the same again
        model.lm_head.weight.data = model.lm_head.weight.roll(moved, 0)
        target.weights_changed()
        for _ in range(3):
            drafts.clear()
            answers = generate(target, prompts, proposer, max_new_tokens=40, stop_ids=[])
        shares.append(len(drafts) / max(each.stats.steps for each in answers))
    assert shares[0] > 0.8 and shares[1] < 0.3 and shares[2] > 0.8
