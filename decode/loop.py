"""The loop: propose, verify, accept, keep. Plain decoding is the same loop with a proposer that proposes nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from decode.accept import Accepted, accept
from decode.answer import Answer, Chunk, Limits, Row
from decode.lossy import accept_typically, check_typical
from decode.proposer import Plain, Proposer, Step
from decode.sampling import Sampling, WithinAnswers
from decode.session import Session, Verdict
from decode.stats import Seconds, Stats
from decode.target import Target
from decode.text import Prompt, TextStream, encode, find_special
from decode.tree import Tree

Rule: TypeAlias = Callable[[Tree, Tensor, Sampling, Sequence[int], Sequence[Sequence[int]]], Accepted]


def generate(
    target: Target, prompts: Sequence[Prompt], proposer: Proposer | None = None, **settings: Any
) -> list[Answer]:
    """Answer the prompts and return the answers in their order. Arguments and errors are those of `stream`."""
    chunks = stream(target, prompts, proposer, **{"text": False, **settings})
    answers = {chunk.row: chunk.answer for chunk in chunks if chunk.answer is not None}
    return [answers[number] for number in settings.get("numbers") or range(len(prompts))]


def stream(
    target: Target,
    prompts: Sequence[Prompt],
    proposer: Proposer | None = None,
    *,
    batch_size: int | None = None,
    numbers: Sequence[int] | None = None,
    sampling: Sampling | None = None,
    max_new_tokens: int = 256,
    stop: Sequence[str] = (),
    stop_ids: Sequence[int] | None = None,
    criterion: Callable[[int, list[int]], bool] | None = None,
    chat: bool | None = None,
    nodes: int = 64,
    text: bool = True,
    lossy_typical_acceptance: bool = False,
) -> Iterator[Chunk]:
    """Answer the prompts, `batch_size` at a time (None: all together); yield what each step adds to each answer.

    prompts: text, chat messages or token ids; `chat` as in `decode.text.encode`. proposer: None decodes plainly, and
    each row that finishes makes room for the next prompt; with a proposer, batches follow one another. numbers: what
    chunks call the prompts (None: 0, 1, ...); a number keys its prompt's noise, so that some prompts of a list are
    answered as in the whole list. Answers end at `max_new_tokens`, at one of `stop_ids` (None: the model's own),
    before one of the strings `stop`, where `criterion(number, tokens)` says so, or at the end of the model's context.
    nodes: the most tree nodes a step and row, root included; near an answer's end trees become shallower, not smaller.
    text: whether chunks carry text as well as tokens.
    lossy_typical_acceptance: change the answers at temperatures above 0, for speed (`decode.lossy`).

    Neither the proposer nor the batch size changes an answer; a proposer that draws its drafts at random keeps the
    law of the answer, not its letters. Raises ValueError for settings out of range and prompts that do not fit,
    before any work is done.
    """
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"batch size is {batch_size}; it must be at least 1")
    if nodes < 1:
        raise ValueError(f"nodes is {nodes}; a tree has at least its root")
    ends, stop = find_special(stop, target.tokenizer)
    ends |= target.stop_ids if stop_ids is None else frozenset(stop_ids)
    limits = Limits(max_new_tokens, ends, stop, criterion)
    waiting = deque(_make_rows(target, prompts, numbers, limits, chat, text or bool(stop)))
    sampling = sampling or Sampling()
    if sampling.processors:
        begins = {row.number: len(row.prompt) for row in waiting}
        sampling = replace(sampling, processors=[WithinAnswers(sampling.processors, begins, ends, max_new_tokens)])
    if lossy_typical_acceptance:
        check_typical(sampling)
    rule = accept_typically if lossy_typical_acceptance else accept
    return _decode_all(target, waiting, batch_size or len(waiting), proposer or Plain(), sampling, nodes, rule)


def _decode_all(
    target: Target, waiting: deque[Row], size: int, proposer: Proposer, sampling: Sampling, nodes: int, rule: Rule
) -> Iterator[Chunk]:
    """Batch after batch; rows are let go of as they finish."""
    while waiting:
        rows = [waiting.popleft() for _ in range(min(size, len(waiting)))]
        # A proposer observes rows from their prompts on, all together; plain decoding has nothing to observe.
        joining = waiting if isinstance(proposer, Plain) else deque[Row]()
        yield from _decode(target, rows, joining, proposer, sampling, nodes, rule)


@torch.inference_mode()  # of hundreds of small calls a step, each is cheaper in it
def _decode(
    target: Target, rows: list[Row], waiting: deque[Row], proposer: Proposer, sampling: Sampling, nodes: int, rule: Rule
) -> Iterator[Chunk]:
    """The loop itself, for one batch; rows that finish leave their places to those that wait."""
    session = target.open(len(rows), proposer.layers)
    seconds = Seconds.begin()
    with seconds.measure("target"):
        logits, features = session.extend([row.prompt for row in rows])
    # The prompt is a chain that is accepted whole: what remains to be decided is the token after its last node.
    session.crop([len(row.prompt) - 1 for row in rows])
    tree, verdict = Tree.chain([row.prompt[-1:] for row in rows]), Verdict(logits[:, None], features)
    step: Step | None = None
    while True:
        with seconds.measure("accept"):
            sequences = [row.sequence for row in rows]
            accepted = rule(tree, verdict.logits, sampling, [row.number for row in rows], sequences)
        session.keep(accepted.path)
        if step is not None and verdict.features is not None:
            features = _along(accepted.path, verdict.features)
        yield from _grow(rows, accepted, seconds, target)
        spent, seconds = seconds.target + seconds.accept, Seconds.begin()  # on a GPU, accepting waits for the target
        if waiting:
            with seconds.measure("target"):
                _refill(session, rows, waiting)
        kept = [place for place, row in enumerate(rows) if row.finish is None]
        if not kept:
            return
        if len(kept) < len(rows):
            session.select(kept)
            tree, accepted, rows = tree.select(kept), accepted.select(kept), [rows[place] for place in kept]
            verdict, features = verdict.select(kept), None if features is None else features[kept]
        with seconds.measure("proposer"):
            seen = Verdict(verdict.logits, features)
            step = _note(step is None, kept, rows, accepted, tree, seen, spent, sampling, target)
            proposer.observe(step)
            tree = proposer.propose(nodes if max(step.room) > 1 else 1)
        if tree.tokens.device.type == "cpu":
            tree.check(len(rows), nodes, target.vocabulary)
        # A bonus token follows the last guess. Guesses that a row has no room for would cost time for nothing, and the
        # model may have no positions for them.
        tree = tree.cut([room - 1 for room in step.room])
        with seconds.measure("target"):
            verdict = session.verify(tree)


def _refill(session: Session, rows: list[Row], waiting: deque[Row]) -> None:
    """Give the places of finished rows to waiting ones. Their last token is the root of their first tree."""
    places = [place for place, row in enumerate(rows) if row.finish][: len(waiting)]
    for place in places:
        rows[place] = waiting.popleft()
    if places:
        session.renew(places, [rows[place].prompt for place in places])
        session.crop([len(row.sequence) - 1 for row in rows])


def _note(
    first: bool,
    kept: list[int],
    rows: list[Row],
    accepted: Accepted,
    tree: Tree,
    verdict: Verdict,
    seconds: float,
    sampling: Sampling,
    target: Target,
) -> Step:
    """What the proposer observes of the rows that go on."""
    return Step(
        first=first,
        rows=[row.number for row in rows],
        kept=kept,
        sequences=[row.sequence for row in rows],
        room=[row.room for row in rows],
        committed=[row.prompt for row in rows] if first else accepted.tokens,
        path=accepted.path,
        tree=tree,
        logits=verdict.logits,
        features=verdict.features,
        seconds=seconds,
        sampling=sampling,
        stop_ids=rows[0].limits.stop_ids,
        target=target,
    )


def _grow(rows: list[Row], accepted: Accepted, seconds: Seconds, target: Target) -> Iterator[Chunk]:
    """Add the step's tokens to each answer and hand out what is new."""
    chunks = [
        row.extend(path[1:], bonus) for row, path, bonus in zip(rows, accepted.tokens, accepted.bonus, strict=True)
    ]
    seconds.finish()
    for row, chunk, size in zip(rows, chunks, accepted.sizes, strict=True):
        stats = Stats.of_step(len(chunk.tokens), chunk.guessed, size - 1, seconds)
        row.stats.add(stats)
        yield replace(chunk, stats=stats, answer=row.answer(target.tokenizer) if row.finish else None)


def _along(path: list[list[int]], features: Tensor) -> Tensor:
    """The features [B, T, F] of each row's accepted nodes, out of those of the whole tree, [B, N, F]."""
    width = max(map(len, path))
    index = torch.tensor([[*row, *[0] * (width - len(row))] for row in path], device=features.device)
    return features.gather(1, index[:, :, None].expand(-1, -1, features.shape[2]))


def _make_rows(
    target: Target,
    prompts: Sequence[Prompt],
    numbers: Sequence[int] | None,
    limits: Limits,
    chat: bool | None,
    text: bool,
) -> list[Row]:
    """The answers to be made, each prompt encoded and measured against the context."""
    if isinstance(prompts, str):
        raise ValueError("prompts is a list; put a single prompt into brackets")
    if limits.stop and target.tokenizer is None:
        raise ValueError("stop strings need a tokenizer: Target(model, tokenizer)")
    numbers = range(len(prompts)) if numbers is None else numbers
    if not len(prompts) == len(numbers) == len(set(numbers)):
        raise ValueError(f"{len(prompts)} prompts need as many numbers, all different; {len(set(numbers))} are given")
    rows = []
    for number, prompt in zip(numbers, prompts, strict=True):
        ids = encode(prompt, target.tokenizer, chat)
        if len(ids) >= target.context:
            raise ValueError(
                f"prompt {number} has {len(ids)} tokens; the model's context of {target.context} leaves no room for "
                "an answer"
            )
        if not 0 <= min(ids) <= max(ids) < target.vocabulary:
            raise ValueError(f"prompt {number} has a token outside the model's vocabulary of {target.vocabulary}")
        stream = TextStream(target.tokenizer, limits.stop) if text and target.tokenizer is not None else None
        rows.append(Row(number, ids, limits, target.context, stream))
    return rows
