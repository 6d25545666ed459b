"""Measure how often a head's or draft model's tokens are accepted, and save that in its folder for drafting."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from tqdm import tqdm

from decode import Target, Tree, stream
from decode.devices.backend import top_tokens
from decode.models.loading import check_model
from decode.prefill import read_texts
from decode.session import Session
from draftless_commands.shared.command import Parser, at_least, check_output_folder, failing_clearly
from draftless_commands.shared.options import ModelOptions, add_kind_option, add_model_options, load_draft, load_target
from draftless_commands.shared.prompts import TEMPLATE_OPTION, encode_turn, read_conversations
from draftless_commands.shared.results import to_markdown
from draftless_commands.shared.worth import NODES, count, describe_tau, find_worth
from heads.checkpoint import find_kind, is_saved_head
from heads.kinds import KINDS
from proposers import HeadProposer, NGramProposer
from proposers.calibration import Calibration, log_odds
from proposers.draft_models.proposer import has_other_tokens
from proposers.load import load_draft_head, load_proposer
from proposers.options import find_proposer
from proposers.search import RANKS
from training.rendering import Renderer

EPILOG = """\
The model answers the prompts greedily, and the head drafts at each position of its answers. Use prompts that the head
was not trained on.

Written to DIR/calibration.json: acceptance (for each head, how often its draft token of rank 0, 1, ... is accepted if
its ancestors are), confidence (how to map its own probabilities to acceptance), expected_tau (of the best trees of 1,
2, ... nodes).

