"""Heads that follow their target: what a refresh gains, what it takes, and that no answer depends on it."""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from decode import Target, generate
from heads import save_head
from heads.checkpoint import load_head
from proposers import MergedProposer, load_proposer
from proposers.medusa import MedusaProposer
from proposers.options import find_proposer
from tests.support.drafting import make_head
from tests.support.models import USUAL_COSTS
from tests.training.test_rollouts import make_model, make_trainer, step
from training import refresh
from training.objectives import Objective
from training.refresh import GAIN, HeadRefresh
from training.rollouts import METRICS, Rollouts

PROMPTS = ["one one one", "two", "a b c d", "x y"]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call takes 100 units of time, and a step of training one: a refresh has ten steps."""
    set_clock(monkeypatch)


def set_clock(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("training.rollouts.perf_counter", partial(next, count(0, 100)))
    patch.setattr(refresh, "perf_counter", partial(next, count()))
    patch.setattr(refresh, "RATE", 0.02)  # these heads begin with random weights


def make_policy(dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    usual = {"do_sample": False, "max_new_tokens": 40, "eos_token_id": None}
    trainer = make_trainer(make_model(dtype), **usual | settings)
    trainer._metrics = {"train": defaultdict(list)}
    return trainer


def make_target_head(kind: str, trainer: Any) -> Any:
    """A random head for the trainer's model."""
    head = make_head(kind, Target(trainer.model.eval()))
    trainer.model.train()
    return head


def change(trainer: Any, by: int = 7) -> None:
    """Let other tokens follow."""
    with torch.no_grad():
        trainer.model.lm_head.weight.copy_(trainer.model.lm_head.weight.roll(by, 0))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a head that was trained for the policy."""
    trainer, folder = make_policy(), tmp_path_factory.mktemp("head")
    with pytest.MonkeyPatch.context() as patch:
        set_clock(patch)
        rollouts = Rollouts(MedusaProposer(make_target_head("medusa", trainer), nodes=6), accelerate="off", refresh=1)
        for _ in range(4):
            rollouts(PROMPTS, trainer)
    assert rollouts._head_refresh is not None and rollouts.metrics[GAIN] > 1.5
    save_head(rollouts._head_refresh._head, folder)
    return folder


@pytest.mark.parametrize("accelerate", ["off", "packed"])
def test_a_refreshed_head_drafts_for_the_changed_model(accelerate: str, trained: Path, clock: None) -> None:
    """Its tau falls when the model changes, and stays there without a refresh."""
    trainer, taus = make_policy(), []
    load = partial(load_proposer, trained, nodes=6)
    refreshed, stale = (Rollouts(load, accelerate=accelerate, refresh=every) for every in (1, None))
    for number in range(4):
        expected = stale(PROMPTS, trainer)
        assert refreshed(PROMPTS, trainer)["completion_ids"] == expected["completion_ids"]
        taus.append((refreshed.metrics[METRICS[1]], stale.metrics[METRICS[1]]))
        if number == 0:
            change(trainer)
    before, fallen, _, after = taus
    assert before[0] == before[1] > 1.3 * fallen[1], "the change has an effect"
    assert after[0] > 1.3 * after[1]
    gains = trainer._metrics["train"][GAIN]
    assert len(gains) == 4 and gains[0] == 1 and gains[3] > 1.3


@pytest.mark.parametrize("kind", ["hydra", "eagle3", "peagle"])
def test_answers_do_not_depend_on_refreshes(kind: str, clock: None) -> None:
    """Sampled ones, with a head among other sources, while the model is trained. Nor do the trainer's random numbers,
    and the user's head stays as it is."""
    trainer = make_policy(torch.float64, do_sample=True, temperature=0.7, max_new_tokens=8)
    head = make_target_head(kind, trainer)
    before = {name: each.clone() for name, each in head.state_dict().items()}
    proposer = MergedProposer(drafter=find_proposer(kind)(head), nodes=16)
    rollouts, plain = Rollouts(proposer, accelerate="off", refresh=2), Rollouts(None, accelerate="off")
    for number in range(3):
        state = torch.get_rng_state()
        found = rollouts(PROMPTS, trainer)
        assert torch.equal(torch.get_rng_state(), state)
        assert found["completion_ids"] == plain(PROMPTS, trainer)["completion_ids"]
        assert (GAIN in rollouts.metrics) == (number == 1)
        step(trainer)
    drafter: Any = proposer.drafter
    after = drafter.head.state_dict()
    assert after.keys() == before.keys() and any(not torch.equal(after[name], before[name]) for name in before)
    assert all(torch.equal(head.state_dict()[name], each) for name, each in before.items())


