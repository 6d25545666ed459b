"""Answers that fit a grammar are those of plain decoding with every token but the allowed ones forbidden."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import accumulate
from typing import Any

import pytest
from torch import Tensor

from decode import Answer, Engine, Grammar, Matcher, Proposer, Request, Sampling, Target, generate, stream
from decode.grammars.matcher import Constraint
from decode.requests.answer import Limits
from proposers import (
    AnswerStore,
    DraftProposer,
    EagleProposer,
    MedusaProposer,
    MergedProposer,
    NGramProposer,
)
from proposers.sources import GrammarSource, RecyclingSource, SuffixSource
from tests.support.commands import run_module
from tests.support.drafting import Known, Recorder, first_step, make_head
from tests.support.grammars import (
    END,
    FIXED,
    GRAMMARS,
    PERSON,
    SumMatcher,
    TableMatcher,
    decode_greedily,
    encode,
    make_matcher,
    make_target,
    make_tokenizer,
)
from tests.support.models import VOCABULARY

pytest.importorskip("llguidance")
PROMPTS = [encode("name"), encode("a green "), encode("12, 12, ")]
NEW = 16
SAMPLED = Sampling(temperature=0.8, seed=3)
PROPOSERS: dict[str, Callable[[Target], Proposer | None]] = {
    "none": lambda target: None,
    "ngram": lambda target: NGramProposer(length=4),
    "merged": lambda target: MergedProposer(store=AnswerStore(100), nodes=12),
    "suffix": lambda target: MergedProposer([SuffixSource()], nodes=8),
    "itself": lambda target: DraftProposer(target, depth=4, nodes=5),
    "draft tree": lambda target: DraftProposer(target, width=2, depth=2, nodes=6),
    "medusa": lambda target: MedusaProposer(make_head("medusa", target), nodes=9),
    "merged eagle": lambda target: MergedProposer(drafter=EagleProposer(make_head("eagle", target), depth=3), nodes=9),
}


def read(answers: list[Answer]) -> list[tuple[list[int], str]]:
    return [(answer.tokens, answer.finish) for answer in answers]


def count_accepted(answers: list[Answer]) -> int:
    return sum(sum(answer.stats.accepted_by_depth) for answer in answers)


@cache
def decode_all_greedily(kind: str) -> list[tuple[list[int], str]]:
    make = make_matcher(GRAMMARS[kind])
    return [decode_greedily(make_target(), prompt, make, NEW) for prompt in PROMPTS]


@pytest.mark.parametrize("kind", GRAMMARS)
@pytest.mark.parametrize("name", PROPOSERS)
def test_greedy_answers_are_those_of_whole_passes(name: str, kind: str) -> None:
    answers = generate(
        make_target(), PROMPTS, PROPOSERS[name](make_target()), grammar=GRAMMARS[kind], max_new_tokens=NEW
    )
    assert read(answers) == decode_all_greedily(kind)
    assert name != "merged" or count_accepted(answers) > 0


@pytest.mark.parametrize("kind", GRAMMARS)
def test_right_drafts_are_accepted(kind: str) -> None:
    """Each has a wrong one next to it."""
    target, plain = make_target(), decode_all_greedily(kind)
    proposer = Known({row: tokens for row, (tokens, _) in enumerate(plain)})
    answers = generate(target, PROMPTS, proposer, grammar=GRAMMARS[kind], max_new_tokens=NEW)
    assert read(answers) == plain
    assert all(answer.stats.steps < 2 + len(answer.tokens) / 4 for answer in answers)


@cache
def sample_plainly(kind: str) -> list[tuple[list[int], str]]:
    return read(
        [
            generate(make_target(), [prompt], None, request_ids=[row], **sampling_settings(kind))[0]
            for row, prompt in enumerate(PROMPTS)
        ]
    )


def sampling_settings(kind: str) -> dict[str, Any]:
    return {"grammar": GRAMMARS[kind], "sampling": SAMPLED, "max_new_tokens": NEW}


@pytest.mark.parametrize("name", PROPOSERS)
def test_a_seed_gives_the_same_answers_in_every_batch(name: str) -> None:
    ways = [{"batch_size": 3}, {"batch_size": 2, "nodes": 3}, {"nodes": 1}]
    for place, kind in enumerate(GRAMMARS):
        settings = sampling_settings(kind) | ways[(place + len(name)) % 3]
        answers = generate(make_target(), PROMPTS, PROPOSERS[name](make_target()), **settings)
        assert read(answers) == sample_plainly(kind), settings
    assert len({str(sample_plainly(kind)) for kind in GRAMMARS}) == len(GRAMMARS)


def test_other_seeds_give_other_answers() -> None:
    other = sampling_settings("schema") | {"sampling": replace(SAMPLED, seed=4)}
    assert read(generate(make_target(), PROMPTS, None, **other)) != sample_plainly("schema")


# Rows that differ are accepted apart.
WAYS = [{"top_k": 3}, {"temperature": 1.5, "top_p": 0.7, "seed": 1}, {"temperature": 2.0, "min_p": 0.1, "seed": 2}]
SCHEMAS = [
    PERSON,
    {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 3},
    {"enum": ["green", "grey"]},
    {**FIXED, "properties": {"a": {"type": "boolean"}, "b": {"type": "null"}}, "required": ["b"]},
    {"type": "string", "pattern": "^[a-f]{3}$"},
    {"anyOf": [{"type": "boolean"}, {"type": "integer"}]},
    {"type": "number"},
    {"type": "array", "items": {"enum": ["name", "colour"]}},
]


@pytest.mark.parametrize("name", ["none", "ngram", "merged", "itself", "medusa"])
def test_eight_requests_with_eight_schemas_join_and_leave(name: str) -> None:
    """Some have no grammar. All are what they are alone."""
    target, choose = make_target(), random.Random(5)
    settings: list[dict[str, Any]] = []
    for place, schema in enumerate([*SCHEMAS, None, None]):
        way = [{}, *WAYS][place % 4]
        settings.append({"grammar": schema, "sampling": Sampling(**way), "max_new_tokens": 5 + 3 * place})
    alone = [
        generate(target, [PROMPTS[place % 3]], None, request_ids=[place], **each)[0]
        for place, each in enumerate(settings)
    ]
    engine, requests, most = Engine(target, PROPOSERS[name](target), rows=5), list[Request](), 0
    for place in choose.sample(range(len(settings)), len(settings)):
        requests.append(engine.add(PROMPTS[place % 3], request_id=place, **settings[place]))
        for _ in range(choose.randrange(3)):
            engine.step()
            most = max(most, engine.running)
    for _ in engine:
        most = max(most, engine.running)
    for request in requests:
        assert request.answer is not None
        assert read([request.answer]) == read([alone[request.request_id]]), request.request_id
    assert most > 2 and {"grammar", "length"} <= {answer.finish for answer in alone}


@pytest.mark.parametrize("name", ["none", "ngram", "merged", "itself"])
def test_a_function_makes_the_matcher_of_each_request(name: str) -> None:
    """One request of the batch has no grammar."""
    target = make_target()

    def make(request_id: int) -> SumMatcher:
        return SumMatcher(target.vocabulary, size=6 + request_id, divisor=5 + request_id)

    settings: dict[str, Any] = {"sampling": SAMPLED, "max_new_tokens": 12, "stop_ids": []}
    alone = [
        generate(target, [prompt], None, request_ids=[row], grammar=None if row == 1 else make, **settings)[0]
        for row, prompt in enumerate(PROMPTS)
    ]
    engine = Engine(target, PROPOSERS[name](target))
    requests = [
        engine.add(prompt, request_id=row, grammar=None if row == 1 else make, **settings)
        for row, prompt in enumerate(PROMPTS)
    ]
    assert [*engine]
    assert read([request.answer for request in requests if request.answer]) == read(alone)
    assert [len(answer.tokens) for answer in alone] == [6, 12, 8]


def test_several_answers_to_one_prompt_have_matchers_of_their_own() -> None:
    target = make_target()
    engine = Engine(target, MergedProposer(nodes=9))
    settings: dict[str, Any] = {"grammar": PERSON, "sampling": SAMPLED, "max_new_tokens": NEW}
    requests = engine.add(PROMPTS[0], n=3, noise_id=7, **settings)
    assert [*engine]
    alone = [generate(target, [PROMPTS[0]], None, request_ids=[each], **settings)[0] for each in (7, 8, 9)]
    assert read([request.answer for request in requests if request.answer]) == read(alone)
    assert len({str(answer.tokens) for answer in alone}) > 1


@pytest.mark.parametrize("name", ["merged", "itself"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_model_with_a_recurrent_state(name: str, temperature: float) -> None:
    target = make_target("lfm2")
    settings: dict[str, Any] = {"sampling": replace(SAMPLED, temperature=temperature), "max_new_tokens": 12}
    for kind, grammar in GRAMMARS.items():
        plain = generate(target, PROMPTS, None, grammar=grammar, **settings)
        answers = generate(target, PROMPTS, PROPOSERS[name](target), grammar=grammar, **settings)
        assert read(answers) == read(plain), kind
        assert name != "merged" or kind == "lark" or count_accepted(answers) > 0, kind


# A grammar that begins inside an answer.

MARK = "#"  # a token that the model itself does not write so early
AFTER: dict[str, tuple[str, str | int]] = {  # by form: the text of the token that the grammar begins after, and `after`
    "text": (MARK, MARK),
    "token": (MARK, encode(MARK)[0]),
    "special token": ("</think>", "</think>"),
    "its id": ("</think>", encode("</think>")[0]),
}


class Raised:
    """A logits processor that makes a token certain at some place of an answer to the second prompt."""

    def __init__(self, token: int, place: int) -> None:
        self.token, self.length = token, len(PROMPTS[1]) + place

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores[:, self.token] += 1e4 * (input_ids.shape[1] == self.length)
        return scores


@pytest.mark.parametrize("form", AFTER)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_draft_crosses_the_beginning_of_a_grammar(form: str, temperature: float) -> None:
    target, (mark, after) = make_target(), AFTER[form]
    sampling = Sampling(temperature, processors=[Raised(encode(mark)[0], 4)], seed=3)
    settings: dict[str, Any] = {"sampling": sampling, "max_new_tokens": 24, "stop_ids": []}
    free = [generate(target, [PROMPTS[1]], None, grammar=each, **settings) for each in (None, "start: /(?s:.*)/")]
    settings["grammar"] = Grammar(PERSON, after=after)
    (plain,) = generate(target, [PROMPTS[1]], None, **settings)
    assert plain.tokens[:4] in [each.tokens[:4] for (each,) in free] and plain.tokens.index(encode(mark)[0]) == 4
    assert make_tokenizer().decode(plain.tokens[5:]).startswith('{"name": "')
    chunks = [*stream(target, [PROMPTS[1]], Known({0: plain.tokens}), **settings)]
    assert read([chunk.answer for chunk in chunks if chunk.answer]) == read([plain])
    ends = [*accumulate(len(chunk.tokens) for chunk in chunks)]
    assert any(end - len(chunk.tokens) < 4 and end > 6 for end, chunk in zip(ends, chunks, strict=True))


@pytest.mark.parametrize("name", ["ngram", "merged", "itself", "medusa"])
def test_drafts_do_not_change_what_is_before_and_in_a_grammar(name: str) -> None:
    for place in (0, 1, 3):
        sampling = Sampling(0.8, processors=[Raised(encode("</think>")[0], place)], seed=5)
        settings = {"sampling": sampling, "grammar": Grammar(PERSON, after="</think>"), "max_new_tokens": NEW}
        (plain,) = generate(make_target(), [PROMPTS[1]], None, **settings)
        (answer,) = generate(make_target(), [PROMPTS[1]], PROPOSERS[name](make_target()), **settings)
        assert read([answer]) == read([plain]) and encode("</think>")[0] in plain.tokens[: place + 1]


def test_an_answer_cannot_end_before_its_grammar() -> None:
    sampling = Sampling(processors=[Raised(END, 2)])
    settings: dict[str, Any] = {"sampling": sampling, "max_new_tokens": NEW}
    (free,) = generate(make_target(), [PROMPTS[1]], None, **settings)
    (answer,) = generate(make_target(), [PROMPTS[1]], None, grammar=Grammar(PERSON, after="</think>"), **settings)
    assert free.finish == "eos" and len(free.tokens) == 3
    assert END not in answer.tokens and answer.finish == "length"


def test_special_tokens_may_come_before_a_grammar() -> None:
    """As where a model begins its thought by one."""
    settings: dict[str, Any] = {"sampling": Sampling(processors=[Raised(encode("<think>")[0], 0)]), "max_new_tokens": 4}
    (answer,) = generate(make_target(), [PROMPTS[1]], None, grammar=Grammar(PERSON, after="</think>"), **settings)
    assert answer.tokens[0] == encode("<think>")[0]


# The source that names forced tokens.


def test_forced_tokens_are_drafted_and_accepted() -> None:
    proposer = MergedProposer(nodes=9)
    answers = generate(make_target(), PROMPTS, proposer, grammar=PERSON, max_new_tokens=NEW)
    assert proposer.accepted_by_source["grammar"] > 20
    assert sum(answer.stats.steps for answer in answers) < 0.7 * sum(len(answer.tokens) for answer in answers)


def test_the_source_changes_no_draft_without_a_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked nothing that takes time."""
    monkeypatch.setattr("decode.grammars.matcher.Constraint.find_allowed", None)
    drafted = []
    for sources in ([SuffixSource(), RecyclingSource()], [SuffixSource(), RecyclingSource(), GrammarSource()]):
        recorder = Recorder(MergedProposer(sources, nodes=9))
        generate(make_target(), PROMPTS, recorder, max_new_tokens=NEW)
        drafted.append(recorder.drafted)
    assert drafted[0] == drafted[1] and max(map(len, drafted[0].values())) > 3


