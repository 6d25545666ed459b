"""Drafts from logits that are NaN or infinite, as half precision may give them, and trees with much padding.

They change no text and end no request. What is no tree is refused, with the class of the proposer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import isfinite
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from decode import Engine, Proposer, Sampling, Step, Target, Tree, generate, stream
from decode.trees.accept import accept_lossily
from decode.trees.sampling import NO_TOKEN
from proposers import HEAD_PROPOSERS, DraftProposer, HydraProposer, MergedProposer
from proposers.sources import Continuation, Place, RecyclingSource, Source
from tests.support.drafting import Recorder, make_head, texts
from tests.support.models import tiny

PROMPTS = [[3, 4, 5, 6, 3, 4], [7, 8, 9]]
NAN, INFINITE = float("nan"), float("inf")
GREEDY, SAMPLED = Sampling(), Sampling(temperature=1.0, seed=1)


def spoil_some(logits: Tensor) -> Tensor:
    """NaN after about every third path."""
    is_bad = logits.sum(dim=-1, keepdim=True).mul(1e4).long() % 3 == 0
    return logits.masked_fill(is_bad, NAN)


SPOILED: dict[str, Callable[[Tensor], Tensor]] = {
    "all NaN": lambda logits: logits * NAN,
    "some NaN": spoil_some,
    "one infinite": lambda logits: logits.index_fill(-1, torch.tensor([5]), INFINITE),
}


def spoil_head(kind: str, target: Target, spoil: Callable[[Tensor], Tensor]) -> Any:
    head = make_head(kind, target)
    logits = head.logits
    head.logits = lambda *args: spoil(logits(*args))
    return head


def make_draft_model(spoil: Callable[[Tensor], Tensor]) -> Target:
    draft = Target(tiny("llama", seed=3))
    forward = draft.model.forward

    def spoiled(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        output.logits = spoil(output.logits)
        return output

    draft.model.forward = spoiled
    return draft


def decode(target: Target, proposer: Proposer | None, sampling: Sampling = GREEDY, nodes: int = 64) -> list[list[int]]:
    return texts(target, PROMPTS, proposer, sampling=sampling, max_new_tokens=12, nodes=nodes)


@pytest.mark.parametrize("settings", [{"nodes": 40}, {}], ids=str)
@pytest.mark.parametrize("spoil", SPOILED)
@pytest.mark.parametrize("kind", ["medusa", "hydra", "eagle", "dflash"])
def test_heads(kind: str, spoil: str, settings: dict[str, Any], target: Target) -> None:
    proposer = HEAD_PROPOSERS[kind](spoil_head(kind, target, SPOILED[spoil]), **settings)
    for sampling in (GREEDY, SAMPLED):
        assert decode(target, proposer, sampling) == decode(target, None, sampling)
    assert decode(target, MergedProposer(drafter=proposer, nodes=12)) == decode(target, None)


@pytest.mark.parametrize("spoil", SPOILED)
@pytest.mark.parametrize(
    "settings", [{"width": 1, "depth": 4, "nodes": 5}, {"width": 3, "depth": 3, "nodes": 10}], ids=str
)
def test_draft_models(settings: dict[str, Any], spoil: str, target: Target) -> None:
    proposer = DraftProposer(make_draft_model(SPOILED[spoil]), **settings)
    assert decode(target, proposer, SAMPLED) == decode(target, None, SAMPLED)


def test_no_sampled_draft_token_is_accepted(target: Target) -> None:
    """min(1, p / NaN) is 1 in Python: all would be."""
    recorder = Recorder(DraftProposer(make_draft_model(SPOILED["all NaN"]), sampled=True, depth=4, nodes=5))
    decode(target, recorder, SAMPLED)
    after_prefill = [accepted for step in recorder.accepted[1:] for accepted in step]
    assert len(after_prefill) > 15 and not any(after_prefill)


def test_the_draft_budget_survives(target: Target) -> None:
    """A head whose first draft was NaN drafts on, in trees of chosen sizes."""
    calls: list[None] = []
    head = spoil_head("hydra", target, lambda logits: calls.append(None) or logits * (NAN if len(calls) == 1 else 1))
    proposer = HydraProposer(head)
    decode(target, proposer, SAMPLED)
    assert isfinite(proposer.draft_budget.rate) and isfinite(proposer.draft_budget.acceptance_ratio)


class BadSource(Source):
    """Names a token after which the target's logits are NaN."""

    token = 90

    def continuations(self, state: Place) -> list[Continuation]:
        return [] if state.draft else [Continuation(self.token, 0.9)]


