"""Requests that join, leave, fail and are cancelled: the text of each is that of the request alone."""

from __future__ import annotations

import asyncio
import errno
import gc
import mmap
import random
from collections.abc import Callable
from functools import partial
from threading import Barrier, Event, Thread
from time import sleep
from typing import Any
from unittest.mock import Mock
from weakref import WeakSet

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor, RepetitionPenaltyLogitsProcessor

from decode import Engine, PlainProposer, Request, Sampling, Step, Target, Tree, generate, kv_cache
from decode.cuda.backend import CudaBackend
from decode.devices.cost_curve import CostCurve
from decode.kv_cache import KVLayer
from decode.session import Session
from decode.trees.accept import accept_rows
from proposers import NGramProposer
from tests.decode.test_lossless import DETERMINISTIC, make_target
from tests.support.models import VOCABULARY, tiny

PROMPTS = [[5, 9, 5, 9, 5], [7, 8, 9, 10, 11, 7, 8], [3], [4, 4, 20, 21, 22, 4, 4, 20]]
SETTINGS: dict[str, Any] = {"max_new_tokens": 12, "stop_ids": []}
KINDS = ["llama", "gemma3_text", "gpt2"]


class Failing(LogitsProcessor):
    """Raises once a text is so long."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if input_ids.shape[1] >= self.length:
            raise LookupError("no more rules")
        return scores


def draw_settings(choose: random.Random, prompt: list[int]) -> dict[str, Any]:
    processors: list[LogitsProcessor] = []
    if choose.random() < 0.2:
        processors = [choose.choice([RepetitionPenaltyLogitsProcessor(1.5), Failing(len(prompt) + 3)])]
    temperature, top_k = choose.choice([0.0, 0.0, 0.7, 1.0]), choose.choice([0, 5])
    fails = choose.randint(1, 9) if choose.random() < 0.1 else 0

    def criterion(request_id: int, tokens: list[int]) -> bool:
        if len(tokens) == len(prompt) + fails:
            raise ArithmeticError("cannot judge")
        return sum(tokens) % 23 == 0

    return {
        "sampling": Sampling(temperature, top_k, processors=processors, seed=choose.randint(0, 3)),
        "max_new_tokens": choose.randint(1, 14),
        "stop_ids": choose.choice([[], [2], list(range(0, VOCABULARY, 9))]),
        "criterion": criterion if choose.random() < 0.3 else None,
    }


def run_schedule(target: Target, name: str, seed: int) -> int:
    """Requests that join and are cancelled at random steps. Returns the number of draft tokens in their answers."""
    choose = random.Random(seed)
    begin = [choose.randrange(VOCABULARY) for _ in range(12)]
    ends = [[choose.randrange(VOCABULARY) for _ in range(choose.choice([1, 2, 5, 9, 30]))] for _ in range(4)]
    prompts = [*ends, *([*begin, *end] for end in ends)]
    engine = Engine(target, DETERMINISTIC[name](target), rows=choose.randint(1, 4), part=choose.choice([1, 7, 40]))
    asked: list[tuple[Request, dict[str, Any]]] = []
    cancelled = set[int]()
    for _ in range(200):
        if len(asked) < 9 and choose.random() < 0.4:
            prompt = choose.choice(prompts)
            if asked and choose.random() < 0.3:  # the next turn of a conversation
                prompt = [*choose.choice(asked)[0].sequence[-60:], *prompt]
            settings = draw_settings(choose, prompt)
            asked.append((engine.add(prompt, nodes=choose.choice([1, 3, 9]), **settings), settings))
        if asked and choose.random() < 0.08:
            request, _ = choose.choice(asked)
            engine.cancel(request)
            cancelled.add(request.request_id)
        engine.step()
        if len(asked) == 9 and not engine.is_busy:
            break
    assert not engine.is_busy and engine.scheduler._batch is None and any(request.stats.reused for request, _ in asked)
    for request, settings in asked:
        answer = request.answer
        assert answer is not None
        (alone,) = generate(target, [request.prompt], None, request_ids=[request.request_id], **settings)
        if answer.finish == "cancelled":
            assert request.request_id in cancelled and answer.tokens == alone.tokens[: len(answer.tokens)]
        else:
            assert (answer.tokens, answer.finish, answer.error) == (alone.tokens, alone.finish, alone.error)
        assert [token for chunk in request for token in chunk.tokens] == answer.tokens
    return sum(sum(request.stats.accepted_by_depth) for request, _ in asked)


@pytest.mark.filterwarnings("ignore:request .* (no more rules|cannot judge):RuntimeWarning")
@pytest.mark.parametrize("name", DETERMINISTIC)
def test_text_does_not_depend_on_company(
    name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever joins, fails, ends or is cancelled meanwhile, in whatever parts prompts are read, and whatever of them is
    known already."""
    monkeypatch.setattr("decode.prefill.SHORTEST", 3)
    cases = range(-(-request.config.getoption("--cases") // 200))
    accepted = sum(run_schedule(make_target(KINDS[case % len(KINDS)]), name, case) for case in cases)
    assert accepted or name in ("none", "medusa", "medusa large", "hydra", "hydra small", "hydra++") or len(cases) < 9


def watch(target: Target, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Rows and nodes of each pass."""
    passes, verify = list[tuple[int, int]](), Session.verify

    def record(session: Session, tree: Tree, **options: Any) -> Any:
        passes.append((tree.batch, tree.width))
        return verify(session, tree, **options)

    monkeypatch.setattr(Session, "verify", record)
    return passes


def test_prompts_are_read_in_parts_between_steps(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(target, None, rows=3, part=10)
    first = engine.add(PROMPTS[0], max_new_tokens=30, stop_ids=[])
    engine.step()
    passes = watch(target, monkeypatch)
    second = engine.add([*range(3, 48)], max_new_tokens=3, stop_ids=[])
    while second.answer is None:
        before = len(first.sequence)
        engine.step()
        assert len(first.sequence) == before + 1  # the others go on in every step
    assert passes == [(1, 1), (1, 10)] * 4 + [(1, 1), (1, 5)] + [(2, 1)] * 2


def test_a_part_is_as_long_as_the_cost_curve_allows(target: Target) -> None:
    assert 100 < Engine(Target(target.model, deterministic=True), None).scheduler.part < 200  # ten passes of a CPU


def test_a_part_is_as_long_on_padded_curves(target: Target) -> None:
    """A curve of graphs is flat up to the next power of two."""
    made = Target(target.model, deterministic=CostCurve((1, 64, 256), (1.0, 1.1, 1.5)))
    expected = Engine(made, None).scheduler.part
    made.has_graphs = True
    assert expected == pytest.approx(256 + (10 - 1.5) * 192 / 0.4, rel=0.01)
    assert Engine(made, None).scheduler.part == pytest.approx(expected, rel=0.1)


def test_equal_prompts_are_read_once(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    passes = watch(target, monkeypatch)
    sampling = Sampling(temperature=1.0, seed=4)
    engine = Engine(target, None, rows=8, part=100)
    early = [engine.add(PROMPTS[1], sampling=sampling, max_new_tokens=9, stop_ids=[]) for _ in range(3)]
    engine.step()
    assert passes == [(1, len(PROMPTS[1]))]
    late = engine.add([7] * 150, n=4, sampling=sampling, max_new_tokens=9, stop_ids=[])
    engine.step()
    engine.step()
    assert passes[1:] == [(3, 1), (1, 100), (3, 1), (1, 50)]
    list(engine)
    texts = {tuple(request.sequence) for request in early + late}
    assert len(texts) > 4  # each has noise of its own
    assert_alone(target, early + late, sampling=sampling, max_new_tokens=9, stop_ids=[])


@pytest.mark.parametrize("name", ["ngram", "eagle3", "merged hydra", "draft"])
def test_the_beginnings_of_prompts_are_read_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of texts that run or have ended: the next turn of a conversation, and the same system text."""
    target = make_target()
    engine, system = Engine(target, DETERMINISTIC[name](target), rows=2, part=100), [*range(3, 33)]
    settings: dict[str, Any] = {"max_new_tokens": 20, "stop_ids": []}
    first = engine.add([*system, 50, 51], **settings)
    engine.step()
    engine.step()
    second = engine.add([*system, 60], **settings)
    list(engine)
    assert (first.stats.reused, second.stats.reused) == (0, 30)
    passes = watch(target, monkeypatch)
    turn = engine.add([*first.sequence, 70, 71, 72], **settings)
    engine.step()
    assert turn.stats.reused == len(first.sequence) - 1 or name in ("eagle3", "merged hydra")
    assert turn.stats.reused > len(first.sequence) - 10
    assert (1, len(turn.prompt) - turn.stats.reused) in passes
    list(engine)
    assert_alone(target, [first, second, turn], **settings)


def test_prompts_are_read_next_to_steps_of_a_fixed_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """With graphs, but on a CPU; a prompt has a shape of its own."""
    monkeypatch.setattr(CudaBackend, "make_pool", lambda _: None)
    target = Target(tiny("llama"), deterministic=True)
    target.has_graphs, target.backend = True, CudaBackend(target.device)
    engine = Engine(target, NGramProposer(), rows=2)
    requests = [engine.add(PROMPTS[0], **SETTINGS)]
    engine.step()
    requests.append(engine.add([*PROMPTS[0], 9, 8, 7], **SETTINGS))
    list(engine)
    assert_alone(Target(tiny("llama")), requests, **SETTINGS)


def test_steps_of_a_fixed_shape_outlive_a_first_prompt_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next batch takes their memory and graphs."""
    monkeypatch.setattr(CudaBackend, "make_pool", lambda _: None)
    target = Target(tiny("llama"), deterministic=True)
    target.has_graphs, target.backend = True, CudaBackend(target.device)
    engine = Engine(target, None)
    with monkeypatch.context() as patch:
        patch.setattr(Session, "verify", Mock(side_effect=torch.OutOfMemoryError("no memory")))
        request = engine.add(PROMPTS[0], **SETTINGS)
        list(engine)
    assert request.finish == "error" and len(target.idle_steps) == 1
    again = engine.add(PROMPTS[0], **SETTINGS)
    list(engine)
    assert_alone(Target(tiny("llama")), [again], **SETTINGS)


def test_the_bytes_of_kept_texts_are_limited(target: Target) -> None:
    engine = Engine(target, None, kept_bytes=400_000)
    texts = engine.prefixes
    assert texts is not None
    kept = []
    for number in range(12):
        engine.add([number + 3] * 20, max_new_tokens=2, stop_ids=[])
        list(engine)
        kept.append(len(texts._texts))
        assert 0 < texts.bytes <= 400_000
    assert kept[0] == 1 and 1 < kept[-1] == kept[-2] < 12  # the oldest ones went
    assert [engine.add([number] * 20, max_new_tokens=1).request_id for number in (3, 14)]
    reused = [chunk.answer.stats.reused for chunk in engine if chunk.answer is not None]
    assert reused == [0, 19]
    before = len(texts._texts)
    engine.add([50] * 240, max_new_tokens=2, stop_ids=[])  # too long to be kept
    texts.most = 100_000
    list(engine)
    assert len(texts._texts) == before
    engine = Engine(target, None, kept_bytes=0)
    for _ in range(2):
        request = engine.add([3] * 20, max_new_tokens=2, stop_ids=[])
        list(engine)
    assert engine.prefixes is None and request.stats.reused == 0


def assert_alone(target: Target, requests: list[Request], **settings: Any) -> None:
    """Each has the tokens that it gets alone."""
    for request in requests:
        (alone,) = generate(target, [request.prompt], None, request_ids=[request.request_id], **settings)
        assert request.answer is not None and request.answer.tokens == alone.tokens


class Calls(PlainProposer):
    """Drafts the last token again, and records each budget."""

    def __init__(self) -> None:
        self.budgets: list[int] = []

    def propose(self, step: Step, budget: int) -> Tree:
        self.budgets.append(budget)
        return Tree.chain([[root] * budget for root in step.bonus])


def test_each_request_has_its_own_limit_of_nodes(target: Target) -> None:
    proposer = Calls()
    engine = Engine(target, proposer, nodes=16)
    limits = [1, 3, 7]
    requests = [engine.add(PROMPTS[0], nodes=limit, max_new_tokens=20, stop_ids=[]) for limit in limits]
    engine.step()
    engine.step()
    assert proposer.budgets == [7]
    assert [request.stats.nodes for request in requests] == [0, 2, 6]
    engine.cancel(requests[2])
    engine.step()
    assert proposer.budgets == [7, 3]


@pytest.mark.parametrize("name", ["none", "ngram", "itself as a tree", "eagle3"])
def test_log_probabilities_are_the_models(name: str) -> None:
    """Of each token, whether it was drafted or not; sampling settings do not change them."""
    target = make_target()
    sampling = Sampling(temperature=0.7, top_k=3, seed=2)
    engine = Engine(target, DETERMINISTIC[name](target))
    asked = [
        engine.add(prompt, log_probs=count, sampling=sampling, max_new_tokens=12, stop_ids=[11])
        for prompt, count in zip(PROMPTS, (0, 1, 4, None), strict=True)
    ]
    list(engine)
    for request in asked:
        answer = request.answer
        assert answer is not None and [told for chunk in request for told in chunk.log_probs] == answer.log_probs
        if request.log_probs is None:
            assert answer.log_probs == []
            continue
        logits = target.model(torch.tensor([request.sequence])).logits[0, len(request.prompt) - 1 : -1]
        log_p = logits.log_softmax(dim=-1)
        assert len(answer.log_probs) == len(answer.tokens)
        for token, told, row in zip(answer.tokens, answer.log_probs, log_p, strict=True):
            assert told.chosen == pytest.approx(float(row[token]), abs=1e-9)
            best = row.topk(request.log_probs)
            assert [*told.best] == best.indices.tolist()
            assert [*told.best.values()] == pytest.approx(best.values.tolist(), abs=1e-9)


# Errors


def test_an_id_is_used_by_one_request_at_a_time(target: Target) -> None:
    engine = Engine(target, None)
    engine.add(PROMPTS[0], request_id=3, max_new_tokens=2)
    with pytest.raises(ValueError, match="request 3 is running; give each request an id of its own"):
        engine.add(PROMPTS[1], request_id=3)
    list(engine)
    engine.add(PROMPTS[1], request_id=3)
    assert [engine.add(PROMPTS[0]).request_id for _ in range(4)] == [0, 1, 2, 4]  # the next free numbers


def test_bad_requests_are_refused_at_once(target: Target) -> None:
    """See also `requests/test_prompts.py`."""
    engine = Engine(target, None)
    for settings, message in (
        ({"n": 0}, "n is 0"),
        ({"n": 10**12}, "at most 4096 requests"),
        ({"n": 2, "request_id": 3}, "n requests have ids of their own"),
        ({"log_probs": 97}, "log_probs is 97"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.add(PROMPTS[0], **settings)
    assert not engine.is_busy
    for wrong in (-1, 1.5, None, True):
        with pytest.raises((TypeError, ValueError), match="kept_bytes is "):
            Engine(target, None, kept_bytes=wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="lossy_typical_acceptance is 'no'; it is True or False"):
        Engine(target, None, lossy_typical_acceptance="no")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="deterministic is 'no'; it is True, False or a CostCurve"):
        Target(target.model, deterministic="no")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="in_place is 'no'; it is True or False"):
        Target(target.model, in_place="no")  # type: ignore[arg-type]
    engine = Engine(target, None, lossy_typical_acceptance=True)
    with pytest.raises(ValueError, match="typical acceptance supports no logits processors"):
        engine.add(PROMPTS[0], sampling=Sampling(processors=[Failing(3)]))


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("out of memory"), RuntimeError("not enough memory")])
def test_a_prompt_without_memory_ends_its_request(
    target: Target, monkeypatch: pytest.MonkeyPatch, error: RuntimeError
) -> None:
    verify = Session.verify

    def fail(session: Session, tree: Tree, **options: Any) -> Any:
        if tree.width == 50:
            raise error
        return verify(session, tree, **options)

    monkeypatch.setattr(Session, "verify", fail)
    engine = Engine(target, None, part=50)
    large = engine.add([3] * 50)  # the first prompt
    engine.step()
    assert large.answer is not None and large.answer.finish == "error" and "memory" in (large.answer.error or "")
    small = engine.add(PROMPTS[0], max_new_tokens=9, stop_ids=[])
    engine.step()
    large = engine.add([3] * 50)  # while another one is decoded
    list(engine)
    assert large.answer is not None and large.answer.exception is error
    assert small.answer is not None and len(small.answer.tokens) == 9


def test_a_beginning_without_memory_ends_its_request(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is copied before a prompt is read."""
    engine = Engine(target, None)
    small = engine.add(PROMPTS[0], max_new_tokens=9, stop_ids=[])
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr("decode.scheduler.Reading", Mock(side_effect=torch.OutOfMemoryError("out of memory")))
        large = engine.add(PROMPTS[1])
        engine.step()
    assert large.answer is not None and large.answer.error == "request 1: OutOfMemoryError: out of memory"
    assert large.exception is not None and large.exception.__traceback__ is None  # which would keep memory alive
    last = engine.add(PROMPTS[2], **SETTINGS)
    list(engine)
    assert small.answer is not None and len(small.answer.tokens) == 9
    assert_alone(target, [last], **SETTINGS)


@pytest.mark.parametrize(
    ("name", "number"),
    [("decode.kv_cache._enlarge", 0), ("decode.kv_cache._enlarge", 1), ("decode.loop.accept_rows", 1)],
)
def test_a_row_without_memory_ends_its_request(
    target: Target, monkeypatch: pytest.MonkeyPatch, name: str, number: int
) -> None:
    """Keys move to new memory, then values; a first token is chosen after those of the others."""
    engine, calls = Engine(target, NGramProposer()), list[int]()
    function = {"decode.kv_cache._enlarge": kv_cache._enlarge}.get(name, accept_rows)
    small = engine.add(PROMPTS[0], **SETTINGS)
    engine.step()

    def fail(*given: Any, **more: Any) -> Any:
        calls.append(len(calls))
        if calls[-1] == number:
            raise torch.OutOfMemoryError("out of memory")
        return function(*given, **more)

    large = engine.add(PROMPTS[1])
    with monkeypatch.context() as patch:
        patch.setattr(name, fail)
        engine.step()
    assert large.answer is not None and large.answer.error == "request 1: OutOfMemoryError: out of memory"
    last = engine.add(PROMPTS[2], **SETTINGS)
    list(engine)
    assert_alone(target, [small, last], **SETTINGS)


def test_a_text_is_not_kept_without_memory(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(target, None)
    requests = [engine.add(PROMPTS[row], max_new_tokens=count, stop_ids=[]) for row, count in enumerate((3, 9))]
    monkeypatch.setattr("decode.prefill.SHORTEST", 2)
    monkeypatch.setattr("decode.prefill.Text.copy", Mock(side_effect=torch.OutOfMemoryError("out of memory")))
    list(engine)
    assert [request.finish for request in requests] == ["length", "length"] and len(requests[1].sequence) == 7 + 9


def test_a_noise_id_may_be_large(target: Target) -> None:
    """As those of UUIDs; the lowest 64 bits count."""
    engine, sampling = Engine(target, None), Sampling(1.0, seed=1)
    requests = [engine.add(PROMPTS[0], noise_id=each, sampling=sampling, **SETTINGS) for each in (7, (1 << 127) + 7)]
    list(engine)
    assert requests[0].sequence == requests[1].sequence


def test_a_kv_cache_without_memory_ends_its_request(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system refuses to map memory; later requests are answered."""
    limit, allocate = 40_000, mmap.mmap

    def allocate_little(file: int, size: int, **options: Any) -> mmap.mmap:
        if size > limit:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return allocate(file, size, **options)

    monkeypatch.setattr("decode.cpu.backend.mmap.mmap", allocate_little)
    engine = Engine(target, None)
    large = engine.add(PROMPTS[0], max_new_tokens=5)
    list(engine)
    assert large.answer is not None and large.answer.finish == "error" and "not enough memory" in large.answer.error
    limit = 1 << 30
    small = engine.add(PROMPTS[0], max_new_tokens=5, stop_ids=[])
    list(engine)
    assert small.answer is not None and len(small.answer.tokens) == 5


def test_other_errors_end_all_requests_and_are_raised(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(target, NGramProposer())
    first, second = (engine.add(prompt) for prompt in PROMPTS[:2])
    engine.step()
    monkeypatch.setattr(NGramProposer, "propose", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.step()
    monkeypatch.undo()
    for request in (first, second):
        assert request.answer is not None and request.answer.finish == "error"
        assert [chunk.finish for chunk in request] == [None, "error"]
    third = engine.add(PROMPTS[0], max_new_tokens=4)  # it goes on
    list(engine)
    assert third.answer is not None and third.answer.finish == "length"


def test_ctrl_c_ends_all_requests(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(target, None)
    request = engine.add(PROMPTS[0])
    engine.step()
    monkeypatch.setattr(Session, "verify", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        list(request)
    assert request.answer is not None and request.answer.finish == "cancelled" and not engine.is_busy


# Driving


def test_a_closed_engine_ends_its_requests(target: Target) -> None:
    engine = Engine(target, NGramProposer(), rows=1)
    engine.add([5] * 60, max_new_tokens=2)
    list(engine)
    running, waiting = (engine.add(prompt) for prompt in PROMPTS[:2])
    engine.step()
    assert engine.prefixes is not None and engine.prefixes.bytes > 0
    engine.close()
    assert engine.prefixes.bytes == 0
    for request in (running, waiting):
        assert request.answer is not None and request.answer.finish == "cancelled"
        assert [chunk.finish for chunk in request][-1] == "cancelled"
    assert not engine.is_busy and engine.step() == []
    with pytest.raises(RuntimeError, match="this engine is closed; make another"):
        engine.add(PROMPTS[0])


def test_iterating_a_request_drives_the_others_too(target: Target) -> None:
    engine = Engine(target, NGramProposer(length=3), rows=2)
    requests = [engine.add(prompt, **SETTINGS) for prompt in PROMPTS]
    for request in reversed(requests):
        *_, last = chunks = [*request]
        assert last.answer is request.answer and [*request] == []
        assert [token for chunk in chunks for token in chunk.tokens] == last.answer.tokens
    assert_alone(target, requests, **SETTINGS)


def run_threads(*tasks: Callable[[], Any]) -> None:
    threads = [Thread(target=task) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_threads_add_and_cancel_while_one_iterates(target: Target) -> None:
    engine, added, stop = Engine(target, NGramProposer(length=3), rows=4, part=20), list[Request](), Event()

    def add(seed: int) -> None:
        choose = random.Random(seed)
        for _ in range(12):
            added.append(engine.add(choose.choice(PROMPTS), max_new_tokens=choose.randint(1, 8), stop_ids=[]))
            if choose.random() < 0.3:
                engine.cancel(added[-1])
            sleep(0.001)

    def iterate() -> None:
        while engine.is_busy or not stop.is_set():
            list(engine)

    driver = Thread(target=iterate)
    driver.start()
    run_threads(*(partial(add, seed) for seed in range(8)))
    stop.set()
    driver.join()
    assert len(added) == 96 == len({request.request_id for request in added})
    alone = {tuple(prompt): generate(target, [prompt], None, max_new_tokens=8, stop_ids=[])[0] for prompt in PROMPTS}
    for request in added:
        assert request.answer is not None and request.answer.finish in ("length", "cancelled")
        tokens = request.answer.tokens
        assert tokens == alone[tuple(request.prompt)].tokens[: len(tokens)]


def test_several_threads_read_their_own_requests(target: Target) -> None:
    """Each drives when it waits; one that stalls keeps nobody waiting."""
    engine, found = Engine(target, None, rows=4), dict[int, list[int]]()
    requests = [engine.add(prompt, **SETTINGS) for prompt in PROMPTS]

    def read(number: int) -> None:
        tokens = found[number] = []
        for chunk in requests[number]:
            tokens += chunk.tokens
            sleep(0.2 if number == 0 and len(tokens) == 2 else 0)

    run_threads(*(partial(read, number) for number in range(4)))
    assert [found[number] for number in range(4)] == [request.answer and request.answer.tokens for request in requests]
    assert_alone(target, requests, **SETTINGS)


async def read(engine: Engine, prompt: list[int] = PROMPTS[0]) -> list[int]:
    return [token async for chunk in engine.add(prompt, **SETTINGS) for token in chunk.tokens]


def test_event_loops_of_several_threads_await_requests_of_one_engine(target: Target) -> None:
    engine, started, found = Engine(target, NGramProposer(length=3), rows=5), Barrier(3), list[list[list[int]]]()

    async def read_all() -> list[list[int]]:
        started.wait()
        return await asyncio.gather(*(read(engine, prompt) for prompt in PROMPTS))

    run_threads(*[lambda: found.append(asyncio.run(read_all()))] * 3)
    assert found == [[answer.tokens for answer in generate(target, PROMPTS, None, **SETTINGS)]] * 3


def test_a_waiter_that_is_cancelled_stops_no_other(target: Target) -> None:
    engine, expected = Engine(target, None), generate(target, PROMPTS[0], None, **SETTINGS)[0]

    async def read_both() -> list[int]:
        first, second = asyncio.ensure_future(read(engine)), asyncio.ensure_future(read(engine))
        await asyncio.sleep(0)
        second.cancel()
        return await first

    assert asyncio.run(read_both()) == expected.tokens == asyncio.run(read(engine))


@pytest.mark.parametrize(
    ("error", "found"),
    [
        (MemoryError("none left"), "MemoryError('none left')"),
        (StopIteration("no more drafts"), "RuntimeError('a step raised StopIteration(no more drafts)')"),
    ],
)
def test_an_error_of_a_step_reaches_all_that_wait_for_it(
    target: Target, monkeypatch: pytest.MonkeyPatch, error: Exception, found: str
) -> None:
    """An iterator of a proposer that is exhausted, too: a `StopIteration` cannot be raised into a future."""
    engine = Engine(target, None)
    monkeypatch.setattr(engine, "step", Mock(side_effect=error))

    async def read_both() -> list[Any]:
        both = asyncio.gather(read(engine), read(engine), return_exceptions=True)
        return await asyncio.wait_for(both, 60)

    assert [*map(repr, asyncio.run(read_both()))] == [found] * 2


def test_closing_does_not_block_an_event_loop(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for the step that runs, and so do those that wait for chunks."""
    engine, step = Engine(target, None), Engine.step
    began, goes_on = Event(), Event()

    def step_slowly(self: Engine) -> Any:
        began.set()
        assert goes_on.wait(60)
        return step(self)

    monkeypatch.setattr(Engine, "step", step_slowly)

    async def close_meanwhile() -> list[int]:
        reading = asyncio.ensure_future(read(engine))
        await asyncio.to_thread(began.wait, 60)
        stepping = Thread(target=engine.step)
        stepping.start()
        engine._is_closed = True
        late = asyncio.ensure_future(engine.step_async())
        for _ in range(3):  # the loop runs on
            await asyncio.sleep(0.01)
        goes_on.set()
        await asyncio.to_thread(engine.close)
        await asyncio.to_thread(stepping.join)
        await late
        return await reading

    assert len(asyncio.run(asyncio.wait_for(close_meanwhile(), 60))) <= 12


class FinishingBadly:
    """Always drafts, and fails when a request ends."""

    layers = ()

    def propose(self, step: Step, budget: int) -> Tree:
        return Tree.chain([[root, 3] for root in step.bonus])

    def finish(self, request_id: int, tokens: Any, accepted: int) -> None:
        raise OSError("cannot be stored")


def test_requests_of_a_step_that_was_cut_short_end(target: Target) -> None:
    """Some had ended already, without having got their answers."""

    def ends(request_id: int, tokens: list[int]) -> bool:
        return len(tokens) > len(PROMPTS[0]) + 2

    engine = Engine(target, FinishingBadly())
    requests = [engine.add(PROMPTS[0], max_new_tokens=6, stop_ids=[], criterion=ends) for _ in range(3)]
    with pytest.raises(OSError, match="cannot be stored"):
        list(engine)
    assert not engine.is_busy
    for request in requests:
        assert request.answer is not None and [*request][-1].answer is request.answer


# What is left


def count_kept(engine: Engine) -> int:
    """Objects of the project that are alive, after all requests have ended."""
    list(engine)
    gc.collect()
    return sum(str(type(each).__module__).startswith(("decode", "proposers")) for each in gc.get_objects())


@pytest.mark.parametrize(
    "name", ["ngram", "eagle3", *(pytest.param(name, marks=pytest.mark.slow) for name in ("merged", "draft"))]
)
def test_nothing_is_left_of_requests_that_have_ended(name: str) -> None:
    target = make_target()
    engine, counts, choose = Engine(target, DETERMINISTIC[name](target), rows=4, part=8), list[int](), random.Random(1)
    layers = WeakSet[KVLayer]()
    for count in (60, 60, 200):
        for number in range(count):
            request = engine.add(choose.choice(PROMPTS), max_new_tokens=choose.randint(1, 5), stop_ids=[])
            if number % 9 == 0:
                engine.cancel(request)
            engine.step()
            if engine.scheduler._batch is not None and number % 20 == 0:
                layers.update(engine.scheduler._batch.session.cache.layers)  # type: ignore[arg-type]
        counts.append(count_kept(engine))
    assert counts[2] <= counts[1] + 20 and not layers


@pytest.mark.parametrize("name", ["ngram fixed", "eagle3", "hydra++", "draft", "merged eagle3"])
def test_caches_grow_while_requests_join(name: str) -> None:
    """Longer texts and more rows than were allocated at first, also in the caches of heads and draft models."""
    long = Target(tiny("llama", num_hidden_layers=1, max_position_embeddings=1024))
    engine, requests = Engine(long, DETERMINISTIC[name](make_target()), rows=4, part=64), list[Request]()
    settings: dict[str, Any] = {"max_new_tokens": 24, "stop_ids": []}
    for row, length in enumerate((5, 270, 30, 700)):
        requests.append(engine.add([(7 * place + row) % 90 + 3 for place in range(length)], **settings))
        for _ in range(3):
            engine.step()
    list(engine)
    assert_alone(long, requests, **settings)