def follow_source(target: Target, make: Callable[[], Matcher], tokens: list[int]) -> tuple[Request, GrammarSource, Any]:
    """A request, the source after it has seen that, and the source's state after draft tokens."""
    request = Request(7, [5], Limits(), 100, constraint=Constraint(make, target.vocabulary))
    source = GrammarSource()
    source.observe(replace(first_step(target, [5, 6]), requests=[request]))
    state = source.start(7)
    for token in tokens:
        assert token in {named for named, _, _ in source.continuations(state)}
        state = source.follow(state, token)
    return request, source, state


def test_the_source_names_few_allowed_tokens() -> None:
    target = make_target()
    _, source, state = follow_source(
        target, lambda: make_matcher(SCHEMAS[2])(0), encode('"') + encode("g") + encode("re")
    )
    named = {make_tokenizer().decode([token]): p for token, p, _ in source.continuations(state)}
    assert named == {"e": 0.5, "y": 0.5}


def test_the_source_names_nothing_once_the_answer_has_grown(target: Target) -> None:
    """A merged tree asks it about old nodes, too."""
    request, source, state = follow_source(target, lambda: TableMatcher({0: {3: 0, 4: 0}}, VOCABULARY), [3, 3])
    assert [*source.continuations(state)] == [(3, 0.5, 2), (4, 0.5, 2)]
    assert request.constraint is not None
    request.constraint.take(3)
    assert [*source.continuations(state)] == []


# A simulated GPU, and the default model.


@pytest.mark.slow
def test_a_simulated_gpu_gives_the_same_answers() -> None:
    assert run_module("tests.support.grammars") == []


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_default_model_answers_by_a_schema(temperature: float) -> None:
    target = Target.load()
    prompts = ["Describe a person in JSON.", "Invent a product with a name, a colour and an amount, in JSON."]
    settings: dict[str, Any] = {"grammar": PERSON, "max_new_tokens": 80, "sampling": Sampling(temperature, seed=1)}
    plain = generate(target, prompts, None, **settings)
    answers = generate(target, prompts, "merged", **settings)
    assert read(answers) == read(plain)
    for answer in answers:
        assert set(json.loads(answer.text)) == {"name", "colour", "amount", "kept"} and answer.finish == "grammar"
        assert answer.stats.tau > 1.5
