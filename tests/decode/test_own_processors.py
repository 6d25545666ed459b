"""Each request has its own logits processors and criteria, with their own state."""

from __future__ import annotations

from threading import Lock
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor, StoppingCriteria, SynthIDTextWatermarkLogitsProcessor

import decode
from decode import Answer, Proposer, Sampling, Target
from decode.trees.processors import AnswerProcessor, copy_own, copy_processor
from proposers import DraftProposer, NGramProposer
from tests.support.enumeration import compare_third_tokens
from tests.support.models import VOCABULARY, tiny
from tests.support.speculating import BATCH, MAKERS, MASK, generate, make_tokenizer

PROMPTS = [[5, 9, 5, 9, 5], [7, 8, 9], [20, 21, 20, 21]]


NAMES = ["none", "ngram", "draft tree", "sampled"]


class Automaton(LogitsProcessor):
    """Advances with each call, and fails unless it is called with one more token that it allowed."""

    def __init__(self) -> None:
        self.state, self.allowed, self.text = 1, [True] * VOCABULARY, [0]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        *before, token = input_ids[0].tolist()
        assert len(self.text) == 1 or before == self.text
        assert self.allowed[token]
        self.text = [*before, token]
        self.state = (self.state * 7 + token) % 11
        self.allowed = [(each + self.state) % 4 != 0 for each in range(VOCABULARY)]
        return scores.masked_fill(~torch.tensor(self.allowed), -torch.inf)


class Locked(Automaton):
    """It cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = Lock()


def answer(target: Target, prompts: list, proposer: Proposer | None, processors: Any, **settings: Any) -> list:
    """The answers' tokens."""
    temperature = settings.pop("temperature", 0.0)
    sampling = Sampling(temperature, processors=processors, seed=3)
    settings = {"max_new_tokens": 10, "stop_ids": (), **settings}
    return [each.tokens for each in decode.generate(target, prompts, proposer, sampling=sampling, **settings)]


