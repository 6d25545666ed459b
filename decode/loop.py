"""The loop: propose, verify, accept, keep. Plain decoding is the same loop with a proposer that proposes nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from inspect import signature
from typing import Any, TypeAlias

import torch
from torch import Tensor

from decode.accept import Accepted, accept
from decode.answer import Answer, Chunk, Limits, Request
from decode.lossy import accept_typically, check_typical
from decode.proposer import PlainProposer, Proposer, Step
from decode.sampling import Sampling, WithinAnswers
from decode.session import Session
from decode.stats import Seconds, Stats
from decode.target import Target
from decode.text import Prompt, TextStream, as_list, encode, find_special
from decode.tree import Tree

Accept: TypeAlias = Callable[[Tree, Tensor, Sampling, Sequence[int], Sequence[Sequence[int]]], Accepted]


def generate(
    target: Target, prompts: Prompt | Sequence[Prompt], proposer: Proposer | None = None, **settings: Any
) -> list[Answer]:
    """The answers to the prompts, in their order. Arguments and errors are those of `stream`."""
    chunks = stream(target, prompts, proposer, **{"text": False, **settings})
    answers = {chunk.request_id: chunk.answer for chunk in chunks if chunk.answer is not None}
    return [answers[request_id] for request_id in settings.get("request_ids") or sorted(answers)]


def stream(
    target: Target,
    prompts: Prompt | Sequence[Prompt],
    proposer: Proposer | None = None,
    *,
    batch_size: int | None = None,
    request_ids: Sequence[int] | None = None,
    sampling: Sampling | None = None,
    max_new_tokens: int = 256,
    stop: Sequence[str] = (),
    stop_ids: Sequence[int] | None = None,
    criterion: Callable[[int, list[int]], bool] | None = None,
    chat: bool | None = None,
    nodes: int = 64,
    text: bool = True,
    lossy_typical_acceptance: bool = False,
    **unknown: Any,
) -> Iterator[Chunk]:
    """What each step adds to each answer, `batch_size` prompts at a time (None: all together).

    prompts: one prompt or a list. A prompt is text, chat messages or token ids; `chat` is that of `decode.text.encode`.
    proposer: None decodes plainly. Plain decoding refills the batch as rows finish; with a proposer, batches follow one
    another. request_ids: names for the prompts (None: 0, 1, ...). A request id keys its prompt's noise, so part of a
    list can be answered as in the whole list.
    Answers end at `max_new_tokens`, at one of `stop_ids` (None: the model's own), before a string of `stop`, where
    `criterion(request_id, tokens)` is true, or at the end of the model's context.
    nodes: the largest tree of a row, root included; near an answer's end trees become shallower, not smaller.
    text: whether chunks carry text in addition to tokens.
    lossy_typical_acceptance: accept more at temperatures above 0, with other answers (`decode.lossy`).

    Lossless: the batch size never changes an answer, nor does a proposer of deterministic drafts. Sampled drafts keep
    the answer's distribution. Raises ValueError for settings out of range and prompts that do not fit, and TypeError
    for unknown arguments, before any work is done.
    """
    _refuse_unknown(unknown)
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"batch size is {batch_size}; it must be at least 1")
    if nodes < 1:
        raise ValueError(f"nodes is {nodes}; a tree has at least its root")
    ends, stop = find_special(stop, target.tokenizer)
    ends |= target.stop_ids if stop_ids is None else frozenset(stop_ids)
    limits = Limits(max_new_tokens, ends, stop, criterion)
    waiting = deque(_make_requests(target, as_list(prompts), request_ids, limits, chat, text or bool(stop)))
    sampling = sampling or Sampling()
    if sampling.processors:
        begins = {request.request_id: len(request.prompt) for request in waiting}
        sampling = replace(sampling, processors=[WithinAnswers(sampling.processors, begins, ends, max_new_tokens)])
    if lossy_typical_acceptance:
        check_typical(sampling)
    run = _Run(
        target, proposer or PlainProposer(), sampling, nodes, accept_typically if lossy_typical_acceptance else accept
    )
    return _decode_all(run, waiting, batch_size or len(waiting))


generate.__signature__ = signature(stream).replace(return_annotation=list[Answer])  # type: ignore[attr-defined]


@dataclass(frozen=True)
class _Run:
    """What stays the same in all batches of a stream."""

    target: Target
    proposer: Proposer
    sampling: Sampling
    nodes: int
    accept: Accept


@dataclass(frozen=True)
class _Outcome:
    """What one forward pass led to, row by row; the fields are those of `Step`."""

    is_prefill: bool
    tree: Tree
    logits: Tensor
    accepted: Accepted
    committed: list[list[int]]
    features: Tensor | None

    def select(self, rows: Sequence[int]) -> _Outcome:
        """The same for some rows only."""
        features = None if self.features is None else self.features[rows]
        committed = [self.committed[row] for row in rows]
        tree, accepted = self.tree.select(rows), self.accepted.select(rows)
        return _Outcome(self.is_prefill, tree, self.logits[rows], accepted, committed, features)


def _decode_all(run: _Run, waiting: deque[Request], batch_size: int) -> Iterator[Chunk]:
    """Batch after batch. Requests are let go as they finish."""
    run.target.warm_up(min(batch_size, len(waiting)), measure=getattr(run.proposer, "adaptive", False))
    while waiting:
        rows = [waiting.popleft() for _ in range(min(batch_size, len(waiting)))]
        # A proposer sees all rows from their prompts on, together; plain decoding has nothing to see.
        joining = waiting if isinstance(run.proposer, PlainProposer) else deque[Request]()
        yield from _decode(run, rows, joining)


@torch.inference_mode()  # each of hundreds of small calls a step is cheaper in it
def _decode(run: _Run, rows: list[Request], waiting: deque[Request]) -> Iterator[Chunk]:
    """The loop itself, for one batch. Finished rows leave their places to waiting requests."""
    session = run.target.open(len(rows), run.proposer.layers)
    seconds = Seconds.begin()
    outcome = _prefill(run, session, rows, seconds)
    while True:
        yield from _extend(rows, outcome.accepted, seconds, run.target)
        spent, seconds = seconds.target + seconds.accept, Seconds.begin()  # on a GPU, accepting waits for the target
        if waiting:
            with seconds.measure("target"):
                _refill(session, rows, waiting)
        kept = [row for row, request in enumerate(rows) if request.finish is None]
        if not kept:
            return
        if len(kept) < len(rows):
            session.select(kept)
            outcome, rows = outcome.select(kept), [rows[row] for row in kept]
        step = _make_step(run, outcome, rows, kept, spent)
        with seconds.measure("proposer"):
            tree = run.proposer.propose(step, run.nodes if max(step.room) > 1 else 1)
        if tree.tokens.device.type == "cpu":
            tree.check(len(rows), run.nodes, run.target.vocabulary)
        # A bonus token follows the last draft token. Draft tokens that a row has no room for would cost time for
        # nothing, and the model may have no positions for them.
        outcome = _verify(run, session, tree.cut([room - 1 for room in step.room]), rows, seconds)


def _prefill(run: _Run, session: Session, rows: list[Request], seconds: Seconds) -> _Outcome:
    """Commit the prompts, and choose the token after each: its last token is a tree of one node."""
    prompts = [request.prompt for request in rows]
    with seconds.measure("target"):
        logits, features = session.extend(prompts)
    session.crop([len(prompt) - 1 for prompt in prompts])  # the tree's node is kept with its path
    tree = Tree.chain([prompt[-1:] for prompt in prompts])
    accepted = _accept(run, session, tree, logits[:, None], rows, seconds)
    return _Outcome(True, tree, logits[:, None], accepted, prompts, features)


def _verify(run: _Run, session: Session, tree: Tree, rows: list[Request], seconds: Seconds) -> _Outcome:
    """One forward pass over a draft tree; its accepted path stays in the KV cache."""
    with seconds.measure("target"):
        verdict = session.verify(tree)
    accepted = _accept(run, session, tree, verdict.logits, rows, seconds)
    features = None if verdict.features is None else _along(accepted.path, verdict.features)
    return _Outcome(False, tree, verdict.logits, accepted, accepted.tokens, features)


def _accept(run: _Run, session: Session, tree: Tree, logits: Tensor, rows: list[Request], seconds: Seconds) -> Accepted:
    with seconds.measure("accept"):
        ids, sequences = [request.request_id for request in rows], [request.sequence for request in rows]
        accepted = run.accept(tree, logits, run.sampling, ids, sequences)
    session.keep(accepted.path)
    return accepted


def _refill(session: Session, rows: list[Request], waiting: deque[Request]) -> None:
    """Give the places of finished rows to waiting requests. The root of their first tree is their prompt's last token."""
    places = [row for row, request in enumerate(rows) if request.finish][: len(waiting)]
    for row in places:
        rows[row] = waiting.popleft()
    if places:
        session.renew(places, [rows[row].prompt for row in places])
        session.crop([len(request.sequence) - 1 for request in rows])


def _make_step(run: _Run, outcome: _Outcome, rows: list[Request], kept: list[int], seconds: float) -> Step:
    """What the proposer sees of the rows that go on."""
    return Step(
        is_prefill=outcome.is_prefill,
        request_ids=[request.request_id for request in rows],
        kept=kept,
        sequences=[request.sequence for request in rows],
        room=[request.room for request in rows],
        committed=outcome.committed,
        path=outcome.accepted.path,
        tree=outcome.tree,
        logits=outcome.logits,
        features=outcome.features,
        seconds=seconds,
        sampling=run.sampling,
        stop_ids=rows[0].limits.stop_ids,
        target=run.target,
    )


def _extend(rows: list[Request], accepted: Accepted, seconds: Seconds, target: Target) -> Iterator[Chunk]:
    """Add the step's tokens to each answer and hand out what is new."""
    chunks = [
        request.extend(path[1:], bonus)
        for request, path, bonus in zip(rows, accepted.tokens, accepted.bonus, strict=True)
    ]
    seconds.finish()
    for request, chunk, size in zip(rows, chunks, accepted.sizes, strict=True):
        stats = Stats.of_step(len(chunk.tokens), chunk.drafted, size - 1, seconds)
        request.stats.add(stats)
        yield replace(chunk, stats=stats, answer=request.answer(target.tokenizer) if request.finish else None)


def _along(path: list[list[int]], features: Tensor) -> Tensor:
    """The features [B, T, F] of each row's accepted nodes, out of the whole tree's [B, N, F]."""
    width = max(map(len, path))
    index = torch.tensor([[*row, *[0] * (width - len(row))] for row in path], device=features.device)
    return features.gather(1, index[:, :, None].expand(-1, -1, features.shape[2]))


def _make_requests(
    target: Target,
    prompts: Sequence[Prompt],
    request_ids: Sequence[int] | None,
    limits: Limits,
    chat: bool | None,
    text: bool,
) -> list[Request]:
    """The requests, each prompt encoded and checked against the context."""
    if limits.stop and target.tokenizer is None:
        raise ValueError("stop strings need a tokenizer: Target(model, tokenizer)")
    ids = range(len(prompts)) if request_ids is None else request_ids
    if not len(prompts) == len(ids) == len(set(ids)):
        raise ValueError(f"{len(prompts)} prompts need as many different request_ids; {len(set(ids))} are given")
    requests = []
    for request_id, prompt in zip(ids, prompts, strict=True):
        tokens = encode(prompt, target.tokenizer, chat)
        if len(tokens) >= target.context:
            raise ValueError(
                f"prompt {request_id} has {len(tokens)} tokens; the model's context of {target.context} leaves no room "
                "for an answer"
            )
        if not 0 <= min(tokens) <= max(tokens) < target.vocabulary:
            raise ValueError(f"prompt {request_id} has a token outside the model's vocabulary of {target.vocabulary}")
        stream = TextStream(target.tokenizer, limits.stop) if text and target.tokenizer is not None else None
        requests.append(Request(request_id, tokens, limits, target.context, stream))
    return requests


def _refuse_unknown(unknown: Mapping[str, Any]) -> None:
    """Raise TypeError for a misspelt argument, with the name that is most like it."""
    for name in unknown:
        known = [
            each for each, parameter in signature(stream).parameters.items() if parameter.kind != parameter.VAR_KEYWORD
        ]
        like = get_close_matches(name, known, n=1, cutoff=0.5)
        raise TypeError(f"unknown argument {name!r}" + (f"; did you mean {like[0]!r}?" if like else ""))
