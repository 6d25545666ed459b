"""Answers to a list of prompts: `stream` yields them step by step, `generate` returns them whole."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from inspect import signature
from typing import Any

from decode.arguments import naming_arguments
from decode.engine import Engine
from decode.grammars.grammar import AnyGrammar
from decode.proposer import GivenProposer, as_proposer, check_proposer, find_member
from decode.request import NODES, Request, read_requests
from decode.requests.answer import NEW_TOKENS, Answer, Chunk
from decode.requests.numbers import as_whole_numbers, read_count
from decode.requests.text import Prompt, as_list
from decode.scheduler import WHOLE
from decode.target import Target, check_target
from decode.trees.sampling import Sampling


@naming_arguments("stream")
def stream(
    target: Target,
    prompts: Prompt | Sequence[Prompt],
    proposer: GivenProposer = "auto",
    *,
    batch_size: int | None = None,
    request_ids: Sequence[int] | None = None,
    sampling: Sampling | None = None,
    max_new_tokens: int | None = NEW_TOKENS,
    stop: Sequence[str] | str | None = (),
    stop_ids: Sequence[int] | int | None = None,
    criterion: Callable[[int, list[int]], bool] | None = None,
    chat: bool | None = None,
    nodes: int | None = NODES,
    text: bool = True,
    log_probs: int | None = None,
    grammar: AnyGrammar = None,
    follow_weights: bool = False,
    lossy_typical_acceptance: bool = False,
) -> Iterator[Chunk]:
    """What each step adds to each answer, as chunks.

    prompts: one prompt or a list of them. A prompt is text, a list of chat messages (content as text, or as parts of
    type text, which are joined), token ids (a list, tensor or array), or a tokenizer's output: `input_ids`, whose
    padding `attention_mask` hides. Each row of two-dimensional ids is a prompt; without a mask, padding counts as text.
    proposer: what drafts; a name is loaded as `proposers.load_proposer` does; a function makes it for the target. None:
    plain decoding.
    batch_size: prompts decoded together (None: all). The next prompt takes the place of an answer that ends.
    request_ids: one per prompt (None: 0, 1, ...). They key the noise, so a part of a list gets the same answers as in
    the whole list.
    An answer ends at `max_new_tokens`, at one of `stop_ids` (None: the model's own), before a string of `stop` (one or
    several, in the text with special tokens), where `criterion(request_id, tokens)` is true, or at the end of the
    model's context.
    chat: whether to use the tokenizer's chat template (None: if it has one).
    nodes: the most nodes of a row's tree, root included. Near an answer's end, trees get shallower and not smaller.
    text: whether chunks carry text in addition to tokens.
    log_probs: chunks and answers have the model's log-probability of each token, and of the `log_probs` most likely
    ones there; None: none.
    grammar: what each answer must look like: a JSON schema (a dict, a pydantic model or a file), "json", a compiled
    regular expression, a Lark grammar, a `Grammar`, or a function that makes a `Matcher` from a request id. An answer
    that is complete ends with "grammar". None: anything.
    follow_weights: if the model's weights change, go on under the new ones, which read the text so far. False: the
    answer ends with an error.
    lossy_typical_acceptance: accept more draft tokens at temperatures above 0, with other answers.

    Lossless: the batch size never changes an answer, nor does a proposer of deterministic drafts. Sampled drafts keep
    the distribution of answers. A request ends with "error", its tokens so far and a line in `Answer.error`, and the
    others go on, if its logits or processed scores are NaN or infinite or forbid every token, if its logits processor,
    criterion or grammar raises an error, or if there is no memory for its prompt. Raises ValueError for settings out of
    range and prompts that do not fit, and TypeError for arguments of another kind, before any work is done.
    """
    check_target(target, prompts, "stream(target, {})")
    check_proposer(proposer)
    if callable(proposer):
        proposer = as_proposer(proposer, target)  # its members are read below
    batch_size = None if batch_size is None else read_count(batch_size, "batch_size")
    listed = as_list(prompts)
    requests = read_requests(
        target,
        listed,
        request_ids,
        sampling=sampling,
        max_new_tokens=max_new_tokens,
        stop=stop,
        stop_ids=stop_ids,
        criterion=criterion,
        chat=chat,
        nodes=nodes,
        text=text,
        log_probs=log_probs,
        grammar=grammar,
        follow_weights=follow_weights,
        is_alone=len(listed) == 1,
        sampled=find_member(proposer, "sampled"),
    )
    nodes = NODES if nodes is None else nodes
    return run_requests(target, requests, proposer, nodes, batch_size, lossy_typical_acceptance)


def run_requests(
    target: Target,
    requests: Sequence[Request],
    proposer: GivenProposer,
    nodes: int,
    rows: int | None = None,
    lossy: bool = False,
) -> Iterator[Chunk]:
    """The chunks of requests that `read_requests` has made. They run in an engine of their own, `rows` at a time."""
    rows = min(rows or len(requests), len(requests))
    # Prompts are read whole, so that no row is empty meanwhile.
    whole = {"part": WHOLE, "kept_bytes": 0}
    engine = Engine(target, proposer, rows=rows, nodes=nodes, **whole, lossy_typical_acceptance=lossy)
    engine.submit(requests)
    return _run(engine)


@naming_arguments("generate", signature(stream).parameters)
def generate(
    target: Target, prompts: Prompt | Sequence[Prompt], proposer: GivenProposer = "auto", **settings: Any
) -> list[Answer]:
    """The answers to the prompts, in order. Arguments and errors are those of `stream`.

    Warns (RuntimeWarning) for each answer that ended in an error; its `error` says why.
    """
    check_target(target, prompts, "generate(target, {})")
    chunks = stream(target, prompts, proposer, **{"text": False, **settings})
    answers = {chunk.request_id: chunk.answer for chunk in chunks if chunk.answer is not None}
    for answer in answers.values():
        if answer.error is not None:
            warnings.warn(answer.error, RuntimeWarning, stacklevel=3)  # of the call
    given = settings.get("request_ids")
    return [answers[each] for each in (sorted(answers) if given is None else as_whole_numbers(given, "request_ids"))]


def _run(engine: Engine) -> Iterator[Chunk]:
    with closing(engine):
        yield from engine


generate.__signature__ = signature(stream).replace(return_annotation=list[Answer])  # type: ignore[attr-defined]
