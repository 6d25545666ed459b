"""What a request brings is checked when it is added, and what fails later ends that request alone."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from decode import Engine, Request, Sampling, Target, generate
from proposers import MergedProposer
from tests.support.models import VOCABULARY, tiny
from tests.support.speculating import make_tokenizer

NEIGHBOUR: dict[str, Any] = {"sampling": Sampling(0.8, seed=3), "max_new_tokens": 9, "stop_ids": []}
PROMPT = [5, 9, 5, 9, 5]


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny("llama"), make_tokenizer())


@pytest.mark.parametrize(
    ("given", "plain"),
    [
        ({"temperature": np.float32(0.5), "seed": np.int64(5)}, {"temperature": 0.5, "seed": 5}),
        ({"temperature": torch.tensor(0.5), "seed": torch.tensor(5)}, {"temperature": 0.5, "seed": 5}),
        ({"temperature": np.array(1), "top_k": np.uint8(3), "seed": 5}, {"temperature": 1.0, "top_k": 3, "seed": 5}),
        ({"temperature": 1, "top_p": Fraction(1, 2), "seed": 5}, {"temperature": 1.0, "top_p": 0.5, "seed": 5}),
        ({"temperature": None, "top_k": None, "top_p": None, "min_p": None, "processors": None, "seed": None}, {}),
    ],
)
def test_numbers_become_pythons_own(given: dict[str, Any], plain: dict[str, Any]) -> None:
    sampling = Sampling(**given)
    assert sampling == Sampling(**plain)
    assert all(type(getattr(sampling, name)) in (int, float, tuple, type(None)) for name in given)


NO_NUMBERS = [True, np.bool_(True), "1", [1], np.array([1, 2]), Decimal(1), 1j, torch.tensor(True)]
FRACTIONS = [1.5, 2.0, np.float64(3), torch.tensor(2.0)]


@pytest.mark.parametrize(
    ("name", "wrong"),
    [*product(["temperature", "top_k", "top_p", "min_p", "seed"], NO_NUMBERS), *product(["top_k", "seed"], FRACTIONS)],
)
def test_other_things_are_no_numbers(name: str, wrong: Any) -> None:
    with pytest.raises(TypeError, match=rf"{name} is .*; it must be a (whole )?number"):
        Sampling(**{"temperature": 1, name: wrong})


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        *product(["temperature", "top_p", "min_p"], [float("nan"), float("inf"), -0.1]),
        *(("temperature", 1e-31), ("temperature", 10**400), ("top_k", -1)),
        *(("top_p", 0.0), ("top_p", 1.1), ("min_p", 2.0)),
    ],
)
def test_numbers_out_of_range_are_refused(name: str, wrong: float) -> None:
    with pytest.raises(ValueError, match=f"{name.replace('_', '-')} is "):
        Sampling(**{name: wrong})


@pytest.mark.parametrize("most", [8, 4096])  # how many tokens top-p sorts
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_smallest_top_p_leaves_the_most_likely_token(
    most: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("decode.trees.sampling.TOP", most)
    p = Sampling(1.0, top_p=1e-300).probabilities(torch.arange(96.0, dtype=dtype).roll(10)[None])
    assert p.nonzero().tolist() == [[0, 9]]


@pytest.mark.parametrize("setting", ["max_new_tokens", "nodes", "stop", "stop_ids", "criterion", "chat", "log_probs"])
def test_none_stands_for_a_default(target: Target, setting: str) -> None:
    engine = Engine(target, None, nodes=7)
    absent, none = engine.add(PROMPT), engine.add(PROMPT, **{setting: None})
    assert (absent.nodes, absent.limits, absent.log_probs) == (none.nodes, none.limits, none.log_probs)
    if setting in ("max_new_tokens", "nodes"):
        assert generate(target, PROMPT, None, **{setting: None})[0].tokens == generate(target, PROMPT, None)[0].tokens
    engine.close()


class Tokenizer(PreTrainedTokenizerFast):
    """One that cannot decode a token: of a model with more outputs than its tokenizer has tokens, for example."""

    broken = -1

    def decode(self, token_ids: Any, **options: Any) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else [*token_ids]
        if self.broken in ids:
            raise KeyError(self.broken)
        return str(super().decode(ids, **options))


@pytest.mark.parametrize("text", [True, False])
def test_a_token_that_cannot_be_decoded_ends_its_request_alone(text: bool) -> None:
    target = Target(tiny("llama"), Tokenizer(tokenizer_object=make_tokenizer().backend_tokenizer))
    prompts, options = [PROMPT, [7, 8, 9, 10]], {"max_new_tokens": 12, "stop_ids": []}
    first, second = generate(target, prompts, None, **options)
    Tokenizer.broken = next(token for token in second.tokens[4:] if token not in first.tokens)
    engine = Engine(target, MergedProposer())
    try:
        requests = [engine.add(prompt, text=text, **options) for prompt in prompts]
        list(engine)
    finally:
        Tokenizer.broken = -1
    whole, failed = (request.answer for request in requests)
    assert whole is not None and failed is not None and (whole.tokens, whole.finish) == (first.tokens, "length")
    assert failed.finish == "error" and failed.error is not None and failed.error.startswith("request 1: KeyError")
    assert failed.tokens == second.tokens[: len(failed.tokens)]
    chunks = [*requests[1]]
    assert chunks[-1].finish == "error" and [token for each in chunks for token in each.tokens] == failed.tokens


def clear(request_id: int, tokens: list[int]) -> bool:
    tokens.clear()
    return False


def overwrite(ids: Tensor, scores: Tensor) -> Tensor:
    ids[:] = 0
    return scores.mul_(2)


def fail(*args: Any) -> Any:
    raise ArithmeticError("out of rules")


# What a processor may return for scores [1, V].
RETURNS: list[Callable[[Tensor, Tensor], Any]] = [
    fail,
    overwrite,
    lambda ids, scores: None,
    lambda ids, scores: scores.tolist(),
    lambda ids, scores: scores.long(),
    lambda ids, scores: scores.float(),
    lambda ids, scores: scores.to(torch.complex64),
    lambda ids, scores: scores.to("meta"),
    lambda ids, scores: scores[0],
    lambda ids, scores: scores.expand(2, -1),
    lambda ids, scores: scores * torch.nan,
    lambda ids, scores: scores.fill_(-torch.inf),
]
THINGS = [
    *(np.int64(5), np.int8(-3), np.uint64(2**63), np.float32(0.7), np.float64(1e-40), np.bool_(True), np.array(3)),
    *(np.array([3]), np.datetime64("2020"), torch.tensor(3), torch.tensor(0.5), torch.tensor([1.0, 2.0])),
    *(torch.tensor(True), torch.tensor(2.0, requires_grad=True), Fraction(1, 3), Decimal("0.5"), 1j, 10**30, -(10**30)),
    *("1", "", b"1", (), [1], [None], {}, {"a": 1}, {3}, object(), int, fail, float("nan"), float("inf"), 5e-324),
]
VALUES = some.one_of(
    some.none(), some.booleans(), some.integers(-2, 12), some.integers(), some.floats(), some.sampled_from(THINGS)
)
SENSIBLE = some.floats(0.0, 1.0) | VALUES
PROCESSORS = some.lists(some.sampled_from(RETURNS), max_size=2)
SAMPLINGS = some.fixed_dictionaries(
    {},
    optional={
        "temperature": SENSIBLE,
        "top_k": VALUES,
        "top_p": SENSIBLE,
        "min_p": SENSIBLE,
        "seed": VALUES,
        "processors": PROCESSORS | PROCESSORS.map(lambda made: lambda request_id: made) | VALUES,
    },
)
TOKENS = some.lists(some.integers(0, VOCABULARY - 1), min_size=1, max_size=8)
REQUESTS = some.fixed_dictionaries(
    {"prompt": TOKENS | TOKENS | TOKENS | TOKENS | some.text() | some.lists(VALUES) | VALUES},
    optional={
        "sampling": SAMPLINGS | SAMPLINGS | VALUES,
        "max_new_tokens": some.integers(1, 9) | VALUES,
        "stop": some.lists(some.text() | VALUES, max_size=2) | VALUES,
        "stop_ids": TOKENS | some.lists(VALUES, max_size=2) | VALUES,
        "criterion": some.sampled_from([fail, clear, lambda *_: torch.zeros(2), lambda *_: np.array([1])]) | VALUES,
        "chat": some.booleans() | VALUES,
        "nodes": some.integers(1, 9) | VALUES,
        "text": some.booleans() | VALUES,
        "log_probs": some.integers(0, 5) | VALUES,
        "request_id": some.integers(0, 5) | VALUES,
        "n": some.integers(1, 2) | VALUES,
    },
)
STRANGERS = some.lists(REQUESTS, min_size=2, max_size=4)


def add_stranger(engine: Engine, drawn: dict[str, Any]) -> list[Request]:
    """A request with these settings, or none if they are refused."""
    try:
        if isinstance(drawn.get("sampling"), dict):
            drawn = {**drawn, "sampling": Sampling(**drawn["sampling"])}
        added = engine.add(**drawn)
    except (TypeError, ValueError):
        return []
    return added if isinstance(added, list) else [added]


def fuzz(target: Target, examples: int) -> tuple[int, int]:
    """Let requests with drawn settings run next to one whose text is known. Returns how many were taken and refused."""
    (alone,) = generate(target, PROMPT, None, request_ids=[1000], **NEIGHBOUR)
    counts = [0, 0]

    @settings(
        max_examples=examples, deadline=None, database=None, derandomize=True, suppress_health_check=[*HealthCheck]
    )
    @given(STRANGERS)
    def run(strangers: list[dict[str, Any]]) -> None:
        engine = Engine(target, MergedProposer(), rows=6)
        neighbour = engine.add(PROMPT, request_id=1000, **NEIGHBOUR)
        added = [add_stranger(engine, drawn) for drawn in strangers]
        list(neighbour)
        assert neighbour.answer is not None
        assert (neighbour.answer.tokens, neighbour.answer.error) == (alone.tokens, None)
        counts[0] += len([*filter(None, added)])
        counts[1] += len(strangers) - len([*filter(None, added)])
        for request in (request for requests in added for request in requests):
            assert request.finish is None or request.answer is not None
        engine.close()

    run()
    return counts[0], counts[1]


def test_no_setting_of_one_request_changes_anothers_text(target: Target) -> None:
    added, refused = fuzz(target, 60)
    assert added > 8 and refused > 60


@pytest.mark.slow
def test_no_setting_of_2000_requests_changes_anothers_text(target: Target) -> None:
    assert sum(fuzz(target, 1000)) >= 2000
