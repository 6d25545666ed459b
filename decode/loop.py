"""The loop: propose, verify, accept, keep. Plain decoding is the same loop with a proposer that drafts nothing."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import torch

from decode.accept import WRONG_TREE, AcceptanceRule, Accepted, accept, accept_lossily, unpack
from decode.answer import Answer, Chunk, Limits, Request, make_requests, read_count
from decode.gpu.fusion import fusing
from decode.gpu.transfer import Upload, list_numbers
from decode.models.stock_model import MAX_TREE_SLOTS
from decode.noise import KEY_NAMES, row_keys
from decode.proposer import PlainProposer, Proposer, Step, Use, as_proposer, check_proposer
from decode.sampling import NO_TOKEN, RequestProcessors, Sampling
from decode.session import Fuse, Session, Verdict
from decode.stats import Seconds, Stats
from decode.target import Target, check_target
from decode.text import Prompt, as_list, as_whole_numbers, find_special
from decode.tree import Tree


def generate(
    target: Target, prompts: Prompt | Sequence[Prompt], proposer: Proposer | str | Path | None = "auto", **settings: Any
) -> list[Answer]:
    """The answers to the prompts, in order. Arguments and errors are those of `stream`.

    Warns (RuntimeWarning) for each answer that ended in an error; its `error` says why.
    """
    chunks = stream(target, prompts, proposer, **{"text": False, **settings})
    answers = {chunk.request_id: chunk.answer for chunk in chunks if chunk.answer is not None}
    for answer in answers.values():
        if answer.error is not None:
            warnings.warn(answer.error, RuntimeWarning, stacklevel=2)
    given = settings.get("request_ids")
    return [answers[each] for each in (sorted(answers) if given is None else as_whole_numbers(given, "request_ids"))]


def stream(
    target: Target,
    prompts: Prompt | Sequence[Prompt],
    proposer: Proposer | str | Path | None = "auto",
    *,
    batch_size: int | None = None,
    request_ids: Sequence[int] | None = None,
    sampling: Sampling | None = None,
    max_new_tokens: int = 256,
    stop: Sequence[str] | None = (),
    stop_ids: Sequence[int] | int | None = None,
    criterion: Callable[[int, list[int]], bool] | None = None,
    chat: bool | None = None,
    nodes: int = 64,
    text: bool = True,
    lossy_typical_acceptance: bool = False,
) -> Iterator[Chunk]:
    """What each step adds to each answer, as chunks.

    prompts: one prompt or a list of them. A prompt is text, a list of chat messages (content as text, or as parts of
    type text, which are joined), token ids (a list, tensor or array), or a tokenizer's output: `input_ids`, whose
    padding `attention_mask` hides. Each row of two-dimensional ids is a prompt; without a mask, padding counts as text.
    proposer: what drafts; a name is loaded as `proposers.load_proposer` does. None: plain decoding.
    batch_size: prompts decoded together (None: all). Plain decoding refills rows as they finish; with a proposer, one
    batch follows another.
    request_ids: one per prompt (None: 0, 1, ...). They key the noise, so a part of a list gets the same answers as in
    the whole list.
    An answer ends at `max_new_tokens`, at one of `stop_ids` (None: the model's own), before a string of `stop`, where
    `criterion(request_id, tokens)` is true, or at the end of the model's context.
    chat: whether to use the tokenizer's chat template (None: if it has one).
    nodes: the most nodes of a row's tree, root included. Near an answer's end, trees get shallower and not smaller.
    text: whether chunks carry text in addition to tokens.
    lossy_typical_acceptance: accept more draft tokens at temperatures above 0, with other answers.

    Lossless: the batch size never changes an answer, nor does a proposer of deterministic drafts. Sampled drafts keep
    the distribution of answers. A request whose logits or processed scores are NaN or infinite, or forbid every token,
    finishes with "error", its tokens so far and a line in `Answer.error`; the others go on. Raises ValueError for
    settings out of range and prompts that do not fit, and TypeError for arguments of another kind, before any
    work is done.
    """
    check_target(target)
    check_proposer(proposer)
    _check_kinds(sampling, chat)
    batch_size = None if batch_size is None else read_count(batch_size, "batch_size")
    if read_count(nodes, "nodes") > MAX_TREE_SLOTS:
        raise ValueError(f"nodes is {nodes}; a tree has its root and at most {MAX_TREE_SLOTS} nodes")
    special, stop = find_special(stop, target.tokenizer)
    ends = special | (target.stop_ids if stop_ids is None else _read_stop_ids(stop_ids, target))
    limits = Limits(max_new_tokens, ends, stop, criterion)
    waiting = deque(make_requests(target, as_list(prompts), request_ids, limits, chat, text or bool(stop)))
    sampling = sampling or Sampling()
    if sampling.processors:
        lengths = {request.request_id: len(request.prompt) for request in waiting}
        sampled = getattr(proposer, "sampled", False)
        own = RequestProcessors(sampling.processors, lengths, ends, limits.max_new_tokens, sampled)
        sampling = replace(sampling, processors=own)
    if lossy_typical_acceptance and sampling.processors:
        raise ValueError("typical acceptance supports no logits processors; leave them out or use lossless acceptance")
    rule = accept_lossily if lossy_typical_acceptance else accept
    run = _Run(target, as_proposer(proposer, target), sampling, int(nodes), rule)
    return _decode_all(run, waiting, batch_size or len(waiting))


generate.__signature__ = signature(stream).replace(return_annotation=list[Answer])  # type: ignore[attr-defined]


@dataclass(frozen=True)
class _Run:
    """What stays the same in all batches of a stream."""

    target: Target
    proposer: Proposer
    sampling: Sampling
    nodes: int
    accept: AcceptanceRule


def _decode_all(run: _Run, waiting: deque[Request], batch_size: int) -> Iterator[Chunk]:
    """One batch after another. `waiting` is emptied, so finished requests can be freed."""
    if getattr(run.proposer, "adaptive", False):
        run.target.warm_up(min(batch_size, len(waiting)))
    use = Use(run.proposer)
    try:
        while waiting:
            requests = [waiting.popleft() for _ in range(min(batch_size, len(waiting)))]
            # A proposer sees the prompts of all rows in one prefill, so only plain decoding can refill rows.
            refills = waiting if type(run.proposer) is PlainProposer else deque[Request]()
            yield from _decode(run, use, requests, refills)
    finally:
        use.end()


@torch.inference_mode()  # a step makes hundreds of small calls, which cost less in this mode
def _decode(run: _Run, use: Use, requests: list[Request], waiting: deque[Request]) -> Iterator[Chunk]:
    """The loop itself, for one batch. Waiting requests take the rows of finished ones."""
    at_once = run.sampling if run.accept is accept and not run.sampling.processors else None
    session = run.target.open(len(requests), run.proposer.layers, at_once)
    fuse = getattr(run.proposer, "fuse", None)
    seconds, is_prefill, upload = Seconds.begin(), True, None
    with seconds.measure("target"):
        tree, verdict = _prefill(session, requests, fuse and partial(fuse, run.target))
        drafted = tree
    while True:
        with seconds.measure("accept"), fusing(run.target.fuses_steps):
            texts = {request.request_id: request.sequence for request in requests}
            if verdict.packed is None:
                accepted = run.accept(tree, verdict.logits, run.sampling, texts, upload)
            else:
                accepted = unpack(verdict.packed)
        _refuse_wrong_trees(run, accepted, requests, drafted)
        has_failed = NO_TOKEN in accepted.bonus
        session.keep(accepted.path)
        yield from _extend(requests, accepted, seconds, run)
        # On a GPU the time of the target shows up in `accept`, which synchronizes.
        verify_seconds, seconds = seconds.target + seconds.accept, Seconds.begin()
        if waiting:
            with seconds.measure("target"):
                _refill(session, requests, waiting)
        kept = [row for row, request in enumerate(requests) if request.finish is None]
        if not kept:
            return
        if len(kept) < len(requests):
            session.select(kept)
            tree, verdict, accepted = tree.select(kept), verdict.select(kept), accepted.select(kept)
            requests = [requests[row] for row in kept]
        if has_failed:
            session.clear_free_slots()
        upload = _begin_upload(run, session, requests, accepted, is_prefill)
        step = _make_step(run, is_prefill, requests, kept, tree, verdict, accepted, verify_seconds, upload)
        with seconds.measure("proposer"), fusing(run.target.fuses_steps):
            drafted = use.propose(step, run.nodes if max(step.room) > 1 else 1)
        is_prefill = False
        with seconds.measure("target"), fusing(run.target.fuses_steps):
            tree = session.place(_prepare(run, session, drafted, step, upload))
            verdict = session.verify(tree)


def _prefill(session: Session, requests: list[Request], fuse: Fuse | None) -> tuple[Tree, Verdict]:
    """Read the prompts. The first tree is each prompt's last token alone; the features are of the whole prompts."""
    prompts = [request.prompt for request in requests]
    logits, features = session.extend(prompts, fuse)
    session.crop([len(prompt) - 1 for prompt in prompts])  # accepting the tree commits the last token again
    return Tree.chain([prompt[-1:] for prompt in prompts]), Verdict(logits[:, None], features)


def _refill(session: Session, requests: list[Request], waiting: deque[Request]) -> None:
    """Give the rows of finished requests to waiting ones, whose first root is their prompt's last token."""
    finished = [row for row, request in enumerate(requests) if request.finish][: len(waiting)]
    for row in finished:
        requests[row] = waiting.popleft()
    if finished:
        session.renew(finished, [requests[row].prompt for row in finished])
        session.crop([len(request.sequence) - 1 for request in requests])


def _begin_upload(run: _Run, session: Session, requests: list[Request], accepted: Accepted, is_prefill: bool) -> Upload:
    """All that the next step needs on the device, so that it is copied at once."""
    upload = session.begin_upload()
    bonus = [request.sequence[-1] for request in requests]
    if run.proposer.layers:
        committed = [request.prompt for request in requests] if is_prefill else accepted.tokens
        upload.add(list_numbers(committed, bonus, accepted.path))
    if upload.device.type != "cpu":
        upload.add({"roots": torch.tensor(bonus), "limits": torch.tensor([request.room - 1 for request in requests])})
        if not run.sampling.greedy:
            ids, lengths = [request.request_id for request in requests], [len(request.sequence) for request in requests]
            for stream, name in KEY_NAMES.items():
                upload.add({name: row_keys(run.sampling.seed, ids, lengths, run.nodes, stream)})
    return upload


def _prepare(run: _Run, session: Session, tree: Tree, step: Step, upload: Upload) -> Tree:
    """The tree, checked and without draft tokens that a row has no room for.

    They would cost time, and the model may have no positions for them. The bonus token needs room as well.
    """
    depths = [room - 1 for room in step.room]
    if "cpu" in (tree.tokens.device.type, upload.device.type):
        tree = tree.to(torch.device("cpu"))
        tree.check(len(step.room), run.nodes, run.target.vocabulary, step.bonus)
        return tree.cut(depths)
    tree = tree.to(upload.device)
    tree.check_shapes(len(step.room))
    return session.check(tree, upload["roots"], run.nodes).cut(depths, upload["limits"])


def _refuse_wrong_trees(run: _Run, accepted: Accepted, requests: list[Request], drafted: Tree) -> None:
    """Raise ValueError for a tree that was found invalid on a GPU. No text has changed then."""
    if WRONG_TREE in accepted.bonus:
        drafted.to(torch.device("cpu")).check(len(requests), run.nodes, run.target.vocabulary)
        wrong = requests[accepted.bonus.index(WRONG_TREE)].request_id
        raise ValueError(f"request {wrong}: the draft tree is not valid")


def _make_step(
    run: _Run,
    is_prefill: bool,
    requests: list[Request],
    kept: list[int],
    tree: Tree,
    verdict: Verdict,
    accepted: Accepted,
    seconds: float,
    upload: Upload,
) -> Step:
    """What the proposer sees of a verified tree, for the rows that go on."""
    features = verdict.features
    if features is not None and not is_prefill:
        features = features.gather(1, upload["path"][:, :, None].expand(-1, -1, features.shape[2]))
    return Step(
        is_prefill=is_prefill,
        request_ids=[request.request_id for request in requests],
        kept=kept,
        sequences=[request.sequence for request in requests],
        room=[request.room for request in requests],
        committed=[request.prompt for request in requests] if is_prefill else accepted.tokens,
        path=accepted.path,
        tree=tree,
        logits=verdict.logits,
        features=features,
        seconds=seconds,
        sampling=run.sampling,
        stop_ids=requests[0].limits.stop_ids,
        target=run.target,
        upload=upload,
        is_fused=is_prefill and getattr(run.proposer, "fuse", None) is not None,
    )


def _extend(requests: list[Request], accepted: Accepted, seconds: Seconds, run: _Run) -> Iterator[Chunk]:
    """Add the step's tokens to each answer. Yields a chunk per row."""
    chunks = [
        request.extend(path[1:], bonus)
        for request, path, bonus in zip(requests, accepted.tokens, accepted.bonus, strict=True)
    ]
    seconds.finish()
    for request, chunk, size in zip(requests, chunks, accepted.sizes, strict=True):
        stats = Stats(1, len(chunk.tokens), size - 1, [1] * chunk.drafted, seconds)
        request.stats.add(stats)
        if request.finish and size > 1 and (finish := getattr(run.proposer, "finish", None)) is not None:
            finish(request.request_id, chunk.tokens, chunk.drafted)
        if request.finish and isinstance(run.sampling.processors, RequestProcessors):
            run.sampling.processors.release(request.request_id)
        yield replace(chunk, stats=stats, answer=request.answer(run.target.tokenizer) if request.finish else None)


def _check_kinds(sampling: Any, chat: Any) -> None:
    if not isinstance(sampling, Sampling | None):
        call = "Sampling(temperature=0.7)"
        raise TypeError(f"sampling is a {type(sampling).__name__}; it is None or, for example, {call}")
    if not isinstance(chat, bool | None):
        raise TypeError(f"chat is {chat!r}; it is True, False or None")


def _read_stop_ids(stop_ids: Any, target: Target) -> frozenset[int]:
    """One token id or several. Raises ValueError for those that no answer can have."""
    ids = frozenset(as_whole_numbers(stop_ids, "stop_ids"))
    if outside := sorted(each for each in ids if not 0 <= each < target.vocabulary):
        raise ValueError(f"stop_ids have {outside[0]}; the model's vocabulary is 0 to {target.vocabulary - 1}")
    return ids