def test_a_packed_head_is_packed_again(tmp_path: Path, clock: None) -> None:
    """An EAGLE head's pass, too; its tensors are those of the trained head, up to 8 bits."""
    trainer = make_policy(max_new_tokens=8)
    save_head(make_target_head("eagle", trainer), tmp_path)
    rollouts = Rollouts(partial(load_proposer, tmp_path, nodes=8), accelerate="packed", refresh=1)
    for _ in range(2):
        plain = Rollouts(None, accelerate="packed")(PROMPTS, trainer)
        assert rollouts(PROMPTS, trainer)["completion_ids"] == plain["completion_ids"]
        step(trainer)
    assert rollouts._engine is not None and rollouts._head_refresh is not None
    drafter: Any = rollouts._engine.proposer
    trained = rollouts._head_refresh._head
    assert drafter.head.outputs and drafter.fast_pass.head is drafter.head is not trained
    states = torch.randn(3, drafter.head.hidden_size)
    trained.borrow(rollouts._engine.target.output_matrix)
    with torch.no_grad():
        found, expected = drafter.head.logits(states), trained.logits(states)
    assert torch.allclose(found, expected, atol=0.02 * float(expected.abs().max()))
    rest = dict(drafter.head.named_parameters())
    assert rest and all(torch.equal(each, trained.get_parameter(name)) for name, each in rest.items())


def make_answers(number: int) -> list[Any]:
    return [SimpleNamespace(prompt=[5, 6, 7], tokens=[8, 9, number, 11])]


def test_refreshes_keep_to_their_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes one step at least, and what that is too much is missing later."""
    trainer, now, steps = make_policy(), [0.0], []

    def train(*_: Any) -> None:
        now[0] += 7.0
        steps[-1] += 1

    monkeypatch.setattr(refresh, "perf_counter", lambda: now[0])
    monkeypatch.setattr(HeadRefresh, "_step", train)
    head = make_target_head("medusa", trainer)
    target = Target(trainer.model.eval())
    for every, seconds, expected in ((1, 35.0, [1, 0, 1, 0, 1, 0]), (3, 100.0, [0, 0, 5, 0, 0, 4]), (1, 0.0, [0])):
        followed = HeadRefresh(MedusaProposer(head), target, every)
        steps.clear()
        for number, wanted in enumerate(expected):
            steps.append(0)
            gain = followed.follow(make_answers(number), seconds)
            assert steps[-1] == wanted and (GAIN in gain) == (wanted > 0)
        total = refresh.SHARE * seconds * len(expected)
        assert sum(steps) * 7 <= total + 7
    assert followed.follow([SimpleNamespace(prompt=[5], tokens=[6])], 1000.0) == {}, "nothing can be drafted in it"


def test_an_error_leaves_the_drafting_head_as_it_was(
    trained: Path, clock: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_policy()
    rollouts = Rollouts(partial(load_proposer, trained, nodes=6), refresh=1)
    rollouts(PROMPTS, trainer)
    assert rollouts._engine is not None
    drafter: Any = rollouts._engine.proposer
    head, memory = drafter.head, Mock(side_effect=torch.OutOfMemoryError("no memory"))
    step(trainer)
    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr(torch.optim.AdamW, "step", memory)
        rollouts(PROMPTS, trainer)
    assert drafter.head is head and trainer.model.training
    trainer.state.global_step += 1
    assert rollouts(PROMPTS, trainer)["completion_ids"] == Rollouts(None)(PROMPTS, trainer)["completion_ids"]


def test_what_cannot_be_refreshed_is_refused(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_policy()
    for proposer in (None, "merged", "ngram"):
        with pytest.raises(ValueError, match=r"refresh trains the head of a proposer, and this one has none; leave"):
            Rollouts(proposer, refresh=1)(PROMPTS, trainer)
    with pytest.raises(ValueError, match="refresh is 0; it must be at least 1"):
        Rollouts(refresh=0)
    with pytest.raises(TypeError, match="refresh is True; it must be a whole number"):
        Rollouts(refresh=True)

    def prepare(target: Target) -> MedusaProposer:
        return MedusaProposer(load_head(trained, torch.float32)).prepare(target)

    with pytest.raises(ValueError, match="this head is packed, so it cannot be trained; load it with load_proposer"):
        Rollouts(prepare, refresh=1)(PROMPTS, trainer)
    monkeypatch.setattr(Objective, "__init__", Mock(side_effect=ValueError("cannot be trained here")))
    with pytest.raises(ValueError, match="cannot be trained here"):
        Rollouts(str(trained), refresh=1)(PROMPTS, trainer)


@pytest.mark.parametrize("is_merged", [False, True])
def test_a_head_is_left_out_while_it_does_not_pay(
    is_merged: bool, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone and among other sources."""
    trainer, drafts = make_policy(), []
    target = Target(trainer.model.eval(), deterministic=USUAL_COSTS)
    drafter = MedusaProposer(load_head(trained, torch.float32))
    start = drafter.start_drafter
    monkeypatch.setattr(drafter, "start_drafter", lambda *given: drafts.append(1) or start(*given))
    proposer = MergedProposer(drafter=drafter) if is_merged else drafter
    prompts, shares = trainer.processing_class(PROMPTS)["input_ids"], []  # of the steps, that the head drafts in
    for moved in (0, 7, -7):
        change(trainer, moved)
        target.weights_changed()
        for _ in range(3):
            drafts.clear()
            answers = generate(target, prompts, proposer, max_new_tokens=40, stop_ids=[])
        shares.append(len(drafts) / max(each.stats.steps for each in answers))
    assert shares[0] > 0.8 and shares[1] < 0.3 and shares[2] > 0.8