At the end come the tau that is expected of trees of 16 nodes, and a verdict: the estimated speed with trees sized by
their cost, relative to no drafts.
"""
PROMPT_FILE_HELP = """prompts: a .jsonl file of prompts, conversations or distilled answers (docs/training.md has the
formats); of turns, only the first is used"""
SHOWN = (2, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # numbers of nodes
PRIOR = 3.0  # outcomes that the head's own probabilities count for
CHUNK = 64  # positions that are tried together: an EAGLE head needs a copy of its cache for each
DEPTH = 8  # of draft models; deeper levels are like the deepest
UNCALIBRATED = (0.0, 1.0, 0.0)  # the head's own probabilities


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser()
    args = parser.parse_args(argv)
    with failing_clearly(parser):
        model = ModelOptions.from_args(args)
        folder = args.draft_model or args.head
        if args.head is not None:
            check_head(folder)
        elif not folder.is_dir():
            raise ValueError(
                f"--draft-model {folder}: there is no such local folder, and the calibration is kept in it"
            )
        else:
            check_model(folder)
        check_output_folder(folder, "--draft-model" if args.head is None else "--head")
        asked = read_conversations(args.prompt_file)
        conversations = [each for each in asked if "dropped" not in each.fields][: args.limit]
        if not conversations:
            raise ValueError(f"{args.prompt_file}: all answers were dropped; give other prompts")
        target = load_target(model if args.head is None else model.for_heads([folder]))
        _, prompts = encode_turn(conversations, 0, target, Renderer(target.tokenizer, args.template_option))
        if args.head is not None:
            head = load_draft_head(folder, target)
            try_out: TryOut = partial(try_head, target, find_proposer(head.kind)(head).prepare(target))
        else:
            draft = load_draft(replace(model, model=str(folder)))
            if has_other_tokens(draft, target):
                raise ValueError(
                    "the draft model has another tokenizer, whose tokens cannot be compared with the answers'"
                )
            try_out = partial(try_draft_model, draft)
        calibration = fit_calibration(measure(target, try_out, prompts, args.max_new_tokens))
        print(describe(calibration, len(prompts)))
        calibration.save(folder)
        drafts = load_proposer(folder, target) if args.head else load_proposer("draft", target, draft_model=draft)
        print(find_worth(target, drafts, prompts).describe())


def check_head(folder: Path) -> None:
    """Raise ValueError if a folder has no head, or one whose calibration is not kept there."""
    if KINDS[find_kind(folder)].in_checkpoint and not is_saved_head(folder):
        raise ValueError(
            f"--head {folder} is a model's checkpoint, where no calibration is kept; save its MTP module in a folder "
            "of its own first: heads.save_head(heads.load_head(CHECKPOINT), FOLDER)"
        )


def make_parser() -> Parser:
    parser = Parser(prog="draftless calibrate", description=__doc__, epilog=EPILOG)
    add = parser.add_argument
    one = parser.add_mutually_exclusive_group(required=True).add_argument
    one("--head", type=Path, metavar="DIR", help="the head's folder")
    one("--draft-model", type=Path, metavar="DIR", help="or that of a draft model with the model's tokenizer")
    add_kind_option(parser)
    add("--prompt-file", required=True, metavar="FILE", help=PROMPT_FILE_HELP)
    add("--limit", type=at_least(1), metavar="N", help="use the first N prompts only")
    add("--max-new-tokens", type=at_least(3), default=128, metavar="N", help="default: %(default)s")
    parser.add_argument("--template-option", **TEMPLATE_OPTION)
    add_model_options(parser)
    return parser


def describe(calibration: Calibration, answers: int) -> str:
    """Tables of the acceptance by rank and head, and of the expected tau by tree size. answers: all that were given."""
    acceptance = calibration.acceptance
    ranks = [["rank", *(f"head {number}" for number in range(1, len(acceptance) + 1))]]
    ranks += [[str(rank), *(f"{row[rank]:.1%}" for row in acceptance)] for rank in range(len(acceptance[0]))]
    ranks.append(["positions", *map(str, calibration.positions)])
    trees = [["nodes", "expected tau"]]
    taus = calibration.expect_tau(max(SHOWN))
    for nodes in (size for size in SHOWN if size <= len(taus)):
        trees.append([str(nodes), f"{taus[nodes - 1]:.2f}"])
    basis = f"expected from {count(calibration.positions[0], 'position')} of {count(answers, 'answer')}"
    tau = describe_tau(taus[min(NODES, len(taus)) - 1], basis)
    return f"{to_markdown(ranks)}\n\n{to_markdown(trees)}\n\n{tau}"


class Trials(NamedTuple):
    """What K heads drafted in R ranks at P positions, along the text that followed there."""

    log_q: Tensor  # [P, K, R] log-probabilities, the most likely token first
    right: Tensor  # [P, K, R] bool: it was the text's next token
    known: Tensor  # [P, K] bool: the text is long enough to tell

    @classmethod
    def join(cls, parts: Iterable[Trials]) -> Trials:
        """All of them together. Raises ValueError if there are none."""
        columns = [torch.cat(c) for c in zip(*parts, strict=True)]
        if not columns or not len(columns[0]):
            raise ValueError("there is no position to measure at: every answer ended with its first token")
        return cls(*columns)

    @property
    def reached(self) -> Tensor:
        """Where a head's tokens count, [P, K] bool: the heads before had the true tokens among their ranks."""
        found = self.right.any(dim=2)
        before = torch.cat([torch.ones_like(found[:, :1]), found[:, :-1]], dim=1)
        return self.known & before.cumprod(dim=1).bool()


TryOut: TypeAlias = Callable[[Sequence[int], Sequence[int]], Trials]  # along an answer to a prompt


def measure(target: Target, try_out: TryOut, prompts: Sequence[list[int]], max_new_tokens: int) -> Trials:
    """The drafts along the target's own answers to the prompts."""
    chunks = stream(target, prompts, NGramProposer(), batch_size=1, max_new_tokens=max_new_tokens, text=False)
    answers = (chunk.answer for chunk in chunks if chunk.answer)
    trials = []
    for answer in tqdm(answers, total=len(prompts), unit="answer", disable=None):
        if answer.error is not None:
            raise ValueError(answer.error)
        if len(answer.tokens) > 1:
            trials.append(try_out(answer.prompt, answer.tokens))
    return Trials.join(trials)


@torch.no_grad()
def try_head(target: Target, proposer: HeadProposer, prompt: Sequence[int], answer: Sequence[int]) -> Trials:
    """What the heads draft at each position of an answer of the target.

    Each head drafts after the true text, on the target's features: as in a tree that is right so far.
    """
    tokens = [*prompt, *answer]
    _, features = read_texts(target.open(1, proposer.layers), [tokens])
    assert features is not None
    text = torch.tensor(tokens, device=target.device)
    first, last = len(prompt) - 1, len(tokens) - 2  # the last committed token; the root follows it
    parts = [(begin, min(begin + CHUNK, last)) for begin in range(first, last, CHUNK)]
    return Trials.join(_try_part(target, proposer, features, text, *part) for part in parts)