@pytest.mark.parametrize("way", ["copied", "made"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_request_has_its_own_state(target: Target, way: str, name: str, temperature: float) -> None:
    """Also where sampled draft tokens are tried and rejected: the automaton never sees them."""
    settings: dict[str, Any] = {"temperature": temperature}
    expected = [
        answer(target, [prompt], None, [Automaton()], request_ids=[row], **settings)[0]
        for row, prompt in enumerate(PROMPTS)
    ]
    made: list[int] = []

    def make(request_id: int) -> list[LogitsProcessor]:
        made.append(request_id)
        return [Locked()]

    for batch_size, order in ((3, [0, 1, 2]), (2, [2, 0, 1])):
        prompts = [PROMPTS[row] for row in order]
        settings |= {"batch_size": batch_size, "request_ids": order}
        answers = answer(target, prompts, MAKERS[name](target), [Automaton()] if way == "copied" else make, **settings)
        assert name == "sampled" or answers == [expected[row] for row in order]
        for prompt, tokens in zip(prompts, answers, strict=True):
            automaton = Automaton()
            for place in range(len(tokens)):
                automaton(torch.tensor([prompt + tokens[:place]]), torch.zeros(1, VOCABULARY))
                assert automaton.allowed[tokens[place]]
    if (name, way, temperature) == ("sampled", "made", 1.0):
        assert len(made) > 6  # drafts were rejected


@pytest.mark.slow
def test_the_distribution_is_kept_with_state() -> None:
    small, prompts = Target(tiny("llama", vocab_size=12)), [[1, 2, 3]] * 1500
    draft = Target(tiny("llama", vocab_size=12, num_hidden_layers=1))

    class Turns(LogitsProcessor):
        state = 0

        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            self.state += int(input_ids[0, -1])
            return 0.3 * scores + torch.sin(torch.arange(12.0) * self.state)

    def sample(proposer: Proposer | None, seed: int) -> list[Answer]:
        sampling = Sampling(1.0, processors=[Turns()], seed=seed)
        return decode.generate(small, prompts, proposer, sampling=sampling, max_new_tokens=4, stop_ids=())

    plain, drawn = sample(None, 1), sample(DraftProposer(draft, depth=3, sampled=True, nodes=4), 2)
    assert compare_third_tokens(plain, drawn) < 33  # 11 degrees of freedom, p = 0.0005


def test_an_error_after_a_rejected_draft_token_ends_no_answer() -> None:
    def refuse(input_ids: Tensor, scores: Tensor) -> Tensor:
        if 3 in input_ids[0]:
            raise LookupError("3")
        return scores

    processor = AnswerProcessor([refuse], lambda: [refuse], 2, frozenset(), 9)  # type: ignore[list-item]
    for answer, error in (([], None), ([3], "3"), ([4], None), ([3, 5], "3"), ([4, 5], None), ([4, 5, 3], "3")):
        scores = processor(torch.tensor([[1, 2, *answer]]), torch.zeros(1, 8))
        found = processor.find_error(answer)
        assert bool(scores.isnan().any()) == (error is not None) and (found and str(found)) == error


def test_a_single_request_has_the_users_own_object(target: Target) -> None:
    """It may be one that cannot be copied. Several requests need one that can."""
    for automaton in (Automaton(), Locked()):
        tokens = answer(target, PROMPTS[:1], NGramProposer(), [automaton])[0]
        assert automaton.text == [*PROMPTS[0], *tokens[:-1]]
    for prompts, name in ((PROMPTS, "ngram"), (PROMPTS[:1], "sampled")):
        with pytest.raises(ValueError, match=r"Locked may keep state.*lambda"):
            answer(target, prompts, MAKERS[name](target), [Locked()])


def test_a_watermark_with_state_is_not_disturbed_by_drafts(target: Target) -> None:
    def mark() -> list[LogitsProcessor]:
        return [SynthIDTextWatermarkLogitsProcessor(3, [1, 2, 3], 64, 50, 7, torch.device("cpu"))]

    plain = answer(target, PROMPTS[:1], None, mark(), temperature=1.0)
    assert answer(target, PROMPTS[:1], DraftProposer(target, depth=3, nodes=4), mark(), temperature=1.0) == plain


@pytest.mark.parametrize(
    ("processors", "message"),
    [
        (Automaton(), r"processors is .*\(Automaton\); it must be a list"),
        ([lambda ids, scores: scores.expand(3, -1)], r"function returned scores of shape \[3, 96\].*\[1, 96\]"),
        (lambda request_id: Automaton(), "returned Automaton; it must return a list"),
    ],
)
def test_other_processors_are_refused(target: Target, processors: Any, message: str) -> None:
    """Before any work, or where they are called: then their request ends."""
    if isinstance(processors, Automaton):
        with pytest.raises(ValueError, match=message):
            answer(target, PROMPTS, None, processors)
        return
    with pytest.warns(RuntimeWarning, match=rf"request 0: \w+Error: .*{message}"):
        assert answer(target, PROMPTS, None, processors) == [[], [], []]


# Inside transformers' own `generate`


class Bias(LogitsProcessor):
    """Something for each row of the batch, and a state that is filled in place."""

    def __init__(self, how: str) -> None:
        self.how, self.calls = how, torch.zeros(1)
        self.bias = torch.randn(3, VOCABULARY, generator=torch.Generator().manual_seed(1)).double() * 9
        self.words = [torch.tensor([7 * row, 7 * row + 1]) for row in range(3)]
        self.table = {row: float(row + 1) for row in range(3)}
        if how == "weighted":  # otherwise it would not be clear whose they are
            self.weights = torch.arange(1.0, 4)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        if self.how == "state":
            return scores.roll(int(self.calls) % 5, dims=1)
        if self.how == "added":
            return scores + self.bias
        if self.how == "weighted":
            return scores * self.weights[:, None] + torch.sin(torch.arange(VOCABULARY))
        for row in range(len(input_ids)):
            if self.how == "loop":
                scores[row] += self.bias[row]
            elif self.how == "words":
                scores[row, self.words[row]] += 30
            else:
                scores[row, 3 * int(self.table[row])] += 30
        return scores


@pytest.mark.parametrize("how", ["state", "added", "weighted", "loop", "words", "table"])
@pytest.mark.parametrize("name", NAMES)
def test_rows_have_their_own_row_of_a_processor(target: Target, how: str, name: str) -> None:
    settings = {"attention_mask": MASK, "max_new_tokens": 9}
    expected = target.model.generate(BATCH, logits_processor=[Bias(how)], **settings)
    got = generate(target.model, BATCH, MAKERS[name](target), logits_processor=[Bias(how)], **settings)
    assert got.tolist() == expected.tolist()


def test_a_single_row_has_the_users_own_processor(target: Target) -> None:
    for scores in (False, True):
        ours, theirs = Bias("state"), Bias("state")
        settings = {"max_new_tokens": 12, "output_scores": scores, "return_dict_in_generate": True}
        got = generate(target.model, BATCH[1:2], NGramProposer(), logits_processor=[ours], **settings)
        expected = target.model.generate(BATCH[1:2], logits_processor=[theirs], **settings)
        assert got.sequences.tolist() == expected.sequences.tolist()
        assert ours.calls == theirs.calls == 12
        assert not scores or torch.allclose(torch.stack(got.scores), torch.stack(expected.scores))


class Length(StoppingCriteria):
    """Ends rows at their own lengths."""

    def __init__(self, how: str) -> None:
        self.how, self.calls = how, 0
        limits = torch.tensor([10, 14, 12])
        self.limits: Any = limits if how == "tensor" else [*limits]

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if self.how == "calls":
            return torch.full((len(input_ids),), self.calls == 5)
        if self.how == "tensor":
            return input_ids.shape[1] >= self.limits
        return torch.tensor([input_ids.shape[1] >= self.limits[row] for row in range(len(input_ids))])


@pytest.mark.parametrize("how", ["calls", "tensor", "loop"])
@pytest.mark.parametrize("name", NAMES)
def test_rows_have_their_own_row_of_a_criterion(target: Target, how: str, name: str) -> None:
    settings = {"attention_mask": MASK, "max_new_tokens": 9, "pad_token_id": 0, "eos_token_id": 3}
    expected = target.model.generate(BATCH, stopping_criteria=[Length(how)], **settings)
    got = generate(target.model, BATCH, MAKERS[name](target), stopping_criteria=[Length(how)], **settings)
    assert got.tolist() == expected.tolist()


class Wrong(LogitsProcessor):
    def __init__(self, rows: int = 1, **attributes: Any) -> None:
        vars(self).update(attributes, rows=rows)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.expand(self.rows, -1)


@pytest.mark.parametrize(
    ("processor", "message"),
    [
        (Wrong(2), r"Wrong returned shape \[2, 96\].*\[1, 96\]"),
        (Wrong(banned=[3, 4, 5]), "Wrong.banned has 3 entries"),
        (Wrong(limits=torch.ones(3)), "Wrong.limits has 3 entries"),
        (Wrong(lock=Lock()), "Wrong may keep state"),
    ],
)
def test_what_has_no_row_for_each_is_refused(target: Target, processor: LogitsProcessor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generate(target.model, BATCH, logits_processor=[processor], attention_mask=MASK)


def test_copies_share_models_and_tokenizers() -> None:
    class Holder(LogitsProcessor):
        def __init__(self) -> None:
            self.model, self.parts, self.seen = torch.nn.Linear(2, 2), {"tokenizers": [make_tokenizer()]}, [0]

        def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
            self.seen.append(1)
            return scores

    class Bare:  # without attributes of its own, as those of extensions
        __slots__ = ()

    assert copy_own(Bare()) is not None
    made = Holder()
    copied: Any = copy_processor(made)
    assert copied is not made and copied.model is made.model and copied.seen is not made.seen
    assert copied.parts is not made.parts and copied.parts["tokenizers"][0] is made.parts["tokenizers"][0]
