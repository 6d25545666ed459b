"""A head served in vLLM, compared with Draftless: the same prompts, and chains of as many draft tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import eq
from pathlib import Path

from decode import Stats, Target, stream
from decode.models.user_cache import print_notice
from heads.checkpoint import load_head
from proposers import HEAD_PROPOSERS
from scripts.benchmark.tables import to_markdown
from scripts.serving.engine import Answers, EngineFailure, Request, ask_engine
from scripts.serving_rules.folder import Finding, error, warning
from scripts.serving_rules.trial import PROMPTS

SERVED = ("eagle", "eagle3", "medusa")
DTYPES = ("float32", "bfloat16", "float16")
NEW_TOKENS = 96
LEAST_SHARE = 0.8  # of the draft tokens accepted in Draftless


@dataclass(frozen=True)
class Side:
    """One column of the table: what a program accepted, and how many of its texts are vLLM's own without a head."""

    drafts: int
    accepted: list[int]  # [i]: drafts whose token i was accepted
    equal_texts: int

    @property
    def tokens_per_draft(self) -> float:
        """The bonus token included; the prefill, which has no draft, is not counted."""
        return 1 + sum(self.accepted) / max(self.drafts, 1)

    def list_cells(self, texts: int) -> list[str]:
        shares = [f"{count / max(self.drafts, 1):.3f}" for count in self.accepted]
        return [f"{self.equal_texts} of {texts}", str(self.drafts), *shares, f"{self.tokens_per_draft:.2f}"]


@dataclass(frozen=True)
class ServedResult:
    """A head in vLLM and in Draftless."""

    kind: str
    dtype: str
    vllm: Side
    draftless: Side
    texts: int
    tokens: int
    versions: dict[str, str]
    minutes: float  # of both of vLLM's runs, with and without the head
    gigabytes: float

    def describe(self) -> str:
        positions = [f"accepted at position {place}" for place, _ in enumerate(self.vllm.accepted, start=1)]
        names = ["text as in vLLM without it", "drafts", *positions, "tokens per draft, bonus token included"]
        head = [f"{self.kind}, {len(positions)} draft tokens", f"vLLM {self.versions['vllm']}", "Draftless"]
        cells = (side.list_cells(self.texts) for side in (self.vllm, self.draftless))
        versions = ", ".join(" ".join(pair) for pair in self.versions.items())
        return (
            f"{to_markdown([head, *zip(names, *cells, strict=True)])}\n\n"
            f"{self.texts} prompts, {self.tokens} tokens, greedy, {self.dtype}; {versions}. "
            f"vLLM took {self.minutes:.1f} minutes for two runs, and {self.gigabytes:.1f} GiB of memory"
        )

    def check(self) -> Iterator[Finding]:
        """What is wrong with the served head."""
        if self.vllm.equal_texts < self.texts:
            text = (
                f"{self.texts - self.vllm.equal_texts} of {self.texts} texts differ from vLLM's without the head. "
                "Rounding can do that where two tokens nearly tie, above all in bfloat16"
            )
            yield warning("vllm", "served-text-differs", text)
        ours, theirs = self.draftless.tokens_per_draft, self.vllm.tokens_per_draft
        if theirs - 1 < LEAST_SHARE * (ours - 1):
            text = f"{theirs:.2f} tokens per draft, but {ours:.2f} in Draftless: vLLM drafts something else"
            yield error("vllm", "served-accepts-less", text)


def serve_head(
    folder: Path, kind: str, draft_tokens: int, target: Target, python: str
) -> tuple[ServedResult | None, list[Finding]]:
    """The comparison and its findings; or None and the reason why vLLM does not serve the head.

    python: one that can import vLLM. Raises ValueError for a target in a dtype that vLLM does not have.
    """
    dtype, model = str(target.dtype).removeprefix("torch."), str(target.model.name_or_path)
    if dtype not in DTYPES:
        raise ValueError(f"vLLM has no {dtype}; give --dtype {', '.join(DTYPES)}")
    prompts, ours, stats = draft_chains(folder, target, draft_tokens)
    model = str(Path(model).resolve()) if Path(model).is_dir() else model
    request = Request(model, dtype, prompts, sorted(target.stop_ids), NEW_TOKENS, draft_tokens)
    name, fault = "engine-fails", "vLLM does not serve the model, with this head or without it"
    try:
        print_notice(f"vLLM answers {len(prompts)} prompts without the head")
        plain = ask_engine(python, request)
        name, fault = "engine-refuses", f"vLLM {plain.versions['vllm']} serves the model, but not with this head"
        print_notice("vLLM answers them with the head")
        served = ask_engine(python, replace(request, head=str(folder.resolve()), method=kind))
    except EngineFailure as reason:
        return None, [error("vllm", name, f"{fault}: {reason}")]
    result = compare(kind, dtype, plain, served, ours, stats)
    return result, list(result.check())


def draft_chains(folder: Path, target: Target, count: int) -> tuple[list[list[int]], list[list[int]], Stats]:
    """Draftless's side: the prompts' tokens, the answers, and the counts of chains of `count` draft tokens.

    The head is in the target's dtype, as in vLLM. Answers are made longer than wanted and cut, because vLLM's last
    draft is a whole one, too.
    """
    head = load_head(folder, target.dtype, target.vocabulary, target.config.num_hidden_layers)
    proposer = HEAD_PROPOSERS[head.kind](head, depth=count, width=1, nodes=count + 1)
    made, stats, answers = Counter[int](), Stats(accepted_by_depth=[0] * count), {}
    for chunk in stream(target, PROMPTS, proposer, max_new_tokens=NEW_TOKENS + count, text=False):
        if 0 < made[chunk.request_id] < NEW_TOKENS:  # the prefill has no draft
            stats.add(chunk.stats)
        made[chunk.request_id] += len(chunk.tokens)
        if chunk.answer is not None:
            answers[chunk.request_id] = chunk.answer
    ordered = [answers[place] for place in range(len(PROMPTS))]
    return [answer.prompt for answer in ordered], [answer.tokens[:NEW_TOKENS] for answer in ordered], stats


def compare(
    kind: str, dtype: str, plain: Answers, served: Answers, ours: Sequence[Sequence[int]], stats: Stats
) -> ServedResult:
    """vLLM with the head and Draftless with the head, their texts compared with vLLM's without it."""
    equal = [sum(map(eq, plain.tokens, tokens)) for tokens in (served.tokens, ours)]
    return ServedResult(
        kind,
        dtype,
        Side(served.drafts, served.accepted, equal[0]),
        Side(stats.steps, stats.accepted_by_depth, equal[1]),
        texts=len(plain.tokens),
        tokens=sum(map(len, plain.tokens)),
        versions=served.versions,
        minutes=(plain.seconds + served.seconds) / 60,
        gigabytes=max(plain.gigabytes, served.gigabytes),
    )
