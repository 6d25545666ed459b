"""A request whose logits are no numbers ends in an error. The others go on, with the same tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor

from decode import Proposer, Sampling, Target, generate, stream
from decode.hf.speculate import speculate
from proposers import DraftProposer, MedusaProposer, MergedProposer, NGramProposer
from tests.support.drafting import make_head
from tests.support.models import tiny

LAST = 40  # the first position without numbers
LONG = [(7 * place) % 90 + 3 for place in range(LAST - 9)]  # the answer gets there
PROMPTS = [[5, 9, 5, 9, 5], LONG, [7, 8, 9, 10], [3, 4], LONG[::-1], [11, 12, 13]]
FAILING = (1, 4)
SAMPLED = Sampling(temperature=0.9, seed=4)
SETTINGS: dict[str, Any] = {"max_new_tokens": 18, "stop_ids": []}


def make_target(spoilt: bool) -> Target:
    """gpt2 looks its positions up: those from `LAST` on are NaN, and so are keys and values."""
    target = Target(tiny("gpt2"))
    if spoilt:
        target.model.transformer.wpe.weight.data[LAST:] = torch.nan
    return target


def make_proposer(kind: str) -> Proposer | None:
    if "chain" in kind:
        return DraftProposer(Target(tiny("gpt2")), sampled="sampled" in kind, depth=4, nodes=5)
    if kind == "medusa":
        return MedusaProposer(make_head("medusa", Target(tiny("gpt2"))), nodes=12)
    return {"plain": None, "ngram": NGramProposer(length=4), "merged": MergedProposer(nodes=8)}[kind]


@pytest.mark.filterwarnings("ignore:request .* no token can be chosen:RuntimeWarning")
@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("batch_size", [2, 6])  # with refills in plain decoding
@pytest.mark.parametrize("kind", ["plain", "ngram", "merged", "sampled chain", "medusa"])
def test_the_others_go_on(kind: str, batch_size: int, sampling: Sampling) -> None:
    options = {**SETTINGS, "batch_size": batch_size, "sampling": sampling}
    expected = generate(make_target(False), PROMPTS, make_proposer(kind), **options)
    found = generate(make_target(True), PROMPTS, make_proposer(kind), **options)
    for request_id, (answer, whole) in enumerate(zip(found, expected, strict=True)):
        if request_id not in FAILING:
            assert answer.tokens == whole.tokens and (answer.finish, answer.error) == ("length", None)
            continue
        assert answer.finish == "error" and (answer.error or "").startswith(f"request {request_id}:")
        assert 0 < len(answer.tokens) < 18 and answer.tokens == whole.tokens[: len(answer.tokens)]


def test_the_last_chunk_says_so_and_generate_warns() -> None:
    target = make_target(True)
    chunks = [chunk for chunk in stream(target, PROMPTS, None, **SETTINGS) if chunk.request_id == 1]
    assert [chunk.finish for chunk in chunks[-2:]] == [None, "error"] and chunks[-1].tokens == []
    assert chunks[-1].answer is not None and chunks[-1].answer.tokens == [t for chunk in chunks for t in chunk.tokens]
    with pytest.warns(RuntimeWarning) as warned:
        generate(target, PROMPTS, None, **SETTINGS)
    assert [str(each.message)[:10] for each in warned] == ["request 1:", "request 4:"]


def test_transformers_generate_raises() -> None:
    model = make_target(True).model
    with pytest.raises(FloatingPointError, match="row 0: no token can be chosen"):
        model.generate(torch.tensor([LONG]), custom_generate=speculate, proposer=None, max_new_tokens=18)


class Scores(LogitsProcessor):
    """Sets the scores of texts of some length to a value: a grammar that allows nothing, a broken bias."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores if input_ids.shape[1] < 8 else torch.full_like(scores, self.value)


@pytest.mark.parametrize("value", [-torch.inf, torch.inf, torch.nan])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("kind", ["plain", "ngram", "sampled chain"])
def test_scores_that_allow_nothing(kind: str, temperature: float, value: float) -> None:
    sampling = Sampling(temperature=temperature, seed=1, processors=[Scores(value)])
    with pytest.warns(RuntimeWarning, match="a processor forbids every token"):
        (answer,) = generate(make_target(False), [[7, 8, 9]], make_proposer(kind), sampling=sampling, **SETTINGS)
    assert answer.finish == "error" and len(answer.tokens) == 5


def spoil_logits(target: Target, monkeypatch: pytest.MonkeyPatch, value: float) -> None:
    """Put a value among the last row's logits in the sixth forward pass, and when that is made without drafts."""
    forward, calls, widths = target.model.forward, [0], [0]

    def spoilt(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        if calls[0] == 5 or (calls[0] == 6 and widths[-1] > 1 == output.logits.shape[1]):
            output.logits[-1, 0, 17] = value
        widths.append(output.logits.shape[1])
        calls[0] += 1
        return output

    monkeypatch.setattr(target.model, "forward", spoilt)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("most", [8, 4096])  # how many tokens top-p sorts
@pytest.mark.parametrize("settings", [{}, {"temperature": 0.8, "top_p": 0.9}])
@pytest.mark.parametrize("kind", ["ngram", "lossy"])
def test_one_logit_that_is_no_number_ends_its_request(
    kind: str, settings: dict[str, float], most: int, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("decode.trees.sampling.TOP", most)
    target, prompts = make_target(False), [PROMPTS[0], PROMPTS[2]]
    options = {**SETTINGS, "sampling": Sampling(seed=2, **settings), "lossy_typical_acceptance": kind == "lossy"}
    proposer = None if kind == "lossy" else make_proposer(kind)
    expected = generate(target, prompts, proposer, **options)
    spoil_logits(target, monkeypatch, value)
    with pytest.warns(RuntimeWarning, match="request 1: no token can be chosen: the model's logits") as warned:
        first, second = generate(target, prompts, proposer, **options)
    assert len(warned) == 1 and str(warned[0].message) == second.error
    assert first.tokens == expected[0].tokens and first.finish == "length" and first.error is None
    assert second.finish == "error" and 5 <= len(second.tokens) < 18
    assert second.tokens == expected[1].tokens[: len(second.tokens)]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_forbidden_token_is_no_fault(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_target(False)
    spoil_logits(target, monkeypatch, -torch.inf)
    answers = generate(target, PROMPTS[:1], None, sampling=Sampling(temperature=temperature), **SETTINGS)
    assert [len(answer.tokens) for answer in answers] == [18]


def test_an_end_before_it_is_an_end() -> None:
    """The draft holds the end token, after which logits may be anything."""
    chunks = stream(make_target(True), [LONG], make_proposer("chain"), **{**SETTINGS, "stop_ids": range(96)})
    assert [chunk.finish for chunk in chunks] == ["eos"]