@torch.no_grad()
def try_draft_model(draft: Target, prompt: Sequence[int], answer: Sequence[int]) -> Trials:
    """What a draft model drafts at each position of an answer of the target.

    After the true text it drafts the same at every depth: one pass tells all.
    """
    text = torch.tensor([*prompt, *answer])
    first, last = len(prompt), len(text) - 1  # the roots
    verdict = Session(draft, 1).verify(Tree.chain([text[:last].tolist()]), only=range(first, last))
    ids, likely = (part.cpu() for part in top_tokens(verdict.logits[0], RANKS))  # [P, R]
    listed = getattr(draft.config, "draft_tokens", None)
    if listed is not None and verdict.logits.shape[-1] == len(listed):
        ids = torch.tensor(listed)[ids]
    right, count = ids == text[first + 1 :, None], last - first
    places = torch.arange(count)[:, None] + torch.arange(DEPTH)  # [P, K]
    known, places = places < count, places.clamp(max=count - 1)
    return Trials(likely[places], right[places], known)


def _try_part(target: Target, proposer: HeadProposer, features: Tensor, text: Tensor, begin: int, end: int) -> Trials:
    drafter = proposer.start_along(target, features, text, begin, end)
    padded = torch.cat([text, text.new_full((proposer.depth,), -1)])
    log_q, right, known = [], [], []
    for level in range(proposer.depth):
        truth = padded[begin + 2 + level : end + 2 + level, None]  # [P, 1]
        ids, likely = top_tokens(drafter.logits(level), min(RANKS, proposer.most_ranks))  # [P, 1, R]
        log_q.append(likely[:, 0])
        right.append(proposer.head.tokens(ids[:, 0]) == truth)
        known.append(truth[:, 0] >= 0)
        if level + 1 < proposer.depth:
            drafter.extend(torch.zeros_like(truth), truth.clamp(min=0))
    return Trials(*(torch.stack(parts, dim=1).cpu() for parts in (log_q, right, known)))


def fit_calibration(trials: Trials) -> Calibration:
    """How often each rank was right, and the confidences with the highest likelihood (see `Calibration`)."""
    reached = trials.reached
    counts = reached.sum(dim=0)  # [K]
    right = trials.right & reached[:, :, None]
    acceptance = right.sum(dim=0) / counts[:, None].clamp(min=1)
    path = torch.zeros(len(reached), dtype=torch.float64)  # the score of the true path so far
    confidence = []
    for level in range(reached.shape[1]):
        here = reached[:, level]
        odds = log_odds(trials.log_q[here, level].double())  # [P, R]
        inputs = torch.stack([torch.ones_like(odds), odds, path[here, None].expand_as(odds)], dim=2)
        weights = fit_logistic(inputs.flatten(0, 1), right[here, level].flatten())
        confidence.append(tuple(weights.tolist()))
        scores = torch.nn.functional.logsigmoid(inputs @ weights)
        path[here] += scores.where(right[here, level], 0).sum(dim=1)
    return Calibration(tuple(map(tuple, acceptance.tolist())), tuple(confidence), tuple(counts.tolist()))


def fit_logistic(inputs: Tensor, outcomes: Tensor) -> Tensor:
    """The weights [3] for which sigmoid(inputs @ weights) predicts the outcomes best; inputs [N, 3].

    Maximum likelihood with a weak prior for the head's own probabilities: few outcomes must not give certainty.
    """
    start = torch.tensor(UNCALIBRATED, dtype=inputs.dtype)
    weights = start.clone().requires_grad_()
    optimizer = torch.optim.LBFGS([weights], max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        error = torch.nn.functional.binary_cross_entropy_with_logits(inputs @ weights, outcomes.to(inputs.dtype))
        value = error + PRIOR / len(inputs) * ((weights - start) ** 2).sum()
        value.backward()
        return value

    if len(inputs):
        with torch.enable_grad():
            optimizer.step(loss)
    return weights.detach()


if __name__ == "__main__":
    main()