def test_rejected_nodes_with_nan_logits_teach_nothing() -> None:
    target = Target(tiny("llama"))
    forward = target.model.forward

    def spoiled(input_ids: Tensor, **kwargs: Any) -> Any:
        output = forward(input_ids=input_ids, **kwargs)
        after = input_ids[:, -output.logits.shape[1] :, None]
        return SimpleNamespace(logits=torch.where(after == BadSource.token, NAN, output.logits))

    plain = decode(target, None)
    target.model.forward = spoiled
    assert not any(BadSource.token in tokens for tokens in plain)
    assert decode(target, MergedProposer([BadSource(), RecyclingSource()], nodes=8)) == plain


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_typical_acceptance_refuses_nan(temperature: float) -> None:
    logits = torch.zeros(1, 3, 96)
    logits[0, 0] = NAN
    accepted = accept_lossily(Tree.chain([[3, 5, 6]]), logits, Sampling(temperature=temperature), {0: [3]})
    assert accepted.path == [[0]] and accepted.bonus == [NO_TOKEN]


class PaddedTrees:
    """Trees of two nodes, padded to more than the budget."""

    layers: Sequence[int] = ()

    def propose(self, step: Step, budget: int) -> Tree:
        rows = len(step.bonus)
        tokens, parents = torch.zeros(rows, budget + 3, dtype=torch.long), torch.full((rows, budget + 3), -1)
        tokens[:, 0], parents[:, 1] = torch.tensor(step.bonus), 0
        return Tree(tokens, parents, torch.full((rows,), 2), height=budget + 2)


class OnePath(Source):
    """Names one token after the root."""

    def __init__(self, token: int) -> None:
        self.token = token

    def continuations(self, state: Place) -> Sequence[Continuation]:
        return [] if state.draft else [Continuation(self.token, 0.9)]


@pytest.mark.parametrize("batch_size", [1, 2])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("accelerate", ["off", "packed"])
def test_a_draft_token_whose_states_overflow(accelerate: str, sampling: Sampling, batch_size: int) -> None:
    """Masks do not keep NaN from other nodes. Plain decoding never computes the token."""
    model = tiny("llama", dtype=torch.float32 if accelerate == "packed" else torch.float64)
    with torch.no_grad():
        model.get_input_embeddings().weight[90] = 1e30 if accelerate == "packed" else 1e200
    target = Target(model, accelerate=accelerate, deterministic=True)
    settings: dict[str, Any] = {"sampling": sampling, "max_new_tokens": 12, "batch_size": batch_size}
    expected = texts(target, PROMPTS, None, **settings)
    assert not any(90 in text for text in expected)
    drafted = Recorder(MergedProposer([OnePath(90), RecyclingSource()], nodes=8))
    assert texts(target, PROMPTS, drafted, **settings) == expected and max(tree.width for tree in drafted.trees) > 2


class OddPadding:
    """Rows of different sizes, padded with what is no token."""

    layers: Sequence[int] = ()

    def propose(self, step: Step, budget: int) -> Tree:
        tokens = torch.tensor([[root, *([5, -1] if row == 0 else [-1, -1])] for row, root in enumerate(step.bonus)])
        sizes = torch.tensor([2 if row == 0 else 1 for row in range(len(tokens))])
        parents = torch.where(torch.arange(3) < sizes[:, None], torch.arange(3) - 1, -1)
        return Tree(tokens, parents, sizes, height=1)


@pytest.mark.parametrize("accelerate", ["off", "packed"])
def test_padding_may_be_of_any_number(accelerate: str) -> None:
    target = Target(tiny("llama", dtype=torch.float32), accelerate=accelerate, deterministic=True)
    assert decode(target, OddPadding()) == decode(target, None)


def test_padding_beyond_the_budget_needs_no_noise(target: Target) -> None:
    sampling = Sampling(temperature=1.0, seed=1, processors=[lambda ids, scores: scores])  # type: ignore[list-item]
    assert decode(target, PaddedTrees(), sampling, nodes=3) == decode(target, None, sampling)


class Drafting:
    """Drafts what a function makes of a right tree."""

    layers: Any = ()

    def __init__(self, change: Callable[[Tree, Step], Any]) -> None:
        self.change = change

    def propose(self, step: Step, budget: int) -> Tree:
        made: Tree = self.change(Tree.chain([[root, 5] for root in step.bonus]), step)
        return made


def with_q(width: int, dtype: torch.dtype = torch.float32) -> Callable[[Tree, Step], Tree]:
    return lambda tree, _: replace(tree, q=torch.ones(2, 2, width, dtype=dtype))


RETURNED: dict[str, tuple[Callable[[Tree, Step], Any], str]] = {  # see also `test_invalid_trees_are_refused`
    "None": (lambda *_: None, "returned None; return a Tree with a row for each request"),
    "tokens": (lambda tree, _: tree.tokens, "returned a Tensor; return a Tree"),
    "too few rows": (lambda tree, _: tree.select([0]), "tokens [1, 2], parents [1, 2] and sizes [1]; for 2 rows"),
    "a row of tokens": (lambda tree, _: replace(tree, tokens=tree.tokens[0]), "tokens [2], parents [2, 2]"),
    "no column": (lambda tree, _: Tree.chain([[], []]), "tokens are torch.float32"),
    "fractions": (lambda tree, _: replace(tree, tokens=tree.tokens / 2), "tokens are torch.float32"),
    "short numbers": (lambda tree, _: replace(tree, parents=tree.parents.int()), "parents are torch.int32"),
    "sizes in a list": (lambda tree, _: replace(tree, sizes=[2, 2]), "sizes are a list"),
    "no height": (lambda tree, _: replace(tree, height=None), "a tree of height None"),
    "no memory": (lambda tree, _: tree.to(torch.device("meta")), "tensors on meta; all must be on the CPU"),
    "two devices": (lambda tree, _: replace(tree, sizes=tree.sizes.to("meta")), "tensors on cpu, meta"),
    "another vocabulary": (with_q(50), "q is [2, 2, 50] of torch.float32; for these tokens, it is [2, 2, 96]"),
    "counts": (with_q(96, torch.long), "q is [2, 2, 96] of torch.int64"),
    "too many nodes": (lambda tree, step: Tree.chain([[root] * 9 for root in step.bonus]), "trees of [9, 9] nodes"),
    "another root": (lambda tree, step: Tree.chain([[90], [91]]), "trees with the roots [90, 91]"),
}


@pytest.mark.parametrize("name", RETURNED)
def test_anything_but_a_tree_is_refused_with_the_class_of_the_proposer(target: Target, name: str) -> None:
    change, message = RETURNED[name]
    message = re.escape(message.removeprefix("returned "))
    with pytest.raises(ValueError, match=rf"Drafting\.propose returned .*{message}"):
        generate(target, PROMPTS, Drafting(change), max_new_tokens=5, nodes=4)


def test_an_error_in_propose_stays_as_it_is_and_gets_its_place(target: Target) -> None:
    with pytest.raises(KeyError, match="7") as caught:
        generate(target, PROMPTS, Drafting(lambda *_: {}[7]), max_new_tokens=5)
    (note,) = caught.value.__notes__
    assert re.fullmatch(r"raised in Drafting\.propose \(test_broken_drafts\.py, line \d+\)", note)


@pytest.fixture
def passless(monkeypatch: pytest.MonkeyPatch) -> Target:
    """A target that fails when it makes a pass."""
    target = Target(tiny("llama"))
    monkeypatch.setattr(target.model, "forward", lambda **inputs: pytest.fail("a pass was made"))
    return target


@pytest.mark.parametrize("layers", [None, 3, "last", ["2"], {1, 2}, [1.5], iter([1])])
def test_layers_that_are_no_list_of_numbers_are_refused(passless: Target, layers: Any) -> None:
    proposer = Drafting(lambda tree, _: tree)
    proposer.layers = layers
    with pytest.raises(TypeError, match=r"Drafting\.layers is .*; it is a list of numbers"):
        stream(passless, PROMPTS, proposer)
    with pytest.raises(TypeError, match=r"Drafting\.layers is "):
        Engine(passless, proposer)


def test_layers_that_the_target_does_not_have_are_refused(target: Target, passless: Target) -> None:
    proposer, last = Drafting(lambda tree, _: tree), target.config.num_hidden_layers
    for proposer.layers in ((0,), (last,), (-1,), (-last - 1,)):
        assert generate(target, PROMPTS, proposer, max_new_tokens=3)
    for layer in (last + 1, -last - 2):
        proposer.layers = (0, layer)
        with pytest.raises(ValueError, match=rf"Drafting\.layers has {layer}; .* are 0 to {last}"):
            generate(passless, PROMPTS, proposer, max_new_tokens=3)


@pytest.mark.parametrize("propose", [lambda step: None, lambda step, budget, more: None, 3])
def test_propose_with_other_parameters_is_refused(passless: Target, propose: Any) -> None:
    proposer = Drafting(lambda tree, _: tree)
    proposer.propose = propose  # type: ignore[method-assign]
    with pytest.raises(TypeError, match=r"Drafting\.propose is called with a step and a budget"):
        stream(passless, PROMPTS, proposer)
